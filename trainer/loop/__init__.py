"""Set up, evaluate, checkpoint and end runs, around the training loop."""
