"""Compare any runs."""
