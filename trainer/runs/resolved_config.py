"""ResolvedConfig: the choices for a run and their reasons, made from the settings before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from trainer.arguments import local_path
from trainer.callback import DEFAULT_CALLBACKS, Callback, Checkpoint, callback_named
from trainer.distributed.devices import choose_accelerator, parse_devices
from trainer.distributed.environment import Environment, detect_environment
from trainer.distributed.tpu import sharing_problems
from trainer.errors import ConfigError, raise_problems, shown
from trainer.logger import DummyLogger, Logger
from trainer.model.compile import Compilation, compile_problems, read_compile
from trainer.precision import Precision, resolve_precision
from trainer.runs.hook_checks import callback_problems
from trainer.settings import DEFAULT_MAX_EPOCHS, PROFILERS, Settings, error_of
from trainer.strategy import StepOptions, Strategy, needed_device, resolve_strategy, unknown_methods


@dataclass
class ResolvedConfig:
    """The objects of a run, and the reasons for each choice."""

    settings: Settings
    device_type: str
    devices: int
    """Processes on this machine."""
    device_ids: list[int] | None
    """The accelerators of this machine to use, by local rank; None: the first ones."""
    num_processes: int
    """Processes on all machines."""
    strategy: Strategy
    precision: Precision
    callbacks: list[Callback]
    loggers: list[Logger]
    compilation: Compilation | None
    """The parts to compile and the options of torch.compile; None: do not compile."""
    reasons: dict[str, str]
    """The reasons for "device", "devices", "strategy" and "precision", as texts."""
    left_out: list[Callback]
    """The callbacks that would write what a fast_dev_run leaves out."""
    time_limit: Callback | None = None
    """The callback that holds `max_time`."""
    sync_batchnorm: bool = False
    """True to compute the statistics of BatchNorm over the batches of all processes."""

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train; None: no limit."""
        settings = self.settings
        if settings.fast_dev_run:
            return 1
        if settings.max_epochs is None:
            return DEFAULT_MAX_EPOCHS if self.max_steps is None and settings.max_time is None else None
        return None if settings.max_epochs == -1 else settings.max_epochs

    @property
    def max_steps(self) -> int | None:
        """Steps to train, in a fast_dev_run at most its batches; None: no limit."""
        if self.settings.fast_dev_run:
            return int(self.settings.fast_dev_run)
        return None if self.settings.max_steps == -1 else self.settings.max_steps

    @property
    def val_check_interval(self) -> int | float:
        """Batches (int) or fraction of an epoch (float) between validations; 1.0 in a fast_dev_run."""
        interval = self.settings.val_check_interval
        return interval if isinstance(interval, (int, float)) and not self.settings.fast_dev_run else 1.0

    @property
    def num_nodes(self) -> int:
        """Machines that take part."""
        return self.num_processes // self.devices

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return self.strategy.processes.rank // self.devices

    @property
    def used_devices(self) -> list[int]:
        """The numbers of the devices of this machine."""
        return list(range(self.devices)) if self.device_ids is None else self.device_ids


def settings_problems(settings: Settings) -> list[str]:
    """Return the problems of single settings, one sentence each."""
    loggers = "CSVLogger(), TensorBoardLogger() or WandbLogger(), a list of them, True or False"
    return [
        *settings.problems(),
        *_unknown_choices(settings),
        *_others_than(Callback, settings.callbacks, "callbacks", "EarlyStopping(...), or a list"),
        *_others_than(Logger, None if isinstance(settings.logger, bool) else settings.logger, "logger", loggers),
    ]


def _unknown_choices(settings: Settings) -> list[str]:
    """Return the problems of unknown names, and of devices that this machine does not have."""
    if not isinstance(settings.strategy, (str, Strategy)):
        problems = [f"strategy={settings.strategy!r}: give a name such as 'ddp', or a Strategy object."]
    elif isinstance(settings.strategy, str):
        problems = error_of(lambda: resolve_strategy(settings.strategy, 1))
    else:
        problems = unknown_methods(settings.strategy)
    precision, _, _, wrong = _with_plugins(settings)
    problems += wrong + error_of(lambda: resolve_precision(precision))
    problems += compile_problems(settings.compile)
    problems += error_of(lambda: choose_accelerator(settings.accelerator))
    if not isinstance(settings.profiler, Callback) and settings.profiler not in (None, *PROFILERS):
        names = ", ".join(map(repr, PROFILERS))
        problems.append(f"profiler={settings.profiler!r}: allowed are None, {names}, or a callback.")
    return problems


