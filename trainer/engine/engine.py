"""Engine: the trainer's parts for a loop that you write."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, Never, Self, TextIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from trainer.data.transfer import map_tensors
from trainer.data.worker_processes import workers_end_with_this_process
from trainer.distributed.all_gather import gather_nested, gather_uneven, map_sorted
from trainer.engine.checkpoint import load, save, without_prefix
from trainer.engine.loader import Loaders
from trainer.engine.model import Adapter, EngineModule, EngineOptimizer, take_parameters
from trainer.errors import ConfigError, NotRunningError, did_you_mean, explain_torch_error, raise_problems
from trainer.fault_tolerance.collective_check import end_listening, listen, require_same_call
from trainer.fault_tolerance.failure import report_failure
from trainer.fault_tolerance.forked_child import end_forked_child
from trainer.guards.nonfinite import StateMonitor
from trainer.loop.setup import check_built, join_processes, start_processes
from trainer.loop.training_state import choose_seed
from trainer.names.misses import Answers, words_for
from trainer.optimizers import check_parameters
from trainer.precision import Precision
from trainer.runs.facts import RunFacts
from trainer.runs.resolved_config import resolve_config
from trainer.seed import seed_generators, seed_readers
from trainer.settings import Settings
from trainer.state.hook_changes import HookChanges
from trainer.strategy import (
    StepOptions,
    Strategy,
    backward_with,
    for_another_module,
    full_state_dict,
    has_gradients,
    marks_of_gradients,
    without_cast,
    wrapping_problems,
)

log = logging.getLogger("trainer")

ReduceOp = Literal["mean", "avg", "sum", "min", "max"]
_EXTREMES: dict[str, Callable[..., torch.Tensor]] = {"min": torch.amin, "max": torch.amax}


class Engine(Answers):
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

    With several devices the script is started once for each, at the `with`. The names are the same as in Lightning's
    Fabric; docs/engine.md shows what differs.

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
        words = words_for("Engine()", unknown)
        problems = [
            f"Engine has no argument {name!r}.{did_you_mean(name, (*known, 'deterministic'), words)}"
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
        self.config = resolve_config(settings, problems)
        if self.config.device_type == "xla":
            raise ConfigError("Engine does not run on torch_xla's devices: use a Trainer, or accelerator='cuda'.")
        self.strategy: Strategy = self.config.strategy
        self._blank: Strategy | None = None
        """A copy of the strategy before its first module."""
        self._models: list[EngineModule] = []
        self._optimizers: list[EngineOptimizer] = []
        self.loaders = Loaders(self)
        self._block: CodeType | None = None
        """The function that contains the `with` block."""
        self._last: EngineModule | None = None
        """The model that was called last with gradients."""
        self._given: Any = WeakIdKeyDictionary()  # parameters that no other model may have, as `setup` got them
        self._saved_at: list[tuple[int, int]] = []
        """The positions of the loaders in progress at the last save."""
        self._entered = self._begun = self._unstepped = False
        """`_unstepped`: between a backward and the step, or the `zero_grad`, that uses its gradients."""
        self._backwards = self.steps = self._calls = 0
        """`_calls`: calls of models and of backward that need all processes; they show that a process has continued
        without the others. Other calls do not count: processes may evaluate different numbers of batches."""
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
        config, strategy, seed = self.config, self.strategy, self.config.settings.seed
        cleanup.enter_context(workers_end_with_this_process())
        cleanup.callback(self._tear_down)
        join_processes(config, cleanup)
        self._blank = for_another_module(strategy)
        processes = strategy.processes
        self._stop = listen(processes, self._collectives, signals=False)
        cleanup.callback(end_listening, processes, self._stop)
        facts = {"strategy": type(strategy), **strategy._arguments, "precision": config.precision.name}
        facts |= {"seed": seed, "device": config.device_type, "torch": torch.__version__}
        RunFacts(strategy).agree_on(facts, "Give Engine the same arguments on all processes.")
        self.seed = choose_seed(seed, None, processes)
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
            explained = explain_torch_error(error)
            report_failure(stop.store, processes.rank, processes.world_size, explained or error)
            if explained is not None:
                raise explained from error
            if error is not given:
                raise error

    def _tear_down(self) -> None:
        for loader in self.loaders.alive():
            loader.close()
        for strategy in [*(model._strategy for model in self._models)] or [self.strategy]:
            strategy.teardown()

    def _collectives(self) -> int:
        return self.strategy.processes.begun + self._calls

    def _require_entered(self, call: str) -> None:
        if not self._entered:
            raise NotRunningError(f"engine.{call} must be called inside `with Engine(...) as engine:`.")

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
        config, adapter = self.config, Adapter(module)
        steps = StepOptions(accumulate_grad_batches=1, own_loop=True, models=models)
        problems = strategy.problems(config.precision, config.device_type, config.num_processes, steps, adapter)
        raise_problems([*problems, *wrapping_problems(adapter, strategy)], f"engine.setup({type(module).__name__})")
        check_parameters([*optimizers], module, shared=False)
        check_built(adapter, strategy, RunFacts(strategy), bool(optimizers))
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
            take_parameters(optimizer, names, dict(module.named_parameters()))
        prepared = strategy.setup_optimizers([*optimizers], steps) if optimizers else []
        finite, changes = StateMonitor(adapter, strategy, prepared), HookChanges(adapter, prepared, {})
        model = EngineModule(module, strategy, self, finite, changes, bool(optimizers))
        wrapped = [EngineOptimizer(optimizer, model, self, number) for number, optimizer in enumerate(prepared)]
        self._models.append(model)
        self._optimizers += wrapped
        return (model, *wrapped) if wrapped else model

    def _refuse_for_setup(self, module: Any, optimizers: tuple[Any, ...]) -> None:
        done = (EngineModule, EngineOptimizer)
        if any(isinstance(one, done) for one in (module, *optimizers)) or any(m.module is module for m in self._models):
            raise ConfigError("engine.setup: this module or optimizer is set up already; use what setup returned.")

    def setup_dataloaders(self, *dataloaders: Any, training: bool = True, use_distributed_sampler: bool = True) -> Any:
        """Return the loaders, each giving this process its part of the batches, on its device, from an exact position.

        A plain DataLoader is split over the processes. In training each process gets the same number of batches, if
        need be by a batch of repeated samples; see `EngineLoader.samples`. With `training=False` each sample comes
        exactly once, and processes may have different numbers of batches. Other iterables are used unchanged.

        Raises:
            ConfigError: a loader cannot be used, or the processes' loaders differ.
        """
        self._require_entered("setup_dataloaders")
        site = _site(sys._getframe(1), self._block)
        made = [
            self.loaders.set_up(one, training, use_distributed_sampler, f"{number} {site}")
            for number, one in enumerate(dataloaders)
        ]
        return made[0] if len(made) == 1 else made

    def begin(self) -> None:
        """Seed each reader differently from here on; called by the first batch or forward. Collective."""
        self._begun = True
        if self.world_size > 1 and not self.loaders.alive() and self.is_global_zero:
            log.warning(
                "no loader is set up: each process reads what its own loader gives, which is the same samples unless "
                "that knows of the processes. To split it: loader = engine.setup_dataloaders(loader)."
            )
        given = self.config.settings.seed is not None
        seed_readers(self.seed, given, self.strategy.processes, self.strategy.device)

    # -- a step --------------------------------------------------------------------------------------------------------

    def backward(self, tensor: torch.Tensor, *args: Any, model: EngineModule | None = None, **kwargs: Any) -> None:
        """Add the gradients of a loss, scaled and reduced over processes as precision and strategy need it.

        Args:
            tensor: the loss, a mean over this process's samples.
            args, kwargs: of `torch.Tensor.backward`, such as `retain_graph=True`.
            model: with several models, the one whose output the loss is. Default: the one that was called last.

        Raises:
            ConfigError: nothing is set up or was called, or there is no gradient.
        """
        chosen = model if model is not None else self._last
        if chosen is None or not tensor.requires_grad:
            raise ConfigError(
                "engine.backward needs a loss with a gradient, computed by a model that engine.setup(model, optimizer) "
                "returned. For another method than forward, call model.mark_forward_method('name') first."
            )
        strategy = chosen._strategy
        for optimizer in self._optimizers:
            strategy.scale_gradients(optimizer.optimizer)
        self._backwards += 1
        self._calls += not chosen._accumulates
        held = {one: marks_of_gradients(one.module.parameters()) for one in self._models if one._held}
        with backward_with(strategy, *args, **kwargs) if args or kwargs else nullcontext():
            strategy.backward(tensor)
        reached = [one for one, marks in held.items() if marks != marks_of_gradients(one.module.parameters())]
        for one in [*(one for one in self._models if one._accumulates), *reached, chosen]:
            one._held = one._accumulates
        self._unstepped = True
        for optimizer in self._optimizers:
            optimizer.waits |= has_gradients(optimizer.optimizer)

    @contextmanager
    def no_backward_sync(self, module: EngineModule, enabled: bool = True) -> Iterator[None]:
        """Do not reduce gradients over processes in the block, because more forwards and backwards of the step follow.

        `enabled=False` for the last micro-batch of a step, whose backward reduces all of them.
        """
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
        optimizer: EngineOptimizer,
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
        given = {"value": clip_val, "norm": max_norm}
        limits = {algorithm: limit for algorithm, limit in given.items() if limit is not None}
        if len(limits) != 1 or norm_type != 2:
            raise ConfigError("engine.clip_gradients: give either clip_val= or max_norm=, and norm_type=2.0.")
        algorithm, limit = limits.popitem()
        strategy = optimizer.model._strategy
        strategy.unscale(optimizer.optimizer)
        norm: torch.Tensor | None = strategy.clip_gradients(optimizer.optimizer, limit, algorithm)
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
            raise ConfigError("optimizer.step(closure) needs one process and no loss scaling: call backward first.")
        if closure is None and self._backwards == 0:
            raise ConfigError("optimizer.step() found no gradients: call engine.backward(loss), not loss.backward().")
        if optimizer.model._accumulates or (optimizer.model._held and strategy.multi_process):
            raise ConfigError(
                "optimizer.step() within no_backward_sync, or right after it, where gradients are not reduced yet: "
                "give enabled=False for the last micro-batch of a step."
            )
        if self._saved_at and self._saved_at == self.loaders.in_training():
            raise ConfigError(
                "engine.save was called before this optimizer.step(): a program that loads the checkpoint would leave "
                "out this step. Save after the last step of a batch."
            )
        self._saved_at = []
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
        strategy.end_step()
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
        """Return a context that makes layers in the dtype of the precision."""
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
        `data` is returned unchanged. `sync_grads` and `check`: as in `all_gather`.
        """
        self._begin_call("gather_uneven", None, check)
        return gather_uneven(data, self.device, self.strategy.processes, sync_grads)

    def all_reduce(self, data: Any, reduce_op: ReduceOp = "mean", check: bool = True) -> Any:
        """Return the tensors and numbers in `data`, each reduced over all processes to a tensor. Collective.

        `check`: as in `all_gather`.
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
                for number, one in enumerate(self.loaders.positions)
                if one.newest() is not None
            ]
            require_same_call(self.strategy.processes, f"engine.{call}", data, "".join(positions))
        self._calls += 1

    def _reduced(self, reduce_op: str, path: str, leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf, device=self.device)
        if not isinstance(leaf, torch.Tensor) or (self.world_size == 1 and leaf.is_floating_point()):
            return leaf
        if reduce_op in _EXTREMES:
            return _EXTREMES[reduce_op](gather_nested(leaf, self.device, None, False), 0)
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
        return obj if self.global_rank == src else map_tensors(received, lambda tensor: tensor.to(self.device))

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
                "engine.save between backward and optimizer.step(): a program that loads this would leave out the "
                "step. Save after it."
            )
        if self.world_size > 1 and any(one._held for one in self._models):
            raise ConfigError(
                "engine.save while gradients wait in no_backward_sync, different ones on each process: save after the "
                "step that uses them, or leave no_backward_sync out."
            )
        self.loaders.report_left()
        self.strategy.end_step()  # what an overflow of a dropped batch has found is in no checkpoint
        save(self, path, state, info or {})
        self._saved_at = self.loaders.in_training()

    def load(self, path: str | Path, state: dict[str, Any] | None = None, strict: bool = True) -> dict[str, Any]:
        """Restore a checkpoint into the objects of `state`, replace the data in it, and return the other saved data.

        Collective: call it after `setup` and `setup_dataloaders`, before the loop. With an optimizer in `state` the
        training resumes: loaders at the next batch, random generators in their saved states. Without one only the named
        objects are restored. A Trainer's checkpoint has one model and its optimizers.

        Args:
            state: the same names as in `save`; fewer, for the weights alone.
            strict: False: weights and names that are missing on either side stay unchanged.

        Raises:
            CheckpointError: there is no valid checkpoint, or it does not fit.
            ConfigError: something in `state` is not set up.
        """
        self._require_entered("load")
        self.strategy.processes.wait_for_all(f"engine.load({path})")
        return load(self, path, {} if state is None else state, strict)

    def go_on_from(self, steps: int) -> None:
        """Continue the count of steps from a checkpoint."""
        self.steps, self._begun, self._saved_at = steps, True, []

    @property
    def _scaler(self) -> Any:
        """The scaler of losses, one for all models; None without."""
        return next((model._strategy.scaler for model in self._models if model._trains), None)

    def full_state_dict(self, module: EngineModule, everywhere: bool = False) -> dict[str, torch.Tensor]:
        """Return a model's full weights, in CPU memory, under the keys of the plain module. Collective.

        Returned on process 0, or with `everywhere` on all; the others return an empty dict.
        """
        self.strategy.processes.wait_for_all("engine.full_state_dict")
        return without_prefix(full_state_dict(module._strategy, everywhere), "")


def _site(frame: FrameType | None, until: CodeType | None) -> str:
    """Return a call's place in the program, by functions and lines in them, from the `with` block on."""
    calls = []
    while frame is not None:
        code = frame.f_code
        calls.append(f"{code.co_qualname}:{frame.f_lineno - code.co_firstlineno}")
        frame = None if code is until else frame.f_back
    return " < ".join(calls)
