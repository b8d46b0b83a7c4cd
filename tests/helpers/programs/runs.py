"""Run a program with the product: its processes one after the other, each stopped as the program says and resumed."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.programs import objects
from tests.helpers.programs.blocks import Program
from tests.helpers.programs.interruptions import OF_EPOCHS, PASSED, WRITES, Stop
from tests.helpers.programs.record import Record, flattened
from tests.helpers.programs.reference import loss_of, make_net
from tests.helpers.programs.training import NoGuard, NoValidation
from trainer import Callback, DataModule, Trainer, TrainModule
from trainer.callbacks import BadStepGuard, GradientAccumulationScheduler, ModelCheckpoint
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.manifest import read_manifest
from trainer.fault_tolerance import fault_points
from trainer.tuner import Tuner


class StoppedError(Exception):
    """Ends a process by an error of the user's."""


class Net(TrainModule):
    """The module of all programs."""

    def __init__(self, program: Program, record: Record) -> None:
        super().__init__()
        self.net = make_net()
        self.batch_size, self.lr = 1, 0.1
        vars(self).update(program=program, record=record)
        if program.items.counted:
            vars(self)["num_items"] = lambda batch: loss_of(self.net, batch, True)[2]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        program, trainer = vars(self)["program"], self.trainer
        loss, numbers, _ = loss_of(self.net, batch, program.items.counted)
        if program.guard.bad in numbers:
            loss = loss * float("nan")
        if program.draws.drawn:
            loss = loss * (1 + torch.rand(()).double() + random.random() + float(np.random.rand()))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        vars(self)["record"].add_batch(
            trainer.current_epoch, batch_idx, numbers, trainer.global_step, rate, loss.item()
        )
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("samples", float(flattened(batch)[3]), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def on_validation_epoch_start(self) -> None:
        vars(self)["seen"] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, numbers, _ = loss_of(self.net, batch, items=False)
        vars(self)["seen"] += numbers
        self.log("validated", loss)

    def configure_optimizers(self) -> Any:
        return vars(self)["program"].optimizer.configured_for(self.net)


class Watch(Callback):
    """Write down what the trainer knows at the ends of epochs and validations; change the data where users do."""

    def __init__(self, program: Program, record: Record, loader: Any) -> None:
        self.program, self.record, self.loader, self.epoch = program, record, loader, 0

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            mean = float(trainer.callback_metrics["validated"])
            self.record.add_validation(trainer.current_epoch, trainer.global_step, vars(module)["seen"], mean)

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        metrics, key = trainer.callback_metrics, (self.record.fit, trainer.current_epoch)
        known = "loss" in metrics and (metrics["loss"].item(), int(metrics["samples"]))
        self.record.means[key] = known or None
        self._begin(trainer.current_epoch + 1)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.program.data.change(self.loader, epoch)

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._begin(0)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"])


class AtStart(Callback):
    """Save a checkpoint at the start of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"start-{len([*self.folder.glob('start-*')])}-{os.getpid()}")


class OwnWindows(Callback):
    """Set the windows where users do who write their own schedule: once, as its epoch begins."""

    def __init__(self, later: int) -> None:
        self.later = later

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.accumulate_grad_batches = self.later


class ForEpochs(DataModule):
    """Makes the loader for the current epoch."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        vars(self)["program"] = program

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return vars(self)["program"].data.made_for(self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return val_loader(vars(self)["program"])


def val_loader(program: Program) -> Any:
    return None if isinstance(program.val, NoValidation) else program.val.loader()


def stop_at(stop: Stop, lengths: dict[int, int], end: Callable[[], None]) -> Callback:
    """Return a callback that stops the run at a place.

    Args:
        lengths: the number of batches of each epoch.
        end: ends the process, for a kill.
    """
    passed = 0

    def pass_by(trainer: Trainer, *rest: Any) -> None:
        nonlocal passed
        if trainer.sanity_checking:
            return
        if stop.place in OF_EPOCHS:
            batch = trainer.progress.batch if stop.place == "last step" else rest[3] + 1
            last = lengths.get(trainer.current_epoch, 0)
            passed += batch == (1 if stop.place == "first batch" else last)
        else:
            passed += 1
        if passed != stop.number:
            return
        passed += 1
        if stop.how == "kill":
            end()
        elif stop.how == "error":
            raise StoppedError
        elif stop.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            trainer.stop("the program stops here")

    callback = Callback()
    setattr(callback, PASSED[stop.place], pass_by)
    return callback


def run_process(program: Program, folder: Path, record: Record, stop: Stop | None, lengths: dict[int, int]) -> None:
    """Run one process of the program: from the last checkpoint to its stop, or to the end of all fits."""

    def end() -> None:
        record.told |= {*objects.TOLD}
        (folder / "record").write_bytes(pickle.dumps(record))
        os._exit(9)

    loader = None if program.data.reload else program.data.made_for(0)
    callbacks = [Watch(program, record, loader), *callbacks_of(program, folder)]
    max_steps = program.end.steps
    if stop is not None and stop.how == "end":
        max_steps = min(max_steps or stop.number, stop.number)
    elif stop is not None and stop.place == "write":
        point = fault_points.Fault(WRITES[stop.number % len(WRITES)], "kill", 1 + stop.number // 2)
        os.environ[fault_points.VARIABLE] = str(point)
        fault_points._trigger = lambda fault: end()  # type: ignore[assignment]  # which keeps the record
    elif stop is not None:
        callbacks.insert(0 if stop.early else len(callbacks), stop_at(stop, lengths, end))
    val = program.val
    validates = not isinstance(val, NoValidation)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        seed=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        max_epochs=program.end.epochs,
        max_steps=-1 if max_steps is None else max_steps,
        accumulate_grad_batches=program.window.micro_batches,
        limit_train_batches=program.limit.train,
        limit_val_batches=program.limit.val,
        val_check_interval=val.interval if validates else 1.0,
        check_val_every_n_epoch=val.every if validates else 1,
        num_sanity_val_steps=val.sanity if validates else 0,
        reload_dataloaders_every_n_epochs=program.data.reload,
        callbacks=[*callbacks, *savers_of(program)],
    )
    module = Net(program, record)
    search(program, trainer, module, loader)
    if program.data.reload:
        given: dict[str, Any] = {"datamodule": ForEpochs(program)}
    else:
        given = {"train_dataloaders": loader, "val_dataloaders": val_loader(program)}
    trainer.fit(module, ckpt_path=newest(folder), **given)
    record.end_fit(module, trainer.global_step)
    if stop is None:
        for _ in range(1, program.again.fits_done):
            if not program.data.reload:
                loader = given["train_dataloaders"] = program.data.made_for(0)
                callbacks[0].loader = loader
            trainer.fit(module, **given)
            record.end_fit(module, trainer.global_step)


def callbacks_of(program: Program, folder: Path) -> list[Any]:
    callbacks: list[Any] = []
    if program.window.later is not None and program.window.by == "a schedule":
        callbacks.append(GradientAccumulationScheduler({1: program.window.later}))
    elif program.window.later is not None:
        callbacks.append(OwnWindows(program.window.later))
    if not isinstance(program.guard, NoGuard):
        callbacks.append(BadStepGuard(program.guard.action, z_score=None, max_bad_steps=100))
    if program.saves.at_start:
        callbacks.append(AtStart(folder))
    return callbacks


def savers_of(program: Program) -> list[Any]:
    steps = program.saves.steps
    savers: list[Any] = [ModelCheckpoint(every_n_train_steps=steps) if steps else ModelCheckpoint()]
    if program.saves.twice:
        savers.append(ModelCheckpoint(every_n_train_steps=2, filename="second-{step}"))
    return savers


def newest(folder: Path) -> str | Path:
    """Return the checkpoint of `AtStart` that has the most steps, or "last" if that has more."""
    found = {path: path for path in (*CheckpointDirectory(str(folder)).list(),)}
    saved = [path for run in folder.glob("version_*") for path in CheckpointDirectory(str(run / "checkpoints")).list()]
    steps = {path: read_manifest(path).info["step"] for path in (*saved, *found)}
    best = max(steps, key=lambda path: (steps[path], path in found), default=None)
    return "last" if best is None or not found else Path(str(best))


def search(program: Program, trainer: Trainer, module: Net, loader: Any) -> None:
    """Search for a learning rate or a batch size, which leaves everything as it was."""
    if program.search.kind == "rate":
        Tuner(trainer).lr_find(module, loader, num_training=4, update_attr=False)
    elif program.search.kind == "batch size":
        Tuner(trainer).scale_batch_size(module, loader, max_trials=1, steps_per_trial=2)
    elif program.search.kind == "throughput":
        Tuner(trainer).throughput(module, loader, steps_per_trial=2)
    objects.TOLD.clear()  # by copies


def run_product(program: Program, folder: Path, lengths: dict[int, int]) -> Record:
    """Run all processes of the program and return what happened."""
    record = Record()
    logging.getLogger("trainer").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # of one that comes when a fit is over
    for stop in (*program.stops, None):
        objects.TOLD.clear()
        record.begin_process()
        if stop is not None and stop.how == "kill":
            record = _forked(program, folder, record, stop, lengths)
        else:
            try:
                run_process(program, folder, record, stop, lengths)
            except SystemExit as error:
                if error.code != 143:
                    raise RuntimeError(f"exit code {error.code}") from error
            except StoppedError:
                pass
        record.told |= {*objects.TOLD}
    return record


def _forked(program: Program, folder: Path, record: Record, stop: Stop, lengths: dict[int, int]) -> Record:
    """Run a process that is killed, in a fork of this one."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_process(program, folder, record, stop, lengths)
            code = 0
        except BaseException as error:
            (folder / "error").write_bytes(pickle.dumps(repr(error)))
        finally:
            record.told |= {*objects.TOLD}
            (folder / "record").write_bytes(pickle.dumps(record))
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == 1:
        raise RuntimeError(pickle.loads((folder / "error").read_bytes()))
    return pickle.loads((folder / "record").read_bytes())
