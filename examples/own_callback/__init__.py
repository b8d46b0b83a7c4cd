"""Callbacks of one's own: a class with one method, and one with state that survives a restart."""
