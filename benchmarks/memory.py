"""Memory of each process under strategies that shard the state, against DDP and against `trainer estimate`.

Two figures are measured, both on the process with most. "Live": the bytes of all tensors that exist before the
third step, when weights, gradients and optimizer states all exist, every storage counted once. "Peak": how far the
resident memory of the process rose during the run, initial values and steps included, above its level after all
imports and a run of a tiny model. Everything is on the CPU, where offloading would gain nothing; the C library is set
to return freed memory at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._report import surroundings
from trainer import Callback, Trainer, TrainModule
from trainer.cli.estimate.layouts import layout_of
from trainer.cli.estimate.module import count
from trainer.model.memory import ADAMW, Memory, Setup, estimate_memory, number_sizes
from trainer.precision import resolve_precision
from trainer.strategy import resolve_strategy

WIDTH = 1024
BLOCK = 8 * WIDTH * WIDTH + 5 * WIDTH
"""Parameters of a block."""
BUCKET = 5_000_000
"""Elements of the buffer in which DeepSpeed collects gradients; by default it would be larger than the model."""
GATHERED = {
    "stage3_max_live_parameters": 2 * BLOCK,
    "stage3_prefetch_bucket_size": BLOCK,
    "stage3_max_reuse_distance": 0,
}
"""Elements that ZeRO-3 may keep gathered: two blocks. By default it would keep a model of this size fully gathered."""
STEPS = 3
MB = 10**6


def zero(stage: int) -> Any:
    from trainer.strategies.deepspeed.strategy import DeepSpeedStrategy

    options: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, **(GATHERED if stage == 3 else {})}
    return DeepSpeedStrategy(config={"zero_optimization": options})


def fsdp(sharding: Any) -> Any:
    from trainer.strategies import FSDPStrategy

    return FSDPStrategy(sharding)


ROWS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp FULL_SHARD": lambda: fsdp("FULL_SHARD"),
    "fsdp SHARD_GRAD_OP": lambda: fsdp("SHARD_GRAD_OP"),
    "deepspeed_stage_1": lambda: zero(1),
    "deepspeed_stage_2": lambda: zero(2),
    "deepspeed_stage_3": lambda: zero(3),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.narrow(self.wide(x).relu())
        return x + added


class Model(TrainModule):
    """Equal blocks, built in `configure_model`."""

    def __init__(self, blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.sizes = blocks, width
        self.blocks: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.blocks is None:
            blocks, width = self.sizes
            self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert self.blocks is not None
        out: torch.Tensor = self.blocks(batch[0])
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


# -- in each process ---------------------------------------------------------------------------------------------------


def nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of all storages; for sharded tensors, of the local shard."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local if tensor.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def live() -> int:
    """Return the bytes of every tensor of this process."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        return nbytes([*there, *(tensor.grad for tensor in there if tensor.is_leaf and tensor.grad is not None)])


class MeasureLive(Callback):
    """Record the live bytes before the last step."""

    bytes: int = 0

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Any) -> None:
        if trainer.global_step == STEPS - 1:
            self.bytes = live()


def resident(field: str) -> int:
    """Return VmRSS, the current value, or VmHWM, the highest since `forget_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def train(row: str, blocks: int, width: int, precision: str) -> int:
    measured = MeasureLive()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    processes = int(os.environ["WORLD_SIZE"])
    settings: dict[str, Any] = {"strategy": ROWS[row](), "devices": processes, "precision": precision, **quiet}
    trainer = Trainer(seed=0, accelerator="cpu", max_steps=STEPS, callbacks=measured, **settings)
    data = TensorDataset(torch.randn(STEPS * processes, width))
    trainer.fit(Model(blocks, width), DataLoader(data, 1))
    return measured.bytes


def measure(row: str, blocks: int, precision: str, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train(row, 2, 8, precision)
    before, baseline = live(), resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
    alive = train(row, blocks, WIDTH, precision) - before
    found = {"live": alive, "peak": resident("VmHWM") - baseline}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


# -- all together ------------------------------------------------------------------------------------------------------


def run(row: str, blocks: int, precision: str, processes: int) -> dict[str, int]:
    """Return the largest figures of all processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "benchmarks", "memory", "--blocks", str(blocks), "--precision", precision]
        # glibc would keep freed memory, and the peak would exceed the memory in use.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run([*command, "--row", row, "--into", folder], env=env, check=True, stdout=subprocess.DEVNULL)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    return {key: max(one[key] for one in found) for key in found[0]}


def estimated(row: str, blocks: int, precision: str, processes: int) -> Memory:
    """Return the estimate of `trainer estimate` for this row."""
    with torch.device("meta"):
        model = Model(blocks)
        model.configure_model()
    numbers = resolve_precision(precision)
    setup = Setup(processes, number_sizes(numbers), bucket=BUCKET)
    layout = layout_of(resolve_strategy(ROWS[row](), processes)[0])
    return estimate_memory(layout, count(model, numbers, [], ADAMW), setup)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8, help=f"of {BLOCK:,} parameters each")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument("--save", type=Path, default=None, help="a folder for memory.md and memory.json")
    parser.add_argument("--row", choices=[*ROWS], help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row is not None:
        measure(options.row, options.blocks, options.precision, options.into)
    about = f"{options.blocks * BLOCK:,} parameters in {options.blocks} blocks, AdamW, precision {options.precision}"
    lines, figures = [f"{about}; MB (10⁶ bytes) on the process with most."], {}
    for processes in options.processes:
        columns = [f"{processes} processes", "live", "estimate", "live : estimate", "live : DDP"]
        columns += ["peak", "estimate with ~more", "peak : DDP"]
        lines += [f"\n| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        first: dict[str, int] | None = None
        for row in options.only:
            found = run(row, options.blocks, options.precision, processes)
            first = first or found
            memory = estimated(row, options.blocks, options.precision, processes)
            figures[f"{row} x{processes}"] = {**found, "estimate": memory.device, "more": memory.temporary}
            cells = [
                f"{found['live'] / MB:.0f}",
                f"{memory.device / MB:.0f}",
                f"{found['live'] / memory.device:.3f}",
                f"{found['live'] / first['live']:.2f}",
                f"{found['peak'] / MB:.0f}",
                f"{(memory.device + memory.temporary) / MB:.0f}",
                f"{found['peak'] / first['peak']:.2f}",
            ]
            lines.append(f"| {row} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    page = "\n".join(lines) + "\n"
    print(page, flush=True)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "memory.md").write_text(f"# memory\n\n{__doc__}\n{page}")
        (options.save / "memory.json").write_text(json.dumps({**surroundings(), "figures": figures}, indent=1) + "\n")
    return 0
