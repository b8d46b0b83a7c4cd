"""Read the user's DeepSpeed configuration, fill in every `"auto"`, and find what contradicts the trainer."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.arguments import local_path
from trainer.checkpoint.disk import replace_notes
from trainer.errors import ConfigError, did_you_mean, raise_problems, shown
from trainer.precision import Precision
from trainer.strategies.deepspeed.config_checks import AUTO, key_problems, without_auto

MICRO_BATCH = "train_micro_batch_size_per_gpu"
WINDOW = "gradient_accumulation_steps"

DEFAULTS = {
    # Any torch optimizer may be sharded and offloaded; DeepSpeed otherwise takes its own few only.
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    # It waits for the device before each forward and in each step, for figures that the trainer does not use.
    "timers.throughput.enabled": False,
    # Only the same figures use the micro-batch.
    MICRO_BATCH: 1,
    WINDOW: 1,
    "gradient_clipping": 0.0,
}
"""The engine's values for what neither the trainer nor the JSON says."""


@dataclass(frozen=True, kw_only=True)
class AgreedSettings:
    """The settings that a configuration has to agree with. None: not set, or not known yet."""

    stage: int | None = None
    offload_optimizer: str | None = None
    """ "cpu", "nvme" or "none"."""
    offload_parameters: str | None = None
    nvme_path: str | None = None
    precision: Precision | None = None
    micro_batch: int | None = None
    """Samples of a micro-batch on one process."""
    window: int | None = None
    world_size: int | None = None
    clip_norm: float | None = None
    optimizer: Optimizer | None = None
    schedulers: Sequence[object] | None = None
    hidden_size: int | None = None
    """Width of the model, which determines the sizes of buckets; see `hidden_size_of`."""


