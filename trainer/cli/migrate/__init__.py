"""The command `trainer migrate`."""
