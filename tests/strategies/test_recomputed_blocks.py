"""Blocks with effects beside their output are recomputed as if they ran once: the weights are a hand-written loop's."""

from __future__ import annotations

import copy
import traceback
from collections import defaultdict
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_runs import SINGLE, WAYS
from tests.tiers import selected
from trainer import TrainModule
from trainer.errors import ConfigError

# torch's compiler looks at it, in tensors between its graphs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

STEPS, MICRO_BATCH, WIDTH = 4, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        return self.layers(x)


class Counts(Block):
    """With a number that each block has, and one that all share in an object."""

    calls = 0

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        self.calls += 1
        state.calls += 1
        return self.layers(x) * (1 + 0.3 * (self.calls % 2) + 0.1 * state.calls)


class Pops(Block):
    """Takes out of a dict and a list what the block before has put there, and puts other things there."""

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        output = self.layers(x + 0.5 * state.notes.pop("latest", x) + 0.1 * state.losses.pop(0))
        state.losses += [self.down(torch.tanh(self.up(output))).square().mean(), x.new_ones(())]
        state.notes["latest"] = self.down(self.up(x))
        return output


class Draws(Block):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        return self.layers(x * torch.rand(WIDTH, generator=self.noise))


class Averages(Block):
    """Changes a buffer in place before it is used, and replaces another one after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)  # type: ignore[operator]
        output = self.layers(x * self.scale - self.mean)
        self.scale = 1 + x.detach().abs().mean(0)
        return output


class Norm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        return self.layers(self.norm(x))


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.up)


class Keeps(Block):
    """Keeps a loss of its own in an attribute, and a tensor which the next call reads."""

    own: Any = None
    before: Any = None

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        output = self.layers(x if self.before is None else x + 0.1 * self.before)
        self.own, self.before = self.down(torch.tanh(self.up(output))).square().mean(), output.detach()
        return output


class Defaults(Block):
    """Gets a dict with a function for missing entries as an argument."""

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        output = self.layers(x)
        state["losses"].append(self.down(torch.tanh(self.up(output))).square().mean())
        state["calls"].append(1)
        return output * (1 + len(state["calls"]))


class InPlace(Block):
    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        x += self.down(torch.tanh(self.up(torch.tanh(x))))
        return x


class Penalized(Block):
    """In a model whose loss has the gradient of its input in it."""


class State:
    """What the blocks of a step share."""

    __slots__ = ("calls", "losses", "notes")

    def __init__(self, x: torch.Tensor) -> None:
        self.calls, self.losses, self.notes = 0, [x.new_ones(())], dict[str, torch.Tensor]()


class Model(TrainModule):
    block: ClassVar[type[Block]]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        state: Any = defaultdict(list) if self.block is Defaults else State(x)
        if self.block is Defaults:
            state["losses"].append(hidden.square().mean())
        for block in self.blocks:
            hidden = block(hidden, state)
        losses = state["losses"] if self.block is Defaults else state.losses
        own = [block.own for block in self.blocks] if self.block is Keeps else []
        return mse_loss(self.head(hidden), x.roll(1, -1)) + 0.1 * torch.stack([*losses, *own]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.block is not Penalized:
            return self(batch[0])
        x = batch[0].detach().requires_grad_(True)
        loss = self(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


KINDS: dict[str, type[Block]] = {
    kind.__name__: kind for kind in (Counts, Pops, Draws, Averages, Norm, Spectral, Keeps, Defaults, InPlace)
}
REFUSED = {"InPlace": "instead of x += y", "Penalized": "does not currently support double backward"}
MODELS = {
    name: type(f"With{name}", (Model,), {"block": kind}) for name, kind in [*KINDS.items(), ("Penalized", Penalized)]
}
COMPILED: dict[str, Any] = {
    "uncompiled": False,
    "compiled": {"backend": "aot_eager"},
    "compiled blocks": {"backend": "aot_eager", "blocks": "auto"},
}
Case = tuple[str, str, str, bool]
"""Kind of block, way, how it is compiled, and whether activations are recomputed."""
CASES: list[Case] = [
    (kind, way, [*COMPILED][(k + w) % 3], True)
    for k, kind in enumerate(KINDS)
    for w, way in enumerate((SINGLE, "DDP x2", "FSDP x2"))
]
CASES += [(kind, "FSDP x2", "uncompiled", False) for kind in ("Defaults", "InPlace")]
CASES += [("Penalized", way, "compiled", False) for way in (SINGLE, "DDP x2", "FSDP x2")]
CASES += [("Norm", SINGLE, how, True) for how in COMPILED if ("Norm", SINGLE, how, True) not in CASES]


def data(way: str) -> TensorDataset:
    size = STEPS * MICRO_BATCH * WAYS[way].processes
    return TensorDataset(torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(2)))


def train(case: Case) -> dict[str, torch.Tensor] | str:
    kind, way, compiled, recomputes = case
    torch._dynamo.reset()
    settings = {"activation_checkpointing": "auto" if recomputes else None, "compile": COMPILED[compiled]}
    trainer = WAYS[way].trainer(max_epochs=1, **settings)
    try:
        trainer.fit(MODELS[kind](), DataLoader(data(way), MICRO_BATCH))
    except ConfigError as error:
        return f"after {trainer.global_step} steps: {error}"
    except Exception:  # of this case alone
        return traceback.format_exc()
    return trainer.full_state_dict(everywhere=True)


def train_all(cases: list[Case]) -> dict[Case, Any]:
    return {case: train(case) for case in cases}


def by_hand(kind: str, ranks: int, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Train with a copy of the module for each rank, which keeps what its blocks count."""
    copies = [copy.deepcopy(MODELS[kind]()) for _ in range(ranks)]
    optimizer = copies[0].configure_optimizers()
    for step in range(STEPS):
        before = copy.deepcopy(copies[0].state_dict())  # with buffers of rank 0
        for rank, module in enumerate(copies):
            module.load_state_dict(before)
            module.zero_grad()
            module(batches[step * ranks + rank]).backward()
        for several in zip(*(module.parameters() for module in copies), strict=True):
            several[0].grad = sum(one.grad for one in several) / ranks
        optimizer.step()
    return copies[0].state_dict()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[Case, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        for processes in (1, 2):
            cases = [case for case in selected(request, "case") if WAYS[case[1]].processes == processes]
            if cases:
                ranks = run_distributed(train_all, 2, cases, timeout=200.0) if processes > 1 else [train_all(cases)]
                found.update({case: [rank[case] for rank in ranks] for case in cases})
    return found


@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_weights_are_those_of_a_hand_written_loop(case: Case, results: Any) -> None:
    kind, way = case[:2]
    ranks = WAYS[way].processes
    if kind in REFUSED:
        for found in results[case]:
            assert isinstance(found, str), "it trains"
            assert found.startswith("after 0 steps: ") or kind == "Penalized", found  # which torch itself refuses
            assert REFUSED[kind] in found
        return
    expected = by_hand(kind, ranks, [*data(way).tensors[0].split(MICRO_BATCH)])
    of_rank_0 = {name for name, _ in MODELS[kind]().named_buffers()}
    for number, found in enumerate(results[case]):
        assert not isinstance(found, str), found
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if number == 0 or name not in of_rank_0:  # each process has its own, until the next step begins
                torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-6)


NOISE = torch.Generator()


class DrawsAtModuleLevel(Block):
    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        return self.layers(x * torch.rand(WIDTH, generator=NOISE))


class WithDrawsAtModuleLevel(Model):
    block = DrawsAtModuleLevel


def test_a_generator_at_module_level_gives_the_second_run_the_numbers_of_the_first() -> None:
    found = []
    for recomputes in (None, "auto"):
        NOISE.manual_seed(7)
        trainer = WAYS[SINGLE].trainer(max_epochs=1, activation_checkpointing=recomputes)
        trainer.fit(WithDrawsAtModuleLevel(), DataLoader(data(SINGLE), MICRO_BATCH))
        found.append({**trainer.full_state_dict(), "noise": NOISE.get_state()})
    assert_same_bits(*found)


def test_each_pair_has_a_case() -> None:
    ways, recomputed = (SINGLE, "DDP x2", "FSDP x2"), [case for case in CASES if case[3]]
    assert {case[:2] for case in recomputed} == {(kind, way) for kind in KINDS for way in ways}
    assert {(case[0], case[2]) for case in recomputed} == {(kind, how) for kind in KINDS for how in COMPILED}
    assert {case[1:3] for case in recomputed} == {(way, how) for way in ways for how in COMPILED}
