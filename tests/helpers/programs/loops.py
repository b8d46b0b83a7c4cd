"""Blocks of loops as people write them for the Engine, under one layout each; and the same loops with torch alone.

`python -m tests.helpers.programs loops 17` draws loop 17, runs it, and prints what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, normalize, softplus

from tests.helpers.programs.blocks import Block, Program, block, one_of

FEATURES, EPOCHS, BAD = 4, 2, 5
LOOP = ("Loop",)


class LoopProgram(Program):
    """Blocks of a loop of the user's own."""

    of = "Loop"


@block("layout", of=LOOP)
class Layout(Block):
    """Where the loop runs, and in which precision."""

    kind: str = one_of("single", "ddp", "ddp", "ddp, unused", "ddp, copies", "fsdp", "fsdp", "fsdp")
    precision: str = one_of("32-true", "32-true", "32-true", "32-true", "32-true", "bf16-mixed", "16-mixed")

    @property
    def processes(self) -> int:
        """The number of processes."""
        return 1 if self.kind == "single" else 2


@block("rows", of=LOOP)
class Rows(Block):
    """The data, whose last batches may be smaller, or empty on one process."""

    number: int = one_of(24, 24, 21, 17)
    shuffled: bool = one_of(False, True)
    bad: bool = one_of(False, False, False, True)
    """Whether the loss of one sample is NaN, and the loop drops its batch by `zero_grad`."""


@block("reading_loops", of=LOOP)
class Reading(Block):
    """How the loop reads its loader, and a second one beside it or around it."""

    how: str = one_of("for", "for", "limit", "zip", "next of the second", "nested")
    """"limit": to a batch, counted by `loader.batch`, and left by `break` before it saves."""

    @property
    def two(self) -> bool:
        """Whether there is a second loader."""
        return self.how in ("zip", "next of the second", "nested")


@block("evaluation", of=LOOP)
class Evaluation(Block):
    """How often the loop evaluates the first model, on other data, each sample once."""

    every: int = one_of(0, 0, 1, 2)
    number: int = one_of(8, 9, 1)


@block("steps", of=LOOP)
class Steps(Block):
    """Optimizers, windows, clipping and schedules."""

    optimizer: str = one_of("SGD", "momentum", "AdamW")
    window: int = one_of(1, 1, 2, 3)
    held_back: str = one_of("ab", "a", "")
    """The models whose gradients in a window are reduced once, by `no_backward_sync`."""
    clip: str = one_of("no", "norm", "value")
    schedule: str = one_of("no", "step", "epoch")
    cleared: str = one_of("after", "before", "to zero")
    """When gradients are cleared; "to zero": after the step, by `set_to_none=False`."""

    def fits(self, program: Program) -> bool:
        if program.rows.bad and self.clip == "value":
            return False
        return self.window == 1 or (program.idea.updates == "at the end" and self.cleared != "before")

    def made_for(self, parameters: Any) -> torch.optim.Optimizer:
        """Return an optimizer."""
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if self.optimizer == "momentum" else 0.0)


@block("writes", of=LOOP)
class Writes(Block):
    """When the loop saves; what it tries that is refused; a step after which it goes back to its last checkpoint."""

    every: int = one_of(1, 2, 3)
    after_epochs: bool = one_of(False, True)
    mistake: str = one_of("no", "no", "load inside the loop", "save before the step")
    back_at: int = one_of(0, 0, 0, 4)
    noise: bool = one_of(False, False, True)
    """Whether the models have dropout: by hand nobody knows its numbers."""

    def fits(self, program: Program) -> bool:
        if self.mistake == "save before the step" and program.idea.updates != "at the end":
            return False
        return not self.back_at or program.reading_loops.how in ("for", "zip")


# -- what a step does --------------------------------------------------------------------------------------------------


class Idea(Block):
    """The models, their losses and backwards."""

    updates: ClassVar[str] = "at the end"
    """When optimizers step: after all backwards of a batch or window, or "its own"."""
    ends: ClassVar[tuple[int, ...]] = (1,)
    """The numbers of outputs of the trained models."""

    def nets(self, noise: float) -> dict[str, nn.Module]:
        """Return the models by name."""
        return {name: body(noise, end) for name, end in zip("ab", self.ends, strict=False)}

    def trained(self) -> str:
        """Return the names of the models that have an optimizer, in the order in which these step."""
        return "ab"[: len(self.ends)]

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        """Do the forwards and backwards of a batch."""
        raise NotImplementedError


