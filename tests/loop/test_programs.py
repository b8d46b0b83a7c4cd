"""Programs as users write them train as the same loop by hand does: drawn ones, and one of each block.

`python -m tests.helpers.programs 17` runs program 17 alone, and `python -m tests.helpers.programs loops 17` loop 17.
"""

from __future__ import annotations

import json
import os
import tempfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from tests.helpers.fuzzing import ACCEPTED, WrongError, try_each
from tests.helpers.processes import fork_python
from tests.helpers.programs.blocks import BLOCKS, SLOTS, EngineProgram, Program, shortened
from tests.helpers.programs.check import problems_of, wrong_loops, wrong_or_none
from tests.helpers.programs.data import (
    BrokenSamples,
    ByEpoch,
    Growing,
    InOrder,
    ListOfBatches,
    OwnSampler,
    ReadyBatches,
    Several,
    Shuffled,
    Stream,
    Subclassed,
)
from tests.helpers.programs.engine import Break, Saving, Second
from tests.helpers.programs.interruptions import PASSED, Stop
from tests.helpers.programs.layouts import problems_of_loops
from tests.helpers.programs.loops import Gan, Heads, Layout, LoopProgram, Penalty, Rows, TwoModels
from tests.helpers.programs.loops import Steps as LoopSteps
from tests.helpers.programs.several import (
    Average,
    Early,
    Ending,
    First,
    Loggers,
    Monitors,
    Optimizers,
    Saver,
    SeveralProgram,
    Unfreeze,
    Vals,
)
from tests.helpers.programs.training import (
    Again,
    Draws,
    End,
    Guard,
    Items,
    Limit,
    Optimizer,
    Saves,
    Search,
    Validation,
    Window,
)
from tests.tiers import Inputs, Numbered, selected

