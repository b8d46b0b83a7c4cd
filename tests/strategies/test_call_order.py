"""Processes that come to the blocks of a module in different orders get an error, not wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.helpers.processes import fork_ranks, run_distributed
from tests.helpers.strategy_models import FEATURES, MLP
from tests.helpers.strategy_runs import WAYS, skip_if_missing
from trainer import TrainModule, seed_everything
from trainer.distributed.process_group import SingleProcess
from trainer.strategies.call_order import CallOrder

pytestmark = pytest.mark.timeout(300)

NAMES = ("FSDP x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
SAMPLES, GLOBAL_BATCH, CHANGE_AT = 24, 8, 1
WORDS = "all processes have to come to the parts of the module in one order"


class Blocks(TrainModule):
    """Blocks of equal sizes, called in an order that changes in a step.

    Args:
        kind: "left out": each rank leaves out another block; "swapped": rank 1 calls two blocks in another order;
            "no gradient": rank 1 uses no gradient of a block; "swapped by all", "left out by all".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        order, kind = [0, 1, 2, 3], self.kind if step >= CHANGE_AT else ""
        if kind == "left out":
            order.remove(1 + rank)
        elif kind == "left out by all":
            order.remove(1 + step % 2)
        elif kind == "swapped by all" or (kind == "swapped" and rank == 1):
            order = [0, 2, 1, 3]
        for number in order:
            y = self.blocks[number](x)
            x = x + 0 * y.detach() if (kind, rank, number) == ("no gradient", 1, 2) else y
        return self.head(x)[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return mse_loss(self(x, self.global_step, self.trainer.rank), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(kind: str, way: str) -> dict[str, torch.Tensor]:
    seed_everything(3)
    module = Blocks(kind)
    trainer = WAYS[way].trainer(max_epochs=1, watchdog_seconds=60)
    trainer.fit(module, DataLoader(MLP.data(SAMPLES), GLOBAL_BATCH // 2))
    return trainer.full_state_dict()


def train_by_hand(kind: str) -> dict[str, torch.Tensor]:
    seed_everything(3)
    module = Blocks(kind)
    optimizer = module.configure_optimizers()
    for step, (x, y) in enumerate(DataLoader(MLP.data(SAMPLES), GLOBAL_BATCH)):
        optimizer.zero_grad()
        mse_loss(module(x, step, 0), y).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("way", NAMES)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        # As rank 0 sees it, or rank 1 while rank 0 waits for the block before.
        ("left out", (".2 after ", ".2.0 after ", ".3.0 after ", "blocks.2.0.", "blocks.1.0.")),
        ("swapped", (".2 after ", ".2.0 after ", "blocks.1.0.")),
        ("no gradient", (".1 after blocks.3", ".1.0 after blocks.3", "blocks.1.0.", "blocks.3.0.")),
    ],
)
def test_another_order_on_one_process_is_reported(kind: str, words: tuple[str, ...], way: str) -> None:
    skip_if_missing(way)
    script = f"from tests.strategies import test_call_order as here\nhere.train({kind!r}, {way!r})\n"
    if (kind, way) == ("swapped", "ZeRO-1 x2"):  # reduces gradients in the order of the parameters
        fork_ranks(script).wait().check(0)
        return
    output = fork_ranks(script).wait().check(1).stderr
    assert WORDS in output
    assert any(one in output.split(WORDS)[1] for one in words)


@pytest.mark.parametrize("way", NAMES)
@pytest.mark.parametrize("kind", ["swapped by all", "left out by all"])
def test_another_order_on_all_processes_trains_as_by_hand(kind: str, way: str) -> None:
    skip_if_missing(way)
    expected = train_by_hand(kind)
    for weights in run_distributed(train, 2, kind, way)[:1]:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def calls_of(order: CallOrder, *passes: str) -> None:
    for calls in passes:
        with order.of("training_step"):
            for call in calls:
                order.call(call)


@pytest.mark.parametrize(
    ("first", "passes", "waits"),
    [
        ("abc", ["abc", "abc"], []),
        ("abc", ["acb"], ["c after a", "b after c"]),
        ("abc", ["ac", "ac"], ["c after a"]),
        ("abc", ["ab", "abc"], ["b as the last one", "c after b"]),
        ("abc", ["abbc", "abbc"], ["b after b"]),
        ("abc", ["abcabcabc"], ["a after c", "a after c"]),
        # Orders that take turns are agreed on at one call, whatever follows.
        (
            "ab",
            ["ab", "cde", "ab", "cde"],
            ["c at first", "d after c", "e after d", "e as the last one", "a at first", "c at first"],
        ),
        (None, ["ab", "ab"], ["a, b (2 in all: 7e18f737)"]),
    ],
)
def test_processes_wait_where_the_order_is_another_one(first: str | None, passes: list[str], waits: list[str]) -> None:
    waited: list[str] = []
    processes = SingleProcess()
    processes.wait_for_all = waited.append
    calls_of(CallOrder(processes, "fsdp", "block", first), *passes)
    assert [one.removeprefix("block ").removesuffix(" in training_step") for one in waited] == waits
