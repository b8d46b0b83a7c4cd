"""BoundProfiler: what bounds a training run, and the first thing to change."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer.arguments import PositiveInt
from trainer.callback import Checkpoint
from trainer.callbacks.advanced_profiler import Profiler
from trainer.callbacks.profiler import faster_loading
from trainer.checkpoint.manifest import read_manifest
from trainer.distributed.sendable import sendable
from trainer.errors import CheckpointError
from trainer.guards.host_times import CALLBACKS, PROFILER, REST, SAVING, VALIDATION
from trainer.metrics.phases import DATA, LOGGING, TRANSFER

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

COMPUTE = "compute"
COMMUNICATION = "communication"
IDLE = "idle device"
MUCH = 0.05
"""A process is slow if it exceeds the median by more than this share of the time."""
SLOW_WRITE_S, SLOW_WRITE = 0.5, 100e6
"""Storage is called slow if a checkpoint takes longer, and is written with fewer bytes per second."""
ORDER = (COMMUNICATION, TRANSFER, COMPUTE)
"""The work of a device by growing priority: time with several kinds at once counts as the last of them."""


@sendable
class TimeShares(NamedTuple):
    """The shares of a process."""

    machine: str
    parts: dict[str, float]
    """The share of each part, largest first."""
    update: float
    """The share of the compute time that the optimizers' updates take in the profiled steps."""


