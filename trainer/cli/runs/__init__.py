"""The command `trainer runs`."""
