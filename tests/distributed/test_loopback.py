"""On one machine nobody else can connect, and who connects on the loopback can run no code in the processes."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import Running, descendants, fork_python
from tests.messages import raises_recorded
from trainer.checkpoint.process_group import StoreProcessGroup
from trainer.distributed.store import LOOPBACK, loopback_store, open_store, store_at
from trainer.errors import TrainerError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

TRAINING = """
import sys, time
from pathlib import Path
from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import ModelCheckpoint

class Waiting(Toy):
    def on_train_start(self):
        print("training", flush=True)
        while not Path(sys.argv[2]).exists():
            time.sleep(0.05)

def train():
    saves = ModelCheckpoint(every_n_train_steps=2, async_save=True)
    settings = {"max_epochs": 1, "strategy": sys.argv[1], "enable_checkpointing": True, "callbacks": [saves]}
    settings["max_restarts"] = int(sys.argv[1] == "fsdp")
    trainer = quiet(devices=2, **settings)
    trainer.fit(Waiting(), loader())
    weights = trainer.full_state_dict()
    if trainer.is_global_zero:
        print("weights", [value.flatten().tolist() for value in weights.values()], flush=True)
    return trainer.global_rank

if __name__ == "__main__":
    if len(sys.argv) > 3:
        import trainer
        assert trainer.launch(train, devices=2) == [0, 1]
    else:
        train()
"""


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def listeners(pid: int) -> set[tuple[str, int]]:
    """Return the addresses, in /proc's notation, and ports at which a process and its descendants listen."""
    inodes = set()
    for one in (pid, *descendants(pid)):
        for link in Path(f"/proc/{one}/fd").glob("*"):
            with suppress(OSError):  # closed, or ended, in between
                inodes.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def attack(port: int, bomb: bytes) -> None:
    """Send foreign bytes to a port."""
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bomb):
        with socket.create_connection((LOOPBACK, port), timeout=5) as connection:
            connection.sendall(garbage)


def finished(running: Running, go: Path) -> str:
    go.touch()
    (weights,) = [line for line in running.wait(300).check(0).stdout.splitlines() if line.startswith("weights")]
    return weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the weights after a training that nobody disturbs."""

    @functools.cache
    def weights(strategy: str) -> str:
        folder = tmp_path_factory.mktemp("undisturbed")
        return finished(fork_python(TRAINING, strategy, str(folder / "go"), cwd=folder), folder / "go")

    return weights


@pytest.mark.parametrize("how", ["fsdp with max_restarts", "ddp in a notebook", "ddp by trainer launch"])
def test_nothing_listens_beyond_the_loopback_and_foreign_bytes_there_change_nothing(
    how: str, weights: Callable[[str], str], tmp_path: Path
) -> None:
    arguments = (how.split()[0], str(tmp_path / "go"), *(["notebook"] if "notebook" in how else []))
    command: list[str] = [TRAINING]
    if "launch" in how:
        (tmp_path / "train.py").write_text(TRAINING)
        command = ["-m", "trainer", "launch", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    running = fork_python(*command, *arguments)
    try:
        running.wait_for("training", count=2)
        found = listeners(running.pid)
        assert len(found) >= 2, "gloo's, and the launcher's"
        assert {address for address, _ in found} <= {"0100007F", "0000000000000000FFFF00000100007F"}
        for _, port in sorted(found):
            attack(port, pickle.dumps(Bomb(tmp_path / "code was run")))
        attacked = finished(running, tmp_path / "go")
    finally:
        if running.process.poll() is None:
            running.kill()
    assert not (tmp_path / "code was run").exists()
    assert attacked == weights(how.split()[0])


def test_what_a_stranger_writes_into_the_store_is_an_error_and_runs_nothing(tmp_path: Path) -> None:
    store = loopback_store()
    stranger = store_at(LOOPBACK, store.port, "the store", 30)
    for number in (1, 2):
        for rank in (0, 1):
            stranger.set(f"write/{number}/{rank}", pickle.dumps(Bomb(tmp_path / "code was run")))  # type: ignore[arg-type]
    group = StoreProcessGroup(store, 1, 2, "write", timeout=30, sent=[])
    for exchange in (group.all_gather_object, group.broadcast_object):
        with raises_recorded(TrainerError):
            exchange(1)
    assert not (tmp_path / "code was run").exists()


def own_address() -> str | None:
    """Return an address of this machine other than the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address


def test_a_stranger_from_another_address_is_refused_where_rank_0_opens_the_store() -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    for store in (loopback_store(), open_store(LOOPBACK, free(), "MASTER_ADDR=here")):
        socket.create_connection((LOOPBACK, store.port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=5)


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
