"""Engine: strategies, precision, checkpoints and exact resume for a loop of one's own."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain, islice, repeat
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, Never, Self, TextIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from trainer.checkpoint.format import open_checkpoint, read_checkpoint
from trainer.checkpoint.generator_states import check_rng_state, check_torch_states
from trainer.checkpoint.left_out import report_left_out, write_the_rest
from trainer.checkpoint.optimizer_state import OPTIMIZER, check_shapes, renamed, with_dtypes_of
from trainer.checkpoint.process_group import SINGLE_PROCESS
from trainer.checkpoint.schema import Integer, wrong
from trainer.checkpoint.storage import as_storage_path
from trainer.checkpoint.writing import write_checkpoint
from trainer.compat import accelerate
from trainer.compat.answers import answer_members
from trainer.data.adapters import make_batch_loader
from trainer.data.loader import Batch, BatchLoader
from trainer.data.transfer import map_leaves
from trainer.data.worker_processes import workers_end_with_this_process
from trainer.distributed.all_gather import gather_nested, gather_uneven, map_sorted
from trainer.errors import (
    CheckpointError,
    ConfigError,
    did_you_mean,
    explain_torch_error,
    first_of,
    raise_problems,
    restoring,
)
from trainer.errors import shown as shown_value
from trainer.fault_tolerance.collective_check import CollectiveCheck, require_same_call
from trainer.fault_tolerance.ended_processes import explain_lost_connection
from trainer.fault_tolerance.failure import limit_exit, report_failure
from trainer.fault_tolerance.forked_child import end_forked_child
from trainer.fault_tolerance.stop import StopCoordinator
from trainer.hyperparameters import kinds_of_hyperparameters, stored_hyperparameters
from trainer.loop.accumulation import even_window
from trainer.loop.agreement_at_start import compare_loaders
from trainer.loop.compare_ranks import compare
from trainer.loop.held_generators import parts_of, report_lacking, set_states_with, states_with
from trainer.loop.hook_changes import KIND as HOOK_CHANGES
from trainer.loop.hook_changes import HookChanges
from trainer.loop.loaders import refuse_data
from trainer.loop.nonfinite import StateMonitor
from trainer.loop.resolved_config import checked_config
from trainer.loop.setup import configure_logging, start_processes
from trainer.loop.training_state import SHARDED_KEYS, counterpart, place_in_epoch
from trainer.loop.waiting_gradients import give_gradients, gradients_of
from trainer.model.dispatched import refuse_dispatched
from trainer.model.parameter_tables import ParameterTables, describe_changes
from trainer.model.unsupported import refuse_lazy, use_separate_elements
from trainer.module import TrainModule
from trainer.optimizers import check_parameters, zero_grad_fast
from trainer.precision import NULL_CONTEXT, Precision
from trainer.seed import (
    derive_seed,
    global_seed,
    seed_generators,
    set_deterministic,
    share_random_numbers,
)
from trainer.settings import Settings
from trainer.strategy import (
    StepConfig,
    Strategy,
    backward_with,
    for_another_module,
    full_state_dict,
    has_gradients,
    inherits,
    keeps_batches,
    keeps_step,
    synchronize_buffers,
    without_cast,
    wrapping_problems,
)

log = logging.getLogger("trainer")

ReduceOp = Literal["mean", "avg", "sum", "min", "max"]
_MODEL = "model."
"""Begins the names of parameters as a strategy knows them."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OF_OTHERS = {
    **accelerate.ENGINE_ARGUMENTS,
    "callbacks": "call what you need in the loop; callbacks belong to a Trainer",
    "loggers": "log in the loop, `if engine.is_global_zero`; loggers belong to a Trainer",
    "logger": "log in the loop, `if engine.is_global_zero`; loggers belong to a Trainer",
    "gradient_clip_val": "engine.clip_gradients(model, optimizer, max_norm=...) before optimizer.step()",
    "accumulate_grad_batches": "engine.no_backward_sync(model, enabled=...) around forward and backward",
    "plugins": "precision= and strategy=",
    **dict.fromkeys(
        ("max_restarts", "watchdog_seconds"),
        "a Trainer, or `trainer launch --max-restarts`: the Engine restarts nothing",
    ),
    "max_epochs": "the loop is yours: for epoch in range(loader.epoch, ...)",
}
"""Arguments of other classes -> what to do instead."""


