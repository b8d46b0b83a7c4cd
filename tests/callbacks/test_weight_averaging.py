"""WeightAveraging averages as torch does, under every strategy, and its checkpoints go everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Callback, ConfigError, Trainer, TrainModule, seed_everything
from trainer.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from trainer.checkpoint.format import read_checkpoint
from trainer.cli.main import main

NAMES = ("single", "DDP x2", "FSDP x2", "FSDP 2x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
DECAY = 0.8


class Normed(Toy):
    def __init__(self) -> None:
        seed_everything(7)
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(self.norm(batch[0])), batch[1])


class ByHand(Callback):
    """torch's own average, and the validation loss with it."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.losses: list[float] = []

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.average = AveragedModel(nn.ModuleDict(dict(module.named_children())), use_buffers=True, **self.options)

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.average.update_parameters(nn.ModuleDict(dict(module.named_children())))


def _checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, save_top_k=-1)


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"avg_fn": get_ema_avg_fn(DECAY)}, {"avg_fn": get_ema_avg_fn(DECAY)}),
        ({"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}, {"avg_fn": get_ema_avg_fn(DECAY)}),
        ({"decay": DECAY}, {"avg_fn": get_ema_avg_fn(DECAY)}),
    ],
)
def test_the_average_is_torchs(options: dict[str, Any], theirs: dict[str, Any]) -> None:
    module, by_hand = Normed(), ByHand(**theirs)
    kind = EMAWeightAveraging if "decay" in options else WeightAveraging
    quiet(max_epochs=2, callbacks=[kind(**options), by_hand]).fit(module, loader())
    expected = by_hand.average.module.state_dict()
    for name, value in module.state_dict().items():
        if "num_batches" not in name:  # torch averages this count, too
            torch.testing.assert_close(value, expected[name])


class Values(Callback):
    """The layer's weight at each validation and at each save."""

    def __init__(self) -> None:
        self.validated: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.validated.append(module.layer.weight.detach().clone())

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.trained.append(module.layer.weight.detach().clone())


def test_validation_sees_the_average_and_training_does_not(tmp_path: Path) -> None:
    values = Values()
    plain = Values()
    callbacks = [EMAWeightAveraging(decay=DECAY), values, _checkpoints(tmp_path)]
    trainer = quiet(max_epochs=2, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(Normed(), loader(), loader(2))
    quiet(max_epochs=2, callbacks=[plain]).fit(Normed(), loader(), loader(2))
    assert_same_bits(values.trained, plain.trained)
    saved = [read_checkpoint(tmp_path / f"epoch={e}-step={8 * e + 8}") for e in range(2)]
    assert_same_bits([one["model"]["layer.weight"] for one in saved], plain.trained)
    assert_same_bits([one["average"]["layer.weight"] for one in saved], values.validated)
    assert not torch.equal(values.validated[-1], values.trained[-1])


def test_a_save_while_the_average_is_in_place_keeps_both(tmp_path: Path) -> None:
    module = Normed()
    trainer = quiet(max_epochs=1, callbacks=[EMAWeightAveraging(decay=DECAY)])
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "after")
    state = read_checkpoint(tmp_path / "after")
    assert torch.equal(state["average"]["layer.weight"], module.layer.weight)
    assert not torch.equal(state["model"]["layer.weight"], module.layer.weight)


@pytest.mark.parametrize("options", [{}, {"update_starting_at_step": 10, "update_every_n_steps": 3, "device": "cpu"}])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    runs = {}
    for name, epochs in (("unbroken", (3,)), ("broken", (1, 2, 3))):
        for number in epochs:
            module = Normed()
            callbacks = [EMAWeightAveraging(decay=DECAY, **options), _checkpoints(tmp_path / name)]
            trainer = quiet(max_epochs=number, enable_checkpointing=True, callbacks=callbacks)
            trainer.fit(module, loader(), loader(2), ckpt_path="last")
        runs[name] = (module.state_dict(), read_checkpoint(tmp_path / name / "epoch=2-step=24"))
    assert_same_bits(runs["broken"][0], runs["unbroken"][0])
    for key in ("model", "average", "callback_metrics"):
        assert_same_bits(runs["broken"][1][key], runs["unbroken"][1][key], key)


