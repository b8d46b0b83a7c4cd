"""Every hook is called when the pseudocode at the top of trainer/callback.py says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import trainer.callback
from tests.helpers.journal import Data, Journal, happened, make_module
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, DataModule, Trainer, TrainModule
from trainer.callback import HOOKS
from trainer.callbacks import ModelCheckpoint
from trainer.compat.names import FORMER_HOOKS
from trainer.loop.callback_list import NOT_ON_MODULES
from trainer.runs.hook_checks import parameters_of
from trainer.runs.preflight_checks import MODULE_HOOKS

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


TRANSFER = """
    module: on_before_batch_transfer 0
    module: transfer_batch_to_device 0
    module: on_after_batch_transfer 0
"""
SET_UP = """
    data: prepare_data
    module: prepare_data
    data: setup fit
    setup fit
    module: configure_model
    module: configure_optimizers
"""
TEAR_DOWN = """
    data: teardown fit
    teardown fit
"""


def validation(batches: int) -> str:
    each = [
        f"""
        {TRANSFER}
        on_validation_batch_start {number}
        module: validation_step {number}
        on_validation_batch_end {number}
        """
        for number in range(batches)
    ]
    return f"""
        module: on_validation_model_eval
        on_validation_start
        on_validation_epoch_start
        {"".join(each)}
        on_validation_epoch_end
        on_validation_end
        module: on_validation_model_train
    """


IN_FIT = "module: on_validation_model_zero_grad"

EPOCH = f"""
    on_train_epoch_start
        on_before_zero_grad
            {TRANSFER}
            on_train_batch_start 0
            module: training_step 0
            on_before_backward
            module: loss.backward()
            on_after_backward
            on_train_batch_end 0
            {TRANSFER}
            on_train_batch_start 1
            module: training_step 1
            on_before_backward
            module: loss.backward()
            on_after_backward
        on_before_optimizer_step
        module: configure_gradient_clipping
        module: optimizer.step()
        module: lr_scheduler_step interval=step
        on_train_batch_end 1
        on_train_step_end
        on_before_zero_grad
            {TRANSFER}
            on_train_batch_start 2
            module: training_step 2
            on_before_backward
            module: loss.backward()
            on_after_backward
        on_before_optimizer_step
        module: configure_gradient_clipping
        module: optimizer.step()
        module: lr_scheduler_step interval=step
        on_train_batch_end 2
        on_train_step_end
    {IN_FIT}
    {validation(2)}
    module: lr_scheduler_step interval=epoch
    on_train_epoch_end
    on_save_checkpoint
    callbacks: on_checkpoint_saved
"""

FIT = f"""
    {SET_UP}
    on_fit_start
    callbacks: on_sanity_check_start
        {IN_FIT}
        {validation(1)}
    callbacks: on_sanity_check_end
    on_train_start
    on_save_checkpoint
    {EPOCH}
    {EPOCH}
    on_train_end
    on_fit_end
    {TEAR_DOWN}
