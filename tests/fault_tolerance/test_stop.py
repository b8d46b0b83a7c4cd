from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback
from trainer.distributed.environment import detect_environment
from trainer.errors import TrainerError
from trainer.fault_tolerance.failure import report_failure
from trainer.fault_tolerance.stop import StopCoordinator, exit_code

# -- one process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def coordinator() -> Any:
    coordinator = StopCoordinator(None)
    coordinator.install()
    yield coordinator
    coordinator.uninstall()


def test_nothing_requested(coordinator: StopCoordinator) -> None:
    assert [coordinator.check(step) for step in range(3)] == [None] * 3
    assert not coordinator.requested
    assert coordinator.wanted is None


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_stops_at_the_next_boundary(coordinator: StopCoordinator, name: str) -> None:
    assert coordinator.check(0) is None
    signal.raise_signal(signal.Signals[name])
    assert coordinator.requested
    assert coordinator.check(1) == name
    assert coordinator.wanted == name


def test_second_interrupt_ends_at_once(coordinator: StopCoordinator, capfd: pytest.CaptureFixture[str]) -> None:
    signal.raise_signal(signal.SIGINT)
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_says_that_a_signal_came_too_late_for_it(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    coordinator = StopCoordinator(None, rank, world_size=2)
    coordinator.install()
    signal.raise_signal(signal.SIGINT)
    coordinator.uninstall()
    with pytest.raises(KeyboardInterrupt):
        coordinator.send_again(None)
    assert caplog.messages == [f"rank {rank}: SIGINT came when training had ended: it takes effect now."]


def test_repeated_sigterm_is_one(coordinator: StopCoordinator) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert coordinator.check(1) == "SIGTERM"


def test_the_message_of_a_request_and_one_at_the_end(coordinator: StopCoordinator) -> None:
    coordinator.request("val_loss did not improve")
    coordinator.request("max_time is over")
    assert coordinator.wanted == "val_loss did not improve"


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    coordinator = StopCoordinator(None)
    coordinator.install()
    assert signal.getsignal(signal.SIGINT) not in before
    coordinator.uninstall()
    coordinator.uninstall()
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == before


def test_ignored_signals_stay_ignored_and_a_later_handler_stays() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    coordinator = StopCoordinator(None)
    try:
        coordinator.install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
        coordinator.uninstall()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert interrupt is not None


def test_install_outside_the_main_thread_takes_no_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    coordinator = StopCoordinator(None)
    thread = threading.Thread(target=coordinator.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    coordinator.request("enough")
    assert coordinator.check(1) == "enough"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown"])
def test_a_signal_that_comes_after_the_last_step_is_not_lost(name: str, hook: str, tmp_path: Path) -> None:
    received: list[int] = []

    class Late(Callback):
        pass

    def send(self: Any, trainer: Any, module: Any, *stage: str) -> None:
        signal.raise_signal(signal.Signals[name])

    setattr(Late, hook, send)
    before = signal.signal(signal.Signals[name], lambda number, frame: received.append(number))
    try:
        trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[Late()])
        trainer.fit(Toy(), loader(2))
    finally:
        signal.signal(signal.Signals[name], before)
    assert trainer.global_step == 2
    assert received == [signal.Signals[name]]


@pytest.mark.parametrize(
    ("hook", "checkpoints", "message"),
    [
        ("setup", True, "stopped after step 0: SIGTERM. This run has written no checkpoint: started again as now, it"),
        ("on_train_batch_end", True, "stopped after step 1: SIGTERM. To go on, start it again with ckpt_path='last'"),
        (
            "on_train_batch_end",
            False,
            "stopped after step 1: SIGTERM. This run has written no checkpoint: started again as now, it",
        ),
    ],
)
def test_the_last_message_names_what_is_saved(
    hook: str, checkpoints: bool, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Callback):
        pass

    setattr(Stopped, hook, lambda *_: signal.raise_signal(signal.SIGTERM))
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[Stopped()], enable_checkpointing=checkpoints)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(Toy(), loader(3))
    assert ended.value.code == 143
    assert message in capsys.readouterr().out
    assert any(tmp_path.rglob("manifest.json")) == ("To go on" in message)


def test_a_stop_before_the_first_new_step_names_the_checkpoint_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    first = quiet(max_epochs=1, max_steps=2, default_root_dir=tmp_path)
    first.fit(Toy(), loader(4))
    first.save_checkpoint(tmp_path / "saved")
    again = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[Stopped()])
    with pytest.raises(SystemExit):
        again.fit(Toy(), loader(4), ckpt_path=tmp_path / "saved")
    assert "This run has written no checkpoint: started again as now, it begins where" in capsys.readouterr().out


def test_a_signal_is_not_lost_to_an_earlier_request_to_stop(tmp_path: Path) -> None:
    received: list[int] = []

    class Both(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.stop("enough")
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[Both()])
        with suppress(SystemExit):
            trainer.fit(Toy(), loader(5))
            assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trainer.global_step == 1


def test_exit_codes() -> None:
    assert [exit_code(reason) for reason in ("SIGINT", "SIGTERM", "max_time is over", None)] == [130, 143, 0, 0]


# -- several processes ---------------------------------------------------------------------------------------------


def join() -> tuple[int, int, dist.Store]:
    environment = detect_environment()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return environment.rank, environment.world_size, dist.distributed_c10d._get_default_store()


def last_request(coordinator: StopCoordinator) -> str | None:
    """Return a request that came too late for a boundary, as a run does when all processes have come to its end."""
    wanted: list[str | None] = [None] * coordinator.world_size
    dist.all_gather_object(wanted, coordinator.wanted)
    return next(filter(None, wanted), None)


