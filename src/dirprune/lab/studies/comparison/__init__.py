"""The comparison of pruning methods."""
