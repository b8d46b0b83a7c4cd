"""The strategy fsdp holds and sends the expected bytes, wraps the blocks, and refuses what it cannot do."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import FEATURES, MLP
from tests.helpers.strategy_runs import WAYS
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.precision import PRECISIONS
from trainer.strategies import STRATEGIES, DDPStrategy, FSDPStrategy

WIDTH, BLOCKS, STEPS, WINDOW = 8, 3, 4, 3


class Block(nn.Module):
    """A block with a BatchNorm, whose weights stay float32 while all others are gathered in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class Net(TrainModule):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.last = nn.Linear(WIDTH, 1)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        loss = (self.last(x) - batch[1]).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Scalar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Bare(Net):
    """A module without layers."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.last = None  # type: ignore[assignment]
        self.weight = nn.Parameter(torch.ones(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0] @ self.weight - batch[1]).square().mean()


class Tied(Net):
    """A module whose first and last layer share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.first = nn.Linear(WIDTH, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.first.weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = (self.last(self.head(x)) - batch[1]).square().mean()
        self.losses.append(loss.detach())
        return loss


class Folded(nn.Module):
    """A layer that returns a view, as GPT-2's Conv1D does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(WIDTH) / 2), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape)}


class Views(Net):
    """A module that changes the views that its blocks return in place, and returns a view as the loss."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.blocks.extend(Folded() for _ in range(BLOCKS))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for block in self.blocks:
            x = block(x)["out"]
            x += batch[0]
        losses = (self.last(x) - batch[1]).square().mean(0)
        self.losses.append(losses[0].detach())
        return {"loss": losses[0], "of all": losses}


def train_views(strategy: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses: list[float] = train(strategy, module=Views())[0]
    return losses


class LogsAPart(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", next(self.parameters()).norm())


TIED_POLICIES: dict[str, Any] = {
    "auto": "auto",
    "size": WIDTH * WIDTH,
    "class": ["Linear"],
    "classes": ["Linear", "Block"],
    "function": lambda name, child: name in ("first", "head"),
}


class Listening(logging.Handler):
    """A logging handler that keeps the trainer's messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Collectives(TorchDispatchMode):
    """Count collectives by name: "_allgather_base_", "_reduce_scatter_base_"."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = str(function).partition(".")
        if space == "c10d":
            self.seen[name.split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


class Counts(Callback):
    """Count the collectives after the first step, and then the bytes of weights on this process."""

    def __init__(self) -> None:
        self.mode = Collectives()
        self.held = 0

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == 1:
            self.mode.__enter__()
        if trainer.global_step == STEPS:
            self.mode.__exit__(None, None, None)
            local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
            self.held = sum(p.untyped_storage().nbytes() for p in local)


def train(strategy: Any, precision: str = "32-true", module: Net | None = None, rank: int = 0) -> Any:
    x = torch.randn(2 * 4 * WINDOW * STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4)
    module, counts = module or Net(), Counts()
    trainer = Trainer(
        **QUIET,
        strategy=strategy,
        precision=precision,
        devices=2,
        accelerator="cpu",
        seed=2,
        max_epochs=1,
        accumulate_grad_batches=WINDOW,
        callbacks=[counts],
    )
    trainer.fit(module, loader)
    statistics = [buffer.dtype for name, buffer in module.named_buffers() if "running" in name]
    return [float(loss) for loss in module.losses], counts.mode.seen, counts.held, set(statistics), str(strategy)


def refused(strategy: Any, module: Net) -> str:
    try:
        train(strategy, module=module)
    except ConfigError as error:
        return str(error)
    return ""


def on_each_process() -> dict[str, Any]:
    logging.getLogger("trainer").addHandler(listening := Listening())
    logging.getLogger("trainer").setLevel(logging.INFO)
    found: dict[str, Any] = {
        "once": train(FSDPStrategy()),
        "always": train(FSDPStrategy(accumulate_unsharded=False)),
        "kept gathered": train(FSDPStrategy("SHARD_GRAD_OP")),
        "one group": train(FSDPStrategy(), module=Bare()),
        "none chosen": refused(FSDPStrategy(auto_wrap_policy=lambda name, child: False), Net()),
        "by name": train(FSDPStrategy(auto_wrap_policy=["Linear"])),
        "bf16 fsdp": train(FSDPStrategy(), "bf16-mixed"),
        "bf16 ddp": train(DDPStrategy(), "bf16-mixed"),
        "scalar": refused(FSDPStrategy(), Scalar()),
        "logged part": refused(FSDPStrategy(), LogsAPart()),
        **{
            f"tied {name}": train(FSDPStrategy(auto_wrap_policy=policy), module=Tied())
            for name, policy in TIED_POLICIES.items()
        },
        "tied ddp": train(DDPStrategy(), module=Tied()),
        "views": train_views(FSDPStrategy(auto_wrap_policy=["Folded"])),
        "views ddp": train_views(DDPStrategy()),
        "no such class": refused(FSDPStrategy(auto_wrap_policy=["Blok"]), Net()),
    }
    wrapped = Net()
    fully_shard(wrapped.blocks[0])
    assert isinstance(wrapped.blocks[0], FSDPModule)
    found["wrapped"] = refused(FSDPStrategy(), wrapped)
    trained = Net()
    train(FSDPStrategy(), module=trained)
    found["trained under fsdp"] = refused(DDPStrategy(), trained)
    within = Net()
    within.last = DistributedDataParallel(within.last)  # type: ignore[assignment]
    found["ddp inside"] = refused(DDPStrategy(), within)
    found["messages"] = listening.messages
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_distributed(on_each_process, 2)[0]


def test_each_process_holds_its_part(found: dict[str, Any]) -> None:
    total = sum(p.numel() * p.element_size() for p in Net().parameters())
    last = 4 * (WIDTH + 1)  # of one row, which cannot be split: rank 0 has it
    assert found["once"][2] == (total - last) // 2 + last


def test_a_window_is_reduced_once_or_after_each_micro_batch(found: dict[str, Any]) -> None:
    units = BLOCKS + 1
    assert found["once"][1]["_reduce_scatter_base_"] == units * (STEPS - 1)
    assert found["always"][1]["_reduce_scatter_base_"] == units * (STEPS - 1) * WINDOW
    assert found["once"][0] == pytest.approx(found["always"][0], rel=1e-5, abs=1e-6)


def test_blocks_are_gathered_again_for_their_backward_unless_kept(found: dict[str, Any]) -> None:
    micro_batches = (STEPS - 1) * WINDOW
    assert found["once"][1]["_allgather_base_"] == (2 * BLOCKS + 1) * micro_batches
    assert found["kept gathered"][1]["_allgather_base_"] < found["once"][1]["_allgather_base_"]
    assert found["kept gathered"][0] == pytest.approx(found["once"][0], rel=1e-5, abs=1e-6)


def test_it_says_what_it_wraps(found: dict[str, Any]) -> None:
    assert f"{BLOCKS} x Block" in found["once"][4]
    assert any(f"{BLOCKS} x Block" in line for line in found["messages"])
    assert "Linear" in found["by name"][4]
    assert any("no repeated blocks in Bare" in line and "auto_wrap_policy=" in line for line in found["messages"])


def test_statistics_of_a_batch_norm_stay_float32_and_the_losses_are_those_of_ddp(found: dict[str, Any]) -> None:
    assert found["bf16 fsdp"][3] == {torch.float32}
    assert found["bf16 fsdp"][0] == pytest.approx(found["bf16 ddp"][0], rel=2e-2, abs=2e-2)
    assert found["bf16 fsdp"][0] != found["once"][0]


@pytest.mark.parametrize("policy", TIED_POLICIES)
def test_tied_weights_stay_tied_whatever_is_chosen(found: dict[str, Any], policy: str) -> None:
    assert found[f"tied {policy}"][0] == pytest.approx(found["tied ddp"][0], rel=1e-5, abs=1e-6)


def test_views_that_blocks_return_may_be_changed_in_place(found: dict[str, Any]) -> None:
    assert found["views"] == pytest.approx(found["views ddp"], rel=1e-5, abs=1e-6)


def test_it_says_which_blocks_are_left_out_because_they_are_tied(found: dict[str, Any]) -> None:
    assert any(line.endswith("share weights with it: first, head") for line in found["messages"])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("scalar", "cannot shard parameters without a dimension: scale"),
        ("logged part", "self.log('norm') got a sharded tensor: log value.full_tensor()"),
        ("no such class", "no submodule of Net with a forward is one of ['Blok']"),
        ("none chosen", "no submodule of Net fits <function"),
        ("wrapped", "Net.blocks.0 is already wrapped by fully_shard"),
        ("ddp inside", "Net.last is already wrapped by DistributedDataParallel (its .module is inside)"),
        ("trained under fsdp", "Net was sharded by another strategy in an earlier run"),
    ],
)
def test_a_module_that_cannot_be_sharded(found: dict[str, Any], case: str, message: str) -> None:
    assert message in found[case]


@pytest.mark.parametrize(
    "options",
    [
        {"device_mesh": (2, 2)},
        {"device_mesh": (-2, -2), "sharding_strategy": "HYBRID_SHARD"},
        {"device_mesh": (2, 1), "sharding_strategy": "HYBRID_SHARD"},
        {"device_mesh": (2, 3), "sharding_strategy": "HYBRID_SHARD"},
    ],
)
def test_a_mesh_that_does_not_fit_is_reported_before_the_start(options: dict[str, Any]) -> None:
    (problem,) = STRATEGIES["fsdp"](**options).problems(PRECISIONS["32-true"], "cpu", 4)
    assert "give (replicas, shards) whose product is 4" in problem


def test_unknown_names_are_reported() -> None:
    with raises_recorded(ConfigError):
        FSDPStrategy("FULL")  # type: ignore[arg-type]
    with raises_recorded(ConfigError):
        FSDPStrategy(reduce_dtype="bf16")
    with raises_recorded(ConfigError):
        FSDPStrategy(reduce_dtype="int32")


class Evaluated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx)[None]


def evaluate_first(strategy: str) -> list[float]:
    """Evaluate in inference mode before, between and after two trainings of one module; return all results."""
    module, found = Evaluated(), []
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x[:, :1]), 8)
    for _ in range(2):
        trainer = Trainer(strategy=strategy, accelerator="cpu", max_steps=2, seed=1, **QUIET)
        found.append(trainer.validate(module, data)[0]["val_loss"])
        found.append(float(trainer.predict(module, data, return_predictions=True)[0]))
        trainer.fit(module, data)
        found.append(float(module.losses[-1]))
    return found


