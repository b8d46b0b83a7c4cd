"""Compare, at the start of a run, what has to be equal on all its processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from trainer.checkpoint.format import FileTensor
from trainer.checkpoint.pretrained import samples_of
from trainer.data.loader import BatchLoader
from trainer.distributed.process_group import SingleProcess
from trainer.module import TrainModule
from trainer.optimizers import TimedScheduler
from trainer.runs.compare_ranks import MOST_LINES, compare, differences, listed
from trainer.runs.facts import (
    facts_of_module,
    facts_of_optimizers,
    facts_of_schedulers,
    facts_of_settings,
    facts_of_tensors,
    hooks_of,
)
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.loop.run import Run

log = logging.getLogger("trainer")


def _warn(processes: SingleProcess, by_rank: list[dict[str, str]], what: str, fix: str) -> None:
    """Log a warning on rank 0 if facts of the processes differ."""
    lines = differences(by_rank)
    if lines and processes.is_global_zero:
        log.warning("%s differ between processes:%s\n%s", what, listed(lines, MOST_LINES // 2), fix)


def check_settings(run: Run) -> None:
    """Check that all processes make the same call with the same settings, callbacks and versions; see `compare`."""
    fix = "Give Trainer the same arguments on all processes; loggers and progress bars may be on rank 0 only."
    compare(run.strategy.processes, facts_of_settings(run), fix)


def check_module(strategy: Strategy, module: TrainModule, training: bool) -> None:
    """Check that all processes have the same layers, parameters and buffers in the same order, apart from values.

    See `compare` for the error. Other hooks of layers are a warning: they may only look at values.
    """
    processes = strategy.processes
    if processes.world_size == 1:
        return
    facts = chain(facts_of_tensors(module, training), facts_of_module(module, strategy.precision).items())
    fix = "Build the same module on all processes, in the same order (the order of a set differs)."
    hooks = compare(processes, facts, fix, also=hooks_of(module), in_order=True)
    _warn(processes, hooks, "hooks", "One that changes values has to be on all of them.")


def check_weights(run: Run, pretrained: Mapping[str, FileTensor]) -> None:
    """Check that the pretrained weights, which each process reads itself, are the same. Collective.

    Raises:
        ConfigError: they differ, as when the machines have copies of their own.
    """
    compare(run.strategy.processes, samples_of(pretrained), "Have the same pretrained weights on all machines.")


def check_loaders(run: Run) -> None:
    """Check that the loaders are alike where they have to be, and set the length of a training epoch. Collective.

    Raises:
        ConfigError: as `compare`.
    """
    run.loaders.needed()
    training = {} if run.train_loader is None else {"the training loader": run.train_loader}
    evaluated = {f"the evaluation loader{f' {n!r}' if n else ''}": one for n, one in run.loaders.evaluated.items()}
    compare_loaders(run.strategy.processes, training | evaluated, run.train_loader)


def compare_loaders(processes: SingleProcess, loaders: dict[str, BatchLoader], training: BatchLoader | None) -> None:
    """Do what `check_loaders` does, with loaders by their names in messages, one of which may be for training."""
    if processes.world_size == 1:
        return
    facts: dict[str, object] = {"loaders": list(loaders)}
    orders: dict[str, str] = {}
    contents: dict[str, str] = {}
    for name, loader in loaders.items():
        found = loader.facts_for_ranks()
        facts |= {f"{name}, {fact}": value for fact, value in found.equal.items()}
        orders |= {f"{name}, {fact}": text for fact, text in found.orders.items()}
        contents |= {f"{name}, {fact}": text for fact, text in found.contents.items()}
    length = None if training is None else training.length
    fix = "Give every process the full dataset: the trainer splits it."
    gathered = compare(processes, facts.items(), fix, also=(length, orders, contents))
    lengths, orders_by_rank, contents_by_rank = (list(of_ranks) for of_ranks in zip(*gathered, strict=True))
    # A process that could not try its sampler has no part in this.
    tried = [(name, orders[name]) for name in orders if all(name in of_rank for of_rank in orders_by_rank)]
    if tried:
        compare(processes, tried, "Samplers have to give the same order on all processes, which the trainer splits.")
    fix = "Make them from a seed (trainer.seed_everything before), or load them: the trainer splits one dataset."
    _warn(processes, contents_by_rank, "samples", fix)
    if training is not None:
        training.shorten(lengths)


def check_optimizers(run: Run, optimizers: list[Optimizer], schedulers: list[TimedScheduler]) -> None:
    """Check that all processes have the same optimizers and schedulers; see `compare`."""
    facts = chain(facts_of_optimizers(run.module, optimizers), facts_of_schedulers(schedulers))
    compare(run.strategy.processes, facts, "Give the optimizers the same options on all processes.")