"""


def run(
    stage: str, journal: Journal, module: TrainModule, tmp_path: Path, ckpt_path: str | None = None, **options: Any
) -> Trainer:
    """Run one stage with the two recording callbacks; the one with `runs_last` is given first."""
    callbacks = [journal.callback("late", runs_last=True), journal.callback("early", runs_last=False)]
    callbacks += options.pop("more", [])
    trainer = Trainer(callbacks=callbacks, default_root_dir=tmp_path, **{**QUIET, "max_epochs": 2, **options})
    getattr(trainer, stage)(module, datamodule=Data(journal), ckpt_path=ckpt_path)
    return trainer


def test_the_order_of_fit(tmp_path: Path) -> None:
    journal = Journal()
    run(
        "fit",
        journal,
        make_module(journal),
        tmp_path,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        more=[ModelCheckpoint()],
    )
    committed = "on_checkpoint_saved"
    assert [re.sub(f"{committed} .*", committed, line) for line in journal] == happened(FIT)
    epochs = [f"{tmp_path}/version_0/checkpoints/epoch={epoch}-step={2 * epoch + 2}" for epoch in range(2)]
    assert [line.split()[-1] for line in journal if f"early {committed}" in line] == epochs


def test_validation_inside_the_epoch_comes_after_the_step_is_done(tmp_path: Path) -> None:
    journal = Journal()
    run(
        "fit",
        journal,
        make_module(journal),
        tmp_path,
        max_epochs=1,
        val_check_interval=2,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
    )
    inside = happened("on_train_batch_end 1", "on_train_step_end", IN_FIT, validation(2), "on_before_zero_grad")
    start = journal.index("early on_train_batch_end 1")
    assert journal[start : start + len(inside)] == inside
    assert journal.count("module on_validation_start") == 1
    end = happened("on_train_step_end", "module: lr_scheduler_step interval=epoch", "on_train_epoch_end")
    start = journal.index("module lr_scheduler_step interval=epoch") - 3
    assert journal[start : start + len(end)] == end


def test_the_order_of_validate(tmp_path: Path) -> None:
    journal = Journal()
    run("validate", journal, make_module(journal), tmp_path)
    expected = f"{SET_UP} {validation(2)} {TEAR_DOWN}".replace(" fit", " validate")
    assert journal == happened(expected.replace("module: configure_optimizers", ""))


def test_the_order_of_test(tmp_path: Path) -> None:
    journal = Journal()
    run("test", journal, make_module(journal), tmp_path)
    batches = [
        f"""
        {TRANSFER.replace("0", str(loader))}
        on_test_batch_start {number} {loader}
        module: test_step {number} {loader}
        on_test_batch_end {number} {loader}
        """
        for number, loader in ((0, 0), (0, 1), (1, 1))
    ]
    assert journal == happened(f"""
        {SET_UP.replace("fit", "test").replace("module: configure_optimizers", "")}
        module: on_test_model_eval
        on_test_start
        on_test_epoch_start
        {"".join(batches)}
        on_test_epoch_end
        on_test_end
        module: on_test_model_train
        {TEAR_DOWN.replace("fit", "test")}
    """)


def test_the_order_of_predict(tmp_path: Path) -> None:
    journal = Journal()
    run("predict", journal, make_module(journal), tmp_path)
    batches = [
        f"""
        {TRANSFER}
        on_predict_batch_start {number}
        module: predict_step {number}
        on_predict_batch_end {number}
        """
        for number in range(2)
    ]
    assert journal == happened(f"""
        {SET_UP.replace("fit", "predict").replace("module: configure_optimizers", "")}
        module: on_predict_model_eval
        on_predict_start
        on_predict_epoch_start
        {"".join(batches)}
        on_predict_epoch_end
        on_predict_end
        module: on_predict_model_train
        {TEAR_DOWN.replace("fit", "predict")}
    """)


def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    self.journal.note("module", "training_step", batch_idx)
    optimizer = self.optimizers()
    optimizer.zero_grad()
    loss = self.layer(batch).mean()
    loss.register_hook(lambda gradient: self.journal.note("module", "loss.backward()"))
    self.manual_backward(loss)
    optimizer.step()
    self.journal.note("module", "training_step is over", batch_idx)


def test_the_order_of_manual_optimization(tmp_path: Path) -> None:
    journal = Journal()
    module = make_module(journal, training_step=step_by_hand, automatic_optimization=False)
    run("fit", journal, module, tmp_path, max_epochs=1, limit_val_batches=0, enable_checkpointing=False)
    batches = [
        f"""
        {TRANSFER}
        on_train_batch_start {number}
        module: training_step {number}
            on_before_zero_grad
            on_before_backward
            module: loss.backward()
            on_after_backward
            on_before_optimizer_step
            module: optimizer.step()
        module: training_step is over {number}
        on_train_batch_end {number}
        on_train_step_end
        """
        for number in range(3)
    ]
    assert journal == happened(f"""
        {SET_UP}
        on_fit_start
        on_train_start
        on_train_epoch_start
        {"".join(batches)}
        on_train_epoch_end
        on_train_end
        on_fit_end
        {TEAR_DOWN}
    """)


def test_the_order_when_resuming(tmp_path: Path) -> None:
    journal = Journal()
    options = {"limit_val_batches": 0}
    run("fit", Journal(), make_module(Journal()), tmp_path, max_epochs=1, **options)
    run("fit", journal, make_module(journal), tmp_path, max_epochs=2, ckpt_path="last", **options)
    start = happened(SET_UP.replace("module: configure_opt", "on_load_checkpoint\nmodule: configure_opt"))
    assert journal[: len(start)] == start
    epochs = [line for line in journal if line == "early on_train_epoch_start"]
    assert len(epochs) == 1


def breaks(self: Any, batch: Any, batch_idx: int) -> None:
    raise ZeroDivisionError("the module's own")


def test_the_order_when_something_goes_wrong(tmp_path: Path) -> None:
    journal = Journal()
    module = make_module(journal, training_step=breaks)
    with pytest.raises(ZeroDivisionError, match="the module's own"):
        run("fit", journal, module, tmp_path, limit_val_batches=0, enable_checkpointing=False)
    assert journal == happened(f"""
        {SET_UP}
        on_fit_start
        on_train_start
        on_train_epoch_start
        on_before_zero_grad
        {TRANSFER}
        on_train_batch_start 0
        callbacks: on_exception
        {TEAR_DOWN}
    """)


def test_an_error_in_on_exception_hides_neither_the_first_one_nor_teardown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Callback):
        def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
            raise RuntimeError(f"while handling {exception}")

    journal = Journal()
    with pytest.raises(ZeroDivisionError, match="the module's own"):
        run("fit", journal, make_module(journal, training_step=breaks), tmp_path, more=[Fails()])
    assert journal[-4:] == happened(TEAR_DOWN)
    assert "while handling the module's own" in caplog.text


@pytest.mark.parametrize("failing", [("teardown",), ("on_exception", "teardown")])
def test_a_callback_that_fails_at_the_end_keeps_no_other_from_closing(failing: tuple[str, ...], tmp_path: Path) -> None:
    """A callback, the data module and the module all fail; what comes after them is called."""
    journal: list[str] = []

    def fails(name: str) -> Any:
        def hook(self: Any, *arguments: Any) -> None:
            journal.append(f"{type(self).__name__} {name}")
            raise RuntimeError(f"{type(self).__name__} {name}")

        return hook

    hooks = {name: fails(name) for name in failing}
    steps = {"training_step": breaks} if "on_exception" in failing else {}
    first, last = (type(name, (Callback,), hooks)() for name in ("First", "Last"))
    module = type("Own", (Toy,), {**steps, "teardown": fails("teardown")})()
    data = type("Data", (DataModule,), {**hooks, "train_dataloader": lambda self: loader(1)})()
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        quiet(max_steps=1, callbacks=[first, last]).fit(module, datamodule=data)
    expected = ["First on_exception", "Last on_exception", "Data on_exception"] if steps else []
    assert journal == [*expected, "Data teardown", "First teardown", "Last teardown", "Own teardown"]


def test_every_hook_stands_in_the_pseudocode_and_every_hook_of_the_pseudocode_exists() -> None:
    pseudocode = trainer.callback.__doc__
    assert pseudocode is not None
    named = set(re.findall(r"\bon_[a-z_]+[a-z]\b", pseudocode)) - {"on_epoch"}
    lines = set(re.findall(r"^\s+(setup|teardown|prepare_data|configure_\w+)", pseudocode, re.MULTILINE))
    as_test = {name.replace("validation", "test") for name in named if "validation" in name} - {
        "on_test_model_zero_grad"
    }
    known = {*HOOKS, *MODULE_HOOKS}
    assert {"setup", "teardown", "prepare_data", "configure_model"} <= lines
    assert set(HOOKS) - {"setup", "teardown"} <= named | as_test
    assert named | as_test <= known
    assert set(MODULE_HOOKS) - {"setup", "teardown"} <= named | as_test
    only_callbacks = {hook for hook in HOOKS if re.search(rf"{hook}\b.*\(callbacks\)", pseudocode)}
    assert only_callbacks == set(NOT_ON_MODULES)
    assert not set(FORMER_HOOKS) & known


def test_the_two_lists_of_hooks_agree() -> None:
    """The hooks that a module may define are those that are called on it, with the arguments of a callback's hook."""
    on_both = set(HOOKS) - set(NOT_ON_MODULES)
    of_modes = {name for name in MODULE_HOOKS if "_model_" in name or "_batch_transfer" in name}
    assert set(MODULE_HOOKS) == on_both | of_modes
    for hook in on_both:
        assert parameters_of(getattr(TrainModule, hook)) == parameters_of(getattr(Callback, hook))[2:]


