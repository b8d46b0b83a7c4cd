"""Processes that user code starts during a run are ordinary ones, and data workers end with their process."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from tests.helpers.processes import Running, alive, run_python, start_python, wait_until
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, Trainer, TrainModule

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and reads /proc")

BEGIN = """
import atexit, concurrent.futures, multiprocessing, os, signal, subprocess, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, DataModule
"""

PROBES = (
    BEGIN
    + '''
NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")
WANTED = (["default_int_handler", "SIG_DFL", "SIG_DFL"], set(), "0", "0")


def actions():
    """Return the handlers and the mask of this process."""
    found = [signal.getsignal(signal.Signals[name]) for name in NAMES]
    return [getattr(one, "name", getattr(one, "__name__", one)) for one in found], signal.pthread_sigmask(0, [])


def forked():
    receive, send = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        send.send(actions())
        os._exit(0)
    os.waitpid(pid, 0)
    return receive.recv()


def executed():
    """Return the signals blocked and ignored in a program that is executed."""
    show = subprocess.run(["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"], capture_output=True, text=True).stdout
    ours = sum(1 << (signal.Signals[name] - 1) for name in NAMES)
    return tuple(f"{int(line.split()[1], 16) & ours:x}" for line in show.splitlines())


def ends_by_sigterm(child):
    child.terminate()
    child.wait() if isinstance(child, subprocess.Popen) else child.join()
    return child.returncode if isinstance(child, subprocess.Popen) else child.exitcode


def in_a_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def probe(place):
    found = [(*forked(), *executed()), (*in_a_thread(forked), *executed())]
    codes = [ends_by_sigterm(subprocess.Popen(["sleep", "3600"]))]
    if multiprocessing.parent_process() is None:  # daemonic processes may have no such children
        child = multiprocessing.Process(target=time.sleep, args=(3600,))
        child.start()
        codes.append(ends_by_sigterm(child))
        with concurrent.futures.ProcessPoolExecutor(1) as pool:
            found.append((*pool.submit(actions).result(), "0", "0"))
    print(place, "ordinary" if found == [WANTED] * len(found) and set(codes) == {-15} else (found, codes), flush=True)


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 0:
            probe("worker" if torch.utils.data.get_worker_info() else "dataset")
        return torch.full((4,), float(index)), torch.zeros(1)


class Stream(IterableDataset):
    def __iter__(self):
        return map(Samples().__getitem__, range(8))


class Data(DataModule):
    def prepare_data(self):
        probe("prepare_data")

    def setup(self, stage):
        probe("setup")

    def train_dataloader(self):
        return DataLoader(Samples(), 2)

    def val_dataloader(self):
        workers = {"batch_size": 2, "num_workers": 1}
        spawned = {**workers, "multiprocessing_context": "spawn"}
        return [DataLoader(Samples(), **workers), DataLoader(Stream(), **workers), DataLoader(Samples(), **spawned)]


class Probing(Toy):
    def configure_model(self):
        probe("configure_model")

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            probe("training_step")
        if batch_idx == 3:
            signal.raise_signal(signal.SIGTERM)
            probe("after a signal")
            raise ArithmeticError
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def teardown(self, stage):
        probe("teardown")


class Pools(Callback):
    def on_exception(self, trainer, module, error):
        probe("on_exception")

    def on_train_start(self, trainer, module):
        for number in range(200):
            with multiprocessing.Pool(2):
                pass
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                pool.apply(os.getpid)
        print("pools ended", flush=True)


if __name__ == "__main__":
    try:
        quiet(max_epochs=1, num_sanity_val_steps=2, callbacks=[Pools()]).fit(Probing(), datamodule=Data())
    except ArithmeticError:
        probe("afterwards")
'''
)


def test_what_user_code_starts_has_the_actions_and_masks_of_before_the_run() -> None:
    lines = run_python(PROBES, timeout=300).check(0).stdout.splitlines()
    assert sorted(set(lines)) == sorted(
        [
            *(f"{place} ordinary" for place in ("prepare_data", "setup", "configure_model", "training_step")),
            *(f"{place} ordinary" for place in ("dataset", "worker", "after a signal", "on_exception", "teardown")),
            "afterwards ordinary",
            "pools ended",
        ]
    )
    assert lines.count("worker ordinary") == 3


AT_EXIT = (
    BEGIN
    + """
