"""Watchers of a step: bad steps, numbers that are not finite, skipped batches, what trains and how."""
