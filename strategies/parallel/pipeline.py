"""Pipeline parallelism: each stage computes some of a module's blocks, within the module's own `training_step`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from trainer.errors import ConfigError
from trainer.model.blocks import class_of, describe_blocks
from trainer.model.gradients import takes_gradient
from trainer.model.reachable import shared_objects
from trainer.model.weights import AbsentParameter
from trainer.seed import PrivateRng, derive_seed, seed_cpu_generators
from trainer.strategies.fsdp.mesh import ParallelMesh
from trainer.strategies.parallel.context import split_hidden
from trainer.strategies.parallel.messages import Neighbour
from trainer.strategies.parallel.one_reader import local_part
from trainer.strategies.parallel.stage_checks import StageChecks
from trainer.strategies.parallel.stages import split_blocks, stages_of_parameters
from trainer.strategies.parallel.verify import Verification


class LeftStage(BaseException):
    """Leaves `training_step` where the next stage's first block begins; not an Exception, which user code may catch."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class MicroBatch(NamedTuple):
    """A micro-batch between its forward and its backward on this stage."""

    sent: torch.Tensor
    """The last own block's output; on the last stage, the outputs of the step."""
    received: torch.Tensor | None
    """The input of the first own block, whose gradient goes to the stage before; None on the first stage."""
    synchronizes: bool
    """True if the backward of the micro-batch reduces the gradients over readers."""


