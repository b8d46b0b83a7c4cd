"""Read and check the arguments of a call of `fit` and the like, before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from trainer.callback import HOOKS, AddsGroups
from trainer.checkpoint.pretrained import weights_problem
from trainer.checkpoint.storage import checkpoint_may_exist
from trainer.data.datamodule import DataModule
from trainer.data.sharded_loader import is_plain
from trainer.errors import ArgumentError, ConfigError, did_you_mean, first_of, raise_problems
from trainer.model.optional_methods import METHODS
from trainer.module import TrainModule
from trainer.names.misses import words_for
from trainer.runs.changes_since_checkpoint import allowed_problems
from trainer.runs.hook_checks import (
    EVALUATION_ARGUMENTS,
    check_signature,
    methods_beyond,
    parameters_of,
    uncalled_methods,
)
from trainer.runs.resolved_config import ResolvedConfig, step_options
from trainer.settings import Settings
from trainer.strategy import wrapping_problems

if TYPE_CHECKING:
    from trainer.loop.run import Run

log = logging.getLogger("trainer")

MODULE_HOOKS = [name for name in vars(TrainModule) if name.startswith("on_") or name in ("setup", "teardown")]

CALLBACKS_HOOKS = dict.fromkeys({*HOOKS} - {*MODULE_HOOKS}, "a callback, which has this hook")

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}

NEEDED = {**{stage: (step,) for stage, step in STEPS.items()}, "fit": ("training_step", "configure_optimizers")}
"""The methods that a module has to define for a stage."""

HOW_TO_DEFINE = {
    **{step: f"define {step}(self, batch, batch_idx)." for step in STEPS.values()},
    "predict_step": "define predict_step(self, batch, batch_idx), or forward(self, batch).",
    "configure_optimizers": "define configure_optimizers(self) and return an optimizer, for example "
    "torch.optim.AdamW(self.parameters(), lr=1e-3). Or give `trainer fit` one: --optimizer AdamW.",
}

DATAMODULE_METHODS = (
    "setup",
    "teardown",
    "state_dict",
    "load_state_dict",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "on_exception",
    *(name for name in METHODS if "data" in name),
)

DATAMODULE_EQUIVALENTS = {"on_save_checkpoint": "state_dict", "on_load_checkpoint": "load_state_dict"}
"""Methods of data modules that are not called, as in Lightning -> what to define instead."""


class Call(NamedTuple):
    """A call of `fit`, `validate`, `test` or `predict`."""

    stage: str
    module: Any
    data: dict[str, Any]
    """The user's loaders, by stage."""
    datamodule: Any
    ckpt_path: Any


def read_call(
    stage: str,
    module: Any,
    data: dict[str, Any],
    datamodule: Any,
    ckpt_path: str | Path | None,
    others: dict[str, Any],
    last: Run | None,
    best: str,
) -> Call:
    """Return the call that the arguments mean.

    Args:
        others: further arguments: the module as `model=`, as Lightning has it.
        last: the last run of the trainer.
        best: path of its best checkpoint; empty without one.

    Raises:
        ArgumentError: an argument is unknown or given twice.
        ConfigError: there is no module.
    """
    data, module = dict(data), _module_of(stage, module, others)
    first = next(iter(data))
    if isinstance(data[first], DataModule) and datamodule is None:
        datamodule, data[first] = data[first], None
    if module is None:
        if stage == "fit" or last is None:
            raise ConfigError(f"{stage}() needs a module: {stage}(module, ...).")
        module = last.module
        if datamodule is None and all(loaders is None for loaders in data.values()):
            datamodule = last.datamodule
        if ckpt_path is None and best:  # whatever was evaluated since, as in Lightning
            log.info("%s() without a module: the best checkpoint of the last fit is used, %s", stage, best)
            ckpt_path = "best"
    return Call(stage, module, data, datamodule, ckpt_path)


def _module_of(stage: str, module: Any, others: Mapping[str, Any]) -> Any:
    """Return the module, which may be given as `model=`. Raises ArgumentError for any other name."""
    wrong = [name for name in others if name != "model" or module is not None]
    if wrong:
        known = ["module", "model", "datamodule", "ckpt_path", "dataloaders", "train_dataloaders", "val_dataloaders"]
        hint = did_you_mean(wrong[0], known)
        raise ArgumentError(f"{stage}() got an unexpected or second argument {wrong[0]!r}.{hint}")
    return others.get("model", module)


