"""Train with DeepSpeed ZeRO: its engine shards optimizer, gradients and weights under the trainer's loop."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.arguments import PositiveFloat, local_path
from trainer.checkpoint.optimizer_state import extra_of, matching_groups, refuse_own_tensors
from trainer.checkpoint.shards import Loadable, Shard, in_memory
from trainer.errors import ConfigError, first_of, install_command, raise_problems
from trainer.model.blocks import BlockPolicy
from trainer.model.init_device import InitDevice, build_context
from trainer.model.parameter_tables import ParameterTables, describe_changes
from trainer.model.unsupported import use_contiguous_parameters
from trainer.module import TrainModule
from trainer.precision import NULL_CONTEXT, Precision
from trainer.strategies.call_order import BACKWARD, CallOrder
from trainer.strategies.deepspeed.config import (
    AgreedSettings,
    config_problems,
    hidden_size_of,
    read_config,
    resolve_config,
    value_at,
    write_config,
)
from trainer.strategies.deepspeed.empty_parameters import RefusingEmptyParameters
from trainer.strategies.deepspeed.engine import (
    LossScale,
    cpu_adam_of,
    end_engine,
    hooks_of,
    import_deepspeed,
    in_full_precision,
    keep_lists,
    local_rank_env,
    low_precision,
    stop_gathering,
)
from trainer.strategies.deepspeed.master_weights import (
    EngineValues,
    MasterWeights,
    NoMasterWeights,
    Zero3MasterWeights,
    keep_only_shards,
    refuse_lost_changes,
    weights,
)
from trainer.strategies.deepspeed.partitioning import (
    cast_parameters,
    expose_shapes,
    is_zero3_partitioned,
    local_values,
    partition_module,
    partitioned_parameters,
    restore_empty,
)
from trainer.strategies.deepspeed.problems import (
    cpu_adam_problems,
    engine_problems,
    module_problems,
    optimizer_problems,
    step_problems,
    unsupported_problems,
)
from trainer.strategies.distributed import DistributedStrategy, StepForward
from trainer.strategies.swapped_parameters import (
    SwappedParameters,
    SwapsParameters,
    changed_alike,
    has_compiled,
    unchanged_while_gathered,
    without_hooks,
)
from trainer.strategy import StepOptions, load_values, override_problems

log = logging.getLogger("trainer")
Offload = Literal[False, "cpu", "nvme"]


class DeepSpeedStrategy(SwapsParameters, DistributedStrategy):
    """DeepSpeed's ZeRO engine under the trainer's loop.

    Args:
        config: a DeepSpeed JSON, as path or dict. Every "auto" in it is filled in from the trainer, and what
            contradicts the trainer is reported. None: DeepSpeed's defaults.
        stage: what is sharded. 1: the optimizer's states; 2: gradients too; 3: weights too. Default: the JSON's, or 2.
        offload_optimizer: keep master weights and optimizer states in "cpu" memory, or on "nvme"; False: on the device.
        offload_parameters: with stage 3, the same for the weights.
        nvme_path: the folder for "nvme".
        cpu_adam: with offload_optimizer, compute Adam and AdamW by DeepSpeed's CPUAdam, which is compiled at the first
            use, instead of by torch's.
        init_device: with stage 3, where `configure_model` builds the layers. "cpu": on every process. "mixed": on rank
            0; on the other processes without memory. "meta": without memory on all; then rank 0 calls `init_weights` or
            `reset_parameters` of one submodule after the other. All processes get rank 0's values.
        timeout_seconds: after which a collective that does not end raises.

    With bf16 and fp16 the engine computes with low-precision weights and keeps master weights in float32, with the
    "*-true" precisions too; checkpoints hold these. Frozen parameters have no master weights: bf16 rounds them. The
    optimizer works on flattened parameters, so it has to treat every element alike, as AdamW and SGD do; a
    parameter that a step does not use has a gradient of zero. After a run of stage 3 the module's parameters stay
    sharded: use it with the same strategy, or `load_from_checkpoint`.
    """

    name: ClassVar[str] = "deepspeed"
    default_stage: ClassVar[int | None] = None
    default_offload: ClassVar[str | None] = None
    shards_state = True

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        stage: int | None = None,
        offload_optimizer: Offload | None = None,
        offload_parameters: Offload | None = None,
        nvme_path: str | Path | None = None,
        cpu_adam: bool = False,
        init_device: InitDevice = "cpu",
        timeout_seconds: PositiveFloat = 1800.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.init_device = init_device
        self.config = read_config(config)
        given = self.default_stage if stage is None else stage
        self.stage: int = value_at(self.config, "zero_optimization.stage", 2) if given is None else given
        for_parameters = self.default_offload if self.stage == 3 else None
        self.offload_optimizer = self._offload_device(offload_optimizer, "optimizer", self.default_offload)
        self.offload_parameters = self._offload_device(offload_parameters, "param", for_parameters)
        self.nvme_path = None if nvme_path is None else local_path(nvme_path, "nvme_path")
        self.cpu_adam = cpu_adam
        self.collective_forward = self.stage == 3
        self.engine: Any = None
        self._order = CallOrder(self.processes, self.name, "")
        self._packs_at_once = True
        """False with stage 1, which reduces the gradients when all are there, in the order of the parameters."""
        self._trained: set[str] = set()
        """Names of the parameters that may lack a gradient; empty after the warning, which comes once."""
        self._used: set[str] = set()
        """Names of the parameters with a gradient in the step in progress."""
        self.master_weights: MasterWeights = NoMasterWeights(None, None)
        self.clip_norm: float | None = None
        self.own_loop = False
        self.groups: list[list[nn.Parameter]] = []
        """The parameters of each of the optimizer's groups; DeepSpeed puts others in their place."""

    def _offload_device(self, given: Offload | None, section: str, default: str | None) -> str | None:
        """Return "cpu", "nvme" or "none"; None where neither the strategy nor the JSON names a device."""
        if given is None:
            return default or value_at(self.config, f"zero_optimization.offload_{section}.device")
        return given or "none"

    # -- before anything is started ------------------------------------------------------------------------------------

    def problems(
        self,
        precision: Precision,
        device_type: str,
        num_processes: int,
        config: StepOptions | None = None,
        module: TrainModule | None = None,
    ) -> list[str]:
        problems = super().problems(precision, device_type, num_processes, config, module)
        if find_spec("deepspeed") is None:
            return [
                *problems,
                f"strategy {self.name!r} needs the package 'deepspeed', which is not installed. "
                f"Install it with: {install_command('deepspeed')}",
            ]
        given = {f"init_device={self.init_device!r}": self.init_device != "cpu"}
        given["offload_parameters"] = self.offload_parameters in ("cpu", "nvme")
        if self.stage != 3:
            needing = [option for option, is_given in given.items() if is_given]
            problems += [f"{option} needs stage 3, and the stage is {self.stage}." for option in needing]
        problems += override_problems(module, self.name)
        problems += engine_problems(self.name, self.stage, precision, device_type)
        if self.cpu_adam:
            problems += cpu_adam_problems(self.offload_optimizer)
        if config is not None:
            problems += step_problems(self.name, config)
        if module is not None:
            problems += module_problems(self.name, module, precision, device_type)
            problems += unsupported_problems(self.name, self.stage, module)
        if self.config or "nvme" in (self.offload_optimizer, self.offload_parameters):
            import_deepspeed(device_type)
            problems += config_problems(self.config, self._settings(precision, num_processes, config or StepOptions()))
        return problems

    def _settings(self, precision: Precision, world_size: int, config: StepOptions, **known: Any) -> AgreedSettings:
        return AgreedSettings(
            stage=self.stage,
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
            nvme_path=None if self.nvme_path is None else str(self.nvme_path),
            precision=precision,
            world_size=world_size,
            micro_batch=config.micro_batch_size,
            window=config.accumulate_grad_batches,
            clip_norm=config.clip_norm,
            schedulers=config.schedulers,
            **known,
        )

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_environment(self, device_type: str, precision: Precision, device_ids: list[int] | None = None) -> None:
        super().setup_environment(device_type, precision, device_ids)
        self.scaler = None
        self.deepspeed = import_deepspeed(device_type)
        with local_rank_env(self._device_number):
            self.deepspeed.init_distributed(auto_mpi_discovery=False, timeout=self.timeout, verbose=False)

    @property
    def _device_number(self) -> int:
        """The number that DeepSpeed takes for this process's device: with devices=[2, 3] not the local rank."""
        return self.device.index if self.device.type == "cuda" else self.processes.local_rank

    @contextmanager
    def init_context(self, module: TrainModule, will_load_checkpoint: bool) -> Iterator[None]:
        with self.precision.init_context(module), build_context(self.init_device):
            yield
        if self.stage == 3 and module.overrides("configure_model"):
            loaded = list(module.state_dict()) if will_load_checkpoint else []
            with local_rank_env(self._device_number):
                config = in_full_precision(self._resolve(module))
                partition_module(self.deepspeed, config, module, self.init_device, loaded)

    def setup_module(
        self, module: TrainModule, for_training: bool, activation_checkpointing: BlockPolicy | None = None
    ) -> None:
        self.teardown()
        if for_training:
            raise_problems(unsupported_problems(self.name, self.stage, module), f"strategy {self.name!r}")
            use_contiguous_parameters(module)
        self._full = SwappedParameters(self, self._computing_full)
        self._refusing = RefusingEmptyParameters(module, self.name)
        former = self.master_weights if vars(self).get("module") is module else NoMasterWeights(None, None)
        self._take_over_later_changes(module)
        self.master_weights = NoMasterWeights(None, None)
        super().setup_module(module, for_training, activation_checkpointing)
        # Rounding them a second time would lose what the former run has in its master weights.
        former.restore_full_parameters()
        cast_parameters(module, torch.float32 if for_training else self.precision.weights)
        if for_training:
            expose_shapes(module)
        elif self.stage == 3:
            self._start(None, in_full_precision(self._resolve(module)))
            self.master_weights = NoMasterWeights(self.engine.optimizer, None)

    def setup_optimizers(self, optimizers: list[Optimizer], config: StepOptions) -> list[Optimizer]:
        raise_problems(optimizer_problems(optimizers, self.cpu_adam), f"strategy {self.name!r}")
        module, (optimizer,) = self.module, optimizers
        restore_empty(module)
        self.processes.broadcast(
            [t for t in (*module.parameters(), *module.buffers()) if t.numel() and not is_zero3_partitioned(t)]
        )
        resolved = self._resolve(module, optimizer, config)
        self.clip_norm, self.own_loop = resolved["gradient_clipping"] or None, config.own_loop
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        low = low_precision(resolved)
        full = {}
        if low:
            # As long as master weights are missing, those in full precision stay in memory.
            full = {parameter: local_values(parameter) for parameter in module.parameters()}
            cast_parameters(module, low)
        self._packs_at_once = self.stage >= 2 or bool(resolved["zero_optimization"].get("overlap_comm"))
        self._start(cpu_adam_of(self.deepspeed, optimizer) if self.cpu_adam else optimizer, resolved)
        kind = Zero3MasterWeights if self.stage == 3 else MasterWeights
        self.master_weights = kind(self.engine.optimizer, self.engine.basic_optimizer)
        self.master_weights.write(full)
        self.master_weights.remember_weights()
        self.begun = False
        if low is torch.float16:
            self.scaler = LossScale(self.engine.optimizer.loss_scaler)  # type: ignore[assignment]
        return [optimizer]

    def _resolve(
        self, module: TrainModule, optimizer: Optimizer | None = None, config: StepOptions | None = None
    ) -> dict[str, Any]:
        """Return the configuration of the engine, for training with an optimizer or for evaluation without one.

        Raises:
            ConfigError: everything that contradicts the trainer.
        """
        known = {"hidden_size": hidden_size_of(module), "optimizer": optimizer}
        settings = self._settings(self.precision, self.processes.world_size, config or StepOptions(), **known)
        completed = resolve_config(self.config, settings)
        norm = completed.get("gradient_clipping")
        if config is not None and norm and settings.clip_norm is None:
            self.processes.log.info("deepspeed: gradients are clipped by the norm %s of its configuration", norm)
        if config is not None and config.run_dir is not None and self.processes.is_global_zero:
            write_config(completed, config.run_dir)
        return completed

    def _start(self, optimizer: Optimizer | None, config: dict[str, Any]) -> None:
        """Start the engine, after the hooks that have to come before its own."""
        module = self.module
        layers = {name: one for name, one in module.named_modules() if [*one.parameters(recurse=False)]}
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        what, first = ("layer", [*layers]) if self.stage == 3 else ("gradient of", None)
        self._order = CallOrder(self.processes, self.name, what, first)
        self._order.watch_gradients(trained, self._note_gradient)
        self._trained = set(trained)
        # The engine turns an autocast around it off.
        steps = StepForward(module, partial(self.precision.forward_context, self.device))
        with local_rank_env(self._device_number), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine, *_ = self.deepspeed.initialize(
                model=steps, optimizer=optimizer, config=config, dist_init_required=False
            )
        self._tables = ParameterTables(module)
        self._is_first_step = True
        if self.stage == 3:
            self._order.watch(layers)
            self._refusing.begin()
            self._copy_lists = keep_lists()
            # The module's own forward need not be called, and may be: it gives back only what this does not hold.
            for parameter in module.parameters(recurse=False):
                self.deepspeed.zero.register_external_parameter(steps, parameter)
        elif not self._packs_at_once:
            self._compare_before_reducing()

    def _note_gradient(self, name: str) -> None:
        """Note that a parameter has its gradient, before stage 2 packs it with others."""
        self._used.add(name)
        if self.stage < 3 and self._packs_at_once:
            self._order.call(name)

    def _compare_before_reducing(self) -> None:
        """Have stage 1 compare which gradients there are, when it reduces them in the order of the parameters."""
        engine, reduce = self.engine, self.engine.allreduce_gradients

        def reduce_the_same(*args: Any, **options: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                with self._order.of(BACKWARD):
                    for name in sorted(self._used):
                        self._order.call(name)
            return reduce(*args, **options)

        engine.allreduce_gradients = reduce_the_same

    # -- one step ------------------------------------------------------------------------------------------------------

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        if not self.begun:
            self.master_weights.begin_step()
            self.begun = True
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def call_step(self, step: str, *args: Any) -> Any:
        if self.engine is None or (self.stage < 3 and step != "training_step"):
            return super().call_step(step, *args)
        if self.stage == 3 and not self._tables.unchanged() and not self._tables.same_parameters():
            self.parameters_changed(describe_changes(self._tables.changes()), [])
        self.master_weights.take_over_changes()
        compared = self._order.of(step) if self.stage == 3 else NULL_CONTEXT
        gradients = torch.is_grad_enabled()  # never in inference mode
        try:
            # Weights that are gathered in inference mode could not be used for training afterwards.
            with (
                local_rank_env(self._device_number),
                self._unchanged(step),
                compared,
                torch.inference_mode(False),
                torch.set_grad_enabled(gradients),
            ):
                return self.engine(step, *args)
        except BaseException:
            stop_gathering(self.engine.module)
            raise

    def _unchanged(self, step: str) -> AbstractContextManager[None]:
        """Return the context of a forward, which compares weights in the first training step, and to find anomalies.

        Below stage 3 what changes has to change alike; gathered weights of stage 3 may not change.
        """
        compares = step == "training_step" and (self._is_first_step or torch.is_anomaly_enabled())
        self._is_first_step = self._is_first_step and step != "training_step"
        if self.stage < 3:
            return changed_alike(self) if compares else NULL_CONTEXT
        if not compares or has_compiled(self.module):
            return self._refusing.paused()
        names = self._names

        def gathered(unit: nn.Module) -> dict[str, torch.Tensor]:
            own = partitioned_parameters(unit, recurse=False)
            return {names[p]: p for p in own if p.ds_status is type(p.ds_status).AVAILABLE}

        units = [(unit, partial(gathered, unit)) for unit in self.module.modules()]
        return unchanged_while_gathered(units, hooks_of(self.engine), self)

    def backward(self, loss: torch.Tensor) -> None:
        order = self._order.of(BACKWARD) if self._packs_at_once else NULL_CONTEXT
        try:
            with local_rank_env(self._device_number), self._refusing.paused(), order:
                self.engine.backward(loss, scale_wrt_gas=False)
        except AssertionError as error:
            raise ConfigError(
                "DeepSpeed reduces each gradient once per micro-batch, and its check of that failed: leave "
                "loss.backward() out of training_step, and return the sum of the losses. (With activation "
                f"checkpointing of your own: use_reentrant=False.)\nDeepSpeed said: {error}"
            ) from error

    def unscale(self, optimizer: Optimizer) -> None:
        pass

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> torch.Tensor | None:
        """Do nothing, because the engine clips in its step, by the norm that it was given at the start.

        With an infinite norm return the norm of the step before; None while a window is in progress. A step whose
        gradients are not finite changes nothing, and has an infinite norm.

        In a user's own loop the value is the clipping norm of the next step.

        Raises:
            ConfigError: `value` or `algorithm` has changed since the start.
        """
        if algorithm == "norm" and value == math.inf:
            norm = None if self.begun else self.engine.get_global_grad_norm()
            return None if norm is None else torch.as_tensor(norm, dtype=torch.float32, device=self.device)
        if algorithm != "norm" or (value != self.clip_norm and not self.own_loop):
            raise ConfigError(
                f"strategy {self.name!r} clips by the norm {self.clip_norm}, as it was at the start, and cannot clip "
                f"by {algorithm} {value}. Give Trainer(gradient_clip_val=...) and gradient_clip_algorithm='norm'."
            )
        self.engine.optimizer.clip_grad = value
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        if closure is not None:
            raise ConfigError(f"strategy {self.name!r} cannot evaluate the loss several times a step.")
        self.master_weights.take_over_changes()
        if self._trained - self._used:
            self._report_unused()
        self._used.clear()
        with self._refusing.paused():
            self.engine.step()
        if self.own_loop:
            self.engine.optimizer.clip_grad = self.clip_norm or 0.0
        self.master_weights.remember_weights()
        self.begun = False

    def _report_unused(self) -> None:
        """Say once what other strategies leave alone in a step, and this one does not."""
        if self.processes.is_global_zero:
            log.warning(
                "no backward of this step has used %s: DeepSpeed takes such gradients for zeros, so that weight decay "
                "and momentum change these weights, which other strategies leave alone",
                first_of(sorted(self._trained - self._used)),
            )
        self._trained = set()

    def end_step(self) -> None:
        pass

    def parameters_changed(self, changes: str, optimizers: list[Optimizer]) -> None:
        raise ConfigError(
            f"{changes}, and strategy {self.name!r} flattens the parameters that train at the start. Have all of them "
            "train from the start, in a group whose lr is 0 until then; or end the run, and begin another from its "
            "weights (load_from_checkpoint); or use strategy 'ddp' or 'fsdp'."
        )

    def _computing_full(self, module: nn.Module) -> AbstractContextManager[None]:
        """Have a part of the module compute with full parameters, without the engine's hooks."""
        return without_hooks(hooks_of(self.engine) if self.engine is not None and self.stage == 3 else [])

    # -- state ---------------------------------------------------------------------------------------------------------

    def _take_over_later_changes(self, module: TrainModule) -> None:
        """Have changes of a module whose run has ended count."""
        refuse_lost_changes(module)
        self.master_weights.take_over_later_changes()

    def module_state(self) -> dict[str, torch.Tensor | Shard]:
        if self.engine is None:
            self._take_over_later_changes(self.module)
        else:
            self.master_weights.take_over_changes()
        return weights(self.module, self.master_weights)

    def load_module_state(self, state: Mapping[str, Loadable | Shard], strict: bool = True, hooks: bool = True) -> None:
        values = EngineValues(self.master_weights)
        load_values(self.module, state, strict, hooks, values)
        self.master_weights.write(values.of_masters)
        if self.engine is None:  # after a run
            self.master_weights.restore_full_parameters()
        else:
            self.master_weights.refresh()
            self.master_weights.remember_weights()

    @property
    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        names = self._names
        own = self.master_weights.optimizer  # whose parameters are flat
        common = {key: value for key, value in own.state.items() if not isinstance(key, torch.Tensor)}
        more = {"common": common} if common else {}
        # Torch's own has no more entries, and does not know the states of flat parameters that were replaced.
        extra = {} if type(own).state_dict is Optimizer.state_dict else extra_of(own.state_dict())
        refuse_own_tensors(optimizer, {**more, "extra": extra}, f"strategy {self.name!r}")
        return {
            **more,
            "kind": type(optimizer).__name__,
            "state": self.master_weights.states(names),
            "param_groups": [
                {**group, "params": [names[parameter] for parameter in parameters]}
                for group, parameters in zip(optimizer.param_groups, self.groups, strict=True)
            ],
        }

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        names = self._names
        own = [[names[parameter] for parameter in parameters] for parameters in self.groups]
        saved = matching_groups(self.module, optimizer, state, own)
        self.master_weights.load_states(state["state"], names, state.get("dtypes", {}))
        self.master_weights.optimizer.state.update(in_memory(state.get("common", {})))
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})

    def teardown(self) -> None:
        """End the engine. Master weights and the optimizer's states stay, to be saved, until the next set-up."""
        self._order.end()
        if self.engine is None:
            return
        self._refusing.end()
        engine, self.engine = self.engine, None
        self.master_weights.finish()
        end_engine(engine, self.stage)
        if self.stage == 3:
            self._copy_lists()
            keep_only_shards(self.module, self.master_weights)
        self.master_weights.release_engine(self.module)

    def __str__(self) -> str:
        options = {
            "stage": self.stage,
            "offload_optimizer": self.offload_optimizer,
            "offload_parameters": self.offload_parameters,
            "cpu_adam": self.cpu_adam,
        }
        given = [f"{name}={value}" for name, value in options.items() if value not in (None, "none", False)]
        return f"{self.name} ({', '.join(given)})"


