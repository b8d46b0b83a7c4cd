"""One generator of programs as users write them, and a reference loop that shares nothing with the product.

`python -m tests.helpers.programs 17` draws program 17, runs it, and prints what differs. `blocks.py` has the registry:
a class in `data.py`, `training.py` or `interruptions.py` is a block, and knows what it means for both loops.
"""
