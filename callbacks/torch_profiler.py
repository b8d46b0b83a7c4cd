"""TorchProfiler: traces of single steps, for Perfetto or TensorBoard."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function
from torch.profiler import profile, schedule

from trainer.arguments import NonNegativeInt, PositiveInt, make_folder
from trainer.callbacks.advanced_profiler import Profiler
from trainer.checkpoint.disk import atomic_file, reason, refuse_link, replace_file

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


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
        wait: steps before a recording; caches should be filled and code compiled by its end.
        warmup: steps to warm the profiler up.
        active: steps in a recording. Each one takes megabytes in the file.
        repeat: recordings; 0: until the end of the run.
        record_shapes: record the shapes of the operators' inputs.
        profile_memory: record each allocation of memory.
        with_stack: record the lines of Python that called the operators. Slow.
        with_flops: estimate the floating-point operations of matrix products and convolutions.
        dirpath: folder of the files. Default: `profile` in the run directory.
        rows: lines of the table of operators.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        wait: NonNegativeInt = 5,
        warmup: NonNegativeInt = 2,
        active: PositiveInt = 3,
        repeat: NonNegativeInt = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        rows: PositiveInt = 30,
    ) -> None:
        self.wait, self.warmup, self.active, self.repeat, self.rows = wait, warmup, active, repeat, rows
        self.options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        super().__init__(dirpath)
        self.traces: list[Path] = []
        """The traces that this process has written."""
        self._profile: profile | None = None
        self._open: list[tuple[str, Any]] = []
        self._folder = Path()
        self._rank = self._step = 0

    def begin_phase(self, name: str) -> None:
        """Give what follows the name of the phase in the trace."""
        if self._profile is None:
            return
        label = record_function(name)
        label.__enter__()
        self._open.append((name, label))

    def end_phase(self, name: str) -> None:
        """End the phase, and all that began inside it."""
        began = [phase for phase, _ in self._open]
        while name in began:
            label = self._open.pop()[1]
            label.__exit__(None, None, None)
            if began.pop() == name:
                return

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.traces.clear()
        self._folder = self.dirpath or trainer.run_dir / "profile"
        if self.dirpath is None:
            refuse_link(self._folder)
        self._rank = trainer.rank
        steps = schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)
        self._profile = profile(schedule=steps, on_trace_ready=self._write, **self.options)
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
        if self.repeat and len(self.traces) == self.repeat:
            self._close()

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._close()
        if not self.traces and not trainer.settings.fast_dev_run:
            log.warning(
                "TorchProfiler has recorded nothing: a recording takes wait + warmup + active = %d steps, and the run "
                "ended before. Make wait smaller.",
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
        make_folder(self._folder, "TorchProfiler(dirpath=...)")
        path = self._folder / f"rank{self._rank}.{self._step}.pt.trace.json.gz"
        averages = recorded.key_averages()
        by = "self_device_time_total" if any(e.self_device_time_total for e in averages) else "self_cpu_time_total"
        table = averages.table(sort_by=by, row_limit=self.rows)
        try:
            with atomic_file(path) as temporary:
                recorded.export_chrome_trace(f"{temporary}.gz")  # compressed by its name
                os.replace(f"{temporary}.gz", temporary)
            replace_file(path.with_name(f"rank{self._rank}.{self._step}.txt"), table.encode())
        except OSError as error:
            log.warning("cannot write %s (%s): training continues without it.", path, reason(error))
            return
        self.traces.append(path)
        if self._rank == 0:
            log.info("wrote a trace, %s: open it in https://ui.perfetto.dev, or in TensorBoard", path)
