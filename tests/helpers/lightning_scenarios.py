"""The scenarios that run through Lightning and through this package: see `lightning_runs`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanSquaredError

from tests.helpers.lightning_runs import LIGHTNING, MODULE_HOOKS, OURS, Library, Record, Scenario, loader
from trainer import callbacks as our_callbacks
from trainer.callbacks import Timer

OF = {library.Trainer: library for library in (LIGHTNING, OURS)}
"""The library of a trainer."""

# -- optimizers and schedulers -----------------------------------------------------------------------------------------


Part: Any = object
"""The class below the parts of modules here, which are laid over the `Net` of a library: see `lightning_runs`."""


def does(**methods: Any) -> Any:
    """Return a part with these methods."""
    return type("Module", (Part,), methods)


def notes(**hooks: Any) -> Any:
    """Return a part whose hooks note what these functions of the module and the hook's arguments return."""

    def noting(what: Any) -> Any:
        return lambda self, *arguments: self.record.noted.append(what(self, *arguments))

    return does(**{name: noting(what) for name, what in hooks.items()})


def with_optimizer(make: Any) -> Any:
    """Return a part with `configure_optimizers` returning `make(module)`."""
    return does(configure_optimizers=lambda self: make(self))


def sgd_with(rate: Any, module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 5]), gamma=np.float32(0.3))]


def scheduled(make: Any, **options: Any) -> Any:
    def optimizers(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}

    return with_optimizer(optimizers)


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)


def two_groups(module: Any) -> Any:
    groups = [{"params": module.body.parameters(), "lr": 0.05}, {"params": module.head.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1 / (1 + n), lambda n: 0.9**n])
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Closed(Part):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)


