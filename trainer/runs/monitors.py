"""Refuse monitored names that are not logged: all at once, and with a checkpoint of what was trained until then."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from itertools import chain
from typing import TYPE_CHECKING

from trainer.data.fingerprints import codes_in
from trainer.errors import did_you_mean, raise_problems
from trainer.runs.hook_checks import users_functions

if TYPE_CHECKING:
    from trainer.loop.run import Run

_NEARLY = 0.85


def refuse_misspelt_monitors(run: Run) -> None:
    """Raise ConfigError after the sanity check for names that are nearly the name of a logged value. Collective.

    A name that stands in the code of the module or of a callback may be logged in training.
    """
    logged = set[str]().union(*run.strategy.processes.all_gather_object(run.metrics.names))

    def misspelt(name: str) -> bool:
        close = difflib.get_close_matches(name, logged, n=1, cutoff=_NEARLY)
        return bool(close) and name not in logged and not _may_be_logged(run, name)

    raise_problems(_problems(run, logged, misspelt), "monitored names")


def refuse_missing_monitors(run: Run) -> None:
    """Write a checkpoint and raise ConfigError, if names are monitored that will not be logged. Collective."""
    if not _problems(run, (), lambda name: name not in run.session.latest.measured):
        return
    known = run.values.read()

    def missing(name: str) -> bool:
        return name not in run.session.latest.measured and name not in known and not run.may_still_be_logged(name)

    problems = _problems(run, known, missing)
    if problems:
        run.saving_hooks.on_train_end()
        raise_problems(problems, "monitored names")


def _problems(run: Run, logged: Collection[str], missing: Callable[[str], bool]) -> list[str]:
    problems = [*chain.from_iterable(one.monitor_problems(logged, missing) for one in run.callbacks)]
    for config in run.scheduler_configs:
        if config.monitor is not None and config.strict and missing(config.monitor):
            problems.append(
                f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged."
                f"{did_you_mean(config.monitor, logged)} Logged so far: {', '.join(sorted(logged)) or 'nothing'}. "
                'Log it before the scheduler steps, or give "strict": False.'
            )
    return problems


def _may_be_logged(run: Run, name: str) -> bool:
    """Whether user code has the name as a text, or does something else in the sanity check."""
    names = {name, name.removesuffix("_step"), name.removesuffix("_epoch"), "sanity_checking"}
    functions = chain.from_iterable(users_functions(type(one)) for one in (run.module, *run.callbacks))
    codes = chain.from_iterable(codes_in(function.__code__) for function in functions)
    texts = {repr(one) for code in codes for one in (*code.co_names, *code.co_consts)}
    return any(repr(one) in text for text in texts for one in names)
