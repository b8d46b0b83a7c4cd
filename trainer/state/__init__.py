"""State that a checkpoint has beside the weights, and how it is put back."""