class Pipeline:
    """Runs one stage of a module.

    Every process runs the full `training_step`. Parameters of other stages are one NaN, expanded to their shape. A
    block before the own ones returns its input, and the first own block gets what the stage before has sent; the first
    block after the own ones leaves the step. So masks, positions, losses and logging stay where the user wrote them,
    and what depends on another stage in any other way than through the blocks' first argument is NaN in the first step.

    Micro-batches are the batches of a window, in the order of 1F1B (https://arxiv.org/abs/2006.09503): a backward waits
    until as many forwards are done as there are stages after this one.

    Args:
        module: changed in place, for good.
        blocks: by name, in the order of their calls.
        mesh: of the run, with two groups of the stages of one model, one for each direction.
        verification: of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: dict[str, nn.Module],
        mesh: ParallelMesh,
        verification: Verification,
    ) -> None:
        self.module = module
        self.stage, self.stages = mesh.position("stage"), mesh.layout.pipeline
        self.stage_of_block = split_blocks(module, blocks, self.stages)
        self.blocks = {name: block for name, block in blocks.items() if self.stage_of_block[name] == self.stage}
        needed = stages_of_parameters(module, blocks, self.stage_of_block, self.stages)
        names = dict(module.named_parameters(remove_duplicate=False))
        self.elsewhere = {name for name, p in names.items() if self.stage not in needed[id(p)]}
        """Names of the parameters of other stages."""
        self.ties = {name: sorted(needed[id(p)]) for name, p in module.named_parameters() if len(needed[id(p)]) > 1}
        """The stages of each parameter that several stages have."""
        self.stage_of_buffer = {
            f"{name}.{inner}": self.stage_of_block[name]
            for name, block in blocks.items()
            for inner, _ in block.named_buffers()
        }
        """The stage of each buffer of a block, where it may change."""
        self.connect(mesh)
        self._checks = StageChecks(module, self.stage, self.elsewhere, blocks, shared_objects(blocks), verification)
        self._private_rng = PrivateRng()
        self._drop_other_parameters()
        self._dress(blocks)

    def connect(self, mesh: ParallelMesh) -> None:
        """Start a run with new groups, because an earlier run may have left messages pending in the old ones."""
        forwards, backwards = mesh.group("stage"), mesh.group("stage, backwards")
        self._next = Neighbour(forwards, backwards, self.stage + 1) if not self.is_last else None
        self._before = Neighbour(backwards, forwards, self.stage - 1) if not self.is_first else None
        self._neighbours = [one for one in (self._next, self._before) if one is not None]
        several = sorted({tuple(found) for found in self.ties.values()})
        self._groups = {stages: mesh.group_of_stages(stages) for stages in several}
        self._saved: deque[MicroBatch] = deque()
        self._received: torch.Tensor | None = None
        self._gradient: Callable[[], torch.Tensor] | None = None
        """Waits for the gradient of the oldest micro-batch; None: it is not on its way."""
        self._taken = False
        """True if the first own block has run in the forward in progress."""

    @property
    def is_first(self) -> bool:
        """Whether this stage has the first block."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last block, and the loss."""
        return self.stage == self.stages - 1

    @property
    def has_messages(self) -> bool:
        """Whether messages to or from this stage are on their way, as after an error within a window."""
        return bool(self._saved) or self._gradient is not None or any(one.is_sending for one in self._neighbours)

    def describe(self) -> str:
        """Return text with the blocks of this stage."""
        return f"stage {self.stage} of {self.stages}: {describe_blocks(self.blocks)}"

    def writes(self, name: str) -> bool:
        """Whether this stage writes a parameter into checkpoints, and counts it in norms: the first one that has it."""
        return name not in self.elsewhere and self.ties.get(name, [self.stage])[0] == self.stage

    # -- the module ----------------------------------------------------------------------------------------------------

    def _drop_other_parameters(self) -> None:
        """Replace the parameters of other stages, which frees their memory."""
        stand_ins: dict[int, nn.Parameter] = {}
        for prefix, owner in self.module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or f"{prefix}.{name}".removeprefix(".") not in self.elsewhere:
                    continue
                if id(parameter) not in stand_ins:
                    stand_ins[id(parameter)] = _stand_in(parameter)
                owner._parameters[name] = stand_ins[id(parameter)]

    def _dress(self, blocks: dict[str, nn.Module]) -> None:
        """Replace the forwards of other stages' blocks, and add hooks to the own ones."""
        for name, block in blocks.items():
            if self.stage_of_block[name] < self.stage:
                block.forward = self._checks.pass_by
            elif self.stage_of_block[name] > self.stage:
                block.forward = partial(_leave, block)
        own = list(self.blocks.values())
        if self.is_first:
            own[0].register_forward_pre_hook(self._begin, with_kwargs=True)
        else:
            # Before FSDP's own hook, which has to see the tensor that gradients flow to.
            own[0].register_forward_pre_hook(self._receive, with_kwargs=True, prepend=True)
        own[-1].register_forward_hook(self._end)
        for name, block in self.blocks.items():
            block.register_forward_pre_hook(partial(self._checks.verify, name), with_kwargs=True)
            block.register_forward_hook(partial(self._checks.check_output, name))

    def _receive(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._begin(block, args, kwargs)
        _, args, kwargs = split_hidden(block, args, kwargs)
        return (self._received, *args), kwargs

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._taken:
            raise ConfigError(
                f"pipeline_parallel: {class_of(block).__name__} is called twice in one step, and a pipeline runs each "
                "block once for a batch. Call the model once, on one batch (torch.cat), or use another strategy."
            )
        self._taken = True
        self._around_blocks = self._generators.states()
        self._generators.seed(derive_seed(self._seed, self.stage))

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        if not self._taken:
            raise ConfigError(
                f"pipeline_parallel: the first block of stage {self.stage} was skipped in this step, and a pipeline "
                "runs every block once for a batch. Multiply what a block adds by 0 instead, or use another strategy."
            )
        self._generators.restore(self._around_blocks)

    # -- a micro-batch -------------------------------------------------------------------------------------------------

    def forward(self, call: Callable[[], Any], step: str, device: torch.device, synchronizes: bool) -> Any:
        """Run this stage's part of a step; return its outputs, on the stages before the last a zero or None."""
        training = step == "training_step" and torch.is_grad_enabled()
        self._taken = False
        if self._before is not None:
            self._received = self._before.receive(device).requires_grad_(training)
        with self._shared_random_numbers(device):
            outputs = call()
        received, self._received = self._received, None
        if not self._taken:
            raise ConfigError(
                f"pipeline_parallel: {step} has not called {describe_blocks(self.blocks)}, or a later block before "
                "them. Run one forward of the model in each step, through its blocks in the order in which they are "
                "registered, and do not leave the step (return None) before it."
            )
        if self._next is not None:
            self._next.send(outputs)
        self._checks.end_forward(outputs, is_loss=training and self.is_last)
        if training:
            self._saved.append(MicroBatch(outputs, received, synchronizes))
            self._expect_gradient()
        if self.is_last:
            return outputs
        return torch.zeros((), device=device, requires_grad=True) if training else None

    @contextmanager
    def _shared_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Have all stages draw the same random numbers around the blocks, although they run through other blocks.

        Each micro-batch has its own seed, drawn from the generators that the stages of a model share. Blocks draw from
        other generators, see `_begin`.
        """
        self._generators = _Generators(device)
        self._seed = int(torch.randint(2**62, (), device="cpu"))
        before = self._generators.states()
        with self._private_rng:
            seed_cpu_generators(self._seed)
            self._generators.seed(self._seed)
            yield
        self._generators.restore(before)

    def backward(self, loss: torch.Tensor, run: Callable[[bool, Callable[[], None]], None]) -> None:
        """Run the backward that is due after a forward: as many wait as there are stages after this one."""
        if self.is_last:
            micro_batch = self._saved.popleft()
            run(micro_batch.synchronizes, loss.backward)
            self._send_gradient(micro_batch)
        elif len(self._saved) >= self.stages - self.stage:
            self._backward_of_oldest(run)

    def _backward_of_oldest(self, run: Callable[[bool, Callable[[], None]], None]) -> None:
        assert self._gradient is not None
        micro_batch, gradient = self._saved.popleft(), self._gradient()
        self._gradient = None
        self._expect_gradient()
        if micro_batch.sent.requires_grad:  # not where all that this stage has computed with is frozen
            run(micro_batch.synchronizes, lambda: torch.autograd.backward(micro_batch.sent, gradient))
        self._send_gradient(micro_batch)

    def _expect_gradient(self) -> None:
        """Begin to receive the gradient of the oldest micro-batch, which can come while this stage computes."""
        if self._next is not None and self._saved and self._gradient is None:
            self._gradient = self._next.begin_to_receive(self._saved[0].sent)

    def _send_gradient(self, micro_batch: MicroBatch) -> None:
        if self._before is not None:
            assert micro_batch.received is not None
            gradient = micro_batch.received.grad
            self._before.send_content(torch.zeros_like(micro_batch.received) if gradient is None else gradient)

    def end_window(self, run: Callable[[bool, Callable[[], None]], None]) -> None:
        """Run the backwards that are left; add up the gradients of weights that several stages have."""
        while self._saved:
            self._backward_of_oldest(run)
        self.flush()
        parameters = dict(self.module.named_parameters()) if self.ties else {}
        for name, stages in sorted(self.ties.items()):
            parameter = parameters[name]
            if self.stage in stages and parameter.requires_grad:
                self._add_up(parameter, self._groups[tuple(stages)])

    def _add_up(self, parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient: Any = parameter.grad
        if hasattr(parameter, "placements") and gradient.placements != parameter.placements:
            # Of an embedding whose rows are split, DTensor gives a partial gradient.
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        dist.all_reduce(local_part(gradient), group=group)

    def flush(self) -> None:
        """Wait until the neighbours have received all messages."""
        for neighbour in self._neighbours:
            neighbour.flush()


class _Generators:
    """torch's global generators of the CPU and of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def states(self) -> list[torch.Tensor]:
        device = [] if self._module is None else [self._module.get_rng_state(self._device)]
        return [torch.default_generator.get_state(), *device]

    def restore(self, states: list[torch.Tensor]) -> None:
        torch.default_generator.set_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], self._device)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)


def _leave(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise LeftStage(split_hidden(block, args, kwargs)[0])


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    value = math.nan if takes_gradient(parameter) else 0
    # Not on the meta device, whose tensors are allocated in full.
    one = torch.full((), value, dtype=parameter.dtype, device="cpu" if parameter.is_meta else parameter.device)
    return AbsentParameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)