def check_call(
    config: ResolvedConfig,
    running: str | None,
    stage: str,
    module: Any,
    data: dict[str, Any],
    datamodule: Any,
    ckpt_path: Any,
    allow_changes: Any = (),
    weights: Any = None,
) -> None:
    """Check a call of `fit` and the like, as far as possible before a process is started.

    Args:
        config: the choices made from the settings.
        running: the current stage; None: nothing runs.
        stage: the stage that is called.
        module, datamodule, ckpt_path, allow_changes, weights: the user's arguments.
        data: the user's loaders, by stage.

    Raises:
        ConfigError: the call has problems; the message lists all of them.
    """
    if running is not None:
        raise ConfigError(f"{stage}() was called while {running}() runs: make another Trainer for it.")
    if not isinstance(module, TrainModule):
        raise ConfigError(
            f"{stage}() takes an object of a subclass of trainer.TrainModule first, and got a {type(module).__name__}. "
            "Hold another model as an attribute of one; in place of torch.compile(module) give Trainer(compile=True)."
        )
    problems = module_problems(module, stage) or wrapping_problems(module, config.strategy)
    problems += _wrong_data(stage, data, datamodule)
    if stage == "fit":
        settings = config.settings
        unfreezing = next((type(one).__name__ for one in config.callbacks if isinstance(one, AddsGroups)), None)
        steps = step_options(settings, micro_batch_size=_micro_batch_of(data.get("train")), unfreezing=unfreezing)
        problems += config.strategy.problems(config.precision, config.device_type, config.num_processes, steps, module)
        if not module.automatic_optimization:
            problems += _not_with_manual_optimization(settings)
    for callback in config.callbacks:
        problems += callback.problems(config, module, stage)
    if ckpt_path == "" or not checkpoint_may_exist(ckpt_path):
        problems.append(
            f"ckpt_path={str(ckpt_path)!r} does not exist (before the first checkpoint, best_model_path is empty). "
            "Give 'last', 'best' or a checkpoint folder, or leave ckpt_path out."
        )
    problems += allowed_problems(allow_changes)
    if weights is not None and ckpt_path is None and (problem := weights_problem(weights)) is not None:
        problems.append(problem)
    raise_problems(problems, f"{stage}({type(module).__name__})")


def _wrong_data(stage: str, data: dict[str, Any], datamodule: Any) -> list[str]:
    """Return the problems of a data module, and of loaders beside it."""
    if datamodule is None:
        return []
    if not isinstance(datamodule, DataModule):
        kind = type(datamodule).__name__
        return [f"datamodule= takes an object of a subclass of trainer.DataModule, and got a {kind}."]
    problems = datamodule_problems(datamodule)
    if any(loaders is not None for loaders in data.values()):
        problems.append(f"{stage}() got loaders and a datamodule, which gives loaders too: pass only one of them.")
    return problems


def _not_with_manual_optimization(settings: Settings) -> list[str]:
    needs, problems = "needs automatic optimization: with automatic_optimization = False", []
    if settings.accumulate_grad_batches != 1:
        problems.append(f"accumulate_grad_batches {needs} your training_step decides when to step.")
    if settings.gradient_clip_val is not None:
        problems.append(f"gradient_clip_val {needs} call self.clip_gradients(optimizer, value) in training_step.")
    return problems


def module_problems(module: TrainModule, stage: str) -> list[str]:
    """Return the problems of a module in a stage, as sentences that name the fix."""
    name = type(module).__name__
    if "_modules" not in vars(module):
        return [f"{name}.__init__ does not call super().__init__(): make that its first line."]
    beyond = methods_beyond(module, TrainModule)
    instead = words_for("hook", beyond) | CALLBACKS_HOOKS
    open_methods = [method for method in METHODS if not module.overrides(method)]
    problems = uncalled_methods(module, beyond, instead, MODULE_HOOKS, open_methods)
    has_forward = type(module).forward is not nn.Module.forward
    for method in NEEDED[stage]:
        if not module.overrides(method) and not (method == "predict_step" and has_forward):
            problems.append(f"{name} has no {method}: {HOW_TO_DEFINE[method]}")
    return problems + _check_signatures(module, stage)


def datamodule_problems(datamodule: DataModule) -> list[str]:
    """Return the problems of a data module, as sentences that name the fix."""
    own = [method for method in DATAMODULE_METHODS if datamodule.overrides(method)]
    wrong = [check_signature(datamodule, method, parameters_of(getattr(DataModule, method))) for method in own]
    beyond = methods_beyond(datamodule, DataModule)
    instead = DATAMODULE_EQUIVALENTS | words_for("hook", beyond)
    uncalled = uncalled_methods(datamodule, beyond, instead, methods={*DATAMODULE_METHODS} - {*own})
    return [*uncalled, *filter(None, wrong)]


STEPS_OF = {**{stage: (step,) for stage, step in STEPS.items()}, "fit": ("training_step", "validation_step")}
"""The step methods that a stage calls."""

ARGUMENTS = {
    "backward": ["loss"],
    "validation_step": EVALUATION_ARGUMENTS,
    "test_step": EVALUATION_ARGUMENTS,
    "predict_step": EVALUATION_ARGUMENTS,
}
"""The arguments of the methods that are called with other arguments than in `TrainModule`."""

OPTIMIZER_NUMBERS = frozenset({"optimizer_idx", "optimizer_i", "opt_idx"})
"""Arguments for the number of an optimizer in Lightning 1: by position, another argument would be taken for it."""


def _check_signatures(module: TrainModule, stage: str) -> list[str]:
    problems: list[str | None] = []
    for name in (*MODULE_HOOKS, *METHODS):
        if (name in STEPS.values() and name not in STEPS_OF[stage]) or not module.overrides(name):
            continue
        code = getattr(getattr(module, name), "__code__", None)
        if numbers := OPTIMIZER_NUMBERS.intersection(code.co_varnames[: code.co_argcount] if code else ()):
            problems.append(
                f"{type(module).__name__}.{name} takes {first_of(numbers)}, as in Lightning 1: leave it out. With "
                "several optimizers set automatic_optimization = False, and step self.optimizers() in training_step."
            )
            continue
        expected = ARGUMENTS.get(name) or parameters_of(getattr(TrainModule, name))
        problems.append(check_signature(module, name, expected))
    return [*filter(None, problems)]


def _micro_batch_of(loader: Any) -> int | None:
    """Return the samples of a micro-batch on one process; None if their number is not known before the run."""
    return loader.batch_size if is_plain(loader) else None
