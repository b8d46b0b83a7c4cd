"""What blocks give to others beside their output, and what the processes of one model have to have in common."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import once_per_module, run_distributed
from tests.helpers.strategy_runs import SINGLE, WAYS
from trainer import TrainModule
from trainer.errors import ConfigError

STEPS = 4


class Layer(nn.Module):
    """Each token by itself, so that it can be split in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(TrainModule):
    tensor_parallel_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    layer: ClassVar[type[nn.Module]] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(), nn.Linear(8, 8)
        self.blocks.extend(self.layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self(batch[0]), batch[0].roll(1, -1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class WritesLoss(Layer):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor] | None = None) -> torch.Tensor:
        output = super().forward(x)
        if losses is not None:
            losses.append(output.square().mean())
        return output


class WithLosses(Stack):
    layer = WritesLoss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x, losses)
        return mse_loss(self.head(x), batch[0].roll(1, -1)) + sum(losses)


class WritesPart(Layer):
    """A loss of split features."""

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        losses.append(self.up(x).square().mean())
        return super().forward(x)


class WithParts(WithLosses):
    layer = WritesPart


class State:
    """An object that is neither a container nor a dataclass."""

    latest: Any = None
    calls = 0


class WritesObject(Layer):
    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        before = x if state.latest is None else state.latest
        state.latest = super().forward(x) + 0.1 * before
        return state.latest


class WithObject(Stack):
    layer = WritesObject

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        state, x = State(), self.embed(batch[0])
        for block in self.blocks:
            x = block(x, state)
        return mse_loss(self.head(x), batch[0].roll(1, -1)) + 0.1 * state.latest.square().mean()


class CountsAll(Layer):
    """Multiplies by the number of the call among those of all blocks."""

    state: State

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.calls += 1
        return super().forward(x) * (1 + self.state.calls % 2)


class WithCounter(Stack):
    layer = CountsAll

    def __init__(self) -> None:
        super().__init__()
        state = State()
        for block in self.blocks:
            block.state = state  # type: ignore[assignment]


class WithHooks(Stack):
    """Takes features of the blocks by hooks."""

    place: ClassVar[str] = "down"

    def __init__(self) -> None:
        super().__init__()
        self.features: list[torch.Tensor] = []
        for block in self.blocks:
            layer = block.get_submodule(self.place)
            layer.register_forward_hook(lambda layer, args, output: self.features.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx) + sum(one.square().mean() for one in self.features)
        self.features.clear()
        return loss


class WithHooksOfBlocks(WithHooks):
    place = ""


class Own(list[torch.Tensor]):
    """A list with an attribute."""

    calls = 0


@dataclass(slots=True)
class Slots:
    latest: torch.Tensor | None = None


@dataclass
class Made:
    """With what its init makes."""

    losses: list[torch.Tensor]
    calls: int = field(init=False)

    def __post_init__(self) -> None:
        self.calls = 10


class LeavesMuch(Layer):
    """Leaves losses whose backward begins in the block in many ways, some of them from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self._own: torch.Tensor | None = None
        self.late: Any = None
        self.steps = 0

    def forward(self, x: torch.Tensor, own: Own, slots: Slots, made: Made, some: set[torch.Tensor]) -> torch.Tensor:
        output = super().forward(x)
        self.steps += self.training
        losses = [(self.down(torch.tanh(self.up(output * scale)))).square().mean() for scale in range(1, 7)]
        self._own, slots.latest = losses[0], losses[1] + (0.0 if slots.latest is None else slots.latest)
        own.append(losses[2])
        own.calls += 1
        made.losses.append(losses[3] * made.calls)
        made.calls += 1
        some.add(losses[4])
        self.late = losses[5] if self.steps > 2 else None
        return output * own.calls


class WithMuch(Stack):
    layer = LeavesMuch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        own, slots, made, some = Own(), Slots(), Made([]), set[torch.Tensor]()
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x, own, slots, made, some)
        left = [block._own for block in self.blocks] + [block.late for block in self.blocks if block.late is not None]
        total = torch.stack([*own, slots.latest, *made.losses, *some, *left]).sum()  # type: ignore[list-item]
        return mse_loss(self.head(x), batch[0].roll(1, -1)) + 0.01 * total * made.calls


class Remembers(Layer):
    """Keeps the means of its outputs, without their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.means.append(float(output.detach().mean()))
        return output * (1 + len(self.means) % 2)