def test_bf16_weights_have_a_float32_average(tmp_path: Path) -> None:
    results = []
    for epochs in ((2,), (1, 2)):
        folder = tmp_path / str(len(epochs))
        for number in epochs:
            module = Normed()
            callbacks = [EMAWeightAveraging(), _checkpoints(folder)]
            trainer = quiet(max_epochs=number, precision="bf16-true", enable_checkpointing=True, callbacks=callbacks)
            trainer.fit(module, loader(), ckpt_path="last")
        state = read_checkpoint(folder / "epoch=1-step=16")
        assert state["average"]["layer.weight"].dtype == torch.float32
        assert state["model"]["layer.weight"].dtype == torch.bfloat16
        results.append([state["average"], module.state_dict()])
    assert_same_bits(results[1], results[0])


def test_test_and_export_of_a_new_process(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, enable_checkpointing=True, callbacks=[EMAWeightAveraging(), _checkpoints(tmp_path)])
    trained = Normed()
    trainer.fit(trained, loader())
    path = tmp_path / "epoch=0-step=8"
    module = Normed()
    quiet(callbacks=[EMAWeightAveraging()]).test(module, loader(2), ckpt_path=path)
    assert_same_bits(module.state_dict(), trained.state_dict())
    assert main(["checkpoint", "export", str(path), str(tmp_path / "ema.safetensors"), "--ema"]) == 0
    assert_same_bits(load_file(tmp_path / "ema.safetensors"), dict(trained.state_dict()))
    plain = Normed()
    quiet().test(plain, loader(2), ckpt_path=path)
    assert not torch.equal(plain.layer.weight, trained.layer.weight)


class Backbone(Toy):
    def __init__(self) -> None:
        seed_everything(7)
        super().__init__()
        self.backbone = nn.Linear(4, 4)

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


def test_a_resumed_run_keeps_the_average_of_what_a_later_callback_unfreezes(tmp_path: Path) -> None:
    def fit(**options: Any) -> TrainModule:
        callbacks = [EMAWeightAveraging(decay=DECAY), BackboneFinetuning(unfreeze_backbone_at_epoch=1)]
        settings = {"max_epochs": 2, "enable_checkpointing": True, "seed": 3}
        module = Backbone()
        saves = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        quiet(**settings, callbacks=[*callbacks, saves]).fit(module, loader(4), **options)
        return module

    uninterrupted = fit()
    assert_same_bits(uninterrupted.state_dict(), fit(ckpt_path=tmp_path / "step=6").state_dict())


@pytest.mark.parametrize(("rates", "ends"), [(0.01, [0.01, 0.01]), ([0.01], [0.01, 0.05])])
def test_a_group_that_is_added_after_swas_start_gets_its_rate(rates: Any, ends: list[float]) -> None:
    swa = StochasticWeightAveraging(swa_lrs=rates, swa_epoch_start=1, annealing_epochs=1)
    options: Any = {"backbone_initial_lr": 0.05, "lambda_func": lambda epoch: 1.0, "should_align": rates == 0.01}
    unfrozen = BackboneFinetuning(unfreeze_backbone_at_epoch=1, **options)
    trainer = quiet(max_epochs=3, callbacks=[swa, unfrozen])
    trainer.fit(Backbone(), loader(4))
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx(ends)


def test_what_trains_later_is_averaged_from_then_on() -> None:
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
            module.norm.requires_grad_(trainer.current_epoch > 0)

    module = Normed()
    module.norm.requires_grad_(False)
    average = EMAWeightAveraging(decay=DECAY)
    quiet(max_epochs=2, callbacks=[Unfreeze(), average]).fit(module, loader())
    assert not torch.equal(module.norm.weight, torch.ones(4))


