"""Shard parameters, gradients and optimizer state over the processes (torch's FSDP2)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer.arguments import Limit, PositiveFloat, PositiveInt
from trainer.checkpoint.optimizer_state import (
    load_by_position,
    refuse_own_tensors,
    state_by_name,
    state_by_position,
)
from trainer.checkpoint.shards import Loadable, Shard
from trainer.data.transfer import map_tensors
from trainer.errors import ConfigError, problems_found, raise_problems
from trainer.float8.conversion import restore_odd_parts
from trainer.model.activation_checkpointing import enable_activation_checkpointing
from trainer.model.blocks import BlockPolicy, describe_blocks, exclude_tied_weights, find_blocks
from trainer.model.init_device import InitDevice, build_context, initial_values, named_tensors
from trainer.model.unsupported import unsupported, use_contiguous_parameters
from trainer.model.weights import AbsentParameter
from trainer.module import TrainModule
from trainer.optimizers import copy_gradients
from trainer.precision import NULL_CONTEXT, Precision, has_statistics, multiplies_buffers
from trainer.strategies.call_order import BACKWARD, CallOrder
from trainer.strategies.distributed import DistributedStrategy, StepForward
from trainer.strategies.fsdp.mesh import ModelSplit, ParallelMesh, forget_mesh, kept_mesh
from trainer.strategies.fsdp.side_outputs import SideOutputs
from trainer.strategies.parallel.context import AttentionExchange
from trainer.strategies.parallel.pipeline import LeftStage
from trainer.strategies.parallel.refusals import layout_problems
from trainer.strategies.parallel.split_model import SplitModel
from trainer.strategies.swapped_parameters import (
    SwappedParameters,
    SwapsParameters,
    gathering_hooks,
    has_compiled,
    unchanged_while_gathered,
    without_hooks,
)
from trainer.strategy import (
    DIRECT_BACKWARD,
    UNSCALED_BACKWARD,
    StepOptions,
    keep_wrapper,
    load_values,
    wrapping_problems,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from trainer.strategies.fsdp.gradients import Gradients
    from trainer.strategies.fsdp.trainable import Places

log = logging.getLogger("trainer")


class FSDPStrategy(SwapsParameters, DistributedStrategy):
    """`fully_shard` (https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) on the blocks of the module.

    Args:
        sharding_strategy: "FULL_SHARD": parameters, gradients and optimizer state are sharded, and a block's parameters
            are gathered before its forward and again before its backward (ZeRO-3). "SHARD_GRAD_OP": they stay gathered
            from the forward to the backward: more memory, less communication (ZeRO-2). "HYBRID_SHARD": sharded within a
            group of processes, and replicated over the groups.
        auto_wrap_policy: which submodules are gathered one at a time: "auto" (the repeated blocks), class names,
            classes, a least number of parameters, or a function (name, submodule) -> bool. See
            `trainer.model.blocks.find_blocks`.
        reshard_after_forward: instead of what `sharding_strategy` says: True, False, or an int, the number of processes
            among which parameters stay sharded between forward and backward. With `pipeline_parallel` a stage keeps its
            parameters gathered for a full window, unless this is True or an int.
        device_mesh: for "HYBRID_SHARD", (replicas, shards); default: (machines, processes on each).
        cpu_offload: parameters, gradients and optimizer state live in the CPU's memory; the step runs there.
        accumulate_unsharded: with accumulation, keep full gradients on each process until the last micro-batch, and
            communicate once. False: reduce after every micro-batch, which needs less memory.
        reduce_dtype: dtype of the sums of gradients over processes, e.g. "bfloat16"; default: float32.
        init_device: where `configure_model` builds the layers. "cpu": on every process. "mixed": on rank 0; on the
            other processes without memory. "meta": without memory on all; then rank 0 calls `init_weights` or
            `reset_parameters` of one submodule after the other. All processes get rank 0's values.
        tensor_parallel: processes among which layers are split, as the module's `tensor_parallel_plan` says, or that
            of a Hugging Face model in it; see `trainer.strategies.parallel.plan.STYLES`.
        context_parallel: processes among which each sequence is split, within the blocks. Blocks mix tokens by
            `scaled_dot_product_attention` only.
        pipeline_parallel: stages, each with some of the blocks. Its micro-batches are the batches of a window
            (`Trainer(accumulate_grad_batches=)`).
        expert_parallel: processes among which the experts of mixtures are split, of those over which weights are
            sharded: tokens travel to the processes that have their experts. The plan names the modules of experts.
        context_exchange: of `context_parallel`: processes exchange "heads" or "keys" of attention; "auto": heads where
            their number is a multiple of the processes.
        verify: with one of the four ways to split a model, compute each block in full, too, in its first calls, and
            compare the results; and compare the losses of the processes of one model now and then.
        timeout_seconds: after which a collective that does not end raises.

    The processes that hold one model together, tensor_parallel x context_parallel x pipeline_parallel, read the same
    samples; weights are sharded over the others, and over the parts of sequences.

    The module keeps its shards after the run; checkpoints have the weights, and `trainer.full_state_dict()` gathers
    them.

    Mixed precision computes under autocast with parameters gathered in the low precision; the shards are float32.
    """

    name: ClassVar[str] = "fsdp"
    shards_state = True
    collective_forward = True
    _split: SplitModel
    """The layers, sequences and blocks of the model that this process computes."""
    _will_load_checkpoint = False
    _reuses_memory = False
    _communicates = True
    """True if a backward reduces the gradients over processes; else each process keeps full gradients."""

    def __init__(
        self,
        sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"] = "FULL_SHARD",
        auto_wrap_policy: BlockPolicy = "auto",
        reshard_after_forward: bool | Annotated[int, Limit("from", 2)] | None = None,
        device_mesh: tuple[int, int] | None = None,
        cpu_offload: bool = False,
        accumulate_unsharded: bool = True,
        reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        init_device: InitDevice = "cpu",
        tensor_parallel: PositiveInt = 1,
        context_parallel: PositiveInt = 1,
        pipeline_parallel: PositiveInt = 1,
        expert_parallel: PositiveInt = 1,
        context_exchange: AttentionExchange = "auto",
        verify: bool = True,
        timeout_seconds: PositiveFloat = 1800.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.layout = ModelSplit(tensor_parallel, context_parallel, pipeline_parallel, expert_parallel)
        self.context_exchange = context_exchange
        self.verify = verify
        self.sharding_strategy = sharding_strategy
        self.auto_wrap_policy = auto_wrap_policy
        self.reshard_after_forward = reshard_after_forward
        self.device_mesh = device_mesh
        self.cpu_offload = cpu_offload
        self.accumulate_unsharded = accumulate_unsharded
        self.reduce_dtype: torch.dtype = getattr(torch, reduce_dtype or "float32")
        self.init_device = init_device
        self.wrapped: Any = None
        self.wrapped_blocks = ""
        """A description of the wrapped units other than the module itself."""
        self._mesh: ParallelMesh | None = None
        self._is_first_step = True
        self._order = CallOrder(self.processes, self.name, "block")
        self._gradients: Gradients
        self._of_models: dict[int, Gradients] = {}
        """The gradients of all models of a loop, which share this dict, by the `id` of their wrapper."""
        self._units: list[Any] = []
        """The module and its blocks, as FSDP2 wraps them."""
        self._groups: list[Any] = []
        """torch's groups of the parameters that are gathered together."""
        self._parameters: list[Any] = []
        """torch's records of the sharded parameters."""
        self._places: dict[tuple[nn.Module, str], Any] = {}
        """These records by the modules that hold the parameter, and its names there."""
        self._gathered_in_evaluation: GatheredStates = []
        """The parameters that were gathered in the first batch of an evaluation inside `fit`."""
        self._gathered_at_start: GatheredStates = []
        """The parameters that were gathered when a step began; when its window began, if they stay gathered in it."""
        self._hooks: list[RemovableHandle] = []
        """The hooks that gather weights, if a pipeline needs none between the first and the last micro-batch."""

    # -- before anything is started ------------------------------------------------------------------------------------

    def problems(
        self,
        precision: Precision,
        device_type: str,
        num_processes: int,
        config: StepOptions | None = None,
        module: TrainModule | None = None,
    ) -> list[str]:
        problems = super().problems(precision, device_type, num_processes, config, module)
        readers = max(1, num_processes // self.layout.processes)
        shards = self.device_mesh[-1] if self.device_mesh else readers
        own_loop = config is not None and config.own_loop
        problems += layout_problems(self.layout, shards, num_processes, precision, module, own_loop)
        mesh, is_hybrid = self.device_mesh, self.sharding_strategy == "HYBRID_SHARD"
        return problems + problems_found(
            (
                device_type == "mps",
                "strategy 'fsdp' does not run on MPS: use accelerator='cpu', or devices=1 and no strategy.",
            ),
            (
                mesh is not None and (not is_hybrid or min(mesh) < 1 or math.prod(mesh) != readers),
                f"device_mesh={mesh}: give (replicas, shards) whose product is {readers}, the number of processes that "
                "read different samples, and sharding_strategy='HYBRID_SHARD'.",
            ),
        )

    def dry_run(self, module: TrainModule, precision: Precision) -> list[str]:
        from torch.distributed.tensor import DTensor

        self.setup_environment("cpu", precision)
        self._refuse(module)
        precision.convert_module(module)
        assert self._mesh is not None
        self._split_model(module)
        self._shard(module)
        own = sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))
        full = sum(p.numel() for p in module.parameters())
        share = full // self.processes.world_size
        return [
            self._mesh.describe(),
            *filter(None, [self._split.description]),
            f"gathered one at a time: {self.wrapped_blocks or 'nothing'}, and the rest",
            f"this process holds {own:,} of {full:,} elements; without copies each has {share:,}",
        ]

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_environment(self, device_type: str, precision: Precision, device_ids: list[int] | None = None) -> None:
        super().setup_environment(device_type, precision, device_ids)
        if self._mesh is None:
            self._mesh = kept_mesh(self.device.type, self.layout, self._sizes_of_readers(), self.processes)
        self._mesh.set_readers(self.processes)

    def _sizes_of_readers(self) -> dict[str, int]:
        readers = self.processes.world_size // self.layout.processes
        if self.sharding_strategy != "HYBRID_SHARD":
            return {"shard": readers}
        replicas, shards = self.device_mesh or (self.processes.num_nodes, readers // self.processes.num_nodes)
        return {"replicate": replicas, "shard": shards}

    @contextmanager
    def init_context(self, module: TrainModule, will_load_checkpoint: bool) -> Iterator[None]:
        self._will_load_checkpoint = will_load_checkpoint
        with self.precision.init_context(module), build_context(self.init_device):
            yield

    def setup_module(
        self, module: TrainModule, for_training: bool, activation_checkpointing: BlockPolicy | None = None
    ) -> None:
        from trainer.strategies.fsdp.dtensors import read_full_numbers, set_values
        from trainer.strategies.fsdp.trainable import former_parameters

        if for_training:
            raise_problems(unsupported(module, self.name, "sparse"), f"strategy {self.name!r}")
        self.module, self._full, self._gathered_at_start = module, SwappedParameters(self, self._computing_full), []
        self._run_backward = module.backward if module.overrides("backward") else torch.Tensor.backward
        read_full_numbers()
        if module._wrapper is not None:
            if activation_checkpointing is not None:
                self._checkpoint(module, activation_checkpointing)
            self._refuse_other_mesh(module)
            self.wrapped = module._wrapper  # sharded by a run before this one, maybe by another strategy object
            self._take_over(self.wrapped.applied)
            # An evaluation leaves gathered copies, because no backward frees them, and an optimizer would train these.
            reshard_all(self.wrapped)
            if self.precision.float8 is None:
                self.precision.convert_module(self.wrapped)
            self._list_units({})
            self._gradients.forget()
            self._set_policies()
            return
        self._refuse(module)
        use_contiguous_parameters(module)
        self.precision.convert_module(module)
        # Names alone: the state_dict would keep the full tensors while their shards are made.
        loaded = list(module.state_dict(keep_vars=True)) if self._will_load_checkpoint else []
        values = initial_values(module, self.init_device, loaded, self.device)
        formers = former_parameters(module)
        self._split_model(module)
        if self.precision.float8 is not None and self.layout.tensor > 1:
            restore_odd_parts(module)
        if activation_checkpointing is not None:
            self._checkpoint(module, activation_checkpointing)
        self.wrapped = self._shard(module)
        fixed = {name: getattr(self, name) for name in _FIXED}
        world_size = self.processes.world_size
        self.wrapped.applied = Applied(self._split, world_size, self.precision, fixed, self.wrapped_blocks)
        keep_wrapper(module, self.wrapped, FSDPStrategy)
        self._allocate(module)
        self._list_units(formers)
        tensors = named_tensors(module)
        for name, value in values:
            if self._split.is_here(name):
                set_values(tensors[name].detach(), value)
        if self.precision.float8 == "tensorwise":
            self._gather_in_float8()

    def _checkpoint(self, module: TrainModule, policy: BlockPolicy) -> None:
        enable_activation_checkpointing(module, policy, around_graphs=self.layout.tensor * self.layout.expert > 1)

    def _gather_in_float8(self) -> None:
        from trainer.strategies.fsdp.float8_gather import gather_in_float8

        if number := gather_in_float8(group.fsdp_params for group in self._groups):
            log.info("fsdp gathers %d weights in 8 bits", number)

    def _list_units(self, formers: Places) -> None:
        from trainer.strategies.fsdp.trainable import places_of, share_flags

        self._units = list(fsdp_units(self.wrapped))
        self._groups = [group for unit in self._units for group in parameter_groups(unit)]
        self._parameters = [record for group in self._groups for record in group.fsdp_params]
        self._places = {place: record for record in self._parameters for place in places_of(record)}
        share_flags(self._parameters, formers)
        for record in self._parameters:
            if _computes_in_own_dtype(record._module_info.module) or record.sharded_param.is_complex():
                record.init_dtype_attrs = partial(_init_own_dtypes, record)
        self.wrapped.context = self._in_step
        self._make_gradients()
        if self.layout.pipeline == 1 and self.processes.world_size > 1:  # a pipeline has another order
            blocks = {name: one for name, one in self.module.named_modules() if one in self._units}
            self._order = CallOrder(self.processes, self.name, "block", [*blocks])
            self._order.watch(blocks)

    def _make_gradients(self) -> None:
        from trainer.strategies.fsdp.gradients import Gradients
        from trainer.strategies.fsdp.trainable import share_gradients

        assert self._mesh is not None
        shards = self._mesh.shards
        among = [shards.get_group(dim) for dim in range(shards.ndim) if shards.size(dim) > 1]
        refusal = ""
        if self._steps_by_hand:
            refusal = DIRECT_BACKWARD
        elif self.scaler is not None:
            refusal = UNSCALED_BACKWARD
        self._gradients = Gradients(self.wrapped._get_fsdp_state(), self._units, self._groups, among, refusal)
        self._of_models[id(self.wrapped)] = self._gradients
        if self._steps_by_hand:
            self._gradients.kept = parameter_groups(self.wrapped)
            share_gradients([one for group in self._gradients.kept for one in group.fsdp_params])

    def _refuse_other_mesh(self, module: TrainModule) -> None:
        """Raise ConfigError if an earlier run, such as one before `trainer.launch`, had other processes or parts."""
        wrapper: Any = module._wrapper
        before: Applied = wrapper.applied
        facts = [
            ("number of processes", before.processes, self.processes.world_size),
            ("division of the model", before.split.layout, self.layout),
            ("number format of layers, of precision=", before.precision.float8, self.precision.float8),
        ]
        for what, then, now in facts:
            if then != now:
                raise ConfigError(
                    f"{type(module).__name__} was sharded by an earlier run with another {what} "
                    f"({then or 'none'} then, {now or 'none'} now), which cannot change afterwards: make a new one, "
                    "for example with load_from_checkpoint."
                )
        stored = self.precision.stored_dtypes(module)
        for group in (group for unit in fsdp_units(wrapper) for group in parameter_groups(unit)):
            trained = [record.sharded_param for record in group.fsdp_params if record.sharded_param.requires_grad]
            if len({*map(stored, trained)}) > 1:
                raise ConfigError(
                    f"precision={self.precision.name!r} keeps the norms of {type(module).__name__} in float32, and a "
                    f"run in {before.precision.name!r} before this one has sharded them together with other layers: "
                    "make a new one, for example with load_from_checkpoint."
                )

    def _take_over(self, before: Applied) -> None:
        """Use the shards that an earlier run has made of the module."""
        assert self._mesh is not None
        self._split, self.wrapped_blocks = before.split, before.wrapped_blocks
        self._split.start_again(self._mesh, self.processes)
        self._mesh = self._split.mesh
        others = {name: value for name, value in before.fixed.items() if getattr(self, name) != value}
        if "HYBRID_SHARD" not in (self.sharding_strategy, before.fixed["sharding_strategy"]):
            others.pop("sharding_strategy", None)  # the others differ in what is sharded after a forward
        if type(self.reshard_after_forward) is not int:
            others.pop("reshard_after_forward", None)
        if others:
            log.warning(
                "the module was sharded by an earlier run, whose %s it keeps: make a new one for other options",
                ", ".join(f"{name}={value!r}" for name, value in others.items()),
            )
        for name, value in others.items():
            setattr(self, name, value)

    def _set_policies(self) -> None:
        """Have the units of an earlier run gather and reduce in the dtypes of this run, and keep weights as it asks."""
        policy, reshard = self._mixed_precision(), self._reshards_blocks()
        for unit in self._units:
            unit._get_fsdp_state()._mp_policy = policy
            if unit is not self.wrapped and isinstance(reshard, bool):
                unit.set_reshard_after_forward(reshard, recurse=False)
        for group in self._groups:
            group.mp_policy = policy
            group._init_mp_dtypes()
        for record in self._parameters:
            full = vars(record).get("_unsharded_param")
            if full is not None and full.dtype != (record.param_dtype or record.orig_dtype):
                record.all_gather_outputs = []
                del record._unsharded_param

    def _refuse(self, module: TrainModule) -> None:
        from trainer.strategies.parallel.adapters import refuse_adapted_parameters

        raise_problems(wrapping_problems(module, self), f"strategy {self.name!r}")
        kinds = ("scalar", "empty", "script", "quantized", "hooked")
        raise_problems(unsupported(module, self.name, *kinds), f"strategy {self.name!r}")
        refuse_adapted_parameters(module)

    def _split_model(self, module: TrainModule) -> None:
        assert self._mesh is not None
        blocks, exchange = find_blocks(module, self.auto_wrap_policy), self.context_exchange
        self._split = SplitModel(module, self._mesh, self.processes, blocks, exchange, self.verify)

    def _shard(self, module: TrainModule) -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        assert self._mesh is not None
        # torch pins the memory by default, which needs an accelerator.
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.cpu_offload else OffloadPolicy()
        of_other_stages = {p for p in module.parameters() if isinstance(p, AbsentParameter)}
        options: dict[str, Any] = {"mp_policy": self._mixed_precision(), "offload_policy": offload}
        options |= {"mesh": self._mesh.shards, "ignored_params": of_other_stages}
        reshard = self._reshards_blocks()
        blocks = exclude_tied_weights(module, self._split.here)
        tied = [name for name in self._split.here if name not in blocks]
        if tied:
            log.info("fsdp gathers with the rest, because they share weights with it: %s", ", ".join(tied))
        self.wrapped_blocks = describe_blocks(blocks)
        apart = self._in_own_dtype(module, [module, *blocks.values()])
        experts = [*self._split.experts.values()]
        root = _FSDPForward(module)
        for unit in (*blocks.values(), root):
            unit.register_forward_hook(copy_views)
        beside = [SideOutputs(block) for block in blocks.values()]
        # Inner ones first: a layer that is gathered apart may be within a block, or have blocks in it.
        depth = {layer: name.count(".") for name, layer in module.named_modules()}
        for unit in sorted((*apart, *experts, *blocks.values()), key=depth.__getitem__, reverse=True):
            own = {**options, "mesh": self._mesh.expert_shards} if unit in experts else options
            fully_shard(unit, reshard_after_forward=False if unit in apart else reshard, **own)
        for one in beside:
            one.wrap()
        # Parameters outside of the blocks stay gathered: their backward comes right after their forward.
        wrapped = fully_shard(root, reshard_after_forward=False if blocks else reshard, **options)
        if blocks:
            log.info("fsdp gathers one at a time: %s", self.wrapped_blocks)
        else:
            log.warning(
                "fsdp found no repeated blocks in %s, so all its parameters are gathered at once: name the classes to "
                "wrap with FSDPStrategy(auto_wrap_policy=[...])",
                type(module).__name__,
            )
        return wrapped

    def _reshards_blocks(self) -> bool | int:
        if self.reshard_after_forward is None:
            return self.sharding_strategy != "SHARD_GRAD_OP" and self.layout.pipeline == 1
        return self.reshard_after_forward

    def _in_own_dtype(self, module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        """Return the layers that train in another dtype than the rest, the inner ones first; they are separate units.

        All trained parameters of one of FSDP2's units have the same dtype.

        Args:
            units: the module and its blocks, which are gathered anyway, with what is in them.

        Raises:
            ConfigError: parameters of several dtypes are in one layer, or in a list, which nothing gathers.
        """
        found: dict[nn.Module, None] = {}

        def visit(layer: nn.Module, name: str, dtype: torch.dtype) -> None:
            own = {p.dtype for p in layer.parameters(recurse=False) if p.requires_grad}
            if layer not in units and own - {dtype}:
                found[layer] = None
            if len(own) > 1 or (layer in found and type(layer).forward is nn.Module.forward):
                raise ConfigError(
                    f"strategy 'fsdp' gathers parameters of one dtype together, and {name or type(layer).__name__} has "
                    f"{', '.join(sorted(map(str, own)))} among others. Put the parameters of each dtype into "
                    "a separate layer whose forward uses them."
                )
            for child_name, child in layer.named_children():
                visit(child, f"{name}.{child_name}".removeprefix("."), next(iter(own), dtype))

        if len({p.dtype for p in module.parameters() if p.requires_grad}) > 1:
            visit(module, "", self.precision.weights)
        return [*reversed(found)]

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        low = self.precision.autocast or self.precision.weights
        if low not in (torch.bfloat16, torch.float16):
            return MixedPrecisionPolicy()
        # Autocast chooses the dtypes, as under the other strategies, so inputs are left alone.
        return MixedPrecisionPolicy(
            param_dtype=self.precision.autocast, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )

    def _allocate(self, module: TrainModule) -> None:
        """Allocate the shards of what is on the meta device, and move the buffers to their device."""
        device = torch.device("cpu") if self.cpu_offload else self.device
        self.wrapped._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        self._place_buffers(module)

    def _place_buffers(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            if buffer.device != self.device:
                buffer.data = buffer.data.to(self.device)

    def setup_optimizers(self, optimizers: list[Optimizer], config: StepOptions) -> list[Optimizer]:
        if config.own_loop:  # which may call its modules in turns
            self._order.end()
        self._is_first_step = True
        self._split.start_training(self.precision, optimizers, config)
        self._reuses_memory = config.reuses_memory
        # With gradients in another dtype than their sums, FSDP2 adds them up itself, after each backward.
        low = self._mixed_precision().param_dtype is not None or has_compiled(self.module)
        self._hooks = gathering_hooks(self._units) if self._keeps_gathered and not low else []
        for optimizer in optimizers if self._steps_by_hand else ():
            self._gradients.clear_with(optimizer)
        return optimizers

    # -- one step ------------------------------------------------------------------------------------------------------

    def call_step(self, step: str, *args: Any) -> Any:
        with self._order.of(step):
            return self._split.call(step, args, self.device, partial(self._call_step, step, *args))

    def _call_step(self, step: str, *args: Any) -> Any:
        between = step == "training_step" and self._is_between
        if not between:
            self._refuse_replaced_parameters()
        if step == "training_step" and not (self._keeps_gathered and self._gathered_at_start):
            self._gathered_at_start = self._gathered_states()
        pipeline = self._split.pipeline
        if pipeline is None:
            return self._call_wrapped(step, args)
        with without_hooks(self._hooks if between else []):
            call = partial(self._call_wrapped, step, args)
            outputs = pipeline.forward(call, step, self.device, self._communicates)
        if step == "training_step" and not self._gathered_at_start:
            self._gathered_at_start = self._gathered_states()
        return outputs

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Have a step method change flags of gathered parameters, and see what else it changes in its first call."""
        from trainer.strategies.fsdp.trainable import adopt_flags

        if self._steps_by_hand and torch.is_grad_enabled() and not self._gathered_at_start:
            self._gathered_at_start = self._gathered_states()
        yield
        adopt_flags(self._parameters)

    def _gathered_states(self) -> GatheredStates:
        return [(record, _state_of(record._unsharded_param)) for record in self._parameters if _was_gathered(record)]

    def _changed_since(self, before: GatheredStates) -> str:
        """Return the names of the parameters whose full values have changed."""
        changed = [record for record, then in before if _state_of(record._unsharded_param) != then]
        return ", ".join(self._name_of(record._module_info) for record in changed)

    def _call_wrapped(self, step: str, args: tuple[Any, ...]) -> Any:
        with self.precision.forward_context(self.device), self._refusing_assignments(), self._split.losses():
            if not torch.is_inference_mode_enabled():
                with self._unchanged(step):
                    outputs = self.wrapped(step, _Hidden(args))
                if self._steps_by_hand and step == "training_step":
                    self._refuse_changes_within_step()
                    self._gradients.release()
                    self.wrapped.reshard()
                elif not (self._gathered_in_evaluation or torch.is_grad_enabled()):
                    self._gathered_in_evaluation = self._gathered_states()
                return outputs
            # Weights that are gathered in inference mode could not be used for training afterwards.
            with torch.inference_mode(False), torch.no_grad():
                return self.wrapped(step, _Hidden(args))

    def _unchanged(self, step: str) -> AbstractContextManager[None]:
        """Return the context of a forward, which compares gathered weights in the first step, and to find anomalies."""
        if step != "training_step" or not (self._is_first_step or torch.is_anomaly_enabled()):
            return NULL_CONTEXT
        self._is_first_step = False
        if self.layout or self._steps_by_hand or has_compiled(self.module):
            return NULL_CONTEXT
        units = [(unit, partial(self._gathered_by, unit)) for unit in self._units]
        return unchanged_while_gathered(units, gathering_hooks(self._units), self)

    def _gathered_by(self, unit: nn.Module) -> dict[str, torch.Tensor]:
        records = [one for group in parameter_groups(unit) for one in group.fsdp_params if _was_gathered(one)]
        return {self._name_of(one._module_info): one._unsharded_param for one in records}

    def _refuse_replaced_parameters(self) -> None:
        """Raise ConfigError for parameters with other values than those that FSDP2 gathers.

        `module.weight = nn.Parameter(...)` and `p.data = ...` would be lost: FSDP2 keeps its own shards.
        """
        for parameter in self._parameters:
            place, sharded = parameter._module_info, parameter.sharded_param
            current = place.module._parameters.get(place.param_name)
            # A DTensor has memory only where a tensor was assigned to its `data`.
            own = [*gathered_of(parameter), None if sharded.data_ptr() else sharded]
            if current is None or all(current is not one for one in own):
                raise self._replaced(parameter)

    def _replaced(self, parameter: Any) -> ConfigError:
        place = parameter._module_info
        return ConfigError(
            f"{self._name_of(place)} of shape {list(parameter.sharded_param.shape)} was replaced while training, by "
            f"`module.{place.param_name} = ...`, `p.data = ...`, load_state_dict(assign=True), weight_norm or "
            f"register_parametrization, and strategy {self.name!r} still has its shards. Parametrize before fit, and "
            "change values between two steps: with trainer.full_parameters(module, write=True): ..."
        )

    def _refuse_changes_within_step(self) -> None:
        """Raise ConfigError for parameters replaced or changed since the forward began, which FSDP2 would undo.

        A gathered parameter is a copy of the shards, and its values are lost when it is freed.
        """
        self._refuse_replaced_parameters()
        if changed := self._changed_since(self._gathered_at_start):
            raise ConfigError(
                f"{changed} changed within a step, while gathered (in a pipeline: within a window), and strategy "
                f"{self.name!r} would lose that: change it in on_train_step_end."
            )

    @contextmanager
    def _refusing_assignments(self) -> Iterator[None]:
        """Refuse `module.weight = nn.Parameter(...)` in the block, which the next gathering would undo."""

        def check(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            record = self._places.get((module, name))
            if record is not None and all(parameter is not one for one in (record.sharded_param, *gathered_of(record))):
                raise self._replaced(record)

        with register_module_parameter_registration_hook(check):
            yield

    def _name_of(self, place: Any) -> str:
        """Return the full name of a parameter at one of torch's places; its module may have been taken out."""
        names = (f"{name}.{place.param_name}" for name, one in self.module.named_modules() if one is place.module)
        return next(names, f"{type(place.module).__name__}.{place.param_name}").removeprefix(".")

    def release_gathered(self) -> None:
        """Free gathered parameters.

        Raises:
            ConfigError: a hook has changed them, or replaced parameters, which would be lost.
        """
        self._refuse_replaced_parameters()
        if self._split.pipeline is not None:
            self._split.pipeline.flush()
        gathered, self._gathered_in_evaluation = self._gathered_in_evaluation, []
        if changed := self._changed_since(gathered):
            raise ConfigError(
                f"{changed} changed between the batches of an evaluation, and strategy {self.name!r} would lose the "
                "change. Change parameters in on_validation_start or on_validation_epoch_end."
            )
        self._gradients.release()
        reshard_all(self.wrapped)

    @contextmanager
    def _computing_full(self, module: nn.Module) -> Iterator[None]:
        """Have the blocks of a part of the module compute with their full parameters, and gather nothing.

        Nor is a shard looked for where a `load_state_dict` in the block has filled a full parameter.
        """
        inside = {id(child) for child in module.modules()}
        units = [unit for unit in self._units if id(unit) in inside]
        handles = gathering_hooks(units) + [one._post_load_hook_handle for one in self._parameters]
        refusal = [module.register_forward_pre_hook(self._refuse_call)] if self.layout else []
        try:
            with without_hooks(handles):
                yield
        finally:
            for one in refusal:
                one.remove()

    def _refuse_call(self, module: nn.Module, inputs: Any) -> None:
        raise ConfigError(
            f"{type(module).__name__} cannot be called within full_parameters, because its layers are split over "
            f"processes ({self.layout}). Read and change its parameters there, and call it in a step method."
        )

    @property
    def _steps_by_hand(self) -> bool:
        return not self.module.automatic_optimization

    def backward(self, loss: torch.Tensor) -> None:
        # Not through super(): from fit to backward there are four frames.
        if not self._is_between:  # found with the last micro-batch
            self._refuse_changes_within_step()
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._split.common_loss.compare(loss)
        if self._split.pipeline is not None:
            self._split.pipeline.backward(loss, self._backward_of)
            return
        order = self._order.paused() if self._steps_by_hand else self._order.of(BACKWARD)
        with self._split.losses(), order, self._split.as_forward(), self._gradients.of_step(self._of_models.values()):
            self._run_backward(loss)
        if self._steps_by_hand:
            return
        for one in self._of_models.values():
            one.release()
        if self._reuses_memory and not self._communicates:
            copy_gradients(record._unsharded_param for record in self._parameters if _was_gathered(record))

    def _backward_of(self, communicates: bool, backward: Callable[[], None]) -> None:
        with (
            self._communicating(communicates),
            self._split.losses(),
            self._split.as_forward(),
            self._gradients.of_step(),
        ):
            backward()

    def end_window(self) -> None:
        if self._split.pipeline is not None:
            self._split.pipeline.end_window(self._backward_of)
            self._gathered_at_start = []
            self._split.exchange_values()
        self._split.end_window()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        self._split.end_window()  # in a loop without windows
        super().step(optimizer, closure, **options)
        if self._steps_by_hand:  # gather the new values
            self._gradients.release()
            for unit in self._units:
                unit.reshard()
            self.wrapped.unshard()

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        return self._communicating(last or not self.accumulate_unsharded)

    def _communicating(self, now: bool) -> AbstractContextManager[None]:
        return NULL_CONTEXT if now == self._communicates else self._switched_to(now)

    @contextmanager
    def _switched_to(self, now: bool) -> Iterator[None]:
        """Choose whether the next backward reduces the gradients over processes, and frees gathered weights."""
        self._communicate(now)
        try:
            yield
        finally:
            self._communicate(not now)

    def _communicate(self, now: bool) -> None:
        self._communicates = now
        for unit in self._units:
            unit.set_requires_gradient_sync(now, recurse=False)
            if self._keeps_gathered:
                unit.set_reshard_after_backward(now, recurse=False)

    @property
    def _keeps_gathered(self) -> bool:
        """True if the weights stay gathered from the first micro-batch of a window to its last one."""
        return self.layout.pipeline > 1 and not self.reshard_after_forward

    @property
    def _is_between(self) -> bool:
        """True in a window after its first micro-batch and before its last one, if the weights stay gathered."""
        return bool(self._gathered_at_start) and not self._communicates and self._keeps_gathered

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> torch.Tensor | None:
        from trainer.strategies.fsdp.clipping import by_mesh, clip_by_norm

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            for together in by_mesh(parameters):
                nn.utils.clip_grad_value_(together, value)
            return None
        if self._split.pipeline is None:
            return clip_by_norm(parameters, parameters, value)
        names = {id(p): name for name, p in self.module.named_parameters()}
        counted = [p for p in parameters if self._split.pipeline.writes(names[id(p)])]
        return clip_by_norm(parameters, counted, value, self._split.mesh.group("stage"))

    def parameters_changed(self, changes: str, optimizers: list[Optimizer]) -> None:
        """Accept parameters that were frozen or unfrozen, but no added ones, which would not be sharded.

        Raises:
            ConfigError: a parameter was added.
        """
        self.release_gathered()
        plain = [name for name, p in self.module.named_parameters() if not hasattr(p, "device_mesh")]
        if plain:
            raise ConfigError(
                f"strategy {self.name!r} shards the module at the start, and {', '.join(plain)} came later: build the "
                "layers in configure_model, frozen if need be; or use strategy 'ddp'."
            )

    # -- state ---------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, torch.Tensor | Shard]:
        known: dict[int, Shard] = {}
        state = self.module.state_dict(keep_vars=True)
        return {name: self._split.shards(name, value, known) for name, value in state.items()}

    def load_module_state(self, state: Mapping[str, Loadable | Shard], strict: bool = True, hooks: bool = True) -> None:
        from trainer.strategies.fsdp.dtensors import ShardedValues

        load_values(self.module, state, strict, hooks, ShardedValues())
        self._place_buffers(self.module)  # one that was made by the load, of weights that are offloaded

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = state_by_name(self.module, optimizer)
        known: dict[int, Shard] = {}
        own = {name: self._split.shards(name, of_one, known) for name, of_one in state["state"].items()}
        if self.layout.pipeline > 1:
            own = self._split.with_other_stages(own, state["param_groups"])
            refuse_own_tensors(optimizer, state, "pipeline_parallel, whose stages hold other parameters,")
        others = ("common", "extra", "parts")  # in one order on all processes
        more = {key: self._split.shards("", state[key], known) for key in others if key in state}
        return {**state, **more, "state": own}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        from trainer.strategies.fsdp.dtensors import part_as_dtensor

        state = {**state, "state": self._split.own_of(state["state"])}
        load_by_position(optimizer, state_by_position(self.module, optimizer, state, part_as_dtensor))

    def teardown(self) -> None:
        self._order.end()
        self._of_models.clear()
        split: SplitModel | None = vars(self).get("_split")
        if split is not None and split.pipeline is not None and split.pipeline.has_messages:
            forget_mesh(split.mesh)
        super().teardown()

    def __str__(self) -> str:
        options = [self.sharding_strategy, "CPU offload" if self.cpu_offload else "", str(self.layout)]
        units = (
            f"units: {self.wrapped_blocks}, and the rest" if self.wrapped_blocks else "blocks are found at the start"
        )
        return f"{self.name} ({', '.join(filter(None, options))}; {units})"


class Applied(NamedTuple):
    """A module that a run has sharded, for later runs, which may have another strategy object."""

    split: SplitModel
    processes: int
    precision: Precision
    fixed: dict[str, Any]
    """Options that cannot change."""
    wrapped_blocks: str


GatheredStates = list[tuple[Any, tuple[int, int]]]
"""torch's records of gathered parameters, each with what changes with its full values."""

_FIXED = ("auto_wrap_policy", "cpu_offload", "sharding_strategy", "device_mesh", "reshard_after_forward")


class _Hidden:
    """The arguments of a step, hidden from FSDP2, which would move each of their tensors to its device.

    A batch is where it belongs: tensors that the module's `transfer_batch_to_device` leaves on the host, such as
    lengths, stay there under every strategy.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments


class _FSDPForward(StepForward):
    def forward(self, step: str, hidden: _Hidden) -> Any:
        try:
            return super().forward(step, *hidden.arguments)
        except LeftStage as left:
            return left.hidden


def copy_views(unit: nn.Module, arguments: Any, output: Any) -> Any:
    """Return the output of a unit with views replaced by copies; None without views.

    An operation in place on a view, such as `x += y`, would silently drop FSDP2's hook, which gathers the unit's
    weights for its backward.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    found = False

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        if tensor.requires_grad and tensor._is_view():
            found = True
            return tensor.clone()
        return tensor

    same = map_tensors(output, copied)
    return same if found else None


def fsdp_units(wrapped: nn.Module) -> Iterator[Any]:
    """Yield the modules whose parameters FSDP2 gathers together."""
    from torch.distributed.fsdp import FSDPModule

    return (unit for unit in wrapped.modules() if isinstance(unit, FSDPModule))


def parameter_groups(unit: Any) -> list[Any]:
    """Return torch's groups of the parameters that are gathered with a unit."""
    state = unit._get_fsdp_state()
    # torch 2.13 has several groups; before it there was one, or None.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _state_of(full: nn.Parameter) -> tuple[int, int]:
    """Return what changes with a gathered parameter's values: its version, and its memory by `p.data = ...`.

    FSDP2 frees and allocates the bytes of one and the same storage.
    """
    return full._version, full.untyped_storage()._cdata


def _was_gathered(record: Any) -> bool:
    return "_unsharded_param" in vars(record)


def gathered_of(record: Any) -> list[nn.Parameter | None]:
    """Return what may stand in place of a shard: the full parameter, and the part of it that is kept after a forward.

    The latter with `reshard_after_forward` as a number.
    """
    return [getattr(record, "_unsharded_param", None), getattr(record, "_sharded_post_forward_param", None)]


def reshard_all(wrapped: nn.Module) -> None:
    """Free all gathered parameters, also after a forward that has ended with an error."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for unit in fsdp_units(wrapped):
        for group in parameter_groups(unit):
            group._training_state = TrainingState.IDLE
        unit.reshard()


def _computes_in_own_dtype(layer: nn.Module) -> bool:
    """Whether a layer computes with its parameters in their own dtype, also under autocast.

    Torch's norms need the dtype of their statistics, and spectral norm the dtype of its vectors; autocast does not
    choose the dtypes of other parametrizations either.
    """
    return has_statistics(layer) or isinstance(layer, ParametrizationList) or multiplies_buffers(layer)


def _init_own_dtypes(record: Any, policy: MixedPrecisionPolicy) -> None:
    """Gather a parameter in its own dtype, and reduce complex gradients in theirs."""
    type(record).init_dtype_attrs(record, policy)
    record.param_dtype = None
    if record.sharded_param.is_complex():
        record.reduce_dtype = None