def train(
    coordinator: StopCoordinator, max_steps: int, during: Any = None, coupled: bool = True
) -> tuple[int, str | None]:
    """Run a loop whose steps need all ranks; `during(step)` is this rank's own work. Return steps and reason."""
    step, tensor = 0, torch.ones(1)
    reason = coordinator.check(step)
    while reason is None and step < max_steps:
        if during is not None:
            during(step)
        if coupled:
            dist.all_reduce(tensor)
        step += 1
        reason = coordinator.check(step)
    return step, reason or last_request(coordinator)


def rounds_of_requests(rounds: int, how: str) -> list[tuple[int, str | None]]:
    rank, world_size, store = join()
    common, mine = random.Random(1), random.Random(100 + rank)
    ended = []
    for number in range(rounds):
        victim, delay, max_steps = common.randrange(world_size), common.random() * 0.15, common.choice([5, 40, 10**6])
        coordinator = StopCoordinator(store, rank, world_size, interval=0.02)
        coordinator.install()
        act = {
            "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
            "request": lambda coordinator=coordinator, number=number: coordinator.request(f"wish {number}"),
        }[how]
        everybody = number % 5 == 4  # torchrun sends its signal to all
        timer = threading.Timer(delay + (mine.random() * 0.05 if everybody else 0), act)
        if rank == victim or everybody:
            timer.start()
        ended.append(train(coordinator, max_steps, lambda step: time.sleep(mine.random() * 0.004)))
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        dist.barrier()
        coordinator.uninstall()
    return ended


@pytest.mark.parametrize(("world_size", "how"), [(2, "signal"), (3, "request")])
def test_a_request_at_any_time_stops_all_at_the_same_step(world_size: int, how: str) -> None:
    ended = run_distributed(rounds_of_requests, world_size, 30, how)
    assert all(ranks == ended[0] for ranks in ended), ended
    stopped = [(step, reason) for step, reason in ended[0] if reason is not None]
    assert len(stopped) >= 10
    assert all(step < 10**6 for step, _ in ended[0])


def all_ask_at_once(rounds: int) -> list[tuple[int, str | None]]:
    rank, world_size, store = join()
    mine = random.Random(rank)
    ended = []
    for number in range(rounds):
        coordinator = StopCoordinator(store, rank, world_size, interval=0.001)
        coordinator.install()

        def at_step(step: int, number: int = number, coordinator: StopCoordinator = coordinator) -> None:
            time.sleep(mine.random() * 0.002)
            if step == number:
                coordinator.request("early stopping")
                time.sleep(mine.random() * 0.01)

        ended.append(train(coordinator, 100, at_step, coupled=number % 2 == 0))
        coordinator.uninstall()
    return ended


def test_all_asking_in_one_step_stop_after_that_very_step() -> None:
    for ended in run_distributed(all_ask_at_once, 2, 20):
        assert ended == [(number + 1, "early stopping") for number in range(20)]


def uncoupled(slow: float) -> tuple[int, str | None]:
    """Run ranks that do not wait for each other, and so are many steps apart when the request comes."""
    rank, world_size, store = join()
    coordinator = StopCoordinator(store, rank, world_size, interval=0.02)
    coordinator.install()
    threading.Timer(0.3, lambda: rank == 0 and coordinator.request("x")).start()
    return train(coordinator, 10**6, lambda step: time.sleep(slow if rank == 0 else slow / 10), coupled=False)


def test_the_one_behind_catches_up() -> None:
    first, second = run_distributed(uncoupled, 2, 0.01)
    assert first == second
    assert first[1] == "x"


def at_the_end(rounds: int) -> list[tuple[int, str | None]]:
    rank, world_size, store = join()
    mine = random.Random(rank)
    ended = []
    for number in range(rounds):
        coordinator = StopCoordinator(store, rank, world_size, interval=0.005)
        coordinator.install()
        if rank == number % world_size:
            threading.Timer(0.02 * mine.random(), coordinator.request, ["late"]).start()
        step = 0
        while coordinator.check(step) is None and step < 3:
            step += 1
        time.sleep(0.02 * mine.random())
        reason = last_request(coordinator)
        ended.append((step if reason is None else -1, reason))
        time.sleep(0.03)
        coordinator.uninstall()
    return ended


def test_a_request_at_the_very_end_is_known_to_all_or_to_none() -> None:
    first, second = run_distributed(at_the_end, 2, 25)
    assert first == second
    assert {reason for _, reason in first} == {None, "late"}


def the_others_fail(how: str) -> str:
    rank, world_size, store = join()
    coordinator = StopCoordinator(store, rank, world_size, interval=0.02, timeout=0.5)
    if rank == 1 and how == "silent":
        time.sleep(2)
        return ""
    coordinator.install()
    if rank == 1:
        report_failure(coordinator.store, rank, world_size, ValueError("x"))
        time.sleep(2)
        return ""
    if how == "silent":
        coordinator.request("x")
    with pytest.raises(TrainerError) as error:
        train(coordinator, 10**6, lambda step: time.sleep(0.001), coupled=False)
    return str(error.value)


def test_a_rank_that_does_not_answer_is_named() -> None:
    assert "no answer from rank 1 in 0 s" in run_distributed(the_others_fail, 2, "silent")[0]


def test_a_rank_that_failed_is_named_though_nobody_asked_to_stop() -> None:
    message, _ = run_distributed(the_others_fail, 2, "failed")
    assert "lost the other processes at step" in message
    assert "rank 1 failed" in message
