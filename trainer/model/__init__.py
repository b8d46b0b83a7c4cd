"""Functions of a module: its blocks, memory, weights, compilation."""