class ClippedByHand(Part):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.record.noted.append((type(optimizer).__name__, gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Manual(Part):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer, part in zip(self.optimizers(), (self.body, self.head), strict=True):
            self.toggle_optimizer(optimizer)
            loss = self.wrote(self.loss_of(batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.record.noted.append(sum(p.grad is not None for p in part.parameters()))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.body.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=0.01)]


class ManualWithSchedule(Part):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.wrote(self.loss_of(batch))
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ManualWithClosure(Part):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Any:
            loss = self.wrote(self.loss_of(batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        returned = optimizer.step(closure=closure)
        self.record.noted.append(float(returned))
        return returned


# -- logged values -----------------------------------------------------------------------------------------------------


def logs(**options: Any) -> Any:
    """Return a part that logs its loss with these options in training, and by default in validation."""

    class Module(Part):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.wrote(self.loss_of(batch))
            self.log("loss", loss, **options)
            return loss

    return Module


def validation_logs(**options: Any) -> Any:
    class Module(Part):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss_of(batch), **options)

    return Module


class LogsInHooks(Part):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("in_batch_end", float(batch_idx))

    def on_train_epoch_end(self) -> None:
        self.log("in_epoch_end", float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.log("in_validation_end", float(self.current_epoch) + 10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.wrote(self.loss_of(batch))
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=False, on_epoch=True)
        return loss


class MetricObjects(Part):
    def __init__(self) -> None:
        super().__init__()
        self.train_error = MeanSquaredError()
        self.val_error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        predicted = self(x)
        loss = self.wrote(nn.functional.mse_loss(predicted, y))
        self.train_error.update(predicted.detach(), y)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.val_error.update(self(x), y)
        self.log("val_error", self.val_error)

    def on_validation_epoch_end(self) -> None:
        self.record.noted.append(("validation", float(self.val_error.compute())))

    def on_train_epoch_end(self) -> None:
        self.record.noted.append(("train", float(self.train_error.compute())))


class MetricsComputedByHand(Part):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.error.update(self(x), y)

    def on_validation_epoch_end(self) -> None:
        self.log("val_error", self.error.compute())
        self.error.reset()


class NotesMetrics(Part):
    def note(self, place: str) -> None:
        metrics = self.trainer.callback_metrics
        self.record.noted.append((place, sorted(metrics), all(isinstance(v, torch.Tensor) for v in metrics.values())))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.wrote(self.loss_of(batch))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("train batch")
        self.record.noted.append(float(self.trainer.callback_metrics["loss_step"]))

    def on_validation_epoch_end(self) -> None:
        self.note("validation")

    def on_train_epoch_end(self) -> None:
        self.note("train epoch")


class MetricsInEveryHook(Part):
    """Notes how many batches two metrics contain in every hook between two epochs and evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.train_error, self.val_error = MeanSquaredError(), MeanSquaredError()
        self.metrics = [self.train_error, self.val_error]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.train_error(self(batch[0]).detach(), batch[1])
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return self.wrote(self.loss_of(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_error(self(batch[0]), batch[1])
        self.log("val_error", self.val_error)

    test_step = validation_step

    def note(self) -> None:
        counts = [metric.update_count for metric in self.metrics]
        self.record.noted.append(
            (*counts, *(float(metric.compute()) for metric in self.metrics if metric.update_count))
        )


for stage in ("train", "train_epoch", "validation", "validation_epoch", "test", "test_epoch"):
    for place in ("start", "end"):
        setattr(MetricsInEveryHook, f"on_{stage}_{place}", MetricsInEveryHook.note)


class LatestValues(Part):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.wrote(self.loss_of(batch))
        self.log("loss", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("bar", loss, prog_bar=True, logger=False)
        return loss

    def on_train_batch_end(self, *arguments: Any) -> None:
        for values in (self.trainer.logged_metrics, self.trainer.progress_bar_metrics):
            self.record.noted.append({name: float(value) for name, value in values.items() if name != "epoch"})
        self.record.noted.append({type(value).__name__ for value in self.trainer.progress_bar_metrics.values()})

    def on_train_epoch_end(self) -> None:
        self.record.noted.append(sorted({"epoch", *self.trainer.logged_metrics}))


class LoggedInBothWays(Part):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("both", self.loss_of(batch), on_step=True, on_epoch=True)
        self.log("epoch_only", self.loss_of(batch), prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log("end", 3.0)


class LogsSeldom(Part):
    """Logs one value in one step of an epoch, and notes it in all hooks after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.log("seldom", loss)
        return loss

    def on_validation_end(self, *arguments: Any) -> None:
        found = self.trainer.callback_metrics.get("seldom")
        self.record.noted.append(None if found is None else float(found))

    on_train_batch_end = on_train_epoch_end = on_train_epoch_start = on_validation_end


class LogsAndReads(Part):
    """Log in hooks and look at once, in the module's hooks and in those of a callback after another."""

    def note(self) -> None:
        trainer = self.trainer
        for values in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            self.record.noted.append({name: float(value) for name, value in values.items() if name != "epoch"})

    def on_train_epoch_start(self) -> None:
        self.log("start", float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_end", torch.tensor(self.global_step), prog_bar=True)
            self.note()

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.global_step), logger=False)
        self.note()

    on_test_epoch_end = on_train_epoch_end


def two_that_log(library: Library, record: Record, folder: Path) -> list[Any]:
    def logs(self: Any, trainer: Any, module: Any) -> None:
        module.log("first", 2.0 + trainer.current_epoch)

    def reads(self: Any, trainer: Any, module: Any) -> None:
        record.noted.append(float(trainer.callback_metrics["first"]))

    return [type(name, (library.Callback,), {"on_train_epoch_end": do})() for name, do in (("A", logs), ("B", reads))]


class LogsBeforeTheForward(Part):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("before", float(self.global_step), on_step=True, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.wrote(self.loss_of(batch))


class MetricByDefault(Part):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error(self(batch[0]).detach(), batch[1])
        self.log("error", self.error)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.record.noted.append((self.error.update_count, float(self.error.compute())))


@dataclass
class Pair:
    """A batch that is a dataclass."""

    x: torch.Tensor
    y: torch.Tensor


class Batches(IterableDataset[Any]):
    """Whole batches of 2 to 5 samples, of a form that `make(x, y)` gives them."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __iter__(self) -> Any:
        for size in range(2, 6):
            yield self.make(*next(iter(loader(size, size))))


class LogsTwice(Part):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.wrote(self.loss_of(batch))
        self.log("twice", loss)
        self.log("twice", 3 * loss)
        return loss


class MaximaOfNan(Part):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        value = float("nan") if batch_idx == 1 else float(batch_idx)
        for reduction in ("min", "max"):
            self.log(f"{reduction} of numbers", value, reduce_fx=reduction)
            self.log(f"{reduction} of tensors", torch.tensor(value), reduce_fx=reduction)


def batches_of(make: Any, read: Any) -> dict[str, Any]:
    """Return the definition and the action of a scenario with such batches."""

    class Module(Part):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.wrote(self.loss_of(read(batch)))
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss_of(read(batch)))

    data = lambda: DataLoader(Batches(make), batch_size=None)  # noqa: E731
    return {"part": Module, "action": fit_with(data, data)}


def returned(trainer: Any, module: Any) -> None:
    results = trainer.validate(module, loader())
    module.record.noted.append(
        {name: v for one in ([results], results)[isinstance(results, list)] for name, v in one.items()}
    )


def best_of_the_former(trainer: Any, module: Any) -> None:
    """Resume from the best checkpoint with nothing left to train."""
    for ckpt_path in (None, "best"):
        trainer.fit(module, loader(), loader(seed=8), ckpt_path=ckpt_path)
        saving = trainer.checkpoint_callback
        module.record.noted += [Path(saving.best_model_path).stem, float(saving.best_model_score)]
    module.record.noted.append(bool(trainer.validate(module, loader(seed=8), ckpt_path="best")))


# -- steps, modes, hooks -----------------------------------------------------------------------------------------------


class ReturnsDict(Part):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.wrote(self.loss_of(batch)), "size": len(batch[0]), "y": self(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.noted.append((sorted(outputs), outputs["loss"].requires_grad, outputs["size"]))


class FrozenInEval(Part):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.body.eval()
        self.body.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.record.noted.append((self.training, self.body.training, self.head.training))

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.record.noted.append((self.training, self.body.training, self.head.training))


class Stops(Part):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.trainer.should_stop = True


class ReturnsNoneAtTimes(Part):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class SeveralLoaders(Part):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.record.noted.append((batch_idx, dataloader_idx))
        self.log("val_loss", self.loss_of(batch))


def _activity(name: str) -> Any:
    def note(self: Any, *arguments: Any, **named: Any) -> Any:
        flags = ("training", "validating", "sanity_checking", "evaluating")
        self.record.noted.append((name, [flag for flag in flags if getattr(self.trainer, flag)]))
        return getattr(super(ActivitiesInHooks, self), name)(*arguments, **named)

    return note


HOOKS = ("prepare_data", "setup", "configure_model", "configure_optimizers", "on_train_batch_end", "teardown")
ActivitiesInHooks = type("ActivitiesInHooks", (Part,), {name: _activity(name) for name in (*HOOKS, *MODULE_HOOKS)})


class StepsOfAnyArguments(Part):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.record.noted.append((len(args), sorted(kwargs)))
        return self.wrote(self.loss_of(args[0]))

    def validation_step(self, batch: Any, *args: Any) -> Any:
        self.record.noted.append(args)
        self.log("val_loss", self.loss_of(batch))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.record.noted.append(("predict", *args[1:], sorted(kwargs)))
        return self(args[0][0])


def hooks_of_any_arguments(library: Library, record: Record, folder: Path) -> list[Any]:
    def hook(self: Any, trainer: Any, module: Any, *args: Any) -> None:
        record.noted.append(args[-2:] if isinstance(args[-2], int) else args[-1])

    def without_index(self: Any, trainer: Any, module: Any, batch: Any, batch_idx: int, **kwargs: Any) -> None:
        record.noted.append((batch_idx, kwargs))

    hooks = {
        "on_validation_batch_start": hook,
        "on_validation_batch_end": hook,
        "on_predict_batch_start": without_index,
    }
    return [type("Hooks", (library.Callback,), hooks)()]


class ThirdArgumentOfItsOwn(Part):
    def validation_step(self, batch: Any, batch_idx: int, split: str = "val") -> Any:
        self.record.noted.append(split)
        self.log("val_loss", self.loss_of(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.validation_step(batch, batch_idx, "test")


class CallsTheBase(Part):
    """A module whose methods call those of the library's own class."""

    def forward(self, batch: Any) -> Any:
        return super().forward(batch[0] if isinstance(batch, list) else batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.record.noted.append(OF[type(self.trainer)].Module.validation_step(self, batch, batch_idx, dataloader_idx))
        return super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().predict_step(batch, batch_idx, dataloader_idx)

    def setup(self, stage: str) -> None:
        super().setup(stage)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)

    def configure_callbacks(self) -> Any:
        return super().configure_callbacks()

    def configure_model(self) -> None:
        super().configure_model()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def prepare_data(self) -> None:
        super().prepare_data()

    def val_dataloader(self) -> Any:
        return super().val_dataloader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return super().on_after_batch_transfer(batch, dataloader_idx)


NONE = (
    *("validation_step", "test_step", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_epoch_end", "on_train_end"),
)
"""Methods that Lightning takes as not defined when they are None."""


def fit_with_none_on_the_module(trainer: Any, module: Any) -> None:
    for name in NONE:
        setattr(module, name, None)
    trainer.fit(module, loader(), loader(seed=8))


def data_module_of(library: Library, record: Record) -> Any:
    class Data(library.DataModule):  # type: ignore[misc]
        def prepare_data(self) -> None:
            record.noted.append("prepare_data")

        def setup(self, stage: str) -> None:
            record.noted.append(("setup", stage))

        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            return loader(seed=8)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 1, batch[1]]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def teardown(self, stage: str) -> None:
            record.noted.append(("teardown", stage))

    return Data()


class Stream(IterableDataset[Any]):
    """Five batches without a length."""

    def __iter__(self) -> Any:
        yield from loader(15).dataset


# -- actions -----------------------------------------------------------------------------------------------------------


def fit_with(train: Any, val: Any) -> Any:
    return lambda trainer, module: trainer.fit(module, train(), val())


def predict(trainer: Any, module: Any) -> None:
    predictions = trainer.predict(module, loader(), return_predictions=True)
    module.record.noted += [tensor.flatten().tolist() for tensor in predictions]


def predict_several(trainer: Any, module: Any) -> None:
    predictions = trainer.predict(module, [loader(), loader(6)], return_predictions=True)
    module.record.noted.append([len(one) if isinstance(one, list) else tuple(one.shape) for one in predictions])


def validate(trainer: Any, module: Any) -> None:
    trainer.validate(module, loader())


def run_test(trainer: Any, module: Any) -> None:
    trainer.test(module, loader())


def fit_validate_and_test(trainer: Any, module: Any) -> None:
    trainer.fit(module, loader(), loader(seed=8))
    trainer.validate(module, loader())
    trainer.test(module, loader())


def fit_twice(trainer: Any, module: Any) -> None:
    trainer.fit(module, loader(), loader(seed=8))
    trainer.fit(module, loader(), loader(seed=8))


# -- callbacks ---------------------------------------------------------------------------------------------------------


def checkpoint(**options: Any) -> Any:
    return lambda library, record, folder: [library.ModelCheckpoint(dirpath=folder / "checkpoints", **options)]


def early(**options: Any) -> Any:
    return lambda library, record, folder: [library.EarlyStopping(**options)]


def averaging(name: str, **options: Any) -> Any:
    of = lambda library: getattr(pytorch_lightning.callbacks if library.is_lightning else our_callbacks, name)  # noqa: E731
    return lambda library, record, folder: [of(library)(**options)]


class Normalized(Part):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))


class NotesLoaders(Part):
    def train_dataloader(self) -> Any:
        self.record.noted.append("train")
        return loader()

    def val_dataloader(self) -> Any:
        self.record.noted.append("val")
        return loader(seed=8)

    def on_validation_start(self) -> None:
        self.record.noted.append(self.trainer.num_training_batches)


def stops_in(hook: str, epoch: int) -> Any:
    """Return a part that asks for a stop in a hook of an epoch."""

    def stop(self: Any) -> None:
        self.trainer.should_stop = self.trainer.should_stop or self.current_epoch == epoch

    return does(**{hook: stop})


def stops_after_validation(library: Library, record: Record, folder: Path) -> list[Any]:
    class Stop(library.Callback):  # type: ignore[misc]
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.global_step:
                trainer.should_stop = True

    return [Stop()]


def one_name_in_both(**options: Any) -> Any:
    """Return a part that logs one name in training, with these options, and in validation, where it Grows."""

    class Module(Part):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.wrote(self.loss_of(batch))
            self.log("value", 100.0 - self.trainer.global_step, **options)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", float(self.trainer.global_step))

        def on_train_epoch_end(self) -> None:
            self.record.noted.append(float(self.trainer.callback_metrics["value"]))

    return Module


def best_and_early(library: Library, record: Record, folder: Path) -> list[Any]:
    """Stop after one value that is no better, and keep the best."""
    early = library.EarlyStopping("value", patience=1, mode="min")
    best = library.ModelCheckpoint(dirpath=folder / "checkpoints", monitor="value", mode="min")
    return [early, best]


def values(*by_epoch: float) -> Any:
    """Return a part whose validation logs these values, one per epoch."""

    class Module(Part):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", by_epoch[self.current_epoch])

    return Module


def values_at_steps(by_step: dict[int, float]) -> Any:
    """Return a part whose validation logs these values, by the number of completed steps."""

    class Module(Part):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", by_step[self.trainer.global_step])

    return Module


StepLR = torch.optim.lr_scheduler.StepLR


class OwnSchedule:
    """A scheduler that is none of torch's; the module steps it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def halve(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def manual_with(schedule: Any, step: Any, **options: Any) -> Any:
    """Return a part that calls `step(its scheduler, the loss)` after each update."""

    class Module(Part):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            loss = self.wrote(self.loss_of(batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            step(self.lr_schedulers(), loss.item())
            self.log("loss", loss)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), **options}}

    return Module


class Scaled(torch.optim.SGD):
    """An optimizer whose step takes an argument of its own."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= scale
        return super().step(closure)


class StepsWithOptions(Part):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.wrote(self.loss_of(batch)))
        optimizer.step(scale=0.5 + batch_idx)

    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters(), lr=0.1)


