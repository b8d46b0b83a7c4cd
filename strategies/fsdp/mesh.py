"""Arrange the processes of a run in a mesh: stages of a pipeline, readers, and parts of sequences and of weights."""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.distributed.process_group import SingleProcess, TorchProcessGroup


@dataclass(frozen=True)
class ModelSplit:
    """Numbers of processes among which one model is split, by dimension; the rest of the processes are readers."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def processes(self) -> int:
        """Number of processes that hold one model together and read the same samples, without expert parallelism."""
        return self.tensor * self.context * self.pipeline

    def __str__(self) -> str:
        sizes = vars(self)
        order = ("pipeline", "expert", "context", "tensor")
        return ", ".join(f"{name}_parallel={sizes[name]}" for name in order if sizes[name] > 1)

    def __bool__(self) -> bool:
        """Return True if a model is split over several processes."""
        return self.processes * self.expert > 1


class ParallelMesh:
    """The mesh of a run, of dimensions (stage, readers, context, tensor): neighbouring ranks share a layer's weights.

    Args:
        device_type: of the processes' devices.
        layout: the division of one model.
        readers: names and sizes of the dimensions over which weights are sharded, or replicated and sharded, by FSDP;
            the product of all sizes is the number of processes.
    """

    def __init__(self, device_type: str, layout: ModelSplit, readers: dict[str, int]) -> None:
        self.layout = layout
        # FSDP shards over the processes of one sequence, too: the mean of their gradients is over the parts.
        sizes = {**readers, "shard": readers["shard"] * layout.context}
        if layout.expert > 1:
            shards = sizes.pop("shard")
            sizes = {**sizes, "expert shard": shards // layout.expert, "expert": layout.expert}
        if layout:
            sizes = {"stage": layout.pipeline, **sizes, "tensor": layout.tensor}
        self._sizes = sizes
        self.mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.shards = self.mesh
        """The mesh over which FSDP shards."""
        if layout.expert > 1:
            self.shards = self.mesh["expert shard", "expert"]._flatten("shard")
        if layout and (layout.expert == 1 or len(readers) > 1):
            self.shards = self.mesh[tuple(readers)]
        shape = (layout.pipeline, math.prod(readers.values()), layout.context, layout.tensor)
        self._ranks = self.mesh.mesh.reshape(shape)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._of_stages: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if layout.processes > 1:
            # Two for stages: NCCL would have a send wait for a receive in the other direction.
            for number, name in enumerate(("stage", "readers", "context", "stage, backwards")):
                self._groups[name] = self._new_group(number % 3)

    def _new_group(self, dim: int) -> dist.ProcessGroup:
        """Return a group of the processes along a dimension of (stage, readers, context). Collective."""
        lines = self._ranks.movedim(dim, -1).reshape(-1, self._ranks.shape[dim]).tolist()
        own, _ = dist.new_subgroups_by_enumeration(lines)
        group: dist.ProcessGroup = own
        return group

    def describe(self) -> str:
        """Return text with the sizes of the dimensions."""
        return f"mesh: {' x '.join(f'{size} {name}' for name, size in self._sizes.items())}"

    @property
    def tensor(self) -> DeviceMesh:
        """The processes among which this process's layers are split."""
        return self.mesh["tensor"]

    @property
    def experts(self) -> DeviceMesh:
        """The processes among which the experts of a mixture are split."""
        layout = self.layout
        names = [name for name, size in (("expert", layout.expert), ("tensor", layout.tensor)) if size > 1]
        return self.mesh[tuple(names)]

    @property
    def expert_shards(self) -> DeviceMesh:
        """The mesh over which FSDP shards a process's experts."""
        if self.layout.expert == 1:
            return self.shards
        return self.mesh[tuple(name for name in self._sizes if name in ("replicate", "expert shard"))]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the processes along "stage" (or "stage, backwards"), "readers" or "context" through this process."""
        return self._groups[name]

    def group_of_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of some stages of this process's model; None if this process is of none of them."""
        ranks = dist.get_process_group_ranks(self._groups["stage"])
        if len(stages) == len(ranks):
            return self._groups["stage"]
        if self.position("stage") not in stages:
            return None
        some = tuple(stages)
        if some not in self._of_stages:
            members = [ranks[stage] for stage in stages]
            self._of_stages[some] = dist.new_group(members, use_local_synchronization=True)
        return self._of_stages[some]

    def position(self, name: str) -> int:
        """Return this process's coordinate along "stage", "readers", "context" or "tensor"."""
        at = (self._ranks == dist.get_rank()).nonzero()[0].tolist()
        return int(at[("stage", "readers", "context", "tensor").index(name)])

    def set_readers(self, processes: SingleProcess) -> None:
        """Set which processes read the same samples, and which report: the first process of the last stage."""
        if self.layout.processes == 1:
            return
        assert isinstance(processes, TorchProcessGroup)  # of several processes
        reader_of = [0] * processes.world_size
        for reader in range(self._ranks.shape[1]):
            for rank in self._ranks[:, reader].flatten().tolist():
                reader_of[rank] = reader
        processes.set_readers(reader_of, self._ranks[-1, :, 0, 0].tolist(), self._groups["readers"])


_KEPT: dict[tuple[Any, ...], ParallelMesh] = {}
"""The meshes of this process, by process group and sizes."""


def kept_mesh(device_type: str, layout: ModelSplit, readers: dict[str, int], processes: SingleProcess) -> ParallelMesh:
    """Return the mesh of these sizes, which the first run that needs it has made. Collective.

    A group keeps threads, and memory of the GPUs, until the process ends: runs one after the other share theirs. If a
    process has forgotten its mesh, all make a new one.
    """
    is_made_of_groups = bool(layout) or len(readers) > 1
    if not is_made_of_groups or dist.get_backend() == "fake":  # in a dry run nothing is sent
        return ParallelMesh(device_type, layout, readers)
    key = (dist.group.WORLD, device_type, layout, *readers.items())
    if not all(processes.all_gather_object(key in _KEPT)):
        if not _KEPT:
            atexit.register(_KEPT.clear)  # before the process group is destroyed
        _KEPT[key] = ParallelMesh(device_type, layout, readers)
    return _KEPT[key]


def forget_mesh(mesh: ParallelMesh) -> None:
    """Have later runs make a new mesh: messages of a run that has ended with an error may still be on their way."""
    for key in [key for key, kept in _KEPT.items() if kept is mesh]:
        del _KEPT[key]
