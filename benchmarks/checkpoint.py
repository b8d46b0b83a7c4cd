"""Time of saves and loads: plain, with async_save, with torch's DCP, and the plain copies, writes and reads below them.

All ways save the same state of the same run, in turn, in rounds. "Blocked" is the time until the loop continues,
"on disk" until the checkpoint is flushed to the disk. Ours has a checksum of every file; DCP's has none. The ratios
are medians over the rounds, each of two ways in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks._task import OFF
from trainer import Callback, Trainer, TrainModule, __version__
from trainer.checkpoint.async_writer import BackgroundWriter
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.safetensors_io import flat_bytes
from trainer.checkpoint.writing import write_checkpoint

WIDTH = 1024
PLAIN, BACKGROUND, WRITE = "foreground", "background (async_save=True)", "plain write and fsync"
DCP_KEPT, COPY = "DCP async_save, stager kept", "plain copy, into the same memory"
"""The names of the ways that are compared with one another."""


class Model(TrainModule):
    """Blocks as in a transformer; AdamW has done one step, so that all its state exists."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        block = 8 * WIDTH * WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(max(1, round(parameters / block)))
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(parameter.mean() for parameter in self.parameters())  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@dataclass
class Times:
    """Times of one way, per round, in seconds; memory in bytes."""

    blocked: list[float] = field(default_factory=list)
    on_disk: list[float] = field(default_factory=list)
    peak: int = 0


Way = Callable[[Trainer, Path], "Callable[[], None] | None"]
"""Saves the state and returns when the loop may continue; the returned function waits until all is on disk."""


def nothing() -> None:
    """Wait for nothing."""


def foreground(trainer: Trainer, path: Path) -> Callable[[], None]:
    trainer.save_with(lambda state, info: write_checkpoint(path, state, info=info), {})
    return nothing


class Background:
    """`ModelCheckpoint(async_save=True)`, which reuses its memory."""

    def __init__(self) -> None:
        self.writer = BackgroundWriter()

    def __call__(self, trainer: Trainer, path: Path) -> Callable[[], None]:
        trainer.save_with(lambda state, info: self.writer.start(path, state, info, on_committed=nothing), {})
        return self._finish

    def _finish(self) -> None:
        self.writer.wait()
        _, error = self.writer.result()
        if error is not None:
            raise error


class DCP:
    """torch.distributed.checkpoint's `async_save` in a thread; `stager`: keep its memory from save to save."""

    def __init__(self, keep_stager: bool) -> None:
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if keep_stager else None

    def __call__(self, trainer: Trainer, path: Path) -> Callable[[], None]:
        futures: list[Any] = []

        def save(state: dict[str, Any], info: dict[str, Any]) -> None:
            futures.append(async_save(state, checkpoint_id=path, async_stager=self.stager))

        trainer.save_with(save, {})
        return lambda: futures[0].result() and None


class Copy:
    """One plain copy of all tensors of model and optimizer, into the same memory each time or into fresh one."""

    def __init__(self, fresh: bool) -> None:
        self.fresh = fresh
        self.copies: list[torch.Tensor] = []

    def __call__(self, trainer: Trainer, path: Path) -> None:
        optimizer = trainer.optimizers[0]
        tensors = [*trainer.module.state_dict().values()]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        if not self.copies:
            self.copies = [tensor.detach().clone() for tensor in tensors]
        else:
            for copy, tensor in zip(self.copies, tensors, strict=True):
                copy.copy_(tensor.detach())
        if self.fresh:
            self.copies = []


class PlainWrite:
    """Write and flush the bytes of all tensors of model and optimizer, into one file each, without anything else."""

    def __call__(self, trainer: Trainer, path: Path) -> Callable[[], None]:
        path.mkdir()
        groups = [[*trainer.module.state_dict().values()]]
        groups.append([value for state in trainer.optimizers[0].state.values() for value in state.values()])
        for number, tensors in enumerate(groups):
            with open(path / str(number), "xb") as file:
                for tensor in tensors:
                    file.write(flat_bytes(tensor.detach()).numpy().data)
                file.flush()
                os.fsync(file.fileno())
        return nothing


def verified_load(path: Path) -> None:
    """Read a checkpoint, and compare its files with their checksums."""
    read_checkpoint(path)


def plain_read(path: Path) -> None:
    """Read the same files, each into fresh memory."""
    for file in path.iterdir():
        buffer = torch.empty(file.stat().st_size, dtype=torch.uint8)
        with open(file, "rb", buffering=0) as opened:
            view, position = buffer.numpy().data, 0
            while position < len(view):
                position += opened.readinto(view[position : position + (16 << 20)])


LOADS: dict[str, Callable[[Path], None]] = {"load, verified": verified_load, "plain read": plain_read}


