"""The benchmarks' work done by Hugging Face's Trainer, Ignite, Composer and Keras."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset

from benchmarks._task import BATCH, FEATURES, LR, WIDTH, Batches, Net, Task, optimizer_of
from benchmarks._turns import Clock

# -- Hugging Face Trainer ----------------------------------------------------------------------------------------------


class _Named(Dataset[Any]):
    """Rows as the dicts that the Trainer expects."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, labels = self.rows[index]
        return {"x": x, "labels": labels}


def hf(task: Task, clock: Clock, folder: Path, off: bool = False, on: bool = False) -> None:
    """`off`: no logging, saving, clipping, NaN filter or bar. `on`: bar, TensorBoard, log every 50 steps."""
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(clock)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.mse_loss(self.net(x), labels)}

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            if task.loader:
                return super().get_train_dataloader()
            return Batches([{"x": x, "labels": y} for x, y in task.batches()])

    options: dict[str, Any] = {"report_to": []}
    if off:
        options |= {"logging_strategy": "no", "save_strategy": "no", "max_grad_norm": 0.0, "disable_tqdm": True}
        options |= {"logging_nan_inf_filter": False}
    if on:
        options |= {"report_to": ["tensorboard"], "logging_steps": 50}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=task.steps // task.accumulate,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=task.accumulate,
        optim="sgd",
        learning_rate=LR,
        lr_scheduler_type="constant",
        **options,
    )
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=_Named(task.rows()), optimizers=(optimizer_of(model), None))
    trainer.train()


# -- Ignite ------------------------------------------------------------------------------------------------------------


def ignite(task: Task, clock: Clock, folder: Path, supervised: bool = False, on: bool = False) -> None:
    """An `Engine` around a function, `create_supervised_trainer`, or the latter with everything attached."""
    from ignite.engine import Engine, Events, create_supervised_trainer

    net = Net(clock)
    optimizer = optimizer_of(net)
    if supervised:
        engine = create_supervised_trainer(net, optimizer, F.mse_loss, gradient_accumulation_steps=task.accumulate)
    else:

        def update(engine: Any, batch: Any) -> Any:
            x, y = batch
            net.train()
            loss = F.mse_loss(net(x), y)
            if task.accumulate == 1:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss.item() if on else None
            (loss / task.accumulate).backward()
            if engine.state.iteration % task.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.item() if on else None

        engine = Engine(update)
    if on:
        from ignite.handlers import Checkpoint, DiskSaver, ProgressBar, TensorboardLogger

        ProgressBar().attach(engine, output_transform=lambda loss: {"loss": loss})
        board = TensorboardLogger(log_dir=str(folder))
        board.attach_output_handler(
            engine, Events.ITERATION_COMPLETED(every=50), tag="train", output_transform=lambda loss: {"loss": loss}
        )
        saver = Checkpoint({"model": net, "optimizer": optimizer}, DiskSaver(str(folder / "saved")), n_saved=1)
        engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
    engine.run(task.data(), max_epochs=1)
    if on:
        board.close()


def ignite_validate(task: Task, clock: Clock, folder: Path) -> None:
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Accuracy, Loss

    net = Net(clock, task.classes)
    metrics = {"acc": Accuracy(), "loss": Loss(F.cross_entropy)}
    result = create_supervised_evaluator(net, metrics=metrics).run(task.data()).metrics
    assert 0 <= result["acc"] <= 1


# -- Composer ----------------------------------------------------------------------------------------------------------


def composer(task: Task, clock: Clock, folder: Path, off: bool = False) -> None:
    """Accumulation is Composer's own: a batch of 4 x 32 in micro-batches of 32."""
    from composer import ComposerModel, Trainer

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(clock)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
            return F.mse_loss(outputs, batch[1])

    model, many = Model(), task.accumulate
    if task.loader or many > 1:
        data = DataLoader(task.rows(), batch_size=BATCH * many, shuffle=task.loader)
    else:
        data = Batches(task.batches())  # type: ignore[assignment]
    options: dict[str, Any] = {"progress_bar": False, "console_interval": None} if off else {"save_folder": str(folder)}
    options = {name: value for name, value in options.items() if value is not None}
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        max_duration=f"{task.steps // many}ba",
        optimizers=optimizer_of(model),
        device="cpu",
        device_train_microbatch_size=BATCH if many > 1 else None,
        **options,
    )
    trainer.fit()
    trainer.close()


# -- Keras -------------------------------------------------------------------------------------------------------------


def keras(task: Task, clock: Clock, folder: Path, verbose: int | str) -> None:
    """`Model.fit` on layers of the same shape, with torch as its backend."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras as k

    class Ticking(k.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, x: Any) -> Any:
            if not x.is_meta:
                clock.tick()
            return x

    model = k.Sequential([Ticking(), k.layers.Dense(WIDTH, activation="relu"), k.layers.Dense(1)])
    model.compile(optimizer=k.optimizers.SGD(LR), loss="mse")
    model.build((None, FEATURES))
    clock.count = 0
    clock.marks.clear()
    if task.loader:
        model.fit(task.data(), epochs=1, verbose=verbose)
        return

    class Preloaded(k.utils.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return len(task.batches())

        def __getitem__(self, index: int) -> Any:
            return task.batches()[index]

    model.fit(Preloaded(), epochs=1, verbose=verbose, shuffle=False)
