"""BackboneFinetuning trains as a loop by hand does, on several processes and over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import ConfigError, TrainModule, seed_everything
from trainer.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint

NAMES = ("single", "DDP x2", "FSDP x2")
EPOCHS, UNFREEZE = 4, 1


class Net(TrainModule):
    def __init__(self, schedule: str = "lambda") -> None:
        seed_everything(4)
        super().__init__()
        self.schedule = schedule
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)
        if self.schedule == "lambda":
            scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        elif self.schedule == "sequence":
            parts = [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ]
            scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def data(micro_batch: int = 8) -> DataLoader[Any]:
    features = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=micro_batch)


def _by_hand() -> dict[str, list[Any]]:
    module = Net()
    module.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(module.head.parameters(), lr=0.02)
    step, backbone = 0, 0.0
    for epoch in range(EPOCHS):
        rate = optimizer.param_groups[0]["lr"]
        if epoch == UNFREEZE:
            module.backbone.requires_grad_(True)
            backbone = rate * 0.1
            optimizer.add_param_group({"params": list(module.backbone.parameters()), "lr": backbone})
        elif epoch > UNFREEZE:
            backbone = min(2.0 * backbone, rate)
            optimizer.param_groups[1]["lr"] = backbone
        for batch in data():
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
            step += 1
            optimizer.param_groups[0]["lr"] = 0.02 * 0.95**step
    return {name: value.tolist() for name, value in module.state_dict().items()}


def _train(name: str, folder: str) -> dict[str, Any]:
    way, results = WAYS[name], {}
    for kind, pieces in (("unbroken", ((4, -1),)), ("broken", ((1, -1), (2, -1), (4, 10), (4, -1)))):
        path = Path(folder) / name.replace(" ", "-") / kind
        for epochs, steps in pieces:
            module = Net()
            trainer = way.trainer(
                max_epochs=epochs,
                max_steps=steps,
                seed=1,
                enable_checkpointing=True,
                callbacks=[BackboneFinetuning(UNFREEZE), ModelCheckpoint(dirpath=path, save_top_k=-1)],
            )
            trainer.fit(module, data(way.micro_batch), ckpt_path="last")
        results[kind] = {key: value.tolist() for key, value in trainer.full_state_dict(True).items()}
        results[f"{kind} rates"] = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return results


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_each(_train, selected(request, "name"), str(tmp_path_factory.mktemp("finetuning")))


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_by_hand_and_a_resumed_run_has_the_same_bits(name: str, results: dict[str, list[Any]]) -> None:
    skip_if_missing(name)
    expected = _by_hand()
    for rank in results[name]:
        assert rank["broken"] == rank["unbroken"]
        assert rank["broken rates"] == rank["unbroken rates"]
        assert len(rank["unbroken rates"]) == 2
        for key, value in expected.items():
            torch.testing.assert_close(torch.tensor(rank["unbroken"][key]), torch.tensor(value), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["lambda", "cosine", "sequence"])
def test_schedulers_leave_the_rate_of_the_backbone_alone(schedule: str) -> None:
    trainer = quiet(max_epochs=2, callbacks=BackboneFinetuning(1, backbone_initial_lr=0.003))
    trainer.fit(Net(schedule), data())
    assert trainer.optimizers[0].param_groups[1]["lr"] == 0.003
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.02


class Norms(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class OwnFinetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.backbone], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, train_bn=False)


def test_frozen_norms_keep_their_statistics_until_they_train() -> None:
    module = Norms()
    quiet(max_epochs=1, callbacks=OwnFinetuning()).fit(module, loader())
    assert not module.backbone[1].track_running_stats
    assert int(module.backbone[1].num_batches_tracked) == 0
    assert not module.backbone[0].weight.requires_grad
    module = Norms()
    trainer = quiet(max_epochs=2, callbacks=OwnFinetuning())
    trainer.fit(module, loader())
    assert int(module.backbone[1].num_batches_tracked) == 8
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.01]
    assert len(trainer.optimizers[0].param_groups[1]["params"]) == 2


def test_helpers() -> None:
    module = Norms()
    assert BaseFinetuning.flatten_modules(module.backbone) == [module.backbone[0], module.backbone[1]]
    assert len(list(BaseFinetuning.filter_params([[module.backbone]], train_bn=False))) == 2
    BaseFinetuning.freeze(module.backbone)
    assert [p.requires_grad for p in module.backbone.parameters()] == [False, False, True, True]


def test_wrong_uses_are_refused_before_the_start() -> None:
    with raises_recorded(ConfigError):
        BackboneFinetuning(-1)
    with raises_recorded(ConfigError):
        quiet(callbacks=BackboneFinetuning()).fit(Toy(), loader())
    reason = WAYS["ZeRO-2 x2"].missing()
    if not reason:
        trainer = quiet(strategy="deepspeed_stage_2", callbacks=BackboneFinetuning())
        with raises_recorded(ConfigError):
            trainer.fit(Net(), data())


def test_parameters_that_train_from_the_start_stay_in_their_group(caplog: pytest.LogCaptureFixture) -> None:
    class All(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = quiet(max_epochs=2, callbacks=BackboneFinetuning(1))
    trainer.fit(All(), data())
    assert len(trainer.optimizers[0].param_groups) == 1
    assert "are in the optimizer already" in caplog.text


def test_batch_norms_that_train_all_along_are_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    BaseFinetuning.freeze(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    BaseFinetuning.unfreeze_and_add_param_group(module, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert caplog.text == ""


class Two(TrainModule):
    """Two heads with an optimizer each; the second's loss does not reach the backbone."""

    def __init__(self) -> None:
        seed_everything(4)
        super().__init__()
        self.automatic_optimization = False
        self.backbone, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.rates: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.rates.append([[group["lr"] for group in one.param_groups] for one in self.optimizers()])
        features = self.backbone(batch[0])
        for optimizer, head, inputs in zip(
            self.optimizers(), (self.one, self.other), (features, batch[0]), strict=True
        ):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(head(inputs), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.one.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.02)]


def test_each_optimizer_has_its_own_rate_for_the_backbone() -> None:
    whole, alone = Two(), Two()
    quiet(max_epochs=4, callbacks=BackboneFinetuning(1, lambda epoch: 1.5)).fit(whole, data())
    quiet(max_epochs=4).fit(alone, data())
    first, second = [0.01 * 1.5**n for n in range(3)], [0.002 * 1.5**n for n in range(3)]
    expected = [[[0.1, one], [0.02, other]] for one, other in zip(first, second, strict=True)]
    assert whole.rates[0] == [[0.1], [0.02]]
    assert whole.rates[1:] == [[pytest.approx(groups) for groups in epoch] for epoch in expected]
    assert torch.equal(whole.other.weight, alone.other.weight)
    broken = Two()
    folder = Path("broken")
    for epochs in (2, 4):
        broken = Two()
        save = ModelCheckpoint(dirpath=folder)
        callbacks = [BackboneFinetuning(1, lambda epoch: 1.5), save]
        trainer = quiet(max_epochs=epochs, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(broken, data(), ckpt_path="last")
    assert broken.rates == whole.rates[2:]
    assert torch.equal(broken.backbone.weight, whole.backbone.weight)