class DeepSpeedStage1Strategy(DeepSpeedStrategy):
    """ZeRO 1: the optimizer's states are sharded."""

    name: ClassVar[str] = "deepspeed_stage_1"
    default_stage: ClassVar[int | None] = 1


class DeepSpeedStage2Strategy(DeepSpeedStrategy):
    """ZeRO 2: the optimizer's states and the gradients are sharded."""

    name: ClassVar[str] = "deepspeed_stage_2"
    default_stage: ClassVar[int | None] = 2


class DeepSpeedStage3Strategy(DeepSpeedStrategy):
    """ZeRO 3: the optimizer's states, the gradients and the weights are sharded."""

    name: ClassVar[str] = "deepspeed_stage_3"
    default_stage: ClassVar[int | None] = 3


class DeepSpeedStage2OffloadStrategy(DeepSpeedStage2Strategy):
    """ZeRO 2 with the optimizer in the memory of the CPU."""

    name: ClassVar[str] = "deepspeed_stage_2_offload"
    default_offload: ClassVar[str | None] = "cpu"


class DeepSpeedStage3OffloadStrategy(DeepSpeedStage3Strategy):
    """ZeRO 3 with the optimizer and the weights in the memory of the CPU."""

    name: ClassVar[str] = "deepspeed_stage_3_offload"
    default_offload: ClassVar[str | None] = "cpu"
