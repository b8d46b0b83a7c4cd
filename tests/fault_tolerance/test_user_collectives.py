"""Collectives that users call are compared between the processes: drawn programs, with a mistake of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import fork_ranks, run_distributed
from tests.tiers import Inputs
from trainer import ConfigError, Engine, Trainer, TrainModule

TWO: dict[str, Any] = {"accelerator": "cpu", "devices": 2}
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
EVEN, UNEVEN = 8, 5
"""Samples of an evaluation by two processes in batches of 2: the processes have as many batches, and not as many."""
DTYPES = (torch.float32, torch.int64, torch.bfloat16)


# -- programs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a program, in the loop over a loader or, without one, after the loops."""

    name: str
    place: int
    tree: dict[str, tuple[tuple[int, ...], torch.dtype]]
    loader: int | None
    check: bool


@dataclass(frozen=True)
class Drawn:
    """A program, and the one that rank 1 runs in its place."""

    calls: tuple[Call, ...]
    samples: tuple[int, int]
    mistake: str
    of_rank_1: tuple[Call, ...]
    ends_after: int | None = None
    """Rank 1 leaves the program after this call."""
    breaks: tuple[int, int] | None = None
    """Rank 1 leaves the loop of this call before this batch."""
    order: tuple[str, ...] = field(default=())
    """The order of keys on rank 1."""

    @property
    def is_right(self) -> bool:
        loops = any(self.samples[call.loader] == UNEVEN for call in self.calls if call.loader is not None)
        return self.mistake == "none" and not loops


def draw(rng: random.Random, names: tuple[str, ...], mistakes: tuple[str, ...]) -> Drawn:
    def call(check: bool) -> Call:
        keys = rng.sample(("loss", "count", "x", "y.z"), rng.randint(2, 4))
        shapes = {key: tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3))) for key in keys}
        tree = {key: (shape, rng.choice(DTYPES)) for key, shape in shapes.items()}
        return Call(rng.choice(names), rng.randrange(3), tree, rng.choice((None, 0, 1)), check)

    mistake = rng.choice(("none", *mistakes))
    samples = (EVEN, EVEN)
    if mistake == "uneven":
        samples = rng.choice(((EVEN, UNEVEN), (UNEVEN, EVEN), (UNEVEN, UNEVEN)))
    check = mistake != "none" or rng.random() < 0.7
    calls = [call(check) for _ in range(rng.randint(2, 5))]
    if mistake in ("uneven", "break"):
        calls[0] = replace(calls[0], loader=samples.index(min(samples)))
    at = 0 if mistake == "break" else rng.randrange(len(calls) - (mistake == "ends"))
    of_rank_1 = [*calls]
    of_rank_1[at] = mistaken(calls[at], mistake, names, rng)
    return Drawn(
        tuple(calls),
        samples,
        mistake,
        tuple(of_rank_1),
        ends_after=at if mistake == "ends" else None,
        breaks=(at, rng.randrange(2)) if mistake == "break" else None,
        order=tuple(rng.sample(("loss", "count", "x", "y.z"), 4)),
    )


def mistaken(call: Call, mistake: str, names: tuple[str, ...], rng: random.Random) -> Call:
    """Return what rank 1 calls by mistake."""
    key = rng.choice([*call.tree])
    (*first, last), dtype = call.tree[key]
    if mistake == "place":
        return replace(call, place=(call.place + 1) % 3)
    if mistake == "name":
        return replace(call, name=rng.choice([name for name in names if name != call.name]))
    if mistake == "key":
        return replace(call, tree={name: one for name, one in call.tree.items() if name != key})
    if mistake == "shape":  # a length that gather_uneven does not allow to differ, too
        shape = (*first, last + 1) if first else (last, 2)
        return replace(call, tree={**call.tree, key: (shape, dtype)})
    if mistake == "dtype":
        return replace(call, tree={**call.tree, key: ((*first, last), DTYPES[DTYPES.index(dtype) - 1])})
    return call


def values(call: Call, number: int, batch: int, rank: int) -> dict[str, torch.Tensor]:
    """Return what a rank gives to a call: for `gather_uneven` rank 1 has a row more."""
    found = {}
    for position, (key, (shape, dtype)) in enumerate(sorted(call.tree.items())):
        rows = shape[0] + rank * (call.name == "gather_uneven")
        tensor = torch.full((rows, *shape[1:]), 50 * number + 20 * batch + 5 * position + rank)
        found[key] = tensor.to(dtype)
    return found


