"""Data: where batches come from, which process gets which samples, and how far a run has read."""
