"""ProgressBar works on a real terminal, in a log, and without a usable stream."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clock import Clock
from tests.helpers.processes import ROOT
from tests.helpers.terminal import Terminal
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.callbacks import LambdaCallback, ProgressBar, RichProgressBar
from trainer.callbacks.progress_bar import _LineDisplay, _TqdmDisplay

Attach = Callable[..., Terminal]


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """Replace stdout and stderr by a terminal. Call it in the test, since pytest replaces them before the test."""

    def attach(term: str = "xterm", **options: Any) -> Terminal:
        terminal = Terminal(**options)
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys, "stderr", terminal.stream)
        monkeypatch.setattr(sys, "stdout", terminal.stream)
        return terminal

    return attach


def fit(bar: ProgressBar | None = None, module: Toy | None = None, callbacks: Any = (), **settings: Any) -> Any:
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 2, **settings}
    trainer = quiet(callbacks=[bar or ProgressBar(), *callbacks], **settings)
    trainer.fit(module or Toy(), loader(6), loader(3))
    return trainer


def screen(text: str) -> list[str]:
    """The lines as they stand at the end: what a carriage return or an erasure covers is gone. Cursor moves up and down
    are followed."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[A|\x1b\[[0-9;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[A":
            row = max(0, row - 1)
        elif token not in "\r" and not token.startswith("\x1b"):
            lines[row] = token.rstrip() if token.strip() else ""
    return [line for line in lines if line]


def test_a_bar_on_a_terminal(attach: Attach) -> None:
    terminal = attach()
    fit()
    text = terminal.text()
    for shown in ("sanity check", "epoch 0/1", "epoch 0/1 validation", "epoch 1/1", "6/6", "3/3", "2/2", "it/s"):
        assert shown in text
    final = screen(text)
    assert len(final) == 1
    assert re.match(r"epoch 1/1: 100%\|█+\| 6/6 \[.*it/s, train_loss=[\d.e-]+, val_loss=[\d.e-]+\]", final[0])
    assert text.endswith("\n")


class Chosen(ProgressBar):
    """Lightning's own example of a bar of one's own."""

    disabled = False

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        shown = super().get_metrics(trainer, module)
        shown.pop("v_num", None)
        return {"phase": "warm", "val": shown["val_loss"], "step": trainer.global_step} if "val_loss" in shown else {}


def test_a_subclass_chooses_the_values(attach: Attach) -> None:
    terminal = attach()
    fit(Chosen())
    assert re.search(r"it/s, phase=warm, val=[\d.e-]+, step=12\]", screen(terminal.text())[0])


