"""Checkpoints of an Engine: the state that a program names, the positions in its data, and the generators."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer.checkpoint.generator_states import check_rng_state, check_torch_states
from trainer.checkpoint.left_out import report_left_out, write_the_rest
from trainer.checkpoint.optimizer_state import renamed
from trainer.checkpoint.process_group import SINGLE_PROCESS
from trainer.checkpoint.schema import Integer
from trainer.checkpoint.storage import as_storage_path
from trainer.checkpoint.writing import write_checkpoint
from trainer.data.loader import has_state
from trainer.engine.loader import EngineLoader
from trainer.engine.model import MODEL, EngineModule, EngineOptimizer
from trainer.errors import CheckpointError, ConfigError, did_you_mean, first_of, restoring
from trainer.loop.training_state import (
    KINDS,
    counterpart,
    entries_of_processes,
    gather_states,
    load_optimizer,
    read_entries,
    restore_scaler,
)
from trainer.module import TrainModule
from trainer.state.held_generators import Generators, parts_of
from trainer.state.hook_changes import KIND as HOOK_CHANGES
from trainer.state.waiting_gradients import give_gradients, gradients_of
from trainer.strategy import has_gradients, synchronize_buffers

log = logging.getLogger("trainer")

_OF_TRAINER = ("model", "optimizers", "gradients?", "scaler", "rng", "loader")
_OF_PROCESSES = ("seed", "world_size", "reader_of", "reporters")
_KINDS: dict[str, Any] = {name: KINDS[name] for name in _OF_TRAINER + _OF_PROCESSES} | {
    "engine?": {
        "models": {str: str},
        "optimizers": [str],
        "stateful": {str: dict},
        "values": dict,
        "steps": Integer(),
        "changes?": {str: HOOK_CHANGES},
    }
}
"""The kinds of the entries that `load` reads, a Trainer's and an Engine's; further entries are allowed."""


def save(engine: Any, path: str | Path, state: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Write a checkpoint; see `Engine.save`. Collective."""
    parts, strategy = ProgramState(state, engine), engine.strategy
    tensors = parts.tensors()
    if parts.nonfinite:
        raise CheckpointError(
            f"{first_of(parts.nonfinite)} not finite: the checkpoint is not written, and an earlier one at {path} "
            "stays."
        )
    positions = engine.loaders.positions
    own = {
        "rng": Generators(parts.owners, strategy).state(saves=True),
        "loader": [one.state_dict() for one in positions],
    }
    per_rank = gather_states(own, strategy.processes)
    first = next(iter(parts.models.values())).module if parts.models else None
    hparams, kinds = first.hyperparameters_to_store() if isinstance(first, TrainModule) else ({}, {})
    scaler = engine._scaler
    entries = {  # entries that a Trainer writes, too, mean the same
        **tensors,
        "scaler": scaler.state_dict() if scaler is not None else {},
        "rng": [one["rng"] for one in per_rank],
        "loader": [{"loaders": one["loader"]} for one in per_rank],
        "engine": {**parts.data(), "steps": engine.steps},
        "hyperparameters": {"module": hparams, "data": {}, "kinds": {"module": kinds}},
        "seed": engine.seed,
        **entries_of_processes(strategy),
    }
    about = {"step": engine.steps, "epoch": positions[0].epoch if positions else 0, "captured": time.time_ns(), **info}
    processes, shards = strategy.processes, strategy.shards_state
    write = partial(write_checkpoint, path, overwrite=True, process_group=processes if shards else SINGLE_PROCESS)
    write_the_rest(lambda state, info: write(state, info=info), entries, about, {}, processes, shards)


