"""Stand in for Lightning in a process whose PYTHONPATH has this folder; the other two files are links to this one."""

import trainer.compat.lightning  # noqa: F401 - which replaces this module in sys.modules
