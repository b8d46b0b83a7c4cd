"""Functions of a module: its blocks, memory, weights, compilation."""

import trainer
from trainer.errors import refuse_other_package

refuse_other_package(trainer)
