"""The user's DeepSpeed configuration, with every `"auto"` filled in and every contradiction with the trainer found."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.errors import did_you_mean, raise_problems
from trainer.precision import Precision
from trainer.strategies.deepspeed.config_checks import (
    AUTO,
    MODELS,
    check_build_tools,
    default_of,
    key_problems,
    whole_problems,
)

DEFAULT_STAGE = 2
"""The stage where neither the strategy nor the JSON names one."""
SUBJECT = "the DeepSpeed configuration"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the trainer and the strategy say of the run. None: they say nothing, or do not know it yet."""

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


@dataclass
class Resolved:
    """A configuration for DeepSpeed's engine."""

    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What the user should know of how it was read, one sentence each."""


def config_problems(given: str | Path | Mapping[str, Any] | None, run: Run) -> list[str]:
    """Everything wrong with a configuration that can be seen with what is known in `run`, one sentence each.

    Needs DeepSpeed, starts nothing, and may be asked before there are processes, optimizers or data.
    """
    config, problems = read_config(given)
    problems += key_problems(config)
    resolver = _Resolver(config, run)
    problems += [problem for problem in resolver.problems if problem not in problems]
    return problems + check_build_tools(resolver.config, run.device_type)


def resolve_config(given: str | Path | Mapping[str, Any] | None, run: Run) -> Resolved:
    """The configuration as DeepSpeed gets it: whole, without any `"auto"`.

    What `run` does not say is DeepSpeed's own default. A `"scheduler"` section is left out: the loop steps schedules.

    Raises:
        ConfigError: everything wrong in one message.
    """
    config, problems = read_config(given)
    problems += key_problems(config)
    resolver = _Resolver(config, run)
    problems += [problem for problem in resolver.problems if problem not in problems]
    resolver.config.pop("scheduler", None)
    if run.optimizer is None:
        resolver.config.pop("optimizer", None)
    problems += _fill_the_rest(resolver.config)
    raise_problems(problems or whole_problems(resolver.config), SUBJECT)
    return Resolved(resolver.config, resolver.notes)


def read_config(given: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """A copy of the configuration in a file or dict, and what is wrong with that; None is an empty one."""
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
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return {}, [
            f"config={str(given)!r} cannot be read: {reason}. Give the path of a DeepSpeed JSON file, or a dict."
        ]
    return _parse(text, str(given))


def zero_of(given: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The section of ZeRO, as far as it can be read; what is wrong with it is told by `config_problems`."""
    zero = read_config(given)[0].get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def offload_device(zero: Mapping[str, Any], section: str) -> Any:
    """Return the device that a JSON's section names: False for "none", None where it names none."""
    entry = zero.get(section)
    device = entry.get("device") if isinstance(entry, Mapping) else None
    return False if device == "none" else None if device == AUTO else device


