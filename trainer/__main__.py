"""The command `trainer`, also as `python -m trainer`."""

from __future__ import annotations

import sys

from trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
