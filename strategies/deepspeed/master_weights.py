"""Read and write a DeepSpeed engine's state by parameter: shards of master weights and of optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.flat_slice import EMPTY_SLICE, FlatSlice
from trainer.checkpoint.optimizer_state import has_own_dtype
from trainer.checkpoint.shards import Loadable, Shard, StoredTensor, materialize, read_slice
from trainer.errors import CheckpointError, ConfigError
from trainer.model.full_parameters import checksum, same_bits
from trainer.strategies.deepspeed.partitioning import (
    cast_parameters,
    in_float32,
    is_zero3_partitioned,
    load_partition,
    partition_extent,
    partition_shard,
    partitioned_parameters,
    shape_of,
)
from trainer.strategy import Values

FIRST_STEPS = 3
"""Steps after which changes by `p.data` are looked for."""

OF_ALL_ELEMENTS = ("step", "mu_product", "eta", "mu")
"""Entries that torch's optimizers keep once for a tensor; every other one is as large as the tensor."""


@dataclass(frozen=True)
class ParameterSlice:
    """The part of a parameter whose master weights this process holds, in float32."""

    shape: tuple[int, ...]
    """Shape of the full parameter."""
    extent: FlatSlice
    """Slice of the flattened parameter that this process holds; `EMPTY_SLICE`: other processes hold all of it."""
    flat: int
    """Number of the flat tensor that holds them: DeepSpeed flattens parameters into few tensors."""
    offset: int
    """Position of the first of these elements in the flat tensor."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of these elements of the flat tensor, or of a state that is as large."""
        return flat.detach().narrow(0, self.offset, self.extent.numel)