def _listed(given: Any) -> list[Any]:
    """Return one object, or several, as a list; for None the empty one."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _others_than(kind: type, given: Any, where: str, examples: str) -> list[str]:
    """Return a problem for each object that is not of a kind of callbacks."""
    wrong = [one for one in _listed(given) if not isinstance(one, kind)]
    return [f"{where}: {shown(one)} is not a trainer.{kind.__name__}. Give {examples}." for one in wrong]


def _with_plugins(settings: Settings) -> tuple[Any, bool, Any, list[str]]:
    """Return the precision, whether one of Lightning's plugins is SyncBatchNorm, the CheckpointIO among them, and their
    problems."""
    if settings.plugins is None:
        return settings.precision, False, None, []
    from trainer.compat.plugins import read_plugins

    return read_plugins(settings.plugins, is_default_precision, settings.precision)


def is_default_precision(precision: Any) -> bool:
    """Whether a precision is what a Trainer without the argument has."""
    return isinstance(precision, (str, int)) and str(precision) in ("32-true", "32")


def resolve_config(settings: Settings, problems: Sequence[str] = ()) -> ResolvedConfig:
    """Choose device, processes, strategy, precision, callbacks and loggers.

    Args:
        problems: what is wrong with the names of the arguments.

    Raises:
        ConfigError: the settings cannot work; the message lists all problems and their fixes.
    """
    raise_problems([*problems, *settings_problems(settings)], "the Trainer's arguments")
    needed = needed_device(settings.strategy) if settings.accelerator == "auto" else None
    if needed is not None:
        device_type, device_reason = needed, "auto: what the strategy runs on"
    else:
        device_type, device_reason = choose_accelerator(settings.accelerator)
    devices, device_ids, devices_reason = parse_devices(settings.devices, device_type)
    environment, num_nodes = detect_environment(), settings.num_nodes
    found = _launch_problems(settings, environment, device_type, devices)
    if environment.source != "single process":
        devices, num_nodes = environment.local_world_size, environment.num_nodes
        devices_reason = f"as started by {environment.source}"
    strategy, strategy_reason = resolve_strategy(settings.strategy, devices * num_nodes, device_type)
    wanted, syncs, checkpoint_io, _ = _with_plugins(settings)
    if checkpoint_io is not None:
        vars(strategy)["checkpoint_io"] = checkpoint_io
    precision, sync_batchnorm = resolve_precision(wanted), settings.sync_batchnorm or syncs
    found += strategy.problems(precision, device_type, devices * num_nodes, step_options(settings))
    found += _cannot_try_a_batch(settings, strategy, device_type)
    compilation = read_compile(settings.compile)
    if compilation is not None and device_type == "xla":
        found.append("compile= has no effect on torch_xla's devices, which compile every step anyway: leave it out.")
    # Also with a Timer of the user, which may only measure: the shorter time ends the run.
    limit: dict[str, Any] = {"duration": settings.max_seconds}
    time_limit = callback_named("Timer")(**limit) if settings.max_time is not None else None
    found += _problems_of_callbacks(settings)
    raise_problems(found, "the Trainer's arguments")
    callbacks, loggers, left_out = _callbacks(settings, time_limit)
    reasons = {
        "device": device_reason,
        "devices": devices_reason,
        "strategy": strategy_reason,
        "precision": "the default" if settings.precision == "32-true" else "given",
    }
    where = device_type, devices, device_ids, devices * num_nodes
    objects = strategy, precision, callbacks, loggers
    return ResolvedConfig(settings, *where, *objects, compilation, reasons, left_out, time_limit, sync_batchnorm)


def _launch_problems(settings: Settings, environment: Environment, device_type: str, devices: int) -> list[str]:
    """Return the settings that contradict how the processes were started."""
    source, here, machines = environment.source, environment.local_world_size, environment.num_nodes
    if source == "single process":
        if settings.num_nodes == 1:
            return []
        return [
            f"num_nodes={settings.num_nodes}, but this process was not started on several machines. Start it on each "
            f"one with: trainer launch --nnodes {settings.num_nodes} --nproc-per-node {devices} --rdzv HOST:29500 ..."
        ]
    problems = sharing_problems(device_type, here, source)
    if settings.devices != "auto" and devices != here:
        problems.append(
            f"devices={settings.devices!r}, but {source} started {here} processes on this machine: give devices='auto'."
        )
    if settings.num_nodes not in (1, machines):
        problems.append(
            f"num_nodes={settings.num_nodes}, but {source} started processes on {machines} machines: leave it out."
        )
    if source == "Ray Train" and not local_path(settings.default_root_dir).is_absolute():
        problems.append(
            f"default_root_dir={str(settings.default_root_dir)!r} is relative, and each worker of Ray has a separate "
            "folder, which is lost with its machine: give an absolute one that all machines see."
        )
    return problems


def _cannot_try_a_batch(settings: Settings, strategy: Strategy, device_type: str) -> list[str]:
    """Return the problem of accumulate_grad_batches="auto" with a strategy or device that cannot."""
    cannot = strategy.shards_state or device_type in ("xla", "tpu")
    if settings.accumulate_grad_batches != "auto" or not cannot:
        return []
    return [
        f"accumulate_grad_batches='auto' tries a batch on each process separately, and strategy {strategy.name!r} "
        "cannot. Use 'ddp' or one device, or give the number from `trainer estimate`."
    ]


def step_options(settings: Settings, **known: Any) -> StepOptions:
    """Return the settings for the strategy, with values of the run that are `known`."""
    of_settings = {
        "accumulate_grad_batches": settings.window,
        "clip_value": settings.gradient_clip_val,
        "clip_algorithm": settings.gradient_clip_algorithm,
    }
    return StepOptions(**{**of_settings, **known})


def _problems_of_callbacks(settings: Settings) -> list[str]:
    problems, callbacks = [], _listed(settings.callbacks)
    for callback in callbacks:
        problems += callback_problems(callback)
    if len({*map(id, callbacks)}) < len(callbacks):
        problems.append("callbacks: an object is listed twice: remove one.")
    if settings.enable_checkpointing or settings.fast_dev_run:
        return problems
    if any(isinstance(callback, Checkpoint) for callback in callbacks):
        problems.append("enable_checkpointing=False, but callbacks has a ModelCheckpoint: remove one of the two.")
    return problems


def _callbacks(settings: Settings, time_limit: Callback | None) -> tuple[list[Callback], list[Logger], list[Callback]]:
    """Return callbacks and loggers, the user's and those of the settings that the user did not pass; and the callbacks
    that a fast_dev_run leaves out."""
    callbacks = _listed(settings.callbacks)
    if time_limit is not None:
        callbacks.append(time_limit)
    if settings.profiler is not None:
        profiler = settings.profiler
        callbacks.append(callback_named(PROFILERS[profiler])() if isinstance(profiler, str) else profiler)
    given = {callback.in_place_of for callback in callbacks}
    wanted = [argument for argument in DEFAULT_CALLBACKS if getattr(settings, argument) and argument not in given]
    callbacks += [callback_named(DEFAULT_CALLBACKS[argument])() for argument in wanted]
    if settings.fast_dev_run:
        kept = _without_writers(settings, callbacks)
        return kept, [DummyLogger()] if settings.logger else [], [one for one in callbacks if one not in kept]
    callbacks += _loggers(settings)
    return callbacks, [callback for callback in callbacks if isinstance(callback, Logger)], []


def _without_writers(settings: Settings, callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks without writers of files that the settings leave out."""
    kinds: tuple[type, ...] = ()
    if settings.fast_dev_run:
        kinds = (Checkpoint, Logger)
    elif not settings.enable_checkpointing:
        kinds = (Checkpoint,)
    return [callback for callback in callbacks if not isinstance(callback, kinds)]


