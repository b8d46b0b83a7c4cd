"""Average a run's weights, by a callback or by the optimizer, sharded as the strategy shards the weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves_with_path

from trainer.checkpoint.finite import not_finite
from trainer.checkpoint.shards import Loadable, Shard, materialize, read_slice
from trainer.guards.trainable_parameters import optimized_parameters
from trainer.optimizers import with_modes
from trainer.runs.compare_ranks import compare
from trainer.strategy import Strategy

Update = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]
"""Changes averages, given with the current weights and the number of updates so far."""

TensorOrShard = torch.Tensor | Shard


@dataclass
class _Places:
    """Tensors of an update."""

    averages: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    """The weights to average, in the order of `averages`."""
    differ: bool = False
    """Some weights have another device or dtype than their averages."""
    copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """The averages that are copies, such as integers, with the values to copy."""


class AveragedWeights:
    """Averages of the parameters that train, and of buffers. Each process averages its own shards.

    Averages of weights in 16 bits are float32: a small part of a change would be rounded away.

    Args:
        strategy: of the run.
        use_buffers: average floating buffers, too.
        device: the device of the averages; None: the weights' device.
    """

    def __init__(self, strategy: Strategy, use_buffers: bool, device: torch.device | None) -> None:
        self.count = 0
        """Number of updates. Before the first one there are no averages."""
        self._strategy, self._use_buffers, self._device = strategy, use_buffers, device
        self._averages: dict[str, torch.Tensor] = {}
        self._trained: dict[str, TensorOrShard] | None = None
        """The weights of the training while the averages are in their place."""
        self._places: _Places | None = None
        self._frozen: list[nn.Parameter] = []
        """The parameters that did not train when the places were looked up."""

    # -- training ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, change: Update) -> None:
        """Update the averages with the current weights (the first call copies them)."""
        if self._places is None:
            self._places = self._find_places()
        averages, now = self._places.averages, self._places.weights
        if self._places.differ:
            now = [weight.to(average.device, average.dtype) for average, weight in zip(averages, now, strict=True)]
        if self.count == 0:
            torch._foreach_copy_(averages, now)
        else:
            change(averages, now, self.count)
        for average, value in self._places.copied:
            average.copy_(value)
        self.count += 1

    @torch.no_grad()
    def begin_unfrozen(self) -> None:
        """Begin the averages of parameters that train from the next step on, with their current values."""
        # Without places the run has gone to a checkpoint, and parameters that train now may not have trained before.
        if self.count and (self._places is None or any(parameter.requires_grad for parameter in self._frozen)):
            self._places = self._find_places()

    def _find_places(self) -> _Places:
        self._frozen = [one for one in self._strategy.module.parameters() if not one.requires_grad]
        entries = self._entries()
        buffers = [name for name, b in self._strategy.module.named_buffers() if b.is_floating_point()]
        known = {name: _local(entries[name]) for name in buffers if name in entries}
        # Buffers that are not finite, such as masks of -inf, are copied: their mean would be NaN.
        unknown = {*not_finite(iter(known.items()))}
        places = _Places()
        for name, entry in entries.items():
            average, weight = self._average_of(name, entry), _local(entry)
            if name in unknown or not average.is_floating_point():
                places.copied.append((average, weight))
                continue
            places.averages.append(average)
            places.weights.append(weight)
            places.differ |= (average.device, average.dtype) != (weight.device, weight.dtype)
        return places

    def keep_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep values of buffers that belong to the averages."""
        self._averages.update(values)
        self.forget_places()

    @property
    def has_buffers(self) -> bool:
        """Whether values of buffers belong to the averages."""
        return any(name in self._averages for name, _ in self._strategy.module.named_buffers())

    def forget_buffers(self) -> None:
        """Forget the values of buffers, before the averages that they belong to change."""
        for name, _ in self._strategy.module.named_buffers():
            self._averages.pop(name, None)
        self.forget_places()

    def forget_places(self) -> None:
        """Look up the weights again before the next update: parameters may have been replaced or unfrozen."""
        self._places = None

    def _average_of(self, name: str, entry: TensorOrShard) -> torch.Tensor:
        """Return the average of a weight, begun with its value."""
        if name not in self._averages:
            local = _local(entry)
            dtype = torch.float32 if local.dtype in (torch.bfloat16, torch.float16) else local.dtype
            self._averages[name] = local.to(self._device or local.device, dtype, copy=True)
        return self._averages[name]

    def _entries(self, stored: Collection[str] = ()) -> dict[str, TensorOrShard]:
        """Return the weights to average by name, tied weights once, in the memory that the optimizer changes.

        Args:
            stored: names in a checkpoint: buffers among them belong to the averages, and weights that do not train yet.
        """
        state, module = self._strategy.module_state(), self._strategy.module
        own = {*self._averages, *stored}
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad or name in own]
        named += [(n, b) for n, b in module.named_buffers() if self._use_buffers or n in own]  # type: ignore[misc]
        names = [name for name, _ in named]
        return {name: state[name] for name in names if isinstance(state.get(name), (torch.Tensor, Shard))}

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the averages into the module, if there are any. Collective.

        Raises:
            ConfigError: the processes have averaged differently.
        """
        self._check_equal()
        if self.count == 0 or self._trained is not None:
            return
        self._synchronize_buffers()
        entries = self._entries()
        self._trained = _copies(entries)
        self._write({name: _like(entry, self._average_of(name, entry)) for name, entry in entries.items()})

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the weights of the training back. Collective."""
        if self._trained is not None:
            trained, self._trained = self._trained, None
            self._write(trained)

    def _write(self, entries: Mapping[str, Any]) -> None:
        _write(self._strategy, entries)
        self.forget_places()

    def _check_equal(self) -> None:
        """Check that all processes have averaged as often and, where each has all weights, with the same result."""
        if self._strategy.processes.world_size == 1:
            return
        facts: dict[str, object] = {"updates of the averages": self.count}
        names = [name for name, _ in self._strategy.module.named_parameters() if name in self._averages]
        if names and not self._strategy.shards_state:
            sums = torch.stack([_sum_of_bits(self._averages[name]) for name in names])
            facts |= zip([f"bits of the average of {name}" for name in names], sums.tolist(), strict=True)
        fix = "Average alike on all processes: avg_fn, multi_avg_fn and should_update may not depend on the rank."
        compare(self._strategy.processes, facts.items(), fix)

    def _synchronize_buffers(self) -> None:
        """Give all processes the averages of reader 0's buffers, which differ as the buffers themselves do."""
        names = [name for name, _ in self._strategy.module.named_buffers() if name in self._averages]
        self._strategy.processes.broadcast_over_readers([self._averages[n] for n in names if self._averages[n].numel()])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the averages to a checkpoint, and have it hold the weights of the training. Collective.

        Raises:
            ConfigError: the processes have averaged differently.
        """
        self._check_equal()
        if self.count == 0:
            return
        self._synchronize_buffers()
        checkpoint["average"] = _under_all_names(self._strategy.module, self.entries())
        checkpoint["model"].update(_under_all_names(self._strategy.module, self._trained or {}))

    def entries(self) -> dict[str, TensorOrShard]:
        """Return the averages by name, of tied weights once; none before the first update."""
        entries = self._entries() if self.count else {}
        return {name: _like(entry, self._average_of(name, entry)) for name, entry in entries.items()}

    @torch.no_grad()
    def load(self, stored: Mapping[str, Loadable], count: int) -> None:
        """Restore averages that a run with any strategy has saved; each process reads its shards.

        Averages that are not stored begin again.
        """
        self.count, copies = count, {}
        self._averages = {name: value for name, value in self._averages.items() if name in stored}
        self.forget_places()
        for name, entry in self._entries(stored).items():
            if name not in stored:
                continue
            average = self._average_of(name, entry)
            if not isinstance(entry, Shard):
                average.copy_(materialize(stored[name]))
            elif entry.extent.numel:
                average.copy_(read_slice(stored[name], entry.extent).view(average.shape))
            elif average.numel():
                copies[name] = entry
        for name, entry in copies.items():
            self._load_copy(name, entry, stored[name])

    def _load_copy(self, name: str, entry: Shard, stored: Loadable) -> None:
        """Restore the average of a weight that is a copy of another process's shard: through the weight itself.

        Only the process that writes the elements knows which ones the copy has. A weight in 16 bits takes a float32
        average in three parts, each with the bits that the part before has rounded off.
        """
        average, before = self._averages[name], entry.local.clone()
        if entry.local.dtype == average.dtype:
            self._strategy.load_module_state({name: stored}, hooks=False)
            average.copy_(entry.local)
        else:
            rest = materialize(stored).to(average.dtype)
            average.zero_()
            for scale in (1.0, 2.0**8, 2.0**16):
                part = (rest * scale).to(entry.local.dtype)
                self._strategy.load_module_state({name: part}, hooks=False)
                average.add_(entry.local.to(average.dtype) / scale)
                rest -= part.to(rest.dtype) / scale
        entry.local.copy_(before)


class OptimizerAverages:
    """The weights for evaluation of optimizers with `train()` and `eval()`, such as schedule-free ones.

    `eval()` puts them into the module. `train()` computes the weights of the training from them, but not the last bits.
    So these weights are put back from a copy, and so are the optimizers' states that `eval()` has changed.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._optimizers: list[Any] = []
        self._all: list[Optimizer] = []
        self._trained: dict[str, TensorOrShard] | None = None
        """The weights of the training while the weights for evaluation are in their place."""
        self._states: dict[Any, torch.Tensor] = {}
        """The tensors of the optimizers' states that `eval()` has changed, before the change."""

    def begin(self, optimizers: list[Optimizer]) -> None:
        """Put new optimizers into train mode: a checkpoint that is loaded afterwards was written in it."""
        self._optimizers, self._all = with_modes(optimizers), optimizers
        self.train()

    @property
    def name(self) -> str | None:
        """The class of an optimizer with two modes; None: there is none."""
        return next((type(optimizer).__name__ for optimizer in self._optimizers), None)

    def train(self) -> None:
        """Have the optimizers in train mode, also if a checkpoint was written in the other one."""
        for optimizer in self._optimizers:
            optimizer.train()

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the weights for evaluation into the module."""
        if not self._optimizers or self._trained is not None:
            return
        self._strategy.release_gathered()
        self.train()  # a hook of the user's may have called eval()
        self._trained = _copies(self._entries())
        before = {path: tensor.clone() for path, tensor in self._tensors()}
        for optimizer in self._optimizers:
            optimizer.eval()
        now = dict(self._tensors())
        self._states = {path: was for path, was in before.items() if not torch.equal(was, now.get(path, was))}

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the weights of the training back."""
        if self._trained is not None:
            trained, self._trained = self._trained, None
            self.train()
            for path, tensor in self._tensors():
                if path in self._states:
                    tensor.copy_(self._states[path])
            self._states = {}
            _write(self._strategy, trained)

    def _tensors(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield the tensors in the optimizers' states by their places; of a sharded tensor this process's part."""
        states = [one.state_dict() for one in dict.fromkeys([*self._all, *self._optimizers])]
        for path, leaf in tree_leaves_with_path(states):
            if isinstance(leaf, torch.Tensor):
                yield path, own_part(leaf)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Have the weights for evaluation in the module within the block."""
        self.swap_in()
        try:
            yield
        except BaseException:
            if not self._strategy.shards_state:  # else the other processes may be anywhere
                self.swap_out()
            raise
        self.swap_out()

    @contextmanager
    def trained(self) -> Iterator[dict[str, TensorOrShard]]:
        """Have the weights of the training in the module within the block; yield copies of the weights for evaluation.

        The copies are in host memory, under all names of tied weights.
        """
        if not self._optimizers:
            yield {}
            return
        before = self._trained is not None
        self.swap_in()
        averages = _under_all_names(self._strategy.module, _copies(self._entries(), torch.device("cpu")))
        self.swap_out()
        try:
            yield averages
        finally:
            if before:
                self.swap_in()

    def _entries(self) -> dict[str, TensorOrShard]:
        """Return the parameters that the optimizers train, by name, in the memory that they change."""
        state, named = self._strategy.module_state(), self._strategy.module.named_parameters()
        trained = optimized_parameters(self._all)  # hooks add groups
        return {name: state[name] for name, parameter in named if id(parameter) in trained}


def _copies(entries: Mapping[str, TensorOrShard], device: torch.device | None = None) -> dict[str, TensorOrShard]:
    return {
        name: _like(entry, _local(entry).to(device or _local(entry).device, copy=True))
        for name, entry in entries.items()
    }


def _write(strategy: Strategy, entries: Mapping[str, Any]) -> None:
    strategy.release_gathered()
    strategy.load_module_state(entries, hooks=False)


def _under_all_names(module: nn.Module, entries: Mapping[str, TensorOrShard]) -> dict[str, TensorOrShard]:
    """Return the entries of tied weights under each of their names, as `module_state` does."""
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    named += module.named_buffers(remove_duplicate=False)
    first = {id(tensor): name for name, tensor in reversed(named)}
    return {name: entries[first[id(tensor)]] for name, tensor in named if first[id(tensor)] in entries}


def exponential(decay: float) -> Update:
    """Return the update of an exponential moving average."""

    def change(averages: list[torch.Tensor], now: list[torch.Tensor], count: int) -> None:
        torch._foreach_lerp_(averages, now, 1 - decay)

    return change


def equal_weights(averages: list[torch.Tensor], now: list[torch.Tensor], count: int) -> None:
    """Update the mean of all weights so far."""
    torch._foreach_lerp_(averages, now, 1 / (count + 1))


def from_avg_fn(function: Callable[..., torch.Tensor]) -> Update:
    """Return the update by torch's `avg_fn(averaged, current, num_averaged)`, which is called for each tensor."""

    def change(averages: list[torch.Tensor], now: list[torch.Tensor], count: int) -> None:
        for average, value in zip(averages, now, strict=True):
            average.copy_(function(average, value, torch.tensor(count, device=average.device)))

    return change


def from_multi_avg_fn(
    function: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor], Any],
) -> Update:
    """Return the update by torch's `multi_avg_fn`, which gets lists and changes the first one in place."""

    def change(averages: list[torch.Tensor], now: list[torch.Tensor], count: int) -> None:
        function(averages, now, torch.tensor(count, device=averages[0].device if averages else None))

    return change


def _sum_of_bits(value: torch.Tensor) -> torch.Tensor:
    """Return a sum that does not depend on the order of additions, as a sum of floats would."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return value.contiguous().view(integers[value.element_size()]).sum(dtype=torch.int64)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, or of this process's part of a sharded tensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _local(entry: TensorOrShard) -> torch.Tensor:
    return entry.local if isinstance(entry, Shard) else entry


def _like(entry: TensorOrShard, local: torch.Tensor) -> TensorOrShard:
    """Return other values with the place of an entry."""
    return Shard(local, entry.shape, entry.extent) if isinstance(entry, Shard) else local
