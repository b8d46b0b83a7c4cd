"""The facts of a run: where it writes, what it was configured as, and whether that is the same elsewhere."""
