"""Stopping together, noticing what hangs or died, and reporting it."""
