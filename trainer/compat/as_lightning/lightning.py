"""Stand in the place of Lightning for a process whose PYTHONPATH has this folder; `pytorch_lightning` is a link."""

import trainer.compat.lightning  # noqa: F401 - which replaces this module in sys.modules
