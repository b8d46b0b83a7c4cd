"""`trainer.full_parameters` and `save_pretrained` in hooks read and write full weights under every strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.compare import assert_same_bits
from tests.helpers.hf_models import HFModule, data
from tests.helpers.processes import run_distributed, run_python
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.callback import HOOKS
from trainer.callbacks import LambdaCallback

pytestmark = pytest.mark.timeout(600)

NAMES = (SINGLE, "DDP x2", "FSDP x2", "FSDP x2, SHARD_GRAD_OP", "FSDP 2x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
SAVING = (*NAMES, "TP x2", "PP x2")
STEPS, CHANGED_AT = 4, 2


class Hooks(Callback):
    """Read, write, nest and fail within blocks, and compute with a layer."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        layers: Any = module.layers
        with trainer.full_parameters(layers[0], write=True):
            layers[0].load_state_dict({"weight": torch.full((16, 6), 0.1), "bias": torch.zeros(16)})

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        with trainer.full_parameters(module, write=True):  # where torch's inference mode is on
            for parameter in module.parameters():
                parameter.mul_(2)

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step != CHANGED_AT:
            return
        layers: Any = module.layers
        with trainer.full_parameters(module):
            self.found["norm"] = sum(float(p.detach().square().sum()) for p in module.parameters())
            self.found["outputs"] = module(torch.ones(1, 6, device=module.device)).tolist()
        with suppress(ZeroDivisionError), trainer.full_parameters(layers, write=True):
            layers[2].weight.zero_()
            raise ZeroDivisionError
        with trainer.full_parameters(module):
            with trainer.full_parameters(layers[2], write=True):
                layers[2].weight.mul_(0.5 if trainer.is_global_zero else 7)
                layers[2].bias.data.copy_(torch.linspace(0, 1, 16))
            self.found["inside"] = layers[2].weight.detach().clone()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        with trainer.full_parameters(module):
            self.found["end"] = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def train(way: str, precision: str) -> Any:
    torch.manual_seed(5)
    module, hooks = MLP(), Hooks()
    trainer = WAYS[way].trainer(max_steps=STEPS, callbacks=[hooks], log_every_n_steps=1, seed=3, precision=precision)
    trainer.fit(module, DataLoader(MLP.data(64), WAYS[way].micro_batch))
    trainer.validate(module, DataLoader(MLP.data(8), WAYS[way].micro_batch), verbose=False)
    with trainer.full_parameters(module, write=True):  # after the run
        for parameter in module.parameters():
            parameter.add_(1)
    after = trainer.full_state_dict(everywhere=True)
    for name, value in hooks.found["end"].items():
        torch.testing.assert_close(after[name], 2 * value.float() + 1)
    return hooks.found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Any:
    return run_each(train, {SINGLE: None, **dict.fromkeys(selected(request, "way"))}, "32-true")


@pytest.mark.parametrize("way", NAMES)
def test_what_is_read_and_written_is_that_of_one_process(way: str, runs: Any) -> None:
    skip_if_missing(way)
    expected = runs[SINGLE][0]
    for found in runs[way]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


BEFORE, ON_ONE, IN_THE_GRAPH = (
    {"setup", "on_load_checkpoint"},
    {"on_exception", "on_checkpoint_saved"},
    "on_before_backward",
)
EVERYWHERE = [hook for hook in HOOKS if hook not in {*BEFORE, *ON_ONE, IN_THE_GRAPH}]


class Savable(nn.Sequential):
    """A part of a module with the method of Hugging Face's models."""

    def save_pretrained(self, path: str) -> None:
        save_file(self.state_dict(), path)


class WithTest(MLP):
    test_step = MLP.validation_step


