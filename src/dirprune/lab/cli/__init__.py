"""The commands: the application, its output and its progress displays."""