class Logs(Callback):
    def on_test_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.log("seen", 2.0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.log("seen", 3.0)


def test_callbacks_of_the_module_log() -> None:
    class Gives(Toy):
        def configure_callbacks(self) -> Any:
            return Logs()

    trainer = quiet(max_epochs=1)
    trainer.fit(Gives(), loader(1))
    assert trainer.callback_metrics["seen"] == 3
    assert quiet().test(Gives(), loader(1))[0]["seen"] == 2


def test_callbacks_of_a_module_stay_as_in_lightning() -> None:
    class Gives(Toy):
        def configure_callbacks(self) -> Any:
            return [Logs()]

    trainer = quiet(max_epochs=1)
    trainer.fit(Gives(), loader(1))
    trainer.callbacks.append(Callback())
    assert trainer.test(Toy(), loader(1))[0]["seen"] == 2
    assert [type(one) for one in trainer.callbacks] == [Logs, Callback]


def test_a_module_may_give_one_callback_by_itself() -> None:
    class Gives(Toy):
        def configure_callbacks(self) -> Any:
            return ModelCheckpoint(filename="of the module")

    trainer = quiet(max_epochs=1, enable_checkpointing=True)
    trainer.fit(Gives(), loader(1))
    assert [path.name for path in (trainer.run_dir / "checkpoints").glob("of*")] == ["of the module"]
    assert len(trainer.checkpoint_callbacks) == 1
