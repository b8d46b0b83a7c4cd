"""Tests and figures on CUDA devices, as a report in Markdown: what `make test-gpu` runs.

Runs in the interpreter that it is started with, makes no environment and needs no network. Each part has ten minutes in
a separate process. Packages that are not installed are left out and named. Without a device the report names every test
as skipped, and the exit code is 2. Parts: `tests` (those marked gpu), `strategies` (the suites over strategies, on
CUDA), `overhead` (a step of a tiny model against a hand-written loop), `gpt2` (tokens per second and peak memory of a
GPT-2 of 124 M parameters against a hand-written loop, with and without torch.compile), `saves` (how long a checkpoint
blocks training, and what is lost beside one), `parallel` (the same GPT-2 on several devices, under each strategy).
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
OPTIONAL = (
    "pytest",
    "pytest_timeout",
    "xdist",
    "deepspeed",
    "tensorboard",
    "torchmetrics",
    "torchao",
    "triton",
    "lightning_fabric",
)
"""Modules whose tests and figures are left out where they are not installed."""


NO_RESULT = "pytest ended without a result."

# -- the parts: each returns Markdown ----------------------------------------------------------------------------------


def tests(device: str, small: bool) -> str:
    """Run the tests marked gpu; name those that were skipped or failed."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())
    return run_tests("-m", "gpu", *files)


SUITES = (
    "tests/test_parity.py",
    "tests/strategies/test_strategy_parity.py",
    "tests/strategies/test_model_parallel.py",
    "tests/strategies/test_portability.py",
    "tests/test_precision_float8.py",
)
"""Those over the table of strategies, and one device against a hand-written loop."""


def strategies(device: str, small: bool) -> str:
    """Run the suites over strategies on the devices. If there are too few, processes share one, over sockets."""
    os.environ["TESTS_DEVICE"] = device
    side_by_side = ("-n", "4", "--dist", "loadfile") if find_spec("xdist") is not None else ()
    return run_tests("-m", "not long", *side_by_side, *(SUITES[:1] if small else SUITES))


def run_tests(*arguments: str | Path) -> str:
    """Run pytest, and return the counts, with the reasons for skips and failures."""
    if find_spec("pytest") is None:
        return "Left out: pytest is not installed."
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.xml")
        # Other versions of torch than the tests' own give other warnings, and options of plugins may be unknown.
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", f"--junitxml={result}", *map(str, arguments)]
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
    """Compare a step of a tiny model, with batches on the device, with a hand-written loop's step."""
    from benchmarks._gpt2 import Stopwatch

    steps, rounds = (30, 1) if small else (3000, 7)
    ways = _tiny_ways(device, steps)
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


def _tiny_ways(device: str, steps: int) -> dict[str, Callable[[Any, str], None]]:
    """Return the ways to train a tiny model: by hand, with the trainer, and with Fabric where it is installed."""
    import torch

    from benchmarks._ours import all_on
    from benchmarks._task import OFF
    from benchmarks._tiny import Tiny
    from trainer import Trainer

    batches = [(torch.randn(32, 32, device=device), torch.randn(32, 1, device=device)) for _ in range(steps)]

    def loop(watch: Any, folder: str) -> None:
        module = Tiny(watch, logs=False).to(device)
        optimizer = module.configure_optimizers()
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            module.training_step(batch, number).backward()
            optimizer.step()

    def ours(options: dict[str, Any], watch: Any, logs: bool = True) -> None:
        Trainer(accelerator=device, devices=1, max_epochs=1, **options).fit(Tiny(watch, logs), batches)

    def fabric(watch: Any, folder: str) -> None:
        from lightning_fabric import Fabric

        plug = Fabric(accelerator=device, devices=1)
        module = Tiny(watch, logs=False)
        module, optimizer = plug.setup(module, module.configure_optimizers())
        module.mark_forward_method("training_step")
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            plug.backward(module.training_step(batch, number))
            optimizer.step()

    ways: dict[str, Callable[[Any, str], None]] = {"hand-written loop": loop}
    ways["ours, off"] = lambda watch, folder: ours(OFF, watch, logs=False)
    ways["ours, off, one self.log per step"] = lambda watch, folder: ours(OFF, watch)
    if find_spec("tensorboard") is not None:
        on = "ours, all on: bar, CSV, TensorBoard, checkpoints"
        ways[on] = lambda watch, folder: ours({**all_on(), "default_root_dir": folder}, watch)
    if find_spec("lightning_fabric") is not None:
        ways["Fabric"] = fabric
    return ways


def gpt2(device: str, small: bool) -> str:
    """Compare a GPT-2's tokens per second and peak memory with a hand-written loop's, in rounds, in turn."""
    from benchmarks._gpt2 import sizes

    _, context, layers, width = sizes(small)
    head = f"{layers} layers of width {width}, context {context}, micro-batches of {2 if small else 8}"
    rows = _train_in_turn(device, small, compiled=False, rounds=1 if small else 5)
    if find_spec("triton") is not None or small:
        rows += _train_in_turn(device, small, compiled=True, rounds=1 if small else 3)
    columns = ["tokens per second, median", "share of the loop", "least", "most", "peak memory, GiB"]
    return table([head, *columns], rows)


