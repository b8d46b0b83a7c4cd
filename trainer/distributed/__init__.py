"""Detect the ranks of a process and the devices of its machine, and connect it with the other processes."""
