"""The loaders of an Engine, and their positions in the data."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice, repeat
from typing import Any

from trainer.checkpoint.schema import Integer, wrong
from trainer.data.adapters import make_batch_loader
from trainer.data.loader import Batch, BatchLoader
from trainer.errors import CheckpointError, ConfigError
from trainer.loop.loaders import refuse_data
from trainer.loop.step import even_window
from trainer.loop.training_state import place_in_epoch
from trainer.runs.facts import RunFacts
from trainer.seed import derive_seed
from trainer.strategy import keeps_batches, without_cast

log = logging.getLogger("trainer")

_KIND = {
    "epoch": Integer(0),
    "batch": Integer(0),
    "global_micro_batch": (Integer(1), None),
    "began_with?": (Integer(1), None),
    "waits?": bool,
    "state": dict,
    "site?": str,
    "training?": bool,
}


class Loaders:
    """The loaders of an Engine, and a position for each of them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine  # its file imports this one
        self.positions: list[Position] = []
        self.epochs = 0
        """Epochs of training that have ended."""
        self._made: list[weakref.ref[EngineLoader]] = []
        self._reported_left = False

    def alive(self) -> list[EngineLoader]:
        """Return the loaders that still exist, in the order of their set-up."""
        return [loader for one in self._made if (loader := one()) is not None]

    def set_up(self, given: Any, training: bool, split: bool, site: str) -> EngineLoader:
        """Return the Engine's loader for a user's loader. Collective."""
        if isinstance(given, EngineLoader):
            raise ConfigError("engine.setup_dataloaders: this loader is set up already.")
        refuse_data(given, "engine.setup_dataloaders")
        engine, processes = self.engine, self.engine.strategy.processes

        def make(number: int) -> BatchLoader:
            name, seed = (str(number), derive_seed(engine.seed, number)) if number else ("", engine.seed)
            return make_batch_loader(
                given,
                name=name,
                rank=processes.reader,
                world_size=processes.readers,
                seed=seed,
                training=training,
                seed_per_sample=engine.config.settings.seed_per_sample,
                split=split,
                pad=engine.strategy.collective_forward,
            )

        number = len(self.positions) + sum(one._position is None for one in self.alive())
        made = EngineLoader(make, number, given, self, training, site)
        loader = made._loader
        RunFacts(engine.strategy).agree_on_loaders([loader], loader if training else None)
        if loader.note is not None and processes.is_global_zero:
            log.info("%s", loader.note)
        self._made = [*map(weakref.ref, self.alive()), weakref.ref(made)]
        if any(one.waits_for_loader and one.site == site for one in self.positions):
            self.place()
        return made

    def place(self, by_order: bool = False) -> None:
        """Give new loaders positions: one that the same call has set up in an earlier epoch hands over its own.

        Called when a loader is first asked for something: the former one may be in its epoch until then.
        `by_order`: also positions in a checkpoint of a program with other lines.
        """
        new = [loader for loader in self.alive() if loader._position is None]
        for loader in new:
            alike = [one for one in self.positions if one.site == loader._site and one.is_free(new)]
            kept = [one for one in self.positions if one.waits_for_loader]
            read = [one for one in kept if not one.site or one.training == loader._training]
            found = [*alike, *read] if by_order else alike
            position = found[0] if found else Position(self)
            if position not in self.positions:
                self.positions.append(position)
                if read and loader._training:
                    log.warning(
                        "a loader begins with epoch 0: the checkpoint has positions of loaders that other lines have "
                        "set up. Set it up before engine.load, once; or after it, at the same line as before."
                    )
            loader._take(position, self.positions.index(position))

    def in_training(self) -> list[tuple[int, int]]:
        """Return the epoch and batch of each loader of training that is in an epoch."""
        return [(one.epoch, one.batch) for one in self.positions if one.training and one.newest() is not None]

    def load_state_dict(self, states: list[dict[str, Any]], exact: bool) -> None:
        """Restore the positions in a checkpoint, into the loaders or until they are set up."""
        self.positions += [Position(self) for _ in states[len(self.positions) :]]
        for position, state in zip(self.positions, states, strict=False):
            position.load_state_dict(state, exact)
        self.place(by_order=True)

    def report_left(self) -> None:
        """Warn once if a program that loads a checkpoint written now may not continue exactly."""
        left = next((one.left for one in self.positions if one.left and one.goes_on), 0)
        if left and not self._reported_left and self.engine.is_global_zero:
            self._reported_left = True
            log.warning(
                "a loader's loop was left after %d batches before. A program that loads this continues inside the "
                "epoch, where enumerate or islice begin again: count by loader.batch instead.",
                left,
            )


