"""Strategy: where a run happens. The defaults of every verb are "one process, one device"."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.optimizer_state import state_by_name, state_by_position
from trainer.checkpoint.shards import Loadable, Shard, materialize
from trainer.data.transfer import make_transfer, move_to
from trainer.errors import unknown_name_error
from trainer.model.activation_checkpointing import enable_activation_checkpointing
from trainer.model.blocks import BlockPolicy
from trainer.model.compile import Compilation, compile_in_place
from trainer.model.weights import load_weights
from trainer.module import TrainModule
from trainer.precision import NULL_CONTEXT, Precision
from trainer.seed import seed_accelerator

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from trainer.model.memory import MemoryLayout
    from trainer.settings import Settings

T = TypeVar("T")


class Strategy:
    """Owns device placement, wrapping, backward, clipping, the optimizer's step, and talk between processes.

    The trainer calls the verbs in the order in which they stand here. A new strategy overrides those it does
    differently; its constructor takes its options and touches no device.
    """

    name: ClassVar[str] = "base"
    multi_process: ClassVar[bool] = False
    """Whether this strategy runs one process per device, which then have to be started."""
    required_device: ClassVar[str | None] = None
    """The one type of device it is made for, and which accelerator="auto" then means; None: all but torch_xla's."""
    shards_state: bool = False
    """Whether a process holds only a part of the state: then all processes write checkpoints, and read their parts."""
    reusable_wrapper: bool = False
    """Whether a module that it has divided stays so after the run, for other runs under it."""
    collective_forward: bool = False
    """Whether every forward pass talks to the other processes, so that all have to make the same number of them."""

    device: torch.device
    precision: Precision
    module: TrainModule
    scaler: torch.amp.GradScaler | None = None
    moves_batches: bool = True
    move: Callable[[Any], Any]
    """Moves a batch to the device."""
    device_ids: list[int] | None = None
    """Which accelerators of this machine to use, by local rank; None: the first ones."""
    gradient_average: int = 1
    """By what the strategy divides the sum of gradients over processes."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    # -- before anything is started ------------------------------------------------------------------------------------

    def problems(
        self, precision: Precision, device_type: str, num_processes: int, settings: Settings | None = None
    ) -> list[str]:
        """What cannot work with this strategy, found before any process starts: one sentence each, naming the fix.

        `settings`: the trainer's other arguments, where they are known.
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

    def training_problems(
        self, module: TrainModule, window: int, clip_value: float | None, clip_by: str, batch_size: int | None = None
    ) -> list[str]:
        """What cannot work for this training, found before any process starts: one sentence each, naming the fix.

        Args:
            module: as given to `fit`; `configure_model` has not run.
            window: micro-batches of a step.
            clip_value, clip_by: `gradient_clip_val` and `gradient_clip_algorithm`.
            batch_size: samples of a micro-batch on one process, where it is known.
        """
        return []

    def dry_run(self, module: TrainModule, precision: Precision) -> list[str]:
        """What the set-up would do with `module`, which is on the meta device: one line each. For a dry run, within
        `fake_process_group.fake_process_group`; neither strategy nor module can be used for training afterwards.

        Raises:
            ConfigError: what the set-up would refuse.
        """
        return []

    def memory_layout(self) -> MemoryLayout | None:
        """What is divided among the processes, and what is on the host, for an estimate of the memory that is needed.

        None: there is no arithmetic for it.
        """
        return None

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_environment(self, device_type: str, precision: Precision) -> None:
        """Choose this process's device and join the other processes, if any."""
        self.precision = precision
        self.device = self.choose_device(device_type)
        self.scaler = precision.make_scaler(self.device)
        # On a machine without an accelerator every tensor is where it has to be.
        self.move = make_transfer(self.device)
        self.moves_batches = self.device.type != "cpu" or torch.accelerator.is_available() or precision.casts_batch

    def choose_device(self, device_type: str) -> torch.device:
        """The device of this process; for accelerators the one with the number of the local rank."""
        if device_type == "cuda":
            device = torch.device("cuda", self.device_ids[self.local_rank] if self.device_ids else self.local_rank)
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

    def checkpoint_activations(self, module: TrainModule, policy: BlockPolicy) -> None:
        """From now on, compute the activations of these blocks again in the backward instead of keeping them.

        Raises:
            ConfigError: the policy matches nothing.
        """
        enable_activation_checkpointing(module, policy)

    def setup_module(self, module: TrainModule, for_training: bool) -> None:
        """Cast and place the module, and wrap it where the strategy needs that. Runs before `configure_optimizers`."""
        self.module = module
        self.precision.convert_module(module)
        module.to(self.device)

    def compile_module(self, module: TrainModule, compilation: Compilation) -> list[nn.Module]:
        """Have torch compile the module's parts at their first call, in place. Runs after `setup_module`.

        Returns:
            The parts; after the run the trainer makes them ordinary again.
        """
        return compile_in_place(module, compilation)

    def setup_optimizers(self, optimizers: list[Optimizer], clip_norm: float | None) -> list[Optimizer]:
        """Take the optimizers over; returns those to use from now on. `clip_norm`: see `clip_gradients`."""
        return optimizers

    # -- one step ------------------------------------------------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        """The batch on this process's device, floating tensors cast if the precision says so."""
        if not self.moves_batches:
            return batch
        batch = self.move(batch)
        return move_to(batch, self.precision.convert_batch) if self.precision.casts_batch else batch

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Context of one micro-batch's forward and backward; gradients need to be complete only after the `last`."""
        return NULL_CONTEXT

    def call(self, step: str, *args: Any) -> Any:
        """Call a step method of the module (`"training_step"`, ...) in the precision's context."""
        with self.precision.forward_context(self.device):
            return getattr(self.module, step)(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` to those of the window. `loss` is a scalar on this process's device."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def reduce_gradients(self) -> None:
        """In manual optimization, after a backward: bring the gradients of all processes together."""

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

    # -- talk between processes ----------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    @property
    def store(self) -> Store | None:
        """The key-value store that all processes share; None for a single process."""
        return None

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, on its device and without reading it on the host."""
        return value

    def all_gather_object(self, value: T) -> list[T]:
        """Every process's `value` (small, picklable data), in the order of ranks, on every process."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Rank 0's `value` on every process."""
        return value

    def barrier(self) -> None:
        """Wait until every process is here."""

    def synchronize_buffers(self) -> None:
        """Make replicated buffers equal on every process (rank 0's win): before evaluation and checkpoints."""

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

    # -- what it is, in words ------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One line: the strategy and its options."""
        return self.name


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
        if strategy.reusable_wrapper:
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
