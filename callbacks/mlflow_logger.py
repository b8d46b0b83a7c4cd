"""MLFlowLogger: a run of MLflow."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import Any, Literal

from trainer.arguments import flat_names, kept_path
from trainer.errors import ConfigError, require_package
from trainer.logger import Tracker, flat_hyperparameters
from trainer.metrics.media import Images, Media, Text, png

log = logging.getLogger("trainer")

_FILES = "file:"
_PER_CALL = 100
"""Parameters in a call at most; MLflow's own limit."""
_LARGEST = sys.float_info.max


class MLFlowLogger(Tracker):
    """Send metrics, media, hyperparameters and checkpoints to MLflow: a server, a folder of files, or a database.

    A resumed training continues its MLflow run. It does not send values again that the store already has.

    Args:
        experiment_name: the experiment, which is created if there is none of this name.
        run_name: shown name of the run; default: MLflow makes one.
        tracking_uri: such as "http://host:5000", "sqlite:///mlflow.db" or "file:./mlruns". Default: the variable
            MLFLOW_TRACKING_URI, else the folder `save_dir`.
        tags: of a new run.
        save_dir: folder of the files, where there is no `tracking_uri`.
        log_model: send checkpoints as artifacts: at the end of training the best and the last one (True), or each as it
            is written ("all").
        prefix: put before the name of each value, with a "-".
        artifact_location: where a new experiment keeps its artifacts.
        run_id: a run to continue.
        synchronous: no effect: a thread waits for MLflow, not the training.

    Raises:
        MissingPackageError: at the start of a run, when mlflow is not installed.
        ConfigError: the run does not exist, or the store cannot be opened.
    """

    def __init__(
        self,
        experiment_name: str = "trainer",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | Path | None = "./mlruns",
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = experiment_name
        self.run_name = run_name
        self._tracking_uri = tracking_uri
        self.tags = tags
        self._folder = kept_path("./mlruns" if save_dir is None else save_dir, "save_dir")
        self.log_model = log_model
        self.prefix = prefix
        self.artifact_location = artifact_location
        self.given_run_id = run_id
        self._run_id: str | None = None
        self._stored: dict[str, list[tuple[int, float]]] | None = None
        """Values that the store has of a resumed run, by name, read when the name is logged first. None: a new run."""

    @property
    def tracking_uri(self) -> str:
        """The address of the store."""
        return self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{_FILES}{self._folder}"

    @property
    def save_dir(self) -> str | None:
        """The folder of the files; None: the store is a database or a server."""
        return self.tracking_uri.removeprefix(_FILES) if self.tracking_uri.startswith(_FILES) else None

    @property
    def run_id(self) -> str | None:
        """The id of the run, which is begun if there is none yet; None on ranks other than 0."""
        return self.opened_run_id() if self.experiment is self._client else None

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self.experiment_name

    @property
    def experiment_id(self) -> str | None:
        """The id of the experiment; None before a run, and on ranks other than 0."""
        return None if self._client is None else str(self._client.get_run(self._run_id).info.experiment_id)

    def output_location(self) -> tuple[str, Path] | None:
        path = self.save_dir or (self.tracking_uri if self.tracking_uri.startswith("sqlite:") else None)
        return None if path is None else ("MLflow:         mlflow ui --backend-store-uri", Path(path))

    def check(self) -> None:
        require_package("mlflow", "MLFlowLogger")

    # -- the run -------------------------------------------------------------------------------------------------------

    def open(self, run_id: str | None) -> Any:
        """Return MLflow's client with a new or resumed run."""
        self.check()
        from mlflow.tracking import MlflowClient

        if self.save_dir is not None or "://" not in self.tracking_uri:
            # MLflow 3 refuses folders unless asked for, which the user has done here.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of MLflow's own use of other packages
                warnings.simplefilter("ignore", FutureWarning)
                client = MlflowClient(self.tracking_uri)
                self._run_id = self._begin(client) if run_id is None else self._resume(client, run_id)
        except Exception as error:  # also plain ones, of the store of files
            raise ConfigError(f"MLFlowLogger cannot use {self.tracking_uri!r}: {error}") from error
        self._stored = None if run_id is None else {}
        return client

    def _begin(self, client: Any) -> str:
        from mlflow.tracking.context.registry import resolve_tags

        experiment = client.get_experiment_by_name(self.experiment_name)
        if experiment is None:
            number = client.create_experiment(self.experiment_name, artifact_location=self.artifact_location)
        else:
            number = experiment.experiment_id
        tags = {name: str(value) for name, value in (self.tags or {}).items()}
        return str(client.create_run(number, tags=resolve_tags(tags), run_name=self.run_name).info.run_id)

    def _resume(self, client: Any, run_id: str) -> str:
        client.get_run(run_id)  # an error if there is none
        client.update_run(run_id, status="RUNNING")
        return run_id

    def opened_run_id(self) -> str | None:
        return self._run_id

    def finish(self, failed: bool) -> None:
        try:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
        except Exception as error:
            log.warning("MLFlowLogger: the run %s could not be marked as ended: %s", self._run_id, error)

    # -- what is sent --------------------------------------------------------------------------------------------------

    def send_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        from mlflow.entities import Param

        flat = flat_names(flat_hyperparameters(hyperparameters))
        values = [Param(self._allowed(name), str(value)[:500]) for name, value in flat.items()]
        for first in range(0, len(values), _PER_CALL):
            self._client.log_batch(self._run_id, params=values[first : first + _PER_CALL])

    def send_metrics(self, metrics: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow's databases hold no infinity: they give back these.
        values = {self._allowed(name): max(min(float(value), _LARGEST), -_LARGEST) for name, value in metrics.items()}
        new = [Metric(name, value, now, step) for name, value in values.items() if not self._has(name, value, step)]
        if new:
            self._client.log_batch(self._run_id, metrics=new)

    def _has(self, name: str, value: float, step: int) -> bool:
        """Return True if the store of a resumed run has this value already."""
        if self._stored is None:
            return False
        if name not in self._stored:
            self._stored[name] = [(m.step, m.value) for m in self._client.get_metric_history(self._run_id, name)]
        # As text: nan equals nan.
        return any(at == step and repr(stored) == repr(value) for at, stored in self._stored[name])

    def send_media(self, key: str, media: Media, step: int) -> None:
        start = f"{self._allowed(key)}/step-{step}"
        if isinstance(media, Images):
            for number, array in enumerate(media.arrays):
                self._log_file(f"{start}-{number}", ".png", png(array))
            if media.captions is not None:
                self._log_json(start, {"captions": media.captions})
        elif isinstance(media, Text):
            self._log_file(start, ".txt", media.text.encode(errors="replace"))
        else:
            self._log_json(start, media.record())

    def _log_json(self, start: str, values: dict[str, Any]) -> None:
        self._log_file(start, ".json", json.dumps(values, indent=2, default=str).encode())

    def _log_file(self, start: str, suffix: str, data: bytes) -> None:
        """Send a file with its sum in the name: what a resumed run repeats is one, two of a key and step are two."""
        folder, _, name = start.rpartition("/")
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary, f"{name}-{zlib.crc32(data):08x}{suffix}")
            file.write_bytes(data)
            self._client.log_artifact(self._run_id, str(file), folder)

    def send_checkpoint(self, folder: Path, name: str, aliases: list[str]) -> None:
        self._client.log_artifacts(self._run_id, str(folder), f"checkpoints/{name}")
        for alias in aliases:
            self._client.set_tag(self._run_id, f"checkpoint.{alias}", f"checkpoints/{name}")

    def _allowed(self, name: str) -> str:
        """Return a name with the characters that MLflow takes, which no other name has, whichever comes first."""
        allowed = re.sub(r"[^\w/. -]", "_", name, flags=re.ASCII)
        if allowed != name:
            allowed = f"{allowed}-{zlib.crc32(name.encode()):08x}"
        return allowed
