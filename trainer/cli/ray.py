"""`trainer fit --ray`: run the same training in the workers of Ray Train."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.arguments import local_path
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node
from trainer.errors import ConfigError, TrainerError, require_package
from trainer.settings import Settings

if TYPE_CHECKING:
    from trainer.config.loading import Recipe


@dataclass(frozen=True)
class RayOptions:
    """The options of `--ray NAME=VALUE ...`, with Ray's names and meaning."""

    num_workers: int = 1
    use_gpu: bool = False
    """One GPU for each worker."""
    resources_per_worker: dict[str, float] | None = None
    storage_path: str | None = None
    """A folder that all machines see, for Ray's files and, unless `default_root_dir` is given, the run directories."""
    max_failures: int = 0
    """Number of times that the workers are restarted after one of them failed; -1: without limit."""
    address: str | None = None
    """Address of a running cluster, or "auto"; default: `RAY_ADDRESS`, the cluster on this machine, or a new one."""


def read_ray(words: Sequence[str], findings: Diagnostics) -> RayOptions:
    """Parse the options; problems go to `findings`."""
    from trainer.config.check import Checker
    from trainer.config.files import read_value
    from trainer.config.specs import INVALID

    pairs = [word.partition("=") for word in words]
    for name in (name for name, equals, _ in pairs if not equals):
        findings.add(COMMAND_LINE, f"--ray {name} needs a value: --ray {name}=VALUE.")
    given = {name: read_value(text, f"--ray {name}") for name, equals, text in pairs if equals}
    values = Checker(findings).arguments(Node(given, COMMAND_LINE), RayOptions, ("--ray",))
    return RayOptions(**{name: value for name, value in values.items() if value is not INVALID})


def fit_on_ray(options: RayOptions, configuration: Recipe) -> int:
    """Train in Ray's workers and wait for them. Returns the exit code: 0, or 1 after more than `max_failures` failures.

    Raises:
        ConfigError: the configuration contradicts the options, or there is no such cluster.
        MissingPackageError: ray is not installed.
    """

    root = _root(options, configuration)
    require_package("ray", "trainer fit --ray")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    started_here = not ray.is_initialized()
    if started_here:
        try:
            ray.init(address=options.address)
        except ConnectionError as error:
            raise ConfigError(f"--ray address={options.address}: {error}") from None
    try:
        TorchTrainer(
            train_loop_per_worker,
            train_loop_config={
                "configuration": configuration.resolved,
                "root": root,
                "folder": os.getcwd(),
                "path": sys.path,
            },
            scaling_config=ScalingConfig(
                num_workers=options.num_workers,
                use_gpu=options.use_gpu,
                resources_per_worker=options.resources_per_worker,
            ),
            run_config=RunConfig(
                storage_path=options.storage_path, failure_config=FailureConfig(max_failures=options.max_failures)
            ),
            # NCCL alone could not gather data that is on the CPU.
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.use_gpu else "gloo"),
        ).fit()
    except ray.train.TrainingFailedError as error:
        print(f"error: the training on Ray failed: {error}", file=sys.stderr)
        return 1
    finally:
        if started_here:
            ray.shutdown()
    return 0


def _root(options: RayOptions, configuration: Recipe) -> str:
    """Return the folder of the run directories, which is the same for all workers."""
    if options.storage_path is None or "default_root_dir" in configuration.trainer:
        root = configuration.trainer.get("default_root_dir", Settings.default_root_dir)
        return str(local_path(root).absolute())
    if "://" in options.storage_path:
        raise ConfigError(
            f"--ray storage_path={options.storage_path} is not a folder, which run directories need: give also "
            "--trainer.default_root_dir, a folder that all machines see."
        )
    return str(local_path(options.storage_path).absolute())


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Run `trainer fit` in a worker, with the configuration that the command has checked.

    Raises:
        TrainerError: `trainer fit` failed, and has printed the reason.
    """
    from trainer.cli.main import main

    # Ray gives each worker a separate folder, where the user's relative paths do not exist.
    if Path(config["folder"]).is_dir():
        os.chdir(config["folder"])
    sys.path += [folder for folder in config["path"] if folder not in sys.path]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config["configuration"], encoding="utf-8")
        code = main(["fit", "--config", str(file), "--trainer.default_root_dir", config["root"]])
    if code != 0:
        raise TrainerError(f"trainer fit ended with exit code {code} in a worker of Ray; its output says why.")
