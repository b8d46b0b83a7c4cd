"""Launchers on several machines, which are network namespaces with addresses of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, Running, alive, descendants, run_python, wait_until
from tests.helpers.training import EVERY, make, steps_of, weights_of
from trainer.testing.processes import clean_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")

STEPS = 40
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3"


def namespaces_refused() -> str | None:
    """Return the reason why this machine cannot have two networks; None if it can."""
    if shutil.which("ip") is None:
        return "there is no command `ip` (package iproute2)"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None if made.returncode == 0 else f"network namespaces are not allowed here: {made.stderr.strip()}"


REFUSED = namespaces_refused() if sys.platform == "linux" else "not Linux"


class Hosts:
    """Two hosts joined by a cable, or, where that is not allowed, two launchers on one loopback."""

    def __init__(self) -> None:
        self.names = [f"tr{os.getpid() % 100000}{side}" for side in "ab"] if REFUSED is None else []
        self.first = "10.77.0.1" if self.names else "127.0.0.1"

    def build(self) -> None:
        for command in (
            "netns add {a}",
            "netns add {b}",
            "link add {a} type veth peer name {b}",
            "link set {a} netns {a}",
            "link set {b} netns {b}",
            "-n {a} addr add 10.77.0.1/24 dev {a}",
            "-n {b} addr add 10.77.0.2/24 dev {b}",
            *(f"-n {{{side}}} link set {device} up" for side in "ab" for device in ("lo", f"{{{side}}}")),
        ):
            self._ip(command)

    def _ip(self, command: str) -> None:
        if self.names:
            a, b = self.names
            subprocess.run(["ip", *command.format(a=a, b=b).split()], check=True, capture_output=True)

    def destroy(self) -> None:
        for side in "ab":
            self._ip(f"netns del {{{side}}}")

    def start(self, host: int, folder: Path, *words: str, env: dict[str, str] | None = None) -> Running:
        """Run a Python command line on a host."""
        within = ["ip", "netns", "exec", self.names[host]] if self.names else []
        interface = {"GLOO_SOCKET_IFNAME": self.names[host]} if self.names else {}
        full = clean_environment({"PYTHONPATH": str(ROOT), **interface, **(env or {})})
        return Running([*within, sys.executable, *words], folder, full)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    hosts.build()
    yield hosts
    hosts.destroy()


def launch(hosts: Hosts, host: int, script: Path, port: int, *more: str) -> Running:
    meeting = ["--rdzv", f"{hosts.first}:{port}", "--rdzv-conf", QUICK, "--node-rank", str(host)]
    command = ["launch", "--nnodes", "2", "--nproc-per-node", "1", *meeting, *more, str(script)]
    return hosts.start(host, script.parent, "-m", "trainer", *command, str(script.parent / "out"), str(STEPS), "0.05")


def test_a_launcher_is_killed_and_started_again_and_the_bits_are_the_same(hosts: Hosts, tmp_path: Path) -> None:
    uninterrupted = make(tmp_path / "uninterrupted")
    run_python(uninterrupted, str(uninterrupted.parent / "out"), str(STEPS), "0", "2", cwd=tmp_path).check()
    script = make(tmp_path / "broken")
    out = script.parent / "out"
    first = launch(hosts, 0, script, 29533, "--max-restarts", "1")
    second = launch(hosts, 1, script, 29533, "--max-restarts", "1")
    wait_until(lambda: len(steps_of(out)) >= 2 * EVERY + 2, 120, f"{first}\n{second}")
    workers = descendants(second.pid)
    second.process.kill()
    second.process.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers), 30)  # nothing of it is left behind
    wait_until(lambda: "starting all processes again (1 of 1)" in first.stderr, 60, str(first))
    again = launch(hosts, 1, script, 29533, "--max-restarts", "1")
    first.wait().check()
    again.wait().check()
    done = steps_of(out)
    drops = [i for i in range(1, len(done)) if done[i] <= done[i - 1]]
    assert len(drops) == 1, done  # one restart, which repeats only the steps since the last checkpoint
    assert done[drops[0] - 1] - done[drops[0]] + 1 <= EVERY
    assert done[: drops[0]] == list(range(1, done[drops[0] - 1] + 1))
    assert done[drops[0] :] == list(range(done[drops[0]], STEPS + 1))
    assert weights_of(out) == weights_of(uninterrupted.parent / "out")


def test_the_place_where_they_meet_is_gone(hosts: Hosts, tmp_path: Path) -> None:
    script = make(tmp_path / "run")
    first, second = launch(hosts, 0, script, 29534), launch(hosts, 1, script, 29534)
    wait_until(lambda: len(steps_of(script.parent / "out", 1)) >= 1, 120, f"{first}\n{second}")
    workers = descendants(second.pid)
    first.process.kill()
    first.process.wait()
    result = second.wait()
    assert result.returncode == 1
    assert f"lost {hosts.first}:29534, where the machines meet" in result.stderr or "rank 1" in result.stderr
    wait_until(lambda: not any(alive(pid) for pid in workers))


def test_a_signal_to_one_launcher_stops_both_machines_at_one_step(hosts: Hosts, tmp_path: Path) -> None:
    script = make(tmp_path / "run")
    out = script.parent / "out"
    first, second = (launch(hosts, host, script, 29535, "--max-restarts", "1") for host in (0, 1))
    wait_until(lambda: len(steps_of(out, 1)) >= 2, 120, f"{first}\n{second}")
    second.send(signal.SIGTERM)
    second.wait().check(143)
    first.wait().check(143)
    assert steps_of(out, 0) == steps_of(out, 1)
    assert len(steps_of(out)) < STEPS
