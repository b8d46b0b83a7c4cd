"""Check a program: run it with the product and by hand, and say what differs, of the shortest program that fails."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.programs import data, engine, interruptions, layouts, several_runs, training
from tests.helpers.programs.blocks import EngineProgram, Program, draw, shortened
from tests.helpers.programs.loops import LoopProgram
from tests.helpers.programs.record import differences
from tests.helpers.programs.reference import run_by_hand
from tests.helpers.programs.runs import run_product
from tests.helpers.programs.several import SeveralProgram

KINDS: tuple[type[Program], ...] = (Program, Program, Program, EngineProgram)
"""The kinds of programs, as often as they are drawn."""

__all__ = ["data", "drawn", "engine", "interruptions", "problems_of", "report", "training", "wrong_or_none"]


def drawn(seed: int, kinds: tuple[type[Program], ...] = KINDS) -> Program:
    """Return the program that a seed stands for."""
    rng = random.Random(seed)
    return draw(rng, rng.choice(kinds))


def problems_of(program: Program) -> list[str]:
    """Return what differs between the program and what it means; nothing if it is right."""
    if isinstance(program, LoopProgram):
        return layouts.problems_of_loops({0: program}, program.layout.processes)[0]
    folder = Path(tempfile.mkdtemp(prefix="program-"))
    check = _check_engine if isinstance(program, EngineProgram) else _check_trainer
    try:
        return several_runs.check(program, folder) if isinstance(program, SeveralProgram) else check(program, folder)
    except Exception as error:
        where = "".join(traceback.format_exception(error, limit=-3, chain=False))
        return [f"{type(error).__name__}: {error}", where]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_trainer(program: Program, folder: Path) -> list[str]:
    if program.draws.drawn:
        whole = run_product(program.with_("stops", ()), folder / "whole", {})
        return differences(whole, run_product(program, folder / "stopped", whole.lengths()), bits=True)
    if not program.data.replayed:
        expected = run_by_hand(program)
        return differences(expected, run_product(program, folder, expected.lengths()))
    whole = run_product(program.with_("stops", ()), folder / "whole", {})
    orders = [whole.order(fit) for fit in range(program.again.fits_done)]
    wrong, expected = _wrong_order(program, orders), run_by_hand(program, orders)
    if wrong or not program.stops:
        return wrong or differences(expected, whole)
    return differences(expected, run_product(program, folder / "stopped", expected.lengths()))


def _check_engine(program: EngineProgram, folder: Path) -> list[str]:
    if not program.data.replayed:
        return differences(engine.engine_by_hand(program), engine.run_engine(program, folder))
    orders = [engine.run_engine(program.with_("breaks", ()), folder / "whole").order(0)]
    wrong, expected = _wrong_order(program, orders), engine.engine_by_hand(program, orders)
    return wrong or differences(expected, engine.run_engine(program, folder / "stopped"))


def _wrong_order(program: Program, orders: list[dict[int, list[list[int]]]]) -> list[str]:
    """Check an order of the product's own, which the loop by hand takes as it is."""
    wrong = [program.data.check_order(program.data.made_for(0), [*one.values()]) for one in orders]
    return [f"order: {one}" for one in wrong if one]


def report(program: Program, problems: list[str], command: str, seconds: float = 30.0) -> str:
    """Return the text for a program that fails: how to run it again, and a program of which nothing can be left out.

    Args:
        seconds: the time for the search of that program.
    """
    deadline = time.monotonic() + seconds
    found = {repr(program): problems}

    def fails(shorter: Program) -> bool:
        if time.monotonic() > deadline:
            return False
        wrong = problems_of(shorter)
        # Another kind of failure would hide this one.
        same = bool(wrong) and wrong[0].partition(":")[0] == problems[0].partition(":")[0]
        if same:
            found[repr(shorter)] = wrong
        return same

    short = shortened(program, fails)
    return "\n  ".join([command, repr(program), *problems, "shorter:", repr(short), *found[repr(short)]])


def wrong_or_none(seed: int, several: bool = False) -> str | None:
    """Draw a program, one with several of everything if `several`, and return the report if it fails."""
    program = drawn(seed, (SeveralProgram,) if several else KINDS)
    problems = problems_of(program)
    command = f"python -m tests.helpers.programs {'several ' * several}{seed}"
    return report(program, problems, command) if problems else None


def wrong_loops(seeds: list[int]) -> Iterator[tuple[int, LoopProgram, str | None]]:
    """Draw loops for the Engine, run those of one number of processes together, and yield each with its report."""
    programs = {seed: draw(random.Random(seed), LoopProgram) for seed in seeds}
    for processes in (1, 2):
        chosen = {seed: one for seed, one in programs.items() if one.layout.processes == processes}
        for seed, problems in layouts.problems_of_loops(chosen, processes).items():
            command = f"python -m tests.helpers.programs loops {seed}"
            told = report(programs[seed], problems, command) if problems else None
            yield seed, programs[seed], told
