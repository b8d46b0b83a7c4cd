"""LambdaCallback: functions as hooks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.toy import Toy, loader, quiet
from trainer import ConfigError
from trainer.callbacks import LambdaCallback


def test_functions_are_called_as_hooks() -> None:
    seen: list[Any] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: seen.append(("start", type(module).__name__)),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(batch_idx),
        setup=lambda trainer, module, stage: seen.append(stage),
    )
    quiet(max_epochs=1, callbacks=[callback]).fit(Toy(), loader(2))
    assert seen == ["fit", ("start", "Toy"), 0, 1]


def test_what_is_not_a_hook_or_not_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown hook of LambdaCallback 'on_train_strat'"):
        LambdaCallback(on_train_strat=print)
    with pytest.raises(ConfigError, match=r"LambdaCallback\(on_fit_end=3\): give a function"):
        LambdaCallback(on_fit_end=3)  # type: ignore[arg-type]