def expected(program: Drawn, steps: list[tuple[int, int]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what each call returns if all processes make the same ones."""
    for number, batch in steps:
        call = program.calls[number]
        first, second = (values(call, number, batch, rank) for rank in range(2))
        for key, one in first.items():
            both = {"all_gather": torch.stack, "gather_uneven": torch.cat, "all_reduce": torch.stack}[call.name]
            first[key] = both([one, second[key]])
            if call.name == "all_reduce":
                first[key] = first[key].sum(0).to(one.dtype)
        yield first


def here(collective: Any, data: Any, check: bool) -> Any:
    return collective(data, check=check)


def there(collective: Any, data: Any, check: bool) -> Any:
    return collective(data, check=check)


PLACES = (
    here,
    there,
    lambda *arguments: here(*arguments),
)


def make(program: Drawn, owner: Any, rank: int, number: int, batch: int) -> dict[str, torch.Tensor]:
    call = (program.of_rank_1 if rank else program.calls)[number]
    data = values(call, number, batch, rank)
    if rank:
        data = {key: data[key] for key in program.order if key in data}
    collective = getattr(owner, call.name)
    if call.name == "all_reduce":
        return PLACES[call.place](lambda one, check: collective(one, "sum", check), data, call.check)
    return PLACES[call.place](collective, data, call.check)


Outcome = tuple[list[dict[str, torch.Tensor]], str | None]
"""What the calls of a program have returned, and its error."""


def by_engine(program: Drawn) -> Outcome:
    found: list[dict[str, torch.Tensor]] = []
    try:
        with Engine(**TWO) as engine:
            loaders = [
                engine.setup_dataloaders(DataLoader(list(range(samples)), batch_size=2), training=False)
                for samples in program.samples
            ]
            rank = engine.global_rank
            for number, call in enumerate(program.calls):
                for batch, _ in enumerate([None] if call.loader is None else loaders[call.loader]):
                    if rank and program.breaks == (number, batch):
                        break
                    found.append(make(program, engine, rank, number, batch))
                if rank and program.ends_after == number:
                    break
    except ConfigError as error:
        return found, str(error)
    return found, None


class Module(TrainModule):
    def __init__(self, program: Drawn) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.program, self.found = program, []  # type: ignore[var-annotated]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.make_those_of(dataloader_idx, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.make_those_of(None, 0)

    def make_those_of(self, loader: int | None, batch: int) -> None:
        for number, call in enumerate(self.program.calls):
            if call.loader == loader:
                self.found.append(make(self.program, self, self.global_rank, number, batch))


def by_module(program: Drawn) -> Outcome:
    module = Module(program)
    loaders = [DataLoader(list(range(samples)), batch_size=2) for samples in program.samples]
    try:
        Trainer(**TWO, **QUIET, enable_checkpointing=False).validate(module, loaders)
    except ConfigError as error:
        return module.found, str(error)
    return module.found, None


RUN = {"Engine": by_engine, "TrainModule": by_module}
NAMES = {"Engine": ("all_gather", "all_reduce", "gather_uneven"), "TrainModule": ("all_gather", "gather_uneven")}
DATA = ("place", "name", "key", "shape", "dtype")
MISTAKES = {"Engine": (*DATA, "uneven", "break", "ends"), "TrainModule": DATA}
"""A module's other ones leave a process in a collective of the trainer's, and are below."""


def steps_of(program: Drawn, owner: str) -> list[tuple[int, int]]:
    """Return the calls that are to be made, in order: the number of each and its batch."""
    batches = {loader: range(EVEN // 4) for loader in (0, 1)}
    if owner == "Engine":
        calls = enumerate(program.calls)
        return [(number, batch) for number, call in calls for batch in batches.get(call.loader, (0,))]  # type: ignore[arg-type]
    of = {loader: [n for n, call in enumerate(program.calls) if call.loader == loader] for loader in (0, 1, None)}
    return [(number, batch) for loader in of for batch in batches.get(loader, (0,)) for number in of[loader]]  # type: ignore[arg-type]


def run_all(owner: str, programs: list[Drawn]) -> list[Outcome]:
    return [RUN[owner](program) for program in programs]


@pytest.mark.parametrize("owner", [*RUN])
def test_a_drawn_mistake_is_an_error_on_all_processes_and_no_call_is_answered_by_another(
    owner: str, inputs: Inputs
) -> None:
    programs = {rng: draw(rng, NAMES[owner], MISTAKES[owner]) for rng in inputs}
    ranks = run_distributed(run_all, 2, owner, [*programs.values()])
    for (rng, program), *outcomes in zip(programs.items(), *ranks, strict=True):
        right = [*expected(program, steps_of(program, owner))]
        for found, error in outcomes:
            for ours, theirs in zip(found, right, strict=False):
                assert sorted(ours) == sorted(theirs), rng
                torch.testing.assert_close(ours, dict(theirs), rtol=0, atol=0, msg=f"{rng}: {program}")
            if program.is_right:
                assert (len(found), error) == (len(right), None), (rng, program)
            else:
                assert error is not None, (rng, program)
                assert error.partition(" Where ")[0] == str(outcomes[0][1]).partition(" Where ")[0], (rng, program)
                both = "rank 0 calls " in error and "rank 1 calls " in error
                assert both or ("on rank 0" in error and "on rank 1" in error), (rng, error)


def predict(samples: int) -> list[torch.Tensor]:
    """Return the outputs and targets of all processes, gathered as in docs/engine.md."""
    inputs = torch.arange(samples, dtype=torch.float32)[:, None]
    with Engine(accelerator="cpu", devices=3) as engine:
        model = engine.setup(nn.Identity())
        loader = engine.setup_dataloaders(DataLoader(TensorDataset(inputs, inputs * 2), batch_size=2), training=False)
        outputs, targets = [], []
        with torch.no_grad():
            for x, y in loader:
                outputs.append(model(x))
                targets.append(y)
        return engine.gather_uneven([torch.cat(one) if one else None for one in (outputs, targets)])


NOT_ROWS = {"number": 3.0, "scalar": {"a": torch.ones(())}, "a number on 0 and 2": 3.0}


def gather_more() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Engine(accelerator="cpu", devices=3) as engine:
        rank = engine.global_rank
        weight = torch.ones(rank, 2, requires_grad=True)
        engine.gather_uneven(2 * weight if rank else None, sync_grads=True).sum().backward()
        found["gradient"] = weight.grad
        found["nowhere"] = engine.gather_uneven({"a": None, "b": [torch.ones(0, 2)]})
        found["stacked"] = engine.all_gather(torch.ones(0, 2))
        for name, mistake in NOT_ROWS.items():
            with pytest.raises(ConfigError) as error:
                engine.gather_uneven(mistake if rank != 1 or "2" not in name else torch.ones(2))
            found[name] = str(error.value)
        with pytest.raises(ConfigError) as error:
            engine.gather_uneven({"a": torch.ones(2, 1 + rank % 2)}, check=False)
        found["rows"] = str(error.value)
        with pytest.raises(ConfigError) as error:
            engine.all_reduce(1.0, "min" if rank == 2 else "sum")
        found["operation"] = str(error.value)
    return found


def predict_all(sizes: list[int]) -> list[Any]:
    return [gather_more(), *(predict(samples) for samples in sizes)]


def test_predictions_are_gathered_after_the_loop_from_processes_with_any_number_of_batches() -> None:
    sizes = [1, 2, 5, 6, 13]
    for rank, (more, *results) in enumerate(run_distributed(predict_all, 3, sizes)):
        if rank:
            assert more["gradient"].tolist() == [[6.0, 6.0]] * rank  # the sum of the gradients of three losses
        assert (more["nowhere"]["a"], more["nowhere"]["b"][0].shape, more["stacked"].shape) == (None, (0, 2), (3, 0, 2))
        assert "the data has a float without rows on rank 2. It joins tensors" in more["number"]
        assert "['a'] has a Tensor without rows on rank 2." in more["scalar"]
        mixed = "the data has a float without rows on rank 2, and rows of [] torch.float32 on rank 1."
        assert mixed in more["a number on 0 and 2"]
        assert "['a'] has rows of [1] torch.float32 on rank 2, and rows of [2] torch.float32 on rank 1" in more["rows"]
        assert "rank 0 calls engine.all_reduce(sum) in " in more["operation"]
        assert "rank 2 calls engine.all_reduce(min) in " in more["operation"]
        for samples, (outputs, targets) in zip(sizes, results, strict=True):
            assert sorted(outputs.flatten().tolist()) == list(range(samples))
            assert (targets == 2 * outputs).all()


# -- a process that goes on without the call ---------------------------------------------------------------------------

SCRIPT = """
import sys
import time
import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from trainer import Engine, Trainer, TrainModule

case = sys.argv[1]
x = torch.ones(40, 4)
data = DataLoader(TensorDataset(x, x[:, :1]), 4)
held_out = DataLoader(TensorDataset(x[:9], x[:9, :1]), 2)

def of_engine():
    with Engine(accelerator="cpu", devices=2, strategy="ddp", seed=1) as engine:
        net = torch.nn.Linear(4, 1)
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        training = engine.setup_dataloaders(data)
        validation = engine.setup_dataloaders(held_out, training=False)
        for number, (x, y) in enumerate(training):
            odd = engine.rank == 1 and number == 2
            if case == "leaves" and odd:
                break
            if case == "exits" and odd:
                sys.exit(0)
            if case == "before backward" and odd:
                engine.all_gather(x.mean())  # by rank 1 alone
            engine.backward(mse_loss(model(x), y))
            if case == "before save" and odd:
                engine.all_reduce(x.mean())  # by rank 1 alone
            optimizer.step()
            optimizer.zero_grad()
            if case == "before save":
                engine.save("saved", {"model": model})  # by both
        with torch.no_grad():
            for x, y in validation:
                loss = mse_loss(model(x), y)
                if case == "slow" and validation.batch == 3:  # of one process alone
                    time.sleep(3)
        if case == "broadcast" and engine.rank == 1:
            engine.all_reduce(1)  # by rank 1 alone
        if case == "slow" or case == "broadcast":
            engine.broadcast(3)  # by both

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def on_fit_start(self):
        self.alone = torch.distributed.new_group([1])
    def training_step(self, batch, batch_idx):
        if case == "before backward" and self.global_rank == 1 and batch_idx == 2:
            self.all_gather(batch[0].mean())  # by rank 1 alone
        if case == "group":
            if self.global_rank == 1 and batch_idx == 2:
                self.all_gather(batch[0].mean(), group=self.alone)
                time.sleep(3)
            self.all_gather(batch[0].mean())
        return mse_loss(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        if case == "uneven":
            self.all_gather(batch[0].mean())  # by both
    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)

def of_module():
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Net(), data, held_out)

of_engine() if sys.argv[2] == "Engine" else of_module()
print("done")
"""


def line(words: str, after: str = "") -> str:
    """Return the place of the line of SCRIPT with these words."""
    start = SCRIPT[: SCRIPT.index(words, SCRIPT.index(after))]
    return f"train.py:{start.count(chr(10)) + 1})"


MESSAGES = {
    ("leaves", "Engine"): (
        "rank 1 calls the end of `with Engine(...)`, and rank 0 waits in ",
        line("engine.backward("),
    ),
    ("exits", "Engine"): ("rank 1 calls the end of `with Engine(...)`, and rank 0 waits in ", line("engine.backward(")),
    ("before backward", "Engine"): (
        f"rank 1 calls engine.all_gather in of_engine ({line('engine.all_gather(')}, called from <module> (",
        "in batch 3 of epoch 0 of loader 0, and rank 0 has gone on without, to ",
        line("engine.backward("),
    ),
    ("before save", "Engine"): (
        "rank 0 calls engine.save(saved), and rank 1 calls engine.all_reduce(mean) in of_engine "
        f"({line('engine.all_reduce(')}",
    ),
    ("broadcast", "Engine"): (
        "rank 0 calls engine.broadcast(src=0), and rank 1 calls engine.all_reduce(mean) in of_engine "
        f"({line('engine.all_reduce(1)')}",
    ),
    ("before backward", "TrainModule"): (
        f"rank 1 calls self.all_gather in training_step ({line('self.all_gather(')}, after step 2, in epoch 0, batch 2",
        "rank 0 waits in all_reduce of ",
    ),
    ("uneven", "TrainModule"): (
        f"rank 1 calls self.all_gather in validation_step ({line('self.all_gather(', 'uneven')}, after step 5, in "
        "epoch 0, batch 5, at batch 2 of evaluation loader 0, and rank 0 has gone on without, to ",
        "collect in the loop, and call gather_uneven once after it",
    ),
}

RIGHT = (("slow", "Engine"), ("group", "TrainModule"))


def test_a_process_that_goes_on_without_a_call_is_named_with_its_place() -> None:
    """Without a timeout, and in one message; and a process that is only slow, or gathers in a group, is not."""
    Path("train.py").write_text(SCRIPT)
    running = {key: fork_ranks("train.py", *key) for key in [*MESSAGES, *RIGHT]}
    try:
        results = {key: one.wait() for key, one in running.items()}
    finally:
        for one in running.values():
            one.kill()
    for key, message in MESSAGES.items():
        errors = results[key].check(1).stderr
        assert all(one in errors for one in message), (key, errors)
        assert errors.count(" of 2 failed:") == 1, (key, errors)
        assert not any(one in errors for one in ("Connection closed", "SIGABRT")), (key, errors)
    for key in RIGHT:
        assert results[key].check(0).stdout.count("done") == 2
