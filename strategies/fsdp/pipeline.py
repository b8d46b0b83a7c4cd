"""Pipeline parallelism: each stage computes some of a module's blocks, within the module's own `training_step`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from trainer.errors import ConfigError, first_of
from trainer.model.blocks import describe_blocks
from trainer.model.parallel_cost import cut_blocks
from trainer.model.weights import AbsentParameter
from trainer.seed import PrivateRng, derive_seed, seed_cpu_generators
from trainer.strategies.fsdp.context import split_hidden


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
    """True if its backward reduces the gradients over readers."""


class Pipeline:
    """Runs one stage of a module.

    Every process runs the whole `training_step`. Parameters of other stages are one NaN, expanded to their shape. A
    block before the own ones returns its input, and the first own block gets what the stage before has sent; the first
    block after the own ones leaves the step. So masks, positions, losses and logging stay where the user wrote them,
    and what depends on another stage in any other way than through the blocks' first argument is NaN in the first step.

    Micro-batches are those of a window, in the order of 1F1B (https://arxiv.org/abs/2006.09503): the backward of a
    micro-batch waits until as many forwards are done as there are stages after this one.

    Args:
        module: changed in place, for good.
        blocks: by name, in the order in which they are called.
        forwards, backwards: two process groups of the stages of one model, one for each direction.
        shared: returns the group of some of the stages; None for stages without this one.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: dict[str, nn.Module],
        forwards: dist.ProcessGroup,
        backwards: dist.ProcessGroup,
        shared: Callable[[Sequence[int]], dist.ProcessGroup | None],
    ) -> None:
        self.module = module
        self.stage, self.stages = dist.get_rank(forwards), dist.get_world_size(forwards)
        self._next = _Neighbour(forwards, backwards, self.stage + 1) if not self.is_last else None
        self._before = _Neighbour(backwards, forwards, self.stage - 1) if not self.is_first else None
        self.stage_of_block = divide_blocks(module, blocks, self.stages)
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
        self._groups = {stages: shared(stages) for stages in sorted({tuple(found) for found in self.ties.values()})}
        self._saved: deque[MicroBatch] = deque()
        self._received: torch.Tensor | None = None
        self._taken = False
        """True if the first own block has run in the forward in progress."""
        self._checked = self._loss_checked = False
        """True after the first forward, which looks at the numbers that it computes; of a training step."""
        self._drop_other_parameters()
        self._dress(list(blocks.items()))

    @property
    def is_first(self) -> bool:
        """Whether this stage has the first block."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last block, and the loss."""
        return self.stage == self.stages - 1

    @property
    def stand_ins(self) -> set[nn.Parameter]:
        """The parameters that stand for those of other stages."""
        return {p for p in self.module.parameters() if isinstance(p, AbsentParameter)}

    def describe(self) -> str:
        """Return the blocks of this stage in words."""
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

    def _dress(self, blocks: list[tuple[str, nn.Module]]) -> None:
        own = list(self.blocks)
        for name, block in blocks:
            if self.stage_of_block[name] < self.stage:
                block.forward = _pass_by
            elif self.stage_of_block[name] > self.stage:
                block.forward = _leave
            if name == own[0] and not self.is_first:
                # Before FSDP's own hook, which has to see the tensor that gradients flow to.
                block.register_forward_pre_hook(self._receive, with_kwargs=True, prepend=True)
            elif name == own[0]:
                block.register_forward_pre_hook(self._begin, with_kwargs=True)
            if name == own[-1]:
                block.register_forward_hook(self._end)
            if name in self.blocks:
                block.register_forward_hook(self._checker(name), with_kwargs=True)

    def _receive(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._begin(block, args, kwargs)
        _, args, kwargs = split_hidden(block, args, kwargs)
        return (self._received, *args), kwargs

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._taken:
            raise ConfigError(
                f"pipeline_parallel: {type(block).__name__} is called twice in one step, and a pipeline runs each "
                "block once for a batch: call the model once, on one batch (torch.cat), or use another strategy."
            )
        self._taken = True
        self._around_blocks = self._generators.states()
        self._generators.seed(derive_seed(self._seed, self.stage))

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        if not self._taken:
            raise ConfigError(
                f"pipeline_parallel: the first block of stage {self.stage} was skipped in this step, and a pipeline "
                "runs every block once for a batch: multiply what a block adds by 0 instead, or use another strategy."
            )
        self._generators.restore(self._around_blocks)

    def _checker(self, name: str) -> Callable[..., Any]:
        def check(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._checked or torch.compiler.is_compiling():
                return
            if not isinstance(output, torch.Tensor):
                raise ConfigError(
                    f"pipeline_parallel: {name} ({type(block).__name__}) returns a {type(output).__name__}, and what "
                    "a stage sends is one tensor: have the block return it, or use another strategy."
                )
            if not torch.isfinite(output.detach()).all():
                raise self._depends(f"the output of {name} ({type(block).__name__})", output, (args, kwargs))

        return check

    def _depends(self, what: str, output: torch.Tensor, inputs: Any = ()) -> ConfigError:
        names = self._stand_ins_in([output, *_tensors(inputs)])
        because = f"it depends on {first_of(names)}" if names else "it depends on more than the block before"
        return ConfigError(
            f"pipeline_parallel: {what} is not finite in the first batch on stage {self.stage}: {because}, whose "
            "values another stage has. Between stages only the blocks' first argument travels: compute other inputs "
            "from the batch, in the block or without parameters; register what comes before the blocks before them "
            "in the module, and what comes after them after."
        )

    def _stand_ins_in(self, outputs: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of other stages' parameters from which the outputs were computed."""
        names = {id(p): name for name, p in self.module.named_parameters() if name in self.elsewhere}
        found: dict[str, None] = {}
        seen: set[Any] = set()
        waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in names:
                found[names[id(variable)]] = None
            waiting += [before for before, _ in node.next_functions if before is not None]
        return list(found)

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
                "them: a pipeline needs one forward of the model in each step, through its blocks in the order in "
                "which they are registered; a step cannot be left (return None) before it."
            )
        if self._next is not None:
            self._next.send(outputs)
        elif training and not self._loss_checked and isinstance(outputs, (torch.Tensor, Mapping)):
            self._check_loss(outputs)
        self._checked = True
        if training:
            self._loss_checked = True
            self._saved.append(MicroBatch(outputs, received, synchronizes))
        if self.is_last:
            return outputs
        return torch.zeros((), device=device, requires_grad=True) if training else None

    def _check_loss(self, outputs: Any) -> None:
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.get("loss")
        if isinstance(loss, torch.Tensor) and not torch.isfinite(loss.detach()).all() and self._stand_ins_in([loss]):
            raise self._depends("the loss", loss)

    @contextmanager
    def _shared_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Have all stages draw the same random numbers around the blocks, although they run through other blocks.

        Each micro-batch has a seed of its own, drawn from the generators that the stages of a model share; blocks draw
        from other ones, see `_begin`.
        """
        self._generators = _Generators(device)
        self._seed = int(torch.randint(2**62, (), device="cpu"))
        before = self._generators.states()
        with PrivateRng():
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
        micro_batch = self._saved.popleft()
        assert self._next is not None
        gradient = self._next.receive(micro_batch.sent.device)
        run(micro_batch.synchronizes, lambda: torch.autograd.backward(micro_batch.sent, gradient))
        self._send_gradient(micro_batch)

    def _send_gradient(self, micro_batch: MicroBatch) -> None:
        if self._before is not None:
            assert micro_batch.received is not None
            gradient = micro_batch.received.grad
            self._before.send(torch.zeros_like(micro_batch.received) if gradient is None else gradient)

    def end_window(self, run: Callable[[bool, Callable[[], None]], None]) -> None:
        """Run the backwards that are left; add up the gradients of weights that several stages have."""
        while self._saved:
            self._backward_of_oldest(run)
        self.flush()
        parameters = dict(self.module.named_parameters())
        for name, stages in sorted(self.ties.items()):
            parameter = parameters[name]
            if self.stage in stages and parameter.requires_grad:
                self._add_up(parameter, self._groups[tuple(stages)])

    def _add_up(self, parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient: Any = parameter.grad
        if hasattr(parameter, "placements") and gradient.placements != parameter.placements:
            # Of an embedding whose rows are divided, DTensor gives a partial gradient.
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        dist.all_reduce(gradient.to_local() if hasattr(gradient, "to_local") else gradient, group=group)

    def flush(self) -> None:
        """Wait until what was sent has been received."""
        for neighbour in (self._next, self._before):
            if neighbour is not None:
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


def _pass_by(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise LeftStage(_pass_by(*args, **kwargs))


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    value = float("nan") if parameter.is_floating_point() else 0
    one = torch.full((), value, dtype=parameter.dtype, device=parameter.device)
    return AbsentParameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)


def _tensors(nested: Any) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(nested)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# -- which stage has what ----------------------------------------------------------------------------------------------


def divide_blocks(module: nn.Module, blocks: dict[str, nn.Module], stages: int) -> dict[str, int]:
    """Return the stage of each block, so that the largest number of parameters of a stage is the least possible.

    What comes before the blocks belongs to the first stage, what comes after them to the last.

    Raises:
        ConfigError: there are fewer blocks than stages, or blocks of several stacks.
    """
    names = list(blocks)
    parents = {name.rpartition(".")[0] for name in names}
    if len(names) < stages:
        raise ConfigError(
            f"pipeline_parallel={stages} needs at least {stages} repeated blocks, and {type(module).__name__} has "
            f"{len(names)}: name their class by auto_wrap_policy, or choose fewer stages."
        )
    if len(parents) > 1:
        raise ConfigError(
            f"pipeline_parallel: the blocks of {type(module).__name__} are {describe_blocks(blocks)}, in several "
            "lists, and a pipeline runs through one: name the class of one list's members by auto_wrap_policy, or use "
            "another strategy (an encoder with a decoder cannot be a pipeline)."
        )
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks.values()]
    before, after = _sizes_around(module, blocks)
    sizes[0] += before
    sizes[-1] += after
    ends = cut_blocks(sizes, stages)
    return {name: next(stage for stage, end in enumerate(ends) if number < end) for number, name in enumerate(names)}


def _sizes_around(module: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Return the numbers of parameters before and after the blocks."""
    inside = {id(p) for block in blocks.values() for p in block.parameters()}
    before, after = _parameters_around(module, blocks)
    return (
        sum(p.numel() for p in before.values() if id(p) not in inside),
        sum(p.numel() for p in after.values() if id(p) not in inside),
    )


def _parameters_around(
    module: nn.Module, blocks: Mapping[str, nn.Module]
) -> tuple[dict[int, nn.Parameter], dict[int, nn.Parameter]]:
    """Return, by `id`, the parameters of the modules registered before the blocks, and of those after them.

    Those that a module around the blocks has itself are in both: nothing says where they are used.
    """
    names = list(blocks)
    order = [name for name, _ in module.named_modules()]
    start = order.index(names[0])
    before: dict[int, nn.Parameter] = {}
    after: dict[int, nn.Parameter] = {}
    for number, name in enumerate(order):
        if any(f"{name}.".startswith(f"{block}.") for block in names):
            continue
        for parameter in module.get_submodule(name).parameters(recurse=False):
            around = not name or names[0].startswith(f"{name}.")
            if around or number < start:
                before[id(parameter)] = parameter
            if around or number > start:
                after[id(parameter)] = parameter
    return before, after


def stages_of_parameters(
    module: nn.Module, blocks: Mapping[str, nn.Module], stage_of_block: Mapping[str, int], stages: int
) -> dict[int, set[int]]:
    """Return, by the `id` of each parameter, the stages that need it; a tied weight may be needed by several."""
    needed: dict[int, set[int]] = {id(p): set() for p in module.parameters()}
    for name, block in blocks.items():
        for parameter in block.parameters():
            needed[id(parameter)].add(stage_of_block[name])
    before, after = _parameters_around(module, blocks)
    for key in before:
        needed[key].add(0)
    for key in after:
        needed[key].add(stages - 1)
    return needed


# -- messages between stages -------------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 8


class _Neighbour:
    """Another stage, to which tensors are sent and from which they come, of shapes that may differ each time.

    Args:
        sending, receiving: a group for each direction; with one for both, NCCL would have a send wait for a receive.
        stage: of the neighbour.
    """

    def __init__(self, sending: dist.ProcessGroup, receiving: dist.ProcessGroup, stage: int) -> None:
        self._sending, self._receiving, self._stage = sending, receiving, stage
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor without waiting; its memory is kept until it has arrived."""
        self._pending = [(work, sent) for work, sent in self._pending if not work.is_completed()]
        content = tensor.detach().contiguous()
        header = torch.zeros(_MOST_DIMENSIONS + 2, dtype=torch.int64, device="cpu")
        header[0], header[1] = content.dim(), _DTYPES.index(content.dtype)
        header[2 : 2 + content.dim()] = torch.tensor(content.shape, device="cpu")
        for part in (header, content):
            self._pending.append((dist.isend(part, group=self._sending, group_dst=self._stage), part))

    def receive(self, device: torch.device) -> torch.Tensor:
        """Wait for a tensor, and return it on `device`."""
        header = torch.zeros(_MOST_DIMENSIONS + 2, dtype=torch.int64, device="cpu")
        dist.recv(header, group=self._receiving, group_src=self._stage)
        dimensions, dtype, *shape = header.tolist()
        content = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=device)
        dist.recv(content, group=self._receiving, group_src=self._stage)
        return content

    def flush(self) -> None:
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
