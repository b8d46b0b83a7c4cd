"""Where a process is among the others, and how they find each other."""