def body(noise: float, outputs: int, inputs: int = FEATURES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Dropout(noise), nn.Linear(6, outputs)).double()


@block("idea", of=LOOP)
class OneLoss(Idea):
    """One forward and one backward."""

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        loop.backward(loop.mean((loop.a(x) - y).square()))


@block("idea", times=2, of=LOOP)
class SeveralLosses(Idea):
    """Several backwards, of as many forwards, or of one with `retain_graph`."""

    losses: int = one_of(2, 3)
    forwards: str = one_of("each", "one", "between")
    order: str = one_of("as made", "reversed")

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        scales = [1.0, -1.0, 2.0][: self.losses]
        if self.forwards == "one":
            outputs = loop.a(x)
            for number, scale in enumerate(scales, 1):
                loop.backward(loop.mean((outputs * scale - y).square()), retain_graph=number < len(scales))
            return
        made = [loop.a(x * scale) for scale in scales[: 1 if self.forwards == "between" else None]]
        if self.forwards == "between":  # one after the other, and then the rest
            loop.backward(loop.mean((made.pop() - y).square()))
            made = [loop.a(x * scale) for scale in scales[1:]]
        for outputs in made if self.order == "as made" else reversed(made):
            loop.backward(loop.mean((outputs - y).square()))


@block("idea", times=3, of=LOOP)
class TwoModels(Idea):
    """Two trained models, with backwards in any order."""

    ends: ClassVar[tuple[int, ...]] = (1, 1)
    way: str = one_of("beside", "sum", "chain", "cross")
    losses: int = one_of(1, 2)
    order: int = one_of(0, 1, 2, 3, 5, 8, 13, 23)
    """Number of the permutation of the backwards."""
    named: str = one_of("its own", "none", "a", "b")
    steps: str = one_of("ab", "ba")

    def fits(self, program: Program) -> bool:
        # The strategies that know a backward by its model have to be told the right one.
        return self.named in ("its own", "none") or self.way in ("sum", "cross") or program.layout.kind != "fsdp"

    def nets(self, noise: float) -> dict[str, nn.Module]:
        return {"a": body(noise, FEATURES if self.way == "chain" else 1), "b": body(noise, 1)}

    def trained(self) -> str:
        return self.steps

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        inputs = [x, -x][: self.losses]
        if self.way == "chain":
            made = [(loop.mean((loop.b(loop.a(one)) - y).square()), "b") for one in inputs]
        else:
            made = [(loop.mean((loop.models[name](one) - y).square()), name) for one in inputs for name in ("a", "b")]
        if self.way == "cross":  # each loss is of both
            (first, _), *rest = made
            made = [(loss + first, name) for loss, name in rest]
        if self.way == "sum":
            loop.backward(sum(loss for loss, _ in made), self.name_of("b"))  # type: ignore[arg-type]
            return
        orders = [*permutations(made)]
        chosen = orders[self.order % len(orders)]
        for number, (loss, name) in enumerate(chosen, 1):
            retain = self.way == "cross" and number < len(chosen)
            loop.backward(loss, self.name_of(name), **({"retain_graph": True} if retain else {}))

    def name_of(self, own: str) -> str | None:
        return {"its own": own, "none": None}.get(self.named, self.named)


