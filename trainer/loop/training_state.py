"""Write the state of a training to a checkpoint, and restore a training from its entries."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.arguments import local_path
from trainer.callback import Checkpoint
from trainer.checkpoint.base_weights import check_base, check_names, weight_sums
from trainer.checkpoint.disk import WriteError, temporary_path_for
from trainer.checkpoint.format import open_checkpoint, read_checkpoint
from trainer.checkpoint.generator_states import check_rng_state, check_torch_states
from trainer.checkpoint.hook_checkpoint import HYPERPARAMETERS, loaded_by_hooks, saved_by_hooks
from trainer.checkpoint.left_out import write_the_rest
from trainer.checkpoint.lightning_file import (
    FilesBeside,
    Save,
    file_of,
    lightning_entries,
    remove_beside,
    save_file,
    save_with_objects,
    share_written,
    write_beside,
    writes_file,
)
from trainer.checkpoint.optimizer_state import OPTIMIZER, check_shapes, with_dtypes_of, with_names
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.schema import NUMBER, Integer, unlike, wrong
from trainer.checkpoint.storage import StoragePath, as_storage_path
from trainer.checkpoint.writing import write_checkpoint
from trainer.data.datamodule import DataModule, state_of_data
from trainer.data.loader import BatchLoader
from trainer.data.transfer import map_tensors
from trainer.distributed.process_group import SingleProcess
from trainer.errors import CheckpointError, printable, restoring
from trainer.fault_tolerance.stop import exit_code
from trainer.guards.host_times import SAVING
from trainer.loop.callback_list import CallbackList
from trainer.loop.progress import Progress
from trainer.loop.run import Run
from trainer.metrics.monitor import Measured
from trainer.metrics.phases import CHECKPOINT
from trainer.metrics.reductions import REDUCTIONS
from trainer.metrics.state import load_metrics_state, metrics_state
from trainer.model.adapters import adapters
from trainer.model.hugging_face import hugging_face_models
from trainer.model.weights import match_buffers
from trainer.names.states import runs_as_lightning
from trainer.runs.callback_states import callbacks_by_state_key, identities, owners_of_states, states_of_generators
from trainer.seed import global_seed
from trainer.settings import Settings
from trainer.state import hook_changes
from trainer.state.held_generators import with_generators, without_generators
from trainer.state.waiting_gradients import restore_gradients, waiting_gradients
from trainer.strategy import Strategy, given_checkpoint_io, synchronize_buffers

log = logging.getLogger("trainer")

# -- writing -----------------------------------------------------------------------------------------------------------


def tensor_state(run: Run) -> dict[str, Any]:
    """Return weights, buffers and optimizer states; of sharded tensors this process's shards. Collective."""
    synchronize_buffers(run.strategy)
    return {
        "model": run.strategy.module_state(),
        "optimizers": [run.strategy.optimizer_state(optimizer) for optimizer in run.optimizers],
        **({"gradients": gradients} if (gradients := waiting_gradients(run)) else {}),
    }