class MasterWeights:
    """Master weights and optimizer states of ZeRO 1 and 2, and the place of each parameter in the flat tensors.

    They outlive the engine: a checkpoint may be written after the end of the training.
    """

    def __init__(self, zero: Any, optimizer: Any) -> None:
        self.zero: Any = zero
        self.optimizer: Optimizer = optimizer
        self.pieces: dict[nn.Parameter, ParameterSlice] = {}
        self.groups: list[int] = []
        """The optimizer's group of each flat tensor."""
        self.flats: list[torch.Tensor] = self._find()
        self.buffers = [flat.grad for flat in self.flats]
        """The buffers that sum up gradients, if these are not on the device."""

        self._seen: list[tuple[nn.Parameter, int, torch.Tensor]] = []
        """The parameters that the module computes with, each with its version and its memory after the last step."""
        self._sums: dict[nn.Parameter, torch.Tensor | None] = {}
        """In the first steps: sums of the bits of full parameters, to find changes that no version counts."""
        self._compares = FIRST_STEPS
        self._rounded_to: dict[nn.Parameter, torch.dtype] = {}
        """The dtype of each parameter in the module's computations during the run that has ended."""

    def _find(self) -> list[torch.Tensor]:
        # With bf16 and gradients summed in fp32, ZeRO 1 has another class with other names for the same things.
        flats = getattr(self.zero, "single_partition_of_fp32_groups", None) or self.zero.fp32_groups_flat_partition
        parameters = getattr(self.zero, "bit16_groups", None) or self.zero.bf16_groups
        for number, group in enumerate(parameters):
            self.groups.append(number)
            for parameter in group:
                mapping = parameter._hp_mapping
                if mapping is None:
                    extent, offset = EMPTY_SLICE, 0
                else:
                    extent = FlatSlice(mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)
                    offset = mapping.hp_fragment_address.start
                self.pieces[parameter] = ParameterSlice(tuple(parameter.shape), extent, number, offset)
        return list(flats)

    @contextmanager
    def swapped_in(self, number: int, change: bool = False) -> Iterator[torch.Tensor]:
        """Yield a flat tensor, with its states in memory; `change`: write both back afterwards."""
        yield self.flats[number]

    def detached_copy(self, part: torch.Tensor) -> torch.Tensor:
        """Return a part of a flat tensor that stays valid after `swapped_in`: a copy if it may go to NVMe."""
        return part

    def refresh(self) -> None:
        """Copy master weights into the weights that the module computes with. Collective."""
        self.zero.update_lp_params()

    def remember_weights(self) -> None:
        """Note the state of the parameters that the module computes with, as the engine has left them."""
        self._seen = [(parameter, parameter._version, parameter.data) for parameter in self.pieces]
        self._compares -= 1
        self._sums = {p: checksum(p) for p in self.pieces if self.is_full(p)} if self._compares >= 0 else {}

    def is_full(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has all of its values between two steps."""
        return True

    def take_over_changes(self) -> None:
        """Give the master weights the values of parameters that hooks have changed since `remember_weights`.

        Without that the next step would overwrite the changes.

        Raises:
            ConfigError: they were changed by `p.data.mul_()` or the like, which is found in the first steps alone.
        """
        self._refuse_hidden_changes()
        self.take_over_counted_changes()

    def take_over_counted_changes(self) -> None:
        """Give the master weights the changes that the parameters' versions count."""
        changed = [(p, data) for p, version, data in self._seen if p._version != version or not data.is_set_to(p.data)]
        if changed:
            for parameter, data in changed:
                data.copy_(parameter.data)
                parameter.data = data  # a part of the engine's flat tensor
            self.write({parameter: parameter.data for parameter, _ in changed})
            self.remember_weights()

    def _refuse_hidden_changes(self) -> None:
        for parameter, version, data in self._seen if self._sums else ():
            hidden = parameter._version == version and data.is_set_to(parameter.data) and self.is_full(parameter)
            if hidden and not same_bits(self._sums.get(parameter), checksum(parameter)):
                raise ConfigError(
                    f"a parameter of shape {list(shape_of(parameter))} was changed while training by its .data, as in "
                    f"p.data.clamp_(), which DeepSpeed loses: its values are kept elsewhere, too. {self.instead}"
                )

    instead = "Change the parameter itself: with torch.no_grad(): p.clamp_(...)."

    def begin_step(self) -> None:
        """Zero the buffers of gradients, before the first backward of a step.

        DeepSpeed (0.19.8) leaves in them the gradients of the step before, for parameters that are not used in this
        one; and `Optimizer.zero_grad` takes them away.
        """
        for flat, buffer in zip(self.flats, self.buffers, strict=True):
            if buffer is not None:
                flat.grad = buffer.zero_()

    def finish(self) -> None:
        """Take over the changes of the last hooks, and drop groups that the engine does not know."""
        self.take_over_counted_changes()
        self._drop_later_groups()

    def _drop_later_groups(self) -> None:
        """Remove the optimizer's groups that the engine does not know."""
        del self.optimizer.param_groups[len(set(self.groups)) :]

    def release_engine(self, module: nn.Module) -> None:
        """Drop the engine and keep the state; the module's parameters become float32."""
        cast_parameters(module, torch.float32)
        self.zero = None
        self._rounded_to = {parameter: data.dtype for parameter, _, data in self._seen}
        self._seen = []

    def take_over_later_changes(self) -> None:
        """Give the master weights what was changed of the parameters, in any way, since the run has ended.

        All else keeps the digits that the module's weights in 16 bits do not have.
        """
        for parameter, piece in self.pieces.items():
            master = piece.of(self.flats[piece.flat])
            now = piece.extent.take(parameter.detach()).to(master)
            as_left = master.to(self._rounded_to[parameter]).to(master)
            master.copy_(torch.where(now == as_left, master, now))

    # -- weights -------------------------------------------------------------------------------------------------------

    def shard(self, parameter: nn.Parameter) -> Shard:
        """Return this process's shard of a parameter."""
        piece = self.pieces[parameter]
        with self.swapped_in(piece.flat) as flat:
            return Shard(self.detached_copy(piece.of(flat)), piece.shape, piece.extent)

    def write(self, values: Mapping[nn.Parameter, Loadable | Shard]) -> None:
        """Set master weights from this process's shards, or from full tensors; only these shards are read."""
        for number in range(len(self.flats)):
            pieces = {p: piece for p, piece in self.pieces_of(number).items() if p in values}
            if not pieces:
                continue
            with self.swapped_in(number, change=True) as flat, torch.no_grad():
                for parameter, piece in pieces.items():
                    value = values[parameter]
                    piece.of(flat).copy_(value.local if isinstance(value, Shard) else read_slice(value, piece.extent))

    # -- states --------------------------------------------------------------------------------------------------------

    def states(self, names: Mapping[nn.Parameter, str]) -> dict[str, dict[str, Any]]:
        """Return the optimizer's states by the name of the parameter, in torch's keys.

        Raises:
            CheckpointError: the optimizer keeps something that does not belong to single elements.
        """
        found: dict[str, dict[str, Any]] = {}
        for number in range(len(self.flats)):
            with self.swapped_in(number) as flat:
                state = self.optimizer.state.get(self.flats[number], {})
                if not isinstance(state, dict):
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps a {type(state).__name__} as the state of a parameter: "
                        "under DeepSpeed keep a dict, self.state[p]['name'] = ..., to be saved."
                    )
                for parameter, piece in self.pieces_of(number).items() if state else ():
                    found[names[parameter]] = {key: self._entry(piece, key, v, flat) for key, v in state.items()}
        return found

    def _entry(self, piece: ParameterSlice, key: str, value: Any, flat: torch.Tensor) -> Any:
        if key in OF_ALL_ELEMENTS:
            return value.clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != flat.shape:
            raise CheckpointError(
                f"{type(self.optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {flat.numel()} "
                "elements of parameters that DeepSpeed flattens together, so it cannot be saved by parameter. Use an "
                "optimizer that treats all elements alike, such as torch.optim.AdamW."
            )
        return Shard(self.detached_copy(piece.of(value)), piece.shape, piece.extent)

    def load_states(
        self,
        states: Mapping[str, Mapping[str, Any]],
        names: Mapping[nn.Parameter, str],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """Set the optimizer's states from full parameters' states; only this process's shards are read.

        `dtypes`: of the parameters, by name, when the states were saved.

        Raises:
            CheckpointError: they are of other shapes, or cannot be kept together.
        """
        for number in range(len(self.flats)):
            with self.swapped_in(number, change=True) as flat, torch.no_grad():
                common: dict[str, float] = {}
                for parameter, piece in self.pieces_of(number).items():
                    name = names[parameter]
                    for key, value in states.get(name, {}).items():
                        if key in OF_ALL_ELEMENTS:
                            self._require_equal(common, key, value, name)
                        elif isinstance(value, (torch.Tensor, StoredTensor)):
                            dtype = value.dtype if has_own_dtype(value, dtypes.get(name)) else flat.dtype
                            self._load_entry(number, key, value, name, piece, dtype)
                        else:
                            self.optimizer.state[self.flats[number]][key] = value
                for key, as_number in common.items():
                    self._set_common(number, key, as_number)

    def _require_equal(self, common: dict[str, float], key: str, value: Any, name: str) -> None:
        number = float(materialize(value) if isinstance(value, (torch.Tensor, StoredTensor)) else value)
        if common.setdefault(key, number) != number:
            raise CheckpointError(
                f"the checkpoint's optimizer has {key}={number:g} for {name!r}, and {common[key]:g} for others of its "
                "group, but DeepSpeed keeps one value for a group. Give these parameters a separate group in "
                "configure_optimizers."
            )

    def _set_common(self, number: int, key: str, value: float) -> None:
        state, group = self.optimizer.state[self.flats[number]], self.optimizer.param_groups[self.groups[number]]
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        elif type(self.optimizer).__module__.startswith("deepspeed."):  # whose step is a Python number
            state[key] = int(value)
        else:
            # As torch's Optimizer.load_state_dict does it.
            on_device = group.get("capturable") or group.get("fused")
            state[key] = torch.tensor(value, device=self.flats[number].device if on_device else "cpu")

    def _load_entry(
        self, number: int, key: str, value: Loadable, name: str, piece: ParameterSlice, dtype: torch.dtype
    ) -> None:
        if tuple(value.shape) != piece.shape:
            raise CheckpointError(
                f"the checkpoint's {key!r} of {name!r} has the shape {tuple(value.shape)}; needed is {piece.shape}."
            )
        flat = self.flats[number]
        state = self.optimizer.state[flat]
        if state.get(key) is None:
            state[key] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
        piece.of(state[key]).copy_(read_slice(value, piece.extent))

    def pieces_of(self, number: int) -> dict[nn.Parameter, ParameterSlice]:
        """Return the parameters in one flat tensor."""
        return {parameter: piece for parameter, piece in self.pieces.items() if piece.flat == number}

    def restore_full_parameters(self) -> None:
        """Set the parameters themselves to the full master weights, on every process. Collective."""
        for parameter, piece in self.pieces.items():
            with self.swapped_in(piece.flat) as flat:
                total = torch.zeros(piece.shape, dtype=flat.dtype, device=flat.device)
                piece.extent.take(total).copy_(piece.of(flat))
            total = total.to(parameter.device)
            dist.all_reduce(total)
            parameter.data = total


class Zero3MasterWeights(MasterWeights):
    """Master weights and optimizer states of ZeRO 3, where the weights of the module are sharded, too."""

    def _find(self) -> list[torch.Tensor]:
        for number, group in enumerate(self.zero.fp16_groups):
            self.groups.append(self.zero.sub_group_to_group_id[number])
            offset = 0
            for parameter in group:
                shape = tuple(parameter.ds_shape)
                self.pieces[parameter] = ParameterSlice(shape, partition_extent(parameter), number, offset)
                offset += parameter.ds_tensor.ds_numel
        return list(self.zero.fp32_partitioned_groups_flat)

    @property
    def swapped(self) -> bool:
        """Whether the flat tensors are on NVMe, and in memory only when they are needed."""
        return self.zero is not None and bool(self.zero.swap_optimizer)

    @contextmanager
    def swapped_in(self, number: int, change: bool = False) -> Iterator[torch.Tensor]:
        if not self.swapped or not self.zero._swappable_optimizer_subgroup(number):
            yield self.flats[number]
            return
        self.zero._optimizer_states_and_gradient_swap_in(number)
        yield self.flats[number]
        if change:
            self.zero._optimizer_states_and_gradient_swap_out(number)
        else:
            self.zero._release_swap_buffers(number)

    def take_over_changes(self) -> None:
        """Raise ConfigError for parameters that were changed: each process holds a slice of their values, elsewhere."""
        self._refuse_hidden_changes()
        for parameter, version, _ in self._seen:
            if parameter._version != version or (parameter.numel() and not self.is_full(parameter)):
                raise ConfigError(
                    f"a parameter of shape {list(shape_of(parameter))} was changed while training, and DeepSpeed's "
                    f"stage 3 keeps the values elsewhere, so that the change would be lost. {self.instead}"
                )

    instead = "Change it before fit, in configure_model; or use stage 2, 'fsdp' or 'ddp'."

    def is_full(self, parameter: Any) -> bool:
        return parameter.ds_status is not type(parameter.ds_status).NOT_AVAILABLE

    def begin_step(self) -> None:
        super().begin_step()
        self.zero.grad_partitions_flat_buffer.zero_()

    def detached_copy(self, part: torch.Tensor) -> torch.Tensor:
        return part.clone() if self.swapped else part

    def refresh(self) -> None:
        self.zero._partition_all_parameters()
        for number in range(len(self.flats)):
            with self.swapped_in(number):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)

    def finish(self) -> None:
        self._drop_later_groups()

    def release_engine(self, module: nn.Module) -> None:
        cast_parameters(module, torch.float32)
        if not self.swapped:
            self.zero = None

    def take_over_later_changes(self) -> None:
        """Do nothing: `refuse_lost_changes` refuses them."""

    def restore_full_parameters(self) -> None:
        """Do nothing: the parameters stay sharded."""