@block("idea", times=2, of=LOOP)
class Gan(Idea):
    """A generator `a` and a discriminator `b`, each with steps of its own."""

    updates: ClassVar[str] = "its own"
    ends: ClassVar[tuple[int, ...]] = (FEATURES, 1)
    first: str = one_of("b", "a")
    again: bool = one_of(False, True)
    """Whether the generator runs again for the discriminator."""
    detached: bool = one_of(True, False)
    """False: the discriminator's loss leaves gradients in the generator, which are cleared."""
    critics: int = one_of(1, 2)
    every: int = one_of(1, 1, 2)
    """The discriminator steps after so many batches; its gradients wait."""
    between: bool = one_of(False, True)
    """The two losses of the discriminator have a backward each."""

    def fits(self, program: Program) -> bool:
        waits = self.every > 1  # and a step of the generator comes after it, after which a checkpoint has its gradients
        return (self.first == "b" or (self.detached and not waits)) and not (
            waits and (self.critics > 1 or not self.detached)
        )

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        fake = loop.a(x * 0.5)
        for name in (self.first, "a" if self.first == "b" else "b"):
            if name == "b":
                self.train_b(loop, x, fake)
            else:
                if self.every == 1:
                    loop.clear("b")
                loop.clear("a")
                loop.b.requires_grad_(False)
                loop.backward(loop.mean(softplus(-loop.b(fake))), "a")
                loop.b.requires_grad_(True)
                loop.update("a")
                if self.first == "a" or self.again:
                    fake = loop.a(x * 0.5)

    def train_b(self, loop: Loop, x: torch.Tensor, fake: torch.Tensor) -> None:
        for _ in range(self.critics):
            if self.every == 1:
                loop.clear("b")
            other = fake.detach() if self.detached else fake
            real, made = loop.mean(softplus(-loop.b(x))), loop.mean(softplus(loop.b(other)))
            options = {} if self.detached else {"retain_graph": True}
            if self.between:
                loop.backward(real, "b")
                loop.backward(made, "b", **options)
            else:
                loop.backward(real + made, "b", **options)
            if loop.batches % self.every == 0:
                loop.update("b")


@block("idea", of=LOOP)
class Distillation(Idea):
    """A teacher `t` without gradients, which may follow the student as an average."""

    set_up: bool = one_of(True, False)
    follows: bool = one_of(False, True)
    in_eval: bool = one_of(True, False)

    def nets(self, noise: float) -> dict[str, nn.Module]:
        return {"a": body(noise, 1), "t": body(noise, 1)}

    def fits(self, program: Program) -> bool:
        return not self.follows or self.set_up or program.layout.kind != "fsdp"

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        loop.t.train(not self.in_eval)
        with torch.no_grad():
            target = loop.t(x)
        loop.backward(loop.mean((loop.a(x) - target).square() + (loop.a(x) - y).square()))

    def after(self, loop: Loop) -> None:
        """Update the teacher."""
        if self.follows:
            with torch.no_grad():
                for mine, others in zip(loop.t.parameters(), loop.a.parameters(), strict=True):
                    mine.lerp_(others.detach(), 0.1)


@block("idea", of=LOOP)
class Policy(Idea):
    """Several updates of a policy for each batch, and one of its critic `b`."""

    updates: ClassVar[str] = "its own"
    ends: ClassVar[tuple[int, ...]] = (3, 1)
    number: int = one_of(2, 3)
    joined: bool = one_of(False, True)
    """Whether policy and critic have one loss."""

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        actions = (x.sum(1).abs() * 10).long() % 3
        with torch.no_grad():
            before = log_softmax(loop.a(x), 1).gather(1, actions[:, None])
            advantages = y - loop.b(x)
        for _ in range(self.number):
            loop.clear("a", "b")
            ratio = (log_softmax(loop.a(x), 1).gather(1, actions[:, None]) - before).exp()
            clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            gain, error = loop.mean(-clipped), loop.mean((loop.b(x) - y).square())
            if self.joined:
                loop.backward(gain + error, "a")
            else:
                loop.backward(gain, "a")
                loop.backward(error, "b")
            loop.update("a", "b")


@block("idea", of=LOOP)
class Contrastive(Idea):
    """Features gathered over all processes, with gradients of all or of one's own."""

    ends: ClassVar[tuple[int, ...]] = (3, 3)
    gradients: str = one_of("all", "own")
    named: bool = one_of(True, False)

    def fits(self, program: Program) -> bool:
        # Uneven batches have other lengths on each process.
        return program.rows.number % (4 * program.layout.processes) == 0 and not program.rows.bad

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        texts, images = normalize(loop.a(x), dim=1), normalize(loop.b(x.flip(1)), dim=1)
        loop.backward(loop.tools.contrast(texts, images, self.gradients) / loop.window, "b" if self.named else None)


