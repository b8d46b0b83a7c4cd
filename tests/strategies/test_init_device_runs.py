"""Initial values of sharded modules on two processes: those of one process, wherever the layers are built."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.deepspeed_runs import SHARD_ALL, gather_full
from tests.helpers.init_device_models import Block, Rotary, from_pretrained
from tests.helpers.processes import run_distributed
from trainer import ConfigError, TrainModule
from trainer.precision import PRECISIONS
from trainer.seed import rng_state
from trainer.strategies import FSDPStrategy, Strategy
from trainer.strategies.deepspeed.partitioning import is_zero3_partitioned
from trainer.strategies.deepspeed.strategy import DeepSpeedStage3Strategy

STRATEGIES: dict[str, Callable[[Any], Strategy]] = {
    "fsdp": lambda init_device: FSDPStrategy(init_device=init_device),
    "ZeRO-3": lambda init_device: DeepSpeedStage3Strategy(SHARD_ALL, init_device=init_device),
}
INIT_DEVICES = ("cpu", "mixed", "meta")


class Built(TrainModule):
    """A module that builds all layers but one in `configure_model`."""

    def __init__(self, build: Callable[[Any], None]) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.build = build

    def configure_model(self) -> None:
        self.build(self)
        self.built_in_full = all(parameter.numel() for parameter in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def model(module: Any) -> None:
    """Build layers that initialize themselves: tied and frozen weights, tables that no checkpoint has."""
    module.embedding = nn.Embedding(7, 4)
    module.blocks = nn.ModuleList(Block() for _ in range(3))
    module.norm = nn.BatchNorm1d(4)
    module.norm.weight.requires_grad_(False)
    module.rotary = Rotary()
    module.head = nn.Linear(4, 7, bias=False)
    module.head.weight = module.embedding.weight


def initialized_by_hand(module: Any) -> None:
    """Initialize all layers again at the end, as many models do; one buffer is complex."""
    model(module)
    module.register_buffer("phases", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
    module.register_buffer("turned", torch.rand(2, 3).t())

    def initialize(layer: nn.Module) -> None:
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            nn.init.normal_(layer.weight, std=0.02)

    module.apply(initialize)


def looking_at_values(module: Any) -> None:
    """Read a value, which the meta device cannot do."""
    module.net = from_pretrained()
    module.drops = nn.ModuleList(nn.Dropout(rate.item()) for rate in torch.arange(4) / 10)
    module.slopes = torch.arange(4) * 0.5


def pretrained_on_rank_0(module: Any) -> None:
    on_meta = torch.get_default_device() == torch.device("meta")
    module.net = nn.Linear(2, 2) if on_meta else from_pretrained()


def without_initializer(module: Any) -> None:
    module.weight = nn.Parameter(torch.ones(3, 3))


def values_of(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return all full tensors, including those that no checkpoint has."""
    return {
        **{n: b.clone() for n, b in strategy.module.named_buffers()},
        **gather_full(strategy, strategy.module_state()),
    }


def on_one_process(build: Callable[[Any], None], seed: int = 5) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    torch.manual_seed(seed)
    module = Built(build)
    module.configure_model()
    return {**{n: b.clone() for n, b in module.named_buffers()}, **module.state_dict()}, rng_state()


def start(strategy: Strategy, build: Callable[[Any], None], will_load_checkpoint: bool = False) -> Built:
    """Build a module and set it up, with differently seeded generators on every process."""
    torch.manual_seed(5 + strategy.processes.rank)
    module = Built(build)
    with strategy.init_context(module, will_load_checkpoint):
        module.configure_model()
    return module


