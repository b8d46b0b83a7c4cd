"""Keep changes by hooks in checkpoints: frozen parameters, modes, plain values of the module, groups of optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.arguments import with_python_numbers
from trainer.checkpoint.optimizer_state import set_groups
from trainer.errors import first_of, printable
from trainer.model.weights import drop_later_buffers, note_later_buffers, saved_buffers
from trainer.module import TrainModule
from trainer.optimizers import optimizers_inside, with_modes
from trainer.strategy import modes_in_training

log = logging.getLogger("trainer")

PLAIN = (bool, int, float, str, None)
KIND = {"values": {str: {"made?": PLAIN, "began?": PLAIN, "now?": PLAIN}}, "groups": [int], "names?": {str: [[str]]}}
"""The value of `HookChanges.state_dict`; a value that an attribute did not have is missing. "groups" has the number of
each optimizer's groups as the run began; "names", by the optimizer's number, the names in them if they have changed."""

_NOT_OF_USERS = ("_", "ds_grads_remaining", "ds_id", "ds_model_", "ds_recompute_", "applied_pre_backward_ref_cnt")
"""Beginnings of names that are private, or that DeepSpeed gives to attributes of modules."""
_OF_TORCHS_OPTIMIZERS = (
    *("_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    "_need_device_dtype_check_for_fused",
)
"""Plain attributes that torch's optimizers have, or that torch's schedulers give to them."""
_LARGEST, _LONGEST = 2**53, 4096
_ABSENT = object()
_NOT_PLAIN = object()
"""The value of an attribute that a checkpoint does not keep: it is not a number, text, truth value or None."""


_USED: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = WeakKeyDictionary()
"""The values of modules in earlier runs of this process: as the first run was made, and as the last one ended."""


def as_made(module: TrainModule) -> None:
    """Undo what hooks of earlier runs have changed of a module, before a checkpoint of any of them is restored."""
    if module in _USED:
        made, ended = _USED[module]
        left = [name for name, value in _values_of(module).items() if _same(value, ended.get(name, _ABSENT))]
        _write(module, {}, {name: made.get(name, _ABSENT) for name in left})
        drop_later_buffers(module)


_Groups = tuple[Optimizer, list[tuple[dict[str, Any], dict[str, Any]]]]


def _groups_of(optimizers: list[Optimizer]) -> list[_Groups]:
    """Return the groups of optimizers, each with a copy of its options and of its list of parameters."""
    return [
        (one, [(group, {**group, "params": [*group["params"]]}) for group in one.param_groups]) for one in optimizers
    ]


class HookChanges:
    """Follows what a run changes of its module and optimizers, besides weights and states.

    A resumed program runs up to `begin` like any other, and may freeze parameters and set values again. Then the
    changes of the former run since its own `begin` are put back.

    Args:
        module: before a checkpoint is restored.
        others: objects with one attribute that belongs to the state, by names such as "trainer.window".
    """

    def __init__(self, module: nn.Module, optimizers: list[Optimizer], others: Mapping[str, Any]) -> None:
        self._module, self._optimizers, self._others = module, optimizers, others
        self._parts = {
            f"optimizer {number}.{path}": part
            for number, optimizer in enumerate(optimizers)
            if not with_modes([optimizer])
            for path, part in optimizers_inside(optimizer).items()
        }
        """The optimizers, and those in them, whose plain attributes, such as a count of steps, are state."""
        self._groups = [self._names(optimizer) for optimizer in optimizers]
        """The names of the parameters of each group as the run began; of DeepSpeed's flat ones "", in stage 3 none."""
        self._regrouped: list[_Groups] = []
        """Optimizers that got other groups from a checkpoint, with those, until `begin`."""
        note_later_buffers(module)
        self._made, self._names_made = self._read(), _saved_names(module)
        self._began: dict[str, Any] | None = None
        self._saved: dict[str, Any] | None = None
        """The state of a checkpoint until `begin`."""

    def _names(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]

    def _regrouped_now(self) -> list[int]:
        """Return the numbers of the optimizers that have other groups than when the run began."""
        return [number for number, one in enumerate(self._optimizers) if self._names(one) != self._groups[number]]

    def _read(self) -> dict[str, Any]:
        others = {name: getattr(one, name.rpartition(".")[2]) for name, one in self._others.items()}
        for path, part in self._parts.items():
            hides_private = type(part).__module__.startswith(("torch.", "deepspeed."))
            for name, value in vars(part).items():
                if name[0] == "_" and (hides_private or name in _OF_TORCHS_OPTIMIZERS):
                    continue
                if (plain := _plain(value)) is not _NOT_PLAIN:
                    others[f"{path}.{name}"] = plain
        return _values_of(self._module) | others

    def _write(self, values: Mapping[str, Any]) -> None:
        of_parts = {name: part for name in values if (part := self._parts.get(name.rpartition(".")[0])) is not None}
        _write(self._module, {**self._others, **of_parts}, values)

    def end(self) -> None:
        """Remember the values for `as_made`, at the end of the run."""
        made, ended = _USED.get(self._module, ({}, {}))
        unchanged = {name for name, value in self._made.items() if _same(value, ended.get(name, _ABSENT))}
        first = {name: made[name] for name in made.keys() & unchanged}
        _USED[self._module] = {**self._made, **first}, _values_of(self._module)

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed: each with its value as made, as the run began, and now."""
        if self._saved is not None:  # the checkpoint's state is still valid
            return self._saved
        self._report_new_names()
        now = self._read()
        made, began = self._made, self._began or now
        entries = {}
        for name in {**made, **began, **now}:
            values = {"made": made.get(name, _ABSENT), "began": began.get(name, _ABSENT), "now": now.get(name, _ABSENT)}
            value = values["now"]
            if value is not _NOT_PLAIN and not (_same(value, values["made"]) and _same(value, values["began"])):
                entries[name] = {moment: one for moment, one in values.items() if _is_plain(one)}
        names = {str(number): self._groups[number] for number in self._regrouped_now()}
        return {"values": entries, "groups": [len(one) for one in self._groups], "names": names}

    def _report_new_names(self) -> None:
        """Warn once of parameters and buffers that a program which starts again would not have."""
        new = _saved_names(self._module) - self._names_made
        self._names_made |= new
        if new:
            log.warning(
                "this checkpoint has parameters or buffers that came while training, and is read only by a program in "
                "which __init__, configure_model or on_load_checkpoint makes them (for pruning: "
                "torch.nn.utils.prune.identity there): %s",
                printable(first_of(sorted(new))),
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for `begin`; in a run that has begun, go back to it."""
        if self._began is None:
            self._saved = state
            self._regrouped = _groups_of([self._optimizers[number] for number in self._regrouped_now()])
            return
        target = {**dict.fromkeys(self._read(), _ABSENT), **self._began}
        target |= {name: entry.get("now", _ABSENT) for name, entry in state["values"].items()}
        self._write(target)

    def begin(self) -> None:
        """Note how the run begins, after its first hooks, and put back the changes of a former run since then."""
        for optimizer in self._optimizers:
            vars(optimizer).pop("add_param_group", None)
        for optimizer, before in self._regrouped:  # which the first hooks may have changed a second time
            later = [group for group in optimizer.param_groups if all(group is not one for one, _ in before)]
            optimizer.param_groups[:] = [*(group for group, _ in before), *later]
            for group, was in before:
                group["params"] = was["params"]
        self._regrouped = []
        self._began, saved, self._saved = self._read(), self._saved, None
        if saved is not None:
            self._put_back(saved["values"], self._began, "began")

    def put_back_now(self, state: dict[str, Any], flags: bool = True) -> None:
        """Put back all changes since the module was made, where there are no first hooks.

        `flags`: False for a module that is to be evaluated, whose modes and parameters' flags do not matter.
        """
        left_out = () if flags else ("requires_grad", "training", "accumulate_grad_batches")
        entries = {n: one for n, one in state["values"].items() if n.rpartition(".")[2] not in left_out}
        self._put_back(entries, self._read(), "made")

    def _put_back(self, entries: Mapping[str, Mapping[str, Any]], here: Mapping[str, Any], moment: str) -> None:
        """Set each changed value, unless this program and the former run differ at the moment before the change."""
        to_set, other = {}, []
        for name, entry in entries.items():
            before, now, value = entry.get(moment, _ABSENT), entry.get("now", _ABSENT), here.get(name, _ABSENT)
            if _same(before, now) or _same(value, now):
                continue
            if _same(value, before):
                to_set[name] = now
            else:
                other.append(name)
        self._write(to_set)
        if other:
            log.warning(
                "hooks of the former run have changed values that are different at the start of this program: the "
                "program's values are kept: %s",
                printable(first_of(other)),
            )

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Undo at the end the changes of a hook that is called a second time: they are there already."""
        restore = self.kept()
        groups = _groups_of(self._optimizers)
        for optimizer in self._optimizers:
            vars(optimizer)["add_param_group"] = lambda group: None
        try:
            yield
        finally:
            for optimizer in self._optimizers:
                vars(optimizer).pop("add_param_group", None)
        for optimizer, before in groups:
            optimizer.param_groups[:] = [group for group, _ in before]
            for group, was in before:
                group.update(was)
        restore()

    def kept(self) -> Callable[[], None]:
        """Return a function that puts back the values of now."""
        return partial(self._write_back, self._read(), set(dict(self._module.named_modules())))

    def _write_back(self, before: Mapping[str, Any], parts: Collection[str]) -> None:
        """Set all values of `before`; parts of the module that are new since then stay, with their values."""
        now = self._read()
        new = [name for name in now if name not in before and name.rpartition(".")[0] in parts]
        target = {**dict.fromkeys(new, _ABSENT), **before}
        # Some attributes cannot be set, such as a property without a setter.
        self._write({name: one for name, one in target.items() if not _same(now.get(name, _ABSENT), one)})

    def restore_groups(self, number: int, state: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Give an optimizer the groups of its saved state, if both runs had the same groups before hooks.

        Args:
            number: of the optimizer.
            state: of the optimizer, in a checkpoint.
            changes: the `state_dict` in the checkpoint.
        """
        optimizer, own, saved = self._optimizers[number], self._groups[number], state["param_groups"]
        unchanged = [group["params"] for group in saved[: changes["groups"][number]]]
        began = changes.get("names", {}).get(str(number), unchanged)
        other = self._began is None and sorted(map(sorted, began)) != sorted(map(sorted, own))
        now = self._names(optimizer)
        # Groups of another program are refused; DeepSpeed's groups are flat, and stage 3 leaves them empty.
        if other or all(name == "" for names in now for name in names):
            return
        if sorted(sorted(group["params"]) for group in saved) != sorted(map(sorted, now)):
            set_groups(self._module, optimizer, state)
        if self._names(optimizer) != own and self._began is None:
            vars(optimizer)["add_param_group"] = partial(_add_unless_restored, optimizer)