def training_state(run: Run, tensors: dict[str, Any], callbacks: dict[str, Any]) -> dict[str, Any]:
    """Return everything that a run needs to resume as if it had never stopped, as data. Collective.

    `KINDS` lists the type of each entry; the functions below restore the entries.

    Args:
        tensors: what `tensor_state` returned.
        callbacks: the states of those that write no checkpoints, by key.
    """
    strategy, session = run.strategy, run.session
    run.facts.leave_out_changing(run.train_loader)
    own = {
        # Before the first step of a resumed run the checkpoint's states are still to be restored.
        "rng": run.generators.to_restore or run.generators.state(saves=True),
        "epoch_rng": run.generators.state_of_epoch(),
        "loader": run.guards.skipping.loader_state or _state_of(run.loaders.train),
        "metrics": metrics_state(run.metrics),
        "hook_changes": run.hook_changes.state_dict(),
        "postponed_stop": run.clock.postponed_stop,
    }
    per_rank = gather_states(own, strategy.processes)
    entries = {name: [state[name] for state in per_rank] for name in own}
    return {
        **tensors,
        **entries,
        "postponed_stop": next(filter(None, entries["postponed_stop"]), None),
        "schedulers": [without_generators(config.scheduler.state_dict()) for config in run.scheduler_configs],
        "scaler": _state_of(strategy.scaler),
        "progress": run.progress.state_dict(),
        "global_micro_batch": _global_micro_batch(run),
        **({} if session.fitting_samples is None else {"fitting_samples": session.fitting_samples}),
        "callback_metrics": dict(session.latest.all),
        "measured": {name: measured._asdict() for name, measured in session.latest.measured.items()},
        "scheduler_values": [config.value_step for config in run.scheduler_configs],
        "followed_buffers": sorted(run.guards.followed_buffers),
        "callbacks": {
            key: state
            for key, c in callbacks_by_state_key(run.callbacks).items()
            if (state := callbacks[key] if key in callbacks else c.state_dict())
        },
        "callback_identities": identities(run.callbacks),
        "data": _state_of(run.datamodule),
        "hyperparameters": run.hyperparameters(),
        "hugging_face": hugging_face_models(run.module),
        "adapters": adapters(run.module, tensors["model"]),
        "processing": run.processing_files,
        "config": session.config_text,
        "seed": session.seed,
        "run_dir": name_of_run_dir(session.run_dir, run.settings),
        "facts": dict(run.facts.kept),
        **entries_of_processes(strategy),
    }


def _state_of(owner: Any) -> dict[str, Any]:
    """Return the state of a part of a run; empty if the run lacks it."""
    state: dict[str, Any] = {} if owner is None else owner.state_dict()
    return state


def gather_states(own: dict[str, Any], processes: SingleProcess) -> list[dict[str, Any]]:
    """Return the states of all processes. Collective."""
    if processes.world_size > 1:
        # Here, so that the copies of other processes are on the CPU as well as its own.
        own = map_tensors(own, torch.Tensor.cpu)
    return processes.all_gather_object(own)


def entries_of_processes(strategy: Strategy) -> dict[str, Any]:
    """Return the entries that name the processes, and what they run."""
    return {
        "world_size": strategy.processes.world_size,
        "reader_of": list(strategy.processes.reader_of),
        "reporters": list(strategy.processes.reporters),
        "strategy": strategy.name,
        "precision": strategy.precision.name,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }


_OPTIONS = {
    "reduction": REDUCTIONS,
    "on_step": (bool, None),
    "on_epoch": (bool, None),
    "prog_bar": bool,
    "logger": bool,
    "metric": (str, None),
}
_ENTRY = {
    "options": _OPTIONS,
    "epoch": {
        "reduction": REDUCTIONS,
        "on_host": (NUMBER, None),
        "on_device": (torch.Tensor, None),
        "weight_on_host": NUMBER,
        "weight_on_device?": (torch.Tensor, None),
        "pending": torch.Tensor,
        "pending_weights": [NUMBER],
    },
}
_METRICS = {
    "train": {str: _ENTRY},
    "steps?": {str: {"options": _OPTIONS, "values": [[(NUMBER, torch.Tensor)]]}},
    "hooks": {str: _ENTRY},
    "names?": [str],
    "trackers?": {str: Integer()},
    "objects": {str: {"updates": Integer(), "state": {str: object}, "beside?": {str: object}}},
}
_MAX_COUNT = 2**53
KINDS: dict[str, Any] = {
    "model": dict,
    "base?": {str: Integer(0, 2**53)},
    "optimizers": [OPTIMIZER],
    "gradients?": [OPTIMIZER],
    "schedulers": [dict],
    "scaler": dict,
    "progress": {
        name: bool if first is False else Integer(first, _MAX_COUNT) for name, first in asdict(Progress()).items()
    },
    "global_micro_batch?": (Integer(1), None),
    "fitting_samples?": Integer(1),
    "rng": [dict],
    "epoch_rng": [{"epoch": Integer(), "loaders": dict, "hook": dict}],
    "loader": [dict],
    "metrics": [_METRICS],
    "hook_changes": [hook_changes.KIND],
    "callback_metrics": {str: NUMBER},
    "measured": {str: {"value": NUMBER, "step": Integer(-1), "kind": ("step", "interim", "epoch", "validation")}},
    "scheduler_values": [(Integer(-1), None)],
    "postponed_stop": (str, None),
    "added?": dict,
    "followed_buffers": [str],
    "average?": dict,
    "evaluated?": "average",
    "callbacks": {str: dict},
    "callback_identities?": {str: {"of": str, "made_with": str}},
    "data": dict,
    "hyperparameters": {str: dict},
    "hugging_face?": {str: dict},
    "adapters?": {str: {str: dict}},
    "processing?": {str: str},
    "config": (str, None),
    "seed": Integer(),
    "run_dir": str,
    "world_size": Integer(1),
    "reader_of": [Integer()],
    "reporters": [Integer()],
    "strategy": str,
    "precision": str,
    "facts": {str: {str: str}},
    "versions": dict,
}
"""The kinds of the entries (see `schema.Kind`), but for contents that their owners check; more entries are allowed."""

