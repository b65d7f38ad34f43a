"""One module for each command, or for each family of commands."""
