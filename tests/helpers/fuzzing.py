"""Try inputs drawn at random, each in a process of its own with bounded memory and time."""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import NoReturn

from tests.helpers.fork_server import fork_server
from tests.helpers.processes import ROOT
from tests.tiers import Inputs, Numbered
from trainer.cli.main import main
from trainer.testing.processes import clean_environment

MEMORY_BYTES = 4 * 2**30
"""That an input may take, beyond what is mapped when it starts."""
CPU_S = 60
WALL_S = 300.0
"""Only ends what hangs, on a busy machine too."""

IMPORTED = (
    "trainer.trainer",
    "trainer.config.loading",
    "trainer.cli.run",
    "trainer.cli.dry_run",
    "torch.distributed.elastic.agent.server",
)
"""By most inputs; imported before they are tried."""

ACCEPTED, REFUSED = "accepted", "refused"


class WrongError(Exception):
    """An input led to something wrong; raised by the functions that try one."""


def try_each(inputs: Inputs, function: Callable[[random.Random], str]) -> None:
    """Call `function(rng)`, on the top level of a test module, for each input in a process of its own.

    It returns ACCEPTED or REFUSED, and raises anything else. All that went wrong fails the test, each with its seed, by
    which `function` can be called alone.
    """
    seeds = [rng.seed_given for rng in inputs]  # type: ignore[attr-defined]
    folder = Path(tempfile.mkdtemp(prefix="inputs-", dir=Path.cwd()))
    arguments = f"{function.__module__!r}, {function.__name__!r}, {seeds}"
    env = clean_environment({"PYTHONPATH": str(ROOT), "PYTEST_CURRENT_TEST": "here"})
    output = folder / "stdout", folder / "stderr"
    began = time.monotonic()
    process = fork_server(0).start(
        f"from tests.helpers.fuzzing import _fork_each; _fork_each({arguments})", folder, env, *output
    )
    assert process.wait() == 0, output[1].read_text(errors="replace")[-3000:]
    found = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
    assert len(found) == len(seeds)
    outcomes = Counter(outcome for outcome, _ in found)
    print(f"{function.__name__}: {dict(outcomes)} in {time.monotonic() - began:.0f} s")
    wrong = [
        f"{function.__module__}.{function.__name__}(random.Random({seed})): {text}"
        for seed, (outcome, text) in zip(seeds, found, strict=True)
        if outcome not in (ACCEPTED, REFUSED)
    ]
    assert not wrong, f"{len(wrong)} of {len(seeds)} inputs:\n\n" + "\n\n".join(wrong)


def called(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process, and return its exit code and output."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def _fork_each(module: str, name: str, seeds: list[int]) -> None:
    """Try each input in a fork of this process, which has imported everything, and write the outcomes to a file."""
    import torch._dynamo

    for part in IMPORTED:
        importlib.import_module(part)
    function = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # compiling takes a minute
    warnings.simplefilter("ignore")
    with open("results", "w") as results:
        for seed in seeds:
            folder = Path(tempfile.mkdtemp(prefix="input-", dir=Path.cwd()))
            if (pid := os.fork()) == 0:
                _become(function, seed, folder)
            print(json.dumps(_outcome(pid, folder)), file=results, flush=True)
            shutil.rmtree(folder, ignore_errors=True)


def _outcome(pid: int, folder: Path) -> tuple[str, str]:
    """Wait for the process that tries an input, end those that it has started, and return what it found."""
    deadline = time.monotonic() + WALL_S
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return "hung", f"did not end in {WALL_S:.0f} s\n{_tail(folder / 'stderr')}"
    result = folder / "result"
    if not result.exists():
        return "died", f"the process ended with {os.waitstatus_to_exitcode(status)}\n{_tail(folder / 'stderr')}"
    outcome, text = json.loads(result.read_text())
    return outcome, text


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:]


def _become(function: Callable[[random.Random], str], seed: int, folder: Path) -> NoReturn:
    """Try one input in this forked process, in a folder of its own, and write the outcome to the file `result`."""
    os.setsid()
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    for number, file in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    try:
        found = function(Numbered(seed)), ""
    except WrongError as error:
        found = "wrong", str(error)
    except BaseException as error:
        last = "".join(traceback.format_exception(error.__cause__ or error, limit=-4, chain=False))
        found = "raised", f"{error}\n{last[-3000:]}"
    (folder / "result").write_text(json.dumps(found))
    os._exit(0)
