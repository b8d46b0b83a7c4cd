"""Faults happen at the call, on the process and in the way that the variable names."""

from __future__ import annotations

import errno
import signal
import timeit

import pytest

from tests.helpers.processes import ROOT, run_python
from tests.messages import raises_recorded
from trainer.errors import ConfigError
from trainer.fault_tolerance.fault_points import ACTIONS, POINTS, VARIABLE, Fault, fault_point, parse_faults
from trainer.testing import FaultCallback, fault


def test_what_is_written_is_read() -> None:
    faults = [Fault("before_rename", "kill", 3, 0), Fault("in_file"), Fault("on_train_end", "hang", 2)]
    assert parse_faults(",".join(map(str, faults))) == faults
    assert parse_faults("in_file=term") == [Fault("in_file", "term")]
    assert parse_faults("") == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("before_renam",), "unknown point of a fault 'before_renam'. Did you mean 'before_rename'?"),
        (("on_train_step_ends",), "Did you mean 'on_train_step_end'?"),
        (("in_file", "klil"), "unknown action of a fault 'klil'. Did you mean 'kill'?"),
        (("in_file", "kill", 0), "write POINT:COUNT@RANK=ACTION"),
    ],
)
def test_mistakes_are_named(given: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fault(*given)
    assert says in str(caught.value)


def test_it_strikes_once_at_the_passing_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a:2=error,b=full,c@1=error")
    monkeypatch.setenv("RANK", "0")
    fault_point("a")
    with pytest.raises(RuntimeError, match="a fault at a, as TRAINER_FAULT asked for"):
        fault_point("a")
    with pytest.raises(OSError, match="No space left") as caught:
        fault_point("b")
    assert caught.value.errno == errno.ENOSPC
    for name in ("a", "b", "c", "d"):
        fault_point(name)  # not again, and not what is meant for another process
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    fault_point("c")  # not in a process that was started again
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    with pytest.raises(RuntimeError):
        fault_point("c")


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("term", -signal.SIGTERM), ("error", 1)])
def test_actions_reach_the_process(action: str, code: int) -> None:
    script = (
        "from trainer.fault_tolerance.fault_points import fault_point\nfault_point('in_file')\nprint('not reached')\n"
    )
    result = run_python(script, env=fault("in_file", action)).check(code)
    assert "not reached" not in result.stdout
    assert {"kill", "term", "int", "error", "full", "hang"} == set(ACTIONS)


def test_without_the_variable_nothing_happens_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert min(timeit.repeat(lambda: fault_point("in_file"), number=1000, repeat=5)) < 0.02  # 20 microseconds each


def test_the_callback_has_only_the_hooks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert vars(FaultCallback()).keys() == {"_made_with"}
    monkeypatch.setenv(VARIABLE, "on_train_end=error,in_file=kill")
    callback = FaultCallback()
    assert vars(callback).keys() == {"_made_with", "on_train_end"}
    with pytest.raises(RuntimeError, match="on_train_end"):
        callback.on_train_end(None, None)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, "on_trian_end=error")
    with raises_recorded(ConfigError):
        FaultCallback()


def test_the_page_lists_every_point_and_action() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    assert [name for name in (*POINTS, *ACTIONS) if f"`{name}`" not in page] == []
