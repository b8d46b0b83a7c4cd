from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.helpers.processes import fork_python
from trainer.distributed import rendezvous
from trainer.distributed.environment import Environment
from trainer.distributed.rendezvous import attempt, join_store
from trainer.distributed.store import address_towards, connect, free_port, is_own_address, open_store
from trainer.errors import TrainerError


@pytest.fixture
def taken() -> Iterator[int]:
    """Return a port on which a socket listens that never answers."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_reported_with_host_port_and_a_free_one(taken: int) -> None:
    with pytest.raises(TrainerError, match=f"port {taken} of {socket.gethostname()} .*MASTER_PORT={taken}.* is in use"):
        open_store("127.0.0.1", taken, f"MASTER_PORT={taken}", wait=0)


def test_a_port_that_becomes_free_is_taken() -> None:
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen()
    port = listener.getsockname()[1]
    threading.Timer(0.5, listener.close).start()
    assert open_store("127.0.0.1", port, "", wait=30).port == port


def test_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(TrainerError, match=f"127.0.0.1:{port}, the place, cannot be reached: .*refused"):
        connect("127.0.0.1", port, "the place", wait=0.3)


def test_whoever_listens_later_is_found() -> None:
    port = free_port()
    stores: list[TCPStore] = []
    later = threading.Timer(0.5, lambda: stores.append(open_store("127.0.0.1", port, "", wait=30)))
    later.start()
    connect("127.0.0.1", port, "the place", wait=60).set("key", "value")
    later.join()
    assert stores[0].get("key") == b"value"


@pytest.mark.parametrize("host", ["no-such-machine.invalid", "a..b"])
def test_a_name_of_no_machine(host: str) -> None:
    with pytest.raises(TrainerError, match=f"{host}:29500, the place, cannot be reached: "):
        connect(host, 29500, "the place", wait=0.3)


def test_somebody_else_listens(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.distributed.store._HANDSHAKE_S", 0.5)
    with pytest.raises(TrainerError, match=f"127.0.0.1:{taken}, the place, is in use by something that is not torch's"):
        connect("127.0.0.1", taken, "the place", wait=1)


SERVERS = {
    "web": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "binary": b"\x15\x03\x01\x00\x02\x02",
}


@pytest.mark.parametrize("kind", SERVERS)
def test_another_program_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.distributed.store._HANDSHAKE_S", 0.5)

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if kind != "ssh":
                self.rfile.readline()
            self.wfile.write(SERVERS[kind])

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Server(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with pytest.raises(TrainerError, match=r"is in use by something that is not torch's store.* Give another port"):
            connect("127.0.0.1", port, "where the machines meet", wait=60)
        server.shutdown()


def test_own_addresses() -> None:
    assert is_own_address("localhost", 1)
    assert is_own_address("127.0.0.1", 1)
    assert not is_own_address("192.0.2.1", 1)  # reserved for documentation by RFC 5737
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


def test_processes_of_a_second_attempt_do_not_meet_the_dead_ones_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of the first attempt registers, and is dead before rank 0 arrives; the launchers' counts differ."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TRAINER_ATTEMPT", "")
    server = open_store("127.0.0.1", 0, "")
    server.set("trainer/asks/1", "a dead one")
    found: dict[str, str] = {}

    def come(name: str, rank: int) -> None:
        environment = Environment(rank, rank, 2, 2, 0, 1, "torchrun", "127.0.0.1", server.port)
        store = join_store(environment, timedelta(seconds=30))
        store.set(f"here/{rank}", name)
        found[name] = f"{store.get(f'here/{1 - rank}').decode()} {attempt()}"

    for names in (("first 0", "first 1"), ("second 0", "second 1")):
        threads = [threading.Thread(target=come, args=(name, rank)) for rank, name in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    assert found == {"first 0": "first 1 1", "first 1": "first 0 1", "second 0": "second 1 2", "second 1": "second 0 2"}


def test_whoever_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_ATTEMPT", "")
    environment = Environment(0, 0, 3, 3, 0, 1, "Slurm", "127.0.0.1", free_port())
    with pytest.raises(TrainerError, match="ranks 1, 2 of 3 did not come within 0 s"):
        join_store(environment, timedelta(seconds=0.2))


def test_missing_ranks_are_named_while_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINER_ATTEMPT", "")
    monkeypatch.setattr(rendezvous, "_MISSING_NOTICE_S", 0.0)
    environment = Environment(0, 0, 2, 2, 0, 1, "Slurm", "127.0.0.1", free_port())
    with pytest.raises(TrainerError):
        join_store(environment, timedelta(seconds=0.2))
    assert "s to begin: rank 1 of 2 did not come" in caplog.text


BUSY = """
import torch
from torch.utils.data import DataLoader
from trainer import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
trainer.fit(Net(), DataLoader(torch.ones(4, 1)))
"""


KILLED = """
import os
import time
from pathlib import Path
from tests.helpers.toy import Toy, loader, quiet
from trainer.strategies import DDPStrategy

trainer = quiet(strategy=DDPStrategy(timeout_seconds=10.0), devices=3)
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), 9)
Path("made" + os.environ["RANK"]).touch()
while not (Path("made0").exists() and Path("made1").exists()):
    time.sleep(0.01)
trainer.fit(Toy(), loader())
"""


def test_a_rank_that_dies_before_it_joins_is_named_by_all_others() -> None:
    """Nobody has started the processes who would end the others."""
    Path("train.py").write_text(KILLED)
    place = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        fork_python("train.py", env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, number=rank)
        for rank in range(3)
    ]
    for rank in ranks[:2]:
        errors = rank.wait().check(1).stderr
        assert "rank 2 of 3 did not come within 10 s (timeout_seconds of the strategy)." in errors, errors


def test_a_run_on_a_taken_port_ends_on_all_ranks(taken: int) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)}
    ranks = [fork_python(BUSY, env={**place, "RANK": str(r), "LOCAL_RANK": str(r)}, number=r) for r in (0, 1)]
    first, second = (rank.wait() for rank in ranks)
    assert first.returncode == second.returncode == 1
    assert f"port {taken} of {socket.gethostname()}" in first.stderr
    assert f"127.0.0.1:{taken}" in second.stderr
    assert "not torch's store" in second.stderr


def test_processes_wait_no_longer_than_asked_for_a_master_that_is_not_there() -> None:
    port = free_port()
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env = {**place, "RANK": "1", "LOCAL_RANK": "1", "TRAINER_CONNECT_SECONDS": "1"}
    result = fork_python(BUSY, env=env).wait().check(1)
    assert f"127.0.0.1:{port}, where the processes meet" in result.stderr
    assert "Connection refused" in result.stderr
