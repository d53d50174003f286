"""Train, compare and draw: everything that may use the ecosystem."""
