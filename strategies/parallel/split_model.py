"""Split one model over processes, and check in its steps what these have in common."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.shards import Shard
from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError
from trainer.model.blocks import main_stack
from trainer.model.pipeline_stages import bubble
from trainer.module import TrainModule
from trainer.precision import NULL_CONTEXT, Precision
from trainer.strategies.fsdp.mesh import ParallelMesh
from trainer.strategies.parallel.context import AttentionExchange, ContextParallel
from trainer.strategies.parallel.one_reader import CommonLoss, refuse_different_batches, refuse_partial_gradients
from trainer.strategies.parallel.pipeline import Pipeline
from trainer.strategies.parallel.refusals import (
    refuse_collecting,
    refuse_mixing_layers,
    refuse_repeated_blocks,
    refuse_settings,
)
from trainer.strategies.parallel.stage_checks import StageValues
from trainer.strategies.parallel.verify import Verification
from trainer.strategies.swapped_parameters import has_compiled
from trainer.strategy import StepOptions

if TYPE_CHECKING:
    from trainer.strategies.parallel.plan_check import PlanCheck

log = logging.getLogger("trainer")


class SplitModel:
    """The layers, sequences and blocks of a module that this process computes; all of them if nothing is split.

    Args:
        module: changed in place, for good.
        mesh: of the run; its layout says how many processes hold one model, and what each of them has.
        processes: of the run.
        blocks: by name, in the order of their calls.
        exchange, verify: see `FSDPStrategy`.

    Raises:
        ConfigError: the module cannot be split so.
    """

    def __init__(
        self,
        module: TrainModule,
        mesh: ParallelMesh,
        processes: SingleProcess,
        blocks: dict[str, nn.Module],
        exchange: AttentionExchange,
        verify: bool,
    ) -> None:
        self.module, self.layout, self.mesh, self.verify = module, mesh.layout, mesh, verify
        self.blocks = self.here = blocks
        """All blocks, and the blocks of this process."""
        self.pipeline: Pipeline | None = None
        """The stage of this process."""
        self.experts: dict[str, nn.Module] = {}
        """The modules of experts that are split, by name."""
        self._splits_losses = False
        self.description = ""
        self._context: ContextParallel | None = None
        self._plan_check: PlanCheck | None = None
        self._verification = Verification(verify)
        self._processes = processes
        self._start()
        if self.layout:
            self._split(exchange)

    def _split(self, exchange: AttentionExchange) -> None:
        layout, mesh = self.layout, self.mesh
        if layout.pipeline * layout.context > 1:
            self.blocks = self.here = main_stack(self.blocks)
            refuse_collecting(f"{layout}", self.module)
        lines = []
        if layout.pipeline > 1:
            refuse_repeated_blocks(self.module, self.blocks)
            self.pipeline = Pipeline(self.module, self.blocks, mesh, self._verification)
            self.here = self.pipeline.blocks
            lines.append(self.pipeline.describe())
        if layout.tensor * layout.expert > 1:
            lines.append(self._split_layers())
        if layout.context > 1:
            refuse_mixing_layers(self.module, self.blocks)
            group = mesh.group("context")
            self._context = ContextParallel(self.blocks, self.here, group, exchange, self._verification)
        if self._plan_check is not None:
            self._plan_check.watch(self.blocks, self.here)
        self.description = "; ".join(lines)
        log.info("fsdp: %s", "; ".join(filter(None, (mesh.describe(), self.description))))

    def _split_layers(self) -> str:
        from trainer.strategies.parallel.experts import find_experts, split_experts
        from trainer.strategies.parallel.plan import (
            apply_plan,
            describe_plan,
            find_plan,
            is_here,
            needs_loss_parallel,
            resolve_plan,
        )
        from trainer.strategies.parallel.plan_check import PlanCheck

        module, layout, plan = self.module, self.layout, find_plan(self.module)
        experts = find_experts(module, plan, layout.tensor * layout.expert)
        if layout.expert > 1 and not experts:
            raise ConfigError(
                f"expert_parallel={layout.expert}: the plan of {type(module).__name__} names no experts. Add them: "
                'tensor_parallel_plan = {"net.blocks.*.experts": "experts"}.'
            )
        styles = resolve_plan(module, plan, layout.tensor)
        if layout.tensor > 1:
            of_machine = self._processes.world_size // self._processes.num_nodes
            if of_machine % layout.tensor:
                log.warning(
                    "tensor_parallel=%d does not divide the %d processes of a machine, so that each layer is summed "
                    "between machines: choose a number that does",
                    layout.tensor,
                    of_machine,
                )
            self._plan_check = PlanCheck(module, styles, self.mesh.tensor.get_group(), self._verification)
            apply_plan(module, self.mesh.tensor, styles)
            self._splits_losses = needs_loss_parallel(styles)
        self.experts = {name: one for name, one in experts.items() if is_here(one)}
        for one in self.experts.values():
            split_experts(one, self.mesh.experts, self.verify)
        return describe_plan(module, styles if layout.tensor > 1 else {}, self.experts)

    # -- the steps of a run --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._called, self._called_first = set[str](), set[str]()
        """The step methods that have been called, and those that were called in the window in progress."""
        self.common_loss = CommonLoss()
        """Compares the losses of the processes of one stage."""
        self._stage_values: StageValues | None = None
        self._compares_gradients = False

    def start_again(self, mesh: ParallelMesh, processes: SingleProcess) -> None:
        """Begin a run of a module that an earlier one has split.

        Args:
            mesh: the mesh of the new run: messages of a broken run may still be pending in the old one.
        """
        self._processes = processes
        self._start()
        if self.pipeline is not None:
            self.pipeline.connect(mesh)

    def start_training(self, precision: Precision, optimizers: list[Optimizer], config: StepOptions) -> None:
        """Check the windows from here on; a window ends with `end_window`.

        Raises:
            ConfigError: these settings do not fit a model that is split so.
        """
        refuse_settings(self.layout, optimizers, config)
        if self.layout.pipeline > 1:
            stages, window = self.layout.pipeline, config.accumulate_grad_batches or 1
            log.log(
                logging.WARNING if window < stages else logging.INFO,
                "pipeline of %d stages, windows of %d micro-batches: %.0f %% of the time of each stage is waiting; "
                "accumulate_grad_batches=%d has less",
                stages,
                window,
                100 * bubble(stages, window),
                4 * max(stages, window),
            )
        self._dtype = precision.autocast or precision.weights
        if self.verify and self.layout.processes > 1:
            self._compares_gradients = self.layout.tensor > 1
            experts = [self.mesh.experts.get_group("expert")] if self.layout.expert > 1 else []
            self.common_loss = CommonLoss(self.here.values(), self._groups_of_parts(), experts)
            self._stage_values = None if self.pipeline is None else StageValues(self.module)

    def call(self, step: str, args: tuple[Any, ...], device: torch.device, run: Callable[[], Any]) -> Any:
        """Return `run()`, a call of a step method with these arguments, and check it.

        Raises:
            ConfigError: the processes of one model have different batches, or read what they have not computed.
        """
        if not self.layout:
            return run()
        training = step == "training_step" and torch.is_grad_enabled()
        if training:
            self.common_loss.begin()
            if self.common_loss.verifies:
                self._verification.restart()
        values = self._stage_values if training else None
        with self._uncompiled_once(step), NULL_CONTEXT if values is None else values.step():
            if self.layout.processes > 1 and args[1:2] == (0,):
                refuse_different_batches(step, args[0], [self.mesh.group("stage"), *self._groups_of_parts()], device)
            if self._context is None:
                return run()
            self._context.begin()
            outputs = run()
            self._context.end(outputs)
            return outputs

    def _uncompiled_once(self, step: str) -> AbstractContextManager[Any]:
        """Return a context where compiled blocks run uncompiled, for the checks in a step method's first call.

        In training until the window ends, because a backward recomputes as its forward has computed; also where blocks
        are verified again, or attributes cannot be read.
        """
        again = self.common_loss.verifies or (self._stage_values is not None and bool(self._stage_values.unread))
        if step in self._called and not again:
            return NULL_CONTEXT
        (self._called_first if torch.is_grad_enabled() else self._called).add(step)
        return torch.compiler.set_stance("force_eager") if has_compiled(self.module) else NULL_CONTEXT

    def losses(self) -> AbstractContextManager[Any]:
        """Return the context for losses that are computed from sharded logits."""
        if not self._splits_losses:
            return NULL_CONTEXT
        from trainer.strategies.parallel.plan import split_losses

        return split_losses()

    def as_forward(self) -> AbstractContextManager[Any]:
        """Return a context where a backward recomputes as its forward has computed."""
        return torch.compiler.set_stance("force_eager") if self._called_first else NULL_CONTEXT

    def exchange_values(self) -> None:
        """Find what a window has changed on some stages alone. Collective, after some windows."""
        if self._stage_values is not None:
            self._stage_values.exchange(self._processes)

    def end_window(self) -> None:
        """End the checks of the first window. Collective.

        Raises:
            ConfigError: the gradients of replicated parameters differ between the processes of a layer.
        """
        self._called |= self._called_first
        self._called_first.clear()
        if self._compares_gradients:
            own = {name: p for name, p in self.module.named_parameters() if self.is_here(name)}
            self._compares_gradients = all(p.grad is None for p in own.values())
            full = {name: p for name, p in own.items() if p.requires_grad and not _is_split(p)}
            refuse_partial_gradients(full, self._dtype, self.mesh.tensor.get_group())

    def is_here(self, name: str) -> bool:
        """Whether this process has a parameter, which may be one of another stage."""
        return self.pipeline is None or name not in self.pipeline.elsewhere

    def _groups_of_parts(self) -> list[Any]:
        """Return the groups through this process that compute one stage."""
        of_layers = [self.mesh.tensor.get_group()] if self.layout.tensor > 1 else []
        return [self.mesh.group("context"), *of_layers]

    # -- state ---------------------------------------------------------------------------------------------------------

    def writes(self, name: str, tensor: Any) -> bool:
        """Whether this process writes its part of a parameter, or of a tensor in the parameter's optimizer state."""
        if self.pipeline is not None and not self.pipeline.writes(name):
            return False
        # A parameter outside of the plan has copies along the dimension "tensor".
        return _is_split(tensor) or self.mesh.position("tensor") == 0

    def shards(self, name: str, value: Any, known: dict[int, Shard]) -> Any:
        """Return a value that belongs to a parameter or buffer, or to no one (""), with its shards on this process."""
        from trainer.strategies.fsdp.dtensors import absent, as_shards, full_shard

        if not self.is_here(name):
            return known.setdefault(id(value), absent(value))
        if self.pipeline is not None and name in self.pipeline.stage_of_buffer:
            is_first = not any(self.mesh.position(along) for along in ("readers", "context", "tensor"))
            return full_shard(value, is_first and self.pipeline.stage_of_buffer[name] == self.pipeline.stage)
        return as_shards(value, lambda tensor: self.writes(name, tensor), known)

    def with_other_stages(self, own: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state with what other stages have of it, as shards without elements. Collective."""
        from trainer.strategies.fsdp.dtensors import absent_like, description

        described = {name: description(of_one) for name, of_one in own.items()}
        everywhere = ChainMap(*self._processes.all_gather_object(described))
        names = [name for group in groups for name in group["params"] if name in everywhere]
        return {name: own[name] if name in own else absent_like(everywhere[name]) for name in names}

    def own_of(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states, by name, of the parameters that this process has."""
        return {name: one for name, one in states.items() if self.is_here(name)}


def _is_split(tensor: Any) -> bool:
    """Whether tensor parallelism has split a parameter."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and "tensor" in (mesh.mesh_dim_names or ())