from trainer.launchers.launcher import LAUNCHED


def start_children():
    if os.getpid() == int(os.environ.get(LAUNCHED, "0")):  # the process that was started by hand
        for number in range(50):
            with multiprocessing.Pool(2):
                pass
        child = multiprocessing.Process(target=time.sleep, args=(3600,))
        child.start()
        child.terminate()
        child.join()
        print("pools ended", flush=True)


if __name__ == "__main__":
    atexit.register(start_children)
    quiet(max_epochs=1, devices=2).fit(Toy(), loader(8))
"""
)


@pytest.mark.timeout(300)
def test_children_at_the_exit_of_the_process_that_launches_end() -> None:
    assert "pools ended" in run_python(AT_EXIT, timeout=200).check(0).stdout


WORKERS = (
    BEGIN
    + """
METHOD, KIND, PLACE = sys.argv[1:]


def slow_init(worker_id):
    print("at it:", os.getpid(), flush=True)
    time.sleep(3600)


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        print("at it:", os.getpid(), flush=True)
        if PLACE == "a call that holds the interpreter":
            import ctypes

            while True:
                ctypes.PyDLL(None).sleep(3600)
        time.sleep(3600)


class Stream(IterableDataset):
    def __iter__(self):
        return map(Samples().__getitem__, range(8))


class Wrapper:
    def __init__(self, loader):
        self.loaders = {"one": loader}

    def __iter__(self):
        yield from self.loaders["one"]


if __name__ == "__main__":
    loader = DataLoader(
        Stream() if KIND == "stream" else Samples(),
        2,
        num_workers=2,
        multiprocessing_context=METHOD,
        worker_init_fn=slow_init if PLACE == "init" else None,
    )
    quiet(max_epochs=1).fit(Toy(), Wrapper(loader) if KIND == "wrapper" else loader)
"""
)


@pytest.mark.parametrize(
    ("method", "kind", "place"),
    [
        ("fork", "plain", "init"),
        ("fork", "stream", "init"),
        ("fork", "wrapper", "a call that holds the interpreter"),
        ("spawn", "plain", "a call that holds the interpreter"),
        ("spawn", "stream", "init"),
        ("forkserver", "plain", "init"),
    ],
)
def test_data_workers_outlive_signals_and_die_with_their_process(method: str, kind: str, place: str) -> None:
    running = start_python(WORKERS, method, kind, place)
    running.wait_for("at it: ", count=2)
    check_lives(running)


def check_lives(running: Running) -> None:
    """Check that the workers whose numbers were printed outlive the signals that end a run, but not a killed parent."""
    wait_until(lambda: running.stdout.endswith("\n"))
    workers = [int(line.split()[-1]) for line in running.stdout.splitlines()]
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGTERM"):
        for pid in workers:
            os.kill(pid, signal.Signals[name])
    time.sleep(0.5)  # which a process takes to end
    assert all(map(alive, workers))
    running.process.kill()
    running.process.wait()
    wait_until(lambda: not any(map(alive, workers)))


EVERYWHERE = (
    BEGIN
    + """
from torchdata.stateful_dataloader import StatefulDataLoader


def hang(worker_id):
    print("at it:", os.getpid(), flush=True)
    time.sleep(3600)


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.zeros(1)


def begun(kind=DataLoader, **options):
    loader = kind(Samples(), 2, num_workers=1, worker_init_fn=hang, **options)
    return loader, iter(loader)


class Deep:
    __slots__ = ("inside",)

    def __init__(self):
        self.inside = lambda options={"loader": [DataLoader(Samples(), 2, num_workers=1, worker_init_fn=hang)]}: options

    def __iter__(self):
        yield from self.inside()["loader"][0]


