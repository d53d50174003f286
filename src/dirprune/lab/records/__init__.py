"""Files of runs and tables: written atomically, checked when read."""