class SteppedByOverride(Part):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.halve()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [OwnSchedule(optimizer)]


def monitored(**options: Any) -> Any:
    options = {"logging_interval": "step", **options}
    return lambda library, record, folder: [library.LearningRateMonitor(**options)]


def plateau_by_step(monitor: str, frequency: int) -> Any:
    """Return a part whose rate falls after every value but the first, and that notes the rate in Validations."""

    class Module(Part):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("trained", float(self.global_step))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("validated", float(self.global_step))

        def on_validation_epoch_end(self) -> None:
            self.record.noted.append(self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            falls = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            schedule = {"scheduler": falls, "monitor": monitor, "interval": "step", "frequency": frequency}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Module


def named_groups(*names: str | None, **options: Any) -> Any:
    def optimizers(module: Any) -> Any:
        parts = [module.parameters()] if len(names) == 1 else [module.body.parameters(), module.head.parameters()]
        groups = [{"params": part, **({"name": name} if name else {})} for part, name in zip(parts, names, strict=True)]
        return torch.optim.Adagrad(groups, lr=0.1, **options)

    return with_optimizer(optimizers)


class ThreeOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.body.parameters(), lr=0.1)
        second = torch.optim.SGD(self.head.parameters(), lr=0.2)
        return [first, second], [{"scheduler": StepLR(second, 1), "interval": "step"}]


# -- rows of the table that need a scenario of their own ---------------------------------------------------------------


def attempted(action: Any) -> Any:
    """Return an action that notes an error in place of raising it."""

    def attempt(trainer: Any, module: Any) -> None:
        try:
            action(trainer, module)
        except Exception:
            module.record.noted.append("refused")

    return attempt


def default_fit(trainer: Any, module: Any) -> None:
    trainer.fit(module, loader(), loader(seed=8))


