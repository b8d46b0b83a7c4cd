"""RichProgressBar draws the same progress with rich, and never ends a run."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from tests.helpers.terminal import Terminal
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.callbacks import LambdaCallback, RichProgressBar
from trainer.callbacks.rich_progress_bar import RichProgressBarTheme

pytest.importorskip("rich")


def shown(monkeypatch: pytest.MonkeyPatch, bar: RichProgressBar, **settings: object) -> str:
    terminal = Terminal(columns=140)
    monkeypatch.setenv("TERM", "xterm-256color")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.stream)
        patch.setattr(sys, "stdout", terminal.stream)
        talk = LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.print("a line of text"))
        trainer = quiet(max_epochs=2, log_every_n_steps=1, callbacks=[bar, talk], **settings)
        trainer.fit(Toy(), loader(6), loader(3))
        trainer.test(Toy(), loader(3))
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text())


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, RichProgressBar(theme=RichProgressBarTheme(metrics="bold")))
    assert "epoch 1/1" in text
    assert "6/6" in text
    assert re.search(r"train_loss=\d", text)
    assert re.search(r"val_loss=\d", text)
    assert "a line of text" in text
    assert "test" in text
    assert "Traceback" not in text


def test_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=1, callbacks=RichProgressBar()).fit(Toy(), loader(6))
    assert re.search(r"epoch 0/0: 6/6 batches.*train_loss=", capsys.readouterr().err)


def test_it_takes_the_place_of_the_progress_bar() -> None:
    trainer = quiet(enable_progress_bar=True, callbacks=RichProgressBar())
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["RichProgressBar"]


def test_wrong_options_are_refused() -> None:
    with raises_recorded(ConfigError):
        RichProgressBar(refresh_rate=-1)


def test_a_theme_has_the_format_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(RichProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {"a": 1.0, "b": 2.0}

    text = shown(monkeypatch, Two(theme=RichProgressBarTheme(metrics_text_delimiter=" / ", metrics_format=".1e")))
    assert "a=1.0e+00 / b=2.0e+00" in text