def test_an_error_in_the_choice_of_values_ends_the_run(attach: Attach) -> None:
    class Wrong(ProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            raise KeyError("v_num")

    attach()
    with pytest.raises(KeyError, match="v_num"):
        fit(Wrong())


class Talkative(Toy):
    """Logs more than 80 columns have room for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in ("accuracy", "perplexity", "gradient_norm"):
            self.log(name, 0.123456, prog_bar=True)
        return loss


@pytest.mark.parametrize(
    ("bar", "columns"), [(ProgressBar, 40), (ProgressBar, 80), (ProgressBar, 140), (RichProgressBar, 80)]
)
def test_a_narrow_terminal_shows_fewer_numbers_and_none_in_part(
    attach: Attach, columns: int, bar: type[ProgressBar]
) -> None:
    if bar is RichProgressBar:
        pytest.importorskip("rich")
    terminal = attach(columns=columns)
    fit(bar(), Talkative(), num_sanity_val_steps=0)
    text = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]", "", terminal.text())
    lines = [line for line in re.split(r"[\r\n]", text) if "epoch" in line]
    values = {name: value for line in lines for name, value in re.findall(r"(\w+)=([^,\] ]*)", line)}
    assert {value for name, value in values.items() if not name.endswith("_loss")} <= {"0.1235"}
    assert all(re.fullmatch(r"\d\.\d+(e-\d+)?", value) for value in values.values())
    assert ("train_loss" in values) == (columns > 40)
    assert ("gradient_norm" in values) == (columns > 80)
    assert columns != 80 or "+" in lines[-1]  # the number of those left out
    assert columns != 80 or "train_loss=" in lines[-1]  # even without a bar
    if bar is ProgressBar:
        assert max(map(len, lines)) <= columns
        assert [line for line in lines if "[" in line and "]" not in line] == []  # of times, from the first drawing on


def test_with_max_steps_the_bar_counts_the_batches_of_the_run(attach: Attach) -> None:
    terminal = attach()
    fit(max_steps=2, max_epochs=None, accumulate_grad_batches=2, num_sanity_val_steps=0)
    assert " 4/4 [" in screen(terminal.text())[-1]


def test_the_time_of_a_validation_alone_does_not_count_in_the_rate(attach: Attach) -> None:
    attach()
    bars = _TqdmDisplay(sys.stderr, leave=False)
    bars.start("epoch", total=4, done=0, keep=True)
    time.sleep(0.05)  # batches for which the bar was not drawn
    bars.start("validation", total=1, done=0, keep=False)
    time.sleep(0.05)
    epoch = bars.running[0]
    started = epoch.start_t
    bars.finish(1, [], report=False)
    assert epoch.start_t >= started + 0.05
    assert epoch.format_dict["elapsed"] >= 0.05
    bars.finish_all(4, [])


@pytest.mark.parametrize("options", [{"term": "dumb"}, {"columns": 0}, {"rows": 0}, {"rows": 2}])
def test_lines_on_a_terminal_that_can_do_no_more(attach: Attach, options: dict[str, Any]) -> None:
    terminal = attach(**options)
    fit()
    text = terminal.text()
    assert [line[:9] for line in text.splitlines()] == ["epoch 0/1", "epoch 1/1"]
    assert "\x1b" not in text


def test_bars_that_stay(attach: Attach) -> None:
    terminal = attach()
    fit(ProgressBar(leave=True))
    final = screen(terminal.text())
    assert [line[:9] for line in final] == ["epoch 0/1", "epoch 1/1"]


def test_print_does_not_break_the_bar(attach: Attach) -> None:
    terminal = attach()
    printing = LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: trainer.print(
            "batch", batch_idx, flush=True
        )
    )
    fit(callbacks=[printing])
    final = screen(terminal.text())
    assert final[:-1] == [f"batch {n}" for n in range(6)] * 2
    assert final[-1].startswith("epoch 1/1: 100%")


def test_evaluation_has_bars_too(attach: Attach) -> None:
    terminal = attach()
    trainer = quiet(callbacks=[ProgressBar()])
    trainer.validate(Toy(), loader(3), verbose=False)
    trainer.test(Toy(), loader(4), verbose=False)
    trainer.predict(Toy(), loader(5))
    final = screen(terminal.text())
    assert [re.sub(r"\[.*", "", re.sub("█+", "", line)) for line in final] == [
        "validate: 100%|| 3/3 ",
        "test: 100%|| 4/4 ",
        "predict: 100%|| 5/5 ",
    ]


def test_a_loader_without_a_length(attach: Attach) -> None:
    terminal = attach()

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            yield from loader(3)

    quiet(max_epochs=1, callbacks=[ProgressBar()]).fit(Toy(), Endless())
    assert re.match(r"epoch 0/0: 3it \[", screen(terminal.text())[-1])


def test_an_error_leaves_the_cursor_on_a_line_of_its_own(attach: Attach) -> None:
    terminal = attach()

    def fail(*args: Any) -> None:
        raise RuntimeError("sorry")

    with pytest.raises(RuntimeError, match="sorry"):
        fit(callbacks=[LambdaCallback(on_validation_batch_end=fail)], num_sanity_val_steps=0)
    assert terminal.text().rstrip(" \r").endswith("\n")


def test_a_resumed_epoch_begins_where_it_was(attach: Attach) -> None:
    terminal = attach()
    settings = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    fit(max_steps=4, max_epochs=None, **settings)
    trainer = quiet(max_epochs=1, callbacks=[ProgressBar()], **settings)
    trainer.fit(Toy(), loader(6), loader(3), ckpt_path="last")
    text = terminal.text()
    assert "4/6" in text
    assert "6/6" in screen(text)[-1]


def test_plain_lines_in_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    fit()
    lines = capfd.readouterr().err.splitlines()
    number = r"[\d.e+-]+"
    *_, line = lines
    assert re.fullmatch(rf"epoch 1/1: 6/6 batches, {number}/s, train_loss={number}, val_loss={number}", line), line


def test_plain_lines_of_a_program_that_executes_notebooks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel")
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    quiet(max_epochs=1, enable_progress_bar=True).fit(Toy(), loader(6))
    assert "epoch 0/0: 6/6 batches" in capfd.readouterr().err


def test_a_log_has_validations_inside_an_epoch_and_a_stop(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(_LineDisplay, "PAUSE", 0.0)
    monkeypatch.setattr(_LineDisplay, "update", lambda *args: None)
    fit(val_check_interval=2, max_epochs=9, max_steps=5)
    titles = [line.split(" batches")[0] for line in capfd.readouterr().err.splitlines()]
    assert titles == ["epoch 0/8 validation: 3/3", "epoch 0/8 validation: 3/3", "epoch 0/8: 5/5"]


def test_each_epoch_has_a_line(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(_LineDisplay, "PAUSE", 1000.0)
    fit(max_epochs=20)
    titles = [line.split(":")[0] for line in capfd.readouterr().err.splitlines()]
    assert titles == [f"epoch {number}/19" for number in range(20)]


def test_long_epochs_print_lines_in_between(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(_LineDisplay, "PAUSE", 0.05)
    monkeypatch.setattr(_LineDisplay, "seconds", 0.01)
    clock = Clock()
    monkeypatch.setattr("trainer.callbacks.progress_bar.time", clock)
    slow = LambdaCallback(on_train_batch_start=lambda *_: clock.advance(0.03))
    fit(callbacks=[slow], max_epochs=1)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" batches")[0] for line in lines] == [f"epoch 0/0: {done}/6" for done in (2, 4, 6, 6)]


def test_off(attach: Attach) -> None:
    terminal = attach()
    fit(ProgressBar(refresh_rate=0))
    assert terminal.text() == ""
    with raises_recorded(ConfigError):
        ProgressBar(refresh_rate=-1)


@pytest.mark.parametrize("kind", ["closed", "missing", "broken pipe", "full"])
def test_streams_that_cannot_be_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "closed":
        stream: Any = io.StringIO()
        stream.close()
    elif kind == "missing":
        stream = None
    elif kind == "broken pipe":
        read, write = os.pipe()
        os.close(read)
        stream = os.fdopen(write, "w")
    else:
        stream = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    printing = LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.print("hello"))
    trainer = fit(callbacks=[printing], enable_model_summary=True)
    monkeypatch.undo()
    assert trainer.current_epoch == 2
    if stream is not None:
        with open(os.devnull) as null:
            if kind in ("broken pipe", "full"):
                os.dup2(null.fileno(), stream.fileno())
        with suppress(OSError):
            stream.close()


def test_a_terminal_that_goes_away(attach: Attach) -> None:
    terminal = attach()

    def hang_up(trainer: Any, module: Any) -> None:
        if trainer.global_step == 3:
            terminal.stream.close()

    trainer = fit(callbacks=[LambdaCallback(on_train_step_end=hang_up)])
    assert trainer.global_step == 12


def test_a_terminal_that_knows_only_ascii(attach: Attach) -> None:
    terminal = attach(encoding="ascii")
    printing = LambdaCallback(on_train_start=lambda trainer, module: trainer.print("größe"))
    fit(callbacks=[printing])
    text = terminal.text()
    assert r"gr\xf6\xdfe" in text
    assert "epoch 1/1: 100%|##" in text


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import LambdaCallback, ProgressBar
say = LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.print("x" * 100))
trainer = quiet(max_epochs=2, callbacks=[ProgressBar(), say], enable_model_summary=True)
trainer.fit(Toy(), loader(4), loader(1))
open("steps", "w").write(str(trainer.global_step))
"""


@pytest.mark.parametrize("redirect", ["| true; exit ${PIPESTATUS[0]}", ">&- 2>&-"])
def test_the_exit_code_does_not_suffer(redirect: str, tmp_path: Path) -> None:
    """Python fails when it flushes a broken stdout at exit."""
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT)))
    command = (
        f"{sys.executable} script.py 2>&1 {redirect}" if "|" in redirect else f"{sys.executable} script.py {redirect}"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, timeout=600, check=False)
    assert result.returncode == 0
    assert (tmp_path / "steps").read_text() == "8"


def test_a_batch_costs_next_to_nothing() -> None:
    bar = ProgressBar()
    trainer = quiet(max_steps=1)
    trainer.fit(Toy(), loader())
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar._next = time.monotonic() + 100
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    for batch_idx in range(1000):
        bar.on_train_batch_end(trainer, None, None, None, batch_idx)  # type: ignore[arg-type]
    sys.setprofile(None)
    bar.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    # The hook, what it calls, and the clock.
    assert len([event for event in calls if event.endswith("call")]) <= 3 * 1000 + 1
