"""Refuse monitored names that are not logged: all at once, and with a checkpoint of what was trained until then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from trainer.errors import did_you_mean, raise_problems

if TYPE_CHECKING:
    from trainer.loop.run import Run


def refuse_missing_monitors(run: Run) -> None:
    """Write a checkpoint and raise ConfigError, if names are monitored that will not be logged. Collective."""
    if not _problems(run, (), lambda name: name not in run.session.measured):
        return
    known = run.read_metrics()

    def missing(name: str) -> bool:
        return name not in run.session.measured and name not in known and not run.is_to_come(name)

    problems = _problems(run, known, missing)
    if problems:
        run.saving_hooks.on_train_end()
        raise_problems(problems, "monitored names")


def _problems(run: Run, logged: Collection[str], missing: Callable[[str], bool]) -> list[str]:
    problems = [problem for one in run.callbacks for problem in one.monitor_problems(logged, missing)]
    for config in run.scheduler_configs:
        if config.monitor is not None and config.strict and missing(config.monitor):
            problems.append(
                f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged."
                f"{did_you_mean(config.monitor, logged)} Logged so far: {', '.join(sorted(logged)) or 'nothing'}. "
                'Log it before the scheduler steps, or give "strict": False.'
            )
    return problems
