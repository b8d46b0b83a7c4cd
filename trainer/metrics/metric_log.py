"""Record the values of `self.log` on their device, and reduce and read them all at each flush."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch

from trainer.distributed.sendable import sendable
from trainer.errors import ConfigError
from trainer.metrics.log_arguments import as_number, check_name, check_value, checked_weight, reduction_named
from trainer.metrics.monitor import ValueKind
from trainer.metrics.phases import LOGGING, Phase, unheard
from trainer.metrics.reductions import COMBINE_HOST, REDUCTIONS, Accumulator, Number, to_host, total_of
from trainer.metrics.torchmetrics_lists import ListStates, is_torchmetric

GatherObjects = Callable[[Any], list[Any]]
Place = Literal["all", "logger", "progress_bar"]
CountItems = Callable[[Any], int | torch.Tensor | None]


@sendable
class LogOptions(NamedTuple):
    """The options of a logged name; gathered with its values, because a process may not have logged that name."""

    reduction: str = "mean"
    on_step: bool | None = None
    """None, in a call of `self.log`: the default of the scope."""
    on_epoch: bool | None = None
    prog_bar: bool = False
    logger: bool = True
    metric: str | None = None
    """Name of a logged `torchmetrics.Metric` in `named_modules`."""

    @property
    def by_both(self) -> bool:
        """Whether the name has values by step and by epoch, which get suffixes."""
        return bool(self.on_step and self.on_epoch)

    def full_name(self, name: str, suffix: Literal["step", "epoch"], loader: str = "") -> str:
        """Return the name of a value: with a suffix where a name has both kinds; a loader's name stays last."""
        if not self.by_both:
            return name
        end = f"/{loader}" if loader else ""
        return f"{name.removesuffix(end)}_{suffix}{end}"

    def goes_to(self, place: Place) -> bool:
        """Return True if the value belongs to `place`."""
        return {"all": True, "logger": self.logger, "progress_bar": self.prog_bar}[place]


@dataclass
class Entry:
    """One logged name: its options, the values of the current window, and the reduction over the epoch."""

    name: str
    options: LogOptions
    metric: Any = None
    """The torchmetrics object, if the first logged value was one."""
    window: int = -1
    window_values: list[tuple[Number, Number]] = field(default_factory=list)
    """The values of the latest window in which the name was logged by step, with their weights."""
    superseded: int = -1
    """The window up to which a value of an epoch or an evaluation replaces the name's values by step."""
    flushed: int = -1
    """The last window whose per-step values went to the loggers."""
    epoch: Accumulator = field(init=False)

    def __post_init__(self) -> None:
        self.epoch = Accumulator(self.options.reduction)

    @property
    def waits(self) -> bool:
        """Whether the loggers have not got the latest value of a name that is logged by step alone."""
        alone = bool(self.options.on_step) and not self.options.on_epoch and self.metric is None
        return alone and self.window > max(self.superseded, self.flushed)


@dataclass
class MetricScope:
    """The values logged in one place: the training batches of an epoch, one evaluation, or the hooks around them."""

    batches: bool
    """Weight values by the samples of their batch."""
    steps: bool
    """Log single steps by default, instead of the epoch."""
    loader: str = ""
    """The name of the current evaluation loader, if there are several."""
    entries: dict[str, Entry] = field(default_factory=dict)
    overall: dict[str, Entry] = field(default_factory=dict)
    """The reductions over all loaders, if there are several."""


@dataclass
class ReducedMetrics:
    """Values reduced over processes, by name: for the loggers, for the progress bar, and all values, for `monitor=`."""

    logger: dict[str, float] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)
    all: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    """All values by their full names: of a name logged by step and epoch only `name_step` and `name_epoch`."""
    kinds: dict[str, ValueKind] = field(default_factory=dict)
    """The kind of each value in `all`."""

    def put(
        self,
        name: str,
        options: LogOptions,
        value: float,
        suffix: Literal["step", "epoch"],
        loader: str = "",
        past: bool = False,
    ) -> None:
        """Add a value; `past`: it belongs to an earlier step than the last."""
        full_name = options.full_name(name, suffix, loader)
        if full_name in self.results:
            other = name.removesuffix(f"_{suffix}")
            raise ConfigError(
                f"two values are logged as {full_name!r}: one by that name, and one as {other!r} with on_step=True, "
                "on_epoch=True. Give one of them another name."
            )
        self.all[full_name] = self.all[name] = self.results[full_name] = value
        kind: ValueKind = "epoch" if suffix == "epoch" else "past" if past else "step"
        self.kinds[full_name] = kind
        self.kinds[name] = "interim" if options.on_epoch and kind == "step" else kind
        if options.logger:
            self.logger[full_name] = value
        if options.prog_bar:
            self.progress_bar[full_name] = value