def without_positive() -> DataLoader[Any]:
    """Return a loader that gives None in place of some batches."""
    collate = torch.utils.data.default_collate
    return DataLoader(loader().dataset, 3, collate_fn=lambda batch: None if batch[0][1] > 0 else collate(batch))


def late_schedule(library: Library, record: Record, folder: Path) -> list[Any]:
    return [library.GradientAccumulationScheduler({1: 4})]


def counts_calls(trainer: Any, module: Any) -> None:
    logger = trainer.loggers[0]
    log_metrics = logger.log_metrics

    def counted(*arguments: Any, **named: Any) -> None:
        module.record.noted.append("log_metrics")
        log_metrics(*arguments, **named)

    logger.log_metrics = counted
    trainer.validate(module, [loader(seed=8), loader(9, seed=9)])


def timed(library: Library, record: Record, folder: Path) -> list[Any]:
    timer = (pytorch_lightning.callbacks.Timer if library.is_lightning else Timer)()

    class Reads(library.Callback):  # type: ignore[misc]
        def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
            record.noted.append(timer.time_elapsed("validate") > 0)

    return [timer, Reads()]


def counts_in_its_state(library: Library, record: Record, folder: Path) -> list[Any]:
    class Counts(library.Callback):  # type: ignore[misc]
        number = 0

        def on_validation_batch_end(self, *_: Any) -> None:
            self.number += 1

        def on_train_start(self, trainer: Any, module: Any) -> None:
            record.noted.append(self.number)

        def state_dict(self) -> dict[str, Any]:
            return {"number": self.number}

    return [Counts()]


def saves_in_validation(library: Library, record: Record, folder: Path) -> list[Any]:
    class Saves(library.Callback):  # type: ignore[misc]
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            path = folder / f"saved-{len(record.noted)}"
            trainer.save_checkpoint(path)
            record.noted.append(path.exists())

    return [Saves()]


class TakesIndex(Part):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        self.log("val_loss", self.loss_of(batch))


def clips_otherwise(*arguments: Any, **named: Any) -> Any:
    """Return a part that overrides the clipping, with these arguments of `clip_gradients`."""

    class Module(Part):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, *arguments, **named)

    return Module


