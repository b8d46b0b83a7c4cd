"""TrainModule: an `nn.Module` with a training step and optimizers, the base class of what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from io import IOBase
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.arguments import ChecksArguments
from trainer.checkpoint.base_weights import check_base, check_names, weight_sums
from trainer.checkpoint.format import evaluated_weights
from trainer.checkpoint.hook_checkpoint import loaded_by_hooks
from trainer.checkpoint.lightning_file import read_located
from trainer.checkpoint.schema import require
from trainer.data.transfer import move_data_to_device
from trainer.distributed.all_gather import gather_nested, gather_uneven
from trainer.errors import ConfigError, restoring, shown
from trainer.hyperparameters import HasHyperparameters, construct, constructor_arguments, read_hyperparameters
from trainer.model.compile import GRAPH_BREAKING_METHODS
from trainer.model.optional_methods import OptionalMethods, no_loader
from trainer.model.weights import MapLocation, load_weights, match_buffers, read_map_location
from trainer.names.misses import Answers
from trainer.optimizers import parameters_of
from trainer.seed import isolated_rng

if TYPE_CHECKING:
    from trainer.callback import Callback
    from trainer.logger import Logger
    from trainer.trainer import Trainer

Reduction = Literal["mean", "sum", "min", "max"]
EXCLUDED_FROM_PICKLE = (
    "_trainer",
    "_toggled_parameters",
    "_wrapper",
    "_wrapped_for",
    "_compiled_call_impl",
    *GRAPH_BREAKING_METHODS,
)
"""Attributes excluded when a module is copied or pickled."""
WITHOUT_TRAINER: Any = SimpleNamespace(loggers=(), rank=0, local_rank=0, global_step=0, current_epoch=0)
"""The properties of a trainer, for a module that no trainer has run."""
READ_ONLY = (
    *("hparams", "device", "dtype", "loggers"),
    *("global_step", "current_epoch", "global_rank", "local_rank"),
)


class TrainModule(OptionalMethods, HasHyperparameters, ChecksArguments, Answers, nn.Module):
    """Base class of what a `Trainer` trains: subclasses define `training_step` and `configure_optimizers`.

    Every other method has a default. The hooks `on_...` that a module may also define, and the order of all calls, are
    listed at the top of `trainer/callback.py`.
    """

    example_input_array: Any = None
    """Inputs of `forward`, for the model summary, `to_onnx` and the graph of a logger."""
    prepare_data_per_node: bool = True
    """True: `prepare_data` runs once on every machine. False: once overall."""
    automatic_optimization: bool = True
    """With False, `training_step` itself calls `manual_backward` and steps the optimizers of `optimizers()`."""
    key_mapping: Mapping[str, str] = {}
    """For `fit(weights=)`: regular expressions for names of pretrained weights -> their replacements, as in
    transformers' `from_pretrained(key_mapping=)`."""
    strict_loading: bool = True
    """With False, weights that a checkpoint lacks stay unchanged, and weights that the module lacks are left out."""
    _wrapper: nn.Module | None = None
    """The wrapper of a strategy that shards the parameters; kept after the run."""
    _wrapped_for: type | None = None
    """Class of that strategy, under which later runs use the wrapper again."""

    def __init__(self) -> None:
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in READ_ONLY:
            raise ConfigError(
                f"self.{name} is set by the trainer (hparams by self.save_hyperparameters): call yours something else, "
                f"such as self.my_{name}."
            )
        super().__setattr__(name, value)

    # -- what to compute -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of one micro-batch: a scalar tensor with a gradient, or a dict with one under `"loss"`.

        None skips the batch. With manual optimization the returned value is only passed to hooks.

        The loss is the mean over the micro-batch's items (see `num_items`). The trainer scales the loss for
        accumulation and processes such that a step's gradient equals the gradient of one big batch.
        """
        raise ConfigError(f"{type(self).__name__} has no training_step: define training_step(self, batch, batch_idx).")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch of validation; log with `self.log`.

        Define `validation_step(self, batch, batch_idx)`, for several loaders with a third argument `dataloader_idx`.
        """

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch of `trainer.test`; the arguments are as in `validation_step`."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return predictions for one batch, by default `self(batch)`; the arguments are as in `validation_step`."""
        return self(kwargs["batch"] if "batch" in kwargs else args[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizers and learning-rate schedulers.

        Allowed are: an optimizer; a list of optimizers; a pair of lists (optimizers, schedulers); a dict with
        `"optimizer"` and optionally `"lr_scheduler"`; a tuple of such dicts. A scheduler is a torch scheduler, or a
        dict with `"scheduler"` and optionally `"interval"` ("epoch" or "step"), `"frequency"`, `"monitor"`, `"strict"`,
        `"name"`. None: the run has no optimizer, and changes no weights.
        """
        raise ConfigError(
            f"{type(self).__name__} has no configure_optimizers: define it and return an optimizer, "
            "for example torch.optim.AdamW(self.parameters(), lr=1e-3)."
        )

    def configure_model(self) -> None:
        """Build layers in the dtype of the precision and, for sharded strategies, on the device of `init_device`.

        An alternative to building layers in `__init__`. Called once per process before a run, and by
        `load_from_checkpoint`; must do nothing when the layers already exist.
        """

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Return a callback of this module, or several; called before `configure_model`.

        A callback replaces the trainer's callbacks of the same class.
        """
        return []

    def num_items(self, batch: Any) -> int | torch.Tensor | None:
        """Return the number of items (tokens, boxes, ...) over which the loss of this micro-batch is a mean.

        None, the default: the mean is over samples. With a number, a step's loss is the mean over all items of the
        window on all processes, even if their numbers differ; so are the means of `log`, in evaluations too. `batch`
        is on the CPU, before the transfer.
        """
        return None

    # -- loaders, when there is no data module -------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download the data and the like; called once per node, before the loaders are made. Set no attributes here."""

    def train_dataloader(self) -> Any:
        """Return a DataLoader, or any iterable of batches, for training."""
        raise no_loader(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """Return the validation loaders: one loader, a list of loaders, or a dict of name to loader."""
        raise no_loader(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the loaders of `trainer.test`, in the forms of `val_dataloader`."""
        raise no_loader(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return the loaders of `trainer.predict`, in the forms of `val_dataloader`."""
        raise no_loader(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed if need be, before the transfer to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed if need be, after the transfer to the device: for augmentation, say."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on `device`; override this for your own batch types.

        The default moves the tensors in nested containers.
        """
        return self.trainer.strategy.to_device(batch)

    # -- logging -------------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction | str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: object = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
        weight: float | torch.Tensor | None = None,
    ) -> None:
        """Record a value, which stays on its device until the log is flushed and is then reduced over processes.

        Args:
            name: of the value in logs and in `monitor=`. Must be the same on every process.
            value: a number, a tensor of one element, or a `torchmetrics.Metric`.
            prog_bar: show the value in the progress bar.
            logger: send the value to the loggers.
            on_step: log the latest single step's value, every `log_every_n_steps`. Default: True in training, except in
                epoch hooks and for a metric that was only updated.
            on_epoch: log the reduction over the epoch. Default: True wherever `on_step` is False by default. With both,
                the names are `name_step` and `name_epoch`.
            reduce_fx: reduction over batches and processes: "mean" (weighted), "sum", "min" or "max", or torch's
                function of that name.
            enable_graph, sync_dist, sync_dist_group, metric_attribute: no effect: values are kept without their graph,
                and are always reduced over all processes; metrics are found among the module's attributes.
            add_dataloader_idx: with several evaluation loaders, log "name/loader" for each, and "name" over all of
                them. False: "name" only.
            rank_zero_only: record the value of rank 0 only.
            batch_size: number of samples that `value` is a mean over. Default: `num_items` of this batch, or else the
                DataLoader's number of samples, or else the first dimension of the batch's tensors.
            weight: as `batch_size`, for means over other things, such as tokens.

        Raises:
            ConfigError: the name or the value cannot be logged, or nothing is running.
        """
        if rank_zero_only and self.trainer.rank:
            return
        weight = weight if weight is not None else batch_size
        metrics = self.trainer.run.metrics
        if add_dataloader_idx or not metrics.scope.loader:
            metrics.log(name, value, weight, reduce_fx, on_step, on_epoch, prog_bar, logger)
        else:
            metrics.log_without_loader(name, value, weight, reduce_fx, on_step, on_epoch, prog_bar, logger)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Call `log` for each entry, with the same options."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, without breaking the progress bar."""
        self.trainer.print(*args, **kwargs)

    # -- manual optimization -------------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several optimizers, for manual optimization.

        Each has `step`, `zero_grad`, `toggle_model`, and all attributes of the wrapped torch optimizer.

        Args:
            use_pl_optimizer: False for torch's own optimizers.
        """
        return _one_or_all(self.trainer.manual_optimizers if use_pl_optimizer else self.trainer.optimizers)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of several, or None; with manual optimization, `training_step` steps them."""
        schedulers = [config.scheduler for config in self.trainer.scheduler_configs]
        return _one_or_all(schedulers) if schedulers else None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization: scale the loss, and average the gradients over processes.

        `loss` is a mean over the batch's items (see `num_items`): a process with fewer items counts less.

        Args:
            args, kwargs: of `torch.Tensor.backward`, such as `retain_graph=True`.
        """
        self.trainer.manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer, optimizer_idx: int | None = None) -> None:
        """Disable gradients of the other optimizers' parameters, until `untoggle_optimizer`.

        Args:
            optimizer: as `optimizers` returns it, or torch's.
            optimizer_idx: no effect; Lightning 1 has it.
        """
        mine = set(map(id, parameters_of([optimizer])))
        for parameter in parameters_of(self.trainer.manual_optimizers):
            self._requires_grad.setdefault(parameter, parameter.requires_grad)
            parameter.requires_grad = self._requires_grad[parameter] and id(parameter) in mine

    def untoggle_optimizer(self, optimizer: Optimizer | None = None) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, requires_grad in self._requires_grad.items():
            parameter.requires_grad = requires_grad
        self._requires_grad.clear()

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Call `toggle_optimizer`, and `untoggle_optimizer` on exit."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    @property
    def _requires_grad(self) -> dict[nn.Parameter, bool]:
        toggled: dict[nn.Parameter, bool] = self.__dict__.setdefault("_toggled_parameters", {})
        return toggled

    # -- one step, to override -----------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients. An override replaces `loss.backward()` and gets the scaled loss."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step an optimizer, with automatic optimization. An override that does not step keeps the gradients.

        Args:
            epoch, batch_idx: of the step's last micro-batch.
            optimizer: its `step` clips and steps through the strategy.
            optimizer_closure: returns the loss, which is computed already.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients before a step, with automatic optimization."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients before an optimizer step, by default with the trainer's settings.

        An override may clip otherwise, whatever the trainer's settings say.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> torch.Tensor | None:
        """Clip the gradients of an optimizer, by the global norm under every strategy; return that norm.

        Arguments left at None use the trainer's settings; other values hold for this call only.
        """
        settings = self.trainer.settings
        value = settings.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if value is None:
            return None
        return self.trainer.clip_gradients(
            optimizer, value, gradient_clip_algorithm or settings.gradient_clip_algorithm
        )

    def lr_scheduler_step(self, scheduler: Any, metric: float | None) -> None:
        """Step a scheduler; `metric` is the monitored value, if the scheduler has one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- hyperparameters and checkpoints -------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IOBase = "",
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **hyperparameters: Any,
    ) -> Self:
        """Build the module from a checkpoint's hyperparameters, call its `on_load_checkpoint`, and load its weights.

        Args:
            checkpoint_path: a checkpoint folder, written under any strategy; or `.../checkpoints/last`, `.../best`;
                or a run directory, for its last one; or a file in Lightning's shape, perhaps open or in memory,
                which runs no code.
            map_location: device of the module, in the forms of `torch.load`; default: the CPU. A checkpoint does not
                record the devices of its training: a dict is asked for "cpu", and a function gets "cpu" as location.
            hparams_file: a YAML or JSON file with hyperparameters that replace the checkpoint's.
            weights_only: False: also read objects, such as classes, from a file, in a process that runs as Lightning;
                this can run code that is in the file. No other checkpoint contains code.
            strict: refuse missing and unexpected weights; default: `strict_loading` of the module.
            hyperparameters: override the stored hyperparameters, or pass those that were ignored when saving.

        Raises:
            ConfigError: `map_location` names no device of this machine; or `strict` contradicts `strict_loading`.
            CheckpointError: `checkpoint_path` has no valid checkpoint, or its weights do not fit.
        """
        device = read_map_location(map_location)
        checkpoint = read_located(checkpoint_path, trusted=weights_only is False)
        inside = {"module?": {str: object}, "arguments?": {str: (str, None, {str: [str]})}, "kinds?": {str: dict}}
        kinds = {"model": dict, "added?": dict, "base?": {str: int}, "progress?": dict, "hyperparameters?": inside}
        require(checkpoint, kinds, "the checkpoint")
        checkpoint["model"] = evaluated_weights(checkpoint)
        kept = checkpoint.get("hyperparameters", {})
        stored, of_values = kept.get("module", {}), kept.get("kinds", {}).get("module")
        if hparams_file is not None:
            stored, of_values = read_hyperparameters(hparams_file), None
        holders = kept.get("arguments", {}).get("module")
        arguments = constructor_arguments(cls, stored, holders, hyperparameters, of_values)
        with isolated_rng(), restoring(f"{cls.__name__}, with the hyperparameters") if stored else nullcontext():
            module = construct(cls, arguments)
            module.configure_model()
        if strict not in (None, vars(module).get("strict_loading", strict)):
            raise ConfigError(
                f"load_from_checkpoint(strict={strict}) contradicts {cls.__name__}.strict_loading="
                f"{module.strict_loading}: leave strict out, or set both to the same value."
            )
        with loaded_by_hooks(checkpoint) as shown:
            module.on_load_checkpoint(shown)
        strict = module.strict_loading if strict is None else strict
        match_buffers(module, checkpoint["model"])
        if (base := checkpoint.get("base")) is not None:
            own = module.state_dict()
            there = [weight for weight in base if weight in own]
            check_base(base, weight_sums(own, there, lambda part: [part]), cls.__name__)
            check_names(checkpoint["model"], base, own, strict, cls.__name__)
        load_weights(module, checkpoint["model"], strict and base is None)
        return module.to(device) if device is not None else module

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add your own data to `checkpoint` before it is written, or rehearsed before the first step."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read your own data from `checkpoint`, before the weights are loaded."""

    # -- hooks; the top of trainer/callback.py shows when each is called -----------------------------------------------

    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_step_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, loss: torch.Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def on_validation_model_zero_grad(self) -> None: ...
    def on_validation_model_eval(self) -> None: ...
    def on_validation_model_train(self) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_model_eval(self) -> None: ...
    def on_test_model_train(self) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_model_eval(self) -> None: ...
    def on_predict_model_train(self) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    # -- for users -----------------------------------------------------------------------------------------------------

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False, check: bool = True) -> Any:
        """Return the tensors and numbers in `data` (nested) of all processes, with the processes as first dimension.

        On one process `data` is returned unchanged. Collective.

        Args:
            group: the process group; None: all.
            sync_grads: propagate gradients, summed over the processes.
            check: if `group` is None, first compare the place of the call, the keys, shapes and dtypes, and the
                position in the data between the processes, on the host. False saves about a millisecond.

        Raises:
            ConfigError: the processes differ, or one of them has continued without this call.
        """
        if self.trainer.world_size == 1:
            return data
        if group is None:
            self.trainer.run.begin_call("self.all_gather", data, check)
        return gather_nested(data, self.device, group, sync_grads)

    def gather_uneven(self, data: Any, sync_grads: bool = False, check: bool = True) -> Any:
        """Return the tensors in `data` (nested) of all processes, joined along their first dimension in rank order.

        The lengths of that dimension may differ. A process without a tensor gives None in its place. On one process
        `data` is returned unchanged. Collective. `sync_grads` and `check` are as in `all_gather`.
        """
        self.trainer.run.begin_call("self.gather_uneven", None, check)
        return gather_uneven(data, self.device, self.trainer.strategy.processes, sync_grads)

    def freeze(self) -> Self:
        """Train none of the parameters, put the module in eval mode, and return it."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> None:
        """Train all parameters, and put the module in train mode."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        self.train()

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Export the module as ONNX, in eval mode; return what `torch.onnx.export` does.

        Args:
            file_path: the file; None for none.
            input_sample: inputs of `forward`; default: `example_input_array`.
            kwargs: of `torch.onnx.export`.

        Raises:
            ConfigError: no inputs are given.
        """
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise ConfigError("to_onnx needs inputs: give input_sample=, or set self.example_input_array.")
        training = self.training
        inputs = move_data_to_device(sample, self.device)
        try:
            with torch.no_grad():
                self.eval()
                path = str(file_path) if isinstance(file_path, Path) else file_path
                return torch.onnx.export(self, inputs if isinstance(inputs, tuple) else (inputs,), path, **kwargs)
        finally:
            self.train(training)

    # -- where it runs -------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or layer, as `nn.Module` does; name the fix for a name of Lightning's.

        Not by calling `nn.Module`'s, because every read of a layer comes through here.
        """
        registries = self.__dict__
        modules = registries.get("_modules")
        if modules is not None and name in modules:
            return modules[name]
        for registry in ("_parameters", "_buffers"):
            entries = registries.get(registry)
            if entries is not None and name in entries:
                return entries[name]
        if name == "on_gpu":  # no method: it would count as a hook
            return self.device.type == "cuda"
        if name.startswith("_"):  # torch asks for many
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return super().__getattr__(name)

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module, or was assigned between two runs.

        Raises:
            ConfigError: no trainer has run this module; or another one is assigned in a run.
        """
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise ConfigError(
                f"{type(self).__name__} is not attached to a Trainer yet: self.trainer, self.log and the like "
                "work inside trainer.fit, validate, test and predict."
            )
        return trainer

    @trainer.setter
    def trainer(self, given: Trainer | None) -> None:
        current: Any = self.__dict__.get("_trainer")
        if given is not current and isinstance(getattr(current, "stage", None), str):
            raise ConfigError(
                f"self.trainer runs {current.stage}, and cannot be changed in it: assign it before or after."
            )
        if given is not None and not hasattr(given, "fit"):
            raise ConfigError(
                f"self.trainer = {shown(given)}: it is for a Trainer. Use another name, such as self.my_trainer."
            )
        self.attach(given)

    @property
    def _facts(self) -> Trainer:
        """The trainer, or the values that hold without one."""
        facts: Trainer = self.__dict__.get("_trainer") or WITHOUT_TRAINER
        return facts

    @property
    def logger(self) -> Logger | None:
        """The trainer's first logger; None without a trainer."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Logger]:
        """The trainer's loggers; none without a trainer."""
        return [*self._facts.loggers]

    @property
    def global_rank(self) -> int:
        """The rank of this process; 0 without a trainer."""
        return self._facts.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine; 0 without a trainer."""
        return self._facts.local_rank

    @property
    def device_mesh(self) -> Any:
        """The mesh of the strategy's processes; None for a strategy without one."""
        return self.trainer.strategy.processes.mesh

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter or buffer; the CPU for a module without tensors."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first floating parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def global_step(self) -> int:
        """Steps done; 0 without a trainer."""
        return self._facts.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0; 0 without a trainer."""
        return self._facts.current_epoch

    def attach(self, trainer: Trainer | None) -> None:
        """Set the trainer of this module and its children, outside of `nn.Module`'s registries, copies and pickles."""
        self.__dict__["_trainer"] = trainer
        for child in self.children():
            if isinstance(child, TrainModule):
                child.attach(trainer)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in EXCLUDED_FROM_PICKLE}


def _one_or_all(items: list[Any]) -> Any:
    """Return the only one of some items, or the list of several."""
    return items[0] if len(items) == 1 else items