class WithMeans(Stack):
    layer = Remembers


class Averages(Layer):
    """Scales by a running mean of its outputs, a number."""

    average: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x) * (1 + self.average)
        if self.training:
            self.average = 0.5 * self.average + 0.5 * float(output.detach().square().mean())
        return output


class WithAverages(Stack):
    layer = Averages


class AveragesTensors(Averages):
    """The same of a tensor, which is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = Layer.forward(self, x) * (1 + self.average)
        if self.training:
            self.average = self.average.clone().lerp_(output.detach().square().mean(), 0.5)
        return output


class WithTensors(Stack):
    layer = AveragesTensors


class AveragesBuffer(Layer):
    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.average.lerp_(output.detach().square().mean(), 0.5)
        return output


class WithBuffers(Stack):
    layer = AveragesBuffer


class AveragesSplit(Averages):
    """A running mean of split features, which scales what is computed from them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.up(x)
        output = x + self.down(torch.tanh(features)) * (1 + self.average)
        self.average = 0.5 * self.average + 0.5 * float(features.detach().square().mean())
        return output


class WithSplitAverages(Stack):
    layer = AveragesSplit


class Tracker:
    """An object that a block and its hook share."""

    average = 0.0

    def track(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.average = 0.5 * self.average + 0.5 * float(output.detach().square().mean())


class ReadsTracker(Layer):
    tracker: Tracker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + (self.tracker.average if self.training else 0.0)))


class WithTrackers(Stack):
    layer = ReadsTracker

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.tracker = Tracker()  # type: ignore[assignment]
            block.get_submodule("down").register_forward_hook(block.tracker.track)  # type: ignore[union-attr, arg-type]


class KeepsDict(Layer):
    """A running mean of its inputs in a dict, which is read to change it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"average": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.kept["average"] = 0.5 * self.kept["average"] + 0.5 * float(x.detach().square().mean())
        return output


class WithDicts(Stack):
    layer = KeepsDict


class ReadsBefore(KeepsDict):
    """Reads what the call before has left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 + self.kept["average"]
        return super().forward(x) * factor


class WithReadDicts(Stack):
    layer = ReadsBefore


MEANS = [0.0]


class ReadsGlobal(Layer):
    """Scales by a mean of the call before, in a list at module level."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x) * (1 + MEANS[-1])
        MEANS[-1] = float(x.detach().square().mean())
        return output


class WithReadGlobals(Stack):
    layer = ReadsGlobal

    def __init__(self) -> None:
        super().__init__()
        MEANS[:] = [0.0]


class NormsLate(Layer):
    """Normalizes its features from the third call on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        features = self.up(x)
        if self.calls > 2:
            features = features / features.norm(dim=-1, keepdim=True)
        return x + self.down(torch.tanh(features))


class WithLateNorms(Stack):
    layer = NormsLate


class MixesInTraining(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.mean(1, keepdim=True) if self.training else x)


class WithMixing(Stack):
    layer = MixesInTraining


class MixesWhenTold(Layer):
    mixes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.mean(1, keepdim=True) if self.mixes else x)


class WithTold(Stack):
    """Has its blocks mix tokens from the second step on."""

    layer = MixesWhenTold

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            block.mixes = batch_idx > 0  # type: ignore[assignment]
        return super().training_step(batch, batch_idx)


class MixesByArgument(Layer):
    def forward(self, x: torch.Tensor, mixes: bool = False) -> torch.Tensor:
        return super().forward(x + x.mean(1, keepdim=True) if mixes else x)


class WithArguments(Stack):
    """The same, by an argument."""

    layer = MixesByArgument

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x, mixes=batch_idx > 1)
        return mse_loss(self.head(x), batch[0].roll(1, -1))


