"""Memory and time to build a sharded module, on each process, from `configure_model` until the shards exist.

"Peak" is how far the resident memory rose above its level after a tiny module, on rank 0, on the other processes, and
in sum if all of them run on one machine. Everything is on the CPU, where the shards are part of it; the C library is
set to return freed memory at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._report import surroundings
from benchmarks.memory import BLOCK, GATHERED, MB, WIDTH, Model, resident
from trainer.precision import PRECISIONS
from trainer.strategies import FSDPStrategy, Strategy


def zero3(**options: Any) -> Strategy:
    from trainer.strategies.deepspeed.strategy import DeepSpeedStage3Strategy

    return DeepSpeedStage3Strategy({"zero_optimization": GATHERED}, **options)


STRATEGIES: dict[str, Callable[..., Strategy]] = {"fsdp": FSDPStrategy, "deepspeed_stage_3": zero3}
ROWS = [f"{name} {init_device}" for name in STRATEGIES for init_device in ("cpu", "mixed", "meta")]


def build(strategy: Strategy, blocks: int, width: int) -> Model:
    module = Model(blocks, width)
    with strategy.init_context(module, will_load_checkpoint=False):
        module.configure_model()
    strategy.setup_module(module, for_training=True)
    return module


def measure(row: str, blocks: int, folder: Path) -> None:
    """Build the module in this process, and measure it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, init_device = row.split()
    kept = []
    for size in ((2, 8), (blocks, WIDTH)):
        strategy = STRATEGIES[name](init_device=init_device)
        strategy.setup_environment("cpu", PRECISIONS["32-true"])
        strategy.processes.barrier()
        baseline, start = resident("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
        kept.append(build(strategy, *size))
        strategy.processes.barrier()
        found = {"seconds": time.perf_counter() - start, "peak": resident("VmHWM") - baseline}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def run(row: str, blocks: int, processes: int) -> list[dict[str, float]]:
    """Return the figures of each process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "benchmarks", "build", "--blocks", str(blocks), "--row", row, "--into", folder]
        # glibc would keep freed memory, and the peak would exceed the memory in use.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks build", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12, help=f"of {BLOCK:,} parameters each")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="ROW")
    parser.add_argument("--save", type=Path, default=None, help="a folder for build.md and build.json")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row is not None:
        measure(options.row, options.blocks, options.into)
    about = f"{options.blocks * BLOCK:,} parameters in float32, {options.blocks * BLOCK * 4 / MB:.0f} MB (10⁶ bytes)"
    lines = [f"{about}; {options.processes} processes; medians of {options.rounds} rounds.\n"]
    lines += ["| | peak on rank 0 | on others | in sum | seconds |", "|---|---|---|---|---|"]
    figures = {row: [] for row in options.only}
    for _ in range(options.rounds):
        for row in options.only:
            ranks = run(row, options.blocks, options.processes)
            peaks = [rank["peak"] / MB for rank in ranks]
            seconds = max(rank["seconds"] for rank in ranks)
            figures[row].append([peaks[0], max(peaks[1:], default=0.0), sum(peaks), seconds])
    for row, rounds in figures.items():
        *peaks, seconds = map(median, zip(*rounds, strict=True))
        lines.append(f"| {row} | {' | '.join(f'{peak:.0f}' for peak in peaks)} | {seconds:.1f} |")
    page = "\n".join(lines) + "\n"
    print(page, flush=True)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "build.md").write_text(f"# build\n\n{__doc__}\n{page}")
        (options.save / "build.json").write_text(json.dumps({**surroundings(), "figures": figures}, indent=1) + "\n")
    return 0
