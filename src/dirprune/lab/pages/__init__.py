"""Pages that a browser shows offline: what a command found, as one HTML file that needs nothing else."""
