from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.messages import raises_recorded
from trainer.errors import ConfigError
from trainer.seed import (
    PrivateRng,
    derive_seed,
    isolated_rng,
    rng_state,
    seed_cpu_generators,
    seed_everything,
    set_deterministic,
    set_rng_state,
)


def draw() -> list[float]:
    return [torch.rand(()).item(), torch.randn(()).item(), np.random.rand(), np.random.randn(), random.gauss(0, 1)]


@pytest.mark.parametrize("seed", [7, 0, 2**32 + 1, 2**63 - 1])
def test_seed_everything_repeats(seed: int) -> None:
    seed_everything(seed)
    first = draw()
    seed_everything(seed)
    assert draw() == first
    seed_everything(seed ^ 1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "1", True])
def test_bad_seeds(seed: Any) -> None:
    with raises_recorded(ConfigError):
        seed_everything(seed)


def test_derive_seed_is_stable_and_distinguishes_its_parts() -> None:
    # A literal: today's checkpoints have to give the same sample order in later versions.
    assert derive_seed(42, "sampler", 3) == 3745633445695599010
    seeds = {derive_seed(*parts) for parts in [(1, 2), (12,), ("1", 2), ("12",), (2, 1), (), ("",), ("1", "2")]}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_state_is_data_and_comes_back_through_json() -> None:
    draw()  # leaves a second normal number in numpy and random, which is part of their state
    state = rng_state()
    expected = draw()

    def to_json(value: Any) -> Any:
        assert isinstance(value, torch.Tensor), type(value)
        return {"dtype": str(value.dtype).removeprefix("torch."), "data": value.tolist()}

    def from_json(value: dict[str, Any]) -> Any:
        return torch.tensor(value["data"], dtype=getattr(torch, value["dtype"])) if "dtype" in value else value

    text = json.dumps(state, default=to_json)
    draw()
    set_rng_state(json.loads(text, object_hook=from_json))
    assert draw() == expected


def test_state_does_not_move_on_with_the_generators() -> None:
    state = rng_state()
    first = draw()
    set_rng_state(state)
    draw()
    set_rng_state(state)
    assert draw() == first


def test_isolated_rng_also_after_an_error() -> None:
    state = rng_state()
    expected = draw()
    set_rng_state(state)

    def fail() -> None:
        with isolated_rng(torch.device("cpu")):
            draw()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert draw() == expected


def test_lightnings_isolate_rng() -> None:
    from trainer.utilities.seed import isolate_rng  # type: ignore[import-not-found]

    for arguments in ({}, {"include_cuda": False}):
        before = torch.get_rng_state()
        with isolate_rng(**arguments):
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)


def test_isolated_rng_of_further_generators() -> None:
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    with isolated_rng(generators=[generator]):
        torch.rand(2, generator=generator)
    assert torch.equal(generator.get_state(), state)


def test_private_rng_also_after_an_error() -> None:
    np.random.rand(), random.gauss(0, 1)  # leaves a second normal number in random
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    private, drawn = PrivateRng(), []

    def fail() -> None:
        with private:
            seed_cpu_generators(2**64 - 1)
            drawn.append(draw())
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        np.testing.assert_equal(np.random.get_state(legacy=False), before[2])
    assert drawn[0] == drawn[1]


@pytest.mark.gpu
def test_isolated_rng_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    state = rng_state(device)
    expected = torch.rand(3, device=device)
    set_rng_state(state, device)
    with isolated_rng(device):
        torch.rand(5, device=device)
    assert torch.equal(torch.rand(3, device=device), expected)


@pytest.fixture
def _torch_settings() -> Iterator[None]:
    undo = set_deterministic(False)
    yield
    undo()


@pytest.mark.usefixtures("_torch_settings")
def test_set_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.backends.cudnn.benchmark = True
    undo = set_deterministic("warn")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark
    undo()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    set_deterministic(True)
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    set_deterministic(False, benchmark=True)
    assert torch.are_deterministic_algorithms_enabled()  # a setting of the user's own stays
    assert torch.backends.cudnn.benchmark
