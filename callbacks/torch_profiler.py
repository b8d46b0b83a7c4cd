"""TorchProfiler: traces of single steps, for Perfetto or TensorBoard."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.autograd.profiler import record_function
from torch.profiler import profile, schedule

from trainer.arguments import NonNegativeInt, PositiveInt, make_folder
from trainer.callbacks.advanced_profiler import Profiler
from trainer.checkpoint.disk import atomic_file, reason, refuse_link, replace_file

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

_CPU = Literal[
    "count", "cpu_time", "cpu_time_total", "self_cpu_time_total", "cpu_memory_usage", "self_cpu_memory_usage"
]
_GPU = Literal["cuda_time", "cuda_time_total", "self_cuda_time_total", "cuda_memory_usage", "self_cuda_memory_usage"]


class TorchProfiler(Profiler):
    """Record steps of `fit` with torch.profiler, on every process, and write two files for each recording to
    `<run directory>/profile/`: `rank0.<step>.pt.trace.json.gz`, a trace for https://ui.perfetto.dev or for TensorBoard
    with the plugin torch-tb-profiler (`tensorboard --logdir <run directory>`), and `rank0.<step>.txt`, a table of the
    operators that took most time. `<step>` is the last step recorded.

    In the trace the parts of the loop have the names that SimpleProfiler's table has: `data wait`, `forward
    (training_step)`, `backward`, `optimizer step`, `ProgressBar.on_train_batch_end`, ...

    A recording consists of `wait` steps that are skipped, `warmup` steps whose records are discarded, and `active`
    steps; then the next one starts. Recording slows the steps down; waiting costs some microseconds for the names, and
    less after the last recording.

    Args:
        dirpath: folder of the files. Default: `profile` in the run directory.
        filename: put before the names of the files, with a ".".
        wait: steps before a recording; caches should be filled and code compiled by its end.
        warmup: steps to warm the profiler up.
        active: steps in a recording. Each one takes megabytes in the file.
        repeat: recordings; 0: until the end of the run.
        schedule: function of the step's index that returns a `torch.profiler.ProfilerAction`, instead of those four.
        on_trace_ready: function of the `torch.profiler.profile` that has recorded, instead of writing the files.
        row_limit: lines of the table of operators; -1: all.
        sort_by_key: sort the table by this attribute, such as "cpu_time_total". Default: the operators' own time.
        activities: list of `torch.profiler.ProfilerActivity`. Default: all that there are.
        record_shapes: record the shapes of the operators' inputs.
        profile_memory: record each allocation of memory.
        with_stack: record the lines of Python that called the operators. Slow.
        with_flops: estimate the floating-point operations of matrix products and convolutions.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        wait: NonNegativeInt = 5,
        warmup: NonNegativeInt = 2,
        active: PositiveInt = 3,
        repeat: NonNegativeInt = 1,
        schedule: Callable[[int], Any] | None = None,
        on_trace_ready: Callable[[Any], Any] | None = None,
        row_limit: int = 30,
        sort_by_key: Literal["count"] | _CPU | _GPU | None = None,
        activities: list[Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> None:
        self.wait, self.warmup, self.active = wait, warmup, active
        self.schedule, self.repeat, self.on_trace_ready = schedule, 0 if schedule else repeat, on_trace_ready
        self.row_limit, self.sort_by_key = row_limit, sort_by_key
        self.options: dict[str, Any] = {
            "activities": activities,
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        super().__init__(dirpath, filename)
        self.traces: list[Path] = []
        """The traces that this process has written."""
        self._profile: profile | None = None
        self._open: list[tuple[str, Any]] = []
        self._folder = Path()
        self._recordings = self._step = 0

    def start(self, action_name: str) -> None:
        """Give what follows the name of the action in the trace."""
        if self._profile is None:
            return
        label = record_function(action_name)
        label.__enter__()
        self._open.append((action_name, label))

    def stop(self, action_name: str) -> None:
        """End the action, and all that began inside it."""
        began = [action for action, _ in self._open]
        while action_name in began:
            label = self._open.pop()[1]
            label.__exit__(None, None, None)
            if began.pop() == action_name:
                return

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.traces.clear()
        self._recordings = 0
        self._folder = self.dirpath or trainer.run_dir / "profile"
        if self.dirpath is None:
            refuse_link(self._folder)
        steps = schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)
        self._profile = profile(schedule=self.schedule or steps, on_trace_ready=self._write, **self.options)
        self._profile.start()

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._profile is None:
            return
        self._step = trainer.global_step
        running, self._profile = self._profile, None  # stopping it after an error in `step` may crash the process
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")
            running.step()
        self._profile = running
        if self.repeat and self._recordings == self.repeat:
            self._close()

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._close()
        if not self._recordings and not trainer.settings.fast_dev_run:
            log.warning(
                "TorchProfiler has recorded nothing: a recording takes wait + warmup + active = %d steps, or those of "
                "schedule=, and the run ended before. Make wait smaller.",
                self.wait + self.warmup + self.active,
            )

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        """Write what was recorded until the exception."""
        self._close()

    def _close(self) -> None:
        if self._profile is not None:
            running, self._profile = self._profile, None
            running.stop()
            self._open.clear()

    def _write(self, recorded: profile) -> None:
        self._recordings += 1
        if self.on_trace_ready is not None:
            self.on_trace_ready(recorded)
            return
        make_folder(self._folder, "TorchProfiler(dirpath=...)")
        name = f"{self.filename}.rank" if self.filename else "rank"
        path = self._folder / f"{name}{self._rank or 0}.{self._step}.pt.trace.json.gz"
        averages = recorded.key_averages()
        by = "self_device_time_total" if any(e.self_device_time_total for e in averages) else "self_cpu_time_total"
        table = averages.table(sort_by=self.sort_by_key or by, row_limit=self.row_limit)
        try:
            with atomic_file(path) as temporary:
                recorded.export_chrome_trace(f"{temporary}.gz")  # compressed by its name
                os.replace(f"{temporary}.gz", temporary)
            replace_file(path.with_name(path.name.replace(".pt.trace.json.gz", ".txt")), table.encode())
        except OSError as error:
            log.warning("cannot write %s (%s): training continues without it.", path, reason(error))
            return
        self.traces.append(path)
        if not self._rank:
            log.info("wrote a trace, %s: open it in https://ui.perfetto.dev, or in TensorBoard", path)
