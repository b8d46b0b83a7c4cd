"""Results of a benchmark: the figures of each contender and the machine, as a table in Markdown and as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = (
    "torch",
    "numpy",
    "pytorch-lightning",
    "accelerate",
    "transformers",
    "pytorch-ignite",
    "mosaicml",
    "keras",
    "torchmetrics",
    "tensorboard",
    "deepspeed",
)
"""Packages whose versions are reported."""


WITH_BYTECODE = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""The environment of processes whose start is timed: Python keeps compiled code, as for an installed package."""


@dataclass
class Took:
    """Times of one run, in seconds per step."""

    cpu: float
    wall: float
    pieces: list[float] = field(default_factory=list)
    """CPU time of each piece."""


@dataclass
class Times:
    """Times of one contender in each round, and of the hand-written loop next to it, in seconds."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    loop_cpu: list[float] = field(default_factory=list)
    loop_wall: list[float] = field(default_factory=list)
    pieces: list[float] = field(default_factory=list)
    """CPU time of each piece of 50 steps, of all rounds."""

    def add(self, own: Took, loop: Took) -> None:
        """Add one round."""
        self.cpu.append(own.cpu)
        self.wall.append(own.wall)
        self.loop_cpu.append(loop.cpu)
        self.loop_wall.append(loop.wall)
        self.pieces += own.pieces

    def undisturbed(self) -> float:
        """Return the 10th percentile over pieces: close to the time on an idle machine, even if others use it."""
        return sorted(self.pieces)[len(self.pieces) // 10] if self.pieces else math.nan

    def ratio(self, kind: str = "cpu") -> float:
        """Return the median over rounds of the contender's time divided by the loop's in the same round."""
        own, loop = (self.cpu, self.loop_cpu) if kind == "cpu" else (self.wall, self.loop_wall)
        return median(a / b for a, b in zip(own, loop, strict=True))

    def above(self) -> float:
        """Return the median over rounds of the contender's CPU time minus the loop's."""
        return median(a - b for a, b in zip(self.cpu, self.loop_cpu, strict=True))


@dataclass
class Report:
    """The result of one benchmark."""

    name: str
    what: str
    """One paragraph: what was measured, and in which unit."""
    unit: str = "us"
    scale: float = 1e6
    ratios: bool = True
    """Compare times with the loop's by ratios, too."""
    results: dict[str, Times] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that did not run, and why."""
    bars: dict[str, float] = field(default_factory=dict)
    """The ratio of CPU time below which a contender has to stay."""
    bars_above: dict[str, float] = field(default_factory=dict)
    """The CPU time above the loop's, in the report's unit, below which a contender has to stay."""

    def table(self) -> str:
        """Return the figures in Markdown."""
        u = self.unit
        lines = [
            f"| | CPU {u}: median | least | wall {u}: median | least "
            f"| above the loop, CPU {u} |"
            + (" ratio, CPU | of 10th percentiles | ratio, wall |" if self.ratios else ""),
            "|---|---|---|---|---|---|" + ("---|---|---|" if self.ratios else ""),
        ]
        loop = next(iter(self.results.values()), Times()).undisturbed()
        for name, t in self.results.items():
            if not t.cpu:
                continue
            cpu, wall = [s * self.scale for s in t.cpu], [s * self.scale for s in t.wall]
            bar = f" (bar: {self.bars[name]:.2f})" if name in self.bars else ""
            above = f" (bar: {self.bars_above[name]:+.3g})" if name in self.bars_above else ""
            lines.append(
                f"| {name} | {median(cpu):.4g} | {min(cpu):.4g} | {median(wall):.4g} | {min(wall):.4g} | "
                f"{t.above() * self.scale:+.3g}{above} |"
                + (
                    f" {t.ratio():.3f}{bar} | {t.undisturbed() / loop:.3f} | {t.ratio('wall'):.3f} |"
                    if self.ratios
                    else ""
                )
            )
        lines += [f"\nLeft out: {name} ({why})." for name, why in self.left_out.items()]
        return "\n".join(lines)

    def page(self) -> str:
        """Return the table with everything needed to reproduce it."""
        at = surroundings()
        head = f"# {self.name}\n\n{self.what}\n\n`{at['command']}`\n\n"
        rounds = min((len(t.cpu) for t in self.results.values() if t.cpu), default=0)
        return (
            f"{head}{self.table()}\n\n{rounds} rounds. {at['machine']}, {at['cores']} cores, "
            f"{at['threads']} thread(s), load {at['load']}; Python {at['python']}, "
            + ", ".join(f"{name} {number}" for name, number in at["versions"].items())
            + ".\n"
        )

    def save(self, folder: Path | None) -> None:
        """Print the page, and write it and the figures to `folder` if one is given."""
        print(f"\n{self.page()}", flush=True)
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.page())
        everything: dict[str, Any] = {
            **surroundings(),
            "what": self.what,
            "results": {
                name: {
                    "ratio_cpu": t.ratio(),
                    "ratio_wall": t.ratio("wall"),
                    "cpu_10th_percentile": t.undisturbed() if t.pieces else None,
                    **{key: value for key, value in vars(t).items() if key != "pieces"},
                }
                for name, t in self.results.items()
                if t.cpu
            },
            "left_out": self.left_out,
            "bars": self.bars,
        }
        (folder / f"{self.name}.json").write_text(json.dumps(everything, indent=1) + "\n")


def surroundings() -> dict[str, Any]:
    """Return the machine, the versions, and the command."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"
