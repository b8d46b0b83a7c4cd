"""On an accelerator: nothing waits for the device, no copy is used too early, batches of all kinds arrive."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.emulated import device as emulated
from tests.helpers.processes import fork_python
from tests.helpers.toy import Toy
from tests.helpers.toy import loader as toy_loader
from tests.loop.test_no_sync import Between, Module
from trainer import Trainer
from trainer.callbacks import CSVLogger, ModelCheckpoint, PredictionWriter, StragglerMonitor
from trainer.checkpoint.format import read_checkpoint
from trainer.data.transfer import make_transfer, move_to
from trainer.distributed.encoding import from_bytes, to_bytes
from trainer.errors import ConfigError
from trainer.model.init_device import initial_values

pytestmark = pytest.mark.timeout(900)  # the first test compiles the device
DEVICE = "emulated:0"


@pytest.fixture(autouse=True)
def _device() -> None:
    emulated.skip_if_missing()


def in_its_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a new process that has the device; a path arrives as a text."""

    @functools.wraps(test)
    def forked(**arguments: object) -> None:
        given = ", ".join(f"{name}={str(value)!r}" for name, value in arguments.items())
        imports = "from tests.emulated import test_emulated_device as tests\nfrom tests.helpers.emulated import device"
        fork_python(f"{imports}\ndevice.install()\ntests.{test.__name__}.__wrapped__({given})\n").wait().check()

    return forked


@contextmanager
def waits() -> Iterator[dict[str, int]]:
    """Fill the dict, at the end of the block, with what the host has waited for; without zeros."""
    found: dict[str, int] = {}
    before = emulated.counts()
    yield found
    found.update({name: number - before[name] for name, number in emulated.counts().items() if number > before[name]})


# -- the device itself: what it shows, it shows in every run -----------------------------------------------------------


