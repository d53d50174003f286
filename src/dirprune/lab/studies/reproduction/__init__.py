"""The paper's tables, run again cell by cell."""