class Data(DataModule):
    def prepare_data(self):
        self.first = begun()

    def setup(self, stage):
        self.second = begun(persistent_workers=True)

    def train_dataloader(self):
        return Deep()


class Hooks(Callback):
    def setup(self, trainer, module, stage):
        self.kept = [begun()]
        threading.Thread(target=begun, args=(StatefulDataLoader,), daemon=True).start()  # waits for its worker to begin

    def on_train_start(self, trainer, module):
        threading.Thread(target=lambda: self.kept.append(begun()), daemon=True).start()
        assert DataLoader(Samples()).multiprocessing_context is None


if __name__ == "__main__":
    quiet(max_epochs=1, callbacks=[Hooks()]).fit(Toy(), datamodule=Data())
"""
)


def test_workers_of_any_loader_of_a_run_outlive_signals_and_die_with_their_process() -> None:
    """Also of those in objects that nothing of the trainer's can look into, of hooks, and of threads."""
    pytest.importorskip("torchdata")
    running = start_python(EVERYWHERE)
    running.wait_for("at it: ", count=6)
    check_lives(running)


HUNG = (
    BEGIN
    + """
class Hangs(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        while index:
            time.sleep(3600)
        return torch.ones(4), torch.zeros(1)


if __name__ == "__main__":
    loader = DataLoader(Hangs(), 1, num_workers=1, persistent_workers=True)
    quiet(max_steps=1, limit_train_batches=1).fit(Toy(), loader)
    print("children left:", len(multiprocessing.active_children()))
    worker = next(iter(loader)) and loader._iterator._workers[0]
    worker.terminate()  # of the user's own iteration: torch's ordinary worker
    worker.join()
    print("ended by", worker.exitcode)
"""
)


def test_a_hung_worker_is_ended_with_its_stage_and_the_loader_is_the_users_again() -> None:
    assert run_python(HUNG, timeout=300).check(0).stdout == "children left: 0\nended by 0\n"


class Chained(Callback):
    """Put a handler around the trainer's, as libraries do, and end a forked process by the signal."""

    def __init__(self, number: signal.Signals) -> None:
        self.number, self.status = number, 0

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        before: Any = signal.getsignal(self.number)
        signal.signal(self.number, lambda number, frame: before(number, frame))
        child = os.fork()
        if child == 0:
            while True:
                time.sleep(0.01)
        os.kill(child, self.number)
        _, self.status = os.waitpid(child, 0)
        signal.signal(self.number, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_handler_of_a_library_around_the_trainers_ends_a_child(name: str) -> None:
    chained = Chained(signal.Signals[name])
    quiet(max_steps=1, callbacks=[chained]).fit(Toy(), loader(1))
    assert os.waitstatus_to_exitcode(chained.status) == -chained.number


LEAVING = (
    BEGIN
    + """
from torch.utils.data import TensorDataset
from trainer import Engine
from trainer.callbacks import ModelCheckpoint
ENDS = [SystemExit(3), SystemExit(), SystemExit("words"), RuntimeError("in the child"), KeyboardInterrupt()]


def fork():
    end = ENDS.pop(0)
    child = os.fork()
    if child == 0:
        raise end
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Forks(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if ENDS[1:]:
            fork()


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.ones(8, 4), torch.zeros(8, 1)), 1, num_workers=1)
    callbacks = [Forks(), ModelCheckpoint(save_on_exception=True)]
    trainer = quiet(max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Toy(), loader)
    print("steps", trainer.global_step, [path.name for path in trainer.run_dir.glob("checkpoints/epoch*")], flush=True)
    with Engine(accelerator="cpu") as engine:
        fork()
        print("engine", len(list(engine.setup_dataloaders(loader))))
"""
)


def test_an_exception_in_a_forked_child_ends_the_child_alone() -> None:
    run = run_python(LEAVING, timeout=300).check(0)
    assert run.stdout.splitlines() == ["3", "0", "1", "1", "steps 8 ['epoch=0-step=8']", "1", "engine 8"]
    assert run.stderr.count("RuntimeError: in the child") == 1
    assert "words\n" in run.stderr
