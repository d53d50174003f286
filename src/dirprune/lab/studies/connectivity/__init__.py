"""Mode connectivity between two runs."""