FIXED: dict[str, Program] = {
    "shuffled, killed in a window, in a validation, and between two batches": Program(
        data=Shuffled(7, 2),
        stops=(Stop("kill", "in a window", 4), Stop("kill", "validation", 2), Stop("kill", "batch", 3)),
        window=Window(2, 3),
        val=Validation(interval=2, every=None),
        optimizer=Optimizer("AdamW", "every second step"),
        saves=Saves(1),
    ),
    "a sanity check of a stream of which the fit reads no more, and a signal after the end": Program(
        data=ListOfBatches(),
        window=Window(3),
        val=Validation("stream", sanity=2),
        guard=Guard("rewind", 5),
        again=Again(2),
        stops=(Stop("stop", "start of an epoch", 2, True), Stop("signal", "saved", 4, True)),
    ),
    "random numbers, killed in a validation": Program(
        data=Shuffled(7, 2), stops=(Stop("kill", "validation", 2),), val=Validation(interval=2), draws=Draws(True)
    ),
    "means over items, killed in writes": Program(
        data=InOrder(7, 2),
        stops=(Stop("kill", "write", 2), Stop("kill", "write", 3), Stop("kill", "save", 2)),
        window=Window(2),
        val=Validation("list", 0.5),
        items=Items(True),
        saves=Saves(1, twice=True),
    ),
    "samplers with a count, and a checkpoint of the start": Program(
        data=OwnSampler("counts", 8, 2),
        stops=(Stop("stop", "step", 6), Stop("kill", "batch", 1)),
        saves=Saves(3, at_start=True),
    ),
    "samplers with a state, and two callbacks that save": Program(
        data=OwnSampler("has a state", 8, 2),
        stops=(Stop("error", "saved", 5, early=True), Stop("error", "update", 1)),
        saves=Saves(2, twice=True),
    ),
    "uneven batches": Program(
        data=OwnSampler("uneven batches", 10),
        stops=(Stop("signal", "first batch", 2),),
        window=Window(3),
        optimizer=Optimizer("momentum", "epoch"),
    ),
    "ready batches": Program(
        data=ReadyBatches(False, 10),
        stops=(Stop("error", "end of an epoch", 1),),
        window=Window(2),
        val=Validation("ready batches", sanity=2),
    ),
    "batches loaded in bulk": Program(data=ReadyBatches(True, 7), window=Window(3)),
    "broken samples": Program(data=BrokenSamples(7, 3), window=Window(2), val=Validation("broken samples")),
    "a list of batches, and a second fit": Program(
        data=ListOfBatches(10), end=End(3, 7), again=Again(2), optimizer=Optimizer("SGD", "step")
    ),
    "a stream with epochs, stopped at an epoch's end": Program(
        data=Stream("state has the epoch"),
        stops=(Stop("error", "start of an epoch", 2),),
        end=End(3),
        saves=Saves(None),
    ),
    "a stream that is reset": Program(
        data=Stream("set_epoch resets", "own loader", 7), stops=(Stop("end", "step", 4),), end=End(3), saves=Saves(None)
    ),
    "a stream that goes on, stopped after its last batch": Program(
        data=Stream("goes on", "DataLoader", 7, 3),
        stops=(Stop("signal", "last step", 1), Stop("error", "end of a validation", 1)),
        val=Validation("stream", sanity=2),
        saves=Saves(1),
    ),
    "a stream without a state, longer than its limit": Program(
        data=Stream("no state", samples=7, has_len=True),
        stops=(Stop("stop", "last batch", 1),),
        limit=Limit(0.5, 2),
        val=Validation(every=2),
    ),
    "a subclass with persistent workers": Program(
        data=Subclassed(workers=1), stops=(Stop("stop", "step", 5),), saves=Saves(2)
    ),
    "a dict of loaders": Program(
        data=Several("dict", "in order", "by epoch"), stops=(Stop("stop", "step", 4),), window=Window(2)
    ),
    "streams together, until the longer ends": Program(
        data=Several("max_size", "goes on", "state has the epoch"), stops=(Stop("error", "step", 6),), saves=Saves(2)
    ),
    "loaders one after the other": Program(
        data=Several("sequential", "by epoch", "no state"), stops=(Stop("kill", "start", 1), Stop("kill", "step", 7))
    ),
    "loaders that grow by the epoch, to a last step": Program(
        data=ByEpoch(1, 8, 2), stops=(Stop("stop", "step", 6),), end=End(3, 9), optimizer=Optimizer("SGD", "epoch")
    ),
    "loaders of every second epoch, and a step that is taken back": Program(
        data=ByEpoch(2, 6), stops=(Stop("kill", "step", 5),), end=End(3), guard=Guard("rewind", 202), saves=Saves(2)
    ),
    "a step that is taken back, with a validation after it": Program(
        val=Validation(interval=2), guard=Guard("rewind", 3), saves=Saves(1)
    ),
    "a dataset that grows": Program(data=Growing("dataset", 2, 7), stops=(Stop("stop", "step", 6),), end=End(3)),
    "a batch size that grows, and a bad step": Program(data=Growing("batch size"), guard=Guard("skip", 3)),
    "indices that are replaced": Program(data=Growing("indices", -2)),
    "a sampler that is replaced": Program(data=Growing("sampler"), stops=(Stop("stop", "step", 6),), saves=Saves(2)),
    "bad steps alone in an epoch": Program(window=Window(3), val=Validation(), guard=Guard("skip", 2)),
    "a search for a rate": Program(data=Stream("goes on", samples=6), search=Search("rate")),
    "a search for a batch size": Program(data=OwnSampler("has a state"), search=Search("batch size")),
    "two loaders by zip": EngineProgram(
        data=OwnSampler("counts"), second=Second("zip", samples=4), breaks=(Break(3),), saving=Saving(2, True)
    ),
    "a second loader by next": EngineProgram(
        data=Shuffled(), second=Second("next of the second", samples=40), breaks=(Break(4),), saving=Saving(1)
    ),
    "a batch size that grows in a loop with an Engine": EngineProgram(data=Growing("batch size"), breaks=(Break(6),)),
    "a sampler with a count, and a step that is taken back": Program(
        data=OwnSampler("counts"), guard=Guard("rewind", 5)
    ),
    "a second loader again and again": EngineProgram(
        data=Several("min_size"), second=Second("again and again", "by epoch", 4), breaks=(Break(5),)
    ),
    "two loaders by zip, broken twice at an epoch's end": EngineProgram(
        data=Stream(samples=6), second=Second("zip"), breaks=(Break(6), Break(7)), saving=Saving(2, True)
    ),
    "two loaders one after the other": EngineProgram(
        data=OwnSampler("counts"),
        second=Second("one after the other", "by epoch"),
        breaks=(Break(5), Break(1), Break(8)),
        saving=Saving(1, True, True),
    ),
    "a chain of two loaders": EngineProgram(
        data=Shuffled(7), second=Second("chain", "state has the epoch"), breaks=(Break(6), Break(5)), saving=Saving(1)
    ),
    "a short loader beside a long one": EngineProgram(
        data=Stream("goes on"), second=Second("zip_longest", samples=14), breaks=(Break(6),), saving=Saving(2)
    ),
    "a long loader beside a short one": EngineProgram(
        data=Several("list"), second=Second("zip_longest", samples=4), breaks=(Break(3), Break(5)), saving=Saving(1)
    ),
    "indices that are replaced after a load": EngineProgram(
        data=Growing("indices", -2), breaks=(Break(5),), saving=Saving(2, True)
    ),
    "epochs that are left by break": EngineProgram(
        second=Second("again and again", left_at=2), breaks=(Break(3), Break(2)), saving=Saving(1, True)
    ),
    "weights alone of a run that is killed before its first checkpoint": SeveralProgram(
        stops=(Stop("kill", "step", 4),),
        savers=(Saver(3, True, True, -1),),
        optimizers=Optimizers(2, True, "by turns", "step", 0.9),
        unfreeze=Unfreeze(1),
        monitors=Monitors(norms=True),
    ),
    "a second callback writes after the one that is resumed from": SeveralProgram(
        stops=(Stop("kill", "start of an epoch", 3), Stop("kill", "saved", 4)),
        first=First(2),
        savers=(Saver(None, True, True, 2), Saver(3, top_k=2)),
        average=Average("epochs"),
        loggers=Loggers("csv csv2 jsonl jsonl2", 2),
        vals=Vals(3, 0.5),
        ending=Ending("started again", 3),
    ),
    "a run that stops early at a saved step": SeveralProgram(
        stops=(Stop("kill", "validation", 5),),
        first=First(3),
        savers=(Saver(2, True),),
        vals=Vals(2, 3),
        early=Early(1, True),
        average=Average("steps"),
        optimizers=Optimizers(schedule="epoch"),
        unfreeze=Unfreeze(1, "a group"),
        ending=Ending("started again", 3),
    ),
    "a finished run that is extended": SeveralProgram(
        optimizers=Optimizers(3, schedule="step", momentum=0.9),
        savers=(Saver(None, True),),
        vals=Vals(2, 0.5),
        loggers=Loggers("jsonl", media=True),
        monitors=Monitors("epoch", True),
        ending=Ending("extended", 3),
    ),
    "a step back with several callbacks": SeveralProgram(
        first=First(3, True), savers=(Saver(2, True, top_k=2),), monitors=Monitors("step"), ending=Ending("rewound", 3)
    ),
    "one loader by next, saved again after a load": EngineProgram(
        data=OwnSampler("has a state"), second=Second("next"), breaks=(Break(6), Break(1)), saving=Saving(2, True, True)
    ),
}
if find_spec("torchdata"):
    _STREAM = Stream("no state", "StatefulDataLoader")
    FIXED |= {
        "torchdata's loader of a stream without a state, resumed twice": Program(
            data=_STREAM, stops=(Stop("signal", "step", 2), Stop("signal", "step", 1)), saves=Saves(1)
        ),
        "the same, and a step that is taken back": Program(
            data=_STREAM, window=Window(later=2), guard=Guard("rewind", 5)
        ),
        "the same in a loop with an Engine": EngineProgram(
            data=_STREAM, second=Second("next"), saving=Saving(1), breaks=(Break(1), Break(2))
        ),
    }
