"""WandbLogger: a run of Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakSet

from trainer.arguments import make_folder, optional_path
from trainer.errors import ConfigError, require_package, shown
from trainer.logger import Tracker, flat_hyperparameters
from trainer.metrics.media import Histogram, Images, Media, Text

if TYPE_CHECKING:
    from torch import nn

STEP = "trainer/global_step"
"""The x axis of all curves. Not wandb's own step, which drops what is logged at a smaller one."""


class WandbLogger(Tracker):
    """Send metrics, media, hyperparameters and checkpoints to Weights & Biases.

    A resumed training continues its W&B run. The curves' x axis is `trainer/global_step`; a step that a resumed run
    repeats has two equal rows and one point. Offline, each start writes a folder
    `<save_dir>/wandb/offline-run-...-<id>`, and `wandb sync` joins folders of the same id into one run. The run stays
    open after `fit`, for `test` and for your own calls, until another `fit` begins or the process ends. A run that your
    program has begun with `wandb.init` is used unchanged.

    Args:
        name: displayed name of the run; default: one by wandb.
        save_dir: folder for wandb's folder `wandb`; default: the run directory.
        version: id of a run to continue, or of the new one.
        offline: write to files only.
        dir: the same as `save_dir`, which goes first.
        id: the same as `version`; goes first.
        anonymous: log without an account, with versions of wandb that allow it.
        project: default: the variable WANDB_PROJECT, else "trainer".
        log_model: send checkpoints as artifacts, with the aliases "latest" and "best": at the end of training the best
            and the last one (True), or each as it is written ("all").
        experiment: an open run to use.
        prefix: put before the name of each value, with a "-".
        checkpoint_name: name of the artifacts; default: "model-" and the id of the run.
        add_file_policy: "mutable" copies the files of a checkpoint before they are sent; "immutable" sends the files
            themselves, which takes no space, and copies them offline only.
        kwargs: further arguments of `wandb.init`, such as `entity`, `group`, `tags`, `settings`.

    Raises:
        MissingPackageError: at the start of a run, when wandb is not installed.
        ConfigError: wandb cannot begin a run.
    """

    _all: ClassVar[WeakSet[WandbLogger]] = WeakSet()
    """All loggers of this process, to distinguish their runs from one that the user's program has begun: wandb has one
    current run per process."""

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | Literal["all"] = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if experiment is not None and not hasattr(experiment, "define_metric"):
            raise ConfigError(f"WandbLogger(experiment={shown(experiment)}): give the run that wandb.init returned.")
        self._save_dir = optional_path(save_dir, "save_dir") or optional_path(dir, "dir")
        self.given_run_id = id or version
        self.project = project
        self.offline = offline
        self.log_model = log_model
        self.prefix = prefix
        self.checkpoint_name = checkpoint_name
        self.add_file_policy = add_file_policy
        self._options = {"name": name, **({} if anonymous is None else {"anonymous": anonymous}), **kwargs}
        self._given = experiment
        self._owns_run = False

    @property
    def save_dir(self) -> Path | None:
        """The folder for wandb's own folder; None before a run, if it is the run directory."""
        return self._save_dir or (None if self._trainer is None else self._trainer.run_dir)

    @property
    def name(self) -> str:
        """The name of the project."""
        return self.project or os.environ.get("WANDB_PROJECT") or "trainer"

    def output_location(self) -> tuple[str, Path] | None:
        return None if not self.offline or self.save_dir is None else ("W&B, offline:", self.save_dir / "wandb")

    def check(self) -> None:
        require_package("wandb", "WandbLogger")

    # -- the run -------------------------------------------------------------------------------------------------------

    def open(self, run_id: str | None) -> Any:
        """Return the run: the given one, one that the program has begun, or a new or resumed one."""
        self.check()
        import wandb

        self._all.add(self)
        self._owns_run = False
        others = [one for one in self._all if one is not self and one._client is not None and one._owns_run]
        active: Any = None if any(one._client is wandb.run for one in others) else wandb.run
        run = self._given
        if run is None and active is not None and run_id in (None, active.id):
            run = active
        if run is None:
            run = self._begin(run_id, others)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    def _begin(self, run_id: str | None, others: list[WandbLogger]) -> Any:
        import wandb

        for other in others:  # the run of a training that is over, as in a sweep
            if other._trainer is None or other._trainer.stage is None:
                other._leave_run()
        folder = self.save_dir or Path()  # made absolute below: wandb's own process may have another working directory
        make_folder(folder, "WandbLogger(save_dir=...)")
        options = {"project": self.name, "dir": str(folder.resolve()), "resume": "allow", "id": run_id, **self._options}
        if self.offline:
            options["mode"] = "offline"
        if wandb.run is not None or any(one._client is not None for one in others):
            options.setdefault("reinit", "create_new")
        begin: Any = wandb.init
        try:
            run = begin(**options)
        except wandb.errors.Error as error:
            raise ConfigError(
                f"WandbLogger cannot begin a run ({error}). Log in with `wandb login`, or give offline=True and send "
                "it later with `wandb sync`."
            ) from error
        self._owns_run = True
        return run

    def is_ended(self) -> bool:
        """Whether the program has called `wandb.finish()`, which several trainings in one process do."""
        return bool(getattr(self._client, "_is_finished", False))

    def opened_run_id(self) -> str | None:
        return None if self._client is None else str(self._client.id)

    def close(self) -> None:
        """End the run, if this logger has begun it."""
        if self._owns_run:
            self._client.finish()
            self._owns_run = False

    # -- what is sent --------------------------------------------------------------------------------------------------

    def send_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._client.config.update(flat_hyperparameters(hyperparameters), allow_val_change=True)

    def send_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._client.log({**metrics, STEP: step})

    def send_media(self, key: str, media: Media, step: int) -> None:
        import wandb

        shown: Any
        if isinstance(media, Images):
            lists = {"caption": media.captions, **media.options}
            options = [{name: of[i] for name, of in lists.items() if of is not None} for i in range(len(media.arrays))]
            pictures = [array[..., 0] if array.shape[-1] == 1 else array for array in media.arrays]
            shown = [wandb.Image(array, **one) for array, one in zip(pictures, options, strict=True)]
        elif isinstance(media, Histogram):
            counts: Any = media.counts()
            shown = wandb.Histogram(np_histogram=counts)
        elif isinstance(media, Text):
            shown = wandb.Table(columns=["text"], data=[[media.text]])
        else:
            shown = wandb.Table(columns=[*media.columns], data=media.rows)
        self._client.log({key: shown, STEP: step})

    def send_checkpoint(self, folder: Path, name: str, aliases: list[str]) -> None:
        import wandb

        metadata = {"checkpoint": name}
        artifact = wandb.Artifact(self.checkpoint_name or f"model-{self._client.id}", type="model", metadata=metadata)
        copies = self._client.offline or self.add_file_policy == "mutable"
        artifact.add_dir(str(folder), policy="mutable" if copies else "immutable")
        logged = self._client.log_artifact(artifact, aliases=aliases)
        if not copies:
            logged.wait()  # this folder is deleted afterwards

    # -- Lightning's methods -------------------------------------------------------------------------------------------

    def watch(
        self,
        model: nn.Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Have wandb log the gradients and parameters of a module; it reads the device each time."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Return an artifact, and note that the run uses it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)
