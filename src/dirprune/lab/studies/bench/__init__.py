"""What a training step costs, beside the arithmetic floor and the paper's figures."""
