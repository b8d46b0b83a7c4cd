"""Tests and figures on CUDA devices, as a report in Markdown: what `make test-gpu` runs.

Runs in the interpreter that it is started with, makes no environment and needs no network. Each part has ten minutes in
a process of its own; what is not installed is left out and named. Without a device the report names every test as
skipped, and the exit code is 2. Parts: `tests` (those marked gpu), `overhead` (a step
of a tiny model against a hand-written loop), `gpt2` (tokens per second and peak memory of a GPT-2 of 124 M parameters
against a hand-written loop), `saves` (how long a checkpoint blocks training), `parallel` (the same GPT-2 on several
devices, under each strategy).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from benchmarks._report import surroundings

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 570.0
NEEDED = ("torch", "numpy", "safetensors", "tqdm", "yaml", "pydantic")
"""Modules without which the trainer does not run."""
OPTIONAL = ("pytest", "pytest_timeout", "xdist", "deepspeed", "tensorboard", "torchmetrics", "triton")
"""Modules whose tests and figures are left out where they are not installed."""


NO_RESULT = "pytest ended without a result."

# -- the parts: each returns Markdown ----------------------------------------------------------------------------------


def tests(device: str, small: bool) -> str:
    """Run the tests marked gpu; name those that were skipped or failed."""
    if find_spec("pytest") is None:
        return "Left out: pytest is not installed."
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "@pytest.mark.gpu" in path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.xml")
        warnings = ("-W", "ignore::pytest.PytestConfigWarning")  # where a plugin for an option is not installed
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *warnings, f"--junitxml={result}", *files]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        return _of_junit(result)


def _of_junit(result: Path) -> str:
    if not result.exists():
        return NO_RESULT
    cases = list(ElementTree.parse(result).getroot().iter("testcase"))
    rows, counts = [], {"passed": 0, "failed": 0, "skipped": 0}
    for case in cases:
        failure = next((child for kind in ("failure", "error") for child in case.iter(kind)), None)
        skipped = next(case.iter("skipped"), None)
        kind, why = "passed", ""
        if failure is not None:
            kind, why = "failed", (failure.get("message", "").strip() or "no message").splitlines()[0][:200]
        elif skipped is not None:
            kind, why = "skipped", skipped.get("message", "")
        counts[kind] += 1
        if why:
            rows.append(f"- {kind}: `{case.get('classname')}.{case.get('name')}`: {why}")
    return "\n".join([", ".join(f"{number} {kind}" for kind, number in counts.items()) + ".", "", *rows]).rstrip()


def overhead(device: str, small: bool) -> str:
    """Compare a step of a tiny model, with batches on the device, with that of a hand-written loop."""
    import torch
    from torch import nn

    from benchmarks._gpt2 import Stopwatch
    from benchmarks._ours import OFF, all_on
    from trainer import Trainer, TrainModule

    steps, rounds = (30, 1) if small else (3000, 7)
    batches = [(torch.randn(32, 32, device=device), torch.randn(32, 1, device=device)) for _ in range(steps)]

    class Tiny(TrainModule):
        def __init__(self, watch: Stopwatch, logs: bool) -> None:
            super().__init__()
            self.watch, self.logs = watch, logs
            self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.watch.tick()
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if self.logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def loop(watch: Stopwatch, folder: str) -> None:
        module = Tiny(watch, logs=False).to(device)
        optimizer = module.configure_optimizers()
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            module.training_step(batch, number).backward()
            optimizer.step()

    def ours(options: dict[str, Any], watch: Stopwatch, folder: str) -> None:
        trainer = Trainer(accelerator=device, devices=1, max_epochs=1, default_root_dir=folder, **options)
        trainer.fit(Tiny(watch, logs=True), batches)

    ways: dict[str, Callable[[Stopwatch, str], None]] = {"hand-written loop": loop}
    ways["ours, off, one self.log per step"] = lambda watch, folder: ours(OFF, watch, folder)
    if find_spec("tensorboard") is not None:
        ways["ours, all on: bar, CSV, TensorBoard, checkpoints"] = lambda watch, folder: ours(all_on(), watch, folder)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            watch = Stopwatch(device, steps // 10, steps)
            with tempfile.TemporaryDirectory() as folder:
                run(watch, folder)
            seconds[name].append(watch.seconds)
    base = seconds["hand-written loop"]
    rows = [
        [name, f"{median(took) * 1e6:.0f}", f"{median(a / b for a, b in zip(took, base, strict=True)):.3f}"]
        for name, took in seconds.items()
    ]
    return table([f"{rounds} rounds of {steps} steps", "wall time per step, us", "ratio"], rows)


def gpt2(device: str, small: bool) -> str:
    """Compare tokens per second and peak memory of a GPT-2 with those of a hand-written loop, in bf16-mixed."""
    import torch

    from benchmarks._gpt2 import GPT2, Stopwatch, peak, reset_peak, sizes, tokens
    from benchmarks._ours import OFF
    from trainer import Trainer

    _, context, layers, width = sizes(small)
    steps, batch_size = (6, 2) if small else (40, 8)
    data = list(tokens(steps * batch_size, small).to(device).split(batch_size))

    def loop(watch: Stopwatch) -> None:
        module = GPT2(watch, small).to(device)
        optimizer = module.configure_optimizers()
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = module.training_step(batch, number)
            loss.backward()
            optimizer.step()

    def ours(watch: Stopwatch) -> None:
        options = {"accelerator": device, "devices": 1, "max_epochs": 1, "precision": "bf16-mixed", **OFF}
        Trainer(**options).fit(GPT2(watch, small), data)

    rows = []
    for name, run in [("hand-written loop", loop), ("ours", ours), ("hand-written loop, again", loop)]:
        reset_peak(device)
        watch = Stopwatch(device, max(1, steps // 4), steps)
        run(watch)
        rows.append([name, f"{batch_size * context / watch.seconds:.0f}", peak(device)])
    head = f"{layers} layers of width {width}, context {context}, micro-batches of {batch_size}, bf16-mixed"
    return table([head, "tokens per second", "peak memory, GiB"], rows)


def saves(device: str, small: bool) -> str:
    """Measure for how long a checkpoint of a model on the device blocks training, and when it is on disk."""
    import torch

    from benchmarks._ours import OFF
    from benchmarks.checkpoint import Background, Model, Rounds, foreground
    from trainer import Trainer

    parameters, number = (9_000_000, 1) if small else (300_000_000, 3)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        rounds = Rounds({"at once": foreground, "async_save=True": Background()}, number, Path(folder))
        options = {"accelerator": device, "devices": 1, "max_steps": 1, "default_root_dir": folder, **OFF}
        Trainer(**options, callbacks=rounds).fit(Model(parameters), [torch.zeros(1)])
    rows = [
        [name, f"{median(times.blocked[1:]):.3f}", f"{median(times.on_disk[1:]):.3f}", f"{times.blocked[0]:.3f}"]
        for name, times in rounds.times.items()
    ]
    size = f"{parameters / 1e6:.0f} M parameters with AdamW, {rounds.size / 1e6:.0f} MB"
    return table([size, "blocked, s", "on disk, s", "the first one blocked, s"], rows)


def parallel(device: str, small: bool) -> str:
    """Compare the losses of a GPT-2 on all devices, under each strategy, with those on one device, in bf16-mixed."""
    import torch

    from benchmarks._gpt2 import sizes, train
    from trainer import launch

    devices = 2 if device == "cpu" else torch.accelerator.device_count()
    if devices < 2:
        return "Left out: there is one device."
    _, context, layers, width = sizes(small)
    steps, samples = (6, 2 * devices) if small else (40, 2 * devices)
    strategies = ["ddp", "fsdp"]
    if find_spec("deepspeed") is not None:
        strategies += ["deepspeed_stage_2", "deepspeed_stage_3"]
    known, seconds, memory = train("single_device", device, 1, samples, steps, small)
    rows = [["one device", f"{samples * context / seconds:.0f}", memory, ""]]
    for strategy in strategies:
        ranks = launch(train, strategy, device, devices, samples, steps, small, devices=devices)
        losses = torch.stack([losses for losses, _, _ in ranks]).mean(0)
        most = max(memory for _, _, memory in ranks)
        difference = f"{float((losses - known).abs().max()):.1e}"
        rows.append([strategy, f"{samples * context / max(took for _, took, _ in ranks):.0f}", most, difference])
    head = f"{devices} devices; {layers} layers of width {width}, context {context}, {samples} samples in a step"
    return table([head, "tokens per second", "peak memory of a device, GiB", "largest difference of a loss"], rows)


PARTS = {part.__name__: part for part in (tests, overhead, gpt2, saves, parallel)}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- the report --------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run the parts, each in a process of its own, and write the report; 0 if all of them ended well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--device", default="cuda", help="another kind of device, to try the parts themselves")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the parts themselves")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    problem = why_not()
    if problem:
        print(f"Nothing was run: {problem}", file=sys.stderr)
        return 2
    missing = missing_device(options.device)
    if options.here:
        Path(options.report).write_text(PARTS[options.part](options.device, options.small))
        return 0
    try:
        options.report.open("a").close()
    except OSError as error:
        print(f"Nothing was run: --report {options.report}: {error.strerror}.", file=sys.stderr)
        return 2
    sections, status = machine(options.device), 0
    for part in PARTS if options.part == "all" else [options.part]:
        print(f"== {part}", file=sys.stderr, flush=True)
        if missing and part != "tests":  # tests name themselves as skipped
            text, ended_well = f"Left out: {missing}", False
        else:
            text, ended_well = in_its_own_process(part, options.device, options.small)
        status |= not ended_well
        sections.append(f"## {part}\n\n{PARTS[part].__doc__}\n\n{text}\n")
        options.report.write_text("\n".join(sections))  # at once: a later part may be interrupted
    print(options.report.read_text())
    if missing:
        print(f"Nothing was run on a GPU: {missing}", file=sys.stderr)
        return 2
    return int(status)


def why_not() -> str:
    """Return why nothing can be run with this interpreter; empty if it can."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}. Install them there, or give PYTHON=another."
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        return f"{sys.executable} cannot import torch: {error}. Repair it there, or give PYTHON=another."
    return ""


