"""AveragedWeights: averages of a run's weights, sharded as the strategy shards the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.checkpoint.finite import not_finite
from trainer.checkpoint.shards import Loadable, Shard, materialize, read_slice
from trainer.errors import ConfigError
from trainer.loop.compare_ranks import compare
from trainer.strategy import Strategy

Update = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]
"""Changes averages, given with the weights of now and the number of updates so far."""

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
    """The averages of what is copied, such as integers, with their values."""


class AveragedWeights:
    """Averages of the parameters that train, and of buffers; of a sharded one each process averages its own shard.

    Averages of weights in 16 bits are float32: a small part of a change would be rounded away.

    Args:
        strategy: of the run.
        use_buffers: average floating buffers, too.
        device: the device of the averages; None: that of the weights.
    """

    def __init__(self, strategy: Strategy, use_buffers: bool, device: torch.device | None) -> None:
        self.count = 0
        """Number of updates. Before the first one there are no averages."""
        self._strategy, self._use_buffers, self._device = strategy, use_buffers, device
        self._averages: dict[str, torch.Tensor] = {}
        self._trained: dict[str, TensorOrShard] | None = None
        """The weights of the training while the averages are in their place."""
        self._places: _Places | None = None

    # -- training ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, change: Update) -> None:
        """Take the weights of now into the averages; the first time they are the averages."""
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

    def _find_places(self) -> _Places:
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
        """Forget the values of buffers, before averages change to which they belong."""
        for name, _ in self._strategy.module.named_buffers():
            self._averages.pop(name, None)
        self.forget_places()

    def forget_places(self) -> None:
        """Look up anew where the weights are, before the next update: parameters may have been replaced or unfrozen."""
        self._places = None

    def _average_of(self, name: str, entry: TensorOrShard) -> torch.Tensor:
        """Return the average of a weight, begun with its value."""
        if name not in self._averages:
            local = _local(entry)
            dtype = torch.float32 if local.dtype in (torch.bfloat16, torch.float16) else local.dtype
            self._averages[name] = local.to(self._device or local.device, dtype, copy=True)
        return self._averages[name]

    def _entries(self, stored: Collection[str] = ()) -> dict[str, TensorOrShard]:
        """Return the weights to average by name, tied ones once, in the memory that the optimizer changes.

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

    @property
    def swapped_in(self) -> bool:
        """Whether the module has the averages in place of the weights of the training."""
        return self._trained is not None

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the averages into the module, if there are any. Collective.

        Raises:
            ConfigError: the processes have averaged differently.
        """
        self._check_equal()
        if self.count == 0 or self.swapped_in:
            return
        self._synchronize_buffers()
        entries = self._entries()
        self._trained = {name: _like(entry, _local(entry).clone()) for name, entry in entries.items()}
        self._write({name: _like(entry, self._average_of(name, entry)) for name, entry in entries.items()})

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the weights of the training back. Collective."""
        if self._trained is not None:
            trained, self._trained = self._trained, None
            self._write(trained)

    def _write(self, entries: Mapping[str, Any]) -> None:
        self._strategy.release_gathered()
        self._strategy.load_module_state(entries, strict=False)
        self.forget_places()

    def _check_equal(self) -> None:
        """Check that all processes have averaged as often and, where each has all weights, with the same result."""
        facts: list[tuple[str, object]] = [("updates of the averages", self.count)]
        if not self._strategy.shards_state and self._strategy.processes.world_size > 1:
            names = [name for name, _ in self._strategy.module.named_parameters() if name in self._averages]
            sums = [_sum_of_bits(self._averages[name]) for name in names]
            values = torch.stack(sums).tolist() if sums else []
            facts += [(f"bits of the average of {name}", value) for name, value in zip(names, values, strict=True)]
        fix = "Average alike on all processes: avg_fn, multi_avg_fn and should_update may not depend on the rank."
        compare(self._strategy.processes, iter(facts), fix)

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
        trained = self._trained or {}
        checkpoint["average"] = self._under_all_names(self.entries())
        checkpoint["model"] = {**checkpoint["model"], **self._under_all_names(trained)}

    def entries(self) -> dict[str, TensorOrShard]:
        """Return the averages by name, of tied weights once; none before the first update."""
        entries = self._entries() if self.count else {}
        return {name: _like(entry, self._average_of(name, entry)) for name, entry in entries.items()}

    def _under_all_names(self, entries: Mapping[str, TensorOrShard]) -> dict[str, TensorOrShard]:
        """Return the entries of tied weights under each of their names, as `module_state` does."""
        module = self._strategy.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        first = {id(tensor): name for name, tensor in reversed(named)}
        return {name: entries[first[id(tensor)]] for name, tensor in named if first[id(tensor)] in entries}

    @torch.no_grad()
    def load(self, stored: Mapping[str, Loadable], count: int) -> None:
        """Restore averages that a run with any strategy has saved, of which this process reads its shards.

        Averages that are not stored begin again.

        Raises:
            ConfigError: this process has copies of shards in 16 bits, for which the averages would be rounded.
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
        self._load_copies(copies, stored)

    def _load_copies(self, copies: Mapping[str, Shard], stored: Mapping[str, Loadable]) -> None:
        """Restore the averages of weights of which this process holds a copy: through the weights themselves.

        Which elements the copy has is known to the process that writes them. All processes of a run call this.
        """
        if any(self._averages[name].dtype != entry.local.dtype for name, entry in copies.items()):
            raise ConfigError(
                "the averages of weights in 16 bits that are copied over groups of processes cannot be restored: use "
                "precision='bf16-mixed', whose weights are float32."
            )
        before = {name: entry.local.clone() for name, entry in copies.items()}
        self._strategy.load_module_state({name: stored[name] for name in copies}, strict=False)
        for name, entry in copies.items():
            self._averages[name].copy_(entry.local)
            entry.local.copy_(before[name])


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
    """Return a sum that does not depend on the order of additions, as one of floats would."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return value.contiguous().view(integers[value.element_size()]).sum(dtype=torch.int64)


def _local(entry: TensorOrShard) -> torch.Tensor:
    return entry.local if isinstance(entry, Shard) else entry


def _like(entry: TensorOrShard, local: torch.Tensor) -> TensorOrShard:
    """Return other values with the place of an entry."""
    return Shard(local, entry.shape, entry.extent) if isinstance(entry, Shard) else local
