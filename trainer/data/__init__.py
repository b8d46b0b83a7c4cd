"""Data: where batches come from, which process gets which samples, and how far a run has read."""

from trainer.names.paths import answer_further_names as _answer_further_names

_answer_further_names(__name__)