def write_and_save(way: str, folder: str) -> Any:
    """Change the weights in each hook, and save them; return the weights at the end, and the hooks that were called."""
    torch.manual_seed(5)
    module, called, path = WithTest(), [], f"{folder}/{way}.safetensors"
    module.layers.__class__ = Savable

    def change(hook: str, trainer: Trainer, module: Any, *_: Any) -> None:
        if hook in called:
            return
        called.append(hook)
        with trainer.full_parameters(module, write=True):
            for parameter in module.parameters():
                parameter.mul_(1.01)
            values = {name: value.clone() for name, value in module.layers.state_dict().items()}
        module.layers.save_pretrained(path)
        trainer.strategy.processes.barrier()  # after a run without shards, other ranks do not wait for rank 0
        assert_same_bits(load_file(path), values, hook)
        trainer.strategy.processes.barrier()

    hooks = LambdaCallback(**{hook: partial(change, hook) for hook in EVERYWHERE})
    trainer = WAYS[way].trainer(max_steps=2, callbacks=[hooks], seed=3)
    batches = DataLoader(MLP.data(16), WAYS[way].micro_batch)
    trainer.fit(module, batches, batches)
    trainer.save_checkpoint(f"{folder}/{way}")
    trainer.test(module, batches, verbose=False)
    trainer.predict(module, batches)
    return trainer.full_state_dict(everywhere=True), sorted(called)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    return run_each(
        write_and_save,
        {SINGLE: None, **dict.fromkeys(selected(request, "all_hooks"))},
        str(tmp_path_factory.mktemp("all")),
    )


@pytest.mark.parametrize("all_hooks", NAMES)
def test_every_hook_may_write_and_save(all_hooks: str, changed: Any) -> None:
    skip_if_missing(all_hooks)
    for weights, called in changed[all_hooks]:
        assert called == sorted(EVERYWHERE)
        torch.testing.assert_close(weights, changed[SINGLE][0][0], rtol=1e-5, atol=1e-6)


class Saves(Callback):
    """Save the model in a hook, on all processes and then on one of them only."""

    def __init__(self, folder: str) -> None:
        self.folder, self.refusal = folder, ""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        net: Any = module.net
        net.save_pretrained(self.folder)
        if trainer.is_global_zero:
            try:
                net.save_pretrained(self.folder + "-one")
            except ConfigError as error:
                self.refusal = str(error)
        trainer.strategy.processes.barrier()
        net.save_pretrained(self.folder)  # the refused call does not disturb the next one


def save(way: str, model: str, folder: str) -> Any:
    module, saves = HFModule(model), Saves(f"{folder}/{way}")
    trainer = WAYS[way].trainer(max_steps=2, callbacks=[saves], log_every_n_steps=1, seed=3)
    trainer.fit(module, DataLoader(data(model), WAYS[way].micro_batch))
    module.net.save_pretrained(f"{folder}/{way}-after")
    return saves.refusal, trainer.full_state_dict(everywhere=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_each(save, selected(request, "saving"), "Llama, tied", folder)


@pytest.mark.parametrize("saving", SAVING)
def test_save_pretrained_on_all_processes_writes_full_weights(saving: str, saved: Any) -> None:
    import transformers

    skip_if_missing(saving)
    folder, results = saved
    _, expected = results[saving][0]
    for written in (f"{folder}/{saving}", f"{folder}/{saving}-after"):
        model, reported = transformers.AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
        assert not any(reported.values()), reported
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[f"net.{name}"], rtol=0, atol=0)
    if WAYS[saving].processes > 1:
        assert "LlamaForCausalLM.save_pretrained" in results[saving][0][0]
        assert "rank 1 has gone on without" in results[saving][0][0]


def one_process(wrong: Callable[[Trainer, Any], Any]) -> None:
    """Train a step, and do something wrong in a hook."""

    class Wrong(Callback):
        def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
            wrong(trainer, module)

    quiet(max_steps=1, callbacks=[Wrong()]).fit(Toy(), loader())


def replace(trainer: Trainer, module: Any) -> None:
    with trainer.full_parameters(module, write=True):
        module.layer.weight = nn.Parameter(torch.zeros(1, 4))


def change(trainer: Trainer, module: Any) -> None:
    with trainer.full_parameters(module.layer):
        module.layer.weight.data.mul_(2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda trainer, module: trainer.full_parameters(module.layer.weight),
        lambda trainer, module: trainer.full_parameters(module, write="yes"),
        lambda trainer, module: trainer.full_parameters(nn.Linear(2, 2)).__enter__(),
        replace,
        change,
    ],
    ids=["weight", "flag", "other-module", "replace", "change"],
)
def test_a_wrong_use_is_refused_in_words(wrong: Any) -> None:
    with raises_recorded(ConfigError):
        one_process(wrong)