def differences(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that differ."""
    return [n for n in {**ours, **others} if n not in ours or n not in others or not torch.equal(ours[n], others[n])]


def same_rng(ours: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether the generators of torch, numpy and Python are in the same states."""
    return all(str(ours[name]) == str(others[name]) for name in ("numpy", "python")) and torch.equal(
        ours["torch"], others["torch"]
    )


def refusal(strategy: Strategy, build: Callable[[Any], None]) -> str:
    try:
        strategy.setup_module(start(strategy, build), for_training=True)
    except ConfigError as error:
        return str(error)
    return "nothing"


def on_each_process(name: str) -> dict[str, Any]:
    """Build in every way on this process; `different` names what is not as on one process."""
    found: dict[str, Any] = {"different": {}, "rng": {}, "tied": {}, "partitioned": {}, "resumed": {}, "refused": {}}
    found["built in full"] = {}

    def strategy(init_device: str) -> Strategy:
        made = STRATEGIES[name](init_device)
        made.setup_environment("cpu", PRECISIONS["32-true"])
        return made

    cases: list[tuple[str, Callable[[Any], None]]] = [(init_device, model) for init_device in INIT_DEVICES]
    cases += [(init_device, initialized_by_hand) for init_device in ("cpu", "mixed")]
    cases += [("cpu", looking_at_values), ("mixed", pretrained_on_rank_0)]
    for init_device, build in cases:
        case = f"{build.__name__}, {init_device}"
        running = strategy(init_device)
        expected = on_one_process(build)[0]
        alone = on_one_process(build, 5 + running.processes.rank)[1]
        module: Any = start(running, build)
        found["partitioned"][case] = [is_zero3_partitioned(p) for p in module.parameters()]
        found["built in full"][case] = module.built_in_full
        running.setup_module(module, for_training=False)
        found["rng"][case] = same_rng(rng_state(), alone)
        found["different"][case] = differences(values_of(running), expected)
        if build is model:
            found["tied"][case] = module.head.weight is module.embedding.weight
        if build is looking_at_values:
            found["slopes"] = module.slopes
        running.teardown()
    for init_device in INIT_DEVICES:
        running = strategy(init_device)
        module = start(running, model, will_load_checkpoint=True)
        running.setup_module(module, for_training=False)
        state = {n: value + 1 for n, value in on_one_process(model)[0].items() if n in module.state_dict()}
        running.load_module_state(state)
        tables = {n: value for n, value in on_one_process(model)[0].items() if n not in state}
        found["resumed"][init_device] = differences(values_of(running), {**tables, **state}), sorted(tables)
        running.teardown()
    found["refused"] = refusal(strategy("meta"), without_initializer)
    return found


@pytest.fixture(scope="module", params=STRATEGIES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    if request.param == "ZeRO-3":
        pytest.importorskip("deepspeed")
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("built"))
    try:
        return request.param, run_distributed(on_each_process, 2, request.param)
    finally:
        os.chdir(before)


Found = tuple[str, list[dict[str, Any]]]


def test_the_values_are_those_of_one_process(found: Found) -> None:
    """Weights, buffers and the tables that no checkpoint has, on every process, though each has another seed."""
    for rank in found[1]:
        assert [*rank["different"].values()] == [[]] * 7
        assert torch.equal(rank["slopes"], torch.arange(4) * 0.5)


def test_the_generators_are_where_the_construction_leaves_them(found: Found) -> None:
    first, other = (rank["rng"] for rank in found[1])
    assert all(first.values())
    assert other == {case: case.endswith("cpu") for case in other}  # others draw nothing on the meta device


def test_tied_weights_stay_tied(found: Found) -> None:
    assert all(tied for rank in found[1] for tied in rank["tied"].values())


def test_zero_3_partitions_all_weights_when_configure_model_is_done(found: Found) -> None:
    name, ranks = found
    for rank in ranks:
        assert all(rank["built in full"].values())  # not layer by layer while they are built
        for partitioned in rank["partitioned"].values():
            assert set(partitioned) == {name == "ZeRO-3"}


def test_a_resumed_run_has_the_weights_of_the_checkpoint_and_the_tables_of_the_construction(found: Found) -> None:
    for rank in found[1]:
        for different, tables in rank["resumed"].values():
            assert different == []
            assert tables == [
                *(f"blocks.{number}.rotary.{name}" for number in range(3) for name in ("inv_freq", "mask")),
                "rotary.inv_freq",
                "rotary.mask",
            ]


REFUSAL = (
    "Built: weight: no init_weights or reset_parameters gives them values. Define one in the module that has them, or "
    "give init_device='mixed' or 'cpu'."
)


def test_what_cannot_be_given_is_refused_on_all_processes(found: Found) -> None:
    assert [rank["refused"] for rank in found[1]] == [REFUSAL, REFUSAL]