class BoundProfiler(Profiler):
    """Print at the end of `fit` what share of the time each part took, which one bounds the run, and what to change.

    The shares of data, callbacks, logging, saving, validation and transfer hooks cover the full run, measured by the
    host's clock. torch.profiler splits the rest into transfer, compute, communication and an idle device, in a few
    steps; all other steps pay one comparison. On a CPU the rest is compute and communication.

    With several processes the shares are rank 0's, unless rank 0 waits for another process. A wait in a collective
    counts as communication, so the process with the least communication is the one that the others wait for.

    The printed gain is an upper bound: the speed if the largest share took no time. If the largest share is compute,
    it is the gain of a fused optimizer: the speed if the updates took no time.

    Args:
        first_step: number of steps before torch.profiler starts.
        steps: number of steps that torch.profiler records.
    """

    hears_phases = False

    def __init__(self, first_step: PositiveInt = 10, steps: PositiveInt = 3) -> None:
        self.first_step, self.steps = first_step, steps
        self._left = 0
        self._profile: Any = None
        self._device: dict[str, float] = {}
        self._update_share = 0.0
        """The share of the compute time that the optimizers' updates take in the profiled steps."""
        self._begun = self._host_before = 0.0
        self._report = ""

    def summary(self) -> str:
        return self._report

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._report = ""

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._left, self._profile, self._device = self.first_step, None, {}
        self._update_share = 0.0

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._left -= 1
        if self._left:
            return
        with trainer.run.times.during(PROFILER):
            if self._profile is None:
                self._begin(trainer)
            else:
                self._stop(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._leave()
        own = TimeShares(socket.gethostname(), self.shares(trainer.run.times.shares()), self._update_share)
        every = trainer.strategy.processes.all_gather_object(own)
        if not own.parts or not trainer.is_global_zero:
            return
        rank = slowest(every)
        shares, self._update_share = every[rank].parts, every[rank].update
        lines = [f"{part:<{len(REST)}}{share:>8.1%}" for part, share in shares.items() if share >= 0.001]
        if rank:
            lines.insert(0, f"rank {rank} ({every[rank].machine}), for which the others wait:")
        bound, share = next(iter(shares.items()))
        if not self._device:
            lines.append(f"(no steps were profiled: the run had fewer than {self.first_step + self.steps})")
        gain = "" if bound in (COMPUTE, REST) else f", {_at_most(share)}"  # these cannot take no time at all
        lines.append(f"Bound by {bound}{gain}. {self._advice(trainer, bound, share)}")
        lines.extend(stragglers(every))
        self._report = "\n".join(lines)

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self._leave()

    def shares(self, of_host: dict[str, float]) -> dict[str, float]:
        """Return the shares of the run, largest first, with the host's rest split as in the profiled steps."""
        shares = {part: share / (1 - of_host.get(PROFILER, 0.0)) for part, share in of_host.items()}
        shares.pop(PROFILER, None)
        found = sum(self._device.values())
        if found:
            rest = shares.pop(REST)
            for part, seconds in self._device.items():  # transfers may be among the host's parts, too
                shares[part] = shares.get(part, 0.0) + rest * seconds / found
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    # -- the profiled steps --------------------------------------------------------------------------------------------

    def _begin(self, trainer: Trainer) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_cuda = trainer.strategy.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])])
        self._profile.__enter__()
        self._left = self.steps
        self._begun, self._host_before = time.perf_counter(), _seconds(trainer.run.times.seconds)

    def _stop(self, trainer: Trainer) -> None:
        if trainer.strategy.device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.device)
        wall = time.perf_counter() - self._begun
        of_host = _seconds(trainer.run.times.seconds) - self._host_before
        self._leave()
        events = self._profile.events()
        spans = device_spans(events, trainer.strategy.device.type)
        self._device = exclusive_seconds(spans)
        left = max(0.0, wall - of_host - sum(self._device.values()))
        self._device[IDLE if trainer.strategy.device.type == "cuda" else COMPUTE] = left
        if self._device[COMPUTE]:
            update = update_seconds(events, trainer.strategy.device.type)
            self._update_share = min(1.0, update / self._device[COMPUTE])
        self._left = -1

    def _leave(self) -> None:
        if self._profile is not None and self._left >= 0:
            self._profile.__exit__(None, None, None)
            self._left = -1

    # -- the advice ----------------------------------------------------------------------------------------------------

    def _advice(self, trainer: Trainer, bound: str, share: float) -> str:
        """Return the first setting to change, given the current ones and the share of the time that it concerns."""
        advice = {
            REST: "BoundProfiler(first_step=1, steps=1) among the callbacks splits them in a short run.",
            CALLBACKS: 'Trainer(profiler="simple") shows the time of each hook, of the callbacks and of the module.',
            LOGGING: f"A larger log_every_n_steps (it is {trainer.settings.log_every_n_steps}), or fewer loggers.",
            VALIDATION: "A larger val_check_interval or check_val_every_n_epoch, or limit_val_batches.",
            SAVING: "ModelCheckpoint(async_save=True) writes while training continues; or save less often.",
            TRANSFER: "DataLoader(pin_memory=True); or send smaller batches: integers, and fewer tensors.",
            COMMUNICATION: "A larger accumulate_grad_batches or micro-batch; with ddp, a larger bucket_cap_mb. "
            "StragglerMonitor() shows whether processes wait for a slow one.",
            COMPUTE: 'compile=True, and precision="bf16-mixed" where the card has it; `trainer tune throughput` '
            "measures their gain. Beyond that a smaller model or more devices.",
            IDLE: "The host is too slow for its device: compile=True, a larger micro-batch, and an optimizer with "
            "fused=True.",
        }
        if bound == DATA and trainer.train_loader is not None:
            return faster_loading(trainer.train_loader)
        if bound == SAVING:
            return " ".join([advice[SAVING], *newest_writes(trainer.checkpoint_callbacks)])
        if bound == TRANSFER and trainer.run.times.shares()[TRANSFER] > share / 2:
            return (
                "The module's or data module's hooks of a transfer take it: do their work in the dataset or in "
                "collate_fn, where DataLoader workers do it during the training."
            )
        fused = any(group.get("fused") for optimizer in trainer.optimizers for group in optimizer.param_groups)
        if bound == COMPUTE and self._update_share >= MUCH and not fused:
            gain = _at_most(share * self._update_share)
            return (
                f"The optimizer's updates are {self._update_share:.0%} of it: fused=True, {gain}; then {advice[bound]}"
            )
        return advice.get(bound, "")


