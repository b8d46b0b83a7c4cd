"""Read the user's DeepSpeed configuration, fill in every `"auto"`, and find what contradicts the trainer."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.arguments import local_path
from trainer.checkpoint.disk import replace_notes
from trainer.errors import ConfigError, did_you_mean, raise_problems
from trainer.precision import Precision
from trainer.strategies.deepspeed.config_checks import AUTO, MODELS, complete_config_problems, default_of, key_problems
from trainer.strategies.deepspeed.problems import check_build_tools

DEFAULT_STAGE = 2
"""The stage where neither the strategy nor the JSON names one."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The settings that a configuration has to agree with. None: not set, or not known yet."""

    stage: int | None = None
    offload_optimizer: str | None = None
    """ "cpu", "nvme" or "none"."""
    offload_parameters: str | None = None
    nvme_path: str | None = None
    precision: Precision | None = None
    device_type: str = "cpu"
    micro_batch: int | None = None
    """Samples of a micro-batch on one process."""
    window: int | None = None
    world_size: int | None = None
    clip_norm: float | None = None
    optimizer: Optimizer | None = None
    schedulers: Sequence[object] | None = None
    hidden_size: int | None = None
    """Width of the model, from which the sizes of buckets follow; see `hidden_size_of`."""


def config_problems(given: str | Path | Mapping[str, Any] | None, settings: TrainerSettings) -> list[str]:
    """Return everything wrong with a configuration that can be seen with what is known, one sentence each.

    Needs DeepSpeed, starts nothing, and may be asked before there are processes, optimizers or data.
    """
    resolved, problems = _resolve(given, settings)
    return problems + check_build_tools(resolved.config, settings.device_type)


def resolve_config(given: str | Path | Mapping[str, Any] | None, settings: TrainerSettings) -> ResolvedDeepSpeed:
    """Return the complete configuration as DeepSpeed gets it, without any `"auto"`.

    Values that the settings leave open are DeepSpeed's defaults. A `"scheduler"` section is left out: the loop steps
    schedules.

    Raises:
        ConfigError: everything wrong in one message.
    """
    resolved, problems = _resolve(given, settings)
    resolved.config.pop("scheduler", None)
    if settings.optimizer is None:
        resolved.config.pop("optimizer", None)
    problems += _fill_defaults(resolved.config)
    raise_problems(problems or complete_config_problems(resolved.config), "the DeepSpeed configuration")
    return resolved


def _resolve(
    given: str | Path | Mapping[str, Any] | None, settings: TrainerSettings
) -> tuple[ResolvedDeepSpeed, list[str]]:
    config, problems = read_config(given)
    resolved = ResolvedDeepSpeed(config, settings)
    return resolved, list(dict.fromkeys(problems + key_problems(config) + resolved.problems))