class DrawsInTraining(Layer):
    """Adds noise in training, from a generator of its own and from torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + 1e-9 * torch.randn(x.shape, generator=self.noise) + 1e-9 * torch.randn(x.shape)
        return super().forward(x)


class WithNoise(Stack):
    layer = DrawsInTraining


class LeavesNumber(Layer):
    size = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.size = float(output.detach().square().mean())
        return output


class LogsNumbers(Stack):
    layer = LeavesNumber

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("size", self.blocks[-1].size)  # type: ignore[arg-type]
        return loss


class WithNumbers(Stack):
    """Computes its loss with numbers that its blocks leave."""

    layer = LeavesNumber

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + sum(block.size for block in self.blocks))  # type: ignore[operator, misc]


class NumbersFirst(WithNumbers):
    """Computes the input of the blocks with what the step before has left."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = 1 + sum(block.size for block in self.blocks)  # type: ignore[operator, misc]
        return Stack.training_step(self, [batch[0] * scale], batch_idx)


class LateLoss(Stack):
    """Collects features by hooks from the third step on, and has a loss of their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.sums = 0, list[torch.Tensor]()
        for block in self.blocks:
            block.get_submodule("down").register_forward_hook(self.take)

    def take(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.step >= 2:
            self.sums.append(output.square().sum())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.step = batch_idx
        self.sums.clear()
        return super().training_step(batch, batch_idx) + 0.01 * sum(self.sums)


LOSSES: list[Any] = []


def collect(loss: Any) -> None:
    LOSSES.append(loss)


class WritesGlobal(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        collect(output.square().mean())
        return output


class WithGlobals(Stack):
    layer = WritesGlobal

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        LOSSES.clear()
        return super().training_step(batch, batch_idx) + sum(LOSSES)


class WritesGlobalNumber(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        collect(float(output.detach().square().mean()))
        return output


class WithGlobalNumbers(Stack):
    layer = WritesGlobalNumber

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        LOSSES.clear()
        return super().training_step(batch, batch_idx) * (1 + sum(LOSSES))


class WritesNumber(Layer):
    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        output = super().forward(x)
        state.latest = float(output.detach().square().mean())
        return output


class WithObjectOfNumbers(Stack):
    layer = WritesNumber

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        state, x = State(), self.embed(batch[0])
        for block in self.blocks:
            x = block(x, state)
        return mse_loss(self.head(x), batch[0].roll(1, -1)) * (1 + state.latest)


class LateSkip(Stack):
    """From the third step on, the head reads the first block, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first = self.blocks[0](self.embed(batch[0]))
        last = self.blocks[1](first)
        return mse_loss(self.head(last + first if batch_idx >= 2 else last), batch[0])


class NoiseAfter(Stack):
    """Draws from a generator of its own behind the blocks, and before them."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0] + 0.1 * torch.randn(8, generator=self.noise)
        return mse_loss(self(x), batch[0] + 0.1 * torch.randn(8, generator=self.noise))


class NoiseBefore(NoiseAfter):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = (batch[0] + 0.1 * torch.randn(8, generator=self.noise) for _ in range(2))
        return mse_loss(self(x), y)


class CountsAfter(Stack):
    """Counts its steps behind the blocks, and reads the number before them."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = mse_loss(self(batch[0] * (1 + self.count)), batch[0])
        self.count += 1
        return loss


class CountsBefore(Stack):
    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count += 1
        return mse_loss(self(batch[0] * self.count), batch[0])


class CountsInObject(Stack):
    """The same in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = mse_loss(self(batch[0] * (1 + self.state.calls)), batch[0])
        self.state.calls += 1
        return loss


class KeepsLate(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.training:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps > 2:
                self.own = output.square().mean()
        return output


class WithLateOwn(Stack):
    """Its blocks have losses from the third step on."""

    layer = KeepsLate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(block.own for block in self.blocks) if batch_idx > 1 else loss  # type: ignore[operator, misc]


class Unseeded(Dataset[tuple[torch.Tensor]]):
    """Each process draws other samples."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.seed()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.randn(6, 8, generator=self.generator),)


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(8 * STEPS, 6, 8, generator=torch.Generator().manual_seed(2)))