def _at_most(share: float) -> str:
    """Return the speed if what takes this share of the time took none."""
    return f"at most {1 / max(1 - share, 0.01):.3g} times the speed"


def slowest(every: Sequence[TimeShares]) -> int:
    """Return the rank that the others wait for: that with the least communication; 0 if they differ little."""
    waits = [shares.parts.get(COMMUNICATION, 0.0) for shares in every]
    rank = waits.index(min(waits))
    return rank if waits[0] > 2 * waits[rank] and waits[0] > waits[rank] + MUCH else 0


def stragglers(every: Sequence[TimeShares]) -> list[str]:
    """Return a line for each process that spends much more time than the others in a part that is not a wait for them.

    Args:
        every: the shares of each rank.
    """
    lines = []
    much = {DATA: MUCH, TRANSFER: MUCH, COMPUTE: 4 * MUCH, CALLBACKS: MUCH, LOGGING: MUCH}  # compute: of a few steps
    for part, more in much.items():
        of_ranks = [shares.parts.get(part, 0.0) for shares in every]
        usual = median_low(of_ranks)
        for rank, share in enumerate(of_ranks):
            if share > 2 * usual and share > usual + more:
                lines.append(
                    f"rank {rank} ({every[rank].machine}) spends {share:.0%} in {part}, the median rank {usual:.0%}: "
                    "the others wait for it in every step."
                )
    return lines


def newest_writes(callbacks: Iterable[Checkpoint]) -> list[str]:
    """Return a sentence for each callback that has written a checkpoint: how fast, and whether the storage is slow."""
    texts = []
    for callback in callbacks:
        seconds = callback.write_seconds
        if seconds is None:
            continue
        try:
            size = sum(entry.bytes for entry in read_manifest(callback.newest_on_disk()).files.values())
        except CheckpointError:
            continue  # it may have been deleted, or none is finite
        text = f"The newest checkpoint took {seconds:.2g} s for {size / 1e6:,.3g} MB."
        if seconds > SLOW_WRITE_S and size < SLOW_WRITE * seconds:
            text += " The storage is slow: `trainer doctor` measures it."
        texts.append(text)
    return texts


def _seconds(times: dict[str, float]) -> float:
    """Return the time of all parts that the host measures, without the profiler's."""
    return sum(seconds for part, seconds in times.items() if part != PROFILER)


def update_seconds(events: Iterable[Any], device: str) -> float:
    """Return the seconds of the optimizers' updates: of the kernels that they started, or on a CPU of their calls."""
    updates = [event for event in events if event.name.startswith("Optimizer.step#")]
    microseconds: float = sum(u.device_time_total if device == "cuda" else u.cpu_time_total for u in updates)
    return microseconds / 1e6


def device_spans(events: Iterable[Any], device: str) -> dict[str, list[tuple[float, float]]]:
    """Return the spans of each part in `ORDER`, in seconds, by the names of kernels; on a CPU, of collectives alone."""
    spans: dict[str, list[tuple[float, float]]] = {part: [] for part in ORDER}
    on_device = device == "cuda"
    for event in events:
        if event.device_type.name.endswith("CPU") == on_device:
            continue
        name = event.name.lower()
        if any(word in name for word in ("nccl", "gloo:", "c10d::")):
            part = COMMUNICATION
        elif on_device:
            part = TRANSFER if "memcpy" in name else COMPUTE
        else:
            continue
        spans[part].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    return spans


def exclusive_seconds(spans: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Return the seconds of each part in `ORDER` during which no later part was going on."""
    seconds, covered = {}, 0.0
    taken: list[tuple[float, float]] = []
    for part in reversed(ORDER):
        taken = _merged([*taken, *spans.get(part, [])])
        now = sum(end - start for start, end in taken)
        seconds[part], covered = now - covered, now
    return seconds


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
