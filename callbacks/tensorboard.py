"""TensorBoardLogger: metrics as TensorBoard event files."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.arguments import NonNegativeFloat, flat_names, make_folder
from trainer.checkpoint.schema import Integer, require
from trainer.data.transfer import move_data_to_device
from trainer.errors import ConfigError, require_package
from trainer.logger import FileLogger, LogFile, rank_zero_experiment
from trainer.metrics.logger_folder import LoggerFolder, plain_number
from trainer.metrics.media import Histogram, Images, Media, Text
from trainer.names.aliases import Alias
from trainer.strategy import eval_mode

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trainer.module import TrainModule
    from trainer.trainer import Trainer


log = logging.getLogger("trainer")

TRAINING = ".training"
"""The end of the names of the files that a training writes."""


class TensorBoardLogger(FileLogger):
    """Write scalars and hyperparameters to event files; `tensorboard --logdir runs` shows them.

    A resumed run truncates the training's files to their sizes at its checkpoint, and continues in a new file. Other
    files in the folder, such as files of an evaluation or of your own writer, stay unchanged.

    Args:
        save_dir: folder of the event files. Default: the run directory. If another run has left its files in the
            folder, the new run writes into its subfolder `version_1`, and so on.
        name, version: a subfolder `name/version`, as in Lightning; the version n is the folder `version_n`. Default of
            `version` where `name` is given: the number after the last folder `version_n` there. Read before the run,
            `version` and `log_dir` are those of the run to come.
        log_graph: record the module's graph, from its `example_input_array`.
        default_hp_metric: write the metric `hp_metric` with the hyperparameters, so that TensorBoard lists the run.
        prefix: put before all names, with a "-".
        sub_dir: a subfolder of the run's folder.
        flush_seconds: longest time between two writes to the file, as long as values are logged.

    Raises:
        MissingPackageError: at the start of a run, when tensorboard is not installed.
    """

    file_name, label = "", "TensorBoard:    tensorboard --logdir"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = None,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | Path | None = None,
        *,
        flush_seconds: NonNegativeFloat = 5.0,
    ) -> None:
        super().__init__()
        self.place = LoggerFolder("events.out.tfevents.*", save_dir, name, version, sub_dir)
        self.logs_graph, self.default_hp_metric, self.prefix = log_graph, default_hp_metric, prefix
        self.flush_seconds = flush_seconds
        self._writer: SummaryWriter | None = None
        self._suffix = ""
        self._hyperparameters: dict[str, Any] = {}
        self._kept: dict[str, int] | None = None
        """The bytes of each file before this run's own, or of those that belong to the checkpoint that it resumes."""
        self._before: list[Path] = []
        """The files of the training that were there when the run opened its own."""

    sub_dir = Alias("place.sub_dir")

    @property
    def hparams(self) -> dict[str, Any]:
        """The hyperparameters that were logged."""
        return self._hyperparameters

    def log_graph(self, model: TrainModule, input_array: Any = None) -> None:
        inputs = model.example_input_array if input_array is None else input_array
        if self.logs_graph and self._writes:
            if inputs is None:
                log.warning("TensorBoardLogger(log_graph=True) needs the module's example_input_array")
                return
            with eval_mode(model), torch.no_grad():
                self.experiment.add_graph(model, move_data_to_device(inputs, model.device))

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """torch's `SummaryWriter`, for what `log_image` and the like do not do. On other ranks than 0 its calls do
        nothing.

        From the first use on, scalars go through it too, because TensorBoard reads one growing file of a run.

        Raises:
            ConfigError: no run has begun, and `save_dir` is not given.
        """
        if self.log_dir is None:
            raise ConfigError(
                "TensorBoardLogger.experiment exists inside a run: use it in fit, validate, test or predict, or give "
                "TensorBoardLogger a save_dir."
            )
        if self._writer is None:
            before = self.opened
            before.write()
            _wait_until_after(before.path.name)
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(before.path.parent), filename_suffix=self._suffix)
            self._file = _WriterFile(before, self._writer)
        return self._writer

    # -- state: the sizes of the files, to which a resumed run cuts them -----------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        own = {} if self._file is None else self._sizes(path for path in self._files() if path not in self._before)
        return {"files": {**(self._kept or {}), **own}, **self.place.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require(state_dict, {"files?": {str: Integer()}, "version?": Integer()}, "TensorBoardLogger")
        self._kept = state_dict.get("files")
        self.place.restore(state_dict)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._kept, self._suffix = None, TRAINING if stage == "fit" else ""
        if trainer.is_global_zero:
            require_package("tensorboard", "TensorBoardLogger")

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._writes:
            folder = self.opened.path.parent
            for name, size in self._sizes(self._before).items():
                path, kept = folder / name, (self._kept or {}).get(name, 0)
                if kept == 0:
                    path.unlink(missing_ok=True)
                elif kept < size:
                    os.truncate(path, kept)

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._writer is not None:
            self._writer.close()
        self._writer, self._hyperparameters = None, {}

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        # Kept until the writer is opened, because a resumed run must first know its step.
        self._hyperparameters = hyperparameters

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._writes:
            values = {self._prefixed(name): plain_number(value) for name, value in metrics.items()}
            self.opened.add_scalars(values, self._step_or(step))
            self.write_if_due()

    def log_media(self, key: str, media: Media, step: int) -> None:
        for summary in _summaries(key, media):
            self.opened.add(step=step, summary=summary)

    # -- files ---------------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        folder = self.place.folder(self._run_dir)
        assert folder is not None
        return folder

    def open(self, continue_from: int | None) -> _EventFile:
        folder, trainer = self._folder, self._trainer
        if before := sorted(path.name for path in folder.glob("events.out.tfevents.*")):
            _wait_until_after(before[-1])
        resumed = self._kept is not None or (trainer is not None and trainer.run.resumed_from is not None)
        self._before = self._files()
        self._kept = self._sizes(self._before) if self._kept is None else self._kept
        file = _EventFile(folder, self._suffix, purges=bool(before and self._suffix and not resumed))
        if _flat(self._hyperparameters) and not (resumed and self._kept):
            _write_hyperparameters(file, self._hyperparameters)
            if self.default_hp_metric:
                file.add_scalars({"hp_metric": -1.0}, 0)
        return file

    def _files(self) -> list[Path]:
        """Return the files of the training, also in the folders that `SummaryWriter.add_scalars` makes for its curves.

        Other folders may belong to other runs, and a checkpoint may name folders elsewhere.
        """
        folder = self._folder
        known = {Path(), *(Path(name).parent for name in self._kept or ())}
        own: dict[str, Any] = getattr(self._writer, "all_writers", None) or {}
        known.update(Path(one).relative_to(folder) for one in own)
        inside = [folder / one for one in known if not {"/", ".."} & {*one.parts}]
        found = sorted(file for one in inside for file in one.glob(f"events.out.tfevents.*{TRAINING}"))
        # They are cut: a link, to a file or a folder, may lead to files of others.
        return [
            file for file in found if file.is_file() and file.resolve() == folder.resolve() / file.relative_to(folder)
        ]

    def _sizes(self, files: Iterable[Path]) -> dict[str, int]:
        return {str(path.relative_to(self._folder)): path.stat().st_size for path in files}


class _EventFile(LogFile):
    """One `events.out.tfevents...` file in the records of tensorboard.

    Events are kept in memory until `write`. After an error the next `write` tries again.
    """

    def __init__(self, folder: Path, suffix: str = "", purges: bool = False) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        make_folder(folder, "TensorBoardLogger(save_dir=...)")
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        # Two runs of one process may begin within a second.
        number = len(list(folder.glob(f"{name}.*")))
        super().__init__(folder / f"{name}.{number}{suffix}", is_outdated=True)
        self._pending = io.BytesIO()
        self._records = RecordWriter(self._pending)
        self.add(file_version="brain.Event:2")
        if purges:  # TensorBoard drops the points of a training that was in this folder before
            self.add(step=0, session_log=SessionLog(status=SessionLog.START))
        self.write()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.add(step=step, summary=Summary(value=points))

    def add(self, **fields: Any) -> None:
        """Add an `Event` with these fields."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, to_disk: bool = False) -> None:
        """Write the events added since the last call; `to_disk`: as in `put_bytes`."""
        if data := self._pending.getvalue():
            with self.writing():
                self.put_bytes(data, to_disk=to_disk)
                self._pending.seek(0)
                self._pending.truncate()


class _WriterFile:
    """The file of a `SummaryWriter` that the user has asked for, in place of the `_EventFile` before it."""

    def __init__(self, before: _EventFile, writer: SummaryWriter) -> None:
        self.before, self.writer, self.path = before, writer, before.path

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def add(self, step: int, summary: Any) -> None:
        """Add an event with a summary."""
        self.writer._get_file_writer().add_summary(summary, step)

    def write(self, to_disk: bool = False) -> None:
        """Write the events added since the last call."""
        self.before.write(to_disk)
        self.writer.flush()

    def report_loss(self) -> None:
        self.before.report_loss()


def _wait_until_after(name: str) -> None:
    """Wait until the second in a file's name is over.

    TensorBoard reads files in the order of their names: a run that is resumed within the same second would be read
    before what it continues.
    """
    second = name.removeprefix("events.out.tfevents.").split(".")[0]
    deadline = time.monotonic() + 1.1  # another machine's clock may be ahead
    while second.isdecimal() and int(time.time()) <= int(second) and time.monotonic() < deadline:
        time.sleep(0.02)


def _write_hyperparameters(file: _EventFile, hyperparameters: dict[str, Any]) -> None:
    """Write them flat for the HPARAMS page, and nested for the TEXT page.

    Without the summary that describes an experiment, which would have to list the metrics before they are known, the
    HPARAMS page shows all curves of the runs as metrics, each with its last value.
    """
    from torch.utils.tensorboard.summary import hparams, text

    nested = text("hyperparameters", f"```json\n{json.dumps(hyperparameters, indent=2, default=str)}\n```")
    # `SummaryWriter.add_hparams` would make a separate folder, which shows as a second run.
    _, started, ended = hparams(_flat(hyperparameters), {})
    for summary in (nested, started, ended):
        file.add(step=0, summary=summary)


def _summaries(key: str, media: Media) -> Iterator[Any]:
    """Yield TensorBoard's summaries of a value; several pictures have numbers after their name."""
    from torch.utils.tensorboard.summary import histogram, image, text

    if isinstance(media, Images):
        for number, array in enumerate(media.arrays):
            yield image(f"{key}/{number}" if len(media.arrays) > 1 else key, array, dataformats="HWC")
        if media.captions is not None:
            yield text(f"{key}/captions", "\n".join(f"- {caption}" for caption in media.captions))
    elif isinstance(media, Text):
        yield text(key, media.text)
    elif isinstance(media, Histogram):
        yield histogram(key, media.values, media.bins)
    else:
        yield text(key, media.markdown())


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters in the types that TensorBoard's table takes."""
    flat = flat_names(values)
    return {name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in flat.items()}
