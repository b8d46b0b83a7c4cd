"""`trainer plot`: draw the logged curves of one or several runs, as a picture or as a page."""

from __future__ import annotations

import base64
import fnmatch
import html
import io
import math
import warnings
from pathlib import Path
from typing import Any

from trainer.arguments import local_path
from trainer.cli.options import CommandParser, reports_errors
from trainer.cli.runs.find import (
    METRIC_FILES,
    by_numbers,
    differing,
    read_metrics,
    run_directories,
    summary_of,
    with_name,
)
from trainer.errors import ConfigError, did_you_mean, printable, require_package

EXAMPLES = """\
examples:
  trainer plot runs/digits/version_0
  trainer plot runs/digits --metric 'val_*' --output curves.png
  trainer plot runs/a/version_0 runs/b/version_3 --output curves.html --smooth 0.6
"""
FORMATS = (".png", ".svg", ".pdf", ".html")
MOST_NAMES = 20
"""Runs that are named next to their lines, at most."""
MOST_VALUES = 3
"""Hyperparameters that are named with a run, at most."""

Curves = dict[str, dict[str, list[tuple[int, float]]]]
"""Steps and values by metric, then by name of the run."""


@reports_errors
def run(arguments: list[str]) -> int:
    """Draw curves to a file. Returns the exit code."""
    words = "Draw the values that runs have logged to metrics.csv or metrics.jsonl."
    parser = CommandParser(prog="trainer plot", description=words, epilog=EXAMPLES)
    words = f"a run directory, a folder with runs below, or a file {' or '.join(METRIC_FILES)}"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=words)
    words = "PNG, SVG, PDF or HTML (curves.png)"
    parser.add_argument("-o", "--output", metavar="FILE", default="curves.png", help=words)
    parser.add_argument("--metric", metavar="NAME", nargs="+", help="names of metrics; * and ? match others")
    parser.add_argument("--smooth", metavar="S", type=float, default=0.0, help="0 to 1: moving average")
    parser.add_argument("--log", action="store_true", help="a logarithmic scale of values")
    options = parser.parse(arguments)
    output = local_path(options.output)
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"--output {output}: give a name that ends with one of {', '.join(FORMATS)}.")
    if not 0 <= options.smooth < 1:
        raise ConfigError(f"--smooth {options.smooth:g}: give a number from 0 that is less than 1.")
    found = curves_of(options.runs)
    curves = chosen(found, options.metric)
    draw(curves, output, options.smooth, options.log)
    print(printable(f"{output}: {', '.join(curves)}"))
    if options.metric is None and len(curves) < len(found):
        print(printable(f"left out (a single value; see --metric): {', '.join(n for n in found if n not in curves)}"))
    return 0


def curves_of(paths: list[str]) -> Curves:
    """Return the curves of runs, or of all runs below folders.

    Raises:
        ConfigError: there are no logged values at a path.
    """
    found: dict[Path, dict[str, list[tuple[int, float]]]] = {}
    for text in paths:
        path = local_path(text)
        runs = [path] if path.is_file() else sorted(run_directories(path), key=by_numbers)
        here = {one.parent if one.is_file() else one: metrics for one in runs if (metrics := read_metrics(one))}
        if not here:
            fix = "Give the directory of a run with Trainer(logger=[CSVLogger()]), or a folder with such runs below."
            raise ConfigError(f"{text!r} has no logged values. {fix}")
        found |= here
    hyperparameters = {folder: summary_of(folder, folder).hyperparameters for folder in found}
    varied = differing([*hyperparameters.values()])[:MOST_VALUES]
    curves: Curves = {}
    for folder, metrics in found.items():
        values = hyperparameters[folder]
        shown = [f"{name.removeprefix('module.')}={values[name]}" for name in varied if name in values]
        label = ", ".join([with_name(str(folder), folder), *shown])
        for metric, points in metrics.items():
            # Of several values of a step the training's is the first: evaluations come later.
            curves.setdefault(metric, {})[label] = sorted(dict(reversed(points)).items())
    return curves


