"""Processes: which one this is, how several are started, seeded, stopped together, and how they fail."""
