"""Names: those that installed packages add, other names of the same thing, and the way to the words for all others."""