def _saved_names(module: nn.Module) -> set[str]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {*parameters, *(name for name, *_ in saved_buffers(module))}


def _values_of(module: nn.Module) -> dict[str, Any]:
    """Return the flags and plain values of a module, by the name of a parameter or part and the attribute."""
    toggled = vars(module).get("_toggled_parameters", {})
    found = {f"{name}.requires_grad": toggled.get(p, p.requires_grad) for name, p in module.named_parameters()}
    modes = modes_in_training(module)
    for path, part in module.named_modules():
        prefix, ours = f"{path}." if path else "", isinstance(part, TrainModule)
        found[f"{prefix}training"] = modes.get(part, part.training)
        for name, value in vars(part).items():
            if not name.startswith(_NOT_OF_USERS) and name != "training" and not (ours and hasattr(TrainModule, name)):
                found[prefix + name] = _plain(value)
    return found


def _write(module: nn.Module, others: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    parameters, parts = dict(module.named_parameters()), dict(module.named_modules())
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner = others.get(name, parameters.get(path, parts.get(path)))
        if value is _ABSENT and owner is not None:
            vars(owner).pop(attribute, None)
        elif value is not _NOT_PLAIN and owner is not None:
            setattr(owner, attribute, value)


def _add_unless_restored(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Add a group, unless its parameters are there already: the hooks of a resumed run's start add theirs again."""
    given = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    added = {id(parameter) for parameter in given}
    if not any(added <= {id(parameter) for parameter in one["params"]} for one in optimizer.param_groups):
        type(optimizer).add_param_group(optimizer, {**group, "params": given})


def _plain(value: Any) -> Any:
    """Return a value as a checkpoint keeps it, or `_NOT_PLAIN`."""
    if type(value).__module__ == "numpy":
        value = with_python_numbers(value)
    if type(value) is int:
        fits = abs(value) < _LARGEST
    elif type(value) is str:
        fits = len(value) < _LONGEST and (value.isascii() or value.isprintable())
    else:
        fits = value is None or type(value) in (bool, float)
    return value if fits else _NOT_PLAIN


def _is_plain(value: Any) -> bool:
    return value is not _ABSENT and value is not _NOT_PLAIN


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same; what is not plain counts as absent."""
    if one is other:
        return True
    if _is_plain(one) and _is_plain(other):
        return repr(one) == repr(other)  # also of NaN, and not of 1 and True
    return _is_plain(one) == _is_plain(other)
