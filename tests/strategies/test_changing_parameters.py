"""Parameters that a run freezes, unfreezes, replaces or adds train as in a hand-written loop, or are refused."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import mse_loss
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from tests.helpers.processes import fork_ranks, run_distributed
from tests.helpers.strategy_models import FEATURES, MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.tiers import selected
from trainer import Callback, ConfigError, Trainer, TrainModule, seed_everything
from trainer.model.parameter_tables import ParameterTables

pytestmark = pytest.mark.timeout(600)

NAMES = ("DDP x2", "FSDP x2", "FSDP x2, SHARD_GRAD_OP", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
SAMPLES, GLOBAL_BATCH, EPOCHS, CHANGE_AT = 24, 8, 3, 4
"""Nine steps; the change comes in the second epoch."""


class Changing(MLP):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "unfreeze":
            self.layers[0].requires_grad_(False)
        self.automatic_optimization = not kind.endswith("by hand")
        self.extra: nn.Linear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (0 if self.extra is None else self.extra(x)[:, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def change(self, kind: str, optimizer: Any, seed: int = 5) -> None:
        if kind == "unfreeze":
            self.layers[0].requires_grad_(True)
        elif kind == "freeze":
            self.layers[2].requires_grad_(False)
        elif kind.startswith("add"):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                self.extra = nn.Linear(FEATURES, 1)
            optimizer.add_param_group({"params": list(self.extra.parameters()), "lr": 0.02})
        elif kind == "replace":
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                self.layers[2] = nn.Linear(16, 16)
            optimizer.param_groups[0]["params"] = list(self.parameters())
        elif kind == "regroup":
            parameters = optimizer.param_groups[0]["params"]
            optimizer.param_groups[0]["params"] = parameters[:2]
            optimizer.add_param_group({"params": parameters[2:], "lr": 0.02})
        elif kind == "leave out":
            optimizer.param_groups[0]["params"].pop()
        elif kind == "halve":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)
        elif kind == "reset":
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(5)
                for p, new in zip(self.layers[2].parameters(), nn.Linear(16, 16).parameters(), strict=True):
                    p.copy_(distribute_tensor(new, p.device_mesh, p.placements) if isinstance(p, DTensor) else new)
        elif kind == "data":
            self.layers[2].weight.data = torch.linspace(-0.3, 0.3, 256).view(16, 16)
        elif kind == "prune":
            prune.l1_unstructured(self.layers[2], "weight", amount=0.5)
        elif kind == "weight":
            self.layers[2].weight = nn.Parameter(torch.linspace(-0.3, 0.3, 256).view(16, 16))
        elif kind == "module":
            self.layers[2] = nn.Linear(16, 16)
        elif kind == "register":
            self.layers[2].register_parameter("scale", nn.Parameter(torch.ones(1)))
        elif kind == "delete":
            del self.layers[2]
        elif kind == "remove":
            self.layers[2] = nn.Identity()
            optimizer.param_groups[0]["params"] = list(self.parameters())


class Direct(Changing):
    """A module that calls backward itself for a second loss, of neither the first nor the last parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = kind == "automatic"

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[:2](x).detach()).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            self.second(batch[0]).backward()
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.second(batch[0]).backward()
        optimizer.step()
        return None

    def change(self, kind: str, optimizer: Any, seed: int = 5) -> None: ...


