"""Logged values: accumulated on the device, reduced over processes."""
