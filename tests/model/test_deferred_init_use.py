"""Deferred initialization: how much memory it takes, what it gives to whom, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from examples.gpt.model import Transformer
from tests.helpers.processes import run_python
from tests.model.test_deferred_init import Built, real_and_recorded, tensors, values_of
from trainer.errors import ConfigError
from trainer.model.deferred_init import DeferredInit
from trainer.seed import seed_everything

# -- memory ------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the real tensors that operators make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return result


class Deep(nn.Module):
    """Twenty large layers, initialized several times over, the last time when all of them are there."""

    def __init__(self, initialize: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(100, 100) for _ in range(20))
        self.apply(lambda layer: nn.init.xavier_uniform_(layer.weight) if isinstance(layer, nn.Linear) else None)
        for layer in self.layers:
            initialize(layer.weight)
        for number, layer in enumerate(self.layers):
            layer.weight.data.mul_(0.5).div_(math.sqrt(number + 1))
            nn.init.zeros_(layer.bias)


@pytest.mark.parametrize(
    ("initialize", "bound"),
    [
        # The tensor itself, and at most one more while an operator runs.
        (nn.init.normal_, 2.1),
        (lambda w: w.data.fill_(0.5), 2.1),
        # Its values are looked at: candidates, masks, and the tensor.
        (nn.init.trunc_normal_, 4.5),
        # Q, R and the matrix that is decomposed.
        (nn.init.orthogonal_, 5),
    ],
)
def test_only_a_few_tensors_are_alive_at_a_time(initialize: Callable[[torch.Tensor], Any], bound: float) -> None:
    live = LiveBytes()
    seen = []
    module = Built(lambda: Deep(initialize))
    recording = DeferredInit(module)
    with live:
        with recording:
            module.configure_model()
        recording.materialize(lambda name, value: seen.append(name))
    assert len(seen) == 40
    assert 40_000 <= live.most < bound * 40_000  # of 800 kB in all


def test_the_process_never_grows_by_the_whole_model() -> None:
    source = """
import resource, torch
from torch import nn
from tests.helpers.processes import run_python
from trainer.model.deferred_init import DeferredInit

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.number = layers
    def configure_model(self):
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(self.number))
        self.apply(lambda layer: nn.init.normal_(layer.weight) if isinstance(layer, nn.Linear) else None)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(module):
    total = []
    recording = DeferredInit(module)
    with recording:
        module.configure_model()
    recording.materialize(lambda name, value: total.append(value.numel()))
    return sum(total)

run(Net(1))
before = peak()
numbers = run(Net(20))
print(numbers * 4 / 2**20, peak() - before)
"""
    total, grown = map(float, run_python(source).check().stdout.split())
    assert total == 160  # MiB, in tensors of 8
    assert grown < 32


# -- what is given, and to whom ----------------------------------------------------------------------------------------


def test_the_random_numbers_after_the_recording_are_those_before_it_until_the_values_are_there() -> None:
    module = Built(lambda: nn.Linear(3, 3))
    before = torch.get_rng_state()
    recording = DeferredInit(module)
    with recording:
        module.configure_model()
    assert torch.equal(torch.get_rng_state(), before)


def test_only_some_values_and_no_more_draws_than_these_need() -> None:
    real, _, recording, _ = real_and_recorded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    before = torch.get_rng_state()
    values = values_of(recording, only=lambda name: name == "net.1.weight", advance=False)
    assert list(values) == ["net.1.weight"]
    assert torch.equal(values["net.1.weight"], real.net[1].weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shared_parameter_comes_once_by_its_first_name() -> None:
    _, module, recording, _ = real_and_recorded(lambda: Transformer(20, 8, 1, 2, 8, 0.0))
    assert module.net.head.weight is module.net.token_embedding.weight
    assert "net.token_embedding.weight" in values_of(recording)
    assert "net.head.weight" not in recording.names


def test_names_stay_those_of_the_plain_module_when_it_is_wrapped_and_allocated_meanwhile() -> None:
    real, module, recording, _ = real_and_recorded(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    places = tensors(module)
    module.net.to_empty(device="cpu")
    module.net = nn.Sequential(module.net)
    assert list(values_of(recording)) != []
    assert set(recording.names) == {name for name in places if name.startswith("net.")}
    assert torch.equal(values_of(recording)["net.0.weight"], real.net[0].weight)


def test_layers_from_before_that_are_changed_come_too() -> None:
    class Mixed(Built):
        def configure_model(self) -> None:
            super().configure_model()
            nn.init.normal_(self.before.weight)
            self.before.weight.data.mul_(2)
            with torch.no_grad():
                self.before.weight[0] = 1.0
                self.before.bias.copy_(self.net.bias[:2])
            self.norm = nn.Parameter(self.before.weight.detach().norm())
            self.after = nn.Linear(2, 2)

    outcomes = []
    for recorded in (False, True):
        seed_everything(5)
        module = Mixed(lambda: nn.Linear(3, 3))
        if not recorded:
            module.configure_model()
            outcomes.append(tensors(module))
            continue
        untouched = module.before.weight.clone()
        recording = DeferredInit(module)
        with recording:
            module.configure_model()
        assert torch.equal(module.before.weight, untouched)
        assert {"before.weight", "before.bias"} <= set(recording.names)
        outcomes.append(values_of(recording))
        assert torch.equal(module.before.weight, outcomes[0]["before.weight"])
    assert outcomes[0].keys() == outcomes[1].keys()
    assert all(torch.equal(value, outcomes[1][name]) for name, value in outcomes[0].items())


def test_plain_attributes_get_their_values_in_place() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.arange(4) * 0.5
            self.tables = {"sine": torch.arange(3.0).sin(), "all": [torch.randn(2), 5]}

    real, module, recording, after = real_and_recorded(Plain)
    assert values_of(recording) == {}
    assert torch.equal(module.net.slopes, real.net.slopes)
    assert torch.equal(module.net.tables["sine"], real.net.tables["sine"])
    assert torch.equal(module.net.tables["all"][0], real.net.tables["all"][0])
    assert torch.equal(torch.get_rng_state(), after)


def test_a_generator_of_ones_own_ends_where_it_would() -> None:
    def make(generator: torch.Generator) -> nn.Module:
        layer = nn.Linear(3, 3)
        nn.init.normal_(layer.weight, generator=generator)
        torch.randperm(5, generator=generator)
        return layer

    one, other = (torch.Generator().manual_seed(4) for _ in range(2))
    expected = make(one).weight
    module = Built(lambda: make(other))
    recording = DeferredInit(module)
    with recording:
        module.configure_model()
    assert torch.equal(values_of(recording)["net.weight"], expected)
    assert torch.equal(one.get_state(), other.get_state())


def test_an_array_that_changes_before_its_values_are_read_is_told() -> None:
    array = np.ones(3, dtype=np.float32)

    class Net(nn.Module):
        def configure_model(self) -> None:
            self.layer = nn.Linear(3, 3)
            self.layer.bias.data.copy_(torch.from_numpy(array))

    module = Net()
    recording = DeferredInit(module)
    with recording:
        module.configure_model()
    array[0] = 2
    with pytest.raises(ConfigError, match=r"was copied into Net in configure_model, and was changed afterwards"):
        values_of(recording)


def test_what_cannot_be_recorded_is_told_with_the_line() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.weight.data.copy_(torch.eye(3).to_sparse().to_dense())
        return layer

    with pytest.raises(
        ConfigError, match=r"(?s)configure_model calls aten.*test_deferred_init_use\.py.*in make.*__init__"
    ):
        real_and_recorded(make)
    assert not torch.empty(1).is_meta  # the context is left
