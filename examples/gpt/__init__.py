"""A small GPT that learns to write Python from Python's own standard library."""

from examples.gpt.data import LibraryText
from examples.gpt.module import GPT

__all__ = ["GPT", "LibraryText"]