def _train_in_turn(device: str, small: bool, compiled: bool, rounds: int) -> list[list[str]]:
    """Train by hand and with the trainer, in bf16-mixed, and with the trainer in 8 bits if the device supports them."""
    import torch

    from benchmarks._gpt2 import GPT2, Stopwatch, peak, reset_peak, sizes, tokens
    from benchmarks._task import OFF
    from trainer import Trainer
    from trainer.float8.conversion import has_float8

    _, context, _, _ = sizes(small)
    steps, batch_size = (6, 2) if small else (40, 8)
    data = list(tokens(steps * batch_size, small).to(device).split(batch_size))
    kind = torch.device(device).type

    def loop(watch: Stopwatch) -> None:
        module = GPT2(watch, small).to(device)
        if compiled:
            module.net.compile()
        optimizer = module.configure_optimizers()
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(kind, torch.bfloat16):
                loss = module.training_step(batch, number)
            loss.backward()
            optimizer.step()

    def ours(watch: Stopwatch, precision: str = "bf16-mixed") -> None:
        options = {"accelerator": device, "devices": 1, "max_epochs": 1, "precision": precision, **OFF}
        Trainer(**options, compile=compiled).fit(GPT2(watch, small), data)

    ways: dict[str, Callable[[Stopwatch], None]] = {"hand-written loop, bf16-mixed": loop, "ours, bf16-mixed": ours}
    if find_spec("torchao") is not None and has_float8("tensorwise"):
        ways["ours, fp8"] = lambda watch: ours(watch, "fp8")
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    memory = {}
    for number in range(rounds):
        for name in [*ways] if number % 2 else [*ways][::-1]:
            torch.compiler.reset()  # torch compiles a function for a few modules only
            reset_peak(device)
            watch = Stopwatch(device, max(1, steps // 4), steps)
            ways[name](watch)
            speeds[name].append(batch_size * context / watch.seconds)
            memory[name] = peak(device)
    rows = []
    for name, found in speeds.items():
        shares = [one / other for one, other in zip(found, next(iter(speeds.values())), strict=True)]
        columns = [f"{median(found):.0f}", *(f"{share:.3f}" for share in (median(shares), min(shares), max(shares)))]
        rows.append([f"{name}, compiled" if compiled else name, *columns, memory[name]])
    return rows


def saves(device: str, small: bool) -> str:
    """Measure for how long a checkpoint of a model on the device blocks training, and when it is on disk."""
    import torch

    from benchmarks._task import OFF
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
    blocked = table([size, "blocked, s", "on disk, s", "the first one blocked, s"], rows)
    return f"{blocked}\n\n{_beside_saves(device, small)}"


def _beside_saves(device: str, small: bool) -> str:
    """Compare the throughput of a GPT-2 that saves in the background with one that does not save."""
    from benchmarks._gpt2 import GPT2, Stopwatch, tokens
    from benchmarks._task import OFF
    from trainer import Trainer
    from trainer.callbacks import ModelCheckpoint

    every, batch_size, number = (4, 2, 1) if small else (40, 8, 3)
    first, steps = every + 1, 3 * every + 1  # from after the first save, which allocates memory, to after the third
    data = list(tokens(batch_size * steps, small).to(device).split(batch_size))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    written = []
    for _ in range(number):
        for saving in seconds:
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                checkpoint = ModelCheckpoint(folder, save_top_k=1, every_n_train_steps=every, async_save=True)
                options: dict[str, Any] = {"accelerator": device, "devices": 1, "precision": "bf16-mixed", **OFF}
                if saving:
                    options |= {"callbacks": checkpoint, "enable_checkpointing": True}
                watch = Stopwatch(device, first, steps)
                Trainer(**options, max_steps=steps, max_epochs=-1).fit(GPT2(watch, small), data)
                seconds[saving].append(watch.seconds)
                if saving:
                    written.append(checkpoint.write_seconds or 0.0)
    shares = [without / beside for without, beside in zip(seconds[False], seconds[True], strict=True)]
    names = ["steps", "step without saves, ms", f"throughput with a save each {every} steps", "least", "most"]
    names += ["steps lost by a save", "writing one, s"]
    row = [str(steps - first), f"{median(seconds[False]) * 1e3:.1f}"]
    row += [f"{share:.3f}" for share in (median(shares), min(shares), max(shares))]
    row += [f"{(1 / median(shares) - 1) * every:.2f}", f"{median(written):.2f}"]
    return table(names, [row])


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


PARTS = {part.__name__: part for part in (tests, strategies, overhead, gpt2, saves, parallel)}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- the report --------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run the parts, each in a separate process, and write the report; return 0 if all succeeded."""
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
    """Return why this interpreter cannot run anything; empty if it can."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}. Install them there, or give PYTHON=another."
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        return f"{sys.executable} cannot import torch: {error}. Repair it there, or give PYTHON=another."
    return ""


def missing_device(device: str) -> str:
    """Return why torch does not find such a device, and the fix; empty if it does."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        why = "sees no CUDA device" if torch.version.cuda or torch.version.hip else "is built without CUDA"
        return (
            f"torch {torch.__version__} of {sys.executable} {why}. Give PYTHON=an interpreter whose torch sees a GPU."
        )
    return ""


def in_its_own_process(part: str, device: str, small: bool) -> tuple[str, bool]:
    """Run one part; return its text, or its error, and whether it succeeded."""
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
                # Also its child processes, which would keep the devices from the next part.
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    return f"**Not finished after {TIME_LIMIT_S:.0f} s.**", False
                raise
        took = f"\n\n{time.monotonic() - began:.0f} s."
        if code or not report.exists():
            return f"**Ended with exit code {code}; its output says why.**{took}", False
        text = report.read_text()
        failed = NO_RESULT in text or ("passed" in text and " 0 failed" not in text)
        return text + took, not (part in ("tests", "strategies") and failed)


def machine(device: str) -> list[str]:
    """Return the head of the report: the machine, its devices, and the packages that are and are not installed."""
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