def train(way: str, kind: type[Stack], backend: str = "", data: Callable[[], Dataset[Any]] = samples) -> Any:
    module = kind()
    compiled = {"compile": {"backend": backend, "blocks": "auto"}} if backend else {}
    trainer = WAYS[way].trainer(max_epochs=1, **QUIET, **compiled)
    trainer.fit(module, DataLoader(data(), WAYS[way].micro_batch))
    return trainer.full_state_dict(everywhere=True)


def attempt(*case: Any) -> Any:
    """Return the weights after a training, or the error with which all its processes end."""
    try:
        return train(*case)
    except ConfigError as error:
        return f"refused: {error}"
    except Exception:
        return traceback.format_exc()


TRAINED: dict[str, tuple[Any, ...]] = {
    "losses in a list, full features": ("TP x2", WithLosses),
    "an object": ("TP x2", WithObject),
    "an object that counts": ("CP x2", WithCounter),
    "features of hooks": ("TP x2", WithHooksOfBlocks),
    "lists in blocks, and split layers": ("TP x2", WithMeans),
    "lists in blocks, and sequences": ("CP x2", WithMeans),
    "lists in blocks of a pipeline": ("PP x2", WithMeans),
    "a generator before the blocks": ("PP x2", NoiseBefore),
    "a counter before the blocks": ("PP x2", CountsBefore),
    "running means of full features": ("TP x2", WithAverages),
    "running means in blocks of a pipeline": ("PP x2", WithAverages),
    "running means in compiled blocks of a pipeline": ("PP x2", WithAverages, "eager"),
    "running means of full features, in buffers": ("TP x2", WithBuffers),
    "objects that hooks write to": ("PP x2", WithTrackers),
    "numbers of full features": ("TP x2", WithNumbers),
    "numbers of parts, to log": ("CP x2", LogsNumbers),
    "running means of parts in a dict, to log": ("CP x2", WithDicts),
    "noise in training": ("CP x2", WithNoise),
    "losses in a global list": ("TP x2", WithGlobals),
    "losses in a list, FSDP": ("FSDP x2", WithLosses),
    "an object, FSDP": ("FSDP x2", WithObject),
    "losses in a list, ZeRO-3": ("ZeRO-3 x2", WithLosses),
    "much, FSDP": ("FSDP x2", WithMuch),
    "much, FSDP, compiled": ("FSDP x2", WithMuch, "aot_eager"),
}
LOSS = "the loss differs between the processes of one model"
REFUSED: dict[str, tuple[str, type[Stack], Callable[[], Dataset[Any]], str]] = {
    "losses in a list": ("CP x2", WithLosses, samples, "what it leaves in lists and objects that it gets is wrong by"),
    "losses in a list, split features": ("TP x2", WithParts, samples, "what it leaves in lists and objects that it"),
    "an object": ("CP x2", WithObject, samples, LOSS),
    "features of hooks": ("CP x2", WithHooks, samples, "what it leaves in what a hook of down writes to is wrong by"),
    "a running mean of tokens": ("CP x2", WithAverages, samples, "its output in a second call is wrong by"),
    "a tensor of tokens": ("CP x2", WithTensors, samples, "its output in a second call is wrong by"),
    "a buffer of tokens": ("CP x2", WithBuffers, samples, "the buffer average is wrong by"),
    "a running mean of split features": ("TP x2", WithSplitAverages, samples, "blocks.0 (AveragesSplit) does not"),
    "a running mean in a dict": ("CP x2", WithReadDicts, samples, "nothing that each process keeps of its tokens"),
    "a mean in a global list": ("CP x2", WithReadGlobals, samples, "nothing that each process keeps of its tokens"),
    "a norm of split features from the third step on": ("TP x2", WithLateNorms, samples, "norms, softmax and means"),
    "mixing in training alone": ("CP x2", WithMixing, samples, "blocks.0 (MixesInTraining) does not compute the same"),
    "mixing from the second step on": ("CP x2", WithTold, samples, "blocks.0 (MixesWhenTold) does not compute"),
    "mixing by an argument": ("CP x2", WithArguments, samples, "blocks.0 (MixesByArgument) does not compute the same"),
    "an object that a hook writes to": ("CP x2", WithTrackers, samples, "its output in a second call is wrong by"),
    "numbers in a loss": ("CP x2", WithNumbers, samples, LOSS),
    "numbers of the step before": ("CP x2", NumbersFirst, samples, LOSS),
    "a number in an object": ("CP x2", WithObjectOfNumbers, samples, LOSS),
    "features of hooks from the third step on": ("CP x2", LateLoss, samples, LOSS),
    "losses in a global list": ("CP x2", WithGlobals, samples, "LOSSES at the level of "),
    "numbers in a global list": ("CP x2", WithGlobalNumbers, samples, LOSS),
    **{f"other batches, {way}": (way, Stack, Unseeded, "different batches") for way in ("TP x2", "CP x2", "PP x2")},
}
"""What all processes find."""
ENDS: dict[str, tuple[type[Stack], str]] = {
    "losses in a list": (WithLosses, "leaves a list that others read, too"),
    "an object": (WithObject, "leaves a State that others read, too"),
    "an object that counts": (WithCounter, "leaves a State that others read, too"),
    "features of hooks": (WithHooks, "leaves a tensor with a gradient in what a hook of down writes to"),
    "numbers in a loss": (WithNumbers, "the training reads blocks.0.size, which differs between the processes"),
    "a number in an object": (WithObjectOfNumbers, "leaves a State that others read, too"),
    "losses in a global list": (WithGlobals, "LOSSES at the level of "),
    "numbers in a global list": (WithGlobalNumbers, "leaves a list that others read, too"),
    "a generator behind the blocks": (NoiseAfter, "the training reads noise, which differs between the processes"),
    "a counter behind the blocks": (CountsAfter, "the training reads count, which differs between the processes"),
    "a counter in an object behind the blocks": (CountsInObject, "the training reads State 1.calls, which"),
    "a late loss of blocks": (WithLateOwn, "(KeepsLate) leaves a tensor with a gradient in own"),
    "a late skip": (LateSkip, "in this step stage 1 computes from the output of a block of an earlier stage"),
}
"""What one stage of a pipeline finds, while the other one waits for it."""


