"""Time of `import trainer`, and of the peers, beyond `import torch`, in fresh processes that take turns.

`from trainer import Trainer, TrainModule`, because `import trainer` alone is lazy. Two things that depend on chance are
kept out of every measurement. Python reads bytecode, as it does for an installed package: a round before the first
compiles new files. And `gc.collect()` runs before the clocks: otherwise a pass of the garbage collector over all of
torch's objects (85 ms) falls into the import that happens to come next.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks._report import WITH_BYTECODE, Report, Times, Took

CODE = """
import gc, json, time
import torch
torch_cpu = time.process_time()
gc.collect()
cpu, wall = time.process_time(), time.perf_counter()
{}
print(json.dumps([torch_cpu, time.process_time() - cpu, time.perf_counter() - wall]))
"""
IMPORTS = {
    "nothing": "",
    "ours: from trainer import Trainer, TrainModule": "from trainer import Trainer, TrainModule",
    "pytorch_lightning": "import pytorch_lightning",
    "lightning_fabric": "import lightning_fabric",
    "accelerate": "import accelerate",
    "transformers": "from transformers import Trainer, TrainingArguments",
    "ignite": "import ignite.engine",
    "composer": "import composer",
    "keras": "import os; os.environ.setdefault('KERAS_BACKEND', 'torch'); import keras",
}
BAR_SHARE = 0.06


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks import", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args(arguments)
    wanted = {
        name: code
        for name, code in IMPORTS.items()
        if (not name.isidentifier() or name == "nothing" or find_spec(name) is not None)
        and (not options.only or name == "nothing" or any(text.lower() in name.lower() for text in options.only))
    }
    report = Report(
        "import",
        "Milliseconds that an import takes after `import torch`, in a fresh process. The bar for ours: "
        f"{BAR_SHARE} of the CPU time that `import torch` takes in the same process.",
        unit="ms",
        scale=1e3,
        ratios=False,
        results={name: Times() for name in wanted},
    )
    for code in wanted.values():
        _once(code)
    order = list(wanted)
    shares: dict[str, list[float]] = {name: [] for name in wanted}
    for number in range(options.rounds):
        random.Random(number).shuffle(order)
        took = {}
        for name in order:
            took[name], of_torch = _once(wanted[name])
            shares[name].append(took[name].cpu / of_torch)
        for name, own in took.items():
            report.results[name].add(own, took["nothing"])
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    report.save(options.save)
    for name, found in shares.items():
        print(f"{name}: {median(found):.3f} of the CPU time of `import torch`")
    return 0


def _once(code: str) -> tuple[Took, float]:
    """Return the times of the import, and the CPU time of torch's."""
    command = [sys.executable, "-W", "ignore", "-c", CODE.format(code)]
    done = subprocess.run(command, capture_output=True, check=True, env=WITH_BYTECODE)
    of_torch, cpu, wall = json.loads(done.stdout.splitlines()[-1])
    return Took(cpu, wall), of_torch
