"""Modules as users write them, small, each with the losses of its step as a generator that needs no trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, mse_loss, normalize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.helpers.strategy_models import GPT, VOCABULARY, Transformer
from trainer import TrainModule

WIDTH, LENGTH = 8, 8
Losses = Iterator[torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Two blocks, a head, and a parameter outside of any layer."""

    def __init__(self, out: int = WIDTH, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, out)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Realistic(TrainModule):
    """A module whose `losses` yields the loss of each optimizer in turn; between two of them one optimizer steps.

    A sample is `x` (WIDTH numbers), `tokens` (LENGTH numbers below VOCABULARY), and `kind`, which is 1 in the first
    steps of rank 1. `number` is that of the batch.
    """

    manual: ClassVar[bool] = False
    window: ClassVar[int] = 1
    lr: ClassVar[float] = 0.2
    decay: ClassVar[float] = 0.01
    """A parameter without a gradient does not decay, and one whose gradient is zero does."""
    blocks: ClassVar[tuple[str, ...]] = ("Block",)
    """The classes that FSDP gets as `auto_wrap_policy`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.manual
        self.build()

    def build(self) -> None:
        self.net = Net()

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        raise NotImplementedError

    def loss_by_hand(self, losses: Losses, turn: int) -> torch.Tensor:
        return next(islice(losses, turn, None))

    def pull(self, loss: torch.Tensor) -> None:
        loss.backward()

    gradients_by_hand: Any = None
    """A function of each rank's micro-batches, as `losses`, in place of the mean of the ranks' gradients."""

    def trained(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each optimizer."""
        return [[parameter for parameter in self.parameters() if parameter.requires_grad]]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        kind = {"lr": self.lr, "momentum": 0.5, "weight_decay": self.decay}
        return [torch.optim.SGD(parameters, **kind) for parameters in self.trained()]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        x, tokens, kinds = batch
        losses = self.losses(x, tokens, int(kinds[0]), batch_idx)
        if not self.manual:
            return next(losses)
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.turn(optimizer, losses)
        return None

    def turn(self, optimizer: Any, losses: Losses) -> None:
        optimizer.zero_grad()
        self.manual_backward(next(losses))
        optimizer.step()


class Plain(Realistic):
    window = 2

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))


class PlainManual(Plain):
    manual, window = True, 1


class GAN(Realistic):
    """Two optimizers that are toggled; without toggling, the hand-written loop has the same numbers."""

    manual = True

    def build(self) -> None:
        self.G, self.D = Net(), Net(1)

    def trained(self) -> list[list[nn.Parameter]]:
        return [list(self.G.parameters()), list(self.D.parameters())]

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield (self.D(self.G(x)) - 1).square().mean()
        yield (self.D(x) - 1).square().mean() + self.D(self.G(x).detach()).square().mean()

    def turn(self, optimizer: Any, losses: Losses) -> None:
        with self.toggled_optimizer(optimizer):
            super().turn(optimizer, losses)


class Penalty(Realistic):
    """A critic with the penalty of WGAN-GP: `torch.autograd.grad` with a graph at the input."""

    window = 2

    def build(self) -> None:
        self.net = Net(1)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        mix = (0.3 * x + 0.7 * x.flip(0)).detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.net(mix).sum(), mix, create_graph=True)
        yield self.net(x).square().mean() + (gradient.float().norm(dim=1) - 1).square().mean()


class PenaltyManual(Penalty):
    manual, window = True, 1


class Distillation(Realistic):
    def build(self) -> None:
        self.teacher, self.student = Net().requires_grad_(False), Net()

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        with torch.no_grad():
            wanted = self.teacher(2 * x).softmax(-1)
        yield kl_div(self.student(x).log_softmax(-1), wanted, reduction="batchmean")


class Teaching(Distillation):
    """The teacher could train, too, and is the student's former self in the next forward."""

    def build(self) -> None:
        self.student = Net()

    @property
    def teacher(self) -> nn.Module:
        return self.student


