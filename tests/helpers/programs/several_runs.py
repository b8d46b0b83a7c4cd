"""Run a program with several of everything with the product, and compare what it leaves."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.helpers.programs import several
from tests.helpers.programs.blocks import Program
from tests.helpers.programs.interruptions import WRITES, Stop
from tests.helpers.programs.runs import StoppedError, stop_at
from trainer import Trainer, TrainModule
from trainer.callbacks import (
    BadStepGuard,
    BaseFinetuning,
    CSVLogger,
    EarlyStopping,
    EMAWeightAveraging,
    GradNormMonitor,
    JSONLLogger,
    LearningRateMonitor,
    ModelCheckpoint,
    TensorBoardLogger,
)
from trainer.checkpoint.directory import CheckpointDirectory, versions
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import read_manifest
from trainer.fault_tolerance import fault_points

BAD: list[int] = []
"""The bad steps of this process."""


class Net(TrainModule):
    """The module of these programs."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.net = several.make_net(program)
        self.automatic_optimization = not program.optimizers.manual
        vars(self)["program"] = program

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        program: Any = vars(self)["program"]
        loss = several.loss_of(self.net, batch)
        optimizers = self.trainer.optimizers
        self.log("loss", loss, on_step=True, on_epoch=False)
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.log("rate", optimizers[0].param_groups[0]["lr"])
        if self.automatic_optimization:
            bad = self.current_epoch == 1 and batch_idx == program.ending.bad
            return loss * float("nan") if bad else loss
        made = self.optimizers()
        made = made if isinstance(made, list) else [made]
        for number in program.optimizers.stepping(batch_idx):
            for one in made:
                one.zero_grad()
            loss = several.loss_of(self.net, batch)
            if loss.requires_grad:
                self.manual_backward(loss)
            made[number].step()
        if program.optimizers.schedule == "step":
            self._step_schedulers()
        return None

    def _step_schedulers(self) -> None:
        found: Any = self.lr_schedulers()
        for one in found if isinstance(found, list) else [found]:
            one.step()

    def on_train_epoch_start(self) -> None:
        unfreeze = vars(self)["program"].unfreeze
        if unfreeze.epoch is not None and unfreeze.by == "a hook" and self.current_epoch >= unfreeze.epoch:
            self.net[0].requires_grad_(True)

    def on_train_epoch_end(self) -> None:
        if (
            not self.automatic_optimization
            and vars(self)["program"].optimizers.schedule == "epoch"
            and self.trainer.progress.epoch_ended
        ):
            self._step_schedulers()

    def on_validation_epoch_start(self) -> None:
        vars(self)["losses"] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = several.loss_of(self.net, batch)
        vars(self)["losses"].append(loss.item())
        self.log("val", loss)

    def on_validation_epoch_end(self) -> None:
        losses = vars(self)["losses"]
        self.log("score", sum(losses) / len(losses))
        self.log("flat", 1.0)
        self.log("falling", -float(self.global_step))
        if vars(self)["program"].loggers.media and not self.trainer.sanity_checking:
            for logger in self.trainer.loggers:
                logger.log_text("note", f"at {self.global_step}")
                logger.log_histogram("weights", torch.arange(5.0) * self.global_step)

    def configure_optimizers(self) -> Any:
        program: Any = vars(self)["program"]
        if program.unfreeze.epoch is not None and program.unfreeze.by == "a group":
            made = [torch.optim.SGD(self.net[1].parameters(), lr=0.05, momentum=program.optimizers.momentum)]
            schedule = program.optimizers.schedule is not None
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(made[0], 0.9)] * schedule
        else:
            made, schedulers = program.optimizers.made_for(self.net)
        interval = "step" if program.optimizers.schedule == "step" else "epoch"
        return made, [{"scheduler": one, "interval": interval} for one in schedulers]


