"""From a finished run to what is shipped."""
