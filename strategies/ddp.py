"""Replicate the model on every process and average gradients (torch's DistributedDataParallel)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.arguments import PositiveFloat
from trainer.errors import ConfigError
from trainer.model.blocks import BlockPolicy
from trainer.model.gradients import sparse_weights
from trainer.module import TrainModule
from trainer.precision import is_quantized
from trainer.strategies.distributed import DistributedStrategy, StepForward, average_gradients
from trainer.strategies.swapped_parameters import changed_alike
from trainer.strategy import SkippedBatch, StepOptions, marks_of_gradients


class _DDPForward(StepForward):
    """A step method as the `forward`; a skipped batch has a backward, too, because the other processes wait for it."""

    def forward(self, step: str, *args: Any) -> Any:
        outputs = super().forward(step, *args)
        if outputs is not None:
            return outputs
        if sparse_weights(self.module):
            raise ConfigError(
                f"{step} returned None to leave out a batch, and strategy 'ddp' then reduces no sparse gradients: "
                "build the embeddings without sparse=True, or leave out such samples in the dataset or collate_fn."
            )
        zeros = [parameter.sum().float() * 0.0 for parameter in self.module.parameters() if parameter.requires_grad]
        return SkippedBatch(torch.stack(zeros).sum())


class DDPStrategy(DistributedStrategy):
    """`DistributedDataParallel` around the module.

    Args:
        find_unused_parameters: some parameters get no gradient in some steps.
        static_graph: the same parameters are used in every step; saves the search for unused ones.
        gradient_as_bucket_view: gradients live in the communication buckets: less memory, no copy.
        bucket_cap_mb: size of a bucket in MiB; None: torch's default (25).
        broadcast_buffers: rank 0's buffers (batch norm) go to all processes before each forward.
        comm_hook: how gradients travel: "fp16_compress", "bf16_compress" (NCCL only), "power_sgd", or a function
            `(state, bucket) -> Future` as in `DistributedDataParallel.register_comm_hook`.
        comm_hook_state: the state given to a `comm_hook` function.
        timeout_seconds: after which a collective that does not end raises.

    Manual optimization works without the wrapper: `manual_backward` averages the gradients at its end, so any subset of
    parameters may be used, in any order.
    """

    name: ClassVar[str] = "ddp"

    def __init__(
        self,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: PositiveFloat | None = None,
        broadcast_buffers: bool = True,
        comm_hook: Literal["fp16_compress", "bf16_compress", "power_sgd"] | Callable[..., Any] | None = None,
        comm_hook_state: Any = None,
        timeout_seconds: PositiveFloat = 1800.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        if not broadcast_buffers:
            # torch 2.13 renames it; its default, True, needs no name.
            self.options["broadcast_buffers"] = False
        self.static_graph = static_graph
        self.comm_hook = comm_hook
        self.comm_hook_state = comm_hook_state
        self.wrapped: DistributedDataParallel | None = None
        self._first_window = True
        self._is_first_step = False
        self._more_follow = False
        self._prepared = False
        """True from a forward to its backward, where torch averages the gradients."""
        self._trained: dict[DDPStrategy, None] = {}
        """The strategies of all modules that train together: the copies of this one share them."""

    def setup_module(
        self, module: TrainModule, for_training: bool, activation_checkpointing: BlockPolicy | None = None
    ) -> None:
        super().setup_module(module, for_training, activation_checkpointing)
        if not for_training:
            return
        self._is_first_step = self.processes.world_size > 1
        if module.automatic_optimization and any(p.requires_grad for p in module.parameters()):
            self._wrap()
        else:
            self.processes.broadcast([*module.parameters(), *module.buffers()])
        self._trained[self] = None

    def setup_optimizers(self, optimizers: list[Optimizer], config: StepOptions) -> list[Optimizer]:
        if self.wrapped is not None and self._flags() != self._wrapped_flags:  # by configure_optimizers
            self.parameters_changed("", optimizers)
        return super().setup_optimizers(optimizers, config)

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.module.parameters()]

    def _wrap(self) -> None:
        self._first_window, self._wrapped_flags = True, self._flags()
        forward: Any = _DDPForward(self.module)
        named = forward.named_parameters()
        apart = {name: p for name, p in named if is_quantized(p) or (p.is_floating_point() and p.itemsize == 1)}
        self.processes.broadcast(apart.values())
        if apart:  # torch would broadcast them without a change of dtype
            forward._ddp_params_and_buffers_to_ignore = [*apart]
        self.wrapped = DistributedDataParallel(forward, **self.options)
        if self.comm_hook is not None:
            self._register_comm_hook(self.wrapped)
        if self.module.overrides("backward") and self.processes.world_size > 1:
            self._run_backward = self._backward_of_module

    def _register_comm_hook(self, wrapped: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[Any, Any] = {
            "fp16_compress": default_hooks.fp16_compress_hook,
            "bf16_compress": default_hooks.bf16_compress_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
        }
        hook: Any = self.comm_hook
        state = powerSGD_hook.PowerSGDState(None) if hook == "power_sgd" else self.comm_hook_state
        try:
            wrapped.register_comm_hook(state, hooks.get(hook, hook))
        except (KeyError, TypeError, ValueError) as error:  # torch asks for the argument's name
            message = f"DDPStrategy(comm_hook={hook!r}): give a function (state, bucket) -> Future."
            raise ConfigError(message) from error

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        if self.wrapped is None:
            return self._holding_back(more_follow=not last)
        # With a static graph DDP learns the graph in the first backward, which has to communicate.
        if last or (self.static_graph and self._first_window):
            return nullcontext()
        if self._prepared:  # by a forward whose backward did not come: a run that is resumed here does not know it
            self._prepared = False
            self.wrapped.reducer._reset_state()
        return self.wrapped.no_sync()

    @contextmanager
    def _holding_back(self, more_follow: bool) -> Any:
        self._more_follow = more_follow
        try:
            yield
        finally:
            self._more_follow = False

    def call_step(self, step: str, *args: Any) -> Any:
        if step == "training_step" and self._is_first_step:
            self._is_first_step = False
            with changed_alike(self):
                return self.call_step(step, *args)
        if step != "training_step" or self.wrapped is None:
            return super().call_step(step, *args)
        self._prepared = self._prepared or (self.wrapped.require_backward_grad_sync and torch.is_grad_enabled())
        with self.precision.forward_context(self.device):
            return self.wrapped(step, *args)

    def backward(self, loss: torch.Tensor) -> None:
        # Not through super(): from fit to backward there are four frames.
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        # Which modules a loss is of, only the gradients tell.
        before: list[tuple[DDPStrategy, Any]] = [(self, None)]
        if len(self._trained) > 1:
            before = [(one, marks_of_gradients(one.module.parameters())) for one in self._trained]
        for one, _ in before:
            wrapped = one.wrapped
            if wrapped is not None and wrapped.find_unused_parameters and wrapped.require_backward_grad_sync:
                wrapped.reducer.prepare_for_backward([loss])  # which may use fewer parameters than the outputs
                one._prepared = True
        self._run_backward(loss)
        for one, marks in before:
            if marks is None or marks != marks_of_gradients(one.module.parameters()):
                one._complete_backward()

    def _complete_backward(self) -> None:
        """Average over the processes what torch has not; the mean of what it has averaged is the same."""
        wrapped, world_size = self.wrapped, self.processes.world_size
        if wrapped is not None and self._prepared:
            self._prepared = False
            # A parameter without a gradient leaves the others unsynchronized; torch itself looks a step later.
            wrapped._check_reducer_finalized()
        elif world_size > 1 and (not self._more_follow if wrapped is None else wrapped.require_backward_grad_sync):
            if self.static_graph and wrapped is not None:
                raise ConfigError(
                    "DDPStrategy(static_graph=True) averages one backward after each forward, and this is a second "
                    "one. Call backward once, for the sum of the losses, or leave static_graph out."
                )
            trained = [p for p in self.module.parameters() if p.requires_grad]
            average_gradients(trained, world_size, sparse_weights(self.module))

    def _backward_of_module(self, loss: torch.Tensor) -> None:
        """Call an override of `backward`; average what it has set without a backward, too.

        The mean of what torch has averaged already is the same.

        Raises:
            ConfigError: it computes a gradient a second time: torch averages over the processes in the first backward,
                and what a later one adds would be each process's own.
        """
        assert self.wrapped is not None
        if not self.wrapped.require_backward_grad_sync:
            self.module.backward(loss)
            return
        seen: set[torch.Tensor] = set()

        def refuse_second(parameter: torch.Tensor) -> None:
            if parameter in seen:
                raise ConfigError(
                    f"{type(self.module).__name__}.backward computes the gradients of some parameters several times, "
                    "and strategy 'ddp' averages them in the first backward only. Call loss.backward() once, for the "
                    "sum of the losses, or use strategy 'fsdp'."
                )
            seen.add(parameter)

        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(refuse_second) for parameter in trained]
        try:
            self.module.backward(loss)
        finally:
            for handle in handles:
                handle.remove()
        average_gradients(trained, self.processes.world_size, sparse_weights(self.module))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        self._first_window = False
        super().step(optimizer, closure, **options)

    def parameters_changed(self, changes: str, optimizers: list[Optimizer]) -> None:
        """Wrap again: DistributedDataParallel synchronizes what required a gradient when it was made."""
        for parameter in self.module.parameters():
            parameter.grad = None  # may be a view of the former buckets
        if self.wrapped is None:
            self.processes.broadcast([*self.module.parameters(), *self.module.buffers()])
        if self.module.automatic_optimization and any(p.requires_grad for p in self.module.parameters()):
            self.wrapped = None
            gc.collect()  # the former wrapper's hooks end with it
            self._wrap()

    def teardown(self) -> None:
        self.wrapped = None
        self._trained.clear()
        super().teardown()

    def __str__(self) -> str:
        options = {**self.options, "comm_hook": self.comm_hook}
        changed = [f"{name}={value}" for name, value in options.items() if value or name == "broadcast_buffers"]
        return f"{self.name} ({', '.join(changed)})"
