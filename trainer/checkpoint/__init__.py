"""What a checkpoint contains, and how it gets on the disk and back."""