def load(engine: Any, path: str | Path, state: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Restore a checkpoint; see `Engine.load`. Collective."""
    parts, strategy = ProgramState(state, engine), engine.strategy
    if parts.optimizers and engine._backwards and engine.loaders.in_training():
        raise ConfigError(
            "engine.load inside a loop over a loader: the weights would go back, and the data would not. Leave the "
            "loop (break), load, and begin it again: it continues with the batch after the checkpoint."
        )
    where = as_storage_path(path)
    checkpoint = read_entries(where, _KINDS, True, strategy.shards_state, strategy.processes)
    rest = parts.restore(checkpoint, strict, str(path), report_left_out(where, engine.is_global_zero))
    if parts.optimizers and "engine" in checkpoint:
        _resume(engine, checkpoint, str(path), parts)
        for key, changes in checkpoint["engine"].get("changes", {}).items():  # earlier versions have none
            if key in parts.models:
                parts.models[key]._changes.put_back_now(changes)
    return rest


def _resume(engine: Any, checkpoint: dict[str, Any], path: str, parts: ProgramState) -> None:
    """Restore the loaders' positions, the loss scale and the generators."""
    strategy, saved, alive = engine.strategy, checkpoint["loader"], engine.loaders.alive()
    training = sum(one._training for one in alive)
    known = sum(one.get("training", True) for one in saved[0]["loaders"])  # earlier versions do not say it
    if known < training:
        raise ConfigError(
            f"{path} has the positions of {known} training loaders, and this program has set up {training}: call "
            "engine.setup_dataloaders with the same loaders, in the same order, before engine.load."
        )
    restore_scaler(engine._scaler, checkpoint["scaler"])
    if int(checkpoint["seed"]) != engine.seed and alive:
        words = "the checkpoint has seed=%s, this Engine seed=%d: the order of samples changes. Give the same seed."
        log.warning(words, checkpoint["seed"], engine.seed)
    rank = counterpart(checkpoint, strategy.processes)
    states = saved[rank or 0]["loaders"]
    for one in states:
        check_torch_states(one["state"], f"{path}, 'loader'")
    engine.loaders.load_state_dict(states, exact=rank is not None)
    engine.go_on_from(int(checkpoint["engine"]["steps"]))
    generators = Generators(parts.owners, strategy)
    if rank is None:
        log.info("%s was written by another number of processes: random numbers (dropout) differ", path)
        generators.share()
    else:
        check_rng_state(checkpoint["rng"][rank], f"{path}, 'rng' of rank {rank}", strategy.device)
        generators.resume(checkpoint["rng"][rank], None)
        generators.restore()


class ProgramState:
    """The objects and data given to `save` or `load`, by kind.

    Raises:
        ConfigError: something is not set up.
    """

    def __init__(self, state: Mapping[str, Any], engine: Any) -> None:
        self.state, self.engine = state, engine
        self.models: dict[str, EngineModule] = {}
        self.optimizers: dict[str, EngineOptimizer] = {}
        self.stateful: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.nonfinite: list[str] = []
        """The names of tensors that `tensors` has found not to be finite; the same on all processes."""
        for key, value in state.items():
            if not isinstance(key, str) or key.endswith("."):
                raise ConfigError(f"the state has the key {key!r}: give a text that does not end with a dot.")
            self._sort(key, value)

    def _sort(self, key: str, value: Any) -> None:
        if isinstance(value, EngineModule):
            self.models[key] = value
        elif isinstance(value, EngineOptimizer):
            self.optimizers[key] = value
        elif isinstance(value, EngineLoader):
            pass  # the positions of all loaders are saved
        elif isinstance(value, (DataLoader, Optimizer)) or any(value is one.module for one in self.engine._models):
            raise ConfigError(
                f"state[{key!r}] is a {type(value).__name__} that is not set up: give what engine.setup returned. "
                "Loaders of engine.setup_dataloaders are saved without being named; leave them out of the state."
            )
        elif has_state(value):
            self.stateful[key] = value
        else:
            self.values[key] = value

    def owners(self) -> dict[str, Any]:
        """Return the models and optimizers, which may hold random generators, by name."""
        models = {f"model {key}": model.module for key, model in self.models.items()}
        return parts_of(models, {f"optimizer {key}": one.optimizer for key, one in self.optimizers.items()})

    def _prefixes(self, keys: Mapping[str, Any]) -> dict[str, str]:
        """Return prefixes for the models' names in a checkpoint; no model's names begin with another's prefix."""
        return {key: "" if len(keys) == 1 else _beginning(key, keys) for key in keys}

    def tensors(self) -> dict[str, Any]:
        """Return weights and optimizers' states; of sharded tensors this process's shards. Collective."""
        weights: dict[str, Any] = {}
        states: dict[str, Any] = {}
        gradients: dict[str, Any] = {}
        for key, prefix in self._prefixes(self.models).items():
            model, strategy = self.models[key], self.models[key]._strategy
            synchronize_buffers(strategy)
            of_model = strategy.module_state()
            mine = {name: one for name, one in self.optimizers.items() if one.model is model}
            own = {name: strategy.optimizer_state(one.optimizer) for name, one in mine.items()}
            found = model._finite.nonfinite({"model": of_model, "optimizers": list(own.values())})
            self.nonfinite += [_of_user(name, prefix, list(own)) for name in found]
            weights |= without_prefix(of_model, prefix)
            in_checkpoint = partial(_without, prefix=prefix)
            for name, one in mine.items():
                states[name] = renamed(own[name], in_checkpoint)
                gradients[name] = renamed(gradients_of(strategy, one.optimizer, one.waits), in_checkpoint)
        tensors = {"model": weights, "optimizers": [states[name] for name in self.optimizers]}
        if any(one.waits for one in self.optimizers.values()):
            tensors["gradients"] = [gradients[name] for name in self.optimizers]
        return tensors

    def data(self) -> dict[str, Any]:
        """Return the rest of the state, and how to find the models and optimizers."""
        return {
            "models": self._prefixes(self.models),
            "optimizers": list(self.optimizers),
            "stateful": {key: one.state_dict() for key, one in self.stateful.items()},
            "values": dict(self.values),
            "changes": {key: model._changes.state_dict() for key, model in self.models.items()},
        }

    def restore(self, checkpoint: Mapping[str, Any], strict: bool, path: str, left_out: list[str]) -> dict[str, Any]:
        """Restore the objects, replace the values in the state, and return the values that it does not name.

        `left_out`: the names of what the checkpoint could not hold, which may be missing.
        """
        saved = checkpoint["engine"] if "engine" in checkpoint else self._names_for_trainer(checkpoint, path)
        kinds: dict[str, Mapping[str, Any]] = {
            "models": self.models,
            "optimizers": self.optimizers,
            "stateful": self.stateful,
            "values": self.values,
        }
        if strict:
            self._require(kinds, saved, left_out, path)
        # In the order of the program, which is the same on all processes.
        known = {kind: [key for key in wanted if key in saved[kind]] for kind, wanted in kinds.items()}
        for key in known["models"]:
            with restoring("the weights"):
                own = _of_model(checkpoint["model"], saved["models"][key])
                self.models[key]._strategy.load_module_state(own, strict)
        for key in known["optimizers"]:
            self._restore_optimizer(self.optimizers[key], checkpoint, saved, saved["optimizers"].index(key))
        for key in known["stateful"]:
            with restoring(f"the state of {key}"):
                self.stateful[key].load_state_dict(saved["stateful"][key])
        values: dict[str, Any] = saved["values"]
        if isinstance(self.state, dict):
            self.state.update({key: values[key] for key in known["values"]})
        return {key: value for key, value in values.items() if key not in self.values}

    def _require(
        self, kinds: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Any], left_out: list[str], path: str
    ) -> None:
        """Raise CheckpointError for names of the state that the checkpoint lacks."""
        missing = [
            key
            for kind, wanted in kinds.items()
            for key in wanted
            if key not in saved[kind] and f"engine[{kind!r}][{key!r}]" not in left_out
        ]
        if missing:
            known = [*chain.from_iterable(saved[kind] for kind in kinds)]
            hint = did_you_mean(missing[0], known)
            raise CheckpointError(f"{path} has no {missing[0]!r}.{hint} It has: {', '.join(known) or 'nothing'}.")

    def _names_for_trainer(self, checkpoint: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the names that an Engine's checkpoint has for its parts, for a Trainer's checkpoint of one model."""
        names, number = list(self.optimizers), len(checkpoint["optimizers"])
        if len(self.models) > 1 or (names and len(names) != number):
            raise CheckpointError(
                f"{path} is a Trainer's checkpoint, with one model and {number} optimizers. Load it into one model "
                "that has the names of the TrainModule."
            )
        return {"models": dict.fromkeys(self.models, ""), "optimizers": names, "stateful": {}, "values": {}}

    def _restore_optimizer(
        self, optimizer: EngineOptimizer, checkpoint: Mapping[str, Any], saved: Mapping[str, Any], number: int
    ) -> None:
        key = next((key for key, model in self.models.items() if model is optimizer.model), None)
        prefix = saved["models"].get(key, "")
        strategy = optimizer.model._strategy
        weights = _of_model(checkpoint["model"], prefix)
        state = renamed(checkpoint["optimizers"][number], partial(_with, prefix=prefix))
        changes, restore_groups = saved.get("changes", {}).get(key), optimizer.model._changes.restore_groups
        regroup = None if changes is None else partial(restore_groups, optimizer.number, changes=changes)
        with restoring(f"the state of {type(optimizer.optimizer).__name__}"):
            load_optimizer(strategy, optimizer.optimizer, state, weights, regroup)
            optimizer.zero_grad()  # gradients of batches that a load inside the training takes back
            if gradients := checkpoint.get("gradients"):
                waiting = renamed(gradients[number], partial(_with, prefix=prefix))
                give_gradients(strategy, optimizer.optimizer, waiting)
                optimizer.waits = has_gradients(optimizer.optimizer)


def _beginning(key: str, keys: Iterable[str]) -> str:
    beginning = f"{key}."
    while any(other.startswith(beginning) for other in keys):
        beginning += "."  # no layer has a name that begins with a dot
    return beginning


def _of_model(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the weights of one model in a checkpoint, by the strategy's names."""
    return {_with(name, prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _with(name: str, prefix: str) -> str:
    """Return the strategy's name for a name in a checkpoint."""
    return MODEL + name.removeprefix(prefix)


def _without(name: str, prefix: str) -> str:
    """Return the name in a checkpoint for one of the strategy's names."""
    return prefix + name.removeprefix(MODEL)


def _of_user(name: str, prefix: str, optimizers: list[str]) -> str:
    """Return the name in messages for a tensor that a `StateMonitor` has found in a model or its optimizers."""
    if name.startswith("model."):
        return _without(name.removeprefix("model."), prefix)
    _, number, rest = name.split(".", 2)
    return f"{optimizers[int(number)]}.{rest.replace(MODEL, prefix, 1)}"


def without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {_without(name, prefix): value for name, value in state.items()}
