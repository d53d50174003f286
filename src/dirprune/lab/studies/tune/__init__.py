"""Choose how much to prune, on held-out training data: by a tolerance, or by the paper's rule."""