class ByEpoch(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


@pytest.mark.parametrize(("length", "interval"), [(True, 1.0), (True, 0.5), (False, 1.0)])
@pytest.mark.parametrize("kind", [ByEpoch, partial(EMAWeightAveraging, decay=0.5, update_starting_at_epoch=0)])
def test_the_score_of_a_checkpoint_is_that_of_the_average_in_it(
    kind: Any, length: bool, interval: float, tmp_path: Path
) -> None:
    checkpoints = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1)
    data: Any = loader() if length else DataLoader(Stream(), batch_size=None)
    trainer = quiet(
        max_epochs=4, val_check_interval=interval, callbacks=[kind(), checkpoints], enable_checkpointing=True
    )
    trainer.fit(Toy(), data, loader(2))
    assert len(checkpoints.kept) == 4 / interval
    assert len(checkpoints.best_k_models) == (4 / interval if length else 0)
    for path, score in checkpoints.best_k_models.items():
        (values,) = quiet(callbacks=[kind()]).validate(Toy(), loader(2), ckpt_path=path, verbose=False)
        assert values["val_loss"] == pytest.approx(float(score))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(loader())


class LatelyTrained(Normed):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.norm.requires_grad_(self.global_step >= 3)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_what_trains_after_a_resume_is_averaged_as_in_one_go(stop: int, every: int, tmp_path: Path) -> None:
    def run(steps: int, root: Path) -> Normed:
        module = LatelyTrained()
        module.norm.requires_grad_(False)
        average = EMAWeightAveraging(decay=DECAY, update_every_n_steps=every)
        settings: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": root}
        trainer = quiet(max_steps=steps, callbacks=[average, ModelCheckpoint()], **settings)
        trainer.fit(module, loader(), ckpt_path="last")
        return module

    whole = run(8, tmp_path / "whole")
    run(stop, tmp_path / "broken")
    assert_same_bits(run(8, tmp_path / "broken").state_dict(), whole.state_dict())


def test_what_trains_from_a_step_on_is_averaged_from_that_step_on() -> None:
    by_hand = ByHand(avg_fn=get_ema_avg_fn(DECAY))
    module = LatelyTrained()
    module.norm.requires_grad_(False)
    quiet(max_epochs=1, callbacks=[by_hand, EMAWeightAveraging(decay=DECAY)]).fit(module, loader())
    theirs = by_hand.average.module.state_dict()
    for name, value in module.named_parameters():
        torch.testing.assert_close(value, theirs[name], msg=name)


