"""The studies: one room each, with its work, rows, figures and verb."""
