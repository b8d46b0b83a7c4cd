"""Tensor, context and pipeline parallel on two processes over gloo, against torch's own tools in hand-written loops."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks._report import Report
from benchmarks._task import Batches
from benchmarks._turns import PIECE, Clock, Contender, take_turns

HEADS, VOCABULARY, LENGTH, SAMPLES = 4, 64, 256, 2
MICRO_BATCHES = 8
"""Micro-batches of a step of the pipeline."""
WARM_UP = 2 * MICRO_BATCHES
"""Micro-batches that are not timed: the first ones are checked, and make the optimizer's state."""
BAR = 1 / 0.95
Exchange = Callable[[torch.Tensor, int, int], torch.Tensor]


class Block(nn.Module):
    """A block of a decoder; `exchange` is for the hand-written context parallelism."""

    exchange: Exchange | None = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_attention(x)
        heads = [
            layer(h).view(*x.shape[:2], -1, x.shape[-1] // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        ]
        if self.exchange is not None:
            heads = [self.exchange(one, 2, 1) for one in heads]
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        if self.exchange is not None:
            attended = self.exchange(attended, 1, 2)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm_mlp(x))))


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Build = Callable[[], Decoder]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(number: int) -> list[Any]:
    """Return the batches of the warm-up and `number` more."""
    tokens = torch.randint(
        VOCABULARY, (WARM_UP + number, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW with a group for each kind of parameter, because its fused loops cannot mix them."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": several} for several in kinds.values()], lr=1e-3, fused=True)


# -- by hand -----------------------------------------------------------------------------------------------------------