@in_its_own_process
def test_the_device_shows_races_waits_and_mixed_devices() -> None:
    source, side = torch.ones(3).pin_memory(), torch.Stream(DEVICE)
    with side:
        early = source.to(DEVICE, non_blocking=True)
    assert early.add(1).isnan().all().item(), "a kernel that does not wait for the copy reads what was there before"
    torch.accelerator.current_stream().wait_stream(side)
    assert early.add(1).tolist() == [2.0, 2.0, 2.0]

    there = torch.full((3,), 5.0, device=DEVICE)
    here = there.to("cpu", non_blocking=True)
    there.zero_()
    assert here.isnan().all(), "the bytes arrive when somebody waits"
    torch.accelerator.synchronize()
    assert here.tolist() == [5.0, 5.0, 5.0], "and they are those of the time of the copy"

    for other in (torch.ones(3), torch.ones(3, device="emulated:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            there + other
    for reads, kind in [
        (lambda: there.sum().item(), "reads"),
        (lambda: there.nonzero(), "reads"),
        (lambda: there[there > 0], "reads"),
        (lambda: there.cpu(), "copies to the host"),
        (lambda: torch.ones(3).to(DEVICE), "copies to the device"),
        (lambda: torch.accelerator.synchronize(), "waits"),
    ]:
        with waits() as found:
            reads()
        assert kind in found, found
    with waits() as found:
        del early  # used on another stream than its own, and no record_stream
    assert found == {"unsafe frees": 1}


# -- choosing it -------------------------------------------------------------------------------------------------------


@in_its_own_process
def test_an_accelerator_that_torch_knows_is_chosen_by_name_and_by_auto() -> None:
    for accelerator in ("auto", "emulated"):
        config = Trainer(accelerator=accelerator, **QUIET).config
        assert (config.device_type, config.num_processes, config.strategy.name) == ("emulated", 2, "ddp")
        assert config.reasons["device"].startswith(f"{accelerator}: ")
    assert Trainer(accelerator="cpu", **QUIET).config.device_type == "cpu"
    with pytest.raises(ConfigError, match="devices=3: up to 2 emulated devices can be used"):
        Trainer(accelerator="emulated", devices=3)
    with pytest.raises(ConfigError, match=r"unknown accelerator 'emulate'\. Did you mean 'emulated'"):
        Trainer(accelerator="emulate")
    trainer = Trainer(devices=[1], max_steps=1, **QUIET)
    module = Toy()
    trainer.fit(module, toy_loader(2))
    assert trainer.device == module.layer.weight.device == torch.device("emulated", 1)


@in_its_own_process
def test_shared_weights_stay_shared_and_a_module_is_trained_twice() -> None:
    class Shared(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.decode.weight = self.encode.weight

        def _loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.layer(self.decode(self.encode(batch[0]))), batch[1])

    module = Shared()
    weight = module.encode.weight
    for _ in range(2):
        Trainer(devices=1, max_steps=2, **QUIET).fit(module, toy_loader(2))
        assert module.decode.weight is module.encode.weight is weight
        assert len(list(module.parameters())) == 3
        assert weight.device == torch.device(DEVICE)
    Trainer(accelerator="cpu", max_steps=2, **QUIET).fit(module, toy_loader(2))
    assert module.decode.weight is module.encode.weight is weight
    assert weight.device == torch.device("cpu")


# -- waiting -----------------------------------------------------------------------------------------------------------


@in_its_own_process
def test_the_host_waits_for_nothing_between_two_flushes() -> None:
    from torchmetrics import MeanMetric

    class WithMetric(Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric(nan_strategy="disable")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

    for settings in (
        {},
        {"gradient_clip_val": 1.0},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"accumulate_grad_batches": 2, "log_every_n_steps": 8},
        {"callbacks": [StragglerMonitor()]},
        {"enable_progress_bar": True},
    ):
        between = Between(waits(), first=1, last=7)
        options: dict[str, Any] = {"log_every_n_steps": 16, "logger": CSVLogger(), "max_epochs": 1, "devices": 1}
        options |= settings | {"callbacks": [*settings.get("callbacks", []), between]}
        data = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=4, pin_memory=True)
        Trainer(**options).fit(WithMetric(), data)
        assert between.found == {}, settings


@in_its_own_process
def test_a_loss_that_is_not_finite_is_reported_when_values_are_read() -> None:
    class Diverges(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.global_step == 2 else loss

    reported: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer").addHandler(handler)
    data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    between = Between(waits(), first=1, last=4)
    Trainer(devices=1, max_epochs=1, log_every_n_steps=5, callbacks=[between], **QUIET).fit(Diverges(), data)
    assert between.found == {}
    assert len([one for one in reported if one.startswith("the loss of step 3 is nan on rank 0")]) == 1


class Masked(Toy):
    """A loss that is a mean over the samples whose target is not NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.mean(*batch)

    def mean(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        there = ~y.isnan()
        errors = (self.layer(x) - torch.where(there, y, 0)).square() * there
        return errors.sum() / there.sum().clamp(min=1)

    def num_items(self, batch: Any) -> Any:
        items = (~batch[1].isnan()).sum()
        return int(items) if items.device.type == "cpu" else items


@in_its_own_process
def test_numbers_of_items_are_summed_on_the_device() -> None:
    """Hosts that sum them would wait for each other in every step."""
    x, y = (part.clone() for part in toy_loader(6).dataset.tensors)  # type: ignore[attr-defined]
    y[::3] = float("nan")
    y[8:12] = float("nan")
    summed: list[torch.device] = []
    all_reduce = torch.distributed.all_reduce

    def listening(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        summed.append(tensor.device)
        return all_reduce(tensor, *args, **options)

    torch.distributed.all_reduce = listening
    module = Masked()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = Trainer(accelerator="emulated", devices=2, max_epochs=1, log_every_n_steps=100, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(x, y), 2))
    assert trainer.global_step == 6
    assert [device.type for device in summed] == ["emulated"] * 6

    alone = Masked()
    alone.load_state_dict(trainer.strategy.processes.broadcast_object(start))
    for part, target in zip(x.split(4), y.split(4), strict=True):
        alone.zero_grad()
        if not target.isnan().all():
            alone.mean(part, target).backward()
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name].cpu(), value)


class ByHand(Toy):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()


@in_its_own_process
def test_gradients_of_manual_optimization_travel_together_and_on_the_device() -> None:
    reduced: list[str] = []
    all_reduce = torch.distributed.all_reduce

    def listening(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        reduced.append(tensor.device.type)
        return all_reduce(tensor, *args, **options)

    torch.distributed.all_reduce = listening
    between = Between(waits(), first=1, last=5)
    options: dict[str, Any] = {"log_every_n_steps": 100, "callbacks": [between], **QUIET}
    trainer = Trainer(accelerator="emulated", devices=2, max_epochs=1, **options)
    trainer.fit(ByHand(), toy_loader(12, pin_memory=True))
    # Which gradients there are, and all of them in one message.
    assert reduced == ["emulated"] * 2 * trainer.global_step
    assert between.found == {}
    received = from_bytes(to_bytes([torch.ones(3, device=trainer.device)]))
    assert [value.device.type for value in received] == ["cpu"], "each process would take memory of that device"


@in_its_own_process
def test_batches_without_items_change_nothing() -> None:
    module, x = Masked(), torch.randn(8, 4, device=DEVICE)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    nothing = DataLoader(TensorDataset(x, torch.full_like(x[:, :1], float("nan"))), 2)
    Trainer(devices=1, max_epochs=1, accumulate_grad_batches=2, **QUIET).fit(module, nothing)
    for name, value in before.items():
        assert torch.equal(module.state_dict()[name].cpu(), value), name


@in_its_own_process
def test_initial_values_travel_between_the_devices() -> None:
    sent: list[torch.device] = []
    broadcast = torch.distributed.broadcast

    class Sending(Toy):
        def on_fit_start(self) -> None:
            def listening(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                sent.append(tensor.device)
                return broadcast(tensor, *args, **options)

            torch.distributed.broadcast = listening
            torch.manual_seed(self.trainer.rank)
            built = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
            own = {name: value.clone() for name, value in built.state_dict().items()}
            assert list(initial_values(built, "cpu", ("0.bias",), self.trainer.device)) == []
            expected = self.trainer.strategy.processes.broadcast_object(own)
            expected["0.bias"] = own["0.bias"]
            assert_same_bits(dict(built.state_dict()), dict(expected))
            assert {value.device.type for value in built.state_dict().values()} == {"cpu"}
            torch.distributed.broadcast = broadcast

    Trainer(accelerator="emulated", devices=2, max_steps=1, **QUIET).fit(Sending(), toy_loader(2))
    assert [device.type for device in sent if device.type != "cpu"] == ["emulated"] * 3


# -- copies ------------------------------------------------------------------------------------------------------------


@in_its_own_process
def test_batches_arrive_before_they_are_used_and_are_not_overwritten() -> None:
    move = make_transfer(torch.device(DEVICE))
    for pinned in (True, False):
        for number in range(20):
            host = torch.full((1000,), float(number))
            batch = move({"x": (host.pin_memory() if pinned else host, 3), "text": "a"})
            assert batch["x"][0].sum().item() == 1000.0 * number
            assert (batch["x"][1], batch["text"]) == (3, "a")
            del batch
    assert emulated.counts()["unsafe frees"] == 0
    with waits() as found:
        move(torch.ones(3).pin_memory())
    assert found == {}


@in_its_own_process
def test_data_on_the_device_trains_on_the_cpu() -> None:
    """An asynchronous copy to the host is read before it has arrived."""
    seen = []

    class Seeing(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(batch[0].clone())
            return super().training_step(batch, batch_idx)

    x, y = torch.randn(16, 4), torch.randn(16, 1)
    Trainer(accelerator="cpu", max_epochs=1, **QUIET).fit(
        Seeing(), DataLoader(TensorDataset(x.to(DEVICE), y.to(DEVICE)), 4)
    )
    assert torch.equal(torch.cat(seen), x)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    name: str


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding: a mapping whose `to` waits for the device at each tensor."""

    def to(self, device: Any) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self

    to.__module__ = "transformers.tokenization_utils_base"


class Own:
    """A user's class with a `to`."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Own:
        return Own(self.x.to(device))


@in_its_own_process
def test_custom_batches_are_moved_without_waiting() -> None:
    move, x = make_transfer(torch.device(DEVICE)), torch.randn(5, 3)

    def pinned() -> torch.Tensor:
        return x.clone().pin_memory()

    packed = pack_sequence([torch.randn(3, 2), torch.randn(2, 2)]).pin_memory()
    for batch, tensor, waited in [
        (Pair(pinned(), "a"), lambda moved: moved.x, {}),
        (Record(pinned(), "a"), lambda moved: moved.x, {}),
        ([{"deep": (pinned(),)}], lambda moved: moved[0]["deep"][0], {}),
        (Encoding({"x": pinned()}), lambda moved: moved["x"], {}),
        (Own(pinned()), lambda moved: moved.x, {"copies to the device": 1}),  # as its `to` says
    ]:
        with waits() as found:
            moved = move(batch)
        assert type(moved) is type(batch)
        assert found == waited, type(batch)
        assert tensor(moved).device == torch.device(DEVICE)
        assert torch.equal(tensor(moved).cpu(), x), type(batch)
    moved = move({"sequence": packed})["sequence"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == torch.device(DEVICE)
    lengths = pad_packed_sequence(moved)[1]
    assert lengths.tolist() == [3, 2]
    assert torch.equal(moved.data.cpu(), packed.data)
    assert torch.equal(move_to(moved, torch.device("cpu")).data, packed.data)


# -- asynchronous checkpoints and predictions --------------------------------------------------------------------------


class Deep(Toy):
    """A model whose every step changes every tensor of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@in_its_own_process
def test_asynchronous_checkpoints_hold_the_state_of_their_step(tmp_path: Path) -> None:
    folder = Path(tmp_path)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))

    def run(name: str, background: bool) -> dict[str, Any]:
        save = ModelCheckpoint(folder / name, every_n_train_steps=1, save_top_k=-1, async_save=background)
        trainer = Trainer(max_epochs=1, devices=1, seed=1, callbacks=[save], **{**QUIET, "enable_checkpointing": True})
        trainer.fit(Deep(), DataLoader(data, 4))
        paths = sorted(path for path in (folder / name).iterdir() if "step=" in path.name)
        return {path.name: read_checkpoint(path) for path in paths}

    at_once, later = run("at_once", False), run("later", True)
    assert len(later) == 8
    for name, ours in later.items():
        for key in ("model", "optimizers", "rng", "progress"):
            assert_same_bits(ours[key], at_once[name][key], f"{name} {key}")
            assert all(value.isfinite().all() for value in ours["model"].values())


@in_its_own_process
def test_predictions_and_their_files_are_those_of_the_host(tmp_path: Path) -> None:
    x, module = torch.randn(10, 4), Deep()
    written = PredictionWriter(f"{tmp_path}/out")
    loader = DataLoader(TensorDataset(x), 4)
    outputs = Trainer(devices=1, callbacks=[written], **QUIET).predict(module, loader, return_predictions=True)
    expected = module.cpu().eval().layer(x)
    torch.testing.assert_close(torch.cat([output.cpu() for output in outputs or ()]), expected)
    assert any(Path(tmp_path, "out").rglob("*"))


@in_its_own_process
def test_a_tensor_that_stays_on_the_host_is_refused_with_a_message() -> None:
    class Forgetful(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * torch.ones(1)

    with pytest.raises(ConfigError, match=r"create them with device=self.device\.\n.*emulated:0 and cpu"):
        Trainer(devices=1, max_steps=1, **QUIET).fit(Forgetful(), toy_loader(2))