class Heads(Realistic):
    """A head that rank 0 uses in no step, rank 1 in some: in others no process has its gradient."""

    def build(self) -> None:
        self.body, self.heads = Block(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield (self.heads[kind](self.body(x)) - kind).square().mean()


class HeadsManual(Heads):
    manual = True


class Experts(Realistic):
    """Experts of which each sample uses one, and rank 1 uses no sample of the first in some steps."""

    window = 2

    def build(self) -> None:
        self.body, self.experts = Block(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        y = self.body(x)
        chosen = (tokens[:, 0] % 2 + 1) * max(kind, number % 2)
        for expert, layer in enumerate(self.experts):
            here = (chosen == expert).nonzero()[:, 0]
            if len(here):
                y = y.index_add(0, here, torch.tanh(layer(y[here])).to(y.dtype))
        yield mse_loss(y, x.roll(1, 1))


class Depth(Realistic):
    """Stochastic depth, drawn by the number of the step: equally on all processes."""

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        draws = torch.rand(2, generator=torch.Generator().manual_seed(number + 2), dtype=torch.float32)
        y = x
        for block, draw in zip(self.net.blocks, draws.tolist(), strict=True):
            if draw < 0.6:
                y = block(y)
        yield mse_loss(self.net.head(y) * self.net.scale, x.roll(1, 1))


class Queue(Realistic):
    """MoCo: keys of earlier batches in a buffer, which the forward changes, with its position."""

    def build(self) -> None:
        self.net = Net()
        self.register_buffer("queue", normalize(torch.randn(12, WIDTH), dim=1))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        asked = normalize(self.net(x).float(), dim=1)
        with torch.no_grad():
            keys = normalize(self.net(x + 0.1).float(), dim=1)
        right = (asked * keys).sum(1, keepdim=True)
        logits = torch.cat([right, asked @ self.queue.clone().T], 1) / 0.5
        loss = cross_entropy(logits.float(), torch.zeros(len(x), dtype=torch.long))
        start = int(self.position)
        self.queue[start : start + 3] = keys[:3]
        self.position[0] = (start + 3) % 12
        yield loss


class Tied(Realistic):
    """An embedding whose matrix is that of the head, and one block called twice under two names."""

    def build(self) -> None:
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.2)
        self.block = Block()
        self.again = self.block
        self.third = Block()

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        hidden = self.third(self.again(self.block(self.tokens(tokens))))
        yield cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Sparse(Realistic):
    """Sparse gradients of an embedding and of a bag of embeddings."""

    lr, decay = 0.5, 0.0

    def build(self) -> None:
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True, mode="sum")
        for layer in (self.tokens, self.bag):
            nn.init.normal_(layer.weight, std=0.2)
        self.block = Block()

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.block(self.tokens(tokens).mean(1) + 0.1 * self.bag(tokens)), x)


class Recurrent(Realistic):
    """An LSTM in both directions with two layers, and a cell."""

    lr, blocks = 1.0, ("LSTM",)

    def build(self) -> None:
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.2)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        hidden, _ = self.lstm(self.tokens(tokens))
        state = self.cell(hidden[:, 0])
        state = self.cell(hidden[:, 1], state)
        logits = self.head(hidden + state[0][:, None])
        yield cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class WeightNorm(Realistic):
    window = 2

    def build(self) -> None:
        self.net = Net()
        for block in self.net.blocks:
            weight_norm(block.first)
        self.convolution = weight_norm(nn.Conv1d(1, 2, 3, padding=1))

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(self.convolution(x[:, None]).mean(1)), x.roll(1, 1))


class SpectralNorm(Realistic):
    """A parametrization whose buffers each forward changes."""

    def build(self) -> None:
        self.net = Net()
        for block in self.net.blocks:
            spectral_norm(block.first)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))


class Complex(Realistic):
    """A filter of complex weights between the halves of a Fourier transform."""

    def build(self) -> None:
        self.net = Net()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        waves = torch.fft.rfft(self.net(x).float()) * self.filter
        yield mse_loss(torch.fft.irfft(waves, n=WIDTH), x.roll(1, 1).float())


class HalfFrozen(Realistic):
    """Frozen float16 weights beside those that train."""

    def build(self) -> None:
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False).half()
        self.net = Net()

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        based = self.base(x.to(self.base.weight.dtype)).to(self.net.scale.dtype)
        yield mse_loss(self.net(based).float(), x.roll(1, 1).float())


class Views(Realistic):
    """Buffers that are views of one another: what a step changes in one is seen in the others."""

    def build(self) -> None:
        self.net = Net()
        self.register_buffer("table", torch.ones(4, WIDTH))
        self.register_buffer("row", self.table[1])
        self.register_buffer("columns", self.table[:, :2].T, persistent=False)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        self.table.mul_(0.5)
        self.row.add_(0.25)
        yield mse_loss(self.net(x * self.row.to(x.dtype)), x.roll(1, 1) * self.columns.mean().to(x.dtype))