"""Programs with each block and each place of a stop, of which several were once wrong."""


def one_program(rng: Numbered) -> str:
    """Run the program of the generator's seed, with sockets of workers in a folder whose path is short enough."""
    tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"
    wrong = wrong_or_none(rng.seed_given)
    if wrong is not None:
        raise WrongError(wrong)
    return ACCEPTED


LOOPS = (
    LoopProgram(rows=Rows(bad=True), idea=Gan(every=2), steps=LoopSteps(clip="norm")),
    LoopProgram(layout=Layout("ddp"), idea=TwoModels(losses=2, order=13, named="none")),
    LoopProgram(layout=Layout("ddp"), idea=Penalty(own_backward=True), steps=LoopSteps(window=2)),
    LoopProgram(layout=Layout("ddp, unused"), idea=Heads("two backwards")),
    LoopProgram(
        layout=Layout("ddp, unused"), steps=LoopSteps(window=3, held_back="a"), idea=TwoModels(losses=2, order=3)
    ),
    LoopProgram(layout=Layout("fsdp"), rows=Rows(17), idea=Gan(every=2, between=True)),
)
"""Loops of which most were once wrong."""


def test_loops_on_one_process_and_two_train_and_resume_as_by_hand() -> None:
    for processes in (1, 2):
        chosen = {number: one for number, one in enumerate(LOOPS) if one.layout.processes == processes}
        assert all(one.fits() for one in chosen.values())
        assert problems_of_loops(chosen, processes) == {number: [] for number in chosen}