def train_all(names: list[str]) -> dict[str, Any]:
    return {name: attempt(*case) for name, case in TRAINED.items() if name in names}


def refuse_all(names: list[str]) -> dict[str, Any]:
    return {name: attempt(*case[:2], "", case[2]) for name, case in REFUSED.items() if name in names}


trained = once_per_module(lambda names: run_distributed(train_all, 2, names, timeout=120.0), "name")
refusals = once_per_module(lambda names: run_distributed(refuse_all, 2, names, timeout=120.0), "name")


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_as_on_one_process(name: str, trained: Any) -> None:
    expected = train(SINGLE, TRAINED[name][1])
    for of_rank in trained:
        assert not isinstance(of_rank[name], str), of_rank[name]
        torch.testing.assert_close(of_rank[name], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_other_processes_would_not_get_is_refused(name: str, refusals: Any) -> None:
    for of_rank in refusals:
        assert isinstance(of_rank[name], str), "it trains"
        assert of_rank[name].startswith("refused: "), of_rank[name]
    assert any(REFUSED[name][3] in of_rank[name] for of_rank in refusals), refusals[0][name]


@pytest.mark.parametrize("name", ENDS)
def test_what_a_stage_writes_for_others_ends_the_run(name: str) -> None:
    with pytest.raises(AssertionError) as error:
        run_distributed(train, 2, "PP x2", ENDS[name][0], timeout=90.0)
    assert ENDS[name][1] in str(error.value)
