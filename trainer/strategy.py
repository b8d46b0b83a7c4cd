"""Strategy: the base class of strategies, whose defaults run one process on one device."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import handle_torch_function, has_torch_function

from trainer.arguments import ChecksArguments, given_arguments
from trainer.checkpoint.optimizer_state import load_by_position, state_by_name, state_by_position
from trainer.checkpoint.shards import Loadable, Shard, StoredTensor, in_memory, materialize, read_when_used, stored
from trainer.data.transfer import make_transfer, map_leaves
from trainer.distributed.devices import device_number
from trainer.distributed.process_group import SingleProcess
from trainer.errors import did_you_mean, unknown_name_error
from trainer.model.activation_checkpointing import enable_activation_checkpointing
from trainer.model.blocks import BlockPolicy
from trainer.model.dispatched import dispatched_models, move_the_rest
from trainer.model.full_parameters import Block, slots_of
from trainer.model.gradients import norm_of, with_dense_gradients
from trainer.model.init_device import refuse_meta_tensors
from trainer.model.weights import SettingParts, load_weights, move_module, with_parts
from trainer.module import TrainModule
from trainer.names.misses import Answers, member_words, same_strategy, words_for
from trainer.optimizers import parameters_of
from trainer.precision import NULL_CONTEXT, Precision
from trainer.seed import seed_accelerator


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The settings that a strategy may need for a step. None: not set, or not known yet."""

    accumulate_grad_batches: int | None = None
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    micro_batch_size: int | None = None
    """Samples of a micro-batch on one process."""
    schedulers: Sequence[object] | None = None
    run_dir: Path | None = None
    """Directory for a strategy's configuration file; None: write nothing."""
    compiles_module: bool = False
    """True if the module is compiled as one, not block by block."""
    reuses_memory: bool = False
    """True if each forward overwrites the results of the last backward, as CUDA graphs do."""
    unfreezing: str | None = None
    """The callback that unfreezes parameters during the run, and adds them to an optimizer; None: there is none."""
    own_loop: bool = False
    """True for an `Engine`: the loop is the user's, and gives the norm to clip by in each step."""
    models: int = 1
    """Number of models that take turns in such a loop, at least one of them trained."""

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of the gradients, which are clipped to it; None: no clipping by norm."""
        return self.clip_value if self.clip_algorithm == "norm" else None


class SkippedBatch(NamedTuple):
    """The outputs of a `training_step` that returned None, with a strategy that needs a backward all the same."""

    loss: torch.Tensor
    """A loss whose gradient is zero, for each parameter."""


class Strategy(ChecksArguments, Answers):
    """Owns device placement, wrapping, backward, clipping and the optimizer's step.

    The methods are listed in the order of the trainer's calls. A new strategy overrides some of them; its
    constructor takes its options and touches no device. `str(strategy)` names the strategy and its options.
    """

    name: ClassVar[str] = "base"
    multi_process: ClassVar[bool] = False
    """True if the strategy runs one process per device."""
    required_device: ClassVar[str | None] = None
    """The only type of device that the strategy supports, chosen by accelerator="auto"; None: all but torch_xla's."""
    shards_state: bool = False
    """True if the state is sharded: every process writes and reads its shards of a checkpoint."""
    collective_forward: bool = False
    """True if a forward pass contains collectives: all processes must run the same number of forward passes."""

    processes: SingleProcess = SingleProcess()
    """The processes of the run and the rank of this process; complete after `setup_environment`."""
    device: torch.device
    precision: Precision
    module: TrainModule
    scaler: torch.amp.GradScaler | None = None

    _arguments: Mapping[str, Any] = {}
    """The arguments that the constructor was given, by name; equal on all processes."""
    _plain_forward: bool = False
    """True if the precision's context of a forward does nothing, so that it can be left out."""
    _blocks: tuple[Block, ...] = ()
    """The blocks of `full_parameters` in progress."""
    _run_backward: Callable[..., Any] = staticmethod(torch.Tensor.backward)
    """Computes the gradients of a loss: the module's `backward`, if it overrides it."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Keep the arguments: the processes compare their strategies by them."""
        self = super().__new__(cls)
        self._arguments = given_arguments(cls, args, options)
        return self

    def __init__(self) -> None:
        pass

    # -- checks before the processes start -----------------------------------------------------------------------------

    def problems(
        self,
        precision: Precision,
        device_type: str,
        num_processes: int,
        config: StepOptions | None = None,
        module: TrainModule | None = None,
    ) -> list[str]:
        """Return the problems of a run with this strategy, as sentences that name the fix. No process is started.

        Called when the trainer is made, and again by `fit`.

        Args:
            config: the settings known so far; None: none.
            module: the argument of `fit`, before `configure_model`; None: not known yet.
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
        if device_type == "mps" and precision.weights is torch.float64:
            return [f"precision={precision.name!r} on MPS, which has no float64: use '32-true', or accelerator='cpu'."]
        return []

    def dry_run(self, module: TrainModule, precision: Precision) -> list[str]:
        """Return lines that describe the set-up of `module`, a module on the meta device.

        Called within `fake_process_group.fake_process_group`. Afterwards neither strategy nor module can be trained.

        Raises:
            ConfigError: the set-up would raise it.
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
        self._plain_forward = precision.forward_context(self.device) is NULL_CONTEXT
        self._unscaled: dict[int, Optimizer] = {}
        """The optimizers, by `id`, whose gradients are unscaled in the step in progress."""
        self._scale: list[torch.Tensor] = []
        self._scaled_by: dict[int, torch.Tensor] = {}
        """Loss scales of gradients, by the `id` of their optimizer; in `_scale` the current one, if known. Both with
        manual optimization."""
        # On a machine without an accelerator no tensor has to move.
        self._move = make_transfer(self.device)
        self._moves_batches = self.device.type != "cpu" or torch.accelerator.is_available() or precision.casts_batch

    def _choose_device(self, device_type: str, device_ids: list[int] | None) -> torch.device:
        """Return the device of this process; accelerators are chosen by local rank."""
        local_rank = self.processes.local_rank
        if device_type == "tpu":
            seed_accelerator()
            # TorchTPU assigns a chip by local rank, and a process sees only that chip.
            return torch.device("tpu", 0)
        if device_type in ("cpu", "mps"):
            return torch.device(device_type)
        accelerators = torch.get_device_module(torch.device(device_type))
        device = torch.device(device_type, device_number(local_rank, device_ids, accelerators.device_count()))
        accelerators.set_device(device)
        return device

    def init_context(self, module: TrainModule, will_load_checkpoint: bool) -> AbstractContextManager[Any]:
        """Return the context of `configure_model`. `will_load_checkpoint`: a checkpoint will be loaded afterwards."""
        return self.precision.init_context(module)

    def setup_module(
        self, module: TrainModule, for_training: bool, activation_checkpointing: BlockPolicy | None = None
    ) -> None:
        """Cast, move and wrap the module. Called before `configure_optimizers`.

        Args:
            activation_checkpointing: the blocks whose activations are recomputed in backward; None: none.

        Raises:
            ConfigError: the policy matches nothing, or a parameter is on the meta device.
        """
        self.module = module
        self._run_backward = module.backward if module.overrides("backward") else torch.Tensor.backward
        if dispatched_models(module):
            move_the_rest(module, self.device)
            return
        refuse_meta_tensors(module)
        if activation_checkpointing is not None:
            enable_activation_checkpointing(module, activation_checkpointing)
        self.precision.convert_module(module)
        move_module(module, self.device)

    def setup_optimizers(self, optimizers: list[Optimizer], config: StepOptions) -> list[Optimizer]:
        """Prepare the optimizers; return those that the loop uses."""
        return optimizers

    # -- one step ------------------------------------------------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        """Return the batch on this process's device, floating tensors cast if the precision casts batches."""
        if not self._moves_batches:
            return batch
        batch = self._move(batch)
        return map_leaves(batch, self.precision.convert_batch) if self.precision.casts_batch else batch

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward and backward; gradients may be incomplete until the `last`."""
        return NULL_CONTEXT

    def call_step(self, step: str, *args: Any) -> Any:
        """Call a step method of the module (`"training_step"`, ...) in the precision's context.

        Where `training_step` returned None and the backward of a skipped batch is needed: return a `SkippedBatch`.
        """
        if self._plain_forward:
            return getattr(self.module, step)(*args)
        with self.precision.forward_context(self.device):
            return getattr(self.module, step)(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a scalar on this process's device, to the window's gradients.

        With manual optimization the gradients are reduced over all processes afterwards.
        """
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._run_backward(loss)

    def end_window(self) -> None:
        """Complete the gradients of a window; called after the backward of its last micro-batch."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling of the gradients, unless this is done already; called before hooks and clipping."""
        if self.scaler is not None and has_gradients(optimizer) and id(optimizer) not in self._unscaled:
            if self._scaled_by:
                self.scale_gradients(optimizer)
            self.scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = optimizer

    def scale_gradients(self, optimizer: Optimizer) -> None:
        """Scale the gradients that wait for a step of `optimizer` by the current loss scale, before a backward adds to
        them: clipping may have unscaled them, or the scale may be another one now."""
        scaler = self.scaler
        if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
            return
        if scaler._scale is None:
            scaler.scale(torch.zeros((), device=self.device))  # makes it
        if not self._scale:
            self._scale.append(torch.as_tensor(scaler._scale).clone())
        (scale,) = self._scale
        before = self._scaled_by.get(id(optimizer), scale)
        self._scaled_by[id(optimizer)] = scale
        if self._unscaled.pop(id(optimizer), None) is not None:
            state = _set_aside(scaler, optimizer)
            overflows = torch.stack([*state["found_inf_per_device"].values()]).sum()
            factor = torch.where(overflows > 0, torch.inf, scale)  # clipping may have made them finite
        elif before is not scale:
            factor = scale / before
        else:
            return
        for parameter in parameters_of([optimizer]):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> torch.Tensor | None:
        """Clip gradients of `optimizer` by their global norm (`"norm"`; return the norm), or by `"value"`.

        An infinite norm clips nothing: the norm is only measured. None: it is known after the step only.
        """
        parameters = with_dense_gradients(p for group in optimizer.param_groups for p in group["params"])
        if algorithm == "norm":
            norm = norm_of([p.grad for p in parameters if p.grad is not None])
            if value < math.inf:
                nn.utils.clip_grads_with_norm_(parameters, value, norm)
            return norm
        nn.utils.clip_grad_value_(parameters, value)
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        """Update the weights. With loss scaling a step with gradients that are not finite is skipped.

        Args:
            options: further arguments of the optimizer's `step`, with manual optimization.
        """
        if closure is not None:
            optimizer.step(closure, **options)
        elif self.scaler is not None and has_gradients(optimizer):
            self.scaler.step(optimizer, **options)
            # With manual optimization it may step again before the scale changes, which torch refuses otherwise.
            _set_aside(self.scaler, optimizer)
            self._unscaled.pop(id(optimizer), None)
            self._scaled_by.pop(id(optimizer), None)
        else:
            optimizer.step(**options)

    def end_step(self) -> None:
        """Update the loss scale, if an optimizer used it; called after all optimizers of a step."""
        if self.scaler is not None:
            for optimizer in [*self._unscaled.values()]:
                self.scale_gradients(optimizer)  # clipped and not stepped: they wait for a later step
            if any(state["found_inf_per_device"] for state in self.scaler._per_optimizer_states.values()):
                self.scaler.update()
                self._scale.clear()

    def parameters_changed(self, changes: str, optimizers: list[Optimizer]) -> None:
        """Adapt to parameters that were frozen, unfrozen or added while training, the same ones on all processes.

        Args:
            changes: a description, with the names of the parameters.

        Raises:
            ConfigError: the strategy cannot train them.
        """

    def release_gathered(self) -> None:
        """Free what forwards without a backward have gathered; hooks that follow see and change the parameters."""

    def full_parameters(
        self, module: nn.Module, write: bool, on_rank_zero: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context with full parameters in a part of the module; see `Trainer.full_parameters`. Collective.

        Args:
            on_rank_zero: gathered parameters are on rank 0 only, in CPU memory. Not with `write`.
        """
        return _full_in_place(self, module, write)

    # -- state ---------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, torch.Tensor | Shard]:
        """Return weights and buffers by the keys of the plain module; of a sharded tensor, this process's shard.

        Master weights, if there are any, are returned in place of the weights in low precision.
        """
        return with_parts(self.module.state_dict())

    def load_module_state(self, state: Mapping[str, Loadable | Shard], strict: bool = True, hooks: bool = True) -> None:
        """Load what `module_state` of any strategy returned, as full tensors, by the module's `load_state_dict`.

        Args:
            hooks: False: without its hooks, because the values come from the module in its present form. They may be a
                part of the state, and shards of this process.

        Raises:
            CheckpointError: names or shapes differ from the module's.
        """
        load_values(self.module, state, strict, hooks, Values())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's class and `state_dict` by parameter name; see `checkpoint/optimizer_state.py`."""
        return state_by_name(self.module, optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` of any strategy returned.

        Raises:
            CheckpointError: the state belongs to another class of optimizer, or to other parameters.
        """
        load_by_position(optimizer, state_by_position(self.module, optimizer, state))

    def teardown(self) -> None:
        """Remove the wrapper and leave the process group. The module keeps its weights, on its device."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if any(name in vars(one).get("__annotations__", {}) for one in type(self).__mro__):
                raise AttributeError(f"{type(self).__name__}.{name} exists from the start of a run: call fit first.")
            return super().__getattr__(name)

    def __str__(self) -> str:
        """Return the strategy and its options in one line."""
        return self.name


def inherits(strategy: Strategy, method: str) -> bool:
    """Whether a strategy does not override a method of `Strategy`."""
    return getattr(getattr(strategy, method), "__func__", None) is getattr(Strategy, method)


def given_checkpoint_io(strategy: Strategy) -> Any:
    """Return the CheckpointIO of `Trainer(plugins=)`, or that was set on the strategy; None without one."""
    return vars(strategy).get("checkpoint_io")


def without_cast(strategy: Strategy) -> Callable[[Any], Any]:
    """Return `to_device` without a cast to 16 bits, which would round labels."""
    rounds = strategy._moves_batches and strategy.precision.weights.itemsize == 2
    return strategy._move if rounds else strategy.to_device


def keeps_batches(strategy: Strategy) -> bool:
    """Whether `to_device` returns each batch unchanged; known after `setup_environment`."""
    return inherits(strategy, "to_device") and not strategy._moves_batches


def keeps_step(strategy: Strategy) -> bool:
    """Whether `call_step` only calls the module's method; known after `setup_environment`."""
    return inherits(strategy, "call_step") and strategy._plain_forward


def for_another_module(strategy: Strategy) -> Strategy:
    """Return a copy of a strategy that has joined the processes and has no module yet; both share the loss scale."""
    return copy.copy(strategy)


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether a parameter of the optimizer has a gradient."""
    return any(parameter.grad is not None for parameter in parameters_of([optimizer]))


def _set_aside(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> dict[str, Any]:
    """Have a scaler forget that it has unscaled an optimizer's gradients; return what it has found in them."""
    states = scaler._per_optimizer_states
    state = states.pop(id(optimizer))
    states[id(state)] = state  # `update` uses the values only
    return state


def marks_of_gradients(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int] | None]:
    """Return numbers that change with the gradients."""
    gradients = [parameter.grad for parameter in parameters]
    # FSDP2 adds to the shard below a DTensor, which does not change the DTensor's version.
    shards = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
    return [None if shard is None else (id(shard), shard._version) for shard in shards]


def synchronize_buffers(strategy: Strategy) -> None:
    """Broadcast reader 0's replicated buffers; called before evaluation and checkpoints."""
    strategy.processes.broadcast_over_readers([buffer for buffer in strategy.module.buffers() if buffer.numel()])


DIRECT_BACKWARD = (
    "loss.backward() leaves the gradients unscaled, and different on every process: call self.manual_backward(loss) "
    "instead."
)

UNSCALED_BACKWARD = (
    "training_step has called loss.backward(), without the loss scaling that this precision needs: return the sum of "
    "the losses instead, or set automatic_optimization = False and call self.manual_backward(loss)."
)

_FIRST_STEPS, _EVERY = 3, 64


class ChangingBuffers:
    """The buffers that steps change and compute with: each step begins with reader 0's.

    Each process changes them by its own samples: centers, codebooks, queues. Without this an evaluation or a
    checkpoint, which replicates buffers, would change the training. Which ones there are, the processes agree on in the
    first steps and then in every 64th, so that models without any pay nothing in the others. Statistics of norms are
    left out: no training step reads them.

    Args:
        strategy: of the run.
        names: those that the checkpoint of a resumed run knows.
    """

    def __init__(self, strategy: Strategy, names: Iterable[str] = ()) -> None:
        self._processes = strategy.processes
        self._places = _places_of_buffers(strategy)
        self.names = {*names}
        """The buffers that a step of some process has changed, by name."""
        self._seen, self._followed = self._versions(), self._places_of_names()
        self._begins = True
        """True until `follow` is called."""

    def _places_of_names(self) -> list[tuple[nn.Module, str]]:
        return [place for key, place in self._places.items() if key in self.names]

    def _versions(self) -> dict[str, tuple[torch.Tensor | None, int]]:
        now = {key: owner._buffers[name] for key, (owner, name) in self._places.items()}
        return {key: (buffer, 0 if buffer is None else buffer._version) for key, buffer in now.items()}

    def follow(self, step: int) -> None:
        """Broadcast the buffers that steps change, before step number `step`. Collective."""
        looks = bool(self._places) and (step < _FIRST_STEPS or step % _EVERY == 0)
        if self._begins and self._places:  # a run before this one may have left each process its own
            self._broadcast(self._places.values())
            self._seen = self._versions()
        self._begins = False
        if looks:
            now = self._versions()
            changed = [now[key][0] is not seen or now[key][1] != count for key, (seen, count) in self._seen.items()]
            absent = [now[key][0] is None for key in self._seen]
            found = self._processes.sum(torch.tensor([changed, absent], dtype=torch.int32, device="cpu")).tolist()
            self.names |= {key for key, changes, lack in zip(self._seen, *found, strict=True) if changes and not lack}
            self._followed = self._places_of_names()
        if self._followed:
            self._broadcast(self._followed)
        if looks:
            self._seen = self._versions()

    def _broadcast(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        buffers = (owner._buffers[name] for owner, name in places)
        self._processes.broadcast_over_readers([buffer for buffer in buffers if buffer is not None])


def _places_of_buffers(strategy: Strategy) -> dict[str, tuple[nn.Module, str]]:
    """Return the owner and name of each buffer that steps may change, by path; empty if torch's DDP broadcasts them."""
    wrapped: Any = getattr(strategy, "wrapped", None)
    # With `broadcast_buffers`, DDP does not know the buffers that come later.
    if isinstance(wrapped, DistributedDataParallel) and (wrapped.modules_buffers or not wrapped.broadcast_buffers):
        return {}
    return {
        f"{path}.{name}": (owner, name)
        for path, owner in strategy.module.named_modules()
        if not isinstance(owner, _NormBase)
        for name, buffer in owner._buffers.items()
        if buffer is None or buffer.numel()
    }


class Values:
    """Sets a module's tensors from a checkpoint's tensors or from shards. This class sets full tensors."""

    def shape_of_part(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Return the full shape of a tensor that only `set` can set; None for any other."""
        return None

    def set(self, tensor: torch.Tensor, value: Loadable | Shard) -> None:
        """Set a tensor from a full one, or from the shard that `module_state` returned of it."""
        with torch.no_grad():
            tensor.copy_(value.local if isinstance(value, Shard) else materialize(value))


def load_values(
    module: nn.Module, state: Mapping[str, Loadable | Shard], strict: bool, hooks: bool, values: Values
) -> None:
    """Do what `Strategy.load_module_state` says; `values` sets what is not full."""
    if not hooks:
        for name, tensor in with_parts(module.state_dict(keep_vars=True)).items():
            if name in state:
                values.set(tensor, state[name])
        return
    buffers = dict(module.named_buffers(remove_duplicate=False))
    # Parameters are read one at a time, also for other processes; values that the module may keep are read before.
    given: dict[str, Any] = dict(state)
    late = {name for name, one in given.items() if isinstance(one, StoredTensor) and name not in buffers}
    full = {name: read_when_used(one) if name in late else in_memory(one) for name, one in given.items()}
    with SettingParts(values.shape_of_part, lambda part, value: values.set(part, stored(value))):
        load_weights(module, full, strict)


def full_state_dict(
    strategy: Strategy, everywhere: bool, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the full weights and buffers in CPU memory; see `Trainer.full_state_dict`. Collective.

    Tensors are gathered one at a time, so that only the result takes memory.

    Args:
        names: of the tensors to return; None: all.
    """
    wanted = everywhere or strategy.processes.is_global_zero
    state: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, value in strategy.module_state().items():
        if names is not None and name not in names:
            continue
        if not isinstance(value, Shard):
            state[name] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            continue
        if id(value) not in known:
            parts = strategy.processes.all_gather_object((value.extent, value.local.detach().reshape(-1).cpu()))
            known[id(value)] = full = torch.empty(value.shape if wanted else 0, dtype=value.local.dtype)
            for extent, part in parts if wanted else ():
                if extent.numel:
                    extent.view_in(full).copy_(part.view(extent.count, extent.length))
        state[name] = known[id(value)]
    return state if wanted else {}


class OwnParameter(NamedTuple):
    """A parameter as one process holds it."""

    name: str
    local: torch.Tensor
    """The values, or of a sharded parameter this process's elements; the memory that the optimizer changes."""
    is_shard: bool
    counts: bool
    """False for a copy of elements that count on another process."""


def own_parameters(strategy: Strategy) -> list[OwnParameter]:
    """Return the parameters that require a gradient, as this process holds them; master weights where there are any."""
    state = strategy.module_state()
    found = []
    for name, parameter in strategy.module.named_parameters():
        value = state[name]
        if not parameter.requires_grad:
            continue
        if isinstance(value, Shard):
            found.append(OwnParameter(name, value.local, is_shard=True, counts=value.extent.numel > 0))
        else:
            found.append(OwnParameter(name, value, is_shard=False, counts=True))
    return found


def total_norm(strategy: Strategy, tensors: Sequence[OwnParameter]) -> torch.Tensor:
    """Return the norm of all elements on all processes, a tensor on the device. Collective under sharding."""
    replicated = norm_of([one.local for one in tensors if not one.is_shard]).to(strategy.device)
    if not strategy.shards_state:
        return replicated
    shards = norm_of([one.local for one in tensors if one.is_shard and one.counts])
    return (replicated.square() + strategy.processes.sum(shards.to(strategy.device).square())).sqrt()


@contextmanager
def _full_in_place(strategy: Strategy, module: nn.Module, write: bool) -> Iterator[None]:
    """Do what `Strategy.full_parameters` says with parameters that are full on each process."""
    slots = slots_of(module, strategy.module)
    block, outer = Block(slots, write, keep=True), strategy._blocks
    strategy._blocks = (*outer, block)
    try:
        with block.checked():
            yield
    finally:
        strategy._blocks = outer
    if write:
        strategy.processes.broadcast([*module.parameters(), *(b for b in module.buffers() if b.numel())])
        for one in outer:
            one.take(slots)


@contextmanager
def backward_with(strategy: Strategy, *args: Any, **options: Any) -> Iterator[None]:
    """Have the backward in the block use these arguments of `torch.Tensor.backward`."""
    before = call = strategy._run_backward
    inputs = options.get("inputs")
    if before is torch.Tensor.backward and inputs is not None:
        options["inputs"] = inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        if has_torch_function(inputs):  # torch does not ask them: of a shard, the gradient is at the full parameter
            call = partial(handle_torch_function, torch.autograd.backward, inputs)  # type: ignore[call-arg]
    strategy._run_backward = lambda loss: call(loss, *args, **options)
    try:
        yield
    finally:
        strategy._run_backward = before


_MODES_IN_TRAINING: WeakKeyDictionary[nn.Module, dict[nn.Module, bool]] = WeakKeyDictionary()
"""The training modes of the submodules of each module that is being evaluated."""


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put the module in eval mode; restore the mode of each submodule on exit."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    first = _MODES_IN_TRAINING.setdefault(module, modes) is modes
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training
        if first:
            del _MODES_IN_TRAINING[module]


def modes_in_training(module: nn.Module) -> Mapping[nn.Module, bool]:
    """Return the submodules' modes from before the evaluation in progress; empty outside of an evaluation."""
    return _MODES_IN_TRAINING.get(module, {})


# -- by name -----------------------------------------------------------------------------------------------------------


def available_strategies() -> Mapping[str, type[Strategy]]:
    """Return the classes of `trainer.strategies` by name."""
    strategies: Mapping[str, type[Strategy]] = import_module("trainer.strategies").STRATEGIES
    return strategies


def needed_device(strategy: str | Strategy) -> str | None:
    """Return the only type of device that a strategy supports; None: several types, or an unknown strategy."""
    kind = strategy if isinstance(strategy, Strategy) else available_strategies().get(strategy)
    return None if kind is None else kind.required_device


def resolve_strategy(strategy: str | Strategy, num_processes: int, device_type: str = "cpu") -> tuple[Strategy, str]:
    """Return the strategy for a name or an instance, and the reason for the choice.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(strategy, Strategy):
        return strategy, "given as an object"
    known = available_strategies()
    if strategy == "auto":
        if device_type == "xla":
            return known["xla"](), "auto: torch_xla's devices"
        return known["ddp" if num_processes > 1 else "single_device"](), f"auto: {num_processes} processes"
    name, options = (strategy, {}) if strategy in known else same_strategy(strategy)
    if name not in known:
        classes = {kind.__name__: repr(name) for name, kind in [*known.items()][::-1]}
        words = classes | words_for("strategy", [strategy])
        raise unknown_name_error("strategy", strategy, [*known, "auto"], words)
    return known[name](**options), "given by name"


# -- strategies and modules that cannot be used ------------------------------------------------------------------------


def unknown_methods(strategy: Strategy) -> list[str]:
    """Return a problem for each public name in a user's strategy that is an earlier or misspelt name of `Strategy`'s,
    or one of Lightning's strategies.

    Other names are the user's own.
    """
    known = [name for name in vars(Strategy) if not name.startswith("_")]
    users = [cls for cls in type(strategy).__mro__ if not cls.__module__.startswith("trainer.") and cls is not object]
    names = {name for cls in users for name in vars(cls) if not name.startswith("_") and name not in known}
    advice = member_words(type(strategy), names)
    return [
        f"{type(strategy).__name__}.{name} is never used: Strategy has no such name."
        + did_you_mean(name, known, advice)
        for name in sorted(names)
        if name in advice or difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    ]


def override_problems(module: TrainModule | None, name: str) -> list[str]:
    """Return the problem of overriding the parts of a step, for a strategy that has its own."""
    overridden = [
        one for one in ("backward", "optimizer_step", "optimizer_zero_grad") if module and module.overrides(one)
    ]
    if not overridden:
        return []
    return [
        f"{type(module).__name__}.{' and '.join(overridden)}: strategy {name!r} runs backward and step itself. Leave "
        "the override out (hooks such as on_before_optimizer_step are called), or use 'ddp' or 'fsdp'."
    ]


def keep_wrapper(module: TrainModule, wrapper: nn.Module, kind: type[Strategy]) -> None:
    """Have a module keep its wrapper after the run, for later runs under strategies of class `kind`."""
    # Not as a submodule: the module's keys stay unchanged.
    module.__dict__.update(_wrapper=wrapper, _wrapped_for=kind)


def wrapping_problems(module: TrainModule, strategy: Strategy) -> list[str]:
    """Return a problem for each of torch's wrappers in the module: strategies wrap modules themselves."""
    if module._wrapped_for is not None:
        if isinstance(strategy, module._wrapped_for):
            return []
        return [
            f"{type(module).__name__} was sharded by another strategy in an earlier run, and cannot be used under "
            f"{strategy.name!r}: make a new one, for example with load_from_checkpoint."
        ]
    problems = []
    for name, child in module.named_modules():
        bases = [kind.__name__ for kind in type(child).__mro__ if kind.__module__.startswith("torch.")]
        wrapper = next((base for base in bases if base in TORCH_WRAPPERS), None)
        if wrapper is not None:
            where = ".".join(filter(None, (type(module).__name__, name)))
            problems.append(
                f"{where} is already wrapped by {TORCH_WRAPPERS[wrapper]}, and strategy {strategy.name!r} wraps by "
                "itself: give it unwrapped."
            )
    return problems


TORCH_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel (its .module is inside)",
    "DataParallel": "DataParallel (its .module is inside)",
    "FSDPModule": "fully_shard",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}
"""Torch's wrappers -> the words for them."""