class NoMasterWeights(MasterWeights):
    """No master weights, before a training, and of an engine of stage 3 that evaluates only."""

    def _find(self) -> list[torch.Tensor]:
        return []

    def refresh(self) -> None:
        self.zero.partition_all_parameters()

    def finish(self) -> None:
        """Do nothing, without an optimizer."""

    def release_engine(self, module: nn.Module) -> None:
        self.zero = None


def keep_only_shards(module: nn.Module, master_weights: MasterWeights) -> None:
    """Replace the parameters that stage 3 partitioned by this process's slices of their master weights."""
    for parameter in partitioned_parameters(module):
        part: Any = parameter.ds_tensor
        parameter.ds_active_sub_modules.clear()
        piece = master_weights.pieces.get(parameter)
        if piece is not None and master_weights.flats[piece.flat].numel():  # empty: it is on NVMe
            part.data = master_weights.flats[piece.flat].detach().narrow(0, piece.offset, part.ds_numel)
        parameter.data = torch.empty(0, dtype=part.dtype, device=parameter.device)
        parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE
        parameter.version_when_emptied = parameter._version


def refuse_lost_changes(module: nn.Module) -> None:
    """Raise ConfigError for changes of parameters that `keep_only_shards` has emptied, which changed nothing."""
    for name, parameter in module.named_parameters():
        if vars(parameter).get("version_when_emptied", parameter._version) != parameter._version:
            raise ConfigError(
                f"{name} was changed after the run, when it was empty: stage 3 has sharded its values. Change it on "
                "all processes in a block: with trainer.full_parameters(module, write=True): ..."
            )


