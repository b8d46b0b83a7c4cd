"""A chart (SVG) of the ratios in a file of `--save`: `python -m benchmarks chart overhead.json overhead.svg`."""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

WIDTH, ROW = 320, 22
"""Pixels: how long the longest bar is, and the height of a row."""
CHARACTER = 7.8
"""Pixels of a bold character, on average, in the widest fonts that the chart may be drawn with."""


def main(arguments: list[str]) -> None:
    """Read the figures, write the chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks chart", description=__doc__)
    parser.add_argument("figures", type=Path, help="NAME.json, as a benchmark's --save writes it")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)
    options.picture.write_text(chart(json.loads(options.figures.read_text())))


TITLES = {
    "overhead": "CPU time of a step of a tiny model; 1 is a hand-written loop",
    "dataloader": "CPU time of a step of a tiny model with a shuffling DataLoader; 1 is a hand-written loop",
    "accumulate": "CPU time of one of 4 micro-batches of a step of a tiny model; 1 is a hand-written loop",
    "validate": "CPU time of a batch of validation with torchmetrics; 1 is a hand-written loop",
}
"""By the benchmark's name."""


def chart(figures: dict[str, object]) -> str:
    """Return the chart: a bar for each contender, its CPU time relative to the hand-written loop's."""
    title = TITLES[str(figures["command"]).split()[3]]
    results = figures["results"]
    assert isinstance(results, dict)
    ratios = {name: result["ratio_cpu"] for name, result in results.items()}
    longest, left = max(ratios.values()), 20 + round(CHARACTER * max(map(len, ratios)))
    height = 64 + ROW * len(ratios)
    versions = figures["versions"]
    assert isinstance(versions, dict)
    where = (
        f"{figures['cores']} CPU cores at a load of {figures['load']}, torch {versions['torch']}: {figures['command']}"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + WIDTH + 60} {height}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{left + WIDTH + 60}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="20" font-weight="bold" fill="#222">{escape(title)}</text>',
    ]
    for row, (name, ratio) in enumerate(ratios.items()):
        y = 34 + ROW * row
        colour = "#2f7a45" if name.startswith("ours") else "#888"
        bold = ' font-weight="bold"' if name.startswith("ours") else ""
        length = WIDTH * ratio / longest
        lines += [
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end" fill="#222"{bold}>{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{ROW - 5}" fill="{colour}"/>',
            f'<text x="{left + length + 6:.1f}" y="{y + 13}" fill="#222"{bold}>{ratio:.2f}</text>',
        ]
    lines.append(
        f'<text x="12" y="{height - 10}" font-size="11" fill="#555">{escape(where.split(" --save")[0])}</text>'
    )
    return "\n".join([*lines, "</svg>"]) + "\n"
