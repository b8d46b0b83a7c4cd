"""Train on all devices from one process by torch_xla's SPMD: the batch is sharded; for `xla_fsdp` the weights, too."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.arguments import NonNegativeInt
from trainer.checkpoint.optimizer_state import state_by_name
from trainer.checkpoint.shards import Loadable, Shard
from trainer.data.transfer import map_leaves
from trainer.distributed.tpu import torch_xla_problem
from trainer.errors import ConfigError, problems_found, raise_problems
from trainer.model.blocks import BlockPolicy, find_blocks
from trainer.model.init_device import refuse_meta_tensors
from trainer.model.unsupported import unsupported
from trainer.module import TrainModule
from trainer.precision import NULL_CONTEXT, Precision
from trainer.strategies.swapped_parameters import SwappedParameters, SwapsParameters
from trainer.strategies.xla.patches import advance_seed, barrier_after_backward, recompute, unbiased_running_variance
from trainer.strategies.xla.recompiles import XlaRecompilationMonitor
from trainer.strategies.xla.sharding import Spec, SpmdMesh, copied_to_host, to_device_preserving_ties
from trainer.strategy import StepOptions, override_problems

log = logging.getLogger("trainer")

DEVICE_USED = (
    "a device of torch_xla was used before the run began, and then SPMD cannot be switched on any more. Make the "
    "module and its tensors on the CPU, the trainer moves them; or call torch_xla.runtime.use_spmd() first of all."
)
BACKWARD_RAN = (
    "a backward pass ran in this process before torch_xla's devices were started, and torch then knows no others. "
    "Train in a separate process; or start them first: torch_xla.runtime.use_spmd(); torch_xla.device()"
)


class XlaStrategy(SwapsParameters):
    """Data parallel over all devices by SPMD: one process, one program that XLA partitions over the devices.

    A micro-batch is the global one: its first dimension is sharded over the devices, and everything else, batch norm
    and clipping too, is computed as if there were one device. A step is recorded while Python runs, and compiled and
    run at its end (`torch_xla.sync()`); values logged are read after that.

    Args:
        pad_last_batch: fill the tensors of a training batch that are shorter in their first dimension than the same
            ones of the batches before, with their own samples from the beginning again, so that nothing is compiled for
            it; these samples count more than others then. To leave such a batch out: `DataLoader(drop_last=True)`.
        compile_warmup_steps: how many steps of a kind may be compiled before each new compilation brings a warning.

    `recompilation_monitor` counts the compilations.
    """

    name: ClassVar[str] = "xla"
    required_device: ClassVar[str | None] = "xla"

    mesh: SpmdMesh

    def __init__(self, pad_last_batch: bool = False, compile_warmup_steps: NonNegativeInt = 10) -> None:
        self.pad_last_batch = pad_last_batch
        self.recompilation_monitor = XlaRecompilationMonitor(compile_warmup_steps)
        self._lengths: list[int] = []
        """The largest first dimension so far of each tensor of a training batch."""
        self._tensor_index = 0
        """Number of tensors of the current batch that have been placed."""
        self._recomputes = False
        self._undo: list[Callable[[], None]] = []

    # -- before anything is started ------------------------------------------------------------------------------------

    def problems(
        self,
        precision: Precision,
        device_type: str,
        num_processes: int,
        config: StepOptions | None = None,
        module: TrainModule | None = None,
    ) -> list[str]:
        problem = torch_xla_problem()
        lacks_precision = precision.float8 is not None or precision.loss_scaling or precision.weights is torch.float16
        return override_problems(module, self.name) + problems_found(
            (problem, f"strategy {self.name!r}: {problem}"),
            (
                device_type != "xla",
                f"strategy {self.name!r} runs on torch_xla's devices, not on {device_type!r}: leave accelerator out, "
                "or, where TorchTPU is installed, use strategy='ddp' or 'fsdp'. To try it on a CPU, set the "
                "environment variables PJRT_DEVICE=CPU CPU_NUM_DEVICES=4.",
            ),
            (
                num_processes > 1,
                f"strategy {self.name!r} drives all devices from one process, and {num_processes} are asked for. "
                "Several processes on CPU devices would not talk to each other: each would train alone. Use "
                "devices='auto', and start one process.",
            ),
            (
                lacks_precision,
                f"TPUs do not compute in precision {precision.name!r}: use precision='bf16-mixed'.",
            ),
            (problem is None and _device_was_used_without_spmd(), DEVICE_USED),
        )

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_environment(self, device_type: str, precision: Precision, device_ids: list[int] | None = None) -> None:
        if _device_was_used_without_spmd():
            raise ConfigError(DEVICE_USED)
        # XLA says for each compilation that it has another partitioner now.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        # Else a number that happens to be 0 or 1 (a learning rate, a bias correction) is built into the program, and
        # another one compiled when it changes.
        os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")
        _import_quietly()
        import torch_xla
        import torch_xla.runtime as xr

        if not xr.is_spmd():
            xr.use_spmd()
        self.precision = precision
        self.mesh = SpmdMesh()
        self.device = self.mesh.device
        _check_backward(self.device)
        # torch.manual_seed does not reach these devices. Their seed follows from the CPU's, which stays unchanged.
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        torch_xla.manual_seed(int(torch.randint(2**62, (), generator=generator)))

    def setup_module(
        self, module: TrainModule, for_training: bool, activation_checkpointing: BlockPolicy | None = None
    ) -> None:
        self.module, self._full = module, SwappedParameters(self, lambda module: nullcontext())
        self._run_backward = module.backward if module.overrides("backward") else torch.Tensor.backward
        refuse_meta_tensors(module)
        if for_training:
            raise_problems(unsupported(module, self.name, "sparse"), f"strategy {self.name!r}")
        if activation_checkpointing is not None:
            self._recompute(module, activation_checkpointing)
        self.precision.convert_module(module)
        to_device_preserving_ties(module, self.device)
        self.place_weights(module)
        if for_training:
            self._undo += unbiased_running_variance(module)
        self._lengths = []
        self._sync()
        self.recompilation_monitor.start()

    def _recompute(self, module: TrainModule, policy: BlockPolicy) -> None:
        blocks = find_blocks(module, policy)
        if not blocks:
            raise ConfigError(
                f"activation_checkpointing found no blocks in {type(module).__name__}: name their classes, not 'auto'."
            )
        self._undo += [recompute(block) for block in blocks.values()]
        self._recomputes = True

    def place_weights(self, module: TrainModule) -> None:
        """Replicate all weights and buffers on every device, also those that another strategy has sharded."""
        for tensor in [*module.parameters(), *module.buffers()]:
            self.mesh.place(tensor, self.spec(tensor))

    def spec(self, tensor: torch.Tensor) -> Spec:
        """Return how a weight or buffer is sharded over the devices."""
        return (None,) * tensor.dim()

    # -- one step ------------------------------------------------------------------------------------------------------

    def setup_optimizers(self, optimizers: list[Optimizer], config: StepOptions) -> list[Optimizer]:
        # torch checks this only while the states are empty, so not after a resume.
        raise_problems(
            [
                f"{type(optimizer).__name__}(fused=True) has no version for XLA, which fuses all of the step anyway: "
                "leave fused out."
                for optimizer in optimizers
                if any(group.get("fused") for group in optimizer.param_groups)
            ],
            "configure_optimizers",
        )
        return optimizers

    def to_device(self, batch: Any) -> Any:
        """Send the batch to the devices, sharded by its samples, floating tensors cast if the precision says so."""
        with torch.inference_mode(False):  # see `call_step`
            self._tensor_index = 0
            batch = map_leaves(batch, self._placed)
        self.recompilation_monitor.batch(batch)
        return batch

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            leaf = self.precision.convert_batch(leaf)
            return self.mesh.send(self._padded(leaf) if self.pad_last_batch else leaf)
        if hasattr(leaf, "to") and not isinstance(leaf, type):
            return leaf.to(self.device)
        return leaf

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not in evaluation, where every sample counts once.
        if not self.module.training or tensor.dim() == 0 or len(tensor) == 0:
            return tensor
        if self._tensor_index == len(self._lengths):
            self._lengths.append(len(tensor))
        longest = self._lengths[self._tensor_index] = max(self._lengths[self._tensor_index], len(tensor))
        self._tensor_index += 1
        return tensor if len(tensor) == longest else tensor[torch.arange(longest) % len(tensor)]

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        if self._recomputes:
            advance_seed()
        return NULL_CONTEXT

    def call_step(self, step: str, *args: Any) -> Any:
        if step == "training_step":
            return super().call_step(step, *args)
        # torch_xla has no inference tensors: a linear layer raises.
        with torch.inference_mode(False), torch.no_grad():
            outputs = super().call_step(step, *args)
        self._run(step)
        return outputs

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        super().step(optimizer, closure, **options)
        if closure is not None:
            self._run("training_step")

    def end_step(self) -> None:
        """Compile the recorded step if it is new, and start it on the devices."""
        self._run("training_step")

    def _run(self, kind: str) -> None:
        self.recompilation_monitor.before()
        self._sync()
        self.recompilation_monitor.after(kind)

    def _sync(self) -> None:
        import torch_xla

        torch_xla.sync()

    # -- state ---------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, torch.Tensor | Shard]:
        """Return full weights and buffers by name, on the CPU."""
        state: dict[str, torch.Tensor | Shard] = copied_to_host(self.module.state_dict(keep_vars=True), self.mesh)
        return state

    def load_module_state(self, state: Mapping[str, Loadable | Shard], strict: bool = True, hooks: bool = True) -> None:
        super().load_module_state(state, strict, hooks)
        self._sync()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = copied_to_host(state_by_name(self.module, optimizer), self.mesh)
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, state)
        self._place_state(optimizer)
        self._sync()

    def _place_state(self, optimizer: Optimizer) -> None:
        """Shard the state of each parameter as the parameter is."""
        for parameter, values in optimizer.state.items():
            for value in values.values():
                if isinstance(value, torch.Tensor) and value.device.type == "xla" and value.shape == parameter.shape:
                    self.mesh.place(value, self.spec(parameter))

    def teardown(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo, self._recomputes = [], False
        if self.recompilation_monitor.compilations:
            log.info("%s: %s", self.name, self.recompilation_monitor.summary())

    def __str__(self) -> str:
        options = ["pad_last_batch"] if self.pad_last_batch else []
        if "mesh" in vars(self):
            options.insert(0, f"{self.mesh.devices} {self.mesh.kind} devices of torch_xla {version('torch_xla')}")
        return f"{self.name} ({', '.join(options)})" if options else self.name


class XlaFsdpStrategy(XlaStrategy):
    """`XlaStrategy` with weights, gradients and optimizer state sharded over the devices (FSDPv2).

    XLA gathers the weights of a block where they are needed. This is what torch_xla's
    `SpmdFullyShardedDataParallel` does, without a wrapper, so that names stay what they are.

    Args:
        auto_wrap_policy: the blocks, whose weights are gathered and gradients sharded one block at a time; see
            `trainer.model.blocks.find_blocks`.
        pad_last_batch, compile_warmup_steps: as in `XlaStrategy`.
    """

    name: ClassVar[str] = "xla_fsdp"

    def __init__(
        self,
        auto_wrap_policy: BlockPolicy = "auto",
        pad_last_batch: bool = False,
        compile_warmup_steps: NonNegativeInt = 10,
    ) -> None:
        super().__init__(pad_last_batch, compile_warmup_steps)
        self.auto_wrap_policy = auto_wrap_policy
        self._state_sharded: set[int] = set()

    def place_weights(self, module: TrainModule) -> None:
        """Shard the weights, and the outputs of blocks as the batch."""
        super().place_weights(module)
        for block in find_blocks(module, self.auto_wrap_policy).values():
            self._undo.append(block.register_forward_hook(self._shard_outputs).remove)
            self._undo.append(barrier_after_backward(block))
        self._state_sharded = set()

    def spec(self, tensor: torch.Tensor) -> Spec:
        """Return how a parameter and its state are sharded; buffers are replicated."""
        return self.mesh.spec_of_weight(tensor) if isinstance(tensor, nn.Parameter) else super().spec(tensor)

    def _shard_outputs(self, block: nn.Module, inputs: Any, outputs: Any) -> None:
        for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            if isinstance(output, torch.Tensor):
                self.mesh.shard_rows(output)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        super().step(optimizer, closure, **options)
        # The first step has made the state.
        if id(optimizer) not in self._state_sharded:
            self._place_state(optimizer)
            self._state_sharded.add(id(optimizer))


def _import_quietly() -> None:
    """Import torch_xla without the handlers that it adds to the root logger."""
    root = logging.getLogger()
    before = [*root.handlers]
    import_module("torch_xla.debug.metrics")
    root.handlers[:] = before


def _device_was_used_without_spmd() -> bool:
    """Whether it is too late for SPMD. Does not import torch_xla."""
    if "torch_xla" not in sys.modules or torch_xla_problem() is not None:
        return False
    import torch_xla
    import torch_xla.runtime as xr

    return bool(torch_xla._XLAC._xla_get_spmd_config_is_locked()) and not xr.is_spmd()


def _check_backward(device: torch.device) -> None:
    """Raise ConfigError if torch has set up its backward passes, at the first one, without these devices."""
    try:
        torch.autograd.backward(torch.ones((), device=device, requires_grad=True).clone())
    except RuntimeError as error:
        raise ConfigError(BACKWARD_RAN) from error