def three_schedules(module: Any) -> Any:
    """Return an optimizer with a warm-up by step, a schedule by epoch, and a plateau."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=10.0)
    schedules = [{"scheduler": warmup, "interval": "step"}, {"scheduler": plateau, "monitor": "val_loss"}]
    return [optimizer], [*schedules, StepLR(optimizer, 1, 0.7)]


HOOKED = ("hooks", "module_hooks")
ALL = ("losses", "rates", "hooks", "module_hooks", "logged", "metrics", "weights", "end", "noted")

Predicts = does(predict_step=lambda self, batch, batch_idx, dataloader_idx=0: self(batch[0]))
ConstantValue = does(validation_step=lambda self, batch, batch_idx: self.log("val_loss", 1.0))
SkipsTheRest = does(on_train_batch_start=lambda self, batch, batch_idx: -1 if batch_idx == 2 else None)
Grows = does(train_dataloader=lambda self: loader(6 + 3 * self.current_epoch))
OneNameInTwoHooks = does(on_validation_batch_end=lambda self, *arguments: self.log("val_loss", 100.0))
FailsAndTearsDown = type(
    "Module",
    (notes(teardown=lambda self, stage: ("teardown", stage)),),
    {"training_step": lambda self, batch, batch_idx: 1 // 0},
)
Validations = notes(on_validation_epoch_end=lambda self: self.trainer.global_step)
LastBatches = notes(on_train_batch_end=lambda self, outputs, batch, batch_idx: (batch_idx, self.trainer.is_last_batch))
NotesSaves = notes(on_save_checkpoint=lambda self, checkpoint: self.trainer.global_step)
NotesModes = type(
    "Module",
    (Predicts, notes(on_predict_model_eval=lambda self: "eval", on_predict_model_train=lambda self: "train")),
    {},
)
GradientsSeen = notes(
    on_after_backward=lambda self: ("after backward", self.head.bias.grad.tolist()),
    on_before_optimizer_step=lambda self, optimizer: ("before step", self.head.bias.grad.tolist()),
    on_before_zero_grad=lambda self, optimizer: ("before zero", self.head.bias.grad is None),
)
WithoutOptimizer = does(
    training_step=lambda self, batch, batch_idx: self.loss_of(batch), configure_optimizers=lambda self: None
)
WithoutOptimizerSkips = does(training_step=lambda self, batch, batch_idx: None, configure_optimizers=lambda self: None)

NOTHING_TO_RUN = dict.fromkeys(HOOKED, "nothing to run")
STEP_AXIS = {"logged": "step axis"}
OF_A_WINDOW = dict.fromkeys(("logged", "metrics"), "value of a window")
SEVERAL_OPTIMIZERS = {"end": "steps of several optimizers"}
SEVERAL_LOADERS = dict.fromkeys(("logged", "metrics"), "several loaders")
NEWEST = {"saved": "newest checkpoint"}

SCENARIOS = [
    Scenario("plain"),
    Scenario(
        "max_steps in an epoch", settings={"max_steps": 6, "max_epochs": -1}, differs={"end": "stop inside an epoch"}
    ),
    Scenario("max_steps at an epoch's end", settings={"max_steps": 8, "max_epochs": -1}),
    Scenario("metrics in every hook", MetricsInEveryHook, {"max_epochs": 2}),
    Scenario("metrics in every hook of a test", MetricsInEveryHook, action=run_test, differs=STEP_AXIS),
    Scenario("latest values", LatestValues),
    Scenario("latest values between two flushes", LatestValues, {"log_every_n_steps": 3}),
    Scenario("logged in one step of an epoch", LogsSeldom, differs={"logged": "value logged in some steps"}),
    Scenario("logged in one step between two flushes", LogsSeldom, {"log_every_n_steps": 4}),
    Scenario("logged and read in hooks", LogsAndReads, callbacks=two_that_log),
    Scenario("logged and read in hooks of a test", LogsAndReads, action=run_test, differs=STEP_AXIS),
    Scenario(
        "logged before the forward", LogsBeforeTheForward, action=fit_with(lambda: loader(10, 4), lambda: loader(7))
    ),
    Scenario("a metric by default", MetricByDefault),
    Scenario("batches that are dataclasses", **batches_of(Pair, lambda batch: (batch.x, batch.y))),
    Scenario(
        "batches with tensors of several lengths",
        **batches_of(lambda x, y: {"x": x, "y": y, "mask": torch.ones(7, 7)}, lambda batch: (batch["x"], batch["y"])),
    ),
    Scenario(
        "several samples made one batch",
        action=fit_with(*2 * [lambda: DataLoader(list(Batches(lambda *xy: xy)), 1, collate_fn=lambda batch: batch[0])]),
        differs={"logged": "samples of a batch", "metrics": "samples of a batch"},
    ),
    Scenario("logged twice in a step", LogsTwice, differs=OF_A_WINDOW),
    Scenario(
        "one name in two hooks",
        OneNameInTwoHooks,
        differs=dict.fromkeys(("logged", "metrics"), "one name in two hooks"),
    ),
    Scenario("maxima and minima of NaN", MaximaOfNan),
    Scenario("returned values", LoggedInBothWays, action=returned, differs={"logged": "evaluation by step"}),
    Scenario(
        "the best when nothing is left to train",
        settings={"max_epochs": 1},
        callbacks=lambda library, record, folder: [library.ModelCheckpoint(monitor="val_loss")],
        action=best_of_the_former,
        differs=dict.fromkeys(HOOKED, "hooks of a resume") | dict.fromkeys(("end", "logged"), "evaluated checkpoint"),
    ),
    Scenario(
        "None for a setting",
        settings=dict.fromkeys(
            (
                *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
                *("val_check_interval", "num_sanity_val_steps", "log_every_n_steps", "precision", "deterministic"),
                "gradient_clip_algorithm",
            )
        ),
    ),
    Scenario("min_steps within an epoch", Stops, {"min_steps": 2, "max_epochs": 3}),
    Scenario("min_steps without min_epochs", Stops, {"min_steps": 2, "min_epochs": 2, "max_epochs": 3}),
    Scenario("min_steps above an epoch", settings={"min_steps": 6, "max_epochs": 1}),
    Scenario("validation every 2 batches", settings={"val_check_interval": 2}),
    Scenario("validation every half epoch", settings={"val_check_interval": 0.5}),
    Scenario("validation every batch", settings={"val_check_interval": 1}),
    Scenario("validation every second epoch", settings={"check_val_every_n_epoch": 2, "max_epochs": 4}),
    Scenario("accumulation", settings={"accumulate_grad_batches": 2}, exact=False, differs=OF_A_WINDOW),
    Scenario(
        "accumulation with a short batch",
        settings={"accumulate_grad_batches": 2},
        action=fit_with(lambda: loader(11), lambda: loader(seed=8)),
        exact=False,
        differs={**dict.fromkeys(("losses", "metrics", "weights"), "short window"), "logged": "value of a window"},
    ),
    Scenario(
        "accumulation with a short window",
        settings={"accumulate_grad_batches": 3},
        exact=False,
        differs=dict.fromkeys(("losses", "weights"), "short window") | OF_A_WINDOW,
    ),
    Scenario(
        "accumulation by schedule",
        callbacks=lambda library, record, folder: [library.GradientAccumulationScheduler({0: 1, 1: 2})],
        exact=False,
        differs=OF_A_WINDOW,
    ),
    Scenario("clipping by norm", settings={"gradient_clip_val": 0.1}),
    Scenario("clipping by value", settings={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Scenario("clipping by an override", ClippedByHand, differs={"noted": "algorithm of clipping"}),
    Scenario("Adam", with_optimizer(lambda module: torch.optim.Adam(module.parameters(), lr=0.01))),
    Scenario("LBFGS", Closed),
    Scenario("two groups with schedules by step", with_optimizer(two_groups)),
    Scenario("schedule by epoch", scheduled(lambda o: StepLR(o, 1, 0.5)), {"max_epochs": 3}),
    Scenario("schedule by step", scheduled(lambda o: StepLR(o, 2, 0.5), interval="step")),
    Scenario(
        "schedule every second step with accumulation",
        scheduled(lambda o: StepLR(o, 1, 0.5), interval="step", frequency=2),
        {"accumulate_grad_batches": 2},
        exact=False,
        differs=dict.fromkeys(("losses", "rates", "logged", "metrics", "weights"), "frequency"),
    ),
    Scenario(
        "schedule every third step",
        scheduled(lambda o: StepLR(o, 1, 0.5), interval="step", frequency=3),
        differs=dict.fromkeys(("losses", "rates", "logged", "metrics", "weights"), "frequency"),
    ),
    Scenario("plateau on a validation", scheduled(plateau, monitor="val_loss"), {"max_epochs": 3}),
    Scenario("manual, two optimizers", Manual, differs=SEVERAL_OPTIMIZERS),
    Scenario("manual, with a closure", ManualWithClosure),
    Scenario(
        "manual accumulation beyond a validation",
        ManualWithSchedule,
        action=fit_with(lambda: loader(9), lambda: loader(seed=8)),
        differs={
            "end": "steps of several optimizers",
            **dict.fromkeys(("losses", "weights", "metrics", "logged"), "zero_grad of a validation"),
        },
    ),
    Scenario("manual, with a schedule", ManualWithSchedule, differs=SEVERAL_OPTIMIZERS),
    Scenario("early stopping", values(1.0, 2.0, 3.0, 4.0), {"max_epochs": 4}, early(monitor="val_loss", patience=2)),
    Scenario(
        "early stopping on a training value",
        logs(on_step=False, on_epoch=True),
        {"max_epochs": 4},
        early(monitor="loss", patience=1, min_delta=100.0),
    ),
    Scenario(
        "early stopping before min_epochs",
        values(1.0, 2.0, 3.0, 0.5),
        {"max_epochs": 4, "min_epochs": 3},
        early(monitor="val_loss", patience=1),
    ),
    Scenario(
        "best checkpoint", values(2.0, 1.0, 3.0), {"max_epochs": 3}, checkpoint(monitor="val_loss"), differs=NEWEST
    ),
    Scenario(
        "best two checkpoints, the larger the better",
        values(2.0, 1.0, 3.0, 2.5),
        {"max_epochs": 4},
        checkpoint(monitor="val_loss", mode="max", save_top_k=2),
    ),
    Scenario(
        "saves",
        NotesSaves,
        {"max_epochs": 3},
        checkpoint(every_n_train_steps=3, save_top_k=-1, save_last="link"),
        differs={"saved": "copy of the newest checkpoint", "noted": "rehearsal of a checkpoint"},
    ),
    Scenario(
        "saves with a copy",
        NotesSaves,
        {"max_epochs": 3},
        checkpoint(save_last=True, save_top_k=-1),
        differs=dict.fromkeys(("noted", "saved"), "copy of the newest checkpoint"),
    ),
    Scenario(
        "all checkpoints", values(2.0, 1.0, 3.0), {"max_epochs": 3}, checkpoint(monitor="val_loss", save_top_k=-1)
    ),
    Scenario("equal values", ConstantValue, {"max_epochs": 3}, checkpoint(monitor="val_loss"), differs=NEWEST),
    Scenario(
        "equal values, and a better one",
        values(1.0, 1.0, 0.0),
        {"max_epochs": 3},
        checkpoint(monitor="val_loss", save_top_k=2),
        differs={"saved": "equal values"},
    ),
    Scenario(
        "newest three steps", callbacks=checkpoint(monitor="step", mode="max", save_top_k=3, every_n_train_steps=1)
    ),
    Scenario(
        "checkpoints every 3 steps",
        callbacks=checkpoint(every_n_train_steps=3, save_top_k=-1),
        differs=NEWEST | {"best": "newest checkpoint"},
    ),
    Scenario(
        "checkpoints every second epoch",
        settings={"max_epochs": 4},
        callbacks=checkpoint(every_n_epochs=2, save_top_k=-1),
    ),
    Scenario(
        "checkpoints of epochs without a validation",
        settings={"max_epochs": 3, "check_val_every_n_epoch": 2},
        callbacks=checkpoint(save_top_k=-1),
        differs={"saved": "epochs without a validation", "best": "epochs without a validation"},
    ),
    Scenario(
        "best of Validations in an epoch",
        values_at_steps({2: 2.0, 4: 1.0, 6: 3.0, 8: 4.0}),
        {"val_check_interval": 2, "max_epochs": 2, "num_sanity_val_steps": 0},
        checkpoint(monitor="val_loss", save_top_k=2),
        differs=NEWEST,
    ),
    *(
        Scenario(
            f"checkpoints {where}",
            values_at_steps({step: float(step % 5) for step in range(13)}),
            {"val_check_interval": interval, "max_epochs": 3, "num_sanity_val_steps": 0},
            checkpoint(monitor="val_loss", save_top_k=-1, save_on_train_epoch_end=at_ends),
            differs={} if at_ends else NEWEST,
        )
        for where, at_ends, interval in (("at ends of epochs only", True, 2), ("at Validations only", False, 3))
    ),
    Scenario(
        "equal weights", settings={"val_check_interval": 0.5}, callbacks=averaging("WeightAveraging"), exact=False
    ),
    Scenario(
        "an exponential average",
        settings={"max_epochs": 3},
        callbacks=averaging("EMAWeightAveraging", decay=0.5, update_every_n_steps=2),
        exact=False,
    ),
    Scenario(
        "an average that begins late",
        settings={"val_check_interval": 0.5},
        callbacks=averaging("EMAWeightAveraging", decay=0.5, update_starting_at_step=3),
        exact=False,
        differs={"logged": "average before its first update"},
    ),
    Scenario(
        "an average by epoch",
        settings={"max_epochs": 3},
        callbacks=averaging("EMAWeightAveraging", decay=0.5, update_starting_at_step=10**6, update_starting_at_epoch=0),
        exact=False,
        differs=dict.fromkeys(("logged", "metrics"), "average by epoch"),
    ),
    Scenario(
        "an average of BatchNorms",
        Normalized,
        callbacks=averaging("WeightAveraging"),
        exact=False,
        differs={"weights": "integers of an average"},
    ),
    Scenario(
        "stochastic weight averaging",
        scheduled(lambda o: StepLR(o, 1, 0.5)),
        {"max_epochs": 4},
        averaging("StochasticWeightAveraging", swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2),
        exact=False,
    ),
    Scenario(
        "stochastic weight averaging of BatchNorms",
        Normalized,
        {"max_epochs": 4},
        averaging("StochasticWeightAveraging", swa_lrs=0.05, swa_epoch_start=0.5, annealing_epochs=1),
        exact=False,
        differs=dict.fromkeys((*HOOKED, "logged", "metrics", "weights", "end"), "statistics of an average"),
    ),
    Scenario(
        "several validation loaders",
        SeveralLoaders,
        action=lambda trainer, module: trainer.fit(module, loader(), [loader(seed=8), loader(9, seed=9)]),
        differs=SEVERAL_LOADERS,
    ),
    Scenario("limit_train_batches", settings={"limit_train_batches": 3}),
    Scenario("a share of the training batches", settings={"limit_train_batches": 0.5}),
    Scenario("limit_val_batches", settings={"limit_val_batches": 2}),
    Scenario("no validation", settings={"limit_val_batches": 0}),
    Scenario(
        "no validation, and an interval beyond the epoch", settings={"limit_val_batches": 0, "val_check_interval": 9}
    ),
    *(
        Scenario(
            f"a learning rate that is a {type(rate).__name__}",
            with_optimizer(partial(sgd_with, rate)),
            callbacks=checkpoint(filename="{epoch}"),
        )
        for rate in (np.float64(0.1), np.float32(0.1), np.array(0.1))
    ),
    Scenario("any arguments", StepsOfAnyArguments, callbacks=hooks_of_any_arguments),
    Scenario(
        "any arguments, several loaders",
        StepsOfAnyArguments,
        callbacks=hooks_of_any_arguments,
        action=lambda trainer, module: trainer.fit(module, loader(), [loader(seed=8), loader(9, seed=9)]),
        differs=SEVERAL_LOADERS,
    ),
    Scenario("any arguments, predict", StepsOfAnyArguments, callbacks=hooks_of_any_arguments, action=predict),
    Scenario(
        "any arguments, predict with several loaders",
        StepsOfAnyArguments,
        action=lambda trainer, module: trainer.predict(module, [loader(), loader()]),
    ),
    Scenario("a third argument of its own", ThirdArgumentOfItsOwn),
    Scenario("a third argument of its own, test", ThirdArgumentOfItsOwn, action=run_test, differs=STEP_AXIS),
    Scenario("methods of the base class", CallsTheBase, {"gradient_clip_val": 0.05}),
    Scenario("methods of the base class, predict", CallsTheBase, action=predict),
    Scenario("methods that are None in the class", does(**dict.fromkeys(NONE))),
    Scenario("methods that are None on the module", action=fit_with_none_on_the_module),
    Scenario("no sanity check", settings={"num_sanity_val_steps": 0}),
    Scenario("fast_dev_run", settings={"fast_dev_run": True}),
    Scenario(
        "overfit_batches",
        settings={"overfit_batches": 2},
        differs={"logged": "overfit_batches", "metrics": "overfit_batches"},
    ),
    Scenario("log every third step", settings={"log_every_n_steps": 3}),
    Scenario("logged by step and epoch", logs(on_step=True, on_epoch=True)),
    Scenario("logged by epoch", logs(on_step=False, on_epoch=True)),
    Scenario("logged sums", logs(on_step=False, on_epoch=True, reduce_fx="sum")),
    Scenario("logged maxima", logs(on_step=False, on_epoch=True, reduce_fx="max")),
    Scenario(
        "validation logged by step and epoch",
        validation_logs(on_step=True, on_epoch=True),
        differs={"logged": "evaluation by step"},
    ),
    Scenario("logged in hooks", LogsInHooks),
    Scenario("metric objects", MetricObjects),
    Scenario("metric objects computed in the hook", MetricsComputedByHand),
    Scenario("callback_metrics in hooks", NotesMetrics),
    Scenario("a dict of outputs", ReturnsDict, differs=dict.fromkeys(HOOKED, "graph of outputs")),
    Scenario(
        "None from training_step", ReturnsNoneAtTimes, differs=dict.fromkeys((*HOOKED, "logged"), "skipped batch")
    ),
    Scenario(
        "the rest of the epoch skipped",
        SkipsTheRest,
        differs=dict.fromkeys((*HOOKED, "logged", "metrics"), "rest of the epoch skipped"),
    ),
    Scenario("frozen part in eval mode", FrozenInEval),
    Scenario(
        "should_stop",
        Stops,
        {"max_epochs": 3},
        differs=dict.fromkeys((*HOOKED, "logged", "metrics", "end"), "stop inside an epoch"),
    ),
    Scenario(
        "a stop that waits for min_epochs",
        Stops,
        {"max_epochs": 3, "min_epochs": 2, "log_every_n_steps": 3},
        differs={"logged": "log at a stop"},
    ),
    Scenario(
        "a stop at an epoch's start",
        stops_in("on_train_epoch_start", epoch=1),
        {"max_epochs": 3},
        differs={"end": "stop inside an epoch"},
    ),
    Scenario("a stop before training", stops_in("on_fit_start", epoch=0), differs=NOTHING_TO_RUN),
    Scenario("a stop at the start of training", stops_in("on_train_start", epoch=0)),
    Scenario("should_stop after a validation", settings={"max_epochs": 3}, callbacks=stops_after_validation),
    Scenario("gradients in hooks", GradientsSeen, differs={"noted": "zero_grad"}),
    Scenario("what the trainer does in hooks", ActivitiesInHooks, action=fit_validate_and_test, differs=STEP_AXIS),
    Scenario("predict of several loaders", Predicts, action=predict_several),
    Scenario("validate", action=validate, differs=STEP_AXIS),
    Scenario("test", action=run_test, differs=STEP_AXIS),
    Scenario("predict", Predicts, action=predict),
    Scenario(
        "data module",
        action=lambda trainer, module: trainer.fit(module, datamodule=data_module_of(OF[type(trainer)], module.record)),
    ),
    Scenario("loader without a length", action=fit_with(lambda: DataLoader(Stream(), batch_size=3), loader)),
    Scenario(
        "validation over epochs of a loader without a length",
        Validations,
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        action=fit_with(lambda: DataLoader(Stream(), batch_size=3), loader),
    ),
    Scenario(
        "last batch of a loader without a length",
        LastBatches,
        action=fit_with(lambda: DataLoader(Stream(), batch_size=3), loader),
        differs={"noted": "data without a length"},
    ),
    Scenario(
        "validation every 3 batches of a loader without a length",
        settings={"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 3},
        action=fit_with(lambda: DataLoader(Stream(), batch_size=3), loader),
    ),
    Scenario(
        "validation every 3 batches of epochs that grow",
        Grows,
        {
            "check_val_every_n_epoch": None,
            "val_check_interval": 3,
            "reload_dataloaders_every_n_epochs": 1,
            "max_epochs": 4,
        },
        action=lambda trainer, module: trainer.fit(module, val_dataloaders=loader()),
    ),
    Scenario(
        "the order of the loaders",
        NotesLoaders,
        action=lambda trainer, module: trainer.fit(module),
        differs={"noted": "order of the loaders"},
    ),
    Scenario("no validation loader", action=lambda trainer, module: trainer.fit(module, loader())),
    Scenario("a second fit", action=fit_twice, differs=dict.fromkeys(ALL[:7], "a second fit")),
    Scenario("clipping by the trainer's value", clips_otherwise(), {"gradient_clip_val": 0.1}),
    Scenario(
        "clipping by the trainer's value and algorithm",
        clips_otherwise(),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    Scenario("manual, plateau", manual_with(plateau, lambda schedule, loss: schedule.step(loss))),
    Scenario(
        "manual, plateau with a name",
        manual_with(plateau, lambda schedule, loss: schedule.step(loss), monitor="nothing"),
    ),
    Scenario("manual, own schedule", manual_with(OwnSchedule, lambda schedule, loss: schedule.halve())),
    Scenario("manual, arguments of a step", StepsWithOptions),
    Scenario("own schedule, stepped by an override", SteppedByOverride, {"max_epochs": 3}),
    Scenario("rates of a named group", named_groups("body"), callbacks=monitored()),
    Scenario("rates of a group", named_groups(None), callbacks=monitored()),
    Scenario("rates of named groups", named_groups("body", None), callbacks=monitored()),
    Scenario(
        "momentum and weight decay",
        with_optimizer(lambda module: torch.optim.Adam(two_groups(module)[0][0].param_groups, weight_decay=0.1)),
        callbacks=monitored(log_momentum=True, log_weight_decay=True),
    ),
    Scenario(
        "rates by epoch",
        scheduled(lambda o: StepLR(o, 2, 0.5), interval="step"),
        {"max_epochs": 3},
        monitored(logging_interval="epoch"),
        differs={"logged": "rates by epoch"},
    ),
    Scenario(
        "rates without a schedule",
        callbacks=lambda library, record, folder: [library.LearningRateMonitor()],
        differs={"logged": "rates by epoch"},
    ),
    Scenario(
        "no momentum",
        named_groups("body", "head", weight_decay=0.1),
        callbacks=monitored(log_momentum=True, log_weight_decay=True),
    ),
    Scenario("rates of several optimizers", ThreeOptimizers, callbacks=monitored(), differs=SEVERAL_OPTIMIZERS),
    Scenario(
        "rates of groups of one name",
        named_groups("body", "body"),
        callbacks=monitored(),
        action=attempted(default_fit),
    ),
    Scenario("no log by step", settings={"log_every_n_steps": 0}),
    Scenario("no training batches", settings={"limit_train_batches": 0}, differs=NOTHING_TO_RUN),
    Scenario("no epochs", settings={"max_epochs": 0}, differs=NOTHING_TO_RUN),
    Scenario("no test batches", settings={"limit_test_batches": 0}, action=run_test, differs=NOTHING_TO_RUN),
    Scenario(
        "checkpoints every 0 epochs",
        callbacks=checkpoint(every_n_epochs=0),
        differs=NEWEST | {"best": "newest checkpoint"},
    ),
    Scenario(
        "checkpoints every 0 steps",
        callbacks=checkpoint(every_n_train_steps=0),
        differs=NEWEST | {"best": "newest checkpoint"},
    ),
    Scenario(
        "checkpoints every 0 steps and each epoch",
        callbacks=checkpoint(every_n_train_steps=0, every_n_epochs=1, save_top_k=-1),
    ),
    Scenario(
        "no checkpoints", values(2.0, 1.0), callbacks=checkpoint(save_top_k=0, monitor="val_loss"), differs=NEWEST
    ),
    Scenario(
        "a schedule of accumulation beside a number",
        settings={"accumulate_grad_batches": 2},
        callbacks=late_schedule,
        action=attempted(default_fit),
        exact=False,
        differs=dict.fromkeys(ALL, "accumulation schedule"),
    ),
    Scenario(
        "clipping by another value",
        clips_otherwise(0.05, "norm"),
        settings={"gradient_clip_val": 0.1},
        action=attempted(default_fit),
        differs=dict.fromkeys(ALL, "clipping by another value"),
    ),
    Scenario(
        "no optimizer",
        WithoutOptimizer,
        action=attempted(lambda trainer, module: trainer.fit(module, loader())),
    ),
    Scenario(
        "no optimizer, windows and clipping",
        WithoutOptimizer,
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        checkpoint(save_last=True),
        differs=NEWEST,
    ),
    Scenario("no optimizer, a logged rate", WithoutOptimizer, callbacks=monitored()),
    Scenario("no optimizer and no loss", WithoutOptimizerSkips, differs=dict.fromkeys(HOOKED, "skipped batch")),
    Scenario(
        "a batch that is None",
        action=attempted(lambda trainer, module: trainer.fit(module, without_positive())),
        differs=dict.fromkeys(ALL, "batch None"),
    ),
    Scenario(
        "teardown after an error",
        FailsAndTearsDown,
        action=attempted(default_fit),
        differs={"noted": "teardown after an error"},
    ),
    Scenario(
        "modes",
        NotesModes,
        action=lambda trainer, module: trainer.predict(module, loader()),
        differs={"noted": "hook after prediction"},
    ),
    Scenario(
        "calls of the logger",
        SeveralLoaders,
        action=counts_calls,
        differs={"noted": "calls of log_metrics", "logged": "several loaders", "metrics": "several loaders"},
    ),
    Scenario(
        "states in the sanity check", callbacks=counts_in_its_state, differs={"noted": "states after the sanity check"}
    ),
    Scenario("saves in validations", callbacks=saves_in_validation, differs={"noted": "saved in a validation"}),
    Scenario("time of the sanity check", callbacks=timed, differs={"noted": "time of the sanity check"}),
    Scenario(
        "index of the only loader",
        TakesIndex,
        action=attempted(default_fit),
        differs=dict.fromkeys(ALL, "index of the loader"),
    ),
    Scenario(
        "validation inside a window",
        settings={"val_check_interval": 3, "accumulate_grad_batches": 2},
        action=lambda trainer, module: trainer.fit(module, loader(24), loader(seed=8)),
        exact=False,
        differs=dict.fromkeys(HOOKED, "validation inside a window") | OF_A_WINDOW,
    ),
    Scenario("three schedules of one optimizer", with_optimizer(three_schedules), {"max_epochs": 4}),
    Scenario("plateau by step", scheduled(plateau, interval="step", monitor="loss"), {"max_epochs": 3}),
    Scenario("plateau by step, validated by step", plateau_by_step("trained", 1), {"val_check_interval": 2}),
    Scenario("plateau by step on a validation", plateau_by_step("validated", 2), {"val_check_interval": 2}),
    Scenario("plateau by step on the epoch's validation", plateau_by_step("validated", 4), {"max_epochs": 3}),
    Scenario("plateau without its value", scheduled(plateau, monitor="never", strict=False), {"max_epochs": 3}),
    Scenario("schedule every second epoch", scheduled(lambda o: StepLR(o, 1, 0.5), frequency=2), {"max_epochs": 5}),
    Scenario("half of the validation batches", settings={"limit_val_batches": 0.5}),
    Scenario("batches of unequal sizes", action=fit_with(lambda: loader(10, 4), lambda: loader(7, 3))),
    Scenario(
        "validation every half of every second epoch",
        settings={"check_val_every_n_epoch": 2, "val_check_interval": 0.5, "max_epochs": 4},
    ),
    Scenario(
        "validation three times in a limited epoch",
        settings={"limit_train_batches": 0.7, "val_check_interval": 0.34},
        action=fit_with(lambda: loader(30), lambda: loader(seed=8)),
    ),
    Scenario("fast_dev_run with three batches", scheduled(lambda o: StepLR(o, 1, 0.5)), settings={"fast_dev_run": 3}),
    Scenario("fast_dev_run beyond max_steps", settings={"fast_dev_run": 3, "max_steps": 1, "max_epochs": None}),
    Scenario(
        "early stopping after training epochs",
        values(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        {"max_epochs": 6},
        early(monitor="val_loss", patience=2, check_on_train_epoch_end=True),
    ),
    Scenario(
        "early stopping with a change below 0",
        values(2.0, 2.25, 2.5, 2.75, 4.0, 3.75, 4.5),
        {"max_epochs": 7},
        early(monitor="val_loss", patience=1, min_delta=-0.5),
    ),
    Scenario(
        "early stopping without a validation",
        logs(on_step=False, on_epoch=True),
        {"max_epochs": 4, "limit_val_batches": 0, "val_check_interval": 0.5},
        early(monitor="loss", patience=1, min_delta=100.0),
        differs=dict.fromkeys(ALL[:-1], "time of early stopping"),
    ),
    *(
        Scenario(
            f"one monitored name in training and validation, {how}, every {interval}",
            one_name_in_both(**options),
            {"max_epochs": 3, "val_check_interval": interval},
            best_and_early,
            differs=dict.fromkeys(differs, "name of both") | dict.fromkeys(("saved",), "newest checkpoint"),
        )
        for how, options, interval, differs in (
            ("by step", {}, 1.0, ()),
            ("by step", {}, 2, ()),
            ("by epoch", {"on_step": False, "on_epoch": True}, 1.0, (*ALL, "best")),
            ("by epoch", {"on_step": False, "on_epoch": True}, 2, ()),
        )
    ),
    Scenario("early stopping on NaN", values(5.0, float("nan"), 8.0), {"max_epochs": 4}, early(monitor="val_loss")),
    Scenario(
        "early stopping by a threshold",
        values(5.0, 4.0, 3.0, 2.0, 1.0),
        {"max_epochs": 6},
        early(monitor="val_loss", stopping_threshold=2.5),
    ),
    Scenario(
        "checkpoints scored by a training value",
        callbacks=checkpoint(monitor="loss", save_top_k=-1, every_n_train_steps=2),
    ),
    Scenario("bf16-mixed", settings={"precision": "bf16-mixed"}),
    Scenario("64-true", settings={"precision": "64-true"}),
]
