"""Sums by which the frozen weights of a checkpoint of trained weights are recognized."""

from __future__ import annotations

import pytest
import torch

from trainer.checkpoint.base_weights import weight_sums


def sum_of(value: torch.Tensor, rounded: bool = True) -> int:
    return weight_sums({"w": value}, ["w"], lambda parts: [parts], rounded)["w"]


@pytest.mark.parametrize("rounded", [True, False])
def test_both_parts_of_complex_weights_count(rounded: bool) -> None:
    small = torch.polar(torch.full((4,), 0.25), torch.arange(4.0))
    other_phase = torch.polar(torch.full((4,), 0.25), torch.arange(4.0) + 0.5)
    sums = [sum_of(value, rounded) for value in (small, other_phase, small.conj(), small.real, torch.zeros_like(small))]
    assert len({*sums}) == len(sums)
    assert sum_of(small.clone(), rounded) == sums[0]
    assert sum_of(small.conj().resolve_conj(), rounded) == sums[2]
