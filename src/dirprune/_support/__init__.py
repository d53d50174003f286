"""What the rooms of the library share."""