def tensor_by_hand(build: Build, passes: int, clock: Clock, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = build()
    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
    plan |= {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    _loop(net, adamw(net), batches(passes), clock)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, parted: int, full: int) -> torch.Tensor:
        ctx.dims = parted, full
        return _exchanged(tensor, parted, full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parted, full = ctx.dims
        return _exchanged(gradient, full, parted), None, None


def _exchanged(tensor: torch.Tensor, parted: int, full: int) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(2, full))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(list(received), parted)


def context_by_hand(build: Build, passes: int, clock: Clock, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = build()
    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        block.exchange = _AllToAll.apply
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    rank = dist.get_rank()
    halves = [(x.chunk(2, 1)[rank], y.chunk(2, 1)[rank]) for x, y in batches(passes)]
    _loop(net, adamw(net), halves, clock)


def _loop(net: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], clock: Clock) -> None:
    for position, (x, y) in enumerate(data):
        if position >= WARM_UP:
            clock.tick()
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()


class _FirstStage(nn.Module):
    def __init__(self, net: Decoder) -> None:
        super().__init__()
        self.embed, self.blocks = net.embed, net.blocks[: len(net.blocks) // 2]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class _LastStage(nn.Module):
    def __init__(self, net: Decoder) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = net.blocks[len(net.blocks) // 2 :], net.norm, net.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def pipeline_by_hand(build: Build, passes: int, clock: Clock, folder: Path, shards: bool = True) -> None:
    """Train stages with torch's schedule; `shards`: each is wrapped in fully_shard, as with more readers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, net = dist.get_rank(), build()
    own: Any = _FirstStage(net) if rank == 0 else _LastStage(net)
    if shards:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "readers"))["readers"]
        for unit in (*own.blocks, own):
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    schedule = Schedule1F1B(PipelineStage(own, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of)
    optimizer = adamw(own)
    data = batches(passes)
    for start in range(0, len(data), MICRO_BATCHES):
        window = data[start : start + MICRO_BATCHES]
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.cat([x for x, _ in window]))
        else:
            schedule.step(target=torch.cat([y for _, y in window]))
        optimizer.step()
        for _ in window if start >= WARM_UP else ():
            clock.tick()


# -- by the trainer ----------------------------------------------------------------------------------------------------


def by_trainer(option: str, window: int, build: Build, passes: int, clock: Clock, folder: Path) -> None:
    from benchmarks import _ours
    from trainer import Trainer, TrainModule
    from trainer.strategies import FSDPStrategy

    class Module(TrainModule):
        tensor_parallel_plan = {
            "net.embed": "rowwise",
            "net.blocks.*.[qkv]": "colwise",
            "net.blocks.*.up": "colwise",
            "net.blocks.*.out": "rowwise",
            "net.blocks.*.down": "rowwise",
            "net.head": "colwise_gather_output",
        }

        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx >= WARM_UP:
                clock.tick()
            return loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return adamw(self)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDPStrategy(**{option: 2}),  # type: ignore[arg-type]
        max_epochs=1,
        accumulate_grad_batches=window,
        **_ours.OFF,
    )
    trainer.fit(Module(), Batches(batches(passes)))
    dist.barrier()


LAYOUTS = {
    "tensor": (tensor_by_hand, 1, "parallelize_module"),
    "context": (context_by_hand, 1, "fully_shard and an all-to-all by hand, embeddings and loss of half a sequence"),
    "pipeline": (pipeline_by_hand, MICRO_BATCHES, f"Schedule1F1B of {MICRO_BATCHES} micro-batches, and fully_shard"),
    "pipeline, unsharded": (
        partial(pipeline_by_hand, shards=False),
        MICRO_BATCHES,
        f"Schedule1F1B of {MICRO_BATCHES} micro-batches, without fully_shard, so for one reader only",
    ),
}
"""By layout: the hand-written loop, the micro-batches of a step, and what the loop is made of."""


def main(arguments: list[str]) -> int:
    """Start two processes of this command, or run as one of them."""
    parser = argparse.ArgumentParser("python -m benchmarks parallel", description=__doc__)
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS], default=[*LAYOUTS])
    parser.add_argument("--steps", type=int, default=64, help="micro-batches of a run, in four pieces of full windows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=256, help="of the decoder, a multiple of 8")
    parser.add_argument("--layers", type=int, default=8, help="of the decoder, an even number")
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args(arguments)
    pieces = 4 * max(LAYOUTS[layout][1] for layout in options.layouts)
    if not 1 <= options.steps <= 4 * PIECE or options.steps % pieces:
        parser.error(
            f"--steps {options.steps}: give a multiple of {pieces} up to {4 * PIECE}, for four pieces of windows"
        )
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, "-m", "benchmarks", "parallel", *arguments], env=env, check=False).returncode
    build = partial(Decoder, options.width, options.layers)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parameters, lines = sum(p.numel() for p in build().parameters()), []
    for layout in options.layouts:
        loop, window, means = LAYOUTS[layout]
        option = f"{layout.partition(',')[0]}_parallel"
        report = Report(
            f"parallel_{layout.replace(', ', '_')}",
            f"{option}=2 against {means}: time of a micro-batch of {SAMPLES} x {LENGTH} tokens; two "
            f"processes, one thread each, a decoder of {parameters:,} parameters, AdamW. Bar: 0.95 of the throughput, "
            "a ratio of 1.053.",
            unit="ms",
            scale=1e3,
        )
        ours = Contender("ours", partial(by_trainer, option, window, build, options.steps), bar=BAR)
        take_turns(
            report,
            Contender("hand-written", partial(loop, build, options.steps)),
            [ours],
            options.steps,
            options.rounds,
        )
        _add_up(report)
        if dist.get_rank() == 0:
            report.save(options.save)
            lines.append(_line(layout, report))
    if dist.get_rank() == 0:
        print("| layout | hand-written, CPU ms | throughput by CPU time: median, least, most | by wall time |")
        print("|---|---|---|---|")
        print("\n".join(lines), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def _add_up(report: Report) -> None:
    """Add the CPU times of the two processes, because one stage of a pipeline computes more than the other."""
    for times in report.results.values():
        for several in (times.cpu, times.loop_cpu):
            both = torch.tensor(several, dtype=torch.float64)
            dist.all_reduce(both)
            several[:] = both.tolist()


def _line(layout: str, report: Report) -> str:
    """Return the throughput as a share of the hand-written loop's in the same rounds, by CPU time and by wall time."""
    times = report.results["ours"]
    found = []
    for own, loop in ((times.cpu, times.loop_cpu), (times.wall, times.loop_wall)):
        shares = sorted(b / a for a, b in zip(own, loop, strict=True))
        found.append(f"{median(shares):.3f}, {shares[0]:.3f}, {shares[-1]:.3f}")
    return f"| {layout} | {1e3 * median(times.loop_cpu):.1f} | {found[0]} | {found[1]} |"