def read_config(given: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the configuration in a file or dict; None is an empty one.

    Raises:
        ConfigError: the file cannot be read, or holds no JSON object; the dict has values that JSON has not.
    """
    if given is None:
        return {}
    try:
        text = json.dumps(dict(given)) if isinstance(given, Mapping) else local_path(given).read_text("utf-8")
        config = _parse(text)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config={shown(given)} cannot be read: {error}. Give the path of a DeepSpeed JSON file, or a dict."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"config={shown(given)} holds no JSON object: a DeepSpeed configuration begins with {{.")
    return config


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        # DeepSpeed reads its files with hjson, which allows comments and trailing commas.
        import hjson

        return hjson.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) < len(pairs):
        raise ValueError(f"a key stands there more than once: {', '.join(name for name, _ in pairs)}")
    return section


def config_problems(config: Mapping[str, Any], settings: AgreedSettings) -> list[str]:
    """Return everything wrong with a configuration that can be seen with what is known, one sentence each.

    Needs DeepSpeed, starts nothing, and may be asked before there are processes, optimizers or data.
    """
    return key_problems(config) or CompletedConfig(config, settings).problems


def resolve_config(config: Mapping[str, Any], settings: AgreedSettings) -> dict[str, Any]:
    """Return the complete configuration as DeepSpeed gets it, without any `"auto"`.

    Values that the settings leave open are DeepSpeed's defaults. The sections "optimizer" and "scheduler" are left
    out: the engine gets the module's optimizer, and the loop steps schedules.

    Raises:
        ConfigError: everything wrong in one message.
    """
    raise_problems(config_problems(config, settings), "the DeepSpeed configuration")
    return CompletedConfig(config, settings).config


def value_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path; the default if it is missing, or "auto"."""
    part: Any = config
    for name in path.split("."):
        part = part.get(name) if isinstance(part, dict) else None
    return default if part in (None, AUTO) else part


class CompletedConfig:
    """A configuration with what follows from the settings filled in, and where it contradicts them."""

    def __init__(self, config: Mapping[str, Any], settings: AgreedSettings) -> None:
        self.config: dict[str, Any] = copy.deepcopy(dict(config))
        self.settings = settings
        self.problems: list[str] = []
        self._check_optimizer(self.config.pop("optimizer", None))
        self._check_schedule(self.config.pop("scheduler", None))
        for path, value, source in self._trainers_values():
            self._reconcile(path, value, source)
        self._check_nvme_paths()
        self._fill_batch_size()
        self._fill_buckets()
        for path, value in DEFAULTS.items():
            if self._value(path) is None:
                self._set(path, value)
        self.config = without_auto(self.config)

    def _value(self, path: str) -> Any:
        return value_at(self.config, path)

    def _set(self, path: str, value: Any) -> None:
        *sections, name = path.split(".")
        section = self.config
        for outer in sections:
            if not isinstance(section.get(outer), dict):
                section[outer] = {}
            section = section[outer]
        section[name] = value

    def _reconcile(self, path: str, value: Any, source: str) -> None:
        """Write the trainer's value; where the JSON has another one, report it."""
        given = self._value(path)
        if value is None:
            return
        if given is None:
            self._set(path, value)
        elif not _equal(given, value):
            self._contradiction(f"{path}={json.dumps(given)}", source)

    def _contradiction(self, given: str, trainers: str) -> None:
        self.problems.append(
            f'{given} in the DeepSpeed configuration, but {trainers}. Make them the same, or write "auto" there.'
        )

    def _trainers_values(self) -> Iterator[tuple[str, Any, str]]:
        """Yield keys, the trainer's value of each (None: not known), and words for where it comes from."""
        settings = self.settings
        yield "zero_optimization.stage", settings.stage, f"the strategy has stage={settings.stage}"
        offloads = {"optimizer": settings.offload_optimizer, "param": settings.offload_parameters}
        for name, device in offloads.items():
            yield f"zero_optimization.offload_{name}.device", device, f"the strategy's is {device!r}"
        yield WINDOW, settings.window, f"accumulate_grad_batches={settings.window}"
        yield MICRO_BATCH, settings.micro_batch, f"the DataLoader's batch_size={settings.micro_batch}"
        yield "gradient_clipping", settings.clip_norm, f"gradient_clip_val={settings.clip_norm}"
        if settings.precision is not None:
            low = settings.precision.autocast or settings.precision.weights
            for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
                yield f"{name}.enabled", low is dtype, f"the trainer has precision={settings.precision.name!r}"

    def _check_nvme_paths(self) -> None:
        for section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
            if self._value(f"{section}.device") == "nvme":
                folder = self.settings.nvme_path
                self._reconcile(f"{section}.nvme_path", folder, f"the strategy has nvme_path={folder!r}")
                if self._value(f"{section}.nvme_path") is None:
                    self.problems.append(f"{section} to nvme needs a folder: give nvme_path=.")

    def _fill_batch_size(self) -> None:
        """Compare the global batch with its factors. It gives the micro-batch where the DataLoader does not."""
        total, processes = self._value("train_batch_size"), self.settings.world_size
        window = self.settings.window or self._value(WINDOW)
        micro = self.settings.micro_batch or self._value(MICRO_BATCH)
        if processes is None or window is None:
            self.config.pop("train_batch_size", None)  # DeepSpeed would compare it with a window of one
            return
        if micro is None and total is not None:
            micro = max(1, total // (window * processes))
            self._set(MICRO_BATCH, micro)
        if micro is not None:
            product = micro * window * processes
            factors = f"micro-batch {micro} x window {window} x processes {processes} = {product}"
            self._reconcile("train_batch_size", product, factors)

    def _fill_buckets(self) -> None:
        """Set bucket sizes as accelerate and transformers do (accelerate 1.15, accelerator.py, _prepare_deepspeed).

        Without a width DeepSpeed's defaults hold.
        """
        zero, width = self.config.get("zero_optimization", {}), self.settings.hidden_size or 0
        sizes = {
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        }
        if width:
            zero.update({name: size for name, size in sizes.items() if zero.get(name) == AUTO})

    def _check_optimizer(self, section: Any) -> None:
        """Compare the section "optimizer" with the module's optimizer, which the engine gets instead."""
        optimizer = self.settings.optimizer
        if not isinstance(section, dict) or optimizer is None:
            return
        kind, given = type(optimizer).__name__, str(section.get("type", AUTO))
        if not _is_of_type(kind, given):
            self._contradiction(f"optimizer.type={given!r}", f"configure_optimizers returned a {kind}")
            return
        for name, value in without_auto(value_at(section, "params", {})).items():
            actual = _hyperparameters(optimizer, name)
            if actual and not any(_equal(value, one) for one in actual):
                theirs = f"the {kind} of configure_optimizers has {actual[0]!r}"
                self._contradiction(f"optimizer.params.{name}={value!r}", theirs)

    def _check_schedule(self, section: Any) -> None:
        """Report a section "scheduler" with values, or without a schedule of the module, which is used instead."""
        schedulers = self.settings.schedulers
        if not isinstance(section, dict) or schedulers is None:
            return
        from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

        kind = section.get("type")
        if kind not in VALID_LR_SCHEDULES:
            guess = did_you_mean(str(kind), VALID_LR_SCHEDULES)
            self.problems.append(f"scheduler.type={kind!r} is not a schedule of DeepSpeed.{guess}")
        elif without_auto(value_at(section, "params", {})) or not schedulers:
            self.problems.append(
                f"the DeepSpeed configuration asks for the schedule {kind}, but the trainer steps only those that "
                f"configure_optimizers returned. Return it there (from deepspeed.runtime.lr_schedules import {kind}), "
                "and remove the section 'scheduler', or write \"auto\" for its values."
            )


def _is_of_type(kind: str, given: str) -> bool:
    """Whether a class of optimizer is what DeepSpeed makes of a type.

    Its "Adam" is AdamW unless the section says "adam_w_mode": false; FusedAdam and DeepSpeedCPUAdam compute both.
    """
    plain, given = kind.lower().removeprefix("fused").removeprefix("deepspeedcpu"), given.lower()
    return given in (AUTO, plain, kind.lower()) or ({plain, given} == {"adam", "adamw"} and kind != "Adam")


def _hyperparameters(optimizer: Optimizer, name: str) -> list[Any]:
    """Return the initial values of a hyperparameter: the optimizer's default, and one for each group."""
    # A schedule has already changed the learning rate; torch's schedulers keep the one before.
    groups = [{**group, "lr": group.get("initial_lr", group.get("lr"))} for group in optimizer.param_groups]
    return [values[name] for values in (optimizer.defaults, *groups) if values.get(name) is not None]


def _equal(given: Any, actual: Any) -> bool:
    """Whether two values are the same; one number stands for a list of it."""
    if isinstance(actual, (list, tuple)):
        several = given if isinstance(given, list) else [given] * len(actual)
        return len(several) == len(actual) and all(map(_equal, several, actual))
    numbers = (int, float, torch.Tensor)
    if isinstance(given, numbers) and isinstance(actual, numbers):
        return math.isclose(given, actual, rel_tol=1e-9)
    return bool(given == actual)


def hidden_size_of(module: nn.Module) -> int | None:
    """Return the width in the `config` of the outermost submodule that has one, as transformers' models do."""
    for part in module.modules():
        config = vars(part).get("config")
        for owner in (config, getattr(config, "text_config", None)):
            size = getattr(owner, "hidden_size", None)
            if isinstance(size, int):
                return size
    return None


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Write a resolved configuration into the run directory, as deepspeed.json."""
    replace_notes(run_dir / "deepspeed.json", (json.dumps(config, indent=2) + "\n").encode())
