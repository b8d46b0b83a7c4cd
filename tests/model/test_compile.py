"""compile= changes no number and no name in any way to run, and reports when it does not help."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.compile_models import Block, Model, batches, trained
from tests.messages import raises_recorded
from trainer import Callback, Trainer, TrainModule
from trainer.errors import ConfigError
from trainer.model.compile import keep_outside_of_graphs, read_compile

# torch reads .grad while it traces, and cannot hide the warning about it under "error".
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def messages_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the trainer's messages, but for the one that the module's validation_step is not used."""
    messages = [record.getMessage() for record in caplog.records if record.name == "trainer"]
    return [message for message in messages if "nothing is validated" not in message]


EAGER = {"backend": "eager"}
AOT = {"backend": "aot_eager"}


class LogsInForward(Model):
    """A module whose own forward is compiled, and logs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        self.log("mean", out.mean(), on_step=True, on_epoch=True)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


class ByHand(Model):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.fixture(autouse=True)
def _fresh_torch_compile() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (Model, AOT),
        (Model, {**EAGER, "blocks": True}),
        (LogsInForward, AOT),
        (LogsInForward, {**EAGER, "blocks": "Block"}),
        (ByHand, EAGER),
    ],
)
def test_same_losses_values_and_names(kind: type[Model], setting: dict[str, Any]) -> None:
    plain, compiled = kind(), kind()
    names = list(compiled.state_dict())
    expected = trained(plain, False)
    assert graphs() == 0
    trainer = trained(compiled, setting)
    assert graphs() > 0
    assert len(compiled.losses) == 8
    torch.testing.assert_close(compiled.losses, plain.losses, atol=1e-6, rtol=1e-5)
    assert list(compiled.state_dict()) == names
    assert trainer.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        assert trainer.callback_metrics[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


def test_steps_stay_python() -> None:
    """A step that reads counters and logs causes no graph break and no compilation of its own."""
    trained(Model(), EAGER)
    assert sum(counters["graph_break"].values()) == 0
    compiled = {record.co_name for record in get_compilation_metrics() if record.co_name}
    assert compiled == {"forward"}


def test_blocks_of_a_class_share_a_compilation() -> None:
    trained(Model(), {**EAGER, "blocks": True}, limit_train_batches=1, limit_val_batches=0)
    assert graphs() == 2  # of three blocks; the first one's input needs no gradient


class Containers(Model):
    """A step that calls containers and layers of torch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), nn.ReLU()))  # type: ignore[assignment]
        self.heads = nn.ModuleList([nn.Linear(4, 1)])
        self.square = nn.MSELoss()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.square(self.heads[0](self.net(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.square(self.heads[0](self.net(batch[0])), batch[1]))


class Scripted(Containers):
    """A step that calls modules of torch and of TorchScript, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), torch.jit.script(Block()))  # type: ignore[assignment]
        self.heads = nn.ModuleList([nn.Linear(6, 1)])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "setting", "compiled"),
    [
        (Containers, EAGER, ["net.0"]),
        (Containers, {**EAGER, "blocks": ["Block", "Sequential"]}, ["net.0"]),
        (Scripted, EAGER, []),
    ],
)
def test_bare_containers_run_uncompiled(
    kind: type[Model], setting: dict[str, Any], compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected, module = kind(), kind()
    attributes = [set(vars(part)) for part in module.modules()]
    trained(expected, False)
    with caplog.at_level(logging.INFO, "trainer"):
        trained(module, setting)
    torch.testing.assert_close(module.losses, expected.losses, atol=1e-6, rtol=1e-5)
    code = {record.co_firstlineno for record in get_compilation_metrics()}
    assert code == ({Block.forward.__code__.co_firstlineno} if compiled else set())
    messages = messages_of(caplog)
    assert [m.rpartition(": ")[2].split(", ") for m in messages if m.startswith("compile, ")] == (
        [compiled] if compiled else []
    )
    assert any("compile= finds nothing to compile in Scripted" in message for message in messages) == (not compiled)
    assert [set(vars(part)) for part in list(module.modules())[1:]] == attributes[1:]


@pytest.mark.parametrize("setting", [EAGER, {**EAGER, "blocks": "Block"}])
def test_copies_of_a_compiled_module_have_their_own_weights(setting: dict[str, Any]) -> None:
    x = torch.randn(3, 6)

    class Copies(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            pickled = pickle.loads(pickle.dumps(module))
            for copied in (copy.deepcopy(module), pickled, copy.deepcopy(pickled)):
                expected = module.net.eval()(x)
                torch.testing.assert_close(copied.net.eval()(x), expected)
                with torch.no_grad():
                    for parameter in copied.parameters():
                        parameter.zero_()
                assert copied.net(x).abs().sum() == 0
                torch.testing.assert_close(module.net(x), expected)
                module.train()

    module = Containers()
    trained(module, setting, epochs=1, callbacks=[Copies()])
    assert graphs() > 0
    torch.testing.assert_close(pickle.loads(pickle.dumps(module)).net.eval()(x), module.net.eval()(x))


def test_what_a_forward_calls_is_compiled_with_it(caplog: pytest.LogCaptureFixture) -> None:
    class Called(Containers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.heads[0](self.net(x))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

    with caplog.at_level(logging.WARNING, "trainer"):
        fit_on(Called(), {**EAGER, "fullgraph": True}, (4,))
    assert graphs() == 1
    assert not messages_of(caplog)


def test_a_metric_is_left_alone() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class WithMetric(Model):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.error(self.net(batch[0]), batch[1])
            self.log("error", self.error)

    compiled, plain = trained(WithMetric(), EAGER), trained(WithMetric(), False)
    assert compiled.callback_metrics["error"] == pytest.approx(
        float(plain.callback_metrics["error"]), rel=1e-5, abs=1e-6
    )
    assert {record.co_name for record in get_compilation_metrics() if record.co_name} == {"forward"}


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writes", "reads"), [(AOT, False), (False, EAGER), ({**EAGER, "blocks": True}, EAGER)])
def test_a_checkpoint_serves_both(tmp_path: Path, writes: Any, reads: Any) -> None:
    uninterrupted = Model()
    trained(uninterrupted, writes, epochs=2)
    trainer = trained(Model(), writes, epochs=1)
    trainer.save_checkpoint(tmp_path / "saved")
    rest = Model()
    trained(rest, reads, epochs=2, ckpt_path=tmp_path / "saved")
    torch.testing.assert_close(rest.losses, uninterrupted.losses[4:], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rest.state_dict(), uninterrupted.state_dict(), atol=1e-6, rtol=1e-5)


def test_exact_resume(tmp_path: Path) -> None:
    uninterrupted, rest = Model(), Model()
    trained(uninterrupted, AOT, epochs=2)
    trained(Model(), AOT, max_steps=5).save_checkpoint(tmp_path / "saved")
    torch._dynamo.reset()  # as in a new process
    trained(rest, AOT, epochs=2, ckpt_path=tmp_path / "saved")
    assert rest.losses == uninterrupted.losses[5:]
    assert_same_bits(rest.state_dict(), uninterrupted.state_dict())


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_evaluation() -> None:
    results = {}
    for name, setting in (("plain", False), ("compiled", AOT)):
        module = Model()
        trainer = trained(module, setting)
        data = batches((4, 4, 2), seed=5)
        outputs = trainer.predict(module, data, return_predictions=True)
        results[name] = (trainer.validate(module, data), trainer.test(module, data), outputs)
    torch.testing.assert_close(results["compiled"], results["plain"], atol=1e-6, rtol=1e-5)


# -- what is left afterwards -------------------------------------------------------------------------------------------


def test_everything_is_as_it_was() -> None:
    config = torch._dynamo.config.get_config_copy()
    callbacks = (list(callback_handler.start_callbacks), list(callback_handler.end_callbacks))
    module = LogsInForward()
    attributes = set(vars(module))

    class Copies(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            self.copied = copy.deepcopy(module)
            assert "log" in vars(module)

    copies = Copies()
    trained(module, EAGER, callbacks=[copies])
    assert set(vars(module)) == attributes | {"_trainer", "_toggled_parameters", "_hparams", "_hparams_left_out"}
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert all(part._compiled_call_impl is None for part in copies.copied.modules())
    assert "log" not in vars(copies.copied)
    assert torch._dynamo.config.get_config_copy() == config
    assert (callback_handler.start_callbacks, callback_handler.end_callbacks) == callbacks
    module.net(torch.randn(2, 6)).sum().backward()

    class Fails(LogsInForward):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("on purpose")

    failing = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        trained(failing, EAGER)
    assert failing.net._compiled_call_impl is None
    assert (callback_handler.start_callbacks, callback_handler.end_callbacks) == callbacks


def test_with_cuda_graphs_logged_values_are_copied() -> None:
    """CUDA graphs write every step's results to the same memory, which the step of this test imitates."""
    assert read_compile("reduce-overhead").reuses_memory  # type: ignore[union-attr]
    assert read_compile({"options": {"triton.cudagraphs": True}}).reuses_memory  # type: ignore[union-attr]
    assert not read_compile(EAGER).reuses_memory  # type: ignore[union-attr]

    class Reuses(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            memory = torch.ones(())
            self.log("given", memory)
            self.log("named", value=memory)
            self.log_dict({"in_dict": memory})
            memory.fill_(7)
            return self.net(batch[0]).square().mean()

    module = Reuses()
    undo = keep_outside_of_graphs(module, copy_values=True)
    trainer = trained(module, False, epochs=1)
    undo()
    assert {name: trainer.callback_metrics[name] for name in ("given", "named", "in_dict")} == {
        "given": 1,
        "named": 1,
        "in_dict": 1,
    }
    assert "log" not in vars(module)


def test_what_the_user_has_compiled_stays_so() -> None:
    module = Model()
    module.net.compile(**EAGER)
    own = module.net._compiled_call_impl
    trained(module, AOT)
    assert module.net._compiled_call_impl is own


# -- what it says ------------------------------------------------------------------------------------------------------


def fit_on(module: TrainModule, setting: Any, sizes: tuple[int, ...]) -> None:
    Trainer(accelerator="cpu", max_epochs=1, seed=3, compile=setting, **QUIET).fit(module, batches(sizes))


def test_no_warning_without_reason(caplog: pytest.LogCaptureFixture) -> None:
    """A short last batch, evaluation, and another epoch cause no warning."""
    with caplog.at_level(logging.WARNING, "trainer"):
        trainer = trained(Model(), EAGER, epochs=3)
        trainer.test(Model(), batches((4, 1)))
    assert not messages_of(caplog)


def test_no_effect_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Elsewhere(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net.head[1](batch[0]).square().mean()

    class Nothing(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (batch[0] * self.weight).square().mean()

        configure_optimizers = Model.configure_optimizers

    fit_on(Elsewhere(), EAGER, (4,))  # One step may have been run uncompiled, to be checked.
    assert not messages_of(caplog)
    fit_on(Elsewhere(), EAGER, (4, 4))
    fit_on(Nothing(), EAGER, (4,))
    messages = messages_of(caplog)
    assert any("compile= had no effect" in message for message in messages)
    assert any("finds nothing to compile in Nothing" in message for message in messages)


def test_describe(capsys: pytest.CaptureFixture[str]) -> None:
    text = Trainer(accelerator="cpu", compile={**EAGER, "blocks": True}, **QUIET).describe()
    assert "compile     block by block (backend=eager)" in text
    assert capsys.readouterr().out == f"{text}\n"
    assert text._ipython_display_() is None  # type: ignore[attr-defined]  # a notebook shows it once
    Trainer(accelerator="cpu", compile=EAGER, **QUIET).describe()
    assert "compile     full model" in capsys.readouterr().out
    Trainer(accelerator="cpu", **QUIET).describe()
    out = capsys.readouterr().out
    assert "compile" not in out
    assert "step        1 micro-batch on 1 process" in out


def test_blocks_that_are_not_there() -> None:
    with raises_recorded(ConfigError):
        trained(Model(), {**EAGER, "blocks": "Blok"})