class DoubleBackward(Realistic):
    """The gradient at the input by a backward with a graph, which also leaves gradients that nobody wants."""

    manual = True

    def build(self) -> None:
        self.net = Net(1)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        x = x.clone().requires_grad_(True)
        y = self.net(x)
        yield y.sum()
        yield y.square().mean() + (x.grad.float().norm(dim=1) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, tokens, kinds = batch
        optimizer, losses = self.optimizers(), self.losses(x, tokens, int(kinds[0]), batch_idx)
        self.manual_backward(next(losses), create_graph=True)
        optimizer.zero_grad()
        self.manual_backward(next(losses))
        optimizer.step()

    def loss_by_hand(self, losses: Losses, turn: int) -> torch.Tensor:
        next(losses).backward(create_graph=True)
        self.zero_grad()
        return next(losses)


class Sharpness(Realistic):
    """A penalty on the gradients of the weights, from a backward with a graph."""

    manual, lr = True, 0.05

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))
        yield sum((p.grad.float().square().sum() for p in self.parameters() if p.grad is not None), torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, tokens, kinds = batch
        optimizer, losses = self.optimizers(), self.losses(x, tokens, int(kinds[0]), batch_idx)
        optimizer.zero_grad()
        self.manual_backward(next(losses), create_graph=True)
        self.manual_backward(next(losses))
        optimizer.step()

    def gradients_by_hand(self, ranks: list[list[Losses]]) -> None:
        """Differentiate the mean over the ranks twice, since the penalty is one of their mean gradient."""
        (sum(next(losses) for (losses,) in ranks) / len(ranks)).backward(create_graph=True)
        next(ranks[0][0]).backward()


class LBFGS(Realistic):
    lr = 0.3

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.LBFGS(self.parameters(), lr=self.lr, max_iter=3)]

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))


class LBFGSManual(LBFGS):
    manual = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, tokens, kinds = batch
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = next(self.losses(x, tokens, int(kinds[0]), batch_idx))
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class Backward(Realistic):
    """An override of `backward`, which changes the gradients of a layer."""

    window = 2

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.pull(loss)

    def pull(self, loss: torch.Tensor) -> None:
        (2 * loss).backward()
        self.net.head.bias.grad.zero_()


class BackwardTwice(Backward):
    def pull(self, loss: torch.Tensor) -> None:
        (0.5 * loss).backward(retain_graph=True)
        loss.backward()


class BackwardByHand(Backward):
    """Sets gradients of `torch.autograd.grad`, as methods for several losses do."""

    def pull(self, loss: torch.Tensor) -> None:
        body, head = list(self.net.blocks.parameters()), [*self.net.head.parameters(), self.net.scale]
        for parameter, gradient in zip([*body, *head], torch.autograd.grad(loss, [*body, *head]), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class BackwardByHandInPart(Backward):
    """Sets the gradients of the head after a backward, as those of another loss."""

    def pull(self, loss: torch.Tensor) -> None:
        head = list(self.net.head.parameters())
        before = [0 if parameter.grad is None else parameter.grad.clone() for parameter in head]
        loss.backward(retain_graph=True)
        for parameter, gradient, own in zip(head, torch.autograd.grad(3 * loss, head), before, strict=True):
            parameter.grad = own + gradient


class ByHand(Realistic):
    """An optimizer that steps with gradients that no backward has left."""

    manual = True

    def trained(self) -> list[list[nn.Parameter]]:
        return [list(self.net.blocks.parameters()), list(self.net.head.parameters())]

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))
        yield self.net(x).square().mean()

    def turn(self, optimizer: Any, losses: Losses) -> None:
        if len(optimizer.param_groups[0]["params"]) > 2:
            super().turn(optimizer, losses)
            return
        optimizer.zero_grad()
        head = list(self.net.head.parameters())
        for parameter, gradient in zip(head, torch.autograd.grad(next(losses), head), strict=True):
            parameter.grad = gradient
        optimizer.step()


class ByModule(Realistic):
    """Clears and changes the gradients of the module's parameters, which are not those that its optimizer has."""

    manual = True

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))

    def pull(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.change()

    def change(self) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)
        self.net.head.weight.grad = None

    def turn(self, optimizer: Any, losses: Losses) -> None:
        self.zero_grad()
        self.manual_backward(next(losses))
        self.change()
        optimizer.step()


class Inputs(Realistic):
    """A backward at some parameters only: of a block, and in no block."""

    manual = True

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))

    def chosen(self) -> list[nn.Parameter]:
        return [*self.net.blocks[0].parameters(), self.net.head.weight]

    def pull(self, loss: torch.Tensor) -> None:
        loss.backward(inputs=self.chosen())

    def turn(self, optimizer: Any, losses: Losses) -> None:
        optimizer.zero_grad()
        self.manual_backward(next(losses), inputs=self.chosen())
        optimizer.step()