@block("idea", of=LOOP)
class Heads(Idea):
    """Two heads on one body, with a loss each."""

    way: str = one_of("sum", "two backwards", "one of them by turns")

    def fits(self, program: Program) -> bool:
        # With gradients of zero an optimizer moves what took no part, and a checkpoint has no zeros.
        fits = self.way != "one of them by turns" or program.steps.cleared != "to zero"
        return fits and (self.way == "sum" or program.layout.kind not in ("ddp", "ddp, copies"))

    def nets(self, noise: float) -> dict[str, nn.Module]:
        return {"a": TwoHeads(noise)}

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        first, second = loop.a(x)
        one, other = loop.mean((first - y).square()), loop.mean((second + y).square())
        if self.way == "sum":
            loop.backward(one + other)
        elif self.way == "two backwards":
            loop.backward(one, retain_graph=True)
            loop.backward(other)
        else:
            loop.backward(other if loop.batches % 2 else one)


class TwoHeads(nn.Module):
    """A body and two layers on it."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.body, self.one, self.other = body(noise, 3), nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return self.one(features), self.other(features)


@block("idea", of=LOOP)
class Penalty(Idea):
    """A penalty on the gradient of the outputs by the inputs."""

    own_backward: bool = one_of(False, True)

    def fits(self, program: Program) -> bool:
        return program.layout.kind != "fsdp" and program.layout.precision == "32-true"

    def train(self, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        inputs = x.clone().requires_grad_()
        outputs = loop.a(inputs)
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss, penalty = loop.mean((outputs - y).square()), loop.mean((slopes.norm(dim=1) - 1).square())
        if self.own_backward:
            loop.backward(loss, retain_graph=True)
            loop.backward(penalty)
        else:
            loop.backward(loss + penalty)


# -- the loop ----------------------------------------------------------------------------------------------------------


class Loop:
    """The loop of a program, which is written once: `tools` are those of the Engine, or of torch alone.

    Args:
        resumed: the number of the save that it goes on from; None: it begins.
    """

    def __init__(self, program: LoopProgram, tools: Any, resumed: int | None = None) -> None:
        self.program, self.tools, self.idea = program, tools, program.idea
        self.models: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.schedules: dict[str, Any] = {}
        torch.manual_seed(3)
        nets = self.idea.nets(0.2 if program.writes.noise else 0.0)
        self.nets = nets
        for name, net in nets.items():
            if program.layout.precision != "32-true":
                net.float()
            if resumed is not None:
                nn.init.constant_(next(net.parameters()), 0.3)
            if name in self.idea.trained():
                optimizer = program.steps.made_for(net.parameters())
                self.models[name], self.optimizers[name] = tools.setup(net, optimizer)
                if program.steps.schedule != "no":
                    self.schedules[name] = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[name], 0.9)
            else:
                net.requires_grad_(False)
                self.models[name] = tools.setup(net) if getattr(self.idea, "set_up", True) else net
        self.loader = tools.loader(program.rows.number, program.rows.shuffled)
        self.other = tools.loader(16, False) if program.reading_loops.two else None
        self.held_out = tools.held_out(program.evaluation.number) if program.evaluation.every else None
        self.values: dict[int, float] = {}
        """What evaluations have found, by batch."""
        self.state: dict[str, Any] = {f"model {name}": model for name, model in self.models.items()}
        self.state |= {f"optimizer {name}": one for name, one in self.optimizers.items()}
        self.state |= {f"schedule {name}": one for name, one in self.schedules.items()}
        self.state |= {"batches": 0, "steps": 0}
        self.losses: dict[tuple[int, int], float] = {}
        """By batch and number of the backward in it; what is done again gives the same."""
        self.marks: dict[int, int] = {}
        """By save, the number of batches before it."""
        self.wrong: list[str] = []
        self.backwards = 0
        self.saves, self.window, self.went_back = resumed or 0, program.steps.window, False
        self.extra: Any = None
        if resumed is not None:
            tools.load(resumed, self.state)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("models", {}):
            return self.models[name]
        raise AttributeError(name)

    @property
    def batches(self) -> int:
        """The batches trained, with the one in progress."""
        return int(self.state["batches"])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the samples of the loop's first loader, as a part of a window."""
        mean = values.mean() * self.loader.weight / self.window
        return mean * torch.nan if self.bad else mean

    def backward(self, loss: torch.Tensor, name: str | None = None, **options: Any) -> None:
        """Add gradients."""
        if self.extra is not None:
            loss, self.extra = loss + self.extra, None
        self.backwards += 1
        place, found = (self.batches, self.backwards), loss.item()
        if repr(self.losses.setdefault(place, found)) != repr(found):  # NaN, too
            self.wrong.append(f"after going back the loss of {place} is {found} instead of {self.losses[place]}")
        self.tools.backward(loss, None if name is None else self.models[name], **options)

    def clear(self, *names: str) -> None:
        """Clear gradients before a backward."""
        for name in names if self.program.steps.cleared == "before" or self.idea.updates == "its own" else ():
            self.optimizers[name].zero_grad()

    def update(self, *names: str) -> None:
        """Step optimizers."""
        steps = self.program.steps
        for name in names:
            model, optimizer = self.models[name], self.optimizers[name]
            if steps.clip == "value":
                self.tools.clip(model, optimizer, clip_val=0.05)
            elif steps.clip == "norm" or self.program.rows.bad:
                norm = self.tools.clip(model, optimizer, max_norm=0.5)
                if not bool(torch.isfinite(norm)):
                    optimizer.zero_grad()
                    continue
            optimizer.step()
            if steps.schedule == "step":
                self.schedules[name].step()
            if steps.cleared != "before":
                optimizer.zero_grad(set_to_none=steps.cleared == "after")
        self.state["steps"] += 1

    def run(self) -> dict[str, Any]:
        """Run to the end, and return what there is then."""
        how, leading = self.program.reading_loops.how, self.loader
        if how == "nested":
            leading = self.other
        epoch = leading.epoch
        while epoch < EPOCHS:
            if self.read() == "back":
                self.tools.load(self.saves, self.state)
                epoch = leading.epoch
                continue
            if self.program.steps.schedule == "epoch":
                for schedule in self.schedules.values():
                    schedule.step()
            epoch += 1
            if self.program.writes.after_epochs:
                self.save()
        return self.tools.result(self)

    def read(self) -> str | None:
        """Go through an epoch; return "back" to go on from the last checkpoint."""
        how, loader, other = self.program.reading_loops.how, self.loader, self.other
        if how == "nested":
            for pair in other:
                for batch in loader:
                    self.step(batch, pair, len(loader))
                self.save()
        elif how == "zip":
            for batch, pair in zip(loader, other, strict=False):
                if self.step(batch, pair, min(len(loader), len(other))):
                    return "back"
        elif how == "next of the second":
            pairs = iter(other)
            for batch in loader:
                pair = next(pairs, None)
                if pair is None:
                    pairs = iter(other)
                    pair = next(pairs)
                self.step(batch, pair, len(loader))
        else:
            limit = min(2, len(loader)) if how != "for" else len(loader)
            for batch in loader:
                if self.step(batch, None, limit):
                    return "back"
                if how == "limit" and loader.batch == limit:
                    break
        return None

    def step(self, batch: Any, pair: Any, length: int) -> bool:
        """Train a batch. Return True if the loop has to go back."""
        program, tools, steps = self.program, self.tools, self.program.steps
        x, y, ids = tools.seen(self.loader, batch)
        self.bad = program.rows.bad and bool((ids == BAD).any())
        self.state["batches"] += 1
        self.backwards = 0
        last = self.loader.batch % self.window == 0 or self.loader.batch == length
        if steps.cleared == "before" and self.idea.updates == "at the end":
            for one in self.optimizers.values():
                one.zero_grad()
        with ExitStack() as held:
            for name in self.optimizers:
                if self.window > 1 and name in steps.held_back:
                    held.enter_context(tools.no_sync(self.models[name], enabled=not last))
            if pair is not None:
                more, _, _ = tools.seen(self.other, pair)
                outputs = self.a(more)
                outputs = outputs[0] + outputs[1] if isinstance(outputs, tuple) else outputs
                self.extra = (outputs - 0.5).square().mean() * self.other.weight
            self.idea.train(self, x, y)
        if not last:
            return False
        if program.writes.mistake == "save before the step":
            tools.refused(lambda: tools.save(0, self.state), "between backward and optimizer.step")
        if self.idea.updates == "at the end":
            self.update(*self.idea.trained())
        if hasattr(self.idea, "after"):
            self.idea.after(self)
        if program.evaluation.every and self.batches % program.evaluation.every == 0:
            self.evaluate()
        left = program.reading_loops.how == "limit" and self.loader.batch == length
        if self.batches % program.writes.every == 0 and program.reading_loops.how != "nested" and not left:
            self.save()
        if program.writes.mistake == "load inside the loop" and self.saves:
            tools.refused(lambda: tools.load(self.saves, self.state), "inside a loop over a loader")
        if program.writes.back_at and self.batches >= program.writes.back_at and self.saves and not self.went_back:
            self.went_back = True
            return bool(tools.goes_back)
        return False

    def evaluate(self) -> None:
        """Find the mean of the first model's outputs over the other data."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        self.a.eval()
        with torch.no_grad():
            for x, samples in self.held_out:
                outputs = self.a(x)
                outputs = outputs[0] if isinstance(outputs, tuple) else outputs
                total += outputs[:samples].sum()
                count += samples
        self.a.train()
        sums = self.tools.sums([total, torch.tensor(float(count))])
        if sums[1] != self.program.evaluation.number:
            self.wrong.append(f"an evaluation had {sums[1]} samples")
        self.values[self.batches] = float(sums[0] / sums[1])

    def save(self) -> None:
        self.saves += 1
        self.marks[self.saves] = self.batches
        self.tools.save(self.saves, self.state)


class _Batches:
    """A loader by hand: the global batches as they were read, by epoch."""

    weight = 1.0

    def __init__(self, orders: dict[int, list[Any]], number: int, size: int) -> None:
        self.orders, self.number, self.length = orders, number, -(-number // size)
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        if self.batch:
            self.epoch, self.batch = self.epoch + 1, 0
        for ids in self.orders.get(self.epoch, ()):
            self.batch += 1
            yield ids
        self.epoch, self.batch = self.epoch + 1, 0


def rows(number: int, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return the samples."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, FEATURES, generator=generator, dtype=torch.float64)
    return [(x, x.sum(0, keepdim=True), place) for place, x in enumerate(inputs)][first : first + number]


class ByHand:
    """torch alone, in one process, with global batches.

    Args:
        orders: by loader and epoch, the numbers of the samples of each batch, in parts by process.
    """

    goes_back = False

    def __init__(self, program: LoopProgram, orders: list[dict[int, list[Any]]]) -> None:
        self.program, self.orders = program, orders
        self.samples = rows(64)
        self.made = 0
        self.parts: list[int] = []

    def setup(self, net: nn.Module, *optimizers: Any) -> Any:
        return (net, *optimizers) if optimizers else net

    def loader(self, number: int, shuffled: bool) -> Any:
        self.made += 1
        return _Batches(self.orders[self.made - 1], number, 4 * self.program.layout.processes)

    def held_out(self, number: int) -> Any:
        x, _, _ = self.tensors([*range(40, 40 + number)])
        return [(x, number)]

    def sums(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        return values

    def seen(self, loader: Any, parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.parts = [len(part) for part in parts]
        return self.tensors([number for part in parts for number in part])

    def tensors(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y, ids = zip(*(self.samples[number] for number in numbers), strict=True)
        dtype = torch.float64 if self.program.layout.precision == "32-true" else torch.float32
        return torch.stack(x).to(dtype), torch.stack(y).to(dtype), torch.tensor(ids)

    def backward(self, loss: torch.Tensor, model: Any, **options: Any) -> None:
        loss.backward(**options)

    def no_sync(self, model: Any, enabled: bool) -> Any:
        return nullcontext()

    def clip(self, model: Any, optimizer: Any, clip_val: float | None = None, max_norm: float = 0.0) -> Any:
        if clip_val is not None:
            return nn.utils.clip_grad_value_(model.parameters(), clip_val)
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def contrast(self, texts: torch.Tensor, images: torch.Tensor, gradients: str) -> torch.Tensor:
        losses, at = [], 0
        for size in self.parts:
            mine = slice(at, at + size)
            others = images
            if gradients == "own":
                others = images.detach().clone()
                others[mine] = images[mine]
            losses.append(cross_entropy(texts[mine] @ others.T * 3, torch.arange(at, at + size)))
            at += size
        return torch.stack(losses).mean()

    def refused(self, call: Any, words: str) -> None:
        pass

    def save(self, number: int, state: Any) -> None:
        pass

    def result(self, loop: Loop) -> dict[str, Any]:
        return {
            "weights": {name: dict(net.state_dict()) for name, net in loop.nets.items()},
            "rates": [one.param_groups[0]["lr"] for one in loop.optimizers.values()],
            "steps": loop.state["steps"],
            "values": loop.values,
        }