class Rounds(Callback):
    """After the first step, save in every way in turn, in each round starting with a different one."""

    def __init__(self, ways: dict[str, Way], rounds: int, folder: Path) -> None:
        self.ways = ways
        self.rounds = rounds
        self.folder = folder
        self.times = {name: Times() for name in ways}
        self.loads: dict[str, list[float]] = {name: [] for name in LOADS}
        self.size = 0

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        names = list(self.ways)
        for number in range(self.rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                self._once(trainer, name)
        self._load(trainer)

    def _load(self, trainer: Trainer) -> None:
        """Read one checkpoint in turn, from the system's file cache."""
        path = self.folder / "checkpoint"
        foreground(trainer, path)
        for number in range(self.rounds + 1):
            for name in (*LOADS,) if number % 2 else (*LOADS,)[::-1]:
                start = time.perf_counter()
                LOADS[name](path)
                self.loads[name].append(time.perf_counter() - start)
        shutil.rmtree(path)

    def _once(self, trainer: Trainer, name: str) -> None:
        times, path = self.times[name], self.folder / "checkpoint"
        first = not times.blocked
        if first:
            give_memory_back()  # so that the next save does not reuse memory of the others
        os.sync()  # so that this save does not wait for writes of the previous one
        with peak_memory() as peak:
            start = time.perf_counter()
            finish = self.ways[name](trainer, path)
            times.blocked.append(time.perf_counter() - start)
            if finish is not None:
                finish()
                times.on_disk.append(time.perf_counter() - start)
        if first:
            times.peak = peak[0]
        if path.exists():
            self.size = sum(file.stat().st_size for file in path.iterdir())
            shutil.rmtree(path)


def give_memory_back() -> None:
    """Return the allocator's free memory to the system (glibc)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Measure the largest rise of the resident memory in bytes, sampled every few milliseconds (Linux)."""
    peak, done = [0], threading.Event()
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        with suppress(OSError):
            return int(Path("/proc/self/statm").read_text().split()[1]) * page
        return 0

    before = resident()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def table(rounds: Rounds) -> str:
    """Return the figures in Markdown. The first save of each way is separate, because it allocates memory."""
    lines = [
        "| | blocked, first save | blocked, median (least - most) | on disk, median | additional memory |",
        "|---|---|---|---|---|",
    ]
    for name, times in rounds.times.items():
        later = times.blocked[1:]
        on_disk = f"{statistics.median(times.on_disk[1:]):.2f} s" if times.on_disk else "-"
        lines.append(
            f"| {name} | {times.blocked[0]:.3f} s | {statistics.median(later):.3f} s "
            f"({min(later):.3f} - {max(later):.3f}) | {on_disk} | {times.peak / 1e6:.0f} MB |"
        )
    for name, seconds in rounds.loads.items():
        lines.append(
            f"| {name} | {seconds[0]:.3f} s | {statistics.median(seconds[1:]):.3f} s "
            f"({min(seconds[1:]):.3f} - {max(seconds[1:]):.3f}) | - | - |"
        )
    return "\n".join(lines)


def ratios(rounds: Rounds) -> str:
    """Return the ratios that have a bar, in Markdown."""
    times, loads = rounds.times, rounds.loads
    pairs = {
        "foreground / write and fsync of the same bytes": (times[PLAIN].on_disk, times[WRITE].on_disk, 1.1),
        "blocked, background / plain copy": (times[BACKGROUND].blocked, times[COPY].blocked, 1.05),
        "on disk, background / DCP, stager kept": (times[BACKGROUND].on_disk, times[DCP_KEPT].on_disk, 1.1),
        "load, verified / plain read": (loads["load, verified"], loads["plain read"], 1.2),
    }
    lines = ["| | ratio | least | most | bar |", "|---|---|---|---|---|"]
    for name, (ours, theirs, bar) in pairs.items():
        found = [one / other for one, other in zip(ours[1:], theirs[1:], strict=True)]
        lines.append(f"| {name} | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} | {bar} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks checkpoint", description=__doc__)
    parser.add_argument("--params", type=float, default=100e6, help="parameters of the model (default: 100e6)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after a first one (default: 5)")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: a folder here, then removed)")
    options = parser.parse_args(arguments)
    for noisy in ("torch.distributed.checkpoint", "trainer"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    if not dist.is_initialized():
        # DCP needs a process group, here with one process.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as folder:
        ways: dict[str, Way] = {
            PLAIN: foreground,
            WRITE: PlainWrite(),
            BACKGROUND: Background(),
            "DCP async_save": DCP(keep_stager=False),
            DCP_KEPT: DCP(keep_stager=True),
            COPY: Copy(fresh=False),
            "plain copy, into fresh memory": Copy(fresh=True),
        }
        rounds = Rounds(ways, options.rounds, Path(folder))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=1,
            **OFF,
            default_root_dir=folder,
            callbacks=rounds,
        )
        model = Model(int(options.params))
        trainer.fit(model, [torch.zeros(1)])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"{parameters / 1e6:.1f} M parameters with AdamW, {rounds.size / 1e6:.0f} MB"
    print(f"\n{size}; {options.rounds} rounds, each way in turn.")
    print(
        f"exact-trainer {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()} {platform.release()}; "
        f"load average {os.getloadavg()[0]:.1f} (an otherwise idle machine: about 1).\n"
    )
    print(table(rounds))
    print(f"\n{ratios(rounds)}")
    dist.destroy_process_group()
    return 0
