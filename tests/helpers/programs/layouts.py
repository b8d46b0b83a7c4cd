"""Run drawn loops with the Engine, on one process or two, and compare them with torch alone and with their resumes."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.helpers.processes import run_distributed
from tests.helpers.programs.loops import EPOCHS, ByHand, Loop, LoopProgram, rows
from trainer import ConfigError, Engine
from trainer.strategies import DDPStrategy

STRATEGIES: dict[str, Any] = {
    "single": lambda: "single_device",
    "ddp": lambda: "ddp",
    "ddp, unused": lambda: DDPStrategy(find_unused_parameters=True),
    "ddp, copies": lambda: DDPStrategy(gradient_as_bucket_view=False),
    "fsdp": lambda: "fsdp",
}


class ByEngine:
    """The product's side of a loop."""

    goes_back = True

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.loaders: list[Any] = []
        self.orders: list[dict[tuple[int, int], list[int]]] = []
        self.wrong: list[str] = []
        self.setup, self.no_sync, self.clip = engine.setup, engine.no_backward_sync, engine.clip_gradients

    def loader(self, number: int, shuffled: bool) -> Any:
        made = self.engine.setup_dataloaders(DataLoader(rows(number), 4, shuffle=shuffled))  # type: ignore[arg-type]
        self.loaders.append(made)
        self.orders.append({})
        return made

    def held_out(self, number: int) -> Any:
        given: Any = DataLoader(rows(number, 40), 2)  # type: ignore[arg-type]
        return _HeldOut(self, self.engine.setup_dataloaders(given, training=False))

    def sums(self, values: list[torch.Tensor]) -> Any:
        return self.engine.all_reduce(values, reduce_op="sum")

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() if self.engine.config.precision.autocast else x

    def seen(self, loader: Any, batch: Any) -> Any:
        x, y, ids = batch
        x, y = self.cast(x), self.cast(y)
        place = next(number for number, one in enumerate(self.loaders) if one is loader)
        self.orders[place][loader.epoch, loader.batch] = ids.tolist()[: loader.samples]
        return x, y, ids

    def backward(self, loss: torch.Tensor, model: Any, **options: Any) -> None:
        self.engine.backward(loss, model=model, **options)

    def contrast(self, texts: torch.Tensor, images: torch.Tensor, gradients: str) -> torch.Tensor:
        engine, size = self.engine, len(texts)
        own = slice(engine.rank * size, (engine.rank + 1) * size)
        every = engine.all_gather(images, sync_grads=gradients == "all").reshape(-1, images.shape[1])
        if gradients == "own" and engine.world_size > 1:
            every[own] = images
        return torch.nn.functional.cross_entropy(texts @ every.T * 3, torch.arange(own.start, own.stop))

    def refused(self, call: Any, words: str) -> None:
        try:
            call()
        except ConfigError as error:
            if words not in str(error):
                self.wrong.append(f"refused: {error}")
        else:
            self.wrong.append(f"not refused: {words}")

    def save(self, number: int, state: Any) -> None:
        self.engine.save(self.folder / str(number), state)

    def load(self, number: int, state: Any) -> None:
        self.engine.load(self.folder / str(number), state)

    def result(self, loop: Loop) -> dict[str, Any]:
        models = {name: model for name, model in loop.models.items() if model is not loop.nets[name]}
        weights = {name: self.engine.full_state_dict(model, everywhere=True) for name, model in models.items()}
        weights |= {name: dict(net.state_dict()) for name, net in loop.nets.items() if name not in models}
        return {
            "weights": {name: weights[name] for name in loop.nets},
            "rates": [one.param_groups[0]["lr"] for one in loop.optimizers.values()],
            "steps": loop.state["steps"],
            "values": loop.values,
            "losses": loop.losses,
            "marks": loop.marks,
            "local": [one.state_dict()["state"] for one in loop.optimizers.values()],
            "saves": loop.saves,
            "orders": self.orders,
            "wrong": [*self.wrong, *loop.wrong],
        }


class _HeldOut:
    """A loader of an evaluation, which gives inputs and how many of them count."""

    def __init__(self, tools: ByEngine, loader: Any) -> None:
        self.tools, self.loader = tools, loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for x, _, _ in self.loader:
            yield self.tools.cast(x), self.loader.samples


def run_on_this_process(program: LoopProgram, folder: Path, resumed: int | None = None) -> dict[str, Any]:
    """Run a loop with the Engine, to its end; return what there is then."""
    layout = program.layout
    strategy = STRATEGIES[layout.kind]()
    devices = layout.processes
    with Engine(accelerator="cpu", devices=devices, strategy=strategy, precision=layout.precision, seed=7) as engine:
        return Loop(program, ByEngine(engine, folder), resumed).run()


