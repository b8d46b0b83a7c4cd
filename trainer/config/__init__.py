"""Turn configuration files and command-line options into objects."""

import trainer
from trainer.errors import refuse_other_package

refuse_other_package(trainer)
