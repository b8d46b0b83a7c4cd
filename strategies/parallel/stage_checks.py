"""Find what a stage of a pipeline computes from what other stages have, apart from the blocks' first argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.data.transfer import map_tensors
from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError, first_of
from trainer.model.blocks import class_of, without_caches
from trainer.model.gradients import takes_gradient
from trainer.model.reachable import (
    content,
    is_container,
    nodes_behind,
    objects_behind,
    same_content,
    tensors_in,
)
from trainer.strategies.parallel.one_reader import Marks, is_power_of_two, marks_of
from trainer.strategies.parallel.verify import Inputs, Verification, rehearsal, tensors_left


class StageChecks:
    """Checks a stage's first batch, where the parameters of other stages are NaN, and what its blocks leave behind.

    Args:
        module: the module; this process computes one stage.
        stage: the number of that stage.
        elsewhere: names of the parameters of other stages.
        blocks: names of all blocks.
        shared: objects that several blocks know.
        verification: of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        elsewhere: set[str],
        blocks: Iterable[str],
        shared: Iterable[Any],
        verification: Verification,
    ) -> None:
        self._module, self._stage, self._elsewhere, self._shared = module, stage, elsewhere, [*shared]
        within = tuple(f"{name}." for name in blocks)
        self._around = [n for n, _ in module.named_parameters() if n in elsewhere and not n.startswith(within)]
        """Names of the parameters outside of the blocks."""
        self._verification = verification
        self._has_computed = self._has_trained = False
        """True after the first forward, and after the first forward of a training step."""
        self._passed = torch.full((), torch.nan, device="cpu", requires_grad=True)
        """The outputs of blocks of earlier stages."""
        self._passed.register_hook(self._refuse_gradient)

    def pass_by(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a block of an earlier stage: return its input as NaN, to find what else depends on it.

        In a later step its gradient is refused. The input is a number where the weights before the blocks are tied to
        weights of this stage.
        """
        hidden = next(iter((*args, *kwargs.values())))
        return hidden + self._passed.to(hidden.device, hidden.dtype) if takes_gradient(hidden) else hidden

    def _refuse_gradient(self, gradient: torch.Tensor) -> None:
        raise ConfigError(
            f"pipeline_parallel: in this step stage {self._stage} computes from the output of a block of an earlier "
            "stage, but between stages only the blocks' first argument travels. Compute what comes after the blocks "
            "from the output of the last one, or use another strategy."
        )

    def verify(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compute a block once without consequences, in the first call of each kind, and check what it leaves behind.

        Raises:
            ConfigError: others could compute from what it leaves: a tensor with a gradient, or values in objects that
                several blocks can read.
        """
        if not self._verification.is_due("pipeline_parallel", name, block, args, kwargs):
            return
        inputs: Inputs = without_caches(args), without_caches(kwargs)
        with rehearsal(block, inputs, in_float32=False):
            own = map_tensors(inputs, _as_input)
            shared = [*self._shared, *filter(is_container, objects_behind(own, set()))]
            before = [*map(content, shared)]
            try:
                output = block.forward(*own[0], **own[1])
            except (RuntimeError, TypeError, ValueError):
                return  # the forward itself raises it, or it cannot compute with gradients
            left = tensors_left(block, own, tensors_in((own, output)))
            written = [one for one, then in zip(shared, before, strict=True) if not same_content(content(one), then)]
        found = [f"a tensor with a gradient in {place}" for place in left]
        found += [f"a {type(one).__name__} that others read, too" for one in written]
        if found:
            raise ConfigError(
                f"pipeline_parallel: {name} ({class_of(block).__name__}) leaves {found[0]}, and other processes get "
                "only what a block returns. Return it, or compute it outside of the blocks, or use another strategy; "
                "keep with detach() what is only logged."
            )

    def check_output(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        """Raise ConfigError if what a block returns is not a tensor, or not finite in the first forward."""
        if self._has_computed or torch.compiler.is_compiling():
            return
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"pipeline_parallel: {name} ({class_of(block).__name__}) returns a {type(output).__name__}, and "
                "what a stage sends is one tensor: have the block return it, or use another strategy."
            )
        if not torch.isfinite(output.detach()).all():
            raise self._depends(f"the output of {name} ({class_of(block).__name__})", output)

    def end_forward(self, outputs: Any, is_loss: bool) -> None:
        """End the first checks; raise ConfigError if the first training step's loss depends on other stages' values."""
        self._has_computed = True
        if not is_loss or self._has_trained:
            return
        self._has_trained = True
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and not torch.isfinite(loss.detach()).all() and self._names_behind(loss):
            raise self._depends("the loss", loss)

    def _depends(self, what: str, output: torch.Tensor) -> ConfigError:
        names = self._names_behind(output) or self._around or ["a tensor"]
        return ConfigError(
            f"pipeline_parallel: {what} is not finite in the first batch on stage {self._stage}. Unless the batch or a "
            f"block has made it so, it depends on what another stage has: {first_of(names)}. Between stages only the "
            "blocks' first argument travels: compute other inputs from the batch, and register layers in the order in "
            "which they run, before or after the blocks. In a model of somebody else, register it again, before fit: "
            "`last = decoder.norm; del decoder.norm; decoder.norm = last`."
        )

    def _names_behind(self, output: torch.Tensor) -> list[str]:
        """Return the names of other stages' parameters that an output was computed from."""
        names = {id(p): name for name, p in self._module.named_parameters() if name in self._elsewhere}
        names[id(self._passed)] = "the outputs of blocks of earlier stages"
        variables = (id(getattr(node, "variable", None)) for node in nodes_behind([output.grad_fn]))
        return list(dict.fromkeys(names[one] for one in variables if one in names))


def _as_input(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_().clone() if takes_gradient(copy) else copy


# -- values that only some stages have ---------------------------------------------------------------------------------


class StageValues:
    """Refuses to read, in a step of training, what the step before has changed on other stages alone.

    Every stage runs the full `training_step`, but computes its own blocks, and the last one alone what comes after
    them: a counter there, or a number that a block keeps, has its former value on the others. The stages exchange what
    has changed after the windows 1, 2, 3, 5, 9 and so on, and after every 64th.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._steps = 0
        self._owners: dict[str, Any] = {}
        """The modules and objects that keep values, by words for them."""
        self._changed: Marks | None = None
        """Changes of the last forward on this stage, until the stages exchange them."""
        self.unread: dict[int, tuple[Any, dict[str, str]]] = {}
        """By the `id` of a module or object: itself, and by attribute the error of reading it in the next step."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a forward in training."""
        looks = is_power_of_two(self._steps) or self._steps % 64 == 0
        self._steps += 1
        unread, self.unread = self.unread, {}
        before, _ = marks_of(self._module) if looks else ({}, {})
        with _unreadable(unread):
            yield
        if looks:
            after, self._owners = marks_of(self._module)
            self._changed = {key: mark for key, mark in after.items() if before.get(key, ...) != mark}

    def exchange(self, processes: SingleProcess) -> None:
        """Find what the last forward has changed on other stages alone, or otherwise. Collective, in some steps."""
        changed, self._changed = self._changed, None
        if changed is None:
            return
        own = {key: mark if isinstance(mark, (int, str)) else None for key, mark in changed.items()}
        of_all = zip(processes.all_gather_object(own), processes.reader_of, strict=True)
        of_model = [of_rank for of_rank, reader in of_all if reader == processes.reader]
        for place, name in sorted({key for of_rank in of_model for key in of_rank if key[0] in self._owners}):
            values = {of_rank[place, name] for of_rank in of_model if (place, name) in of_rank}
            if (place, name) in own and len(values) == 1:
                continue
            owner = self._owners[place]
            _, errors = self.unread.setdefault(id(owner), (owner, {}))
            errors[name] = (
                f"pipeline_parallel: the training reads {f'{place}.{name}'.strip('.')}, which differs between the "
                "processes of one model, because another stage has changed it in an earlier step. Compute the value "
                "before the blocks, since only the last stage runs the code after them, or use another strategy."
            )


@contextmanager
def _unreadable(unread: Mapping[int, tuple[Any, dict[str, str]]]) -> Iterator[None]:
    """Have attributes raise errors until they are written."""
    kinds = [(owner, type(owner)) for owner, _ in unread.values()]
    for owner, errors in unread.values():
        owner.__class__ = _unreadable_kind(type(owner), errors)
    try:
        yield
    finally:
        for owner, kind in kinds:
            owner.__class__ = kind


def _unreadable_kind(kind: Any, errors: dict[str, str]) -> type:
    def read(self: Any, name: str) -> Any:
        if name in errors:
            raise ConfigError(errors[name])
        return kind.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        errors.pop(name, None)
        kind.__setattr__(self, name, value)

    hooks = {"__getattribute__": read, "__setattr__": write}
    return type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **hooks})