def test_a_drawn_loop_on_one_process_or_two_trains_and_resumes_as_by_hand(inputs: Inputs) -> None:
    seeds = [rng.seed_given for rng in inputs]  # type: ignore[attr-defined]
    chosen = seeds[: -(-len(seeds) * 3 // 20)]  # each starts many Engines
    wrong = [told for _, _, told in wrong_loops(chosen) if told]
    assert not wrong, f"{len(wrong)} of {len(chosen)} loops:\n\n" + "\n\n".join(wrong)


def test_a_drawn_program_trains_as_by_hand(inputs: Inputs) -> None:
    try_each(inputs, one_program)  # type: ignore[arg-type]


def one_program_with_several(rng: Numbered) -> str:
    wrong = wrong_or_none(rng.seed_given, several=True)
    if wrong is not None:
        raise WrongError(wrong)
    return ACCEPTED


def test_a_drawn_program_with_several_of_everything_leaves_what_one_by_hand_does(inputs: Inputs) -> None:
    pytest.importorskip("tensorboard")
    try_each(islice(inputs, 0, None, 3), one_program_with_several)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run the fixed programs in one forked process."""
    names, file = selected(request, "name"), tmp_path_factory.mktemp("programs") / "problems"
    run = fork_python(f"from tests.loop.test_programs import run_fixed\nrun_fixed({names!r}, {str(file)!r})\n").wait()
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(file.read_text())
    return found


def run_fixed(names: list[str], file: str) -> None:
    """Run fixed programs, and write what is wrong with each."""
    Path(file).write_text(json.dumps({name: problems_of(FIXED[name]) for name in names}))


@pytest.mark.parametrize("name", FIXED)
def test_a_program_trains_as_by_hand(problems: dict[str, list[str]], name: str) -> None:
    assert problems[name] == [], FIXED[name]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
def test_the_fixed_programs_have_each_block() -> None:
    blocks = [one for program in FIXED.values() for one in program.all()]
    assert all(program.fits() for program in FIXED.values())
    own = {kind for slot in SLOTS["Loop"] for kind in BLOCKS[slot]}  # loops on processes are another list
    assert {type(one) for one in blocks} - own == {kind for kinds in BLOCKS.values() for kind in kinds} - own
    stops = [one for one in blocks if isinstance(one, Stop)]
    assert {stop.place for stop in stops} == set(PASSED)
    assert {stop.how for stop in stops} == {"kill", "error", "signal", "stop", "end"}


def test_a_program_that_fails_is_shortened() -> None:
    long = Program(
        data=Stream("goes on", samples=6),
        stops=(Stop("kill", "step", 3), Stop("signal", "batch", 2)),
        window=Window(3, 2),
        val=Validation("stream", sanity=2),
    )

    def fails(program: Program) -> bool:
        return program.window.micro_batches > 1 and any(stop.how == "signal" for stop in program.stops)

    short = shortened(long, fails)
    assert repr(short) == "Program(window=Window(micro_batches=2), stops=(Stop(how='signal'),))"
    assert eval(repr(short), {**globals()}).blocks == short.blocks