class Change(Callback):
    """Change the parameters in one of the hooks between two steps, on the ranks given."""

    def __init__(self, kind: str, hook: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.kind, self.hook, self.ranks, self.done = kind, hook, ranks, False

    def _change(self, hook: str, trainer: Trainer, module: Any) -> None:
        if hook == self.hook and trainer.global_step == CHANGE_AT and trainer.rank in self.ranks and not self.done:
            self.done = True
            # New layers differ between the processes, until they are synchronized.
            module.change(self.kind, trainer.optimizers[0], seed=5 + trainer.rank)

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._change("batch start", trainer, module)
        if batch_idx % 2 == 1:
            self._change("second batch", trainer, module)

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._change("step end", trainer, module)

    def on_validation_batch_end(self, trainer: Trainer, module: TrainModule, *others: Any) -> None:
        self._change("validation batch end", trainer, module)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._change("validation end", trainer, module)

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        self._change("within", trainer, module)


CASES = {
    "unfreeze": "step end",
    "unfreeze late": "batch start",
    "freeze": "step end",
    "add": "batch start",
    "replace": "step end",
    "remove": "step end",
    "regroup": "batch start",
    "halve": "step end",
    "halve late": "batch start",
    "halve after a validation": "validation end",
    "halve in a validation": "validation batch end",
    "reset": "step end",
    "data": "step end",
    "weight": "step end",
    "weight late": "batch start",
    "weight in a validation": "validation batch end",
    "module": "step end",
    "register": "step end",
    "delete": "step end",
    "weight within a window": "second batch",
    "weight within a step": "within",
    "prune": "step end",
}
DIFFERENT = ("one rank", "other ranks", "within", "optimizer")


def fit(name: str, kind: str, callback: Change) -> Any:
    window = 2 if callback.hook == "second batch" else 1
    trainer = WAYS[name].trainer(
        seed=1,
        max_epochs=EPOCHS,
        callbacks=callback,
        val_check_interval=1,
        watchdog_seconds=60,
        accumulate_grad_batches=window,
    )
    cls = Direct if callback.hook == "direct" else Changing
    module, batch_size = cls(kind), GLOBAL_BATCH // WAYS[name].processes // window
    try:
        trainer.fit(module, DataLoader(MLP.data(SAMPLES), batch_size), DataLoader(MLP.data(4), 2))
    except ConfigError as error:
        return str(error)
    return trainer.full_state_dict(everywhere=True)


def train_all(name: str, cells: list[tuple[str, str]]) -> dict[str, Any]:
    cases = [case for way, case in cells if way == name and (name, case) != ("ZeRO-3 x2", "reset")]  # p.copy_ fails
    found = {case: fit(name, case.split()[0], Change(case.split()[0], CASES[case])) for case in cases}
    if name == "DDP x2":
        found["add by hand"] = fit(name, "add by hand", Change("add by hand", "step end"))
    direct = ("automatic", *(("manual",) if not name.startswith("ZeRO") else ()))
    return found | {f"direct {kind}": fit(name, kind, Change(kind, "direct")) for kind in direct}


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    seed_everything(1)
    module = Changing(kind)
    optimizer = module.configure_optimizers()
    x, y = MLP.data(SAMPLES).tensors
    for step in range(EPOCHS * SAMPLES // GLOBAL_BATCH):
        if step == CHANGE_AT:
            module.change(kind, optimizer)
        part = slice(step * GLOBAL_BATCH % SAMPLES, step * GLOBAL_BATCH % SAMPLES + GLOBAL_BATCH)
        optimizer.zero_grad()
        mse_loss(module(x[part]), y[part]).backward()
        optimizer.step()
    return module.state_dict()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        names = dict.fromkeys([*selected(request, "name"), "DDP x2"])
        return run_each(train_all, names, selected(request, "name", "case"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_a_hand_written_loop_or_the_change_is_refused(
    name: str, case: str, results: Any
) -> None:
    skip_if_missing(name)
    if (name, case) == ("ZeRO-3 x2", "reset"):
        pytest.skip("the parameters are empty there, so that torch refuses")
    kind = case.split()[0]
    for rank in results[name]:
        found = rank[case]
        if name == "ZeRO-3 x2" and kind in ("halve", "data", "prune"):
            assert "is read or changed here, where it is empty" in found
            assert "full_parameters(module, write=True)" in found
        elif name.startswith("FSDP") and kind in ("data", "weight"):
            assert "layers.2.weight of shape [16, 16] was replaced while training" in found
        elif kind == "prune" and name.startswith("FSDP"):
            assert "a parameter was used here as a full tensor, and strategy" in found
        elif name == "FSDP x2, SHARD_GRAD_OP" and case == "halve in a validation":
            assert "layers.4.bias changed between the batches of an evaluation" in found
        elif case == "weight within a step" or (case == "weight within a window" and name != "ZeRO-3 x2"):
            assert "layers.2.weight was replaced within a step" in found
        elif name.startswith("ZeRO") and kind not in ("halve", "reset", "data", "prune"):
            assert "flattens the parameters that train at the start" in found
            names = {
                "add": "extra.weight",
                "unfreeze": "layers.0.weight",
                "regroup": "groups of parameters were changed",
                "register": "layers.2.scale was added",
                "delete": "layers.2.weight, layers.2.bias were removed",
            }
            assert names.get(kind, "layers.2.weight") in found
        elif name.startswith("FSDP") and kind in ("add", "replace", "module", "register"):
            new = {"add": "extra.weight, extra.bias", "register": "layers.2.scale"}
            names = new.get(kind, "layers.2.weight, layers.2.bias")
            assert f"{names} came later: build the layers in configure_model" in found
        elif kind in ("weight", "module", "register"):
            name = {"weight": "layers.2.weight", "register": "layers.2.scale"}.get(
                kind, "layers.2.weight, layers.2.bias"
            )
            assert f"{name} came while training" in found
            assert "no optimizer trains it. To change the values of a parameter, do it in place" in found
        else:
            for key, value in by_hand(kind).items():
                torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_a_layer_added_in_manual_optimization_is_that_of_rank_0(results: Any) -> None:
    for rank in results["DDP x2"]:
        for key, value in by_hand("add by hand").items():
            torch.testing.assert_close(rank["add by hand"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_direct_backward_adds_to_the_gradients_or_is_refused(name: str, results: Any) -> None:
    skip_if_missing(name)
    seed_everything(1)
    module = Direct("automatic")
    optimizer = module.configure_optimizers()
    for x, y in list(DataLoader(MLP.data(SAMPLES), GLOBAL_BATCH)) * EPOCHS:
        optimizer.zero_grad()
        (mse_loss(module(x), y) + module.second(x)).backward()
        optimizer.step()
    for rank in results[name]:
        if name in ("ZeRO-2 x2", "ZeRO-3 x2"):
            assert "leave loss.backward() out of training_step" in rank["direct automatic"]
            continue
        for key, value in module.state_dict().items():
            torch.testing.assert_close(rank["direct automatic"][key], value, rtol=1e-4, atol=1e-5)
        if "direct manual" in rank:
            assert "call self.manual_backward(loss) instead" in rank["direct manual"]


class Gathered(Callback):
    """Note after each validation batch, and after all of them, whether the full parameters are in memory."""

    def __init__(self) -> None:
        self.notes: list[bool] = []

    def _note(self, module: TrainModule) -> None:
        self.notes.append(not any(hasattr(parameter, "device_mesh") for parameter in module.parameters()))

    def on_validation_batch_end(self, trainer: Trainer, module: TrainModule, *others: Any) -> None:
        self._note(module)

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._note(module)


def gathered_in_a_validation() -> list[bool]:
    callback = Gathered()
    trainer = WAYS["FSDP x2, SHARD_GRAD_OP"].trainer(max_steps=1, callbacks=callback, num_sanity_val_steps=0)
    trainer.fit(MLP(), DataLoader(MLP.data(4), 2), DataLoader(MLP.data(12), 2))
    return callback.notes


def test_a_validation_gathers_once() -> None:
    assert run_distributed(gathered_in_a_validation) == [[True, True, True, False]] * 2


def output_of_both(call: str) -> str:
    """Return what two processes print that end with an error."""
    script = f"from tests.strategies import test_changing_parameters as here\nhere.{call}\n"
    return fork_ranks(script).wait().check(1).stderr


@pytest.mark.parametrize("case", DIFFERENT)
def test_processes_that_train_different_parameters_are_reported(case: str) -> None:
    output = output_of_both(f"raise_difference({case!r})")
    if case == "one rank":
        assert "rank 1 calls for a step in which layers.0.weight, layers.0.bias were unfrozen" in output
        assert "and rank 0 has gone on without" in output
    elif case == "other ranks":
        assert "layers.0.weight, layers.0.bias were unfrozen" in output
        assert "layers.2.weight, layers.2.bias were frozen" in output
    elif case == "optimizer":
        assert "rank 1 calls for a step in which an optimizer's groups of parameters were changed" in output
    else:
        assert "rank 1 of 2 failed" in output
        assert "were unfrozen within a step" in output


def raise_difference(case: str) -> None:
    kinds = ("unfreeze", {"other ranks": "freeze", "optimizer": "leave out"}.get(case, "unfreeze"))
    callback = Change(
        kinds[int(os.environ["RANK"])],
        "within" if case == "within" else "step end",
        (0, 1) if case == "other ranks" else (1,),
    )
    trainer = WAYS["DDP x2"].trainer(seed=1, max_epochs=EPOCHS, callbacks=callback, watchdog_seconds=60)
    trainer.fit(Changing("unfreeze"), DataLoader(MLP.data(SAMPLES), GLOBAL_BATCH // 2))


class SkipsAStep(MLP):
    """A module that leaves out an optimizer step on one rank, after a backward that all have."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.trainer.rank == 0 or batch_idx != 1:
            optimizer.step()


def skip_a_step() -> None:
    WAYS["DDP x2"].trainer(max_epochs=2, watchdog_seconds=60).fit(SkipsAStep(), DataLoader(MLP.data(SAMPLES), 4))


def test_a_step_that_one_rank_leaves_out_is_reported_at_the_end_of_the_epoch() -> None:
    output = output_of_both("skip_a_step()")
    calls = "3 times manual_backward and {} times optimizer.step until the end of epoch 0"
    assert f"rank 0 calls {calls.format(3)}, and rank 1 calls {calls.format(2)}" in output


class OnOneRank(MLP):
    """A module with a layer that one rank uses only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.extra(x)[:, 0] if self.trainer.rank == 0 else 0)


def train_on_one_rank() -> None:
    WAYS["DDP x2"].trainer(max_steps=1, watchdog_seconds=60).fit(OnOneRank(), DataLoader(MLP.data(8), 4))


def test_a_parameter_that_one_rank_uses_is_reported_in_the_same_step() -> None:
    assert "Parameters took no part in the loss of a step" in output_of_both("train_on_one_rank()")


def test_parameters_added_to_the_last_layer_or_taken_from_it_are_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tables = ParameterTables(module)
    module[1].scale = nn.Parameter(torch.ones(1))
    assert not tables.unchanged()
    assert tables.changes() == {"added": ["1.scale"], "removed": [], "replaced": []}
    tables = ParameterTables(module)
    del module[1].scale
    assert not tables.unchanged()
    assert tables.changes() == {"added": [], "removed": ["1.scale"], "replaced": []}


@pytest.mark.parametrize(("kind", "every"), [("left out", 1), ("left out", 50), ("trained", 1), ("frozen", 1)])
def test_new_parameters_that_no_optimizer_has_are_named(
    kind: str, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Growing(Toy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 1:
                self.layer.weight = nn.Parameter(torch.zeros(1, 4), requires_grad=kind != "frozen")
                if kind == "trained":
                    self.trainer.optimizers[0].add_param_group({"params": [self.layer.weight]})

    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_epochs=2, log_every_n_steps=every).fit(Growing(), loader(4))
    assert caplog.text.count("layer.weight came while training") == (kind == "left out")
    assert ("trainer.optimizers[0].add_param_group({'params': [p]})" in caplog.text) == (kind == "left out")
