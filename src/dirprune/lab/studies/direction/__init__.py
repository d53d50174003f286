"""Directional pruning in trained networks: projections on eigenspaces, and one-shot pruning."""