@pytest.mark.parametrize(
    "options",
    [{"decay": 1.5}, {"decays": 0.9}, {"avg_fn": get_ema_avg_fn()}, {"update_every_n_steps": 0}],
    ids=["decay", "misspelt", "function", "interval"],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with raises_recorded(ConfigError):
        EMAWeightAveraging(**options)


def test_two_averages_are_refused_before_the_start() -> None:
    trainer = quiet(callbacks=[EMAWeightAveraging(), WeightAveraging()])
    with raises_recorded(ConfigError):
        trainer.fit(Normed(), loader())


def test_a_callback_of_the_users_may_have_a_method_of_that_name() -> None:
    class Mine(Callback):
        def should_update(self) -> bool:
            return True

    quiet(max_steps=1, callbacks=[Mine(), EMAWeightAveraging()]).fit(Normed(), loader())


def test_export_says_that_there_is_no_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(max_steps=1)
    trainer.fit(Normed(), loader())
    trainer.save_checkpoint(tmp_path / "plain")
    assert main(["checkpoint", "export", str(tmp_path / "plain"), str(tmp_path / "x.safetensors"), "--ema"]) != 0
    assert "no average of the weights" in capsys.readouterr().err


# -- every strategy ----------------------------------------------------------------------------------------------------


def _train(name: str, folder: str) -> None:
    """Train in two pieces."""
    way = WAYS[name]
    path = Path(folder) / name.replace(" ", "-")
    for epochs in (1, 2):
        seed_everything(1)
        trainer = way.trainer(
            max_epochs=epochs,
            seed=1,
            enable_checkpointing=True,
            callbacks=[EMAWeightAveraging(decay=DECAY), ModelCheckpoint(dirpath=path, save_top_k=-1)],
        )
        data = DataLoader(MLP.data(24), batch_size=way.micro_batch)
        trainer.fit(MLP(), data, data, ckpt_path="last")


def _train_low(folder: str) -> list[dict[str, torch.Tensor]]:
    """Train without a break and in two pieces; return the weights at the ends, as this process has them."""
    ends, way = [], WAYS["FSDP 2x2"]
    for name, pieces in (("whole", (2,)), ("broken", (1, 2))):
        for epochs in pieces:
            seed_everything(1)
            callbacks = [EMAWeightAveraging(decay=DECAY), ModelCheckpoint(dirpath=Path(folder) / name)]
            trainer = way.trainer(
                max_epochs=epochs, seed=1, precision="bf16-true", enable_checkpointing=True, callbacks=callbacks
            )
            module, data = MLP(), DataLoader(MLP.data(24), batch_size=way.micro_batch)
            trainer.fit(module, data, ckpt_path="last" if epochs > pieces[0] else None)
        ends.append(trainer.full_state_dict(everywhere=True))
    return ends


def test_copies_of_shards_in_16_bits_have_the_averages_of_a_checkpoint(tmp_path: Path) -> None:
    for whole, broken in run_distributed(_train_low, 4, str(tmp_path)):
        for name, value in whole.items():
            assert torch.equal(value, broken[name]), name
    whole, broken = (read_checkpoint(tmp_path / name / "epoch=1-step=6") for name in ("whole", "broken"))
    for name, value in whole["average"].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, broken["average"][name])


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("averages")
    run_each(_train, dict.fromkeys(["single", *selected(request, "name")]), str(path))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_single_process_goes_on_with_any_checkpoint(name: str, folder: Path) -> None:
    skip_if_missing(name)
    trainer = WAYS["single"].trainer(max_epochs=3, seed=1, callbacks=[EMAWeightAveraging(decay=DECAY)])
    module = MLP()
    path = folder / name.replace(" ", "-") / "epoch=1-step=6"
    trainer.fit(module, DataLoader(MLP.data(24), batch_size=8), ckpt_path=path)
    other = MLP()
    again = WAYS["single"].trainer(max_epochs=3, seed=1, callbacks=[EMAWeightAveraging(decay=DECAY)])
    again.fit(other, DataLoader(MLP.data(24), batch_size=8), ckpt_path=folder / "single" / "epoch=1-step=6")
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("callback", "settings", "words"),
    [
        (lambda: StochasticWeightAveraging(0.01, swa_epoch_start=9), {"max_epochs": 4}, "(swa_epoch_start=9)"),
        (lambda: StochasticWeightAveraging(0.01), {"max_epochs": 10, "max_steps": 5}, "(swa_epoch_start=0.8)"),
        (lambda: EMAWeightAveraging(update_starting_at_step=9), {"max_epochs": 2}, "(update_starting_at_step=9, "),
        (lambda: StochasticWeightAveraging(0.01), {"max_epochs": 2}, ""),
        (lambda: EMAWeightAveraging(update_starting_at_step=9, update_starting_at_epoch=1), {"max_epochs": 2}, ""),
    ],
)
def test_an_average_that_begins_after_the_end_is_reported_at_the_start(
    callback: Any, settings: dict[str, int], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    quiet(callbacks=[callback()], **settings).fit(Toy(), loader(4))
    said = [message for message in caplog.messages if "begins after the end of the run" in message]
    assert [words in message for message in said] == [True] * bool(words)


class Fails(Callback):
    """Fails in a hook after the third step."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, *others: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("not of the step")


@pytest.mark.parametrize("writer", ["callback", "option"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_step_end"])
def test_an_error_after_a_step_takes_no_update_away(hook: str, writer: str, tmp_path: Path) -> None:
    def run(*callbacks: Callback, ckpt_path: Any = None) -> Any:
        module, average = Normed(), EMAWeightAveraging(decay=DECAY)
        saved = ModelCheckpoint(dirpath=tmp_path / "saved", save_on_exception=writer == "option")
        trainer = quiet(max_epochs=2, callbacks=[*callbacks, average, saved], enable_checkpointing=True, seed=1)
        trainer.fit(module, loader(6), ckpt_path=ckpt_path)
        return {**module.state_dict(), "updates": average.state_dict()["updates"]}

    whole = run()
    on_exception = OnExceptionCheckpoint(tmp_path / "error")
    with pytest.raises(RuntimeError, match="not of the step"):
        run(Fails(hook), *([on_exception] if writer == "callback" else []))
    (path,) = (tmp_path / "error").iterdir() if writer == "callback" else (tmp_path / "saved").glob("*step=3")
    assert_same_bits(run(ckpt_path=path), whole)
