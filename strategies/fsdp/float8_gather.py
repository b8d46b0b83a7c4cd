"""Gather the weights of layers that compute in 8 bits as 8 bits, by FSDP2's extensions of its all-gather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.strategies.fsdp.trainable import places_of


def gather_in_float8(groups: Iterable[Sequence[Any]]) -> int:
    """Have FSDP2 gather the weights of torchao's layers with one scale for a tensor in 8 bits; return how many.

    Other weights are gathered as before: weights that tensor parallelism splits too, shards that are padded or in the
    CPU's memory, weights that another kind of layer has too, and weights that are resharded to fewer processes after
    the forward.

    Args:
        groups: torch's records of the parameters that are gathered together.
    """
    fitting = [[one for one in records if _can_be_gathered(one)] for records in groups]
    for records in fitting:
        _Scales(records)
    return sum(map(len, fitting))


def _can_be_gathered(record: Any) -> bool:
    """Whether a parameter is the weight of such a layer, and only FSDP2 splits it, into equal shards."""
    from torchao.float8.float8_linear import Float8Linear

    smaller = record.post_forward_mesh_info
    return (
        all(isinstance(module, Float8Linear) and name == "weight" for module, name in places_of(record))
        and record.mp_policy.param_dtype is not None
        and record.mesh_info.mesh.shape[-1] > 1
        and not record.is_dtensor
        and not record.offload_to_cpu
        and (smaller is None or smaller is record.mesh_info)
        and record._sharded_local_tensor.size() == record.padded_sharded_param_size
    )


class _Scales:
    """The scales of the weights that are gathered together, which need one all-reduce for each gathering."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.weights = [_Weight(self, number, record) for number, record in enumerate(records)]
        self._scales: list[torch.Tensor] = []

    def of(self, number: int, mesh: DeviceMesh) -> torch.Tensor:
        """Return the scale of a weight; FSDP2 asks for all weights in turn. Collective for the first one."""
        if number == 0:
            self._scales = self._compute(mesh)
        return self._scales[number]

    def _compute(self, mesh: DeviceMesh) -> list[torch.Tensor]:
        from torchao.float8.float8_utils import amax_to_scale

        largest = torch.stack([weight.rounded().abs().amax() for weight in self.weights])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        return list(amax_to_scale(largest, self.weights[0].dtype))


class _Weight:
    """A weight in 8 bits while it is sent: FSDP2 finds `before` and `after` as attributes of this process's shard.

    The shard stays a plain tensor, for optimizers and checkpoints. The processes send the 8 bits that the layer itself
    would make of the weight in bfloat16, and get a bfloat16 weight that the layer quantizes to the same 8 bits. So a
    step has the same numbers as with a weight that is gathered in bfloat16.
    """

    def __init__(self, scales: _Scales, number: int, record: Any) -> None:
        self._scales, self._number = scales, number
        self._shard: Any = record._sharded_local_tensor
        config = record._module_info.module.config
        self.dtype: torch.dtype = config.cast_config_weight.target_dtype
        self._computed: torch.dtype = record.mp_policy.param_dtype
        self._shard.fsdp_pre_all_gather = self.before
        self._shard.fsdp_post_all_gather = self.after
        record._init_extensions()

    def __deepcopy__(self, memo: object) -> _Weight:
        return self  # a copy of a shard is in no unit

    def rounded(self) -> torch.Tensor:
        """Return the shard in the dtype that layers compute with."""
        same: torch.Tensor = self._shard.detach().to(self._computed)
        return same

    def before(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        from torchao.float8.float8_utils import to_fp8_saturated

        scale = self._scales.of(self._number, mesh)
        bits = to_fp8_saturated(self.rounded().to(torch.float32) * scale, self.dtype)
        return (bits.view(torch.uint8),), scale  # gloo has no numbers of 8 bits

    def after(
        self,
        gathered: tuple[torch.Tensor, ...],
        scale: torch.Tensor,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        (bits,) = gathered
        with torch.no_grad():
            weight = (bits.view(self.dtype).to(torch.float32) / scale).to(dtype)
            if out is None:
                return weight, (weight,)
            # By `data`, as FSDP2 does it: for autograd the weight has not changed.
            out.data.copy_(weight)
        return None
