"""The command line: one file or package per command."""

from trainer.names.paths import answer_further_names as _answer_further_names

_answer_further_names(__name__)