def weights(module: nn.Module, master_weights: MasterWeights) -> dict[str, torch.Tensor | Shard]:
    """Return weights and buffers by name, as `Strategy.module_state`: float32 master weights if there are any."""
    found: dict[int, Any] = {}  # tied parameters have one entry under several names
    state = module.state_dict(keep_vars=True)
    return {name: found.setdefault(id(value), _weight(value, master_weights)) for name, value in state.items()}


def _weight(value: Any, master_weights: MasterWeights) -> Any:
    if not isinstance(value, nn.Parameter):  # a buffer, or a module's extra state
        return value.detach() if isinstance(value, torch.Tensor) else value
    if value in master_weights.pieces:
        return master_weights.shard(value)
    return partition_shard(value) if is_zero3_partitioned(value) else in_float32(value.detach())


class EngineValues(Values):
    """Sets partitioned parameters, and collects values for master weights, to be written together.

    The weights that the module computes with are to be made from the master weights afterwards.
    """

    def __init__(self, master_weights: MasterWeights) -> None:
        self.of_masters: dict[nn.Parameter, Loadable | Shard] = {}
        self._pieces: Mapping[Any, ParameterSlice] = master_weights.pieces

    def shape_of_part(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        return shape_of(tensor) if tensor in self._pieces or is_zero3_partitioned(tensor) else None

    def set(self, tensor: Any, value: Loadable | Shard) -> None:
        if tensor in self._pieces:
            self.of_masters[tensor] = value
        elif is_zero3_partitioned(tensor):
            load_partition(tensor, value)
        else:
            super().set(tensor, value)