def hidden_size_of(module: nn.Module) -> int | None:
    """The width in the `config` of the outermost submodule that has one, as transformers' models do."""
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
    (run_dir / "deepspeed.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
        return json.loads(json.dumps(config)), problems
    return {}, [*problems, f"{name} holds no JSON object: a DeepSpeed configuration begins with {{."]


def _entry(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


class _Resolver:
    """Fills in what follows from the run, and collects where the configuration says something else."""

    def __init__(self, config: Mapping[str, Any], run: Run) -> None:
        self.config: dict[str, Any] = copy.deepcopy(dict(config))
        self.run = run
        self.problems: list[str] = []
        self.notes: list[str] = []
        if "bfloat16" in self.config:
            self.config.setdefault("bf16", self.config.pop("bfloat16"))
        sections = [("zero_optimization", *inner) for inner in ((), ("offload_optimizer",), ("offload_param",))]
        if not all(isinstance(self._section(*path), dict) for path in (*sections, *((name,) for name in MODELS))):
            return  # DeepSpeed's own check of the sections has told it.
        self._zero()
        self._precision()
        self._batches()
        self._clipping()
        self._buckets()
        found, notes = optimizer_section(self.config, run.optimizer)
        self.problems += found + scheduler_problems(self.config, run.optimizer, run.schedulers)
        self.notes += notes
        self._rest()

    def _section(self, *path: str) -> Any:
        """The dict at a path, or what else is there; an empty one that is not in the configuration if nothing is."""
        part: Any = self.config
        for name in path:
            part = part.get(name) if isinstance(part, dict) else None
            if part is None or part == AUTO:
                part = {}
        return part

    def _value(self, *path: str) -> Any:
        section = self._section(*path[:-1])
        value = section.get(path[-1]) if isinstance(section, dict) else None
        return None if value == AUTO else value

    def _set(self, value: Any, *path: str) -> None:
        section = self.config
        for name in path[:-1]:
            if section.get(name) in (None, AUTO):
                section[name] = {}
            section = section[name]
        section[path[-1]] = value

    def _take(self, value: Any, source: str, fix: str, *path: str) -> None:
        """Write the run's value; where the JSON has another one, say so."""
        given = self._value(*path)
        if value is None:
            return
        if given is None:
            self._set(value, *path)
        elif not _same(given, value):
            self._contradiction(path, given, f"{source}={value!r}", fix)

    def _contradiction(self, path: Sequence[str], given: Any, trainers: str, fix: str) -> None:
        self.problems.append(
            f"{'.'.join(path)}={json.dumps(given)} in the DeepSpeed configuration, but {trainers}. {fix}, "
            'or write "auto" there.'
        )

    def _zero(self) -> None:
        run = self.run
        self._take(run.stage, "the strategy has stage", "Use the strategy of that stage", "zero_optimization", "stage")
        if self._value("zero_optimization", "stage") is None:
            self._set(DEFAULT_STAGE, "zero_optimization", "stage")
        for name, device in (("offload_optimizer", run.offload_optimizer), ("offload_param", run.offload_parameters)):
            where = ("zero_optimization", name)
            self._take(device, "the strategy has its device", "Give the strategy the same", *where, "device")
            if self._value(*where, "device") is None and self._section("zero_optimization").get(name) is not None:
                self._set("none", *where, "device")
            if self._value(*where, "device") == "nvme":
                self._take(run.nvme_path, "the strategy's nvme_path", "Give the strategy the same", *where, "nvme_path")
                if self._value(*where, "nvme_path") is None:
                    self.problems.append(f"{'.'.join(where)} to nvme needs a folder: give nvme_path=.")
        stage = self._value("zero_optimization", "stage")
        offloads = [n for n in ("offload_optimizer", "offload_param") if self._offloads(n)]
        if "offload_param" in offloads and stage != 3:
            self.problems.append(f"offload_param needs stage 3, and the stage is {stage}: use 'deepspeed_stage_3'.")
        if "offload_optimizer" in offloads and stage == 0:
            self.problems.append("offload_optimizer needs stage 1, 2 or 3, and the stage is 0.")

    def _offloads(self, name: str) -> bool:
        return self._value("zero_optimization", name, "device") in ("cpu", "nvme")

    def _precision(self) -> None:
        precision = self.run.precision
        if precision is None:
            return
        names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        wanted = names.get(precision.autocast or precision.weights)
        autocast = self._section("torch_autocast")
        if isinstance(autocast, dict) and autocast.get("enabled") is True:
            dtype = str(autocast.get("dtype", "bfloat16")).removeprefix("torch.")
            if {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(dtype, dtype) != wanted:
                fix = "Give Trainer(precision='bf16-mixed' or '16-mixed')"
                self._contradiction(("torch_autocast", "dtype"), dtype, f"precision={precision.name!r}", fix)
            wanted = None
        for name, allowed in (("fp16", "'16-mixed'"), ("bf16", "'bf16-mixed'")):
            enabled = self._value(name, "enabled")
            if enabled is None and (name == wanted or name in self.config):
                self._set(name == wanted, name, "enabled")
            elif enabled is not None and enabled != (name == wanted):
                fix = f"Give Trainer(precision={allowed})" if enabled else "Give Trainer(precision='32-true')"
                self._contradiction((name, "enabled"), enabled, f"the trainer's precision={precision.name!r}", fix)

    def _batches(self) -> None:
        run = self.run
        window, micro = "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"
        given = self._value(window)
        self._take(run.window, "accumulate_grad_batches", f"Give Trainer(accumulate_grad_batches={given})", window)
        self._take(run.micro_batch, "the DataLoader's batch_size", "Give the DataLoader the same", micro)
        total = self._value("train_batch_size")
        parts = {
            "micro-batch": run.micro_batch or self._value(micro),
            "window": run.window or self._value(window),
            "processes": run.world_size,
        }
        unknown = [name for name, value in parts.items() if value is None]
        product = math.prod(value for value in parts.values() if isinstance(value, int))
        if not isinstance(total, int):
            if not unknown:
                self._set(product, "train_batch_size")
        elif (unknown and total % product) or (not unknown and total != product):
            told = " x ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
            divides = (
                f"is no multiple of {told} = {product}" if unknown else f"does not multiply out: {told} = {product}"
            )
            # The JSON's own parts may be wrong as well.
            certain = None not in (run.micro_batch, run.window, run.world_size)
            self.problems.append(
                f'train_batch_size={total} {divides}. Write {f"{product}, or " if certain else ""}"auto".'
            )
        elif unknown == ["micro-batch"]:
            self._set(total // product, micro)

    def _clipping(self) -> None:
        given, norm = self._value("gradient_clipping"), self.run.clip_norm
        self._take(norm, "gradient_clip_val", f"Give Trainer(gradient_clip_val={given or None})", "gradient_clipping")
        if given and norm is None and self.run.optimizer is not None:
            self.notes.append(f"gradients are clipped by the norm {given}, as the DeepSpeed configuration says")

    def _buckets(self) -> None:
        """As accelerate and transformers have them (accelerate 1.15, accelerator.py, _prepare_deepspeed)."""
        zero, hidden = self._section("zero_optimization"), self.run.hidden_size
        sizes = {
            "reduce_bucket_size": lambda width: width * width,
            "prefetch_bucket_size": lambda width: int(0.9 * width * width),
            "param_persistence_threshold": lambda width: 10 * width,
        }
        names = [(spelling, size) for name, size in sizes.items() for spelling in (name, f"stage3_{name}")]
        for name, size in names:
            if zero.get(name) == AUTO and hidden is not None:
                zero[name] = size(hidden)
        left = [name for name, _ in names if zero.get(name) == AUTO]
        if left and self.run.optimizer is not None:
            self.notes.append(f"no part of the module has a config with a hidden_size: DeepSpeed's defaults for {left}")

    def _rest(self) -> None:
        """What our engine needs, and what has no effect here."""
        if self.config.get("gradient_allreduce_op") == "sum":
            self.problems.append('gradient_allreduce_op="sum" would change the gradients: the trainer averages them.')
        if self._section("data_efficiency").get("enabled") is True:
            self.problems.append("data_efficiency needs DeepSpeed's own data loader; remove it.")
        # Any torch optimizer may be divided and offloaded; DeepSpeed would otherwise take its own few only.
        self._default(True, "zero_allow_untested_optimizer")
        if self._offloads("offload_optimizer"):
            self._default(False, "zero_force_ds_cpu_optimizer")
        without_effect = [name for name in ("checkpoint", "dataloader_drop_last") if name in self.config]
        if without_effect:
            self.notes.append(f"without effect in the DeepSpeed configuration: {', '.join(without_effect)}")

    def _default(self, value: Any, name: str) -> None:
        if self.config.get(name, AUTO) == AUTO:
            self.config[name] = value


def _same(given: Any, value: Any) -> bool:
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (given, value))
    return math.isclose(given, value, rel_tol=1e-9) if numbers else bool(given == value)


def _fill_the_rest(config: dict[str, Any]) -> list[str]:
    """Replace each "auto" that is left by DeepSpeed's default; the problems are those that have none."""
    problems = []
    for name, missing in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0.0)):
        if config.get(name, AUTO) == AUTO:
            config[name] = missing
    if config.get("train_batch_size", AUTO) == AUTO:
        config.pop("train_batch_size", None)
    if config.get("train_micro_batch_size_per_gpu", AUTO) == AUTO:
        # Only DeepSpeed's own figures of samples per second use it.
        config["train_micro_batch_size_per_gpu"] = 1
    for path, owner in _autos(config, ()):
        if path == ("data_types", "keep_in_fp32_modules"):
            continue  # a value of DeepSpeed's own
        try:
            owner[path[-1]] = default_of(path[0], path[1:])
        except (KeyError, IndexError, StopIteration):
            problems.append(
                f'{".".join(path)}="auto" cannot be filled in: nothing in the trainer says it. Give a value.'
            )
    return problems


def _autos(section: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for name, value in list(section.items()):
        if value == AUTO:
            yield (*path, name), section
        elif isinstance(value, dict):
            yield from _autos(value, (*path, name))


FAMILIES = {
    # DeepSpeed's "Adam" is AdamW unless the section says "adam_w_mode": false.
    "adam": ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
    "adamw": ("AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
    "adagrad": ("Adagrad", "DeepSpeedCPUAdagrad"),
    "lion": ("Lion", "FusedLion", "DeepSpeedCPULion"),
    "lamb": ("Lamb", "FusedLamb"),
}
"""Which classes of optimizer are what DeepSpeed makes of a type; a type that is not here is the class's own name."""

SCHEDULES = {
    "LRRangeTest": {"lr_range_test_min_lr": "min_lr", "lr_range_test_step_size": "step_size"},
    "OneCycle": {},
    "WarmupLR": {"warmup_min_lr": "min_lrs", "warmup_max_lr": "max_lrs"},
    "WarmupDecayLR": {"warmup_min_lr": "min_lrs", "warmup_max_lr": "max_lrs"},
    "WarmupCosineLR": {},
}
"""DeepSpeed's schedules, and where their objects keep a parameter under another name."""


def optimizer_section(config: dict[str, Any], optimizer: Optimizer | None) -> tuple[list[str], list[str]]:
    """Fill the "auto" values of the section "optimizer" from the module's; returns contradictions and remarks."""
    section = config.get("optimizer")
    if not isinstance(section, dict) or optimizer is None:
        return [], []
    kind = type(optimizer).__name__
    given = section.get("type", AUTO)
    if given == AUTO:
        section["type"] = given = kind
    family = FAMILIES.get(str(given).lower(), (str(given),))
    if kind.lower() not in [name.lower() for name in family]:
        return [
            f"optimizer.type={given!r} in the DeepSpeed configuration, but configure_optimizers returned a {kind}. "
            f'Return a {family[0]} there, or write "auto" here.'
        ], []
    parameters = section.get("params", {})
    if parameters == AUTO:
        parameters = section["params"] = dict.fromkeys(_SAVED & set(optimizer.defaults), AUTO)
    problems = []
    others = []
    for name, value in parameters.items():
        actual = _hyperparameters(optimizer, name)
        if not actual:
            others.append(name)
        elif value == AUTO:
            parameters[name] = actual[0]
        elif not any(_equal(value, one) for one in actual):
            problems.append(
                f"optimizer.params.{name}={value!r} in the DeepSpeed configuration, but the {kind} of "
                f'configure_optimizers has {actual[0]!r}. Make them the same, or write "auto" here.'
            )
    for name in [name for name in others if parameters[name] == AUTO]:
        del parameters[name]
    notes = [f"the {kind} has no {', '.join(others)}: without effect in the section 'optimizer'"] if others else []
    return problems, notes


def scheduler_problems(
    config: Mapping[str, Any], optimizer: Optimizer | None, schedulers: Sequence[object] | None
) -> list[str]:
    """What contradicts in the section "scheduler". The loop steps the module's schedule, and only that.

    A section is fine beside a schedule of the module when all its values are "auto", or the schedule is DeepSpeed's own
    of that name with those values.
    """
    section = config.get("scheduler")
    if not isinstance(section, Mapping):
        return []
    kind = section.get("type", AUTO)
    if kind not in (AUTO, *SCHEDULES):
        return [f"scheduler.type={kind!r} is not a schedule of DeepSpeed.{did_you_mean(str(kind), SCHEDULES)}"]
    if schedulers is None:
        return []
    given = section.get("params") or {}
    values = {} if given == AUTO else {name: value for name, value in given.items() if value != AUTO}
    if schedulers and not values:
        return []
    if any(type(schedule).__name__ == kind and _has(schedule, values) for schedule in schedulers):
        return []
    have = " and ".join(type(schedule).__name__ for schedule in schedulers) or "no schedule"
    if kind == AUTO:
        return [f'scheduler.type="auto", but configure_optimizers returned {have}. Return one there.']
    return [
        f"the DeepSpeed configuration asks for the schedule {kind}, but configure_optimizers returned {have}, and the "
        f"trainer steps the module's. Return it there: {_to_write(kind, given, optimizer)}. "
        "Or remove the section 'scheduler'."
    ]


def _to_write(kind: str, given: Any, optimizer: Optimizer | None) -> str:
    """The line of configure_optimizers that makes DeepSpeed's own schedule."""
    rate = _hyperparameters(optimizer, "lr") if optimizer is not None else []
    known = {
        "total_num_steps": "self.trainer.estimated_stepping_batches",
        "warmup_min_lr": "0.0",
        "warmup_max_lr": repr(rate[0]) if rate else "lr",
    }
    arguments = []
    for name, value in ({} if given == AUTO else given).items():
        if value != AUTO:
            arguments.append(f"{name}={value!r}")
        elif name in known:
            arguments.append(f"{name}={known[name]}")
    return (
        f"from deepspeed.runtime.lr_schedules import {kind}; schedule = {kind}(optimizer"
        f"{''.join(', ' + argument for argument in arguments)}); "
        'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}'
    )


def _has(schedule: object, values: Mapping[str, Any]) -> bool:
    """Whether an object of DeepSpeed's schedule was made with these values, as far as it still has them."""
    names = SCHEDULES[type(schedule).__name__]
    kept = vars(schedule)
    return all(
        _equal(value, kept[names.get(name, name)]) for name, value in values.items() if names.get(name, name) in kept
    )


_SAVED = {"lr", "betas", "eps", "weight_decay", "momentum"}


def _hyperparameters(optimizer: Optimizer, name: str) -> list[Any]:
    """The values of a hyperparameter that an optimizer was made with: its default, and those of its groups."""
    values = [optimizer.defaults[name]] if name in optimizer.defaults else []
    for group in optimizer.param_groups:
        # A schedule has already changed the learning rate; torch's schedulers keep the one before.
        value = group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name)
        if value is not None:
            values.append(value)
    return [list(value) if isinstance(value, tuple) else _plain(value) for value in values]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _equal(given: Any, actual: Any) -> bool:
    """Whether two hyperparameters are the same; one number stands for a list of it."""
    if isinstance(actual, (list, tuple)):
        several = given if isinstance(given, (list, tuple)) else [given] * len(actual)
        return len(several) == len(actual) and all(map(_equal, several, actual))
    try:
        return math.isclose(float(given), float(actual), rel_tol=1e-9)
    except (TypeError, ValueError):
        return bool(given == actual)