def test_before_a_run_there_is_nothing_to_gather() -> None:
    with raises_recorded(ConfigError):
        quiet().full_parameters(Toy())


@pytest.mark.parametrize("hook", ["setup", "on_load_checkpoint"])
def test_before_the_weights_are_there_the_hooks_that_have_them_are_named(hook: str, tmp_path: Path) -> None:
    """In a second run, too, where the strategy still has the module of the first one."""

    def gather(trainer: Trainer, module: TrainModule, _: Any) -> None:
        if trainer.ckpt_path is not None:
            trainer.full_parameters(module)

    trainer, module = quiet(max_steps=1, callbacks=[LambdaCallback(**{hook: gather})]), Toy()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "c")
    with raises_recorded(ConfigError):
        trainer.fit(module, loader(), ckpt_path=tmp_path / "c")


def after_the_run(strategy: str) -> None:
    """Gather on one process only, after the run, where the other one comes to the end of its program."""
    trainer = quiet(strategy=strategy, devices=2, max_steps=1)
    module = Toy()
    trainer.fit(module, loader())
    if trainer.is_global_zero:
        with pytest.raises(ConfigError, match="rank 1 has come to the end of the program without it"):
            trainer.full_parameters(module)


def test_one_process_alone_after_the_run_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.strategies.test_full_parameters import after_the_run\n"
        "if __name__ == '__main__':\n    after_the_run('fsdp')\n"
    )
    run_python(script, cwd=tmp_path).check()


def read_norm(trainer: Trainer, module: Any) -> Any:
    return module.layers[2].weight.data.norm()


def mix(trainer: Trainer, module: Any) -> Any:
    return torch.zeros(16, 16).lerp_(module.layers[2].weight.detach(), 0.1)


def average(trainer: Trainer, module: Any) -> Any:
    averages = [torch.zeros(16, 6), torch.zeros(16)]
    torch._foreach_lerp_(averages, [p.detach() for p in module.layers[0].parameters()], 0.1)


def write_file(trainer: Trainer, module: Any) -> Any:
    return save_file(module.state_dict(), "never")


def assign(trainer: Trainer, module: Any) -> Any:
    with torch.no_grad():
        module.layers[2].weight.copy_(torch.ones(16, 16))


def copy_module(trainer: Trainer, module: Any) -> Any:
    with trainer.full_parameters(module):
        copy.deepcopy(module)


MISUSES = {"layers.2.weight": (read_norm, mix, assign), "layers.0.weight": (average, write_file)}


class ChangesInForward(MLP):
    """Change a layer's weights while they are gathered for its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_forward_hook(self.change)

    @staticmethod
    def change(layer: Any, inputs: Any, output: Any) -> None:
        layer.weight.data.mul_(0.5)


def misuse(way: str) -> dict[str, str]:
    found = {}
    for function in (*(one for several in MISUSES.values() for one in several), copy_module, None):
        module = MLP() if function else ChangesInForward()
        hooks = {} if function is None else {"on_train_step_end": function}
        trainer = WAYS[way].trainer(max_steps=1, callbacks=[LambdaCallback(**hooks)])
        name = function.__name__ if function else "in a forward"
        try:
            trainer.fit(module, DataLoader(MLP.data(64), 4))
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("alone", ["FSDP x1", "ZeRO-3 x1"])
def test_what_uses_shards_as_full_weights_gets_the_name_and_the_context(alone: str) -> None:
    skip_if_missing(alone)
    (found,) = run_distributed(misuse, 1, alone)
    for name, functions in MISUSES.items():
        for function in functions:
            if (alone, function) == ("FSDP x1", read_norm):
                assert "read_norm" not in found  # a distributed tensor has the right norm
                continue
            assert found[function.__name__].startswith(("a parameter", name))
            assert "trainer.full_parameters(module" in found[function.__name__]
    assert found["copy_module"].startswith(("a parameter", "copy.deepcopy cannot copy a module"))
    assert found["in a forward"].startswith("layers.2.weight changed within the forward of a step, while gathered")
