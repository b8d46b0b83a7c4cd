"""Worked examples: each is small, real and run by a test; `examples/README.md` says how to run them."""
