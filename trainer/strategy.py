"""Strategy: where a run happens. The defaults of every verb are "one process, one device"."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.optimizer_state import state_by_name, state_by_position
from trainer.checkpoint.shards import Loadable, Shard, materialize
from trainer.data.transfer import make_transfer, move_to
from trainer.distributed.process_group import SingleProcess
from trainer.errors import unknown_name_error
from trainer.model.activation_checkpointing import enable_activation_checkpointing
from trainer.model.blocks import BlockPolicy
from trainer.model.weights import load_weights
from trainer.module import TrainModule
from trainer.precision import NULL_CONTEXT, Precision
from trainer.seed import seed_accelerator


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The trainer's settings that strategies may need for a step. None: there is none, or it is not known yet."""

    accumulate_grad_batches: int | None = None
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    micro_batch_size: int | None = None
    """Samples of a micro-batch on one process."""
    schedulers: Sequence[object] | None = None
    run_dir: Path | None = None
    """Where a strategy may write what it was configured with; None: nothing is to be written."""

    @property
    def clip_norm(self) -> float | None:
        """The norm by which gradients are clipped; None: they are not, or by value."""
        return self.clip_value if self.clip_algorithm == "norm" else None


class Strategy:
    """Owns device placement, wrapping, backward, clipping and the optimizer's step.

    The trainer calls the verbs in the order in which they stand here. A new strategy overrides those it does
    differently; its constructor takes its options and touches no device. `str(strategy)` names it and its options.
    """

    name: ClassVar[str] = "base"
    multi_process: ClassVar[bool] = False
    """Whether this strategy runs one process per device, which then have to be started."""
    required_device: ClassVar[str | None] = None
    """The one type of device it is made for, and which accelerator="auto" then means; None: all but torch_xla's."""
    shards_state: bool = False
    """Whether a process holds only a part of the state: then all processes write checkpoints, and read their parts."""
    collective_forward: bool = False
    """Whether every forward pass talks to the other processes, so that all have to make the same number of them."""

    processes: SingleProcess = SingleProcess()
    """The processes of the run, and this one's rank; complete after `setup_environment`."""
    device: torch.device
    precision: Precision
    module: TrainModule
    scaler: torch.amp.GradScaler | None = None

    _keeps_wrapper: bool = False
    """Whether a module that it has wrapped stays so after the run, for other runs under it."""

    # -- before anything is started ------------------------------------------------------------------------------------

    def problems(
        self,
        precision: Precision,
        device_type: str,
        num_processes: int,
        config: StepConfig | None = None,
        module: TrainModule | None = None,
    ) -> list[str]:
        """Return what cannot work with this strategy, found before any process starts: sentences that name the fix.

        Asked when the trainer is made, and again by `fit`.

        Args:
            config: as far as it is known; None: nothing is.
            module: as given to `fit`, where `configure_model` has not run; None: not known yet.
        """
        if device_type == "xla":
            return [
                f"strategy {self.name!r} does not run on torch_xla's devices, where a step is recorded before it runs: "
                "use strategy='xla' or 'xla_fsdp'."
            ]
        if num_processes > 1 and not self.multi_process:
            return [
                f"strategy {self.name!r} runs one process, but devices x num_nodes asks for {num_processes}. "
                "Use strategy='ddp', or devices=1."
            ]
        return []

    def dry_run(self, module: TrainModule, precision: Precision) -> list[str]:
        """Return what the set-up would do with `module`, which is on the meta device, one line each. For a dry run,
        within `fake_process_group.fake_process_group`; neither strategy nor module can be used for training afterwards.

        Raises:
            ConfigError: what the set-up would refuse.
        """
        return []

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_environment(self, device_type: str, precision: Precision, device_ids: list[int] | None = None) -> None:
        """Choose this process's device and join the other processes, if any.

        Args:
            device_ids: the accelerators of this machine to use, by local rank; None: the first ones.
        """
        self.precision = precision
        self.device = self._choose_device(device_type, device_ids)
        self.scaler = precision.make_scaler(self.device)
        # On a machine without an accelerator every tensor is where it has to be.
        self._move = make_transfer(self.device)
        self._moves_batches = self.device.type != "cpu" or torch.accelerator.is_available() or precision.casts_batch

    def _choose_device(self, device_type: str, device_ids: list[int] | None) -> torch.device:
        """Return the device of this process; for accelerators the one with the number of the local rank."""
        local_rank = self.processes.local_rank
        if device_type == "cuda":
            device = torch.device("cuda", device_ids[local_rank] if device_ids else local_rank)
            torch.cuda.set_device(device)
            return device
        if device_type == "tpu":
            seed_accelerator()
            # TorchTPU gives each process a chip by its local rank, and there it is the only one.
            return torch.device("tpu", 0)
        return torch.device(device_type)

    def init_context(self, module: TrainModule, will_load_checkpoint: bool) -> AbstractContextManager[Any]:
        """The context in which `configure_model` builds layers. `will_load_checkpoint`: a checkpoint will be loaded."""
        return self.precision.init_context()

    def setup_module(
        self, module: TrainModule, for_training: bool, activation_checkpointing: BlockPolicy | None = None
    ) -> None:
        """Cast and place the module, and wrap it where the strategy needs that. Runs before `configure_optimizers`.

        Args:
            activation_checkpointing: the blocks whose activations the backward computes again; None: none.

        Raises:
            ConfigError: the policy matches nothing.
        """
        self.module = module
        if activation_checkpointing is not None:
            enable_activation_checkpointing(module, activation_checkpointing)
        self.precision.convert_module(module)
        module.to(self.device)

    def setup_optimizers(self, optimizers: list[Optimizer], config: StepConfig) -> list[Optimizer]:
        """Take the optimizers over. Return those to use from now on."""
        return optimizers

    # -- one step ------------------------------------------------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        """The batch on this process's device, floating tensors cast if the precision says so."""
        if not self._moves_batches:
            return batch
        batch = self._move(batch)
        return move_to(batch, self.precision.convert_batch) if self.precision.casts_batch else batch

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Context of one micro-batch's forward and backward; gradients need to be complete only after the `last`."""
        return NULL_CONTEXT

    def call(self, step: str, *args: Any) -> Any:
        """Call a step method of the module (`"training_step"`, ...) in the precision's context."""
        with self.precision.forward_context(self.device):
            return getattr(self.module, step)(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a scalar on this process's device, to those of the window.

        With manual optimization they are complete afterwards, over all processes.
        """
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling in the gradients, before anybody looks at them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> torch.Tensor | None:
        """Clip by the global norm over all parameters of `optimizer` (`"norm"`; returns it), or by `"value"`."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "norm":
            return nn.utils.clip_grad_norm_(parameters, value)
        nn.utils.clip_grad_value_(parameters, value)
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Update the weights. With loss scaling a step whose gradients are not finite is left out."""
        if closure is not None:
            optimizer.step(closure)
        elif self.scaler is not None:
            self.scaler.step(optimizer)
        else:
            optimizer.step()

    def end_step(self) -> None:
        """After all optimizers of a step: adapt the loss scale."""
        if self.scaler is not None:
            self.scaler.update()

    # -- state ---------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, torch.Tensor | Shard]:
        """Weights and buffers, by the keys of the plain module; of a tensor that is divided, this process's part.

        Where master weights are kept in another dtype, these.
        """
        return {**self.module.state_dict()}

    def load_module_state(self, state: Mapping[str, Loadable], strict: bool = True) -> None:
        """Take weights from `module_state` of any strategy.

        Raises:
            CheckpointError: names or shapes differ from the module's.
        """
        load_weights(self.module, {name: materialize(value) for name, value in state.items()}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's `state_dict` by names of parameters, and its kind; see `checkpoint/optimizer_state.py`."""
        return state_by_name(self.module, optimizer, optimizer.state_dict())

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take back what `optimizer_state` of any strategy gave.

        Raises:
            CheckpointError: it is that of another kind of optimizer, or of other parameters.
        """
        optimizer.load_state_dict(state_by_position(self.module, optimizer, state))

    def teardown(self) -> None:
        """Let go of the wrapper and leave the other processes. The module keeps its weights, on its device."""

    def __str__(self) -> str:
        """One line: the strategy and its options."""
        return self.name


def synchronize_buffers(strategy: Strategy) -> None:
    """Make replicated buffers equal on every process (rank 0's win): before evaluation and checkpoints."""
    strategy.processes.broadcast([buffer for buffer in strategy.module.buffers() if buffer.numel()])


def full_state_dict(strategy: Strategy, everywhere: bool) -> dict[str, torch.Tensor]:
    """Return the full weights and buffers in the CPU's memory; see `Trainer.full_state_dict`. Collective.

    One tensor after the other travels, so that only the result takes memory.
    """
    wanted = everywhere or strategy.processes.is_global_zero
    state: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, value in strategy.module_state().items():
        if not isinstance(value, Shard):
            state[name] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            continue
        if id(value) not in known:
            parts = strategy.processes.all_gather_object((value.extent, value.local.detach().reshape(-1).cpu()))
            known[id(value)] = whole = torch.empty(value.shape if wanted else 0, dtype=value.local.dtype)
            for extent, part in parts if wanted else ():
                if extent.numel:
                    extent.view_in(whole).copy_(part.view(extent.count, extent.length))
        state[name] = known[id(value)]
    return state if wanted else {}


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put the module in eval mode, and give each submodule its own former mode back afterwards."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training


# -- by name -----------------------------------------------------------------------------------------------------------

LIGHTNING_EQUIVALENTS = {
    "dp": "'ddp'",
    "ddp_spawn": "'ddp': it starts its processes itself",
    "ddp_notebook": "'ddp', in a script: several processes cannot be started from a notebook",
    "ddp_find_unused_parameters_true": "DDPStrategy(find_unused_parameters=True) from trainer.strategies",
    "ddp_find_unused_parameters_false": "'ddp'",
}
"""Names of other trainers' strategies, and what to give here."""


def available_strategies() -> Mapping[str, type[Strategy]]:
    """Return the classes of `trainer.strategies` by name."""
    strategies: Mapping[str, type[Strategy]] = import_module("trainer.strategies").STRATEGIES
    return strategies


def needed_device(strategy: str | Strategy) -> str | None:
    """Return the type of device that a strategy is made for; None: it runs on several, or is not known."""
    kind = strategy if isinstance(strategy, Strategy) else available_strategies().get(strategy)
    return None if kind is None else kind.required_device


def resolve_strategy(strategy: str | Strategy, num_processes: int, device_type: str = "cpu") -> tuple[Strategy, str]:
    """Return the strategy for a name or an instance, and why it was chosen.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(strategy, Strategy):
        return strategy, "given as an object"
    known = available_strategies()
    if strategy == "auto" and device_type == "xla":
        return known["xla"](), "auto: torch_xla's devices"
    if strategy == "auto":
        name = "ddp" if num_processes > 1 else "single_device"
        return known[name](), f"auto: {num_processes} process{'es' if num_processes > 1 else ''}"
    if strategy not in known:
        raise unknown_name_error("strategy", strategy, [*known, "auto"], LIGHTNING_EQUIVALENTS)
    return known[strategy](), "given by name"


# -- modules that cannot be wrapped ------------------------------------------------------------------------------------


def wrapping_problems(module: TrainModule, strategy: Strategy) -> list[str]:
    """Wrappers of torch's that are in the module already, though strategies wrap by themselves."""
    if module._wrapper is not None:
        if strategy._keeps_wrapper:
            return []
        return [
            f"{type(module).__name__} was divided by another strategy in a run before, and cannot be used under "
            f"{strategy.name!r}: make it anew, with load_from_checkpoint for instance."
        ]
    problems, wrappers = [], _wrappers()
    for name, child in module.named_modules():
        wrapper = next((words for kind, words in wrappers if isinstance(child, kind)), None)
        if wrapper is not None:
            place = f"{type(module).__name__}.{name}" if name else type(module).__name__
            problems.append(
                f"{place} is already wrapped by {wrapper}, and strategy {strategy.name!r} wraps by itself: "
                "give it unwrapped."
            )
    return problems


def _wrappers() -> list[tuple[type, str]]:
    """The wrappers that have been imported: a module cannot have others."""
    homes = (
        ("torch.nn.parallel.distributed", "DistributedDataParallel", "DistributedDataParallel (its .module is inside)"),
        ("torch.nn.parallel.data_parallel", "DataParallel", "DataParallel (its .module is inside)"),
        ("torch.distributed.fsdp", "FSDPModule", "fully_shard"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
    )
    there = [(sys.modules.get(home), name, words) for home, name, words in homes]
    return [(getattr(home, name), words) for home, name, words in there if hasattr(home, name)]