def run_each(programs: list[tuple[int, str]], folder: str) -> None:
    """Run loops on this process, each whole and again from some of its saves; called on all processes."""
    warnings.simplefilter("ignore")
    for number, text in programs:
        program = parsed(text)
        place, rng = Path(folder) / str(number), random.Random(number)
        whole = run_on_this_process(program, place)
        again = sorted(rng.sample(range(1, whole["saves"] + 1), min(2, whole["saves"])))
        resumed = {save: run_on_this_process(program, place, save) for save in again}
        with open(f"{place} on {os.environ['RANK']}", "wb") as file:
            pickle.dump((whole, resumed), file)


def parsed(text: str) -> LoopProgram:
    """Return the program of its `repr`."""
    from tests.helpers.programs import loops

    made: LoopProgram = eval(text, vars(loops))
    return made


def problems_of_loops(programs: dict[int, LoopProgram], processes: int) -> dict[int, list[str]]:
    """Run loops of one number of processes, and return what is wrong with each."""
    folder = Path(tempfile.mkdtemp(prefix="loops-"))
    found: dict[int, list[str]] = {}
    rest = [(number, repr(program)) for number, program in programs.items()]
    try:
        while rest:
            ended = ""
            try:
                run_distributed(run_each, processes, rest, str(folder), timeout=60 + 20 * len(rest))
            except AssertionError as error:
                ended = str(error)[-3000:]
            while rest:
                number, _ = rest[0]
                files = [folder / f"{number} on {rank}" for rank in range(processes)]
                if not all(file.exists() for file in files):
                    break
                ranks = [pickle.loads(file.read_bytes()) for file in files]
                found[number] = differences(programs[number], ranks)
                del rest[0]
            if rest:
                found[rest.pop(0)[0]] = [f"ended: {ended}"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def differences(program: LoopProgram, ranks: list[Any]) -> list[str]:
    """Return what differs from torch alone, between the processes, and after a resume."""
    wrong: list[str] = []
    first, _ = ranks[0]
    for rank, (whole, resumed) in enumerate(ranks):
        wrong += whole["wrong"]
        if not same(whole["weights"], first["weights"]):
            wrong.append(f"the weights of rank {rank} differ from those of rank 0")
        for save, one in resumed.items():
            # Data of the user's is that of rank 0.
            for what in ("weights", "rates", "steps", "local", "losses", "values"):
                expected, mark = whole[what], whole["marks"][save]
                if what == "losses":
                    expected = {place: loss for place, loss in expected.items() if place[0] > mark}
                if what == "values":
                    expected = {place: value for place, value in expected.items() if place > mark}
                if not same(one[what], expected):
                    wrong.append(f"rank {rank}, resumed from save {save}: other {what}")
            wrong += one["wrong"]
    orders = [global_order([whole["orders"][number] for whole, _ in ranks]) for number in range(len(first["orders"]))]
    wrong += wrong_order(program, orders[0])
    if not program.writes.noise and program.layout.precision != "16-mixed":  # which leaves steps out
        with warnings.catch_warnings():
            # A program may drop its first batch, and step its schedules.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            expected = Loop(program, ByHand(program, orders)).run()
        low = program.layout.precision != "32-true"
        bound = {"rtol": 0.1, "atol": 0.1} if low else {"rtol": 1e-5, "atol": 1e-7}
        for what in ("weights", "rates", "steps", "values"):
            try:
                torch.testing.assert_close(first[what], expected[what], check_dtype=False, **bound)
            except AssertionError as error:
                wrong.append(f"{what} are not those by hand: {' '.join(str(error).split())}")
    return wrong


def global_order(ranks: list[dict[tuple[int, int], list[int]]]) -> dict[int, list[list[list[int]]]]:
    """Return by epoch the samples of each global batch, in parts by process."""
    found: dict[int, list[list[list[int]]]] = {}
    for epoch, batch in sorted(ranks[0]):
        found.setdefault(epoch, []).append([rank.get((epoch, batch), []) for rank in ranks])
    return found


def wrong_order(program: LoopProgram, order: dict[int, list[list[list[int]]]]) -> list[str]:
    """Return what is wrong with the samples of the first loader."""
    number, wrong = program.rows.number, []
    for epoch, batches in order.items():
        flat = [one for parts in batches for part in parts for one in part]
        right = sorted(flat) == sorted({*flat}) and set(flat) <= {*range(number)}
        if program.reading_loops.how in ("for", "next of the second", "nested"):
            right = sorted(flat) == [*range(number)]
        if not program.rows.shuffled and flat != [*range(len(flat))]:
            right = False
        if not right:
            wrong.append(f"order of epoch {epoch}: {batches}")
    if len(order) < EPOCHS:
        wrong.append(f"epochs: {[*order]}")
    return wrong


def same(one: Any, other: Any) -> bool:
    """Whether nested values have the same bits."""
    if isinstance(one, torch.Tensor):
        if hasattr(one, "to_local"):
            one, other = one.to_local(), other.to_local()
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)
