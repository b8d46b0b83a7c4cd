"""The command line: one file or package per command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # with it, a type checker would accept every name

    def __getattr__(name: str) -> object:
        import sys

        from trainer.compat.finder import lightning_name

        return lightning_name(sys.modules[__name__], name)
