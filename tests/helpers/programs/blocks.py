"""Blocks, of which programs are made: the registry, the drawing of a program, and the shortening of one that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar


def one_of(*choices: Any) -> Any:
    """Return a field of a block with one of these values. The first is the simplest; repeat one to draw it often."""
    return field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True)
class Block:
    """One idea of a user's program. A subclass has fields made by `one_of`, which are drawn independently."""

    slot: ClassVar[str]
    many: ClassVar[bool] = False
    """Whether a program may have several blocks of the slot, or none."""

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        """Return the block with drawn fields."""
        return cls(**{one.name: rng.choice(one.metadata["choices"]) for one in fields(cls)})

    def fits(self, program: Program) -> bool:
        """Whether the block makes sense in the program; what the product refuses in words does not."""
        return True

    def shorter(self) -> Iterator[Self]:
        """Yield blocks with one field simpler."""
        for one in fields(self):
            choices, now = one.metadata["choices"], getattr(self, one.name)
            for choice in choices[: choices.index(now)]:
                yield replace(self, **{one.name: choice})

    def __repr__(self) -> str:
        """Return the block as it is typed, without the fields that have the simplest value."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        told = [f"{name}={value!r}" for name, value in given.items() if value != _simplest(type(self), name)]
        return f"{type(self).__name__}({', '.join(told)})"


def _simplest(kind: type[Block], name: str) -> Any:
    default = next(one.default for one in fields(kind) if one.name == name)
    return None if default is MISSING else default


BLOCKS: dict[str, list[type[Block]]] = {}
"""The kinds of blocks by slot; the first of a slot is the simplest."""
SLOTS: dict[str, list[str]] = {"Trainer": [], "Engine": [], "Loop": []}
"""The slots of a program with a Trainer, of its data in a loop with an Engine, and of such a loop on processes."""

Kind = TypeVar("Kind", bound=type[Block])
AnyProgram = TypeVar("AnyProgram", bound="Program")


def block(slot: str, many: bool = False, times: int = 1, of: tuple[str, ...] = ("Trainer",)) -> Callable[[Kind], Kind]:
    """Register a kind of block.

    Args:
        slot: the place in the program that it takes.
        many: a program may have none, or several in a row.
        times: how often it is drawn, compared with the others of the slot.
        of: the keys of `SLOTS` of programs that have the slot.
    """

    def register(kind: Kind) -> Kind:
        made = dataclass(frozen=True, repr=False)(kind)
        made.slot, made.many = slot, many
        BLOCKS.setdefault(slot, []).extend([made] * times)
        for one in of:
            SLOTS[one] = [*dict.fromkeys([*SLOTS[one], slot])]
        return made

    return register


class Program:
    """Blocks by slot, where a slot that is not given has the simplest block: `Program(stops=(Stop("kill"),))`."""

    of: ClassVar[str] = "Trainer"

    def __init__(self, **given: Any) -> None:
        self.blocks: dict[str, Any] = {slot: given.pop(slot, _simplest_of(slot)) for slot in SLOTS[self.of]}
        assert not given, f"no such slots: {given}"

    def __getattr__(self, slot: str) -> Any:
        if slot in vars(self).get("blocks", {}):
            return self.blocks[slot]
        raise AttributeError(slot)

    def __repr__(self) -> str:
        told = [f"{slot}={found!r}" for slot, found in self.blocks.items() if found != _simplest_of(slot)]
        return f"{type(self).__name__}({', '.join(told)})"

    def all(self) -> Iterator[Block]:
        """Yield all blocks."""
        for found in self.blocks.values():
            yield from found if isinstance(found, tuple) else (found,)

    @property
    def cuts_epochs(self) -> bool:
        """Whether epochs end before the loader does."""
        cut = "limit" in self.blocks and self.limit.train != 1.0
        return cut or ("second" in self.blocks and (self.second.reading == "zip" or self.second.left_at > 0))

    def fits(self) -> bool:
        """Whether all blocks fit together."""
        return all(one.fits(self) for one in self.all())

    def with_(self, slot: str, found: Any) -> Self:
        """Return the program with another block, or other blocks, in a slot."""
        return type(self)(**{**self.blocks, slot: found})

    def shorter(self) -> Iterator[Self]:
        """Yield programs that are shorter by one block or one field, the shortest first."""
        for slot, found in self.blocks.items():
            if isinstance(found, tuple):
                for position, one in enumerate(found):
                    rest = found[:position], found[position + 1 :]
                    yield self.with_(slot, rest[0] + rest[1])
                    for other in one.shorter():
                        yield self.with_(slot, (*rest[0], other, *rest[1]))
            else:
                if found != _simplest_of(slot):
                    yield self.with_(slot, _simplest_of(slot))
                    for other in found.shorter():
                        yield self.with_(slot, other)


class EngineProgram(Program):
    """The same, of a loop of the user's own around an Engine."""

    of = "Engine"


def draw(rng: random.Random, kind: type[AnyProgram]) -> AnyProgram:
    """Return a drawn program."""
    while True:
        program = kind(**{slot: _draw_slot(rng, slot) for slot in SLOTS[kind.of]})
        # What does not fit the rest is drawn again; a few times, since two blocks may each refuse the other.
        for _ in range(20):
            wrong = [one.slot for one in program.all() if not one.fits(program)]
            if not wrong:
                return program
            slot = rng.choice(wrong)
            program = program.with_(slot, _draw_slot(rng, slot))


def _simplest_of(slot: str) -> Any:
    return () if BLOCKS[slot][0].many else BLOCKS[slot][0]()


def _draw_slot(rng: random.Random, slot: str) -> Any:
    kinds = BLOCKS[slot]
    if kinds[0].many:
        return tuple(rng.choice(kinds).draw(rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3))))
    return rng.choice(kinds).draw(rng)


def shortened(program: AnyProgram, fails: Callable[[AnyProgram], bool]) -> AnyProgram:
    """Return a program that fails and of which nothing can be left out; `fails` may say no to end the search."""
    while True:
        for shorter in program.shorter():
            if shorter.fits() and fails(shorter):
                program = shorter
                break
        else:
            return program
