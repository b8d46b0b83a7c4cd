"""The checkpoint format, and its way to a disk or object store and back."""