class Position:
    """The position in the data of a call of `setup_dataloaders`, for the loaders that it returns one by one."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders
        self.loader: Callable[[], EngineLoader | None] = _nothing
        """A weak reference to the current loader."""
        self.site, self.training = "", True
        """The place of the call in the program; the kind of its loaders."""
        self.epoch = self.batch = 0
        self.waits = False
        """True: the next iterator gives nothing, because its epoch is over while another loader continues."""
        self.resumes = False
        """True: the next iterator continues the epoch of a checkpoint."""
        self._restored: tuple[Mapping[str, Any], bool] | None = None
        """The position in the checkpoint, until its epoch has ended."""
        self.newest: Callable[[], object] = _nothing
        """A weak reference to the iterator of the epoch in progress."""
        self._first = self._backwards = 0
        """The newest iterator's first batch, and the engine's backwards before it."""
        self._within: list[tuple[int, int]] = []
        """The positions in progress of loaders of training as an evaluation began."""
        self._beside: list[int] = []
        """The epochs of all positions as the latest epoch ended, if something was trained in it."""
        self._ended = self.left = 0
        """The engine's backwards then; the batch after which an epoch was left before its end, if one was."""

    def is_free(self, new: list[EngineLoader]) -> bool:
        """Return True if one of these loaders may continue here; loaders for evaluation are often kept."""
        loader = self.loader()
        return loader is None or (self.training and loader not in new and self.epoch > 0 and not self.goes_on)

    @property
    def waits_for_loader(self) -> bool:
        """Whether this is a checkpoint's position whose loader is not set up yet."""
        return self.resumes and self.loader() is None

    @property
    def goes_on(self) -> bool:
        """Whether a loader is in its epoch."""
        return self.resumes or self.newest() is not None

    @property
    def _is_over(self) -> bool:
        """Whether another loader continues a round of the program after this one has ended its epoch.

        The other one has ended fewer epochs, and something was trained since this one has ended: the other comes after
        it, or beside it by `zip_longest`.
        """
        beside = zip(self._loaders.positions, chain(self._beside, repeat(0)), strict=False)
        return (
            self.newest() is None
            and bool(self._beside)
            and self._ended < self._loaders.engine._backwards
            and any(one.epoch == epoch < self.epoch and one.goes_on for one, epoch in beside)
        )

    def begin(self) -> _Iteration | None:
        """Begin an epoch, or continue a checkpoint's; return an object for its iterator to hold; None: it is over."""
        if self.waits:
            self.waits = self.resumes = False
            self.end_epoch()
            self._ended = -1
            return None
        if self.newest() is not None:
            self._leave()
        self.resumes = False
        self._first, self._within = self.batch, [] if self.training else self._loaders.in_training()
        self._backwards = self._loaders.engine._backwards
        this = _Iteration()
        # It ends with its iterator, which `zip` may drop without having asked for a batch.
        self.newest = weakref.ref(this, self._leave)
        return this

    def _leave(self, *iteration: object) -> None:
        """End the epoch of an iterator that was dropped; one that was a look at one batch begins with it again."""
        # Before anything is trained, and no other loader has ended its epoch meanwhile, as by `zip`.
        backwards = self._loaders.engine._backwards
        self.newest = _nothing
        if self.batch == self._first + 1 and backwards == self._loaders.epochs == 0:
            self.batch = 0
            if self._restored is not None:
                self.load_state_dict(*self._restored)
        elif self.batch:
            if self.training and all(one is self or one._ended != backwards for one in self._loaders.positions):
                self.left = self.batch  # not by `zip`, as another one has ended
            self.end_epoch()

    def end_epoch(self) -> None:
        """Count the epoch in progress."""
        others, backwards = self._loaders, self._loaders.engine._backwards
        trained = self.batch == self._first or self._backwards < backwards
        self._beside, self._ended = [one.epoch for one in others.positions] if trained else [], backwards
        others.epochs += self.training
        self.epoch += 1
        self.batch, self._restored, self.newest = 0, None, _nothing

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position."""
        loader, over = self.loader(), self._is_over
        if self.waits_for_loader and self._restored is not None:
            return self._restored[0]
        # An evaluation by `next` in a step of training is not continued by the step that follows.
        within = bool(self._within) and self._within == self._loaders.in_training()
        left = self.batch > 0 and not self.resumes and within
        state = {"epoch": self.epoch + left - over, "batch": 0 if left else self.batch, "waits": self.waits or over}
        of_loader = {"global_micro_batch": None, "state": {}} if loader is None else loader._state()
        return {**state, **of_loader, "site": self.site, "training": self.training}

    def load_state_dict(self, state: Mapping[str, Any], exact: bool = True) -> None:
        """Restore a position from `state_dict`. `exact`: it was written by this process, or by its counterpart."""
        problem = wrong({**state}, _KIND, "the loader's state")
        if problem is not None:
            raise CheckpointError(f"the position of a loader is damaged: {problem}.")
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.waits, self._beside = state.get("waits", False), []  # earlier versions do not know it
        self.resumes, self.newest = True, _nothing
        self._restored = state if exact else {**state, "state": {}}, exact
        if (loader := self.loader()) is not None:
            self.batch = loader._restore(state, exact)
        else:
            self.site, self.training = state.get("site", ""), state.get("training", True)

    def hand_over(self, loader: EngineLoader) -> None:
        """Continue with another loader."""
        self.loader, self.site, self.training = weakref.ref(loader), loader._site, loader._training
        if self.resumes and self._restored is not None:
            self.load_state_dict(*self._restored)


class _Iteration:
    """Stands for an iterator of a loader as long as that lives."""


class EngineLoader:
    """A loader that `Engine.setup_dataloaders` returned; other attributes come from the given loader.

    Each `for` is an epoch. A `break` ends the epoch, as with a DataLoader; but for a look at one batch, as by
    `next(iter(loader))`, before anything is trained.
    """

    def __init__(
        self, make: Callable[[int], BatchLoader], number: int, given: Any, loaders: Loaders, training: bool, site: str
    ) -> None:
        self._loader, self._given, self._loaders, self._training = make(number), given, loaders, training
        self._make, self._number, self._site = make, number, site
        self._engine = loaders.engine
        self._position: Position | None = None
        self.samples: int | None = None
        """Samples of the latest batch that count; 0 for one that only repeats samples; None: unknown."""
        self.weight = 1.0
        """Factor for the loss of the latest batch, a mean over its samples. It makes the processes' gradients together
        equal one big batch's; 1.0 unless the batches of a step differ in size."""
        strategy = self._engine.strategy
        self._moves = None if keeps_batches(strategy) else without_cast(strategy)
        self._began_with = self._global_micro_batch

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one: `for epoch in range(loader.epoch, epochs):` resumes after `load`."""
        return self._placed.epoch

    @property
    def batch(self) -> int:
        """Batches of the epoch that this process has been given."""
        return self._placed.batch

    @property
    def _placed(self) -> Position:
        if self._position is None:
            self._loaders.place()
        assert self._position is not None
        if self._position.loader() is not self:
            raise ConfigError(
                "this loader was set up again by the same line, and the new one continues in its place: use that one, "
                "or set up both before the loop."
            )
        return self._position

    def _take(self, position: Position, number: int) -> None:
        """Continue in a position, of this number."""
        self._position = position
        if number != self._number:  # another order of samples
            length, self._loader = self._loader.length, self._make(number)
            if self._training:
                self._loader.shorten([length])
        position.hand_over(self)

    def __iter__(self) -> Iterator[Any]:
        # Here, not with the first batch: an iterator that is asked for none begins an epoch, too.
        position = self._placed
        this = position.begin()
        if this is None:
            return iter(())
        self._loader.measure(position.epoch, position.batch)
        return self._iterate(position, this, self._batches(position))

    def _iterate(self, position: Position, this: _Iteration, batches: Iterator[Batch]) -> Iterator[Any]:
        engine = self._engine
        if not engine._begun:
            engine.begin()
        if position.newest() is not this:
            raise ConfigError(
                "two iterators of one loader at once, as by zip(loader, loader), would give the same batches: set up "
                "two loaders, first, second = engine.setup_dataloaders(loader, other)."
            )
        for batch in batches:
            position.batch += 1
            self.samples = batch.samples
            if batch.total is not None:
                self.weight = batch.share * engine.strategy.processes.readers / batch.total if batch.total else 0.0
            data = batch.data
            del batch  # it may not stay in memory during the next forward
            yield data if self._moves is None else self._moves(data)
        if position.newest() is this:
            position.end_epoch()

    def _batches(self, position: Position) -> Iterator[Batch]:
        batches, strategy = self._loader.iterate(position.epoch, position.batch), self._engine.strategy
        uneven = strategy.processes.world_size > 1 and not self._loader.counts_everywhere and self._training
        if not uneven:
            return batches
        # All processes get as many batches as the one with the fewest.
        return _first_of_each(lambda: even_window([*islice(batches, 1)], strategy))

    def __len__(self) -> int:
        if self._loader.length is None:
            raise TypeError(f"{type(self._given).__name__} has no length")
        return self._loader.length

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_given"], name)

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position in the data."""
        return self._placed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position from `state_dict`."""
        self._placed.load_state_dict(state)

    def _state(self) -> dict[str, Any]:
        """Return the loader's part of the position."""
        sizes = {"global_micro_batch": self._global_micro_batch, "began_with": self._began_with}
        return {**sizes, "state": self._loader.state_dict()}

    def _restore(self, state: Mapping[str, Any], exact: bool) -> int:
        """Restore the loader's part of a position; return the batches of the epoch that are over, in its own size."""
        batch, before, now = int(state["batch"]), state["global_micro_batch"], self._global_micro_batch
        if exact:
            self._loader.load_state_dict(state["state"])
            if not batch:  # at once, and not as the epoch begins: the loop may change samplers before it
                self._loader.measure()
        # A program whose batches grow while it trains begins with the same size as before, and continues the epoch.
        if before is None or now is None or before == now or state.get("began_with") == self._began_with:
            return batch
        return place_in_epoch(self._loader, batch, before, now)

    @property
    def _global_micro_batch(self) -> int | None:
        size = self._loader.batch_size
        return None if size is None else size * self._engine.strategy.processes.readers


def _nothing() -> None:
    """Stand for a weak reference to what has ended."""


def _first_of_each(take: Callable[[], list[Batch]]) -> Iterator[Batch]:
    while window := take():
        yield window.pop()