PER_PROCESS = ("rng", "epoch_rng", "loader", "metrics", "hook_changes", "reader_of")
"""Entries that are lists with one item per process."""

SHARDED_KEYS = ("model", "average", "optimizers", "gradients")
"""Entries whose tensors may be sharded, because they may not fit into the memory of one process."""

# -- reading, in running order -----------------------------------------------------------------------------------------


def read_entries(
    path: str | StoragePath, kinds: Mapping[str, Any], verify: bool, sharded: bool, peers: ProcessGroup
) -> dict[str, Any]:
    """Read the checkpoint of a Trainer or an Engine, and check its entries; see `load_training_state`."""
    checkpoint = open_checkpoint(path, SHARDED_KEYS, verify, peers) if sharded else read_checkpoint(path, verify=verify)
    problem = wrong(checkpoint, kinds, "the checkpoint") or _wrong_length(checkpoint)
    if problem is not None:
        raise CheckpointError(
            f"{path} is not a checkpoint of a training, or is one of another version of this package: {problem}. "
            "For the weights alone: load_from_checkpoint, or trainer checkpoint export."
        )
    return checkpoint


def load_training_state(
    path: str | StoragePath, verify: bool = True, sharded: bool = False, peers: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """Read a checkpoint of a Trainer, and check its entries.

    Args:
        path: the checkpoint's folder.
        verify: check the hashes of its files.
        sharded: return the tensors of `SHARDED_KEYS` as `StoredTensor`s, unread. Collective over `peers`, which share
            the verification.

    Raises:
        CheckpointError: the checkpoint cannot be read, or an entry is missing or of another type.
    """
    checkpoint = read_entries(path, KINDS, verify, sharded, peers)
    for rank, (rng, of_epoch) in enumerate(zip(checkpoint["rng"], checkpoint["epoch_rng"], strict=True)):
        check_rng_state(rng, f"{path}, 'rng' of rank {rank}")
        for state in filter(None, (of_epoch["loaders"], of_epoch["hook"])):
            check_rng_state(state, f"{path}, 'epoch_rng' of rank {rank}")
        check_torch_states(checkpoint["loader"][rank], f"{path}, 'loader' of rank {rank}")
    return checkpoint


def choose_seed(given: int | None, checkpoint: Mapping[str, Any] | None, processes: SingleProcess) -> int:
    """Return the given seed, else the checkpoint's, else a new one for all ranks. Collective."""
    if given is not None:
        return given
    if checkpoint is not None:
        return int(checkpoint["seed"])
    last = global_seed()
    return processes.broadcast_object(int.from_bytes(os.urandom(4), "little") if last is None else last)


def load_weights(strategy: Strategy, checkpoint: Mapping[str, Any]) -> None:
    """Load the weights; of a checkpoint of trained weights alone, those that the module's base model lacks. Collective.

    Raises:
        CheckpointError: the module has another base model.
    """
    match_buffers(strategy.module, checkpoint["model"])
    if "base" in checkpoint:
        _require_base(strategy, checkpoint)
    strategy.load_module_state(checkpoint["model"], strategy.module.strict_loading and "base" not in checkpoint)


def _require_base(strategy: Strategy, checkpoint: Mapping[str, Any]) -> None:
    """Check that the module has the base model of a checkpoint of trained weights alone. Collective."""
    saved, own, name = checkpoint["base"], strategy.module_state(), type(strategy.module).__name__
    names = [weight for weight in saved if weight in own]
    check_base(saved, weight_sums(own, names, strategy.processes.all_gather_object), name)
    check_names(checkpoint["model"], saved, own, strategy.module.strict_loading, name)


def restore_training(run: Run, checkpoint: Mapping[str, Any] | None) -> None:
    """Restore optimizers, schedulers, counters, metrics, callbacks and random numbers.

    Does nothing without a checkpoint. Stages other than `fit` restore the counters, and the states of callbacks; those
    that write checkpoints keep their own.

    Raises:
        CheckpointError: the checkpoint was written with other optimizers or schedulers.
    """
    if checkpoint is None:
        return
    rank = counterpart(checkpoint, run.strategy.processes)
    changes = checkpoint["hook_changes"][rank or 0]
    if run.stage == "fit":
        _restore_optimizers(run, checkpoint, changes)
        _restore_values(run, checkpoint)
        run.hook_changes.load_state_dict(changes)
        _restore_place(run, checkpoint, rank)
    else:
        run.progress.load_state_dict(checkpoint["progress"])
        run.hook_changes.put_back_now(changes, flags=False)
    _restore_callbacks(run, checkpoint)


def _restore_optimizers(run: Run, checkpoint: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Restore optimizers with their gradients, schedulers, and the loss scale."""
    strategy = run.strategy
    _require_same_number("optimizers", checkpoint["optimizers"], run.optimizers)
    _require_same_number("schedulers", checkpoint["schedulers"], run.scheduler_configs)
    regroups = len(changes["groups"]) == len(run.optimizers)
    for number, (optimizer, state) in enumerate(zip(run.optimizers, checkpoint["optimizers"], strict=True)):
        with restoring(f"the state of {type(optimizer).__name__}"):
            state = checkpoint["optimizers"][number] = with_names(run.module, optimizer, state)
            regroup = partial(run.hook_changes.restore_groups, number, changes=changes) if regroups else None
            load_optimizer(strategy, optimizer, state, checkpoint["model"], regroup)
    with restoring("the gradients that wait"):
        restore_gradients(run, checkpoint.get("gradients", ()))
    for config, state in zip(run.scheduler_configs, checkpoint["schedulers"], strict=True):
        _restore_scheduler(config.scheduler, state)
    run.optimizer_averages.train()
    restore_scaler(strategy.scaler, checkpoint["scaler"])


def load_optimizer(
    strategy: Strategy,
    optimizer: Optimizer,
    state: dict[str, Any],
    weights: Mapping[str, Any],
    regroup: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Load a saved state into an optimizer. Collective.

    Args:
        weights: the weights of the same checkpoint.
        regroup: first restores the groups that hooks have changed; None: the checkpoint does not have them.
    """
    check_shapes(strategy.module, state)
    if regroup is not None:
        regroup(state)
    strategy.load_optimizer_state(optimizer, with_dtypes_of(state, weights))


def restore_scaler(scaler: Any, saved: dict[str, Any]) -> None:
    """Restore the loss scale, if both the checkpoint and this run have one."""
    if scaler is not None and saved:
        _require_alike(saved, scaler.state_dict(), "the loss scale")
        with restoring("the loss scale"):
            scaler.load_state_dict(saved)


def _restore_values(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Restore the counters, and the logged values."""
    run.session.latest.all.update(checkpoint["callback_metrics"])
    with restoring("the monitored values"):
        run.session.latest.measured.update({name: Measured(**one) for name, one in checkpoint["measured"].items()})
    for config, step in zip(run.scheduler_configs, checkpoint["scheduler_values"], strict=False):
        config.value_step = step
    run.progress.resume(checkpoint["progress"])
    run.loader_epochs.reload_if_due()  # after a rewind
    _count_in_own_batches(run, checkpoint)
    with restoring("the logged values"):
        load_metrics_state(run.metrics, _metrics_for(checkpoint, run.strategy.processes), run.strategy.device)


def _restore_place(run: Run, checkpoint: Mapping[str, Any], rank: int | None) -> None:
    """Restore the random numbers and the place in the data of a rank; with None, neither."""
    stop, followed = checkpoint["postponed_stop"], checkpoint["followed_buffers"]
    run.clock.postpone(stop)
    run.guards.resume(followed)
    if rank is None:
        log.info(
            "the checkpoint was written by %d processes and is read by %d: the order of the samples stays the "
            "same, other random numbers (dropout) differ",
            len(checkpoint["reporters"]),
            run.strategy.processes.readers,
        )
        return
    rng, of_epoch = checkpoint["rng"][rank], checkpoint["epoch_rng"][rank]["hook"]
    check_rng_state(rng, f"{run.origin}, 'rng' of rank {rank}", run.strategy.device)
    of_epoch = of_epoch and states_of_generators(run.callbacks, checkpoint, of_epoch)
    run.generators.resume(states_of_generators(run.callbacks, checkpoint, rng), of_epoch or None)
    # Loaders that were made for a later epoch begin at their first batch.
    same = run.loader_epochs.same_loaders(checkpoint["progress"]["epoch"])
    assert run.loaders.train is not None
    if checkpoint["loader"][rank] and same:
        run.loaders.train.load_state_dict(checkpoint["loader"][rank])


@contextmanager
def drawing_as_before(run: Run, checkpoint: dict[str, Any] | None) -> Iterator[None]:
    """Have the first loaders of a resumed run draw the same random numbers as in the run before."""
    rank = None if checkpoint is None or run.stage != "fit" else counterpart(checkpoint, run.strategy.processes)
    if checkpoint is None or rank is None:
        yield
        return
    of_epoch, rng = checkpoint["epoch_rng"][rank], checkpoint["rng"]
    made = run.loader_epochs.made_for(run.progress.epoch) == of_epoch["epoch"]
    run.generators.draw_loaders_from(of_epoch["loaders"] or None if made else rng[rank])
    yield
    if not made:  # the run continues with the states after they were made
        left = run.generators.state()
        rng[rank] = {**left, "own": {**rng[rank].get("own", {}), **left["own"]}}


def counterpart(checkpoint: Mapping[str, Any], processes: SingleProcess) -> int | None:
    """Return the rank whose random numbers and data this process continues; None: the number of readers differs.

    It is this process's rank if that rank belonged to the same reader.
    """
    reporters = checkpoint["reporters"]
    if len(reporters) != processes.readers:
        return None
    own = checkpoint["reader_of"][processes.rank : processes.rank + 1]
    return processes.rank if own == [processes.reader] else reporters[processes.reader]


def _metrics_for(checkpoint: Mapping[str, Any], processes: SingleProcess) -> list[dict[str, Any]]:
    """Return the logged values that this process continues.

    With another number of readers, a process merges the values of several readers, or of none.
    """
    reader_of, reporters = checkpoint["reader_of"], checkpoint["reporters"]
    if (*reader_of,) == processes.reader_of and (*reporters,) == processes.reporters:
        return [checkpoint["metrics"][processes.rank]]
    return [checkpoint["metrics"][rank] for rank in reporters][processes.reader :: processes.readers]


def _restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Restore a scheduler, whose `load_state_dict` takes whatever it is given for its attributes."""
    what = f"the state of {type(scheduler).__name__}"
    current = scheduler.state_dict()
    state = with_generators(state, current)
    _require_alike(state, current, what, type(scheduler))
    with restoring(what):
        scheduler.load_state_dict(state)


def _require_alike(saved: Any, current: Any, what: str, reserved: type | None = None) -> None:
    found = unlike(saved, current, what, reserved)
    if found is not None:
        raise CheckpointError(f"{found}: the checkpoint is damaged, or was written with another scheduler or scaler")


def restore_data(datamodule: DataModule | None, checkpoint: Mapping[str, Any]) -> None:
    """Restore the data module, before it is asked for loaders."""
    if datamodule is not None and (state := state_of_data(type(datamodule), checkpoint)):
        with restoring("the state of the data module"):
            datamodule.load_state_dict(state)


def _restore_callbacks(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Restore the callbacks; warn of callbacks and a data module that only the checkpoint has."""
    states, training = owners_of_states(run.callbacks, checkpoint), run.stage == "fit"
    for key, callback in states.owners.items():
        # Which checkpoints there are concerns training: an older one that is tested knows less of it.
        if key in checkpoint["callbacks"] and (training or not isinstance(callback, Checkpoint)):
            with restoring(f"the state of the callback {key}"):
                callback.load_state_dict(checkpoint["callbacks"][key])
    if not training or run.settings.fast_dev_run or not run.strategy.processes.is_global_zero:
        return
    unused = [*states.ambiguous, *(f"the callback {key}" for key in states.unused)]
    if run.datamodule is None and checkpoint["data"]:
        unused.append("the data module")
    if unused:
        log.warning(
            "the checkpoint has the state of %s, which this run does not have, or has several times: that state is not "
            "used, and later checkpoints lack it. To continue it, give the same callbacks, with the same arguments or "
            "each with a `state_key`, and the same data module. The checkpoints that a callback has written stay, and "
            "are not deleted.",
            printable(", ".join(unused)),
        )


# -- going back --------------------------------------------------------------------------------------------------------


def rewind(run: Run, path: str, loggers: CallbackList) -> None:
    """Restore weights, optimizers, counters, data and callbacks from a checkpoint of this run. Collective.

    Args:
        loggers: their hooks; they cut what they have of later steps, as in a resumed run.
    """
    strategy, before = run.strategy, run.progress.step
    run.clock.watchdog.expect_slow_work()
    checkpoint = load_training_state(as_storage_path(path), True, strategy.shards_state, strategy.processes)
    strategy.release_gathered()
    run.values.forget()
    run.epoch.leave()
    run.guards.gradient_norms.forget()
    loggers.teardown(run.stage)
    loggers.setup(run.stage)
    with loaded_by_hooks(checkpoint) as shown:
        run.hooks.on_load_checkpoint(shown)
    load_weights(strategy, checkpoint)
    restore_data(run.datamodule, checkpoint)
    restore_training(run, checkpoint)
    assert run.loaders.train is not None
    run.loaders.train.close()
    loggers.on_train_start()
    strategy.processes.log.warning("went back from step %d to step %d, to %s", before, run.progress.step, path)


# -- saving ------------------------------------------------------------------------------------------------------------


def save_state(
    run: Run,
    write: Callable[[dict[str, Any], dict[str, Any]], None],
    info: Mapping[str, Any] | Callable[[list[str]], Mapping[str, Any]],
    weights_only: bool = False,
) -> None:
    """Pass the run's state to `write`; see `Trainer.save_with`. Collective."""
    strategy = run.strategy
    with (
        run.clock.saving(),
        run.phase(CHECKPOINT),
        run.times.during(SAVING),
        run.optimizer_averages.trained() as averages,
    ):
        if run.stage == "fit":
            run.values.flush_step()  # a resumed run does not log the step again
        tensors = tensor_state(run)
        callbacks = {
            key: run.saves.logged_before.get(id(c)) or c.state_dict()
            for key, c in callbacks_by_state_key(run.callbacks).items()
            if not isinstance(c, Checkpoint)  # what those keep depends on what is found
        }
        schedulers = [config.scheduler.state_dict() for config in run.scheduler_configs]
        looked_at = {**tensors, "schedulers": schedulers, "callbacks": callbacks}
        nonfinite = run.guards.nonfinite.check_state(looked_at, reported=callable(info))
        about = {**_about(run), **(info(nonfinite) if callable(info) else info)}
        if nonfinite:
            about["nonfinite"] = nonfinite
        state = training_state(run, tensors, callbacks)
        if averages:
            state |= {"average": averages, "evaluated": "average"}
        with saved_by_hooks(state) as shown:
            run.hooks.on_save_checkpoint(shown)
        run.saves.keep_objects(shown.objects)
        weights_alone: dict[str, Any] = {"optimizers": [], "schedulers": [], "scaler": {}, "gradients": []}
        if weights_only:
            about["weights_only"] = True
            state |= weights_alone
        for logger in run.loggers if strategy.processes.is_global_zero else ():
            logger.flush()
        loaders: dict[str, Any] = {"loader": [{} for _ in state["loader"]]}
        write_the_rest(write, state, about, weights_alone | loaders, strategy.processes, strategy.shards_state)


def _about(run: Run) -> dict[str, Any]:
    """Return the facts for a checkpoint's manifest: step, epoch, times, whether the training ends."""
    progress = run.progress
    about: dict[str, Any] = {"step": progress.step, "epoch": progress.epoch, "captured": time.time_ns()}
    if run.session.began is not None:
        about["began"] = run.session.began
    if run.stage == "fit":
        about["finished"] = run.clock.is_complete(progress.epoch + progress.epoch_ended)
        reason = run.clock.stop_reason or run.clock.coordinator.wanted
        if reason is not None and not exit_code(reason):
            about["stopped"] = reason.partition(":")[0]
    return about


@contextmanager
def writer_to(
    run: Run, path: str | Path, single_file: bool | None, group: ProcessGroup
) -> Iterator[Callable[[dict[str, Any], dict[str, Any]], None]]:
    """Give the function that `save_state` calls to write a checkpoint folder, or a single file. Collective.

    The file is made on rank 0 of a temporary folder, into which all processes have written their shards.

    Args:
        single_file: see `Trainer.save_checkpoint`.
        group: the processes that write together.

    Raises:
        ConfigError: a single file would have a URL.
    """
    file = as_storage_path(path)
    by_plugin = given_checkpoint_io(run.strategy) is not None
    if not writes_file(single_file, file, by_plugin) or not isinstance(file, Path):
        yield lambda state, about: write_checkpoint(path, state, info=about, process_group=group)
        return
    processes = run.strategy.processes
    near = file.with_name(processes.broadcast_object(temporary_path_for(file).name))

    def write(state: dict[str, Any], about: dict[str, Any]) -> None:
        write_checkpoint(near / "checkpoint", state, info=about, process_group=group)
        if processes.is_global_zero:
            entries = {**_lightning_entries(run, near / "checkpoint"), "epoch": run.progress.epoch}
            save_with_objects(_save_of(run), entries, file, _objects(run, entries, run.saves.objects))

    try:
        yield write
        share_written(processes)
    finally:
        if processes.is_global_zero:
            shutil.rmtree(near, ignore_errors=True)


def files_beside(run: Run) -> FilesBeside:
    """Return how the run's files are written and removed, by a plugin if there is one."""
    plugin = given_checkpoint_io(run.strategy)

    def writer() -> Callable[[Path], None]:
        saved, save = run.saves.objects, _save_of(run)

        def write(folder: Path) -> None:
            entries = _lightning_entries(run, folder)
            objects = _objects(run, entries, saved)
            write_beside(folder, entries, partial(save_with_objects, save, objects=objects))

        return write

    return FilesBeside(
        writer,
        remove_beside if plugin is None else lambda folder: plugin.remove_checkpoint(str(file_of(folder))),
    )


def _objects(run: Run, entries: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint cannot store: what hooks have added, and hyperparameters that are not data."""
    if not runs_as_lightning():
        return {}
    stored, added = entries[HYPERPARAMETERS], saved.get(HYPERPARAMETERS, {})
    left_out = {name: value for name, value in run.module.hparams.items() if name not in stored}
    return {**saved, HYPERPARAMETERS: {**left_out, **added}} if left_out or added else {**saved}


def _save_of(run: Run) -> Save:
    plugin = given_checkpoint_io(run.strategy)
    if plugin is None:
        return save_file

    def save(checkpoint: dict[str, Any], path: Path) -> None:
        try:
            plugin.save_checkpoint(checkpoint, str(path))
        except Exception as error:
            raise WriteError(f"{type(plugin).__name__}.save_checkpoint failed for {path}: {error!r}") from error

    return save


def _lightning_entries(run: Run, folder: StoragePath) -> dict[str, Any]:
    callbacks = callbacks_by_state_key(run.callbacks)
    own = [key for key, one in callbacks.items() if not type(one).__module__.startswith("trainer.")]
    return lightning_entries(folder, type(run.datamodule).__qualname__, own)


def name_of_run_dir(run_dir: Path, settings: Settings) -> str:
    """Return the path of a run directory for checkpoints: in a relative `default_root_dir` it is relative.

    So a project and its checkpoints can be moved together.
    """
    inside = run_dir.parent == settings.root
    return str(local_path(settings.default_root_dir) / run_dir.name if inside else run_dir)


# -- parts -------------------------------------------------------------------------------------------------------------


def _global_micro_batch(run: Run) -> int | None:
    """Return the samples of a micro-batch, summed over all readers; None: unknown."""
    size = run.train_loader.batch_size if run.train_loader is not None else None
    return None if size is None else size * run.strategy.processes.readers


def _count_in_own_batches(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Turn the run's counters from micro-batches of the checkpoint's run into micro-batches of this one.

    They are not turned if the micro-batches grow while a run trains: it began with the same ones as the run before.
    """
    progress, loader = run.progress, run.train_loader
    now, before = _global_micro_batch(run), checkpoint.get("global_micro_batch")
    alike = before == now or checkpoint["facts"].get("micro_batch", {}) == run.facts.kept.get("micro_batch")
    if loader is not None and before is not None and now is not None and not alike:
        progress.count_in_batches(place_in_epoch(loader, progress.batch, before, now), before, now)


def place_in_epoch(loader: BatchLoader, batch: int, before: int, now: int) -> int:
    """Return the micro-batches of an epoch that are consumed, in micro-batches of `now` samples over all readers.

    Args:
        batch: the consumed micro-batches of `before` samples.
    """
    consumed = batch * before
    if loader.samples_per_epoch is not None and loader.max_length is not None and consumed >= loader.samples_per_epoch:
        return loader.max_length
    batch, again = divmod(consumed, now)
    if again:
        log.warning(
            "the checkpoint lies inside one of this run's batches of %d samples (over all processes): %d samples of "
            "this epoch are used a second time",
            now,
            again,
        )
    return batch


def _require_same_number(what: str, saved: list[Any], current: list[Any]) -> None:
    if len(saved) != len(current):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} {what}, but configure_optimizers gave {len(current)}: use the same ones "
            "to resume, or load_from_checkpoint for a new training from these weights."
        )


def _wrong_length(checkpoint: dict[str, Any]) -> str | None:
    size = checkpoint["world_size"]
    for name in PER_PROCESS:
        if name in checkpoint and len(checkpoint[name]) != size:
            return f"{name!r} has {len(checkpoint[name])} entries for {size} processes"
    reader_of, reporters = checkpoint["reader_of"], checkpoint["reporters"]
    readers = [reader_of[rank] if rank < size else None for rank in reporters]
    if readers != list(range(len(reporters))) or not {*reader_of} <= {*readers}:
        return "'reader_of' and 'reporters' do not fit each other"
    return None