def read_config(given: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the configuration in a file or dict, and its problems; None is an empty one."""
    if given is None:
        return {}, []
    if isinstance(given, Mapping):
        try:
            return json.loads(json.dumps(dict(given))), []
        except (TypeError, ValueError) as error:
            return {}, [f"config={given!r} holds what JSON cannot: {error}."]
    if not isinstance(given, (str, Path)):
        return {}, [f"config={given!r}: give the path of a DeepSpeed JSON file, or a dict."]
    try:
        return _parse(local_path(given).read_text(encoding="utf-8"), str(given))
    except (OSError, UnicodeError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fix = "Give the path of a DeepSpeed JSON file, or a dict."
        return {}, [f"config={str(given)!r} cannot be read: {reason}. {fix}"]


def zero_of(given: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the section of ZeRO, as far as it can be read; `config_problems` reports what is wrong with it."""
    zero = read_config(given)[0].get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def offload_device(zero: Mapping[str, Any], section: str) -> Any:
    """Return the device that a JSON's section names: False for "none", None where it names none."""
    entry = zero.get(section)
    device = entry.get("device") if isinstance(entry, Mapping) else None
    return False if device == "none" else None if device == AUTO else device


def hidden_size_of(module: nn.Module) -> int | None:
    """Return the width in the `config` of the outermost submodule that has one, as transformers' models do."""
    for part in module.modules():
        config = vars(part).get("config")
        for owner in (config, _entry(config, "text_config")):
            size, sizes = _entry(owner, "hidden_size"), _entry(owner, "hidden_sizes")
            if isinstance(size, int):
                return size
            if isinstance(sizes, (list, tuple)) and sizes:
                return int(max(sizes))
    return None


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Write a resolved configuration into the run directory, as deepspeed.json."""
    replace_notes(run_dir / "deepspeed.json", (json.dumps(config, indent=2) + "\n").encode())


def _parse(text: str, name: str) -> tuple[dict[str, Any], list[str]]:
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [key for key, _ in pairs]
        repeated.extend(sorted({key for key in names if names.count(key) > 1}))
        return dict(pairs)

    try:
        config = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        # DeepSpeed reads its files with hjson, which allows comments and trailing commas.
        import hjson

        repeated.clear()
        try:
            config = hjson.loads(text, object_pairs_hook=unique)
        except hjson.HjsonDecodeError:
            return {}, [f"{name} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}."]
    problems = [f"{name} has {key!r} more than once." for key in repeated]
    if isinstance(config, dict):
        return config, problems
    return {}, [*problems, f"{name} holds no JSON object: a DeepSpeed configuration begins with {{."]


def _entry(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


class ResolvedDeepSpeed:
    """A configuration with what follows from the settings filled in, and where it contradicts them."""

    def __init__(self, config: Mapping[str, Any], settings: TrainerSettings) -> None:
        self.config: dict[str, Any] = copy.deepcopy(dict(config))
        self.settings = settings
        self.problems: list[str] = []
        self.notes: list[str] = []
        """Remarks for the user, one sentence each."""
        if "bfloat16" in self.config:
            self.config.setdefault("bf16", self.config.pop("bfloat16"))
        offloads = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
        if not all(isinstance(self._value(section, {}), dict) for section in (*MODELS, *offloads)):
            return  # `key_problems` reports it
        self._zero()
        self._precision()
        self._batches()
        self._clipping()
        self._buckets()
        found, notes = optimizer_section(self.config, settings.optimizer)
        self.problems += found + scheduler_problems(self.config, settings.optimizer, settings.schedulers)
        self.notes += notes
        self._engine_keys()

    def _value(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path; the default if there is no value, or "auto"."""
        part: Any = self.config
        for name in path.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        return default if part is None or part == AUTO else part

    def _set(self, path: str, value: Any) -> None:
        *sections, name = path.split(".")
        section = self.config
        for outer in sections:
            if section.get(outer) in (None, AUTO):
                section[outer] = {}
            section = section[outer]
        section[name] = value

    def _reconcile(self, path: str, value: Any, source: str, fix: str) -> None:
        """Write the trainer's value; where the JSON has another one, report it."""
        given = self._value(path)
        if value is not None and given is None:
            self._set(path, value)
        elif value is not None and not _equal(given, value):
            self._contradiction(path, given, f"{source}={value!r}", fix)

    def _contradiction(self, path: str, given: Any, trainers: str, fix: str) -> None:
        self.problems.append(
            f'{path}={json.dumps(given)} in the DeepSpeed configuration, but {trainers}. {fix}, or write "auto" there.'
        )

    def _zero(self) -> None:
        settings, same = self.settings, "Give the strategy the same"
        stage = "zero_optimization.stage"
        self._reconcile(stage, settings.stage, "the strategy has stage", "Use the strategy of that stage")
        if self._value(stage) is None:
            self._set(stage, DEFAULT_STAGE)
        offloads = {"offload_optimizer": settings.offload_optimizer, "offload_param": settings.offload_parameters}
        for name, wanted in offloads.items():
            section = f"zero_optimization.{name}"
            self._reconcile(f"{section}.device", wanted, "the strategy has its device", same)
            if self.config["zero_optimization"].get(name) is not None and self._value(f"{section}.device") is None:
                self._set(f"{section}.device", "none")
            if self._value(f"{section}.device") == "nvme":
                self._reconcile(f"{section}.nvme_path", settings.nvme_path, "the strategy's nvme_path", same)
                if self._value(f"{section}.nvme_path") is None:
                    self.problems.append(f"{section} to nvme needs a folder: give nvme_path=.")
        number = self._value(stage)
        if type(number) is not int:  # DeepSpeed would take "3" and 3.0 for 3
            self.problems.append(f"{stage}={json.dumps(number)}: give 1, 2 or 3, as an integer.")
        if self._offloads("offload_param") and number != 3:
            self.problems.append(f"offload_param needs stage 3, and the stage is {number}: use 'deepspeed_stage_3'.")
        if self._offloads("offload_optimizer") and number == 0:
            self.problems.append("offload_optimizer needs stage 1, 2 or 3, and the stage is 0.")

    def _offloads(self, name: str) -> bool:
        return self._value(f"zero_optimization.{name}.device") in ("cpu", "nvme")

    def _precision(self) -> None:
        precision = self.settings.precision
        if precision is None:
            return
        names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        wanted = names.get(precision.autocast or precision.weights)
        if self._value("torch_autocast.enabled") is True:
            dtype = str(self._value("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
            if {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(dtype, dtype) != wanted:
                fix = "Give Trainer(precision='bf16-mixed' or '16-mixed')"
                self._contradiction("torch_autocast.dtype", dtype, f"precision={precision.name!r}", fix)
            wanted = None
        for name, allowed in (("fp16", "16-mixed"), ("bf16", "bf16-mixed")):
            enabled = self._value(f"{name}.enabled")
            if enabled is None and (name == wanted or name in self.config):
                self._set(f"{name}.enabled", name == wanted)
            elif enabled is not None and enabled != (name == wanted):
                fix = f"Give Trainer(precision={allowed if enabled else '32-true'!r})"
                self._contradiction(f"{name}.enabled", enabled, f"the trainer's precision={precision.name!r}", fix)

    def _batches(self) -> None:
        settings, window, micro = self.settings, "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"
        fix = f"Give Trainer(accumulate_grad_batches={self._value(window)})"
        self._reconcile(window, settings.window, "accumulate_grad_batches", fix)
        self._reconcile(micro, settings.micro_batch, "the DataLoader's batch_size", "Give the DataLoader the same")
        parts = {
            "micro-batch": settings.micro_batch or self._value(micro),
            "window": settings.window or self._value(window),
            "processes": settings.world_size,
        }
        total = self._value("train_batch_size")
        known = {name: value for name, value in parts.items() if isinstance(value, int) and value > 0}
        product, complete = math.prod(known.values()), len(known) == len(parts)
        if not isinstance(total, int):
            if complete:
                self._set("train_batch_size", product)
        elif total % product or (complete and total != product):
            factors = " x ".join(f"{name} {value}" for name, value in known.items())
            relation = "does not multiply out:" if complete else "is not a multiple of"
            # The JSON's own parts may be wrong, too.
            certain = None not in (settings.micro_batch, settings.window, settings.world_size)
            self.problems.append(
                f"train_batch_size={total} {relation} {factors} = {product}. "
                f'Write {f"{product}, or " if certain else ""}"auto".'
            )
        elif set(parts) - set(known) == {"micro-batch"}:
            self._set(micro, total // product)

    def _clipping(self) -> None:
        given, norm = self._value("gradient_clipping"), self.settings.clip_norm
        fix = f"Give Trainer(gradient_clip_val={given or None})"
        self._reconcile("gradient_clipping", norm, "gradient_clip_val", fix)
        if given and norm is None and self.settings.optimizer is not None:
            self.notes.append(f"gradients are clipped by the norm {given}, as the DeepSpeed configuration says")

    def _buckets(self) -> None:
        """Set bucket sizes as accelerate and transformers do (accelerate 1.15, accelerator.py, _prepare_deepspeed)."""
        zero, width = self.config["zero_optimization"], self.settings.hidden_size
        sizes = {
            "reduce_bucket_size": lambda width: width * width,
            "prefetch_bucket_size": lambda width: int(0.9 * width * width),
            "param_persistence_threshold": lambda width: 10 * width,
        }
        autos = [name for name, value in zero.items() if value == AUTO and name.removeprefix("stage3_") in sizes]
        if width is not None:
            zero.update({name: sizes[name.removeprefix("stage3_")](width) for name in autos})
        elif autos and self.settings.optimizer is not None:
            self.notes.append(
                f"no part of the module has a config with a hidden_size: DeepSpeed's defaults for {autos}"
            )

    def _engine_keys(self) -> None:
        """Set what the engine needs, and report what has no effect or cannot be."""
        if self._value("gradient_allreduce_op") == "sum":
            self.problems.append('gradient_allreduce_op="sum" would change the gradients: the trainer averages them.')
        if self._value("data_efficiency.enabled") is True:
            self.problems.append("data_efficiency needs DeepSpeed's own data loader; remove it.")
        # Any torch optimizer may be sharded and offloaded; DeepSpeed otherwise takes its own few only.
        if self._value("zero_allow_untested_optimizer") is None:
            self.config["zero_allow_untested_optimizer"] = True
        # It waits for the device before each forward and in each step, for figures that the trainer does not use.
        if self._value("timers.throughput.enabled") is None:
            self._set("timers.throughput.enabled", False)
        if self._offloads("offload_optimizer") and self._value("zero_force_ds_cpu_optimizer") is None:
            self.config["zero_force_ds_cpu_optimizer"] = False
        without_effect = [name for name in ("checkpoint", "dataloader_drop_last") if name in self.config]
        if without_effect:
            self.notes.append(f"without effect in the DeepSpeed configuration: {', '.join(without_effect)}")


def _fill_defaults(config: dict[str, Any]) -> list[str]:
    """Replace each "auto" that is left by DeepSpeed's default; return a problem for each that has none."""
    if config.get("train_batch_size") == AUTO:
        del config["train_batch_size"]
    # Only DeepSpeed's own figures of samples per second use the micro-batch.
    defaults = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 1}
    config.update({name: value for name, value in defaults.items() if config.get(name, AUTO) == AUTO})
    return _fill_section(config, ())


def _fill_section(section: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    problems = []
    for name, value in section.items():
        here = (*path, name)
        if isinstance(value, dict):
            problems += _fill_section(value, here)
        elif value == AUTO and here != ("data_types", "keep_in_fp32_modules"):  # there it is a value of DeepSpeed's
            try:
                section[name] = default_of(here[0], here[1:])
            except (KeyError, IndexError, StopIteration):
                problems.append(
                    f'{".".join(here)}="auto" cannot be filled in: nothing in the trainer says it. Give a value.'
                )
    return problems


def optimizer_section(config: dict[str, Any], optimizer: Optimizer | None) -> tuple[list[str], list[str]]:
    """Fill the "auto" values of the section "optimizer" from the module's; return contradictions and remarks."""
    section = config.get("optimizer")
    if not isinstance(section, dict) or optimizer is None:
        return [], []
    kind = type(optimizer).__name__
    given = section["type"] = kind if section.get("type", AUTO) == AUTO else str(section["type"])
    if not _is_of_type(kind, given):
        return [
            f"optimizer.type={given!r} in the DeepSpeed configuration, but configure_optimizers returned a {kind}. "
            f'Return a {given} there, or write "auto" here.'
        ], []
    if section.get("params") == AUTO:
        section["params"] = {name: AUTO for name in HYPERPARAMETERS if name in optimizer.defaults}
    parameters = section.get("params", {})
    problems, unused = [], []
    for name, value in [*parameters.items()]:
        actual = _hyperparameters(optimizer, name)
        if not actual:
            unused.append(name)
        elif value != AUTO and not any(_equal(value, one) for one in actual):
            problems.append(
                f"optimizer.params.{name}={value!r} in the DeepSpeed configuration, but the {kind} of "
                f'configure_optimizers has {actual[0]!r}. Make them the same, or write "auto" here.'
            )
        if value == AUTO and actual:
            parameters[name] = actual[0]
        elif value == AUTO:
            del parameters[name]
    notes = [f"the {kind} has no {', '.join(unused)}: without effect in the section 'optimizer'"] if unused else []
    return problems, notes


def scheduler_problems(
    config: Mapping[str, Any], optimizer: Optimizer | None, schedulers: Sequence[object] | None
) -> list[str]:
    """Return what in the section "scheduler" contradicts the module's schedule, which is the only one that is stepped.

    A section contradicts nothing when all its values are "auto" and there is a schedule, or when the schedule is
    DeepSpeed's own of that name with those values.
    """
    section = config.get("scheduler")
    if not isinstance(section, Mapping):
        return []
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    kind, given = section.get("type", AUTO), section.get("params")
    if kind not in (AUTO, *VALID_LR_SCHEDULES):
        return [f"scheduler.type={kind!r} is not a schedule of DeepSpeed.{did_you_mean(str(kind), VALID_LR_SCHEDULES)}"]
    given = given if isinstance(given, Mapping) else {}
    values = {name: value for name, value in given.items() if value != AUTO}
    if schedulers is None or (schedulers and not values):
        return []
    if any(type(schedule).__name__ == kind and _made_with(schedule, values) for schedule in schedulers):
        return []
    returned = " and ".join(type(schedule).__name__ for schedule in schedulers) or "no schedule"
    if kind == AUTO:
        return [f'scheduler.type="auto", but configure_optimizers returned {returned}. Return one there.']
    rate = _hyperparameters(optimizer, "lr") if optimizer is not None else []
    known = {
        "total_num_steps": "self.trainer.estimated_stepping_batches",
        "warmup_min_lr": "0.0",
        "warmup_max_lr": repr(rate[0]) if rate else "lr",
    }
    sources = {name: known.get(name) if value == AUTO else repr(value) for name, value in given.items()}
    arguments = ["optimizer", *(f"{name}={source}" for name, source in sources.items() if source is not None)]
    return [
        f"the DeepSpeed configuration asks for the schedule {kind}, but configure_optimizers returned {returned}, and "
        f"the trainer steps the module's. Return it there: from deepspeed.runtime.lr_schedules import {kind}; "
        f"schedule = {kind}({', '.join(arguments)}); "
        'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}. '
        "Or remove the section 'scheduler'."
    ]


HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""The arguments of optimizers that a section whose "params" are "auto" is filled with."""


def _is_of_type(kind: str, given: str) -> bool:
    """Whether a class of optimizer is what DeepSpeed makes of a type.

    Its "Adam" is AdamW unless the section says "adam_w_mode": false; FusedAdam and DeepSpeedCPUAdam compute both.
    """
    plain, given = kind.lower().removeprefix("fused").removeprefix("deepspeedcpu"), given.lower()
    return given in (plain, kind.lower()) or ({plain, given} == {"adam", "adamw"} and kind != "Adam")


def _made_with(schedule: object, values: Mapping[str, Any]) -> bool:
    """Whether an object of DeepSpeed's schedule was made with these values, as far as it still has them."""
    renamed = {"lr_range_test_min_lr": "min_lr", "lr_range_test_step_size": "step_size"}
    renamed |= {"warmup_min_lr": "min_lrs", "warmup_max_lr": "max_lrs"}
    attributes = vars(schedule)
    kept = {name: attributes.get(renamed.get(name, name)) for name in values}
    return all(actual is None or _equal(values[name], actual) for name, actual in kept.items())


def _hyperparameters(optimizer: Optimizer, name: str) -> list[Any]:
    """Return the values of a hyperparameter that an optimizer was made with: its default, and those of its groups."""
    values = [optimizer.defaults[name]] if name in optimizer.defaults else []
    for group in optimizer.param_groups:
        # A schedule has already changed the learning rate; torch's schedulers keep the one before.
        value = group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name)
        if value is not None:
            values.append(value)
    return [list(v) if isinstance(v, tuple) else v.item() if isinstance(v, torch.Tensor) else v for v in values]


def _equal(given: Any, actual: Any) -> bool:
    """Whether two values are the same; one number stands for a list of it."""
    if isinstance(actual, (list, tuple)):
        several = given if isinstance(given, (list, tuple)) else [given] * len(actual)
        return len(several) == len(actual) and all(map(_equal, several, actual))
    if isinstance(given, bool) or isinstance(actual, bool):
        return bool(given == actual)
    try:
        return math.isclose(float(given), float(actual), rel_tol=1e-9)
    except (TypeError, ValueError):
        return bool(given == actual)
