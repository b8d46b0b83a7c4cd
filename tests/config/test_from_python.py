"""What a configuration describes, in Python; and values for several places."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import ConfigError
from trainer.config import load
from trainer.config.loading import load as checked
from trainer.config.read import read
from trainer.config.tree import Diagnostics

RUN = """
module: {class_path: tests.helpers.toy.Toy}
trainer: {max_epochs: "${vars.epochs}", accelerator: cpu, logger: false, accumulate_grad_batches: "${vars.epochs}"}
vars: {epochs: 3, words: [a]}
"""


def test_the_objects_of_a_file_train_as_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    objects = load(file, overrides={"trainer.default_root_dir": str(tmp_path), "vars.epochs": 2})
    assert type(objects.module).__name__ == "Toy"
    assert (objects.data, objects.ckpt_path) == (None, None)
    assert (objects.trainer.max_epochs, objects.trainer.accumulate_grad_batches) == (2, 2)
    assert not (tmp_path / "version_0").exists()


def test_later_files_and_overrides_win_and_problems_are_listed(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text(RUN)
    other.write_text("trainer: {max_epochs: 5}\nvars: {epochs: 4}\n")
    assert load(one, other).trainer.max_epochs == 5
    assert load(one, other, overrides={"trainer.max_epochs": 6}).trainer.max_epochs == 6
    with pytest.raises(ConfigError, match="max_epoch") as error:
        load(one, overrides={"trainer.max_epoch": 3, "vars.epochs": "many"})
    assert "Did you mean 'max_epochs'?" in str(error.value)


def test_vars_are_not_kept_but_their_values_are(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    found = Diagnostics()
    resolved = checked(read([str(file)], [], found), found).resolved
    assert "vars:" not in resolved
    assert "max_epochs: 3" in resolved
    file.write_text(RUN.replace("vars.epochs", "vars.epoch"))
    with pytest.raises(ConfigError, match=r"vars is given no 'epoch' there\. Did you mean 'epochs'"):
        load(file)


def test_a_pipe_is_a_configuration(tmp_path: Path) -> None:
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(RUN,))
    writer.start()
    try:
        assert load(pipe).trainer.max_epochs == 3
    finally:
        writer.join()
