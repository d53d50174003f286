"""The theorem, measured on problems small enough to solve exactly."""
