"""The models and optimizers that an Engine has set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError
from trainer.guards.nonfinite import StateMonitor
from trainer.model.parameter_tables import ParameterTables, describe_changes
from trainer.module import TrainModule
from trainer.optimizers import zero_grad_fast
from trainer.precision import NULL_CONTEXT
from trainer.state.hook_changes import HookChanges
from trainer.strategy import Strategy, inherits, keeps_step

MODEL = "model."
"""Begins the names of parameters as a strategy knows them."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Adapter(TrainModule):
    """The form of a user's module that strategies take: each of its methods runs as a step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.model = module

    def training_step(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:  # type: ignore[override]
        """Call the module, or a method of it."""
        return (self.model if method == "forward" else getattr(self.model, method))(*args, **options)

    validation_step = training_step


class EngineModule(nn.Module):
    """A model that `Engine.setup` returned: called like the module itself, with all attributes of the module.

    It shares the module's parameters, keys and submodules.
    """

    module: nn.Module
    """The module that was given to `setup`."""

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        engine: Any,
        finite: StateMonitor,
        changes: HookChanges,
        trains: bool,
    ) -> None:
        super().__init__()
        dtype, casts = strategy.precision.weights, strategy.precision.casts_batch
        plain = keeps_step(strategy) and not casts
        own = vars(self)
        # Shared, not registered as a child, so that all names stay the same.
        own |= {name: value for name, value in vars(module).items() if name in own and isinstance(value, dict)}
        own |= {"module": module, "training": module.training, "_strategy": strategy, "_engine": engine}
        own |= {"_finite": finite, "_changes": changes, "_trains": trains, "_casts": casts, "_plain": plain}
        own |= {"_accumulates": None, "_held": None, "_called": False, "_evaluated": False}
        own["_low"] = dtype if casts and dtype.itemsize == 2 else strategy.precision.autocast
        own["_syncs"] = trains and not inherits(strategy, "gradient_sync")
        own["_tables"] = ParameterTables(strategy.module) if trains else None
        own["_flags"] = [parameter.requires_grad for parameter in module.parameters()]
        for name in _STEPS:
            if callable(getattr(module, name, None)):
                self.mark_forward_method(name)
        if trains and not plain:
            for layer in (module, *module.children()):
                layer.register_forward_pre_hook(self._refuse_direct_call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the precision's context, as the strategy needs it."""
        return self._call("forward", args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of a call."""
        return self(*args, **kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        trained = self._trains and torch.is_grad_enabled()
        if trained:
            engine._last = self
        if not engine._begun:
            engine.begin()
        if self._plain:  # the module's hooks are its own
            return (self.module if method == "forward" else getattr(self.module, method))(*args, **kwargs)
        engine._calls += self._strategy.collective_forward
        if self._casts:
            args, kwargs = map_leaves((args, kwargs), self._strategy.precision.convert_batch)
        self._called = True
        try:
            if trained:
                outputs = self._train(method, args, kwargs)
            else:
                self._evaluated = True
                outputs = self._strategy.call_step("validation_step", method, args, kwargs)
        finally:
            self._called = False
        return outputs if self._low is None else map_leaves(outputs, self._to_float)

    def _train(self, *call: Any) -> Any:
        strategy = self._strategy
        if self._evaluated:
            strategy.release_gathered()
        self._evaluated = False
        with strategy.gradient_sync(last=True) if self._syncs and self._accumulates is None else NULL_CONTEXT:
            return strategy.call_step("training_step", *call)

    def _to_float(self, leaf: Any) -> Any:
        """Return an output in 16 bits as float32, so that losses are computed in float32."""
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == self._low else leaf

    def _refuse_direct_call(self, layer: nn.Module, inputs: Any) -> None:
        if not self._called and torch.is_grad_enabled() and self._engine._entered:
            raise ConfigError(
                f"{type(layer).__name__} was called directly, so its gradients would not be reduced: call the model "
                "that engine.setup returned. For another method than forward: model.mark_forward_method('name')."
            )

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Make a method of the module, such as "generate", run like `forward`: on all processes, with sharding.

        `training_step` and the other steps are marked already.
        """
        name = method if isinstance(method, str) else method.__name__
        vars(self)[name] = wraps(getattr(self.module, name))(lambda *args, **kwargs: self._call(name, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.module, name, value)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module."""
        self.module.train(mode)
        vars(self)["training"] = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module; its tensors may be sharded, see `Engine.full_state_dict`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Self:
        raise ConfigError(
            "copy.deepcopy of the model that engine.setup returned would copy the engine, too. Copy model.module; if "
            "it is sharded, make another module, and give its load_state_dict engine.full_state_dict(model)."
        )

    def require_unchanged(self) -> None:
        """Raise ConfigError if a trained model's parameters were added, replaced, frozen or unfrozen since `setup`."""
        tables = self._tables
        if [parameter.requires_grad for parameter in self.module.parameters()] != self._flags:
            raise self._changed("parameters were frozen or unfrozen")
        if not tables.unchanged():
            self._strategy.release_gathered()
            if not tables.unchanged() and not tables.same_parameters():
                raise self._changed(describe_changes(tables.changes()).replace(MODEL, ""))

    def _changed(self, changes: str) -> ConfigError:
        return ConfigError(
            f"{changes} since engine.setup, unknown to strategy {self._strategy.name!r}: change "
            f"{type(self.module).__name__} before setup. Instead of freezing, set the group's learning rate to 0."
        )


class EngineOptimizer(Optimizer):
    """An optimizer that `Engine.setup` returned: `step` goes through the strategy, all else to torch's optimizer."""

    def __init__(self, optimizer: Optimizer, model: EngineModule, engine: Any, number: int) -> None:
        # Not super().__init__: groups and states belong to the given optimizer.
        self.optimizer, self.model, self._engine = optimizer, model, engine
        self.number = number
        """The place among the optimizers of the model."""
        self.stepping = False
        self.waits = False
        """True if gradients of a backward wait for a later step; a checkpoint has them."""
        strategy = model._strategy
        if strategy.scaler is not None or strategy.shards_state:
            optimizer.register_step_pre_hook(self._refuse_step)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the weights; `closure` for an optimizer such as LBFGS, on one process."""
        return self._engine.step(self, closure, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.waits = self.model._held = self._engine._unstepped = False
        strategy = self.model._strategy
        if id(self.optimizer) in strategy._unscaled:  # dropped, perhaps because the loss scale is too large
            strategy.end_step()
        if set_to_none:
            zero_grad_fast(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def _refuse_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not self.stepping:
            raise ConfigError(f"step the optimizer that engine.setup returned, not torch's {type(optimizer).__name__}.")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the torch optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the torch optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the torch optimizer."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the torch optimizer, with this process's shards alone; `Engine.save` writes all."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the torch optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)

    def __deepcopy__(self, memo: Any) -> Self:
        raise ConfigError("copy.deepcopy of an optimizer that engine.setup returned: copy its state_dict() instead.")

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


def take_parameters(optimizer: Optimizer, names: Mapping[Any, str], current: Mapping[str, nn.Parameter]) -> None:
    """Give an optimizer the parameters that a strategy has put in place of the ones with these names.

    Raises:
        ConfigError: the optimizer has a state of parameters that were replaced.
    """
    for group in optimizer.param_groups:
        replaced = [p for p in group["params"] if current[names[p]] is not p]
        if any(optimizer.state.get(parameter) for parameter in replaced):
            raise ConfigError(
                f"engine.setup: {type(optimizer).__name__} has taken steps before, and this strategy shards the "
                "parameters: make a new optimizer, or restore its state by engine.load."
            )
        group["params"] = [current[names[parameter]] for parameter in group["params"]]
