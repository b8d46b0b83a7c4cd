"""`trainer plan`: how to split a model over processes."""
