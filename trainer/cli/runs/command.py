"""`trainer runs`: list the runs below a folder, sorted and filtered, for people and for programs."""

from __future__ import annotations

import csv
import json
import math
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from itertools import chain
from typing import Any

from trainer.arguments import local_path
from trainer.cli.columns import fitted_lines
from trainer.cli.options import CommandParser, reports_errors
from trainer.cli.runs.find import METRICS_SHOWN, RunSummary, differing, find_runs, main_metrics, with_name
from trainer.errors import ConfigError, did_you_mean, printable

EXAMPLES = """\
examples:
  trainer runs ls runs
  trainer runs ls runs --sort -val_acc --filter 'val_acc>0.9' --filter module.width=32
  trainer runs ls . --metric val_loss --hparam module.lr --csv > runs.csv
  trainer runs ls runs --json
"""
COLUMNS = ("name", "state", "step", "epoch", "began", "time")
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


@reports_errors
def run(arguments: list[str]) -> int:
    """List runs. Returns the exit code."""
    options = _parser().parse(_with_joined_sort(arguments))
    found = [one for folder in options.folder for one in find_runs(local_path(folder))]
    if not found:
        print(f"no runs below {printable(' '.join(options.folder))}", file=sys.stderr)
        return 1
    if len(options.folder) > 1:
        found = [replace(one, name=with_name(str(one.path), one.path)) for one in found]
    known = list(dict.fromkeys(chain.from_iterable(map(values_of, found))))
    for text in options.filter:
        found = [*filter(_condition(text, known), found)]
    metrics = options.metric or main_metrics({name for one in found for name in one.metrics})
    parameters = options.hparam or differing([one.hyperparameters for one in found])
    if options.sort:
        found = _sorted(found, _require_known(options.sort.removeprefix("-"), known), options.sort[0] == "-")
    head = [*COLUMNS, *(_require_known(name, known) for name in (*metrics, *parameters))]
    table: list[list[Any]] = [[values_of(one).get(name) for name in head] for one in found]
    if options.json:
        print(json.dumps([dict(zip(head, map(_json_ready, row), strict=True)) for row in table], indent=1))
    elif options.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(map(_plain, row) for row in (head, *table))
    else:
        _print_table(head, table, len(metrics), len(parameters))
    return 0


def _print_table(head: list[str], table: list[list[Any]], metrics: int, parameters: int) -> None:
    cells = [[str(_plain(name)) for name in head], *([*map(_cell, head, row)] for row in table)]
    first_to_go = _first_to_go(metrics, parameters)
    print("\n".join(fitted_lines(cells, range(2, len(COLUMNS) + metrics), first_to_go, "--csv or --json")))


def _sorted(found: list[RunSummary], name: str, largest_first: bool) -> list[RunSummary]:
    """Return the runs by a value, numbers before texts; those without one, and with nan, are last in both orders."""
    values = {one.path: values_of(one).get(name) for one in found}
    known = [one for one in found if values[one.path] == values[one.path] and values[one.path] is not None]

    def key(one: RunSummary) -> tuple[bool, Any]:
        value = values[one.path]
        return (False, value) if isinstance(value, (int, float)) else (True, str(value))

    return [*sorted(known, key=key, reverse=largest_first), *(one for one in found if one not in known)]


def _first_to_go(metrics: int, parameters: int) -> list[int]:
    """Return the numbers of the columns that a narrow terminal leaves out, in that order; the name stays."""
    _, state, step, epoch, began, time, *others = range(len(COLUMNS) + metrics + parameters)
    return [began, time, epoch, *reversed(others[1:]), state, *others[:1], step]


def _parser() -> CommandParser:
    parser = CommandParser(prog="trainer runs", description="List runs.", epilog=EXAMPLES)
    commands = parser.add_subparsers(dest="action", metavar="COMMAND", required=True, parser_class=CommandParser)
    words = "list the runs below a folder, at any depth: name, state, steps, time, metrics, hyperparameters that differ"
    ls = commands.add_parser("ls", help=words, description=words[0].upper() + words[1:] + ".", epilog=EXAMPLES)
    words = "the default_root_dir of runs, a folder above it, or a run"
    ls.add_argument("folder", metavar="FOLDER", nargs="+", help=words)
    ls.add_argument("--sort", metavar="[-]NAME", help="by a column, a metric or a hyperparameter; -: largest first")
    ls.add_argument("--filter", metavar="'NAME>VALUE'", action="append", default=[], help="also <, <=, >=, =, !=")
    ls.add_argument("--metric", metavar="NAME", nargs="+", help=f"metrics to show (default: {METRICS_SHOWN} of them)")
    ls.add_argument("--hparam", metavar="NAME", nargs="+", help="hyperparameters to show (default: those that differ)")
    form = ls.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _with_joined_sort(arguments: list[str]) -> list[str]:
    """Return `--sort=-val_acc` for `--sort -val_acc`, whose second word would be an option."""
    words, joined = iter(arguments), []
    for word in words:
        name = next(words, None) if word == "--sort" else None
        joined.append(word if name is None else f"--sort={name}")
    return joined


def values_of(one: RunSummary) -> dict[str, Any]:
    """Return everything that is known of a run, by the names of columns, metrics and hyperparameters."""
    began = None if one.began is None else datetime.fromtimestamp(one.began).isoformat(" ", "seconds")
    columns = {"name": one.name, "state": one.state, "step": one.step, "epoch": one.epoch}
    return {**one.hyperparameters, **one.metrics, **columns, "began": began, "time": one.seconds}


def _condition(text: str, known: list[str]) -> Callable[[RunSummary], bool]:
    """Return whether a filter holds for a run, as a function.

    Raises:
        ConfigError: it is not a condition, or no run has the name.
    """
    match = re.fullmatch(r"\s*(.+?)\s*(<=|>=|!=|==?|<|>)\s*(.*?)\s*", text)
    if match is None:
        raise ConfigError(f"--filter {text!r}: write NAME>VALUE, with one of <, <=, >, >=, =, !=.")
    name, compare, wanted = _require_known(match[1], known), COMPARISONS[match[2].replace("==", "=")], match[3]

    def holds(one: RunSummary) -> bool:
        value: Any = values_of(one).get(name)
        try:
            return compare(float(value), float(wanted))
        except (TypeError, ValueError):
            return value is not None and compare(str(value).lower(), wanted.lower())

    return holds


def _require_known(name: str, known: list[str]) -> str:
    if name not in known:
        raise ConfigError(f"no run has {name!r}.{did_you_mean(name, known)} There are: {', '.join(known)}.")
    return name


def _json_ready(value: Any) -> Any:
    """Return nan and infinities as text, as `trainer checkpoint show --json` does: JSON has no numbers for them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "time":
        minutes, seconds = divmod(int(value), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return f"{value:.6g}" if isinstance(value, float) else str(_plain(value))


def _plain(value: Any) -> Any:
    """Escape line ends and what a terminal would interpret in a text: a run directory may come from a stranger."""
    return printable(value).replace("\n", "\\n") if isinstance(value, str) else value