@partial(answer_members, lightning="Engine")
class Engine:
    """The trainer's strategies, precisions, processes, loaders and checkpoints, for a loop of your own.

    Example::

        with Engine(strategy="fsdp", precision="bf16-mixed", devices=2, seed=1) as engine:
            model, optimizer = engine.setup(model, optimizer)
            loader = engine.setup_dataloaders(loader)
            for batch in loader:
                optimizer.zero_grad()
                loss = model(batch)
                engine.backward(loss)
                optimizer.step()

    With several devices the script is started once for each, at the `with`. The names are those of Lightning's Fabric;
    docs/engine.md shows what differs.

    Args:
        accelerator, devices, num_nodes, strategy, precision, seed, seed_per_sample, deterministic: as in `Trainer`.

    Raises:
        ConfigError: the arguments have problems; the message lists all of them.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: str | int | Precision = "32-true",
        seed: int | None = None,
        seed_per_sample: bool = False,
        deterministic: bool | Literal["warn"] = False,
        **unknown: Never,
    ) -> None:
        known = ("accelerator", "devices", "num_nodes", "strategy", "precision", "seed", "seed_per_sample")
        problems = [
            f"Engine has no argument {name!r}.{did_you_mean(name, (*known, 'deterministic'), _OF_OTHERS)}"
            for name in unknown
        ]
        settings = Settings(
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=strategy,
            precision=precision,
            seed=seed,
            seed_per_sample=seed_per_sample,
            deterministic=deterministic,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        self.config = checked_config(settings, problems)
        if self.config.device_type == "xla":
            raise ConfigError("Engine does not run on torch_xla's devices: use a Trainer, or accelerator='cuda'.")
        self.strategy: Strategy = self.config.strategy
        self._blank: Strategy | None = None
        """A copy of the strategy before its first module."""
        self._models: list[EngineModule] = []
        self._optimizers: list[EngineOptimizer] = []
        self._places: list[_Place] = []
        self._unplaced: list[weakref.ref[EngineLoader]] = []
        """Loaders that nothing was asked of, in the order in which they were set up."""
        self._block: CodeType | None = None
        """The function with the block of `with`."""
        self._last: EngineModule | None = None
        """The model that was called last to be trained."""
        self._given: Any = WeakIdKeyDictionary()  # parameters that no other model may have, as `setup` got them
        self._saved_at: list[tuple[int, int]] = []
        """The positions of the loaders in progress at the last save."""
        self._entered = self._begun = self._told_of_left = self._unstepped = False
        """`_unstepped`: between a backward and the step, or the `zero_grad`, that uses its gradients."""
        self._backwards = self._epochs = self.steps = self._calls = 0
        """`_calls`: of models and of backward that need all processes, by which a process that goes on without the
        others is found. Others do not count: an evaluation may have other numbers of batches elsewhere."""
        if seed is not None:
            seed_generators(seed)

    # -- begin and end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._entered:
            raise ConfigError("this Engine was entered before: make another one.")
        start_processes(self.config)
        self._entered, self._pid, self._block = True, os.getpid(), sys._getframe(1).f_code
        with ExitStack() as cleanup:
            self._join(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def _join(self, cleanup: ExitStack) -> None:
        """Join the other processes, and listen for their failures."""
        config, settings, strategy = self.config, self.config.settings, self.strategy
        cleanup.enter_context(workers_end_with_this_process())
        cleanup.callback(self._tear_down)
        strategy.setup_environment(config.device_type, config.precision, config.device_ids)
        self._blank = for_another_module(strategy)
        processes = strategy.processes
        configure_logging(processes.rank)
        cleanup.callback(set_deterministic(settings.deterministic, settings.benchmark))
        self._stop = stop = StopCoordinator(processes.store, processes.rank, processes.world_size)
        cleanup.callback(stop.uninstall)
        polls = []
        if stop.store is not None:
            check = CollectiveCheck(stop.store, processes.rank, processes.world_size, self._collectives, stop.deadlocks)
            polls = [check.publish_progress]
            processes.wait_for_all = check.wait_for_all
        stop.install(signals=False, polls=polls)
        facts = {"strategy": type(strategy), **strategy._arguments, "precision": config.precision.name}
        facts |= {"seed": settings.seed, "device": config.device_type, "torch": torch.__version__}
        compare(processes, iter(facts.items()), "Give Engine the same arguments on all processes.")
        last = global_seed()
        new = torch.seed() % 2**32 if last is None and settings.seed is None else last
        self.seed = settings.seed if settings.seed is not None else int(processes.broadcast_object(new or 0))
        log.info("engine: %s, precision %s, seed %d", strategy, config.precision.name, self.seed)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        end_forked_child(self._pid, error)
        processes, stop, given = self.strategy.processes, self._stop, error
        with self._cleanup:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self._calls += 10**9  # nothing follows but the last collective
                try:
                    processes.wait_for_all("the end of `with Engine(...)`")
                    processes.barrier()
                    stop.done()
                    return
                except Exception as failure:
                    error = failure
            stop.failed()
            rank, world_size = processes.rank, processes.world_size
            explained = explain_torch_error(error) or explain_lost_connection(error, processes.store, rank, world_size)
            if isinstance(error, Exception):
                report_failure(stop.store, rank, world_size, explained or error)
            if world_size > 1:
                limit_exit()
        if explained is not None:
            raise explained from error
        if error is not given and error is not None:
            raise error

    def _tear_down(self) -> None:
        for loader in self._loaders:
            loader.close()
        for strategy in [*(model._strategy for model in self._models)] or [self.strategy]:
            strategy.teardown()

    def _collectives(self) -> int:
        return self.strategy.processes.begun + self._calls

    def _require_entered(self, call: str) -> None:
        if not self._entered:
            raise ConfigError(f"engine.{call} belongs into the block of `with Engine(...) as engine:`.")

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Return the module, moved and wrapped as the strategy needs it, and its optimizers: `(model, *optimizers)`.

        Use these in place of the originals. Without an optimizer only the model is returned, and it is not trained.
        Each call sets up one model; with several, such as a generator and a discriminator, call it once for each.

        Raises:
            ConfigError: the strategy cannot train this; the message lists all problems.
        """
        self._require_entered("setup")
        self._refuse_for_setup(module, optimizers)
        assert self._blank is not None
        strategy = for_another_module(self._blank) if self._models else self.strategy
        models = len(self._models) + 1 if optimizers or self._optimizers else 1
        config, adapter = self.config, _Adapter(module)
        steps = StepConfig(accumulate_grad_batches=1, own_loop=True, models=models)
        problems = strategy.problems(config.precision, config.device_type, config.num_processes, steps, adapter)
        raise_problems([*problems, *wrapping_problems(adapter, strategy)], f"engine.setup({type(module).__name__})")
        check_parameters([*optimizers], module, shared=False)
        if optimizers:
            refuse_lazy(module)
        use_separate_elements(module)
        facts = [(name, f"{list(p.shape)}, {p.dtype}, {p.requires_grad}") for name, p in module.named_parameters()]
        compare(strategy.processes, iter(facts), "Build the same module on all processes.")
        converts = strategy.precision.weights not in (None, torch.float32)
        refuse_dispatched(adapter, bool(optimizers), strategy.name, strategy.shards_state, converts)
        names = {parameter: name for name, parameter in module.named_parameters()}
        own = names if strategy.shards_state else [p for p in names if optimizers and p.requires_grad]
        shared = next((names[parameter] for parameter in own if parameter in self._given), None)
        if shared is not None and strategy.multi_process:
            raise ConfigError(
                f"engine.setup: the parameter {shared} is also in a model that was set up before, and strategy "
                f"{strategy.name!r} reduces the gradients of each model separately: set up one module that has both."
            )
        self._given.update(dict.fromkeys(own))
        strategy.setup_module(adapter, bool(optimizers))
        for optimizer in optimizers:
            _take_parameters(optimizer, names, dict(module.named_parameters()))
        prepared = strategy.setup_optimizers([*optimizers], steps) if optimizers else []
        finite, changes = StateMonitor(adapter, strategy, prepared), HookChanges(adapter, prepared, {})
        model = EngineModule(module, strategy, self, finite, changes, bool(optimizers))
        wrapped = [EngineOptimizer(optimizer, model, self) for optimizer in prepared]
        self._models.append(model)
        self._optimizers += wrapped
        return (model, *wrapped) if wrapped else model

    def _refuse_for_setup(self, module: Any, optimizers: tuple[Any, ...]) -> None:
        if isinstance(module, EngineModule) or any(model.module is module for model in self._models):
            raise ConfigError("engine.setup: this module is set up already; use what the first setup returned.")
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"engine.setup takes a torch.nn.Module, then its optimizers, and got {shown_value(module)} first."
            )
        for optimizer in optimizers:
            if isinstance(optimizer, EngineOptimizer):
                raise ConfigError("engine.setup: this optimizer is set up already; make another one for this module.")
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"engine.setup takes optimizers after the module, and got a {type(optimizer).__name__}. A "
                    "scheduler is not set up: step it in the loop. A loader goes to engine.setup_dataloaders."
                )

    def setup_dataloaders(self, *dataloaders: Any, training: bool = True, use_distributed_sampler: bool = True) -> Any:
        """Return the loaders, each giving this process its part of the batches, on its device, from an exact position.

        A plain DataLoader is split over the processes. In training each process gets the same number of batches, if
        need be by a batch of repeated samples; see `EngineLoader.samples`. With `training=False` each sample comes
        exactly once, and processes may have different numbers of batches. Other iterables are used as they are.

        Raises:
            ConfigError: a loader cannot be used, or the processes' loaders differ.
        """
        self._require_entered("setup_dataloaders")
        if not dataloaders:
            raise ConfigError("engine.setup_dataloaders: give one or more loaders.")
        site = _site(sys._getframe(1), self._block)
        made = [
            self._loader(one, training, use_distributed_sampler, f"{number} {site}")
            for number, one in enumerate(dataloaders)
        ]
        return made[0] if len(made) == 1 else made

    def _loader(self, given: Any, training: bool, split: bool, site: str) -> EngineLoader:
        if isinstance(given, EngineLoader):
            raise ConfigError("engine.setup_dataloaders: this loader is set up already.")
        refuse_data(given, "engine.setup_dataloaders")
        processes, number = self.strategy.processes, len(self._places) + len(self._unplaced)

        def make(number: int) -> BatchLoader:
            return make_batch_loader(
                given,
                name=str(number) if number else "",
                rank=processes.reader,
                world_size=processes.readers,
                seed=derive_seed(self.seed, number) if number else self.seed,
                training=training,
                seed_per_sample=self.config.settings.seed_per_sample,
                split=split,
                pad=self.strategy.collective_forward,
            )

        loader = make(number)
        compare_loaders(processes, {f"loader {number}": loader}, loader if training else None)
        if loader.note is not None and processes.is_global_zero:
            log.info("%s", loader.note)
        made = EngineLoader(loader, given, self, training, (make, number, site))
        self._unplaced.append(weakref.ref(made))
        if any(place.saved and place.loader() is None and place.site == site for place in self._places):
            self.place_loaders()
        return made

    @property
    def _loaders(self) -> list[EngineLoader]:
        """The loaders that are still there."""
        everyone: list[Callable[[], EngineLoader | None]] = [place.loader for place in self._places]
        everyone += self._unplaced
        return [loader for one in everyone if (loader := one()) is not None]

    def trained_places(self) -> list[tuple[int, int]]:
        """Return the epoch and batch of each loader of training that is in an epoch."""
        return [(one.epoch, one.batch) for one in self._loaders if one._training and one._newest() is not None]

    def place_loaders(self, by_order: bool = False) -> None:
        """Give new loaders their places: one that the same call has set up in an earlier epoch hands over its place.

        Called when a loader is first asked for something: the former one may be in its epoch until then.
        `by_order`: also places in a checkpoint of a program with other lines.
        """
        new, self._unplaced = [loader for one in self._unplaced if (loader := one()) is not None], []
        for loader in new:
            alike = [one for one in self._places if one.site == loader._site and one.is_free(new)]
            kept = [one for one in self._places if one.saved and one.loader() is None]
            read = [one for one in kept if not one.site or one.training == loader._training]
            place = next(iter([*alike, *(read if by_order else ())]), None) or _Place()
            if place not in self._places:
                self._places.append(place)
                if read and loader._training:
                    log.warning("a loader begins with epoch 0: the checkpoint's positions are of other lines' loaders.")
            loader._take(place, self._places.index(place))

    def begin(self) -> None:
        """Seed each reader differently from here on; called by the first batch or forward. Collective."""
        self._begun = True
        reader = self.strategy.processes.reader
        if self.world_size > 1 and not self._loaders and self.is_global_zero:
            log.warning(
                "no loader is set up: each process reads what its own loader gives, which is the same samples unless "
                "that knows of the processes. To split it: loader = engine.setup_dataloaders(loader)."
            )
        if reader > 0 and (self.config.settings.seed is not None or global_seed() is not None):
            seed_generators(derive_seed(self.seed, reader))
        share_random_numbers(self.strategy.processes, self.strategy.device)

    # -- a step --------------------------------------------------------------------------------------------------------

    def backward(self, tensor: torch.Tensor, *args: Any, model: EngineModule | None = None, **kwargs: Any) -> None:
        """Add the gradients of a loss, scaled and reduced over processes as precision and strategy need it.

        Args:
            tensor: the loss, a mean over this process's samples.
            args, kwargs: of `torch.Tensor.backward`, such as `retain_graph=True`.
            model: with several models, the one whose output the loss is. Default: the one that was called last.

        Raises:
            ConfigError: nothing is set up, or there is no gradient.
        """
        chosen = model if model is not None else self._last
        if chosen is None or not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            raise self._cannot_go_back(tensor)
        strategy = chosen._strategy
        if strategy.scaler is not None:
            for optimizer in self._optimizers:
                strategy.scale_gradients(optimizer.optimizer)
        self._backwards += 1
        self._calls += not chosen._accumulates
        if tensor.dim() and not args and not kwargs:
            raise ConfigError(f"engine.backward got a loss of shape {tuple(tensor.shape)}; reduce it: loss.mean().")
        held = [(one, _marks_of_gradients(one)) for one in self._models if one._held and one is not chosen]
        with backward_with(strategy, *args, **kwargs) if args or kwargs else nullcontext():
            strategy.backward(tensor)
        reduced = [chosen, *(one for one, marks in held if marks != _marks_of_gradients(one))]
        for one in self._models:
            if one._accumulates or one in reduced:
                one._held = one._accumulates
        self._unstepped = True
        for optimizer in self._optimizers:
            optimizer.waits = optimizer.waits or has_gradients(optimizer.optimizer)

    def _cannot_go_back(self, tensor: Any) -> ConfigError:
        if not self._optimizers:
            return ConfigError(
                "engine.backward: no model with an optimizer is set up. Before the loop: model, optimizer = "
                "engine.setup(model, optimizer)."
            )
        if not isinstance(tensor, torch.Tensor):
            return ConfigError(f"engine.backward takes the loss, a tensor, and got {shown_value(tensor)}.")
        if self._last is None:
            return ConfigError(
                "engine.backward: the model that engine.setup returned has not been called. Call that one, and not "
                "the module that was given to setup. For another method than forward: "
                "model.mark_forward_method('name'), and then model.name(...)."
            )
        return ConfigError(
            "engine.backward got a loss without a gradient: it was detached (.detach(), .item(), torch.no_grad), or no "
            "parameter that requires a gradient took part in it."
        )

    @contextmanager
    def no_backward_sync(self, module: EngineModule, enabled: bool = True) -> Iterator[None]:
        """Do not reduce gradients over processes in the block, because more forwards and backwards of the step follow.

        `enabled=False` for the last micro-batch of a step, whose backward reduces all of them.
        """
        _require_model(module, "no_backward_sync")
        if module._accumulates is not None:
            raise ConfigError("engine.no_backward_sync: these blocks cannot be nested; open one for each micro-batch.")
        module._accumulates = enabled
        try:
            with module._strategy.gradient_sync(last=not enabled):
                yield
        finally:
            module._accumulates = None

    def clip_gradients(
        self,
        module: EngineModule,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor | None:
        """Clip the gradients of an optimizer, between backward and its step, by their norm or each by its value.

        Args:
            clip_val: the largest absolute value of an element; or
            max_norm: the largest norm of all gradients together, whatever the strategy.
            norm_type: 2.0.
            error_if_nonfinite: raise RuntimeError for a norm that is not finite, which waits for the device.

        Returns:
            The norm before, on the device; None by value, and under DeepSpeed, which clips in the step.
        """
        _require_model(module, "clip_gradients")
        mine: EngineOptimizer = _require_optimizer(optimizer, "clip_gradients")
        value = max_norm if clip_val is None else clip_val
        if value is None or (clip_val is not None and max_norm is not None) or norm_type != 2:
            raise ConfigError("engine.clip_gradients: give either clip_val= or max_norm=, and norm_type=2.0.")
        strategy = mine.model._strategy
        strategy.unscale(mine.optimizer)
        norm: torch.Tensor | None = strategy.clip_gradients(
            mine.optimizer, value, "norm" if clip_val is None else "value"
        )
        if error_if_nonfinite and norm is not None and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: the loss is too large, or not finite.")
        return norm

    def step(self, optimizer: EngineOptimizer, closure: Callable[[], Any] | None, **options: Any) -> Any:
        """Step an optimizer through its strategy; `EngineOptimizer.step` calls this. Returns what `closure` first
        returned, as torch's optimizers do."""
        strategy, inner = optimizer.model._strategy, optimizer.optimizer
        if strategy.multi_process:
            optimizer.model.require_unchanged()
        if closure is not None and (strategy.scaler is not None or strategy.multi_process):
            raise ConfigError(
                "optimizer.step(closure) works on one process without loss scaling: call backward before the step."
            )
        if closure is None and self._backwards == 0:
            raise ConfigError(
                "optimizer.step() found no gradients: call engine.backward(loss) first, in place of loss.backward()."
            )
        if optimizer.model._accumulates or (optimizer.model._held and strategy.multi_process):
            raise ConfigError(
                "optimizer.step() within no_backward_sync, or right after it, where gradients are not reduced yet: "
                "give enabled=False for the last micro-batch of a step."
            )
        if self._saved_at and self._saved_at == self.trained_places():
            raise ConfigError(
                "engine.save was called before this optimizer.step(): a program that loads the checkpoint goes on with "
                "the next batch, and leaves out this step. Save after the last step of a batch."
            )
        self._saved_at = []
        if strategy.scaler is not None:
            strategy.unscale(inner)
        losses: list[Any] = []

        def evaluated() -> Any:
            assert closure is not None
            losses.append(closure())
            return losses[-1]

        optimizer.stepping = True
        try:
            strategy.step(inner, None if closure is None else evaluated, **options)
        finally:
            optimizer.stepping = False
        if strategy.scaler is not None:
            strategy.end_step()
        if strategy.collective_forward:
            strategy.release_gathered()
        self.steps += 1
        self._unstepped = optimizer.waits = False
        return next(iter(losses), None)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the precision, for what is computed outside of the models' forwards."""
        return self.strategy.precision.forward_context(self.device)

    def to_device(self, obj: Any) -> Any:
        """Return a batch on this process's device, not cast to 16 bits: the call of a model casts what it gets."""
        self._require_entered("to_device")
        return without_cast(self.strategy)(obj)

    def init_module(self) -> AbstractContextManager[Any]:
        """Return a context in which layers are made in the dtype of the precision."""
        return self.config.precision.init_context()

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        self._require_entered("device")
        return self.strategy.device

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.strategy.processes.rank

    rank = global_rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.strategy.processes.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.processes.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is process 0, which prints and writes files."""
        return self.strategy.processes.is_global_zero

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """Print on process 0."""
        if self.is_global_zero:
            print(*args, sep=sep, end=end, file=file, flush=True)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all processes call this."""
        self._require_entered("barrier")
        self.strategy.processes.wait_for_all(f"engine.barrier({name or ''})")
        self.strategy.processes.barrier()

    def all_gather(self, data: Any, sync_grads: bool = False, check: bool = True) -> Any:
        """Return the tensors and numbers in `data` of all processes, with the processes as first dimension. Collective.

        On one process `data` is returned unchanged.

        Args:
            sync_grads: let gradients through.
            check: compare the place of the call, the keys, shapes and dtypes, and the positions of the loaders between
                the processes first, on the host. False saves the exchange, about a millisecond.

        Raises:
            ConfigError: they differ, or a process has gone on without this call.
        """
        self._begin_call("all_gather", data, check)
        return data if self.world_size == 1 else gather_nested(data, self.device, None, sync_grads)

    def gather_uneven(self, data: Any, sync_grads: bool = False, check: bool = True) -> Any:
        """Return the tensors in `data` of all processes, joined along their first dimension in rank order. Collective.

        The lengths of that dimension may differ. A process without a tensor gives None in its place. On one process
        `data` is returned unchanged. `sync_grads` and `check` are those of `all_gather`.
        """
        self._begin_call("gather_uneven", None, check)
        return gather_uneven(data, self.device, self.strategy.processes, sync_grads)

    def all_reduce(self, data: Any, reduce_op: ReduceOp = "mean", check: bool = True) -> Any:
        """Return the tensors and numbers in `data`, each reduced over all processes to a tensor. Collective.

        `check` is that of `all_gather`.
        """
        if reduce_op not in ("mean", "avg", "sum", "min", "max"):
            raise ConfigError(f"engine.all_reduce(reduce_op={reduce_op!r}): give 'mean', 'sum', 'min' or 'max'.")
        self._begin_call(f"all_reduce({reduce_op})", data, check)
        return map_sorted(partial(self._reduced, reduce_op), data)

    def _begin_call(self, call: str, data: Any, check: bool) -> None:
        self._require_entered(call)
        if check:
            positions = [
                f", in batch {one.batch} of epoch {one.epoch} of loader {number}"
                for number, one in enumerate(self._loaders)
                if one._newest() is not None
            ]
            processes = self.strategy.processes
            require_same_call(processes, processes.wait_for_all, f"engine.{call}", data, "".join(positions))
        self._calls += 1

    def _reduced(self, reduce_op: str, path: str, leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf, device=self.device)
        if not isinstance(leaf, torch.Tensor) or self.world_size == 1:
            return leaf
        if reduce_op in ("min", "max"):
            gathered = gather_nested(leaf, self.device, None, False)
            return gathered.amin(0) if reduce_op == "min" else gathered.amax(0)
        total = self.strategy.processes.sum(leaf.detach())
        return total if reduce_op == "sum" else total / self.world_size

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of process `src`: data and tensors, in any nesting. Collective."""
        self._require_entered("broadcast")
        if not 0 <= src < self.world_size:
            raise ConfigError(f"engine.broadcast(src={src}): the processes are 0 to {self.world_size - 1}.")
        if self.world_size == 1:
            return obj
        processes = self.strategy.processes
        processes.wait_for_all(f"engine.broadcast(src={src})")
        received = processes.broadcast_object(obj) if src == 0 else processes.all_gather_object(obj)[src]
        return obj if self.global_rank == src else map_leaves(received, self._on_device)

    def _on_device(self, leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, state: Mapping[str, Any], info: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint folder at `path`, or at a URL; one that is there is replaced when this one is complete.

        Collective: every process must call this, after an optimizer's step. The positions of all loaders of
        `setup_dataloaders` and the random generators are saved, too, and a program that calls `load` continues with the
        same bits. Any strategy, on any number of processes, reads what any other wrote.

        Args:
            state: by names of yours: the models and optimizers that `setup` returned; objects with `state_dict`, such
                as schedulers; and data: numbers, texts, lists, dicts, tensors.
            info: data for `trainer checkpoint list`.

        Raises:
            ConfigError: something in `state` is not set up, or gradients are waiting for a step.
            CheckpointError: a weight, or a number in an optimizer's state, has become NaN or infinite; or the
                checkpoint could not be written; a former one stays.
        """
        self._require_entered("save")
        self.strategy.processes.wait_for_all(f"engine.save({path})")
        waiting = [one for one in self._optimizers if one.waits]  # none where the strategy shows no gradients
        if self._unstepped and (not waiting or any(has_gradients(one.optimizer) for one in waiting)):
            raise ConfigError(
                "engine.save between backward and optimizer.step(): a program that loads this goes on with the next "
                "batch, and the step would be left out. Save after a step."
            )
        if self.world_size > 1 and any(one._held for one in self._models):
            raise ConfigError(
                "engine.save while gradients wait that no_backward_sync has held back, of which each process has "
                "others: save after the step that uses them, or leave no_backward_sync out."
            )
        self._check_loaders()
        parts, strategy = _Parts(state, self), self.strategy
        tensors = parts.tensors()
        processes, shards = strategy.processes, strategy.shards_state
        if parts.nonfinite:
            raise CheckpointError(
                f"{first_of(parts.nonfinite)} not finite: the checkpoint is not written, and an earlier one at {path} "
                "stays."
            )
        checkpoint = self._state(parts, tensors)
        about = {"step": self.steps, "epoch": self._places[0].epoch if self._places else 0}
        about |= {"captured": time.time_ns(), **(info or {})}
        problem: Exception | None = None
        if processes.is_global_zero or shards:
            group = processes if shards else SINGLE_PROCESS
            write = partial(write_checkpoint, path, overwrite=True, process_group=group)
            try:
                write_the_rest(lambda state, info: write(state, info=info), checkpoint, about, {})
            except Exception as error:
                problem = error
        problems = processes.all_gather_object(problem)
        problems[processes.rank] = problem  # with its own class and traceback
        for one in problems:
            if one is not None:
                raise one
        self._saved_at = self.trained_places()

    def _check_loaders(self) -> None:
        """Warn once if a program that loads this may not go on exactly."""
        left = next((place.left for place in self._places if place.left and place.goes_on), 0)
        if left and not self._told_of_left and self.is_global_zero:
            self._told_of_left = True
            log.warning(
                "a loader's loop was left after %d batches before, and a program that loads this goes on inside its "
                "epoch, where a count by enumerate or islice begins again: count with the loader, and leave before "
                "saving: if loader.batch == %d: break.",
                *(left, left),
            )

    def _state(self, parts: _Parts, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a checkpoint. Those that a Trainer writes, too, mean the same."""
        strategy, processes = self.strategy, self.strategy.processes
        own = {
            "rng": states_with(parts.owners(), strategy.device),
            "loader": [place.state_dict(self) for place in self._places],
        }
        if processes.world_size > 1:
            own = map_leaves(own, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)
        per_rank = processes.all_gather_object(own)
        scaler = next((model._strategy.scaler for model in self._models if model._trains), None)
        first = next(iter(parts.models.values())).module if parts.models else None
        hparams = first.hparams if isinstance(first, TrainModule) else {}
        return {
            **tensors,
            "scaler": scaler.state_dict() if scaler is not None else {},
            "rng": [one["rng"] for one in per_rank],
            "loader": [{"loaders": one["loader"]} for one in per_rank],
            "engine": {**parts.data(), "steps": self.steps},
            "hyperparameters": {
                "module": stored_hyperparameters(hparams),
                "data": {},
                "kinds": {"module": kinds_of_hyperparameters(hparams)},
            },
            "seed": self.seed,
            "world_size": processes.world_size,
            "reader_of": list(processes.reader_of),
            "reporters": list(processes.reporters),
            "strategy": strategy.name,
            "precision": strategy.precision.name,
            "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        }

    def load(self, path: str | Path, state: dict[str, Any] | None = None, strict: bool = True) -> dict[str, Any]:
        """Restore a checkpoint into the objects of `state`, replace the data in it, and return the other saved data.

        Collective: call it after `setup` and `setup_dataloaders`, before the loop. With an optimizer in `state` the
        training resumes: loaders at the next batch, random generators as they were. Without one only what is named is
        restored. A Trainer's checkpoint has one model and its optimizers.

        Args:
            state: the same names as in `save`; fewer, for the weights alone.
            strict: False: weights and names that are missing on either side are left as they are.

        Raises:
            CheckpointError: there is no valid checkpoint, or it does not fit.
            ConfigError: something in `state` is not set up.
        """
        self._require_entered("load")
        self.strategy.processes.wait_for_all(f"engine.load({path})")
        state = {} if state is None else state
        parts, strategy = _Parts(state, self), self.strategy
        in_loop = self._backwards and any(one._training and one._newest() is not None for one in self._loaders)
        if parts.optimizers and in_loop:
            raise ConfigError(
                "engine.load inside a loop over a loader: the weights would go back, and the data would not. Leave the "
                "loop (break), load, and begin it again: it goes on with the batch after the checkpoint."
            )
        where = as_storage_path(path)
        if strategy.shards_state:
            checkpoint = open_checkpoint(where, SHARDED_KEYS, True, strategy.processes)
        else:
            checkpoint = read_checkpoint(where)
        problem = wrong(checkpoint, _KINDS, "the checkpoint")
        if problem is not None:
            raise CheckpointError(f"{path} is not a checkpoint of an Engine or a Trainer: {problem}.")
        rest = parts.restore(checkpoint, strict, str(path), report_left_out(where, strategy.processes.is_global_zero))
        if parts.optimizers and "engine" in checkpoint:
            self._resume(checkpoint, str(path), parts)
            for key, changes in checkpoint["engine"].get("changes", {}).items():  # earlier versions have none
                if key in parts.models:
                    parts.models[key]._changes.put_back_now(changes)
        return rest

    def _resume(self, checkpoint: dict[str, Any], path: str, parts: _Parts) -> None:
        """Restore the loaders' positions, the loss scale and the generators."""
        strategy, saved = self.strategy, checkpoint["loader"]
        loaders, training = saved[0]["loaders"], sum(one._training for one in self._loaders)
        known = sum(one.get("training", True) for one in loaders)  # earlier versions do not say it
        if known < training:
            raise ConfigError(
                f"{path} has the positions of {known} training loaders, and this program has set up {training}: call "
                "engine.setup_dataloaders with the same loaders, in the same order, before engine.load."
            )
        scaler = next((model._strategy.scaler for model in self._models if model._trains), None)
        if scaler is not None and checkpoint["scaler"]:
            with restoring("the loss scale"):
                scaler.load_state_dict(checkpoint["scaler"])
        if int(checkpoint["seed"]) != self.seed and self._loaders:
            log.warning(
                "the checkpoint was written with seed=%s, this Engine has seed=%d: the order of samples changes here. "
                "Give seed=%s to go on exactly.",
                checkpoint["seed"],
                self.seed,
                checkpoint["seed"],
            )
        rank = counterpart(checkpoint, strategy.processes)
        self._places += [_Place() for _ in loaders[len(self._places) :]]
        for place, of_one in zip(self._places, saved[rank or 0]["loaders"], strict=False):
            check_torch_states(of_one["state"], f"{path}, 'loader'")
            place.load_state_dict(of_one, exact=rank is not None)
        self.place_loaders(by_order=True)
        self.steps, self._begun, self._saved_at = int(checkpoint["engine"]["steps"]), True, []
        if rank is None:
            log.info("%s was written by another number of processes: random numbers (dropout) differ", path)
        else:
            check_rng_state(checkpoint["rng"][rank], f"{path}, 'rng' of rank {rank}", strategy.device)
            lacking = set_states_with(parts.owners(), checkpoint["rng"][rank], strategy.device)
            report_lacking(lacking if self.is_global_zero else [])
        share_random_numbers(strategy.processes, strategy.device)

    def full_state_dict(self, module: EngineModule, everywhere: bool = False) -> dict[str, torch.Tensor]:
        """Return a model's full weights, in CPU memory, under the keys of the plain module. Collective.

        Returned on process 0, or with `everywhere` on all; the others return an empty dict.
        """
        _require_model(module, "full_state_dict")
        self.strategy.processes.wait_for_all("engine.full_state_dict")
        return _without_prefix(full_state_dict(module._strategy, everywhere), "")


_LOADER = {
    "epoch": Integer(0),
    "batch": Integer(0),
    "global_micro_batch": (Integer(1), None),
    "began_with?": (Integer(1), None),
    "waits?": bool,
    "state": dict,
    "site?": str,
    "training?": bool,
}
_KINDS: dict[str, Any] = {
    "model": dict,
    "optimizers": [OPTIMIZER],
    "gradients?": [OPTIMIZER],
    "scaler": dict,
    "rng": [dict],
    "loader": [dict],
    "engine?": {
        "models": {str: str},
        "optimizers": [str],
        "stateful": {str: dict},
        "values": dict,
        "steps": Integer(),
        "changes?": {str: HOOK_CHANGES},
    },
    "seed": Integer(),
    "world_size": Integer(1),
    "reader_of?": [Integer()],
    "reporters?": [Integer()],
}
"""The kinds of the entries that `load` reads; more are allowed."""


class _Adapter(TrainModule):
    """A user's module as strategies take it: each of its methods runs as a step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.model = module

    def training_step(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:  # type: ignore[override]
        """Call the module, or a method of it."""
        return (self.model if method == "forward" else getattr(self.model, method))(*args, **options)

    validation_step = training_step


class EngineModule(nn.Module):
    """A model that `Engine.setup` returned: called like the module itself, with all attributes of the module.

    Its parameters, keys and submodules are those of the module.
    """

    module: nn.Module
    """The module that was given to `setup`."""

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        engine: Engine,
        finite: StateMonitor,
        changes: HookChanges,
        trains: bool,
    ) -> None:
        super().__init__()
        own = vars(self)
        # Shared, not registered as a child, so that all names stay as they are.
        own |= {name: value for name, value in vars(module).items() if name in own and isinstance(value, dict)}
        own |= {"module": module, "_strategy": strategy, "_engine": engine, "_finite": finite, "_trains": trains}
        own |= {"training": module.training, "_accumulates": None, "_held": None, "_called": False}
        own |= {"_evaluated": False, "_changes": changes}
        own["_casts"] = strategy.precision.casts_batch
        dtype = strategy.precision.weights
        own["_low"] = dtype if own["_casts"] and dtype.itemsize == 2 else strategy.precision.autocast
        own["_syncs"] = trains and not inherits(strategy, "gradient_sync")
        own["_plain"] = keeps_step(strategy) and not own["_casts"]
        own["_tables"] = ParameterTables(strategy.module) if trains else None
        own["_flags"] = [parameter.requires_grad for parameter in module.parameters()]
        for name in _STEPS:
            if callable(getattr(module, name, None)):
                self.mark_forward_method(name)
        if trains and not own["_plain"]:
            for layer in (module, *module.children()):
                layer.register_forward_pre_hook(self._refuse_direct_call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the precision's context, as the strategy needs it."""
        if self._plain and self._engine._begun:
            # Nothing else to do: the module's hooks are its own.
            if self._trains:
                self._engine._last = self
            return self.module(*args, **kwargs)
        return self._call("forward", args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of a call."""
        return self(*args, **kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        trained = self._trains and torch.is_grad_enabled()
        if trained:
            engine._last = self
        if not engine._begun:
            engine.begin()
        if self._plain:
            return (self.module if method == "forward" else getattr(self.module, method))(*args, **kwargs)
        engine._calls += self._strategy.collective_forward
        if self._casts:
            args, kwargs = map_leaves((args, kwargs), self._strategy.precision.convert_batch)
        self._called = True
        try:
            outputs = self._through_strategy("training_step" if trained else "validation_step", method, args, kwargs)
        finally:
            self._called = False
        return outputs if self._low is None else map_leaves(outputs, self._to_float)

    def _through_strategy(self, step: str, *call: Any) -> Any:
        strategy = self._strategy
        if step == "validation_step":
            self._evaluated = True
            return strategy.call_step(step, *call)
        if self._evaluated:
            self._evaluated = False
            if strategy.collective_forward:
                strategy.release_gathered()
        with strategy.gradient_sync(last=True) if self._syncs and self._accumulates is None else NULL_CONTEXT:
            return strategy.call_step(step, *call)

    def _to_float(self, leaf: Any) -> Any:
        """Return an output in 16 bits as float32, in which a loss of it is computed."""
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == self._low else leaf

    def _refuse_direct_call(self, layer: nn.Module, inputs: Any) -> None:
        if not self._called and torch.is_grad_enabled() and self._engine._entered:
            raise ConfigError(
                f"{type(layer).__name__} was called directly, past the strategy, which then does not reduce its "
                "gradients: call the model that engine.setup returned. For another method than forward: "
                "model.mark_forward_method('name'), and then model.name(...)."
            )

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Make a method of the module, such as "generate", run like `forward`: on all processes, with sharding.

        `training_step` and the other steps are marked already.
        """
        name = method if isinstance(method, str) else method.__name__
        original = getattr(self.module, name, None)
        if not callable(original):
            raise ConfigError(f"mark_forward_method({name!r}): {type(self.module).__name__} has no such method.")
        vars(self)[name] = wraps(original)(lambda *args, **kwargs: self._call(name, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.module, name, value)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module."""
        self.module.train(mode)
        vars(self)["training"] = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module; its tensors may be sharded, see `Engine.full_state_dict`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Self:
        raise ConfigError(
            "copy.deepcopy of the model that engine.setup returned would copy the engine, too: copy its module, "
            "copy.deepcopy(model.module); or, where the strategy shards it, make another module and have it "
            "load_state_dict(engine.full_state_dict(model))."
        )

    def require_unchanged(self) -> None:
        """Raise ConfigError if parameters were added, replaced, frozen or unfrozen since `setup`."""
        tables = self._tables
        if tables is None:
            return
        if [parameter.requires_grad for parameter in self.module.parameters()] != self._flags:
            raise self._changed("parameters were frozen or unfrozen")
        if not tables.unchanged():
            if self._strategy.collective_forward:
                self._strategy.release_gathered()
            if not tables.unchanged() and not tables.same_parameters():
                raise self._changed(describe_changes(tables.changes()).replace(_MODEL, ""))

    def _changed(self, changes: str) -> ConfigError:
        return ConfigError(
            f"{changes} since engine.setup, and strategy {self._strategy.name!r} does not know it: change "
            f"{type(self.module).__name__} before setup; or give an optimizer group a learning rate of 0 instead of "
            "freezing."
        )


class EngineOptimizer(Optimizer):
    """An optimizer that `Engine.setup` returned: `step` goes through the strategy, all else to torch's."""

    def __init__(self, optimizer: Optimizer, model: EngineModule, engine: Engine) -> None:
        # Not super().__init__: groups and states are those of the optimizer.
        self.optimizer, self.model, self._engine = optimizer, model, engine
        self.stepping = False
        self.waits = False
        """True if gradients of a backward wait for a later step; a checkpoint has them."""
        strategy = model._strategy
        if strategy.scaler is not None or strategy.shards_state:
            optimizer.register_step_pre_hook(self._refuse_step)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the weights; `closure` for an optimizer such as LBFGS, on one process."""
        return self._engine.step(self, closure, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.waits = self.model._held = self._engine._unstepped = False
        if set_to_none:
            zero_grad_fast(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def _refuse_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not self.stepping:
            raise ConfigError(
                f"the step of torch's {type(optimizer).__name__} itself leaves out what precision and strategy do: "
                "step the optimizer that engine.setup returned."
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the torch optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the torch optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the torch optimizer."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the torch optimizer, with this process's shards alone; `Engine.save` writes all."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the torch optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)

    def __deepcopy__(self, memo: Any) -> Self:
        raise ConfigError(
            "copy.deepcopy of the optimizer that engine.setup returned would copy the engine, too: copy its state, "
            "copy.deepcopy(optimizer.state_dict())."
        )

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


class EngineLoader:
    """A loader that `Engine.setup_dataloaders` returned; other attributes are those of the loader given.

    Each `for` is an epoch. A `break` ends the epoch, as with a DataLoader; but for a look at one batch, as by
    `next(iter(loader))`, before anything is trained.
    """

    def __init__(
        self, loader: BatchLoader, given: Any, engine: Engine, training: bool, made: tuple[Any, int, str]
    ) -> None:
        self._loader, self._given, self._engine, self._training = loader, given, engine, training
        self._make, self._number, self._site = made
        self._placed: _Place | None = None
        self.batch = 0
        """Batches of the epoch that this process has been given."""
        self.samples: int | None = None
        """Samples of the latest batch that count; 0 for one that only repeats samples; None: unknown."""
        self.weight = 1.0
        """Factor for the loss of the latest batch, a mean over its samples, with which the gradients of all processes
        together are those of one big batch; 1.0 unless the batches of a step differ in size."""
        self._goes_on = False
        """True: the next iterator continues the epoch of a checkpoint."""
        self._restored: tuple[Mapping[str, Any], bool] | None = None
        """The state that `load_state_dict` got, until its epoch has ended."""
        self._first = self._backwards = 0
        """The batch with which the newest iterator began, and the engine's backwards before it."""
        self._newest: Callable[[], object] = _nothing
        """A weak reference to the iterator of the epoch in progress."""
        self._within: list[tuple[int, int]] = []
        """The places in progress of loaders of training as an evaluation began."""
        self._moves = None if keeps_batches(engine.strategy) else without_cast(engine.strategy)
        self._began_with = self._global_micro_batch

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one: `for epoch in range(loader.epoch, epochs):` resumes after `load`."""
        return self._place.epoch

    @property
    def _place(self) -> _Place:
        if self._placed is None:
            self._engine.place_loaders()
        assert self._placed is not None
        if self._placed.loader() is not self:
            raise ConfigError(
                "this loader was set up again by the same line, and the new one goes on in its place: use that one, or "
                "set up both before the loop."
            )
        return self._placed

    def _take(self, place: _Place, number: int) -> None:
        """Continue in a place, of this number."""
        self._placed, place.loader = place, weakref.ref(self)
        place.site, place.training = self._site, self._training
        if number != self._number:  # another order of samples
            length, self._loader = self._loader.length, self._make(number)
            if self._training:
                self._loader.shorten([length])
        if place.saved is not None:
            self.load_state_dict(*place.saved)

    def __iter__(self) -> Iterator[Any]:
        # Here, not with the first batch: an iterator that is asked for none begins an epoch, too.
        place = self._place
        place.saved = None
        if place.waits:
            place.waits = self._goes_on = False
            self._next_epoch()
            place.ended = -1
            return iter(())
        if self._newest() is not None:
            self._leave()
        goes_on, self._goes_on = self._goes_on, False
        self._first, self._within = self.batch, [] if self._training else self._engine.trained_places()
        self._backwards = self._engine._backwards
        self._loader.measure(self.epoch, self.batch if goes_on else 0)
        this = _Iteration()
        # It ends with its iterator, which `zip` may drop without having asked for a batch.
        self._newest = weakref.ref(this, self._leave)
        return self._iterate(this, self._batches())

    def _iterate(self, this: _Iteration, batches: Iterator[Batch]) -> Iterator[Any]:
        engine = self._engine
        if not engine._begun:
            engine.begin()
        if self._newest() is not this:
            raise ConfigError(
                "two iterators of one loader at once, as by zip(loader, loader), would give the same batches: set up "
                "two loaders, first, second = engine.setup_dataloaders(loader, other)."
            )
        for batch in batches:
            self.batch += 1
            self.samples = batch.samples
            if batch.total is not None:
                self.weight = batch.share * engine.strategy.processes.readers / batch.total if batch.total else 0.0
            data = batch.data
            del batch  # it may not stay in memory during the next forward
            yield data if self._moves is None else self._moves(data)
        if self._newest() is this:
            self._next_epoch()

    def _leave(self, *iteration: object) -> None:
        """End the epoch of an iterator that was dropped; one that was a look at one batch begins with it again."""
        # Before anything is trained, and no other loader has ended its epoch meanwhile, as by `zip`.
        untrained = self._engine._backwards == self._engine._epochs == 0
        self._newest = _nothing
        if untrained and self.batch == self._first + 1:
            self.batch = 0
            if self._restored is not None:
                self.load_state_dict(*self._restored)
        elif self.batch:
            backwards, place = self._engine._backwards, self._place
            if self._training and all(one is place or one.ended != backwards for one in self._engine._places):
                place.left = self.batch  # not by `zip`, as another one has ended
            self._next_epoch()

    def _next_epoch(self) -> None:
        engine, place = self._engine, self._place
        trained = self.batch == self._first or self._backwards < engine._backwards
        place.beside, place.ended = [one.epoch for one in engine._places] if trained else [], engine._backwards
        engine._epochs += self._training
        place.epoch += 1
        self.batch, self._restored, self._newest = 0, None, _nothing

    def _batches(self) -> Iterator[Batch]:
        batches, strategy = self._loader.iterate(self.epoch, self.batch), self._engine.strategy
        uneven = strategy.processes.world_size > 1 and not self._loader.counts_everywhere and self._training
        if not uneven:
            return batches
        # All processes get as many batches as the one with the fewest.
        return _first_of_each(lambda: even_window([*islice(batches, 1)], strategy))

    def __len__(self) -> int:
        if self._loader.length is None:
            raise TypeError(f"{type(self._given).__name__} has no length")
        return self._loader.length

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_given"], name)

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        # An evaluation by `next` in a step of training is not continued by the step that follows.
        within = bool(self._within) and self._within == self._engine.trained_places()
        left = self.batch > 0 and not self._goes_on and within
        over = self._place.is_over(self._engine)
        return {
            "epoch": self.epoch + left - over,
            "batch": 0 if left else self.batch,
            "waits": self._place.waits or over,
            "global_micro_batch": self._global_micro_batch,
            "began_with": self._began_with,
            "state": self._loader.state_dict(),
            "site": self._site,
            "training": self._training,
        }

    def load_state_dict(self, state: Mapping[str, Any], exact: bool = True) -> None:
        """Restore a position from `state_dict`. `exact`: it was written by this process, or by its counterpart."""
        place = self._place
        place.epoch, place.waits = state["epoch"], state.get("waits", False)  # earlier versions do not know it
        self.batch, self._goes_on, place.beside = state["batch"], True, []
        self._newest = _nothing
        before, now = state["global_micro_batch"], self._global_micro_batch
        self._restored = state, exact
        if exact:
            self._loader.load_state_dict(state["state"])
            if not self.batch:  # at once, and not as the epoch begins: the loop may change samplers before it
                self._loader.measure()
        # A program whose batches grow while it trains begins with the same as before, and goes on within the epoch.
        alike = state.get("began_with") == self._began_with
        if before is not None and now is not None and before != now and not alike:
            self.batch = place_in_epoch(self._loader, self.batch, before, now)

    @property
    def _global_micro_batch(self) -> int | None:
        size = self._loader.batch_size
        return None if size is None else size * self._engine.strategy.processes.readers


class _Place:
    """The position in the data of a call of `setup_dataloaders`, for the loaders that it returns one by one."""

    def __init__(self) -> None:
        self.loader: Callable[[], EngineLoader | None] = _nothing
        """A weak reference to the loader of now."""
        self.site, self.training = "", True
        """The place of the call in the program; the kind of its loaders."""
        self.epoch, self.waits = 0, False
        """`waits`: the next iterator gives nothing, because its epoch is over while another loader goes on."""
        self.beside: list[int] = []
        """The epochs of all places as the latest epoch ended, if something was trained in it."""
        self.ended = self.left = 0
        """The engine's backwards then; the batch after which an epoch was left before its end, if one was."""
        self.saved: tuple[Mapping[str, Any], bool] | None = None
        """The position in a checkpoint, until a loader goes on there."""

    def is_free(self, new: list[EngineLoader]) -> bool:
        """Return True if one of these loaders may go on here; loaders for evaluation are often kept."""
        loader = self.loader()
        return loader is None or (self.training and loader not in new and self.epoch > 0 and not self.goes_on)

    @property
    def goes_on(self) -> bool:
        """Whether a loader is in its epoch."""
        loader = self.loader()
        return self.saved is not None or (loader is not None and (loader._goes_on or loader._newest() is not None))

    def is_over(self, engine: Engine) -> bool:
        """Return True if another loader continues a round of the program in which this one has ended its epoch.

        The other one has ended fewer epochs, and something was trained since this one has ended: the other comes after
        it, or beside it by `zip_longest`.
        """
        loader = self.loader()
        return (
            (loader is None or loader._newest() is None)
            and bool(self.beside)
            and self.ended < engine._backwards
            and any(
                one.epoch == epoch < self.epoch and one.goes_on
                for one, epoch in zip(engine._places, chain(self.beside, repeat(0)), strict=False)
            )
        )

    def state_dict(self, engine: Engine) -> Mapping[str, Any]:
        """Return the position."""
        loader = self.loader()
        if loader is not None:
            return loader.state_dict()
        if self.saved is not None:
            return self.saved[0]
        over = self.is_over(engine)
        state = {"epoch": self.epoch - over, "batch": 0, "waits": self.waits or over, "global_micro_batch": None}
        return {**state, "state": {}, "site": self.site, "training": self.training}

    def load_state_dict(self, state: Mapping[str, Any], exact: bool) -> None:
        """Restore the position into the loader, or keep it for the next one."""
        problem = wrong({**state}, _LOADER, "the loader's state")
        if problem is not None:
            raise CheckpointError(f"the position of a loader is damaged: {problem}.")
        self.epoch, self.waits, self.beside = state["epoch"], state.get("waits", False), []
        self.saved = state if exact else {**state, "state": {}}, exact
        if (loader := self.loader()) is not None:
            loader.load_state_dict(state, exact)
        else:
            self.site, self.training = state.get("site", ""), state.get("training", True)


class _Iteration:
    """Stands for an iterator of a loader as long as that lives."""


def _marks_of_gradients(model: EngineModule) -> list[tuple[int, int] | None]:
    """Return numbers that change with the gradients of a model."""
    return [None if p.grad is None else (id(p.grad), p.grad._version) for p in model.parameters()]


def _nothing() -> None:
    """Stand for a weak reference to what has ended."""


def _site(frame: FrameType | None, until: CodeType | None) -> str:
    """Return a call's place in the program, by functions and lines in them, from the block of `with` on."""
    calls = []
    while frame is not None:
        code = frame.f_code
        calls.append(f"{code.co_qualname}:{frame.f_lineno - code.co_firstlineno}")
        frame = None if code is until else frame.f_back
    return " < ".join(calls)


def _first_of_each(take: Callable[[], list[Batch]]) -> Iterator[Batch]:
    while window := take():
        yield window.pop()


class _Parts:
    """The objects and data given to `save` or `load`, by kind.

    Raises:
        ConfigError: something is not set up.
    """

    def __init__(self, state: Mapping[str, Any], engine: Engine) -> None:
        if not isinstance(state, Mapping):
            raise ConfigError(f'the state is {shown_value(state)}: give a dict such as {{"model": model, "step": 3}}.')
        self.state, self.engine = state, engine
        self.models: dict[str, EngineModule] = {}
        self.optimizers: dict[str, EngineOptimizer] = {}
        self.stateful: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.nonfinite: list[str] = []
        """The names of what `tensors` has found not to be finite; the same on all processes."""
        for key, value in state.items():
            if not isinstance(key, str) or not key or key.endswith("."):
                raise ConfigError(f"the state has the key {key!r}: give texts that end with no dot.")
            self._sort(key, value)

    def _sort(self, key: str, value: Any) -> None:
        engine = self.engine
        if isinstance(value, EngineModule):
            self.models[key] = value
        elif isinstance(value, EngineOptimizer):
            self.optimizers[key] = value
        elif isinstance(value, EngineLoader):
            pass  # the positions of all loaders are saved
        elif isinstance(value, DataLoader):
            raise ConfigError(
                f"state[{key!r}] is a DataLoader that is not set up, so its position is not known: loader = "
                "engine.setup_dataloaders(loader). All loaders that are set up are saved; leave them out of the state."
            )
        elif any(value is model.module for model in engine._models) or isinstance(value, Optimizer):
            raise ConfigError(
                f"state[{key!r}] is a {type(value).__name__} that engine.setup has not returned: give what it returned."
            )
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self.stateful[key] = value
        else:
            self.values[key] = value

    def owners(self) -> dict[str, Any]:
        """Return the models and optimizers, which may hold random generators, by name."""
        models = {f"model {key}": model.module for key, model in self.models.items()}
        return parts_of(models, {f"optimizer {key}": one.optimizer for key, one in self.optimizers.items()})

    def _prefixes(self, keys: Mapping[str, Any]) -> dict[str, str]:
        """Return the beginnings of the models' names in a checkpoint, no one of them that of another's names."""
        return {key: "" if len(keys) == 1 else _beginning(key, keys) for key in keys}

    def tensors(self) -> dict[str, Any]:
        """Return weights and optimizers' states; of sharded tensors this process's shards. Collective."""
        models = [one.model for one in self.optimizers.values()]
        if any(all(model is not known for known in self.models.values()) for model in models):
            raise ConfigError('an optimizer is in the state without its model: give {"model": model, ...}, too.')
        weights: dict[str, Any] = {}
        states: dict[str, Any] = {}
        gradients: dict[str, Any] = {}
        for key, prefix in self._prefixes(self.models).items():
            model = self.models[key]
            synchronize_buffers(model._strategy)
            of_model = model._strategy.module_state()
            optimizers = {name: one.optimizer for name, one in self.optimizers.items() if one.model is model}
            own = {name: model._strategy.optimizer_state(one) for name, one in optimizers.items()}
            found = model._finite.nonfinite({"model": of_model, "optimizers": list(own.values())})
            self.nonfinite += [_of_user(name, prefix, list(own)) for name in found]
            weights |= _without_prefix(of_model, prefix)
            waiting = {
                name: gradients_of(model._strategy, one.optimizer, one.waits)
                for name, one in self.optimizers.items()
                if one.model is model
            }
            in_checkpoint = partial(_without, prefix=prefix)
            states |= {name: renamed(one, in_checkpoint) for name, one in own.items()}
            gradients |= {name: renamed(one, in_checkpoint) for name, one in waiting.items()}
        tensors = {"model": weights, "optimizers": [states[name] for name in self.optimizers]}
        if any(one.waits for one in self.optimizers.values()):
            tensors["gradients"] = [gradients[name] for name in self.optimizers]
        return tensors

    def data(self) -> dict[str, Any]:
        """Return the rest of the state, and how to find the models and optimizers."""
        return {
            "models": self._prefixes(self.models),
            "optimizers": list(self.optimizers),
            "stateful": {key: one.state_dict() for key, one in self.stateful.items()},
            "values": dict(self.values),
            "changes": {key: model._changes.state_dict() for key, model in self.models.items()},
        }

    def restore(self, checkpoint: Mapping[str, Any], strict: bool, path: str, left_out: list[str]) -> dict[str, Any]:
        """Restore the objects, replace the values in the state, and return the values that it does not name.

        `left_out`: the names of what the checkpoint could not hold, which may be missing.
        """
        saved = checkpoint.get("engine")
        if saved is None:  # a Trainer's
            names = list(self.optimizers)
            saved = {"models": dict.fromkeys(list(self.models)[:1], ""), "optimizers": names, "stateful": {}}
            saved |= {"values": {}}
            if len(self.models) > 1 or (names and len(names) != len(checkpoint["optimizers"])):
                raise CheckpointError(
                    f"{path} is a Trainer's, with one model and {len(checkpoint['optimizers'])} optimizers: load it "
                    "into one model, which has the names of the TrainModule."
                )
        kinds: dict[str, dict[str, Any]] = {
            "models": self.models,
            "optimizers": self.optimizers,
            "stateful": self.stateful,
            "values": self.values,
        }
        for kind, wanted in kinds.items():
            missing = [key for key in wanted if key not in saved[kind] and f"engine[{kind!r}][{key!r}]" not in left_out]
            if missing and strict:
                known = [key for one in kinds for key in saved[one]]
                hint = did_you_mean(missing[0], known)
                raise CheckpointError(f"{path} has no {missing[0]!r}.{hint} It has: {', '.join(known) or 'nothing'}.")
        for key, model in self.models.items():
            if key in saved["models"]:
                self._restore_model(model, checkpoint["model"], saved["models"][key], strict, path)
        for key, optimizer in self.optimizers.items():
            if key in saved["optimizers"]:
                self._restore_optimizer(optimizer, checkpoint, saved, saved["optimizers"].index(key))
        for key, one in self.stateful.items():
            if key in saved["stateful"]:
                with restoring(f"the state of {key}"):
                    one.load_state_dict(saved["stateful"][key])
        values: dict[str, Any] = saved["values"]
        if isinstance(self.state, dict):
            self.state.update({key: values[key] for key in self.values if key in values})
        return {key: value for key, value in values.items() if key not in self.values}

    def _restore_model(
        self, model: EngineModule, weights: Mapping[str, Any], prefix: str, strict: bool, path: str
    ) -> None:
        own = {_with(name, prefix): value for name, value in weights.items() if name.startswith(prefix)}
        known = set(model.module.state_dict())
        inner = {name.partition(".")[0] for name in weights}
        if not known & {name.removeprefix(_MODEL) for name in own} and len(inner) == 1 and known:
            (attribute,) = inner
            if f"{attribute}.{next(iter(known))}" in weights:
                raise CheckpointError(
                    f"all names in {path} begin with {attribute!r}: it is of a module whose attribute {attribute} is "
                    "this one. Set up that module, such as the TrainModule itself."
                )
        with restoring("the weights"):
            model._strategy.load_module_state(own, strict)

    def _restore_optimizer(
        self, optimizer: EngineOptimizer, checkpoint: Mapping[str, Any], saved: Mapping[str, Any], number: int
    ) -> None:
        key = next((key for key, model in self.models.items() if model is optimizer.model), None)
        prefix = saved["models"].get(key, "")
        strategy = optimizer.model._strategy
        weights = {_with(name, prefix): one for name, one in checkpoint["model"].items() if name.startswith(prefix)}
        state = renamed(checkpoint["optimizers"][number], partial(_with, prefix=prefix))
        with restoring(f"the state of {type(optimizer.optimizer).__name__}"):
            check_shapes(strategy.module, state)
            if (changes := saved.get("changes", {}).get(key)) is not None:
                own = [one for one in self.engine._optimizers if one.model is optimizer.model].index(optimizer)
                optimizer.model._changes.restore_groups(own, state, changes)
            strategy.load_optimizer_state(optimizer.optimizer, with_dtypes_of(state, weights))
            if gradients := checkpoint.get("gradients"):
                waiting = renamed(gradients[number], partial(_with, prefix=prefix))
                give_gradients(strategy, optimizer.optimizer, waiting)
                optimizer.waits = has_gradients(optimizer.optimizer)


def _take_parameters(optimizer: Optimizer, names: Mapping[Any, str], current: Mapping[str, nn.Parameter]) -> None:
    """Give an optimizer the parameters that a strategy has put in place of those with these names.

    Raises:
        ConfigError: the optimizer has a state of parameters that were replaced.
    """
    for group in optimizer.param_groups:
        replaced = [p for p in group["params"] if current[names[p]] is not p]
        if any(optimizer.state.get(parameter) for parameter in replaced):
            raise ConfigError(
                f"engine.setup: {type(optimizer).__name__} has taken steps before, and this strategy shards the "
                "parameters: make a new optimizer, or restore its state by engine.load."
            )
        group["params"] = [current[names[parameter]] for parameter in group["params"]]


def _beginning(key: str, keys: Iterable[str]) -> str:
    beginning = f"{key}."
    while any(other.startswith(beginning) for other in keys):
        beginning += "."  # no layer has a name that begins with a dot
    return beginning


def _with(name: str, prefix: str) -> str:
    """Return the strategy's name for a name in a checkpoint."""
    return _MODEL + name.removeprefix(prefix)


def _without(name: str, prefix: str) -> str:
    """Return the name in a checkpoint for one of the strategy's names."""
    return prefix + name.removeprefix(_MODEL)


def _of_user(name: str, prefix: str, optimizers: list[str]) -> str:
    """Return the name in messages for what a `StateMonitor` has found in a model and its optimizers."""
    if name.startswith("model."):
        return _without(name.removeprefix("model."), prefix)
    _, number, rest = name.split(".", 2)
    return f"{optimizers[int(number)]}.{rest.replace(_MODEL, prefix, 1)}"


def _without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {_without(name, prefix): value for name, value in state.items()}


def _require_model(model: Any, call: str) -> None:
    if not isinstance(model, EngineModule):
        raise ConfigError(f"engine.{call} takes the model that engine.setup returned, and got {shown_value(model)}.")


def _require_optimizer(optimizer: Any, call: str) -> EngineOptimizer:
    if not isinstance(optimizer, EngineOptimizer):
        raise ConfigError(
            f"engine.{call} takes the optimizer that engine.setup returned, and got a {type(optimizer).__name__}."
        )
    return optimizer
