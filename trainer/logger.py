"""Logger: the base classes of loggers, which receive the metrics of a run."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from trainer.arguments import make_folder
from trainer.callback import Callback, Checkpoint
from trainer.checkpoint.disk import (
    complete_lines,
    flush_file,
    reason,
    replace_file,
    replace_notes,
    without_links,
    write_all,
)
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.distributed.environment import detect_environment
from trainer.errors import ConfigError
from trainer.metrics.background_calls import BackgroundCalls
from trainer.metrics.logger_folder import LoggerFolder
from trainer.metrics.media import Media, Text, as_histogram, as_images, as_table, close_figure, figure_images
from trainer.names.aliases import Overridable
from trainer.names.states import runs_as_lightning

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

T = TypeVar("T")

RUN_DIRECTORY = LoggerFolder("", None)
"""The folder of loggers that have no `place`."""


def flat_hyperparameters(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of data and module in one dict, as Lightning's loggers get them."""
    if hyperparameters.keys() != {"module", "data"}:
        return hyperparameters
    return {**hyperparameters["data"], **hyperparameters["module"]}


class Logger(Callback):
    """A callback that receives the metrics. `log_hyperparameters`, `log_metrics`, `log_media` and `flush` are called
    on rank 0 only.

    A logger writes into `trainer.run_dir` between `setup` and `teardown`, and continues its files after a resume: rows
    after the resumed step are dropped, so that there is one row per step.
    """

    group_separator: ClassVar[str] = "/"
    prefix: str = ""
    """Put before the name of each value, with a "-"."""
    place: LoggerFolder | None = None
    """The folder of the files, for a logger that writes its own files. The run sets its number before `setup`."""
    _trainer: Trainer | None = None
    _has_noted_media = False

    def __init__(self) -> None:
        super().__init__()

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Record the run's hyperparameters (data only, possibly nested). Called once, before the first step."""

    def record_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Call `log_hyperparameters`, or, where a subclass overrides this method, Lightning's `log_hyperparams`."""
        names = ("log_hyperparameters", "log_hyperparams")
        if next(name for kind in type(self).__mro__ for name in names if name in vars(kind)) == "log_hyperparams":
            self.log_hyperparams(flat_hyperparameters(hyperparameters))
        else:
            self.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Record values at `step`, the number of completed steps and the only step axis."""

    def _prefixed(self, name: str) -> str:
        """Return a name with the prefix."""
        return f"{self.prefix}-{name}" if self.prefix else name

    def flush(self) -> None:
        """Write all logged values to the files. Called before each checkpoint and at the end."""
        self.save()

    # -- Lightning's names ---------------------------------------------------------------------------------------------

    def log_hyperparams(self, params: Any = None, metrics: Any = None, step: int | None = None) -> None:
        """Record hyperparameters, a dict or an `argparse.Namespace`.

        Args:
            metrics: values to record with them, or one, as `hp_metric`.
            step: of the values. Default: the run's.
        """
        values = {} if params is None else params if isinstance(params, Mapping) else vars(params)
        if self._writes:
            self.log_hyperparameters(dict(values))
            if metrics:
                values = metrics if isinstance(metrics, dict) else {"hp_metric": metrics}
                self.log_metrics(values, self._step_or(step))

    def log_graph(self, model: TrainModule, input_array: Any = None) -> None:
        """Record the graph of the module. Called once, before the first step."""

    def save(self) -> None:
        """Write what was logged. Called by `flush`."""

    def finalize(self, status: str) -> None:
        """Finish the work of a stage. Called after it with "success" or "failed"."""

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Record a checkpoint. Called when one is committed."""

    @Overridable
    def experiment(self) -> Any:
        """The object behind the logger. On other ranks than 0 its attributes may be called, and do nothing."""
        return DummyExperiment()

    @Overridable
    def name(self) -> str | None:
        """The name of the experiment: the folder that has the runs."""
        return self.folder_of_files.name_in(self._run_dir)

    @Overridable
    def version(self) -> int | str | None:
        """The name or number of the run."""
        return self.folder_of_files.version_in(self._run_dir)

    @Overridable
    def save_dir(self) -> Any:
        """The folder that has the experiments' folders."""
        return self.folder_of_files.save_dir(self._run_dir)

    @Overridable
    def root_dir(self) -> Any:
        """The folder of the experiment."""
        return self.folder_of_files.root_dir(self._run_dir)

    @Overridable
    def log_dir(self) -> Any:
        """The folder of the run."""
        return self.folder_of_files.log_dir(self._run_dir)

    @property
    def folder_of_files(self) -> LoggerFolder:
        """The logger's `place`, or the run directory."""
        return self.place or RUN_DIRECTORY

    @property
    def _run_dir(self) -> Path | None:
        return None if self._trainer is None else self._trainer.run_dir

    @property
    def _writes(self) -> bool:
        """Whether this process writes: rank 0, unless it restarts a run that has ended, which stays unchanged."""
        trainer = self._trainer
        if trainer is None:
            return detect_environment().rank == 0
        return trainer.is_global_zero and not trainer.run.clock.is_over

    def _step_or(self, step: int | None) -> int:
        """Return a given step, or by default the run's."""
        if step is None:
            return 0 if self._trainer is None else self._trainer.global_step
        return step

    def log_media(self, key: str, media: Media, step: int) -> None:
        """Record `Images`, a `Text`, a `Histogram` or a `Table` of `trainer.metrics.media`; a logger that can overrides
        this."""
        if not self._has_noted_media:
            self._has_noted_media = True
            what = f"{type(media).__name__.lower()} such as {key!r}"
            log.info("%s shows no %s: left out. (Logged once.)", type(self).__name__, what)

    # -- images and the like: the same call for every logger, on any rank ----------------------------------------------

    def log_image(
        self,
        key: str,
        images: Any,
        step: int | None = None,
        caption: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Log a picture or a list of pictures; `media.as_images` has their forms. Ranks other than 0 do nothing.

        Args:
            key: the name of the pictures.
            step: default: the number of completed steps.
            caption: one for all pictures, or a list with one for each.
            options: lists with an entry for each picture, for Weights & Biases (`masks`, `boxes`).

        Raises:
            ConfigError: a picture has a shape that no picture has, or the lists have other lengths.
        """
        self._log_media(key, step, as_images, images, caption, options)

    def log_text(
        self,
        key: str,
        text: str | Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Log a text, which may have Markdown; or, with `columns` and `data`, a table of texts as `log_table` does."""
        if columns is not None or data is not None or dataframe is not None:
            columns = columns if columns is not None or text is None else list(text)
            self.log_table(key, columns, data, dataframe, step)
        else:
            self._log_media(key, step, Text, text)

    def log_histogram(self, key: str, values: Any, step: int | None = None, bins: int = 64) -> None:
        """Log the distribution of the finite numbers of a tensor, an array or a list."""
        self._log_media(key, step, as_histogram, values, bins)

    def log_figure(self, key: str, figure: Any, step: int | None = None, close: bool = True) -> None:
        """Log a figure of matplotlib as a picture, and close it."""
        self._log_media(key, step, figure_images, figure)
        if close:
            close_figure(figure)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table: `columns` and `data`, a list of rows; or a pandas data frame."""
        self._log_media(key, step, as_table, columns, data, dataframe)

    def _log_media(self, key: str, step: int | None, make: Callable[..., Media], *args: Any) -> None:
        if self._writes:
            self.log_media(key, make(*args), self._step_or(step))


def rank_zero_experiment(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a method `experiment` that gives other ranks than 0 an object whose calls do nothing."""

    @wraps(function)
    def experiment(self: Logger) -> Any:
        return function(self) if self._writes else DummyExperiment()

    return experiment


class LogFile:
    """The file of a log. Contents that cannot be written (disk full) are kept in memory and written later."""

    has: ClassVar[str] = "its points"
    """Its contents, for messages."""
    _failed = False

    def __init__(self, path: Path, end: int = 0, is_outdated: bool = False) -> None:
        self.path = path
        self._end = end
        """The position after what is final in the file, in bytes."""
        self.is_outdated = is_outdated
        """True: the next write replaces the file, with all that is final."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Report the first of several errors of a write in the block, which ends there."""
        try:
            yield
            self._failed = False
        except OSError as error:
            if not self._failed:
                words = "cannot write %s (%s); %s are kept in memory until it can be."
                log.warning(words, self.path, error, self.has)
            self._failed = True

    def put_bytes(self, final: bytes, changing: bytes = b"", to_disk: bool = False) -> None:
        """Write after what is final in the file; `changing`: to be overwritten by the next write, as is a partial one.

        Args:
            to_disk: sync the file, so that it survives a power cut.
        """
        if self.is_outdated:
            replace_file(self.path, final + changing)
            self._end = 0
        else:
            with io.FileIO(self.path, "r+", opener=without_links) as file:
                file.seek(self._end)
                write_all(file, final + changing)
                file.truncate()
                if to_disk:
                    flush_file(file.fileno(), self.path.parent)
        self._end += len(final)
        self.is_outdated = False

    def report_loss(self) -> None:
        """Log an error if something was never written."""
        if self._failed:
            log.error("%s could not be written until the end: %s kept in memory are lost.", self.path, self.has)


class FileLogger(Logger):
    """A logger that writes one file, on rank 0; a resumed run continues the file of the run before.

    A subclass defines `open`. The file is written before each checkpoint, at the end, and every `flush_seconds`.
    """

    place: LoggerFolder
    file_name: ClassVar[str]
    label: ClassVar[str]
    """Words for the place of the file, in the list of outputs at the end of a run."""
    flush_seconds: float
    """Longest time between two writes to the file, as long as values are logged."""
    _file: Any = None
    _resumed: Mapping[str, Any] = {}
    """The state of the checkpoint that the run resumes from."""
    _flushed_at = 0.0

    def open(self, continue_from: int | None) -> Any:
        """Open the file and return it: an object with `write(to_disk=False)` and `report_loss()`.

        Args:
            continue_from: the step of the checkpoint that the run resumes from; None: no training.
        """
        raise NotImplementedError

    @property
    def path(self) -> Path | None:
        """The path of the file; None before a run."""
        folder = self.place.folder(self._run_dir)
        return None if folder is None else folder / self.file_name

    def output_location(self) -> tuple[str, Path] | None:
        return None if self.path is None else (self.label, self.path)

    def earlier_lines(self) -> list[bytes]:
        """Make the folder of the file; return the lines that the file has already, without one that was cut off.

        Raises:
            ConfigError: the folder cannot be made, or the file cannot be read.
        """
        path = self.path
        assert path is not None
        make_folder(path.parent, f"{type(self).__name__}(save_dir=...)")
        try:
            return complete_lines(path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({reason(error)}), and would be overwritten: try again, or move it away."
            ) from error

    def record_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Record the hyperparameters, and write `hparams.yaml` where programs of Lightning's expect it."""
        super().record_hyperparameters(hyperparameters)
        if runs_as_lightning():
            import yaml

            data = json.loads(json.dumps(flat_hyperparameters(hyperparameters), default=str))
            self.write_notes("hparams.yaml", yaml.safe_dump(data))

    def write_notes(self, name: str, text: str) -> None:
        """Write a file for people into the logger's folder."""
        folder = self.place.folder(self._run_dir)
        if folder is not None:
            make_folder(folder, f"{type(self).__name__}(save_dir=...)")
            replace_notes(folder / name, text.encode())

    def refuse_step(self, metrics: Mapping[str, Any]) -> None:
        """Raise a ConfigError for a value with the name under which the file has the step."""
        if "step" in metrics:
            raise ConfigError(
                f"{type(self).__name__}.log_metrics got a value 'step', the name of the step itself: give it as step=, "
                "or give the value another name."
            )

    @property
    def opened(self) -> Any:
        """The file, opened if need be."""
        if self._file is None:
            self._open(None)
        return self._file

    def _open(self, continue_from: int | None) -> None:
        self._file = self.open(continue_from)
        self._flushed_at = time.monotonic()

    def write_if_due(self) -> None:
        """Write the file if the last write is `flush_seconds` ago."""
        if time.monotonic() - self._flushed_at > self.flush_seconds:
            self._flushed_at = time.monotonic()
            self._file.write()

    def save(self) -> None:
        """Write all logged values to the file. Called by `flush`."""
        if self._file is not None:
            self._flushed_at = time.monotonic()
            self._file.write(to_disk=True)

    def close(self) -> None:
        """Write what is pending, and close the file."""
        if self._file is not None:
            self.flush()
            FileLogger.save(self)  # whatever a subclass's `save` does
            self._file.report_loss()
            self._file = None

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        self._resumed = {}

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._writes:
            self._open(continue_from=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self.flush()


class Tracker(Logger):
    """A logger whose values go to the client of a tracker: a service, or a store that others read.

    A subclass defines `open`, `send_metrics`, and the other methods that its tracker supports. `open` is called before
    the first step, so that a mistake ends the run there. A separate thread calls all `send_` methods, in order, so that
    a slow client delays no step; their errors are logged and never end a training. A resumed run continues the same run
    of the tracker, and sends again the values logged before its checkpoint that were not sent when the process ended.
    """

    log_model: bool | Literal["all"] = False
    """Send checkpoints: the best and the last one at the end of training (True), or each when it is written ("all")."""
    given_run_id: str | None = None
    """The run that the user wants to continue, also in a second `fit`; None: a new one for each, unless resumed."""
    seconds_at_end: float = 60.0
    """Longest wait at the end of a stage for calls that are not done; 10 seconds after an error."""

    _client: Any = None
    _calls: BackgroundCalls | None = None
    _has_fit = _has_failed = False
    _resumed_run: str | None = None
    _resumed_unsent: tuple[Any, ...] = ()

    # -- for a subclass to define --------------------------------------------------------------------------------------

    def open(self, run_id: str | None) -> Any:
        """Begin a run of the tracker, or continue `run_id`; return the object that users get as `experiment`."""
        raise NotImplementedError

    def opened_run_id(self) -> str | None:
        """Return the name that `open` continues the open run by, for checkpoints."""
        return None

    def is_ended(self) -> bool:
        """Whether the user's program has ended the open run, so that `open` has to continue it for the next value."""
        return False

    def check(self) -> None:
        """Raise an error if the client is not installed, or does not take the arguments. Called before the run."""

    def send_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Send the run's hyperparameters (data only, possibly nested)."""

    def send_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send values at `step`, the number of completed steps."""
        raise NotImplementedError

    def send_media(self, key: str, media: Media, step: int) -> None:
        """Send `Images`, a `Text`, a `Histogram` or a `Table` of `trainer.metrics.media`."""
        super().log_media(key, media, step)

    def send_checkpoint(self, folder: Path, name: str, aliases: list[str]) -> None:
        """Send the files of a checkpoint, which stay unchanged until this returns."""

    def finish(self, failed: bool) -> None:
        """Tell the tracker that a stage has ended. Called in the training thread, after the last call is done."""

    def close(self) -> None:
        """Release the open run, because another one follows."""

    # -- the run of the tracker ----------------------------------------------------------------------------------------

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The client's own object, for what it can do beyond this class. On ranks other than 0 its calls do nothing."""
        return self._opened()

    @property
    def version(self) -> str | None:
        """The id of the tracker's run; None: there is none yet."""
        return self.given_run_id if self._client is None else self.opened_run_id()

    def _opened(self) -> Any:
        if self._client is not None and self.is_ended():
            self._resumed_run, self._client = self.opened_run_id(), None
        if self._client is None:
            self._client = self.open(self._resumed_run or self.given_run_id)
            self._calls = BackgroundCalls(type(self).__name__)
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None, "_calls": None, "_trainer": None}

    def _leave_run(self) -> None:
        if self._client is not None:
            self.close()
        self._client, self._resumed_run = None, None

    def _call(self, function: Callable[..., object], *args: Any, keep: Any = None) -> None:
        if self._writes:
            self._opened()
            assert self._calls is not None
            self._calls.call(function, *args, keep=keep)

    # -- state: the run, and what was not sent -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._client is None:
            return {}
        from trainer.data.media_state import state_of

        assert self._calls is not None
        unsent = [
            {**one, "media": state_of(one["media"])} if "media" in one else one for one in self._calls.unfinished()
        ]
        return {"run": self.opened_run_id(), "unsent": unsent}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        values, media = {"step": Integer(), "values": {str: NUMBER}}, {"step": Integer(), "key": str, "media": {}}
        require(state_dict, {"run?": (str, None), "unsent?": [(values, media)]}, type(self).__name__)
        fits = self._trainer is not None and self._trainer.stage == "fit"
        run, open_run = state_dict.get("run"), None if self._client is None else self.opened_run_id()
        if run is None or self.given_run_id not in (None, run) or run == open_run or (open_run and not fits):
            return
        if open_run is not None:
            log.info("%s: going on with run %s of the checkpoint, instead of %s", type(self).__name__, run, open_run)
            self._leave_run()
        self._resumed_run = run
        self._resumed_unsent = tuple(state_dict.get("unsent", ())) if fits else ()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        self._has_failed, self._resumed_unsent = False, ()
        if stage == "fit":
            for copy in trainer.run_dir.glob(f"{SENDING}*"):  # of a process that was killed
                shutil.rmtree(copy, ignore_errors=True)
            if self._has_fit and self.given_run_id is None:
                self._leave_run()
            self._has_fit = True
        if trainer.is_global_zero:
            self.check()

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        for one in self._resumed_unsent if self._writes else ():
            if "values" in one:
                self._call(self.send_metrics, one["values"], one["step"], keep=one)
            else:
                from trainer.data.media_state import media_of

                self._send_media(one["key"], media_of(one["media"]), one["step"])
        self._resumed_unsent = ()

    def on_checkpoint_saved(self, trainer: Trainer, pl_module: TrainModule, path: str) -> None:
        if self.log_model == "all":
            self._send_checkpoint(path)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.log_model is True and self._writes:
            written = [p for c in trainer.checkpoint_callbacks for p in (c.last_model_path, c.best_model_path) if p]
            for path in dict.fromkeys(written):
                self._send_checkpoint(path)

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self._has_failed = True

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if self._calls is not None:
            self._calls.wait(min(10.0, self.seconds_at_end) if self._has_failed else self.seconds_at_end)
            self.finish(self._has_failed)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._call(self.send_hyperparameters, hyperparameters)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        values = {self._prefixed(name): value for name, value in metrics.items()}
        self._call(self.send_metrics, values, step, keep={"step": step, "values": dict(values)})

    def log_media(self, key: str, media: Media, step: int) -> None:
        self._send_media(self._prefixed(key), media, step)

    def _send_media(self, key: str, media: Media, step: int) -> None:
        self._call(self.send_media, key, media, step, keep={"step": step, "key": key, "media": media})

    def _send_checkpoint(self, path: str) -> None:
        """Send the files from a copy of hard links, which retention does not delete and which takes no space."""
        trainer = self._trainer
        assert trainer is not None
        folder = Path(path)
        if not folder.is_dir():
            log.warning("%s: %s is not a folder of this machine, and is not sent.", type(self).__name__, path)
            return
        best = any(path == one.best_model_path for one in trainer.checkpoint_callbacks)
        copy = linked_copy(folder, trainer.run_dir)
        self._call(self._send_and_delete, copy, folder.name, ["latest", "best"] if best else ["latest"])

    def _send_and_delete(self, copy: Path, name: str, aliases: list[str]) -> None:
        try:
            self.send_checkpoint(copy, name, aliases)
        finally:
            shutil.rmtree(copy, ignore_errors=True)


SENDING = ".sending-"
"""The beginning of the names of copies that are being sent."""


def linked_copy(folder: Path, parent: Path) -> Path:
    """Return a new folder in `parent` with hard links to the files of a folder, or copies if there are none."""
    copy = Path(tempfile.mkdtemp(prefix=SENDING, dir=parent))

    def link_or_copy(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    shutil.copytree(folder, copy, copy_function=link_or_copy, dirs_exist_ok=True)
    return copy


class DummyExperiment:
    """The experiment of a `DummyLogger`: it has every attribute and entry, and a call of it does nothing."""

    def __getattr__(self, name: str) -> DummyExperiment:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getitem__(self, key: Any) -> DummyExperiment:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...


class DummyLogger(Logger):
    """The logger of a `fast_dev_run`: any of its methods, and of its `experiment`, may be called, and does nothing."""

    name = version = ""
    save_dir = None

    def __init__(self) -> None:
        self.experiment = DummyExperiment()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_media(self, *args: Any) -> None: ...

    def __getattr__(self, name: str) -> DummyExperiment:
        return getattr(DummyExperiment(), name)  # type: ignore[no-any-return]  # it has every attribute

    def __getitem__(self, key: Any) -> DummyLogger:
        return self
