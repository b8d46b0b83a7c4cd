"""`trainer checkpoint`: list, show, verify and export checkpoints."""
