"""`trainer plan`: how to divide a model over processes."""
