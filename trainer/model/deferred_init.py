"""Building a module without values first, and giving it the right initial values later, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.errors import ConfigError
from trainer.model.recording import Recorder
from trainer.model.tape import Storage, TensorView, places

Take = Callable[[str, torch.Tensor], None]


class DeferredInit:
    """Within this context tensors are created without values, on the meta device, and what would have been done to them
    is recorded; `materialize` does it.

        recording = DeferredInit(module)
        with recording:
            module.configure_model()
        ...                       # wrap, shard and allocate
        recording.materialize(take)

    The values are bit for bit those that one process gets that builds the module on the CPU, its generators in the
    state in which they are on entry. (Of all processes' generators, Python's and NumPy's too: as only torch's
    operations are recorded, every process has to enter with the same states.) Peak memory is a few tensors, even if the
    module initializes itself anew at the end of its construction.

    Tensors that existed before are used as they are; what recorded operations do to them is done in `materialize`.
    Values that the construction looks at (`item()`, `tolist()`, `if tensor.any()`) are computed for it, from the start
    on and without keeping them. Torch's default generator is left as on entry.

    Raises, within the context:
        ConfigError: something cannot be recorded: names the operator and the line of the user's code.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._recorder = Recorder()
        self._context = ExitStack()
        self._named: dict[str, TensorView] = {}
        self._attributes: list[tuple[Callable[[torch.Tensor], None], TensorView, bool]] = []
        """How to set it, what it is, and whether it requires a gradient."""

    def __enter__(self) -> DeferredInit:
        self._context.enter_context(self._recorder.recording())
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._context.close()
        if kind is None:
            self._find_names()

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The parameters and buffers whose values `materialize` gives: those made or changed in the context, by their
        names in `module.named_parameters()` and `module.named_buffers()` when it ended."""
        return list(self._named)

    def materialize(self, take: Take, only: Callable[[str], bool] | None = None, advance: bool = True) -> None:
        """Compute the initial values, and hand each to `take(name, value)`.

        `value` is the whole tensor on the CPU, freed after the call: copy what is to be kept. They come in the order in
        which they become final. A parameter that several modules share comes once, with its first name. Tensors that
        are plain attributes of modules are put there. Call it once.

        Args:
            take: is called with the names of `names` for which `only(name)` is true.
            only: leave out work for other tensors; default: all.
            advance: leave torch's CPU generator where a real construction would have; else as it is, and random numbers
                that nobody needs are not drawn.

        Raises:
            ConfigError: a NumPy array that was copied into the module has changed since.
        """
        if self._recorder.changed_memory():
            raise ConfigError(
                "memory that torch does not own (a NumPy array or a memory-mapped file) was copied into "
                f"{type(self.module).__name__} in configure_model, and was changed afterwards. Give it a copy: "
                "torch.tensor(array) instead of torch.from_numpy(array)."
            )
        receivers: dict[Storage, list[Callable[[torch.UntypedStorage], None]]] = {}
        for name, ref in self._named.items():
            if only is None or only(name):
                receivers.setdefault(ref.cell, []).append(partial(_take, take, name, ref))
        for put, ref, grad in self._attributes:
            receivers.setdefault(ref.cell, []).append(partial(_put, put, ref, grad))

        def finished(cell: Storage, storage: torch.UntypedStorage) -> None:
            for receive in receivers[cell]:
                receive(storage)

        tape = self._recorder.tape
        tape.play(receivers, finished)
        if advance:
            for generator, origin in self._recorder.ends:
                generator.set_state(tape.generator_state(origin))

    def _find_names(self) -> None:
        known = self._recorder
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if not is_traceable_wrapper_subclass(tensor):
                if known.is_deferred(tensor):
                    self._named[name] = known.ref(tensor)
            elif any(map(known.is_deferred, _inner(tensor))):
                raise ConfigError(
                    f"{name!r} of {type(self.module).__name__} is a {type(tensor).__name__}, which cannot be made "
                    "in configure_model of a sharded run: make it in __init__."
                )
        for owner in self.module.modules():
            for attribute, value in vars(owner).items():
                if attribute not in ("_parameters", "_buffers", "_modules"):
                    for put, tensor in places(value, partial(setattr, owner, attribute)):
                        if tensor.is_meta and known.is_deferred(tensor):
                            self._attributes.append((put, known.ref(tensor), tensor.requires_grad))


def _inner(tensor: Any) -> list[torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)]  # a mesh is none


def _take(take: Take, name: str, ref: TensorView, storage: torch.UntypedStorage) -> None:
    take(name, ref.of(storage))


def _put(put: Callable[[torch.Tensor], None], ref: TensorView, grad: bool, storage: torch.UntypedStorage) -> None:
    put(ref.of(storage).clone().requires_grad_(grad))
