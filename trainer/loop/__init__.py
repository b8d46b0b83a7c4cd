"""What surrounds the training loop: set-up, evaluation, and the contents of a checkpoint."""