class Unfreezes(BaseFinetuning):
    """Adds the first layer to the optimizer in an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.02)


def callbacks_of(program: Any) -> list[Any]:
    callbacks: list[Any] = []
    for place, one in enumerate((program.first, *program.savers)):
        options = {"monitor": "score", "mode": "min"} if one.monitored else {}
        if one.steps is not None:
            options["every_n_train_steps"] = one.steps
        if place:
            options |= {"save_top_k": one.top_k, "save_weights_only": one.weights_only}
        callbacks.append(ModelCheckpoint(filename=f"{'abcd'[place]}-{{step}}", **options))
    if program.unfreeze.epoch is not None and program.unfreeze.by == "a group":
        callbacks.append(Unfreezes(program.unfreeze.epoch))
    if program.average.kind is not None:
        begins = 0 if program.average.kind == "epochs" else None
        callbacks.append(EMAWeightAveraging(decay=0.5, update_starting_at_epoch=begins))
    if program.early.patience is not None:
        callbacks.append(EarlyStopping("flat", patience=program.early.patience, mode="min"))
    if program.early.second:
        callbacks.append(EarlyStopping("falling", patience=1, mode="min"))
    if program.monitors.rates is not None:
        callbacks.append(LearningRateMonitor(program.monitors.rates))
    if program.monitors.norms:
        callbacks.append(GradNormMonitor())
    if program.ending.how == "rewound":
        callbacks.append(BadStepGuard("rewind", z_score=None, max_bad_steps=100))
    return callbacks


def loggers_of(program: Any, folder: Path) -> list[Any]:
    kinds = {
        "csv": CSVLogger,
        "jsonl": JSONLLogger,
        "csv2": lambda: CSVLogger(folder / "second"),
        "jsonl2": lambda: JSONLLogger(folder / "second"),
        "tensorboard": TensorBoardLogger,
    }
    return [kinds[kind]() for kind in program.loggers.kinds.split()]


def run_process(program: Any, folder: Path, stop: Stop | None, epochs: int) -> list[float]:
    """Run one process of the program; return the weights that `fit` leaves."""
    callbacks, max_steps = callbacks_of(program), -1
    if stop is not None and stop.how == "end":
        max_steps = stop.number
    elif stop is not None and stop.place == "write":
        point = fault_points.Fault(WRITES[stop.number % len(WRITES)], "kill", 1 + stop.number // 2)
        os.environ[fault_points.VARIABLE] = str(point)
        fault_points._trigger = lambda fault: os._exit(9)  # type: ignore[assignment]
    elif stop is not None:
        lengths = dict.fromkeys(range(epochs), several.BATCHES)
        callbacks.insert(0 if stop.early else len(callbacks), stop_at(stop, lengths, lambda: os._exit(9)))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        seed=3,
        default_root_dir=folder,
        logger=loggers_of(program, folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=program.loggers.every,
        max_epochs=epochs,
        max_steps=max_steps,
        val_check_interval=program.vals.interval,
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )
    module = Net(program)
    train = DataLoader([several.objects.sample(number) for number in range(2 * several.BATCHES)], 2)
    vals = [DataLoader([*several.val_batches(n)], batch_size=None) for n in range(program.vals.number)]
    trainer.fit(module, train, vals[0] if len(vals) == 1 else vals, ckpt_path="last")
    return several.flat(module.net)


def run_product(program: Any, folder: Path) -> list[float]:
    """Run all processes of the program; return the weights at the end of the last one."""
    logging.getLogger("trainer").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    whole = program.ending.epochs
    before = whole - 1 if program.ending.how == "extended" else whole
    processes: list[tuple[Stop | None, int]] = [*((stop, before) for stop in program.stops), (None, before)]
    processes += {"extended": [(None, whole)], "started again": [(None, whole)]}.get(program.ending.how, [])
    weights: list[float] = []
    for stop, epochs in processes:
        if stop is not None and stop.how == "kill":
            if (pid := os.fork()) == 0:
                try:
                    run_process(program, folder, stop, epochs)
                    os._exit(0)
                except BaseException as error:
                    (folder / "error").write_text(repr(error))
                    os._exit(1)
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1:
                raise RuntimeError((folder / "error").read_text())
            continue
        try:
            weights = run_process(program, folder, stop, epochs)
        except SystemExit as error:
            if error.code != 143:
                raise RuntimeError(f"exit code {error.code}") from error
        except StoppedError:
            pass
    return weights


# -- what is left ------------------------------------------------------------------------------------------------------


def left_in(folder: Path, program: Any) -> dict[str, Any]:
    """Return what a run has left: checkpoints with what they hold, pointers, and the logs."""
    run_dir = versions(folder)[-1]  # a process that is killed before it saves leaves one behind
    found: dict[str, Any] = {}
    directory = CheckpointDirectory(str(run_dir / "checkpoints"))
    for path in directory.list():
        state, info = read_checkpoint(path), read_manifest(path).info
        weights = [one for weight in state["model"].values() for one in weight.flatten().tolist()]
        average = [one for weight in state.get("average", {}).values() for one in weight.flatten().tolist()]
        found[f"checkpoint {path.name}"] = (info["step"], weights, average, repr(state["optimizers"]))
    found["last"], found["best"] = (one and one.name for one in map(directory.pointer, ("last", "best")))
    for place in ("version_*", "second"):
        for name in ("metrics.csv", "metrics.jsonl"):
            if files := sorted((path.stat().st_mtime_ns, path) for path in folder.glob(f"{place}/**/{name}")):
                lines = files[-1][1].read_text().splitlines()
                is_json = name.endswith("jsonl")  # where the order of names says nothing
                found[f"{place} {name}"] = [
                    json.dumps(json.loads(one), sort_keys=True) if is_json else one for one in lines
                ]
    if "tensorboard" in program.loggers.kinds:
        found["tensorboard"] = _tensorboard(run_dir)
    return found


def _tensorboard(run_dir: Path) -> dict[str, list[Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("scalars", "histograms", "tensors")
    events = EventAccumulator(str(run_dir), size_guidance=dict.fromkeys(kinds, 0))
    logging.getLogger("tensorboard").setLevel(logging.CRITICAL)
    events.Reload()
    found = {
        tag: [(one.step, getattr(one, "value", None)) for one in getattr(events, kind.title())(tag)]
        for kind in kinds
        for tag in events.Tags()[kind]
    }
    return {tag: points for tag, points in found.items() if not tag.startswith("hp")}


def points_in(found: dict[str, Any]) -> dict[str, dict[tuple[int, str], list[float]]]:
    """Return the points of each log, by step and name."""
    logs: dict[str, dict[tuple[int, str], list[float]]] = {}
    for name, lines in found.items():
        points: dict[tuple[int, str], list[float]] = {}
        if name.endswith("metrics.csv"):
            rows: list[Any] = [*csv.DictReader(lines)]
        elif name.endswith("metrics.jsonl"):
            rows = [row for row in map(json.loads, lines) if "kind" not in row and "hyperparameters" not in row]
        elif name == "tensorboard":
            rows = [{"step": step, tag: value} for tag, of in lines.items() for step, value in of if value is not None]
            rows = [row for row in rows if not isinstance([*row.values()][1], tuple)]
        else:
            continue
        for row in rows:
            for key, value in row.items():
                if key not in ("step", "epoch") and value not in ("", None) and not hasattr(value, "_fields"):
                    points.setdefault((int(row["step"]), key), []).append(float(value))
        logs[name] = points
    return logs


def check(program: Any, folder: Path) -> list[str]:
    """Return what is wrong with a program."""
    for name in ("whole", "broken"):
        (folder / name).mkdir()
    expected = several.run_by_hand(program)
    if not all(map(math.isfinite, expected.final)):
        return []
    plain = program.with_("stops", ())
    if program.ending.how in ("extended", "started again"):
        plain = plain.with_("ending", type(program.ending)(epochs=program.ending.epochs))
    final = run_product(plain, folder / "whole")
    whole = left_in(folder / "whole", program)
    problems = _unlike_by_hand(program, expected, final, whole)
    if problems or (not program.stops and program.ending.how in ("once", "rewound")):
        return problems
    again = run_product(program, folder / "broken")
    broken = left_in(folder / "broken", program)
    if again != final:
        return [f"weights after all processes: {again} instead of {final}"]
    # A process that is stopped writes its last checkpoint between those that are due, and no other at that step.
    stopped = any(stop.how in ("signal", "stop", "end") for stop in program.stops)
    # The run may have ended there, where another checkpoint of that step would have been written once more.
    if stopped or any(stop.place == "saved" for stop in program.stops):
        broken["last"], whole["last"] = (one["last"].partition("step=")[2] for one in (broken, whole))
    if stopped:
        whole["best"] = broken["best"] = None  # a stop's checkpoint may have a value
    savers = zip("abcd", (program.first, *program.savers), strict=False)
    loose = [f"checkpoint {letter}" for letter, one in savers if stopped and (one.monitored or _keeps_several(one))]
    for name in sorted({*whole, *broken}):
        if name.startswith(tuple(loose)):
            continue
        if stopped and name.startswith("checkpoint") and name in whole and name in broken:
            for one in (whole, broken):
                one[name] = one[name][:2]  # the end of an epoch at the stop is in it, and in one go it may not be
        if whole.get(name) != broken.get(name):
            return [f"{name}: {_shown(broken.get(name), whole.get(name))}"]
    return []


def _keeps_several(saver: Any) -> bool:
    return getattr(saver, "top_k", 1) != 1


def _shown(found: Any, wanted: Any) -> str:
    if isinstance(found, list) and isinstance(wanted, list):
        odd = [one for one in found if one not in wanted][:3], [one for one in wanted if one not in found][:3]
        return f"{len(found)} lines, such as {odd[0]}, instead of {len(wanted)}, such as {odd[1]}"
    if isinstance(found, dict) and isinstance(wanted, dict):
        return str(
            {key: (found.get(key), wanted.get(key)) for key in {*found, *wanted} if found.get(key) != wanted.get(key)}
        )
    return f"{str(found)[:300]} instead of {str(wanted)[:300]}"


def _unlike_by_hand(program: Any, expected: several.Expected, final: list[float], whole: dict[str, Any]) -> list[str]:
    if not all(map(several.close, final, expected.final)):
        return [f"weights: {final} instead of {expected.final}"]
    problems = []
    names = {name for _, name in expected.points}
    for log, points in points_in(whole).items():
        own = {key: values for key, values in points.items() if key[1] in names}
        if own.keys() != expected.points.keys():
            odd = sorted(own.keys() ^ expected.points.keys())[:5]
            problems.append(f"{log}: {odd} are in one of both")
            continue
        wrong = [
            (key, values, expected.points[key])
            for key, values in own.items()
            if len(values) != len(expected.points[key]) or not all(map(several.close, values, expected.points[key]))
        ]
        problems += [f"{log}: {wrong[:2]}"] if wrong else []
    for place, saver in enumerate((program.first, *program.savers)):
        kept, best = expected.kept(saver)
        prefix = f"checkpoint {'abcd'[place]}-"
        there = {value[0]: value for name, value in whole.items() if name.startswith(prefix)}
        if there.keys() != kept:
            problems.append(f"checkpoints {'abcd'[place]}: {sorted(there)} instead of {sorted(kept)}")
        for step, (_, weights, *_rest) in there.items():
            if not all(map(several.close, weights, expected.weights[step])):
                problems.append(f"checkpoint {'abcd'[place]} of step {step} holds other weights")
        if saver.monitored and not any(p["monitored"] for p in _before(program, place)):
            wanted = None if best is None else f"{'abcd'[place]}-step={best}"
            if whole["best"] != wanted:
                problems.append(f"best: {whole['best']} instead of {wanted}")
    return problems


def _before(program: Any, place: int) -> list[dict[str, Any]]:
    return [vars(one) for one in (program.first, *program.savers)[:place]]
