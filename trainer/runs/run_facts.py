"""RunFacts: what a run is, compared with the other processes at its start, and kept in its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import chain

from torch.optim import Optimizer

from trainer.callback import Callback
from trainer.checkpoint.format import FileTensor
from trainer.checkpoint.pretrained import samples_of
from trainer.data.loader import BatchLoader
from trainer.module import TrainModule
from trainer.optimizers import TimedScheduler
from trainer.runs.compare_ranks import MOST_LINES, compare, differences, disagreement, listed
from trainer.runs.facts import (
    OF_OBJECTS,
    Facts,
    facts_of_data,
    facts_of_module,
    facts_of_optimizers,
    facts_of_schedulers,
    facts_of_settings,
    facts_of_tensors,
    hooks_of,
    kept_facts_of_optimizers,
    kept_facts_of_settings,
)
from trainer.runs.resolved_config import ResolvedConfig
from trainer.strategy import Strategy

log = logging.getLogger("trainer")


class RunFacts:
    """The facts of a run, which its set-up adds in running order.

    The methods `agree_on_...` compare facts between the processes. They are collective, and raise ConfigError on all
    processes if the facts differ.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.kept: dict[str, Mapping[str, str]] = {}
        """The facts that checkpoints keep, by the names of `GROUPS`, then by option or layer."""
        self._identity: Mapping[str, str] | None = None
        """The training loader's identity when the facts that changed while training were last left out."""

    # -- the same on all processes -------------------------------------------------------------------------------------

    def agree_on_settings(self, stage: str, config: ResolvedConfig, callbacks: list[Callback]) -> None:
        """Check that all processes make the same call with the same settings, callbacks and versions."""
        if stage == "fit":
            self.kept |= kept_facts_of_settings(config.settings, self._strategy.precision, callbacks)
        fix = "Give Trainer the same arguments on all processes; loggers and progress bars may be on rank 0 only."
        compare(self._strategy.processes, facts_of_settings(stage, config, callbacks), fix)

    def agree_on_module(self, module: TrainModule, training: bool) -> None:
        """Check that all processes have the same layers, parameters and buffers in the same order, apart from values.

        Different hooks of layers are a warning: they may only look at values.
        """
        facts = facts_of_module(module, self._strategy.precision)
        if training:
            self.kept["module"] = facts
        if self._strategy.processes.world_size > 1:
            fix = "Build the same module on all processes, in the same order (the order of a set differs)."
            shared = chain(facts_of_tensors(module, training), facts.items())
            hooks = compare(self._strategy.processes, shared, fix, also=hooks_of(module), in_order=True)
            self._warn(hooks, "hooks", "A hook that changes values has to be on all of them.")

    def agree_on_weights(self, pretrained: Mapping[str, FileTensor]) -> None:
        """Check that the pretrained weights, which each process reads from its own disk, are the same."""
        compare(self._strategy.processes, samples_of(pretrained), "Have the same pretrained weights on all machines.")

    def agree_on_loaders(self, training: BatchLoader | None, evaluated: Iterable[BatchLoader] = ()) -> None:
        """Check that the loaders are alike where they have to be, and set the length of a training epoch."""
        processes, loaders = self._strategy.processes, [*evaluated] if training is None else [training, *evaluated]
        if processes.world_size == 1:
            return
        equal: dict[str, object] = {"loaders": [loader.label for loader in loaders]}
        orders, contents = dict[str, str](), dict[str, str]()
        for loader in loaders:
            found = loader.facts_for_ranks()
            equal |= {f"{loader.label}, {name}": value for name, value in found.equal.items()}
            orders |= {f"{loader.label}, {name}": text for name, text in found.orders.items()}
            contents |= {f"{loader.label}, {name}": text for name, text in found.contents.items()}
        length = None if training is None else training.length
        fix = "Give every process the full dataset: the trainer splits it."
        gathered = compare(processes, equal.items(), fix, also=(length, orders, contents))
        lengths, orders_by_rank, contents_by_rank = (list(of_ranks) for of_ranks in zip(*gathered, strict=True))
        # A process that could not try its sampler has no order.
        if lines := differences(orders_by_rank, only_common=True):
            fix = "Samplers have to give the same order on all processes, which the trainer splits."
            raise disagreement(lines, fix)
        fix = "Make them from a seed (trainer.seed_everything before), or load them: the trainer splits one dataset."
        self._warn(contents_by_rank, "samples", fix)
        if training is not None:
            training.shorten(lengths)

    def agree_on_optimizers(
        self, module: TrainModule, optimizers: list[Optimizer], schedulers: list[TimedScheduler]
    ) -> None:
        """Check that all processes have the same optimizers and schedulers, which the strategy has not prepared yet."""
        of_optimizers, of_schedulers = facts_of_optimizers(module, optimizers), facts_of_schedulers(schedulers)
        self.kept |= kept_facts_of_optimizers(of_optimizers, of_schedulers)
        facts = of_optimizers | of_schedulers
        compare(self._strategy.processes, facts.items(), "Give the optimizers the same options on all processes.")

    def _warn(self, by_rank: list[dict[str, str]], what: str, fix: str) -> None:
        """Log a warning on rank 0 if facts of the processes differ."""
        lines = differences(by_rank)
        if lines and self._strategy.processes.is_global_zero:
            log.warning("%s differ between processes:%s\n%s", what, listed(lines, MOST_LINES // 2), fix)

    # -- the same as in a checkpoint -----------------------------------------------------------------------------------

    def record_data(self, loader: BatchLoader) -> None:
        """Record the facts of the training data, of a loader that was just made."""
        readers, size = self._strategy.processes.readers, loader.batch_size
        samples = None if size is None else size * readers
        self.kept |= {**facts_of_data(loader, readers), "micro_batch": {"": str(samples)}}
        self._identity = None

    def leave_out_changing(self, loader: BatchLoader) -> None:
        """Leave out the facts that datasets, samplers and collate functions have changed in themselves.

        In the same process the next run begins with the changed objects, and in another process with the objects that
        a data module restores. Looked for at the first checkpoint, and when the data have another length.
        """
        readers = self._strategy.processes.readers
        identity = loader.identity(readers)
        if identity == self._identity:
            return
        self._identity, now = identity, facts_of_data(loader, readers)
        for name in OF_OBJECTS:
            before, there = self.kept.get(name, {}), now.get(name, {})
            self.kept[name] = {fact: text for fact, text in before.items() if there.get(fact) == text}

    def leave_out_missing(self, saved: Facts) -> None:
        """Leave out the facts of objects that a checkpoint lacks: a cache may be empty in the next process."""
        for name in (one for one in OF_OBJECTS if one in saved):
            facts = self.kept.get(name, {})
            self.kept[name] = {fact: text for fact, text in facts.items() if fact in saved[name]}