class Clamped(PlainManual):
    """Changes the data of parameters after the optimizer's step."""

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        (optimizer,) = super().configure_optimizers()
        if not hasattr(self.net.scale, "device_mesh"):  # with shards it is refused
            optimizer.register_step_post_hook(lambda *unused: self.clamp())
        return [optimizer]

    def turn(self, optimizer: Any, losses: Losses) -> None:
        super().turn(optimizer, losses)
        self.clamp()

    def clamp(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Discarded(PlainManual):
    """Drops a gradient that waits for its reduction."""

    def turn(self, optimizer: Any, losses: Losses) -> None:
        loss = next(losses)
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(5 * loss, retain_graph=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Masked(Realistic):
    """A hook on a parameter, which leaves half of its gradient."""

    window = 2

    def build(self) -> None:
        self.net = Net()
        mask = torch.arange(WIDTH)[:, None] < WIDTH // 2
        self.net.head.weight.register_hook(lambda gradient: gradient * mask)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        yield mse_loss(self.net(x), x.roll(1, 1))


class MaskedLate(Masked):
    """The same, set when the parameters may be shards."""

    def build(self) -> None:
        self.net = Net()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        mask = torch.arange(WIDTH)[:, None] < WIDTH // 2
        self.net.head.weight.register_hook(lambda gradient: gradient * mask)
        return super().configure_optimizers()


class BackwardWithin(Realistic):
    """A second loss whose backward the step calls by itself."""

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        self.net(0.5 * x).square().mean().backward()
        yield mse_loss(self.net(x), x.roll(1, 1))


class Collecting(Realistic):
    """Blocks that write into arguments: a loss of their own into a list, what the next block reads into a dict."""

    blocks = ("CollectingBlock",)

    def build(self) -> None:
        self.net = Net(block=CollectingBlock)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        own: list[torch.Tensor] = []
        shared: dict[str, Any] = {"scales": [x.new_ones(())]}
        hidden = 0.5 * self.net.scale * x
        for block in self.net.blocks:
            hidden = block(hidden, own, notes=shared)
        loss = mse_loss(self.net.head(hidden), x.roll(1, 1)) + sum(own)
        yield loss + 0.1 * shared["latest"].square().mean() * len(shared["scales"])


class CollectingBlock(Block):
    def forward(self, x: torch.Tensor, own: list[torch.Tensor], notes: dict[str, Any]) -> torch.Tensor:
        before = notes.pop("latest", x)
        output = super().forward(x + 0.5 * before * notes["scales"][-1])
        own.append(self.second(torch.tanh(output)).square().mean())
        notes["latest"] = self.first(x)
        notes["scales"].append(0.5 * notes["scales"][-1])
        return output


class Keeping(Realistic):
    """Blocks that keep a loss of their own in an attribute."""

    blocks = ("KeepingBlock",)

    def build(self) -> None:
        self.net = Net(block=KeepingBlock)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        loss = mse_loss(self.net(x), x.roll(1, 1))
        yield loss + sum(block.own for block in self.net.blocks)


class KeepingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.own = self.second(torch.tanh(output)).square().mean()
        return output


class Language(Realistic):
    """A transformer with tied weights."""

    tensor_parallel_plan: ClassVar = GPT.plan
    tied, experts = True, 0

    def build(self) -> None:
        self.net = Transformer(tied=self.tied, frozen=False, experts=self.experts)
        nn.init.normal_(self.net.tokens.weight, std=0.1)

    def losses(self, x: torch.Tensor, tokens: torch.Tensor, kind: int, number: int) -> Losses:
        wanted = (tokens * 3 + 1) % VOCABULARY
        yield cross_entropy(self.net(tokens).flatten(0, 1).float(), wanted.flatten())


class Mixture(Language):
    """A transformer with experts in the last block, of which each token uses all: rounding chooses none."""

    tied, experts = False, 2
    window = 2
    tensor_parallel_plan: ClassVar = {**GPT.plan, "net.blocks.*.experts": "experts"}


MODULES: dict[str, type[Realistic]] = {
    kind.__name__: kind
    for kind in (
        *(Plain, PlainManual, GAN, Penalty, PenaltyManual, Distillation, Teaching, Heads, HeadsManual, Experts, Depth),
        *(Queue, Tied, Sparse, Recurrent, WeightNorm, SpectralNorm, Complex, HalfFrozen, Views, DoubleBackward),
        *(Sharpness, LBFGS, LBFGSManual, Backward, BackwardTwice, BackwardWithin, BackwardByHand),
        *(BackwardByHandInPart, ByHand, ByModule, Inputs, Clamped, Discarded, Masked, MaskedLate, Collecting, Keeping),
        *(Language, Mixture),
    )
}