def missing_device(device: str) -> str:
    """Return why torch finds no such device, and what to do; empty if it does."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        why = "sees no CUDA device" if torch.version.cuda or torch.version.hip else "is built without CUDA"
        return (
            f"torch {torch.__version__} of {sys.executable} {why}. Give PYTHON=an interpreter whose torch sees a GPU."
        )
    return ""


def in_its_own_process(part: str, device: str, small: bool) -> tuple[str, bool]:
    """Run one part; return its text, or how it ended, and whether it ended well."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "part.md")
        command = [sys.executable, "-m", "benchmarks", "gpu", "--here", "--part", part, "--device", device]
        command += ["--report", str(report), *(["--small"] if small else [])]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        began = time.monotonic()
        env = {**os.environ, "PYTHONPATH": path}
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=sys.stderr, start_new_session=True) as process:
            try:
                code = process.wait(TIME_LIMIT_S)
            except BaseException as error:
                # With its own processes, which would keep the devices from the next part.
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    return f"**Not finished after {TIME_LIMIT_S:.0f} s.**", False
                raise
        took = f"\n\n{time.monotonic() - began:.0f} s."
        if code or not report.exists():
            return f"**Ended with exit code {code}; its output says why.**{took}", False
        text = report.read_text()
        failed = NO_RESULT in text or ("passed" in text and " 0 failed" not in text)
        return text + took, not (part == "tests" and failed)


def machine(device: str) -> list[str]:
    """Return the head of the report: the machine, its devices, and what is and is not installed."""
    import torch

    at = surroundings()
    lines = ["# Tests and figures on a GPU", "", f"{at['machine']}, {at['cores']} cores, load {at['load']}.", ""]
    if device == "cuda":
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            lines.append(
                f"- cuda:{number}: {about.name}, {about.total_memory / 2**30:.0f} GiB, {about.major}.{about.minor}"
            )
        lines.append(f"- CUDA {torch.version.cuda or torch.version.hip}, cuDNN {torch.backends.cudnn.version()}")
    else:
        lines.append(f"- device {device}")
    lines.append(
        f"- Python {at['python']}, " + ", ".join(f"{name} {number}" for name, number in at["versions"].items())
    )
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    lines.append(f"- not installed, and therefore left out: {', '.join(missing) or 'nothing'}")
    return [*lines, ""]