def chosen(curves: Curves, patterns: list[str] | None) -> Curves:
    """Return the curves whose names match one of the patterns; without patterns all, but for single points.

    Raises:
        ConfigError: a pattern matches none.
    """
    if patterns is None:
        lines = {name: runs for name, runs in curves.items() if max(map(len, runs.values())) > 1}
        return lines or curves
    for pattern in patterns:
        if not fnmatch.filter(curves, pattern):
            close = did_you_mean(pattern, list(curves))
            raise ConfigError(f"--metric {pattern}: no run has it.{close} There are: {', '.join(curves)}.")
    return {name: runs for name, runs in curves.items() if any(fnmatch.fnmatch(name, one) for one in patterns)}


def draw(curves: Curves, output: Path, smooth: float, logarithmic: bool) -> None:
    """Write the picture, or the page with the picture in it."""
    require_package("matplotlib", "trainer plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(name for runs in curves.values() for name in runs))
    styles = {name: style_of(number) for number, name in enumerate(names)}
    for number, (metric, runs) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(rows, columns, number)
        lines = {name: _draw_curve(axes, points, smooth, styles[name]) for name, points in runs.items()}
        axes.set_title(metric, parse_math=False)
        axes.set_xlabel("step")
        if logarithmic:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if len(names) > 1:
            _explain(axes, lines)
    _write(figure, output, ", ".join(curves))


def _write(figure: Any, output: Path, title: str) -> None:
    """Write a figure to a file of the ending's format.

    Raises:
        ConfigError: the file cannot be written.
    """
    is_page = output.suffix.lower() == ".html"
    picture = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # of letters that the font lacks
        figure.savefig(picture, format="png" if is_page else output.suffix[1:].lower(), dpi=120)
    content = picture.getvalue()
    if is_page:
        data, title = base64.b64encode(content).decode(), html.escape(title)
        image = f'<img src="data:image/png;base64,{data}" alt="{title}">'
        content = f'<!doctype html><meta charset="utf-8"><title>{title}</title>{image}\n'.encode()
    try:
        output.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--output {output}: it cannot be written: {error.strerror}.") from None


def style_of(number: int) -> dict[str, Any]:
    """Return the look of a run's lines: ten colours, then the same colours with dashes, dots and both."""
    return {
        "color": f"C{number % 10}",
        "linestyle": ("-", "--", ":", "-.")[number // 10 % 4],
        "marker": ("o", "s", "^", "D")[number // 10 % 4],
    }


def _draw_curve(axes: Any, points: list[tuple[int, float]], smooth: float, style: dict[str, Any]) -> Any:
    """Draw a curve, and return its line. Only a single point has a marker."""
    steps, values = zip(*points, strict=True)
    style = style | {"marker": style["marker"] if len(points) == 1 else ""}
    if smooth:
        axes.plot(steps, values, alpha=0.25, color=style["color"])
        values = tuple(smoothed(values, smooth))
    (line,) = axes.plot(steps, values, **style)
    return line


def _explain(axes: Any, lines: dict[str, Any]) -> None:
    """Say whose the lines are; of many lines, whose the first are."""
    shown = list(lines)[:MOST_NAMES]
    place = "best" if len(lines) <= MOST_NAMES else "upper right"  # to find the best takes minutes among many lines
    legend = axes.legend([lines[name] for name in shown], shown, fontsize="small", loc=place)
    for text in legend.get_texts():
        text.set_parse_math(False)


def smoothed(values: tuple[float, ...], weight: float) -> list[float]:
    """Return the exponential moving average, corrected for its start, as TensorBoard's scalar page draws it.

    A value that is not finite stays unchanged, and changes no other.
    """
    average, total, found = 0.0, 0.0, []
    for value in values:
        if not math.isfinite(value):
            found.append(value)
            continue
        average, total = weight * average + (1 - weight) * value, weight * total + (1 - weight)
        found.append(average / total)
    return found
