"""From a recipe to a trained network and its run directory."""
