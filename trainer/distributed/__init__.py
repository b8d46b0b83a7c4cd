"""Find the place of a process among the others, the devices of its machine, and the way to the other processes."""
