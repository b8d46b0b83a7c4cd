"""A step, its batches and its hooks mean what Lightning's mean: what is skipped, kept, detached, alive and reported."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import GPT
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Callback, DataModule, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.errors import ConfigError
from trainer.guards.skipped_batches import can_return

# -- memory ------------------------------------------------------------------------------------------------------------

STRATEGIES = [SINGLE, "DDP x2", "FSDP x2", "FSDP x2, CPU offload", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2"]


class Remembers(TrainModule):
    """A module that looks, at the start of each forward, for what is alive of the batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5).eval(), nn.Linear(8, 1))
        self.references: dict[str, Any] = {}
        self.alive: list[tuple[str, int, str]] = []
        self.modes: list[bool] = []

    def look(self, where: str, batch_idx: int) -> None:
        if where == "train" and batch_idx % 2 and self.automatic_optimization:
            self.references.pop("batch")  # the window of two, which is on this device already, still has it
        self.alive += [(where, batch_idx, name) for name, one in self.references.items() if one() is not None]
        self.references.clear()
        self.modes.append(self.layers[1].training or self.layers[0].training != (where == "train"))

    def remember(self, **tensors: torch.Tensor) -> None:
        self.references.update({name: weakref.ref(tensor) for name, tensor in tensors.items()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("train", batch_idx)
        logits = self.layers(batch["x"])
        loss, logged = logits.square().mean(), logits.detach()[0, 0]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("logged", logged)
        self.remember(batch=batch["x"], logits=logits, loss=loss, logged=logged)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("validation", batch_idx)
        logits = self.layers(batch["x"])
        self.log("val", logits.mean())
        self.remember(batch=batch["x"], logits=logits)
        return logits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not outputs["logits"].requires_grad

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((4,), float(index))}


class Keeps(Callback):
    """A callback that keeps the outputs of a batch until the next."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs = outputs

    def on_validation_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *others: Any) -> None:
        self.outputs = outputs
        module.references.pop("logits")  # no copy, as they have no graph


def _alive(name: str) -> Any:
    module = Remembers()
    trainer = WAYS[name].trainer(max_epochs=2, accumulate_grad_batches=2, val_check_interval=2, num_sanity_val_steps=1)
    trainer.fit(module, DataLoader(Rows(), batch_size=2), DataLoader(Rows(), batch_size=6))
    return module.alive, any(module.modes), len(module.modes)


OTHERWISE = {"manual": (True, False), "kept outputs": (False, True), "manual, kept outputs": (True, True)}
"""Two flags: the optimization is manual; a callback keeps the outputs."""


def _alive_otherwise(name: str) -> dict[str, Any]:
    """Train three epochs of an odd number of batches, validated at their ends."""
    found = {}
    for kind, (manual, keeps) in OTHERWISE.items():
        if manual and name.startswith("ZeRO"):
            continue
        module = Remembers()
        module.automatic_optimization = not manual
        callbacks = [Keeps()] if keeps else []
        window, batch_size = 1 if manual else 2, 4 // WAYS[name].processes
        trainer = WAYS[name].trainer(max_epochs=3, accumulate_grad_batches=window, callbacks=callbacks)
        trainer.fit(module, DataLoader(Subset(Rows(), range(20)), batch_size), DataLoader(Rows(), 6))
        found[kind] = module.alive
    return found


@pytest.fixture(scope="module")
def alive_otherwise(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(_alive_otherwise, selected(request, "name"))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", OTHERWISE)
def test_nothing_but_what_a_hook_keeps_is_alive_at_the_next_forward(kind: str, name: str, alive_otherwise: Any) -> None:
    skip_if_missing(name)
    for rank in alive_otherwise[name]:
        if kind not in rank:
            pytest.skip("DeepSpeed's engine has no manual optimization")
        assert rank[kind] == []


@pytest.fixture(scope="module")
def alive(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(_alive, selected(request, "name"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_at_the_start_of_a_forward_nothing_of_the_batch_before_is_alive(alive: Any, name: str) -> None:
    skip_if_missing(name)
    for left, wrong_mode, looked in alive[name]:
        assert left == []
        assert not wrong_mode, "a frozen submodule in eval mode was set to train"
        assert looked > 10


OUTPUTS: list[Any] = []
ALIVE: list[str] = []
LOOKED: list[int] = []
"""What `Divided` saw; not in the module, because no training reads what is different in the stages of a pipeline."""


class Divided(GPT):
    """A model of several processes that looks, at the start of each window, for outputs of layers before."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts=experts)
        assert self.net is not None
        for layer in [*self.net.blocks, self.net.head, *self.net.blocks[0].feed_forward]:  # type: ignore[misc]
            layer.register_forward_hook(self.remember)
        for seen in (OUTPUTS, ALIVE, LOOKED):
            seen.clear()

    def remember(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        OUTPUTS.append((type(layer).__name__, weakref.ref(output)))

    def loss(self, batch: Any) -> torch.Tensor:
        if len(OUTPUTS) and self.begins:
            ALIVE.extend([name for name, output in OUTPUTS if output() is not None])
            LOOKED.append(len(OUTPUTS))
            OUTPUTS.clear()
        return super().loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.begins = batch_idx % 2 == 0  # a pipeline's micro-batches of one window overlap
        loss = super().training_step(batch, batch_idx)
        self.log("one", loss.detach().view(1)[0], on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.begins = True
        super().validation_step(batch, batch_idx)


SPLIT = ["TP x2", "CP x2", "CP x2, keys", "PP x2", "EP x2", "FSDP 2x2", "TP 2 x FSDP 2"]


def _alive_of_split(name: str) -> Any:
    way, module = WAYS[name], Divided(experts=4 if name.startswith("EP") else 0)
    data = module.data(6 * way.micro_batch * way.processes // way.processes_of_a_model)
    trainer = way.trainer(max_epochs=2, accumulate_grad_batches=2, val_check_interval=2, num_sanity_val_steps=1)
    trainer.fit(module, DataLoader(data, way.micro_batch), DataLoader(data, way.micro_batch))
    return [*ALIVE], sum(LOOKED)


@pytest.fixture(scope="module")
def alive_of_split(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(_alive_of_split, selected(request, "layout"))


@pytest.mark.parametrize("layout", SPLIT)
def test_a_split_model_keeps_no_outputs(layout: str, alive_of_split: Any) -> None:
    for alive, looked in alive_of_split[layout]:
        assert alive == []
        assert looked > 20


class StepsItself(Toy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.losses = [*getattr(self, "losses", []), optimizer_closure()]
        optimizer.step()


def test_the_loss_that_a_closure_returns_has_no_graph() -> None:
    """It stays until the next step."""
    module = StepsItself()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader(4))
    assert [loss.requires_grad for loss in module.losses] == [False, False]


class Last(Callback):
    def __init__(self) -> None:
        self.last: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        if trainer.is_last_batch:
            self.last.append(index)


def test_the_last_batch_is_the_last_one_of_an_optimizer_with_a_closure_too() -> None:
    class Closed(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    last = Last()
    quiet(max_epochs=2, callbacks=[last]).fit(Closed(), loader(4))
    assert last.last == [3, 3]


class SavesAt(Callback):
    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        if index == self.batch:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_inside_a_step_is_refused(tmp_path: Path) -> None:
    """Its micro-batches would count twice after a resume."""
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, accumulate_grad_batches=3, callbacks=[SavesAt(3, tmp_path / "a")]).fit(Toy(), loader(9))
    quiet(max_epochs=1, accumulate_grad_batches=3, callbacks=[SavesAt(5, tmp_path / "a")]).fit(Toy(), loader(9))


def test_an_iterables_first_batch_is_not_kept() -> None:
    module = Remembers()
    batches = ({"x": torch.ones(2, 4)} for _ in range(3))
    quiet(max_epochs=1).fit(module, batches)
    assert module.alive == []


def test_a_closures_next_forward_does_not_keep_the_batch_of_the_one_before() -> None:
    class Evaluates(Remembers):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return {"x": batch["x"].clone()}

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    module = Evaluates()
    quiet(max_epochs=1).fit(module, DataLoader(Rows(), batch_size=8))
    assert module.alive == []
    assert len(module.modes) > 3


class _Keeping(torch.autograd.Function):
    """Keeps its input past the backward, as kernels do that save more than tensors for it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.kept = value.detach().clone()
        return value.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2 * ctx.kept / ctx.kept.numel()


class RemembersMemory(Remembers):
    """Look for the memory itself of the micro-batches before in the same window: of batches, outputs and graphs."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return {"x": batch["x"].clone()}  # else the window still has it

    def look(self, where: str, batch_idx: int) -> None:
        self.alive += [(where, batch_idx, name) for name, memory in self.references.items() if not memory.expired()]
        self.references.clear()
        self.modes.append(False)

    def remember(self, **tensors: torch.Tensor) -> None:
        self.references.update({name: StorageWeakRef(one.untyped_storage()) for name, one in tensors.items()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("train", batch_idx)
        logits = self.layers(batch["x"])
        loss = _Keeping.apply(logits)  # type: ignore[no-untyped-call]
        self.remember(batch=batch["x"], logits=logits, loss=loss, graph=loss.grad_fn.kept)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("window", [1, 3])
def test_inside_a_window_no_memory_of_the_micro_batch_before_is_kept(window: int) -> None:
    module = RemembersMemory()
    quiet(max_epochs=2, accumulate_grad_batches=window).fit(module, DataLoader(Rows(), batch_size=2))
    assert module.alive == []
    assert len(module.modes) == 24


# -- modes -------------------------------------------------------------------------------------------------------------


def test_modules_in_eval_mode_stay_so_and_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Frozen(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).eval()
            self.seen: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(self.norm.training)
            self.norm(batch[0] + 5)
            return super().training_step(batch, batch_idx)

    module = Frozen()
    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_epochs=2, val_check_interval=2).fit(module, loader(4), loader(1))
    assert module.seen == [False] * 8
    assert torch.equal(module.norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert "in eval mode at the start of training, and staying so: norm" in caplog.text


# -- the end of an epoch by the module ---------------------------------------------------------------------------------


class Ends(Toy):
    """End every epoch before batch `at`, on the processes `ranks`."""

    def __init__(self, at: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.at, self.ranks = at, ranks
        self.seen: list[tuple[int, int]] = []
        self.epochs = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if batch_idx == self.at and self.trainer.rank in self.ranks:
            return -1
        return None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.epochs += 1


def _ended(strategy: str, ranks: tuple[int, ...]) -> Any:
    module = Ends(2, ranks)
    trainer = quiet(max_epochs=2, strategy=strategy, devices=2 if strategy != "auto" else 1)
    trainer.fit(module, loader(8))
    return module.seen, module.epochs, trainer.global_step, module.layer.weight.tolist() if strategy != "fsdp" else 0


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_checkpoints_are_written_after_an_epoch_that_minus_one_has_ended(at: int, window: int) -> None:
    class Saves(Ends):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self.trainer.save_checkpoint(f"own-{self.current_epoch}")

    module = Saves(at)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=window, enable_checkpointing=True, default_root_dir="runs")
    trainer.fit(module, loader(8), loader(1))
    assert (module.epochs, trainer.global_step) == (2, 2 * (at // window))
    assert len([*Path().glob("own-*")]) == 2


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_minus_one_on_any_process_ends_the_epoch_on_all(ranks: tuple[int, ...]) -> None:
    first, second = run_distributed(_ended, 2, "ddp", ranks)
    assert first[:3] == ([(0, 0), (0, 1), (1, 0), (1, 1)], 2, 4)
    assert first == second


def test_minus_one_ends_the_epoch_with_manual_optimization_too() -> None:
    class ByHand(Ends):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    module = ByHand(2)
    quiet(max_epochs=2).fit(module, loader(8))
    assert (module.seen, module.epochs) == ([(0, 0), (0, 1), (1, 0), (1, 1)], 2)


def test_minus_one_drops_the_gradients_of_an_unfinished_window() -> None:
    module = Ends(2)
    initial = module.layer.weight.detach().clone()
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, loader(8))
    assert module.seen == [(0, 0), (0, 1)]
    assert torch.equal(module.layer.weight, initial)


# -- a batch that is skipped -------------------------------------------------------------------------------------------


class Skips(Toy):
    """Skip batches whose first target is in `skipped`."""

    def __init__(self, skipped: tuple[float, ...], hidden: bool = False) -> None:
        super().__init__()
        nn.init.constant_(self.layer.weight, 0.3)
        nn.init.zeros_(self.layer.bias)
        self.skipped, self.hidden = skipped, hidden
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if float(batch[1][0]) in self.skipped:
            return None
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs.get("loss") is None)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Hides(Skips):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


def numbered(batches: int = 8, size: int = 2) -> TensorDataset:
    x = torch.arange(float(batches * size))[:, None] * torch.ones(4)
    return TensorDataset(x / 10, x[:, :1])


def by_hand(skipped: tuple[float, ...], window: int, processes: int = 1) -> torch.Tensor:
    """Train with a hand-written loop over the batches that are left."""
    model = Skips(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = numbered().tensors
    batches = list(zip(x.split(2), y.split(2), strict=True))
    for start in range(0, len(batches), window * processes):
        left = [(a, b) for a, b in batches[start : start + window * processes] if float(b[0, 0]) not in skipped]
        if left:
            optimizer.zero_grad()
            features, targets = (torch.cat(parts) for parts in zip(*left, strict=True))
            nn.functional.mse_loss(model.layer(features), targets).backward()
            optimizer.step()
    return model.layer.weight.detach()


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("skipped", [(), (2.0,), (2.0, 4.0, 6.0), (0.0, 2.0, 4.0, 6.0)])
def test_a_skipped_batch_counts_nowhere(window: int, skipped: tuple[float, ...]) -> None:
    module = Hides(skipped)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=window)
    trainer.fit(module, DataLoader(numbered(), batch_size=2))
    torch.testing.assert_close(module.layer.weight, by_hand(skipped, window))
    assert trainer.global_step == 8 // window
    assert sum(module.outputs) == len(skipped)


def _skipped(strategy: str, skipped: tuple[float, ...], window: int) -> torch.Tensor:
    trainer = quiet(max_epochs=1, accumulate_grad_batches=window, strategy=strategy, devices=2)
    trainer.fit(Skips(skipped), DataLoader(numbered(), batch_size=2))
    return trainer.full_state_dict(everywhere=True)["layer.weight"]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("skipped", [(2.0,), (0.0, 2.0, 4.0, 6.0)])
def test_a_batch_skipped_by_one_process_counts_nowhere(window: int, skipped: tuple[float, ...]) -> None:
    first, second = run_distributed(_skipped, 2, "ddp", skipped, window)
    torch.testing.assert_close(first, by_hand(skipped, window, 2))
    assert torch.equal(first, second)


def test_sharded_processes_say_that_they_cannot_skip() -> None:
    with pytest.raises(AssertionError, match=r"returned None, and a batch cannot be skipped .*strategy 'fsdp'"):
        run_distributed(_raise_skipped, 2, "fsdp", (0.0, 2.0), "Skips")


def test_processes_that_cannot_know_of_a_skipped_batch_say_so() -> None:
    with pytest.raises(AssertionError, match="has no 'return None'"):
        run_distributed(_raise_skipped, 2, "ddp", (2.0,), "Hides")


def _raise_skipped(strategy: str, skipped: tuple[float, ...], kind: str) -> None:
    module: Skips = {"Skips": Skips, "Hides": Hides}[kind](skipped)
    quiet(max_epochs=1, strategy=strategy, devices=2).fit(module, DataLoader(numbered(), batch_size=2))


def test_can_return() -> None:
    def both(x: Any) -> Any:
        if x:
            return None
        return x

    def never(x: Any) -> Any:
        return x

    def always(x: Any) -> None:
        x.append(1)

    def conditional(x: Any) -> Any:
        return -1 if x else None

    functions = (both, never, always, conditional, len)
    assert [can_return(f, none=True) for f in functions] == [True, False, True, True, True]
    assert [can_return(f, none=False) for f in functions] == [True, True, False, True, True]


def test_a_step_without_return_is_still_an_error() -> None:
    class Forgets(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self._loss(batch)

    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(Forgets(), loader(2))


# -- losses that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 50])
def test_a_loss_that_is_not_finite_is_reported_once(every: int, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.global_step >= 2 else loss

    with caplog.at_level(logging.WARNING, "trainer"):
        trainer = quiet(max_epochs=2, log_every_n_steps=every)
        trainer.fit(Breaks(), loader(4))
    reported = [record.message for record in caplog.records if "the loss of step" in record.message]
    assert len(reported) == 1
    assert reported[0].startswith("the loss of step 3 is nan on rank 0")
    assert trainer.global_step == 8


# -- outputs, attributes after the run, fast_dev_run -------------------------------------------------------------------


@pytest.mark.parametrize("as_dict", [False, True])
def test_outputs_in_on_train_batch_end_are_a_detached_dict(as_dict: bool) -> None:
    class Outputs(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "more": [loss * 2, "text"]} if as_dict else loss

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, *_: Any) -> None:
            seen.append(outputs)

    seen: list[Any] = []
    quiet(max_epochs=1, callbacks=[Look()], accumulate_grad_batches=2).fit(Outputs(), loader(3))
    assert len(seen) == 3
    for outputs in seen:
        assert outputs.keys() == ({"loss", "more"} if as_dict else {"loss"})
        assert not outputs["loss"].requires_grad
        assert not as_dict or (not outputs["more"][0].requires_grad and outputs["more"][1] == "text")


def test_module_and_data_module_keep_their_trainer_and_its_counters() -> None:
    module, data = Toy(), Data()
    trainer = quiet(max_epochs=2)
    trainer.fit(module, datamodule=data)
    assert (module.trainer, data.trainer) == (trainer, trainer)
    assert (module.global_step, module.current_epoch) == (6, 2)
    with raises_recorded(ConfigError):
        module.log("late", 1.0)


def test_fast_dev_run_has_no_sanity_check_and_a_logger_that_takes_everything() -> None:
    class Draws(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            steps.append(self.global_step)
            self.logger.experiment.add_image("x", batch, global_step=1)  # type: ignore[union-attr]
            logger: Any = self.logger
            logger.log_metrics({"a": 1.0}, 1)
            logger.log_metrics({"a": 1.0})
            logger.log_table("t", columns=["a"], data=[[1]])
            logger.experiment.log_metrics({"a": 1.0}, epoch=1)
            logger.experiment.config.update({"lr": 0.1})
            logger.experiment["parameters/lr"] = 0.1
            logger.experiment["loss"].append(1.0)
            logger[0].experiment[0].add_scalars("x", {"a": 1.0})
            assert copy.deepcopy(logger).name == logger.version == ""
            assert logger.save_dir is None
            assert self.trainer.loggers == [logger]

    steps: list[int] = []
    trainer = quiet(fast_dev_run=True, num_sanity_val_steps=2, logger=True)
    trainer.fit(Draws(), loader(3), loader(3))
    assert steps == [1]
    assert (len(trainer.loggers), trainer.logger) == (1, trainer.loggers[0])
    assert quiet(fast_dev_run=True, logger=False).loggers == []


# -- hooks of a data module --------------------------------------------------------------------------------------------


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader(3)


class Transfers(Data):
    """Count the calls of the hooks that it defines."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return [part * 0 for part in batch]

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(str(exception))


class OwnTransfer(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 2:
            raise ValueError("on purpose")
        assert batch[0].abs().sum() == 0
        return super().training_step(batch, batch_idx)


def test_transfer_hooks_are_the_data_modules_where_it_defines_them() -> None:
    module, data = OwnTransfer(), Transfers()
    with pytest.raises(ValueError, match="on purpose"):
        quiet(max_epochs=1).fit(module, datamodule=data)
    assert data.calls == ["before", "after"] * 3 + ["on purpose"]
    assert module.calls == ["transfer"] * 3


def test_a_data_modules_checkpoint_hook_that_is_never_called_is_refused() -> None:
    class Saves(Data):
        def on_save_checkpoint(self, checkpoint: Any) -> None: ...

    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(Toy(), datamodule=Saves())


# -- epochs that end early ---------------------------------------------------------------------------------------------


class RunsOut(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            next(iter(()))
        return torch.ones(4), torch.ones(1)


class Short(BatchSampler):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_stop_iteration_is_reported(workers: int) -> None:
    # A worker puts its traceback before the message.
    with pytest.raises(ConfigError, match=r"raised StopIteration for the indices .*write next\(iterator, None\)"):
        quiet(max_epochs=1).fit(Toy(), DataLoader(RunsOut(), batch_size=2, num_workers=workers))


class LeavesOut(RunsOut):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.ones(4), torch.ones(1)) for index in indices if index != 3]


@pytest.mark.parametrize("seed_per_sample", [False, True])
def test_a_dataset_that_gives_fewer_samples_than_it_is_asked_for_is_reported(seed_per_sample: bool) -> None:
    trainer = quiet(max_epochs=1, seed_per_sample=seed_per_sample)
    with raises_recorded(ConfigError):
        trainer.fit(Toy(), DataLoader(LeavesOut(), batch_size=2))
    as_batch = DataLoader(LeavesOut(), batch_size=2, collate_fn=lambda samples: default_collate(samples))
    quiet(max_epochs=1).fit(Toy(), as_batch)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_sampler_with_a_wrong_length_is_reported(stage: str) -> None:
    data = loader(2).dataset
    short = DataLoader(data, batch_sampler=Short(SequentialSampler(range(8)), 4, False))
    with raises_recorded(ConfigError):
        getattr(quiet(max_epochs=1), stage)(Toy(), short)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(12):
            yield torch.ones(4), torch.ones(1)


def test_an_iterable_shorter_than_its_limit_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=2, limit_train_batches=5)
    with caplog.at_level(logging.WARNING, "trainer"):
        trainer.fit(Toy(), DataLoader(Stream(), batch_size=4))
    assert (trainer.num_training_batches, trainer.estimated_stepping_batches, trainer.global_step) == (5, 10, 6)
    assert caplog.text.count("gave 3 batches, fewer than its limit of 5") == 1


def test_max_steps_at_the_end_of_an_epoch_of_unknown_length_validates() -> None:
    class Ended(Toy):
        calls = 0

        def on_train_epoch_end(self) -> None:
            self.calls += 1

    for steps, validated in ((3, True), (2, False)):
        module = Ended()
        trainer = quiet(max_steps=steps, enable_checkpointing=True, callbacks=[ModelCheckpoint()])
        trainer.fit(module, DataLoader(Stream(), batch_size=4), loader(1))
        assert module.calls == 1
        assert ("val_loss" in trainer.callback_metrics) == validated


def test_the_steps_of_a_fit_are_known_after_an_evaluation() -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(Toy(), loader(6), loader(3))
    trainer.validate(Toy(), loader(3))
    assert (trainer.num_training_batches, trainer.estimated_stepping_batches) == (6, 12)