class Recording:
    """Context of `MetricLog.recording`: a class, since a step enters one, and a generator costs it a microsecond."""

    def __init__(self, log: MetricLog, scope: MetricScope) -> None:
        self.log, self.scope = log, scope

    def __enter__(self) -> None:
        self.before, self.log.scope = self.log.scope, self.scope

    def __exit__(self, *error: object) -> None:
        self.log.scope = self.before


class MetricLog:
    """Records values without synchronizing the device, and reads them all in one host copy and one gather.

    Every rank must call the `read_*` methods at the same place. The logged names may differ between ranks (a rank
    without a batch logs nothing), because names are gathered with the values.

    Args:
        num_items: function of a batch; returns the items that weight its losses. None: its samples do.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        all_gather_object: GatherObjects,
        phase: Phase = unheard,
        num_items: CountItems | None = None,
    ) -> None:
        self.module = module
        self.all_gather_object = all_gather_object
        self.phase = phase
        self.train = MetricScope(batches=True, steps=True)
        self.hook_metrics = MetricScope(batches=False, steps=False)
        self.evaluation_hooks = MetricScope(batches=False, steps=False)
        """The values logged in the hooks at the end of the current evaluation."""
        self.included: dict[str, Entry] = {}
        """The names logged in the hooks at the end of an epoch or evaluation, while they run, for `latest`."""
        self.watches_losses = True
        self.copies_losses = False
        """True if the memory of a step's tensors is used again in the next step."""
        self.nonfinite_loss: tuple[int, float] | None = None
        """Step and value of the first loss read that is NaN or infinite."""
        self._losses: list[tuple[int, torch.Tensor, Number | None]] = []
        """Losses that have not been read yet, with their steps and divisors."""
        self.scaler: torch.amp.GradScaler | None = None
        """The gradient scaler, whose loss scale is read with the losses."""
        self.loss_scale: float | None = None
        """The loss scale at the last read."""
        self._lists = ListStates(all_gather_object)
        self.computed: list[Any] = []
        """torchmetrics objects whose epoch has ended, until `reset_computed`."""
        self._metrics: dict[str, Any] = {}
        """The torchmetrics objects logged so far, by their names in the module."""
        self.scope = self.hook_metrics
        """The scope to which `log` adds; see `recording`."""
        self.names: set[str] = set()
        """All names ever logged, by this process."""
        self.window = self.repeats = 0
        """Number of windows begun; and of those among them that were begun again."""
        self.batch: Any = None
        """The batch in progress; its tensors give the number of samples if the loader does not know that number."""
        self.samples: int | None = None
        """Samples of the batch in progress; 0 for padding, whose values are ignored."""
        self.num_items = num_items
        self._weight: Number | None = None
        """Weight of a mean over the batch in progress; None: not known yet."""
        self._counted: Any = None
        """The batch in progress as the loader gave it; the loss counts the items of the same batch."""
        self._held: list[tuple[Accumulator, Number, Number]] | None = None
        """The window's values for the epoch, which do not count yet; None: they count at once."""
        self._replaced: list[tuple[Entry, int, list[tuple[Number, Number]]]] = []
        """The values by step that this window has replaced, to be restored if it does not count."""
        self.disabled_reason: str | None = None
        """The reason for refusing values now; None: values are accepted."""

    def end(self, reason: str) -> None:
        """Refuse all further values, for this reason."""
        self.disabled_reason, self.scope = reason, MetricScope(batches=False, steps=False)
        self.batch = self._counted = None

    def recording(self, scope: MetricScope) -> Recording:
        """Return a context in which `log` adds to `scope`."""
        return Recording(self, scope)

    @contextmanager
    def latest_including(self, scope: MetricScope) -> Iterator[None]:
        """Include the values of `scope` in `latest`, in the block and, after an error, in `on_exception`."""
        self.included = scope.entries
        yield
        self.included = {}

    def begin_evaluation_end(self) -> MetricScope:
        """Return a new scope for the hooks at the end of an evaluation."""
        self.evaluation_hooks = MetricScope(batches=False, steps=False)
        return self.evaluation_hooks

    def start_window(self, batch: Any, samples: int | None, repeated: bool = False) -> None:
        """Begin a step with its first batch: values logged before belong to an earlier step. See `start_batch`.

        Args:
            repeated: the same step begins again: its optimizer evaluates the loss several times.
        """
        self.window += 1
        self.repeats += repeated
        # As `start_batch`, without a call more in each step.
        self.batch, self.samples, self._weight = batch, samples, samples
        if self.num_items is not None:
            self._weight, self._counted = None, batch

    def unflushed_entry(self, name: str, options: LogOptions) -> Entry:
        """Return the entry for a checkpoint's values of the step before, which the loggers have not received."""
        entry = self.train.entries.setdefault(name, Entry(name, options))
        entry.window, self.window = 0, 1
        return entry

    def start_batch(self, batch: Any, samples: int | None) -> None:
        """Weight values by the items or samples of this batch from now on; None: the loader does not know their number.

        The caller sets `batch` again when the batch is on the device.
        """
        self.batch, self.samples, self._weight = batch, samples, samples
        if self.num_items is not None:
            self._weight, self._counted = None, batch

    def hold(self) -> None:
        """Hold back the values of the next window until `release` keeps or drops them."""
        self._held, self._replaced = [], []

    def release(self, keep: bool) -> None:
        """Count the values that wait, or drop them."""
        held, self._held = self._held or [], None
        replaced, self._replaced = self._replaced, []
        if keep:
            for accumulator, value, weight in held:
                accumulator.add(value, weight)
        else:
            for entry, window, values in replaced:
                entry.window, entry.window_values = window, values

    def watch_loss(self, step: int, loss: torch.Tensor, divisor: Number | None) -> None:
        """Keep a loss until values are next read, to report one that is not finite. Reads nothing from a device.

        Args:
            divisor: of the loss; infinite for a batch without items, whose loss is a mean over nothing and is ignored.
        """
        # Not `!=` alone, which would read a divisor that is on the device.
        if not self.watches_losses or (isinstance(divisor, float) and divisor == math.inf):
            return
        if loss.is_cpu:
            number = loss.item()
            if not math.isfinite(number):
                self._keep_nonfinite(step, number, divisor)
            return
        # `data` is the loss without its graph, at half the price of `detach()`, which also tracks later writes.
        kept = loss.data
        # A view would keep a larger tensor in memory.
        self._losses.append((step, kept.clone() if self.copies_losses or loss._is_view() else kept, divisor))
        if len(self._losses) == 1000:
            self.read_losses()

    def ignore_losses(self) -> None:
        """Watch no losses in this run."""
        self.watches_losses = False

    def _keep_nonfinite(self, step: int, loss: float, divisor: Number | None) -> None:
        """Keep the first loss that is not finite."""
        if self.nonfinite_loss is None and not (isinstance(divisor, torch.Tensor) and math.isinf(divisor)):
            self.nonfinite_loss = (step, loss)

    def take_nonfinite_loss(self) -> tuple[int, float] | None:
        """Return step and value of the first loss read that is not finite, once: losses are not watched any longer."""
        if self.nonfinite_loss is None or not self.watches_losses:
            return None
        self.watches_losses = False
        return self.nonfinite_loss

    def read_losses(self) -> None:
        """Check the kept losses, and read the loss scale."""
        self._read([])

    def mark_flushed(self) -> None:
        """Record that the loggers have got the per-step values that `read_step` returned."""
        for entry in self.train.entries.values():
            entry.flushed = entry.window

    def _read(self, values: list[Number]) -> list[float]:
        """Return values as numbers. The same copy to the host brings the sum of the losses and the loss scale."""
        losses = [loss for _, loss, _ in self._losses]
        scale = getattr(self.scaler, "_scale", None)  # None before the first step
        total, *read = to_host([total_of(losses), *filter(torch.is_tensor, [scale, *values])])
        self.loss_scale = None if scale is None else read.pop(0)
        if not math.isfinite(total):
            for (step, _, divisor), loss in zip(self._losses, to_host(losses), strict=True):
                if not math.isfinite(loss):
                    self._keep_nonfinite(step, loss, divisor)
        self._losses.clear()
        numbers = iter(read)
        return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]

    def log(self, name: str, value: Any, weight: Number | None = None, *options: Any) -> None:
        """Record a value; see `TrainModule.log`.

        Args:
            weight: of the value in a mean; None: the items of the batch, or its samples.
            options: the fields of `LogOptions`, in their order.

        Raises:
            ConfigError: the value cannot be logged (a complex or sharded tensor, several elements), or logging is not
                possible now.
        """
        scope = self.scope
        if scope.batches and self.samples == 0:  # padding
            return
        key = f"{name}/{scope.loader}" if scope.loader else name
        entry = scope.entries.get(key)
        if entry is None:
            entry = scope.entries[key] = self._new_entry(scope, name, key, value, LogOptions(*options))
        if isinstance(value, torch.Tensor):
            # A copy without the graph: the tensor may change before it is read, and a view keeps a larger one alive.
            value = (_scalar(name, value) if value.dim() else value).data.clone()
        elif is_torchmetric(value):
            self._log_metric(entry, value)
            return
        elif not isinstance(value, (int, float)):
            value = as_number(name, value)
        if weight is not None:
            weight = checked_weight(name, weight)
        else:  # without a call where the number is known
            weight = self._batch_weight() if self._weight is None or not scope.batches else self._weight
        if entry.options.on_step and scope.steps:
            if entry.window != self.window:
                if self._held is not None:
                    self._replaced.append((entry, entry.window, entry.window_values))
                entry.window, entry.window_values = self.window, []
            entry.window_values.append((value, weight))
        if entry.options.on_epoch:
            if self._held is None:
                entry.epoch.add(value, weight)
            else:
                self._held.append((entry.epoch, value, weight))
        if scope.loader:
            overall = scope.overall.setdefault(name, Entry(name, entry.options))
            overall.epoch.add(value, weight)

    def log_without_loader(self, name: str, *value_and_options: Any) -> None:
        """Record a value under its own name in an evaluation with several loaders; see `log`."""
        scope = self.scope
        with self.recording(MetricScope(scope.batches, scope.steps, entries=scope.entries)):
            self.log(name, *value_and_options)

    def _new_entry(self, scope: MetricScope, name: str, key: str, value: Any, options: LogOptions) -> Entry:
        """Return the entry of a name that is logged for the first time; later calls keep the options of this one."""
        check_name(name, self.disabled_reason)
        check_value(name, value)
        options = options._replace(reduction=reduction_named(options.reduction), logger=options.logger is not False)
        if options.reduction not in REDUCTIONS:
            allowed = ", ".join(REDUCTIONS)
            raise ConfigError(f"self.log({name!r}, reduce_fx={options.reduction!r}): allowed are {allowed}.")
        metric = value if is_torchmetric(value) else None
        by_step = scope.steps and (metric is None or metric._forward_cache is not None)
        on_step = by_step if options.on_step is None else options.on_step
        on_epoch = not by_step if options.on_epoch is None else options.on_epoch
        if not on_step and not on_epoch:
            raise ConfigError(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing: set one to True.")
        if on_step and not on_epoch and not scope.steps:
            warnings.warn(
                f"self.log({name!r}, on_step=True): an evaluation and the hooks of an epoch have no steps. The mean is "
                "logged instead.",
                stacklevel=5,
            )
            on_step, on_epoch = False, True
        where = None
        if metric is not None:
            where = self._name_of_metric(name, metric)
            self._metrics[where] = metric
        self.names.update((name, key))
        return Entry(key, options._replace(on_step=on_step, on_epoch=on_epoch, metric=where), metric)

    def _name_of_metric(self, key: str, metric: torch.nn.Module) -> str:
        for name, submodule in self.module.named_modules():
            if submodule is metric:
                return str(name)
        raise ConfigError(
            f"self.log({key!r}) got a {type(metric).__name__} that is not an attribute of the module. "
            "Create it in __init__ as self.<name> = ..., so that it moves to the device and is found on every process."
        )

    def _log_metric(self, entry: Entry, metric: Any) -> None:
        if not entry.options.on_step or not self.scope.steps:
            return
        value = metric._forward_cache
        if value is None:
            raise ConfigError(
                f"self.log({entry.name!r}, on_step=True) needs the value of this batch: call the metric, "
                f"self.{entry.options.metric}(preds, target), instead of update(), or log the result of the call."
            )
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise _several_numbers(entry.name, f"the value of {type(metric).__name__} for a batch is")
        entry.window = self.window
        entry.window_values = [(_scalar(entry.name, value).data.clone(), self._batch_weight())]

    def _batch_weight(self) -> Number:
        """Return the batch's number of items, or else of samples: the first dimension of its tensors."""
        if not self.scope.batches:
            return 1
        if self._weight is None:
            items: Any = None if self.num_items is None else self.num_items(self._counted)
            if isinstance(items, torch.Tensor):
                items = items.item() if items.is_cpu else items.clone()
            self._weight = self._number_of_samples() if items is None else items
        return self._weight

    def _number_of_samples(self) -> int:
        if self.samples is None:
            sizes = first_dimensions(self.batch)
            self.samples = next(iter(sizes), 1)
            if len(sizes) != 1:
                _warn_of_sizes(sizes)
        return self.samples

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_step(self) -> ReducedMetrics:
        """Return the values of the last window, reduced over its micro-batches and over processes.

        Also returns values logged since the last flush, but not in this window; their kind is "past".
        """
        logged = [
            e
            for e in self.train.entries.values()
            if e.options.on_step and e.window > e.superseded and (e.window == self.window or e.window > e.flushed)
        ]
        values = ReducedMetrics()
        with self.phase(LOGGING):
            numbers = iter(self._read([number for e in logged for pair in e.window_values for number in pair]))
            local: dict[tuple[str, bool], tuple[LogOptions, Accumulator]] = {}
            for entry in logged:
                accumulator = Accumulator(entry.options.reduction)
                for _ in entry.window_values:
                    accumulator.add(next(numbers), next(numbers))
                local[entry.name, entry.window != self.window] = (entry.options, accumulator)
            reduced = self._reduce(local)
            for (name, past), (options, value) in reduced.items():
                if not past or (name, False) not in reduced:  # another process may have logged it in this step
                    values.put(name, options, value, "step", past=past)
        return values

    def latest(self, of: Place = "all") -> dict[str, Number]:
        """Return the latest values of this process that training logged by step, without reading them.

        In the hooks at the end of an epoch or an evaluation, also the values logged there.
        """
        found: list[tuple[Entry, Literal["step", "epoch"], Number | None]] = [
            (e, "step", e.window_values[-1][0])
            for e in self.train.entries.values()
            if e.window > e.superseded and e.window_values
        ]
        found += [(e, "epoch", e.epoch.local_value()) for e in self.included.values()]
        values: dict[str, Number] = {}
        for entry, kind, value in found:
            if value is not None and entry.options.goes_to(of):
                values[entry.options.full_name(entry.name, kind)] = value
                if of == "all":
                    values[entry.name] = value
        return values

    def read_epoch(self, scope: MetricScope) -> ReducedMetrics:
        """Return the reductions over the values logged in `scope`, and clear `scope`.

        Values by step alone that the loggers have not got yet stay. torchmetrics objects are computed; `reset_computed`
        resets them.
        """
        values = self._read_entries(scope.entries, scope.loader)
        self.computed += [e.metric for e in scope.entries.values() if e.metric is not None and not e.options.on_epoch]
        kept = {name: e for name, e in scope.entries.items() if scope is self.train and e.waits}
        scope.entries.clear()
        scope.entries.update(kept)
        return values

    def reset_computed(self) -> None:
        """Reset the torchmetrics objects that were computed, or logged by step only."""
        self._lists.allow_all()
        with torch.inference_mode(False):  # otherwise the state could be updated only in inference mode from now on
            while self.computed:
                self.computed.pop().reset()

    def reset_unfinished(self) -> None:
        """Reset the torchmetrics objects of an epoch or evaluation that did not end, so that they count in no other."""
        self.computed += self._metrics.values()
        self.reset_computed()

    def peek_epoch(self, scope: MetricScope) -> ReducedMetrics:
        """Return the reductions over the values logged in `scope` so far, and keep them.

        torchmetrics objects are left out, because a computed one keeps its value for the rest of the epoch.
        """
        return self._read_entries({name: e for name, e in scope.entries.items() if e.options.metric is None})

    def read_overall(self, scope: MetricScope) -> ReducedMetrics:
        """Return the reductions over all loaders of an evaluation; empty if there is only one loader."""
        return self._read_entries(scope.overall)

    def _read_entries(self, entries: dict[str, Entry], loader: str = "") -> ReducedMetrics:
        local = {name: (e.options, e.epoch) for name, e in entries.items() if e.options.on_epoch}
        values = ReducedMetrics()
        with self.phase(LOGGING):
            for name, (options, value) in self._reduce(local).items():
                values.put(name, options, value, "epoch", loader)
        for name in values.all.keys() & self.train.entries.keys():
            self.train.entries[name].superseded = self.window
        return values

    def _reduce(self, local: Mapping[Any, tuple[LogOptions, Accumulator]]) -> dict[Any, tuple[LogOptions, float]]:
        """Reduce with one host copy and one gather; every process then does the same arithmetic.

        The keys are names, or for values by step pairs of a name and whether the step is an earlier one.

        Raises:
            ConfigError: processes log a name with different reductions, or in part as a torchmetrics object; raised on
                all of them.
        """
        numbers = iter(to_host([t for _, accumulator in local.values() for t in accumulator.tensors()]))
        mine = {name: (options, *accumulator.host_value(numbers)) for name, (options, accumulator) in local.items()}
        of_ranks: dict[Any, list[tuple[LogOptions, float | None, float]]] = {}
        for theirs in self.all_gather_object(mine):
            for name, one in theirs.items():
                of_ranks.setdefault(name, []).append(one)
        combined = {}
        for name, values in of_ranks.items():
            options = _common_options(name, [one[0] for one in values])
            value = self._combine(name, options, [one[1] for one in values], sum(one[2] for one in values))
            if value is not None:
                combined[name] = (options, value)
        return combined

    def _combine(self, name: Any, options: LogOptions, values: list[float | None], weight: float) -> float | None:
        """Return the reduction of the values of all ranks that have one; None without a value."""
        found = [value for value in values if value is not None]  # a process whose weights are all 0 has none
        if options.metric is not None and not found:  # of an epoch: those by step have values
            return self._compute(name, self.module.get_submodule(options.metric))
        if not found or (options.reduction == "mean" and not weight):
            return None
        value = reduce(COMBINE_HOST[options.reduction], found)
        return value / weight if options.reduction == "mean" else value

    def _compute(self, name: str, metric: Any) -> float | None:
        self._lists.fill(metric)
        with warnings.catch_warnings():
            # A process without a batch computes too, because `compute` synchronizes all processes.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
            value = metric.compute()
        self.computed.append(metric)
        if value is None:  # a metric that has seen nothing may have no value
            return None
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise _several_numbers(name, f"{type(metric).__name__}.compute() gives")
        return float(value)

    def fill_empty_lists(self) -> None:
        """Make the list states of the module's torchmetrics objects ready to be computed in hooks. Collective."""
        self._lists.fill(self.module)


def _common_options(name: Any, of_ranks: list[LogOptions]) -> LogOptions:
    """Return the options of the last rank; raise a ConfigError if the ranks reduce a name differently."""
    kinds = {(one.reduction, one.metric): None for one in of_ranks}
    if len(kinds) > 1:
        found = " or ".join(f"reduce_fx={reduction!r} (torchmetrics object: {metric})" for reduction, metric in kinds)
        raise ConfigError(
            f"self.log({name!r}): the processes do not agree on the reduction: {found}. Log a name in the same way on "
            "all of them."
        )
    return of_ranks[-1]


def _warn_of_sizes(sizes: list[int]) -> None:
    warnings.warn(
        f"the first dimensions of a batch's tensors are {sizes}: the first, or else 1, is taken for the number of "
        "samples, by which means over the epoch are weighted. Pass batch_size=... to self.log.",
        stacklevel=6,
    )


def _several_numbers(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"self.log({name!r}): {what} more than one number. Compute it in an epoch-end hook and log its parts one by "
        "one, or log a metric that averages them."
    )


def _scalar(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one element without dimensions."""
    if value.numel() != 1:
        raise ConfigError(f"self.log({name!r}) takes one number, not a tensor of shape {tuple(value.shape)}.")
    return value.reshape(())


def first_dimensions(batch: Any) -> list[int]:
    """Return the different first dimensions of the tensors in `batch` (nested dicts, lists, tuples, dataclasses)."""
    if isinstance(batch, torch.Tensor):
        return list(batch.shape[:1])
    parts: Iterable[Any]
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif is_dataclass(batch):
        parts = [getattr(batch, one.name, None) for one in fields(batch)]
    elif isinstance(batch, (list, tuple)):
        parts = batch
    else:
        return []
    return [*dict.fromkeys(chain.from_iterable(map(first_dimensions, parts)))]
