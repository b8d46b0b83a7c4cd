"""`trainer plot`: draw the logged curves of one or several runs, as a picture or as a page."""

from __future__ import annotations

import base64
import fnmatch
import html
import io
import math
from pathlib import Path
from typing import Any

from trainer.arguments import local_path
from trainer.cli.options import CommandParser, reports_errors
from trainer.cli.runs.find import read_metrics, run_directories
from trainer.errors import ConfigError, MissingPackageError, did_you_mean

EXAMPLES = """\
examples:
  trainer plot runs/digits/version_0
  trainer plot runs/digits --metric 'val_*' --output curves.png
  trainer plot runs/a/version_0 runs/b/version_3 --output curves.html --smooth 0.6
"""
FORMATS = (".png", ".svg", ".pdf", ".html")

Curves = dict[str, dict[str, list[tuple[int, float]]]]
"""Steps and values by metric, then by name of the run."""


@reports_errors
def run(arguments: list[str]) -> int:
    """Draw curves to a file. Returns the exit code."""
    parser = CommandParser(
        prog="trainer plot",
        description="Draw the values that runs have logged to metrics.csv or metrics.jsonl.",
        epilog=EXAMPLES,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run directory, or a folder with runs below")
    parser.add_argument("--output", metavar="FILE", default="curves.png", help="PNG, SVG, PDF or HTML (curves.png)")
    parser.add_argument("--metric", metavar="NAME", nargs="+", help="names of metrics; * and ? match others")
    parser.add_argument("--smooth", metavar="S", type=float, default=0.0, help="0 to 1: moving average")
    parser.add_argument("--log", action="store_true", help="a logarithmic scale of values")
    options = parser.parse(arguments)
    output = local_path(options.output)
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"--output {output}: {output.suffix or 'no ending'} is none of {', '.join(FORMATS)}.")
    if not 0 <= options.smooth < 1:
        raise ConfigError(f"--smooth {options.smooth:g}: give a number from 0 up to, but not, 1.")
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent}: make it first, or write somewhere else.")
    curves = chosen(curves_of(options.runs), options.metric)
    draw(curves, output, options.smooth, options.log)
    print(f"{output}: {', '.join(curves)}")
    return 0


def curves_of(paths: list[str]) -> Curves:
    """Return the curves of runs, or of all runs below folders.

    Raises:
        ConfigError: a path does not exist, or has no logged values.
    """
    curves: Curves = {}
    for text in paths:
        path = local_path(text)
        runs = sorted(run_directories(path)) if path.is_dir() else []
        found = {str(one): metrics for one in runs if (metrics := read_metrics(one))}
        if not found:
            why = "has no metrics.csv or metrics.jsonl below it" if path.is_dir() else "does not exist"
            raise ConfigError(f"{text} {why}. CSVLogger or JSONLLogger writes one: Trainer(logger=[CSVLogger()]).")
        for name, metrics in found.items():
            for metric, points in metrics.items():
                curves.setdefault(metric, {})[name] = points
    return curves


def chosen(curves: Curves, patterns: list[str] | None) -> Curves:
    """Return the curves whose names match one of the patterns; all of them without patterns.

    Raises:
        ConfigError: a pattern matches none.
    """
    for pattern in patterns or []:
        if not fnmatch.filter(curves, pattern):
            names = ", ".join(curves)
            close = did_you_mean(pattern, list(curves))
            raise ConfigError(f"--metric {pattern}: no run has it.{close} There are: {names}.")
    names_wanted = {name for pattern in patterns or ["*"] for name in fnmatch.filter(curves, pattern)}
    return {name: runs for name, runs in curves.items() if name in names_wanted}


def draw(curves: Curves, output: Path, smooth: float, logarithmic: bool) -> None:
    """Write the picture, or the page with the picture in it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError("matplotlib", "trainer plot") from None

    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (metric, runs) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(rows, columns, number)
        for name, points in runs.items():
            _draw_curve(axes, points, smooth, name)
        axes.set_title(metric)
        axes.set_xlabel("step")
        if logarithmic:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if number == 1 and len(runs) > 1:
            axes.legend(fontsize="small")
    if output.suffix.lower() != ".html":
        figure.savefig(output, dpi=120)
        return
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    data, title = base64.b64encode(picture.getvalue()).decode(), html.escape(", ".join(curves))
    image = f'<img src="data:image/png;base64,{data}" alt="{title}">'
    output.write_text(f'<!doctype html><meta charset="utf-8"><title>{title}</title>{image}\n', encoding="utf-8")


def _draw_curve(axes: Any, points: list[tuple[int, float]], smooth: float, name: str) -> None:
    steps, values = zip(*points, strict=True)
    marker = "o" if len(points) == 1 else ""
    if not smooth:
        axes.plot(steps, values, marker=marker, label=name)
        return
    (line,) = axes.plot(steps, values, alpha=0.25)
    axes.plot(steps, smoothed(values, smooth), marker=marker, color=line.get_color(), label=name)


def smoothed(values: tuple[float, ...], weight: float) -> list[float]:
    """Return the exponential moving average, corrected for its start, as TensorBoard's scalar page draws it."""
    average, total, found = 0.0, 0.0, []
    for value in values:
        average, total = weight * average + (1 - weight) * value, weight * total + (1 - weight)
        found.append(average / total)
    return found