def _loggers(settings: Settings) -> list[Logger]:
    if not isinstance(settings.logger, bool):
        return _listed(settings.logger)
    if not settings.logger:
        return []
    names = ["TensorBoardLogger", "CSVLogger"] if find_spec("tensorboard") else ["CSVLogger"]
    loggers: list[Any] = [callback_named(name)() for name in names]
    return loggers


def with_module_callbacks(config: ResolvedConfig, of_module: Callback | list[Callback]) -> list[Callback]:
    """Return the trainer's callbacks and the module's, which replace the trainer's callbacks of the same class.

    Callbacks of the module that write checkpoints are left out in a fast_dev_run or with `enable_checkpointing=False`.

    Raises:
        ConfigError: `of_module`, the return value of `configure_callbacks`, is not a callback or list of callbacks; or
            two classes with a state have one name.
    """
    given = [None] if of_module is None else of_module
    problems = _others_than(Callback, given, "configure_callbacks", "EarlyStopping(...), or a list")
    raise_problems(problems, "the module's callbacks")
    of_module = _without_writers(config.settings, _listed(of_module))
    kinds = {type(callback) for callback in of_module}
    kept = [c for c in config.callbacks if type(c) not in kinds or c is config.time_limit]
    named: dict[str, type] = {}
    for one in [*kept, *of_module]:
        stateful = type(one).state_dict is not Callback.state_dict
        if stateful and named.setdefault(one.state_key, type(one)) is not type(one):
            raise ConfigError(
                f"two classes of callbacks are called {one.state_key}, so a resume could mix up their states: give one "
                "of them another name, or another `state_key`."
            )
    # A checkpoint contains the state of the other callbacks, after they have handled the same hook.
    return sorted([*kept, *of_module], key=lambda callback: isinstance(callback, Checkpoint))


def replace_callbacks(config: ResolvedConfig, given: list[Callback]) -> None:
    """Set the callbacks of the next runs. The loggers, which are in the list, too, stay, and writers of files that the
    settings leave out are left out.

    Raises:
        ConfigError: `given` is not a list of callbacks, or contains one twice.
    """
    problems = _others_than(Callback, given, "trainer.callbacks", "a list of callbacks")
    others = [one for one in _listed(given) if not any(one is logger for logger in config.loggers)]
    if len({*map(id, others)}) < len(others):
        problems.append("trainer.callbacks: an object is listed twice. Remove one.")
    raise_problems(problems, "the trainer's callbacks")
    config.callbacks[:] = [*_without_writers(config.settings, others), *config.loggers]