class Lengths(Net):
    """A module that leaves the lengths of its batches on the host."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return {"x": [part.to(device) for part in batch], "lengths": torch.arange(len(batch[0]))}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch["lengths"].device.type == "cpu"
        return super().training_step(batch["x"], batch_idx)


def train_with_lengths(accelerator: str) -> list[str]:
    """Return the types of devices on which the root's inputs are after FSDP2 has moved them to the meta device."""
    module, found = Lengths(), []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
            def look(root: Any, inputs: tuple[Any, ...]) -> None:
                ((moved, *_), _) = _to_kwargs(inputs, {}, torch.device("meta"), False)
                _, hidden = moved
                found.extend(t.device.type for t in tree_leaves(hidden.arguments) if isinstance(t, torch.Tensor))

            module._wrapper.register_forward_pre_hook(look)  # type: ignore[union-attr]

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(strategy="fsdp", accelerator=accelerator, devices=1, max_steps=1, callbacks=Look(), **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :1]), 8))
    return found


def test_tensors_that_a_user_keeps_on_the_host_stay_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_distributed(train_with_lengths, 1, "cpu") == [["cpu"] * 3]


@pytest.mark.gpu
def test_tensors_that_a_user_keeps_on_the_host_stay_there_on_cuda(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_distributed(train_with_lengths, 1, "cuda") == [["cuda", "cuda", "cpu"]]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_module_trains_after_it_was_evaluated(processes: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    sharded, plain = (run_distributed(evaluate_first, processes, name) for name in ("fsdp", "ddp"))
    for rank, expected in zip(sharded, plain, strict=True):
        assert rank == pytest.approx(expected, rel=1e-5)


class ChangesWithin(MLP):
    """A module with a layer outside the blocks, which changes a parameter within its third step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = self.trainer.global_step == 2
        if now and self.kind == "in place":
            with torch.no_grad():
                self.norm.weight.mul_(0.5)
        elif now and self.kind == "data":
            self.norm.weight.data = torch.full((FEATURES,), 0.5)
        elif now and self.kind == "assigned":
            self.layers[2].weight = nn.Parameter(torch.zeros(16, 16))
        return super().forward(self.norm(x[:, :3] if now and self.kind == "wrong shape" else x))

    def configure_model(self) -> None:
        if self.kind == "parametrized":
            parametrize.register_parametrization(self.layers[2], "weight", nn.Identity())

    def on_train_start(self) -> None:
        if self.kind == "weight_norm":
            parametrizations.weight_norm(self.layers[2])

    def configure_optimizers(self) -> Any:
        if self.kind in OF_FULL_PARAMETERS:
            return getattr(torch.optim, self.kind)(self.parameters(), lr=0.01)
        return super().configure_optimizers()


OF_FULL_PARAMETERS = ("Adafactor", "Rprop")
"""Optimizers of torch that compute in ways that distributed tensors do not know."""


def change_within() -> dict[str, str]:
    found = {}
    kinds = ("in place", "data", "assigned", "wrong shape", "weight_norm", "parametrized", *OF_FULL_PARAMETERS)
    for kind in kinds:
        trainer = WAYS["FSDP x2"].trainer(max_steps=4, watchdog_seconds=60)
        try:
            trainer.fit(ChangesWithin(kind), DataLoader(MLP.data(24), 4))
        except (ConfigError, RuntimeError) as error:
            found[kind] = str(error)
    return found


def test_changes_within_a_step_are_refused_and_other_errors_are_not_called_changes() -> None:
    for found in run_distributed(change_within):
        assert "parametrized" not in found
        assert "layers.2.weight of shape [16, 16] was replaced while training" in found["weight_norm"]
        for kind in ("in place", "data"):
            assert "norm.weight changed within a step, while gathered" in found[kind]
        assert "layers.2.weight of shape [16, 16] was replaced while training" in found["assigned"]
        assert "Given normalized_shape=[6]" in found["wrong shape"]
        for kind in OF_FULL_PARAMETERS:
            assert "an optimizer that needs full parameters needs strategy 'ddp'" in found[kind]


def fit_again() -> Any:
    """Return the weights after a training that follows one whose forward has ended with an error."""

    def fail(layer: nn.Module, arguments: Any) -> None:
        raise KeyError("a user's")

    module, fresh = ChangesWithin(""), ChangesWithin("")
    fresh.load_state_dict(module.state_dict())
    handle = module.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        WAYS["FSDP x2"].trainer(max_steps=1).fit(module, DataLoader(MLP.data(24), 4))
    handle.remove()
    states = []
    for one in (module, fresh):
        trainer = WAYS["FSDP x2"].trainer(max_steps=4, seed=1)
        trainer.fit(one, DataLoader(MLP.data(24), 4))
        states.append(trainer.full_state_dict(everywhere=True))
    return states


def test_a_module_trains_after_a_forward_that_failed() -> None:
    for again, fresh in run_distributed(fit_again):
        for name, value in fresh.items():
            assert torch.equal(again[name], value), name


class CopiesShards(MLP):
    """Copies a layer and saves weights in the midst of a training, as EMA by hand and own checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layer: Any = self.norm
        file = BytesIO()
        torch.save(self.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)["norm.weight"]
        for other in (copy.deepcopy(layer).weight, saved):
            assert type(other) is DTensor
            assert torch.equal(other.to_local(), layer.weight.to_local())
        copy.deepcopy(layer).requires_grad_(False)
        assert layer.weight.requires_grad
        assert isinstance(copy.deepcopy(layer.weight), nn.Parameter)


def copy_shards() -> None:
    WAYS["FSDP x2"].trainer(max_steps=2).fit(CopiesShards(), DataLoader(MLP.data(24), 4))


def test_shards_are_copied_and_saved_as_torchs_own() -> None:
    run_distributed(copy_shards)
