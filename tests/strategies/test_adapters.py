"""LoRA's adapters alone are trained, saved in checkpoints and in PEFT's layout, and resumed, under every strategy."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.hf_models import HFModule, data
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.messages import raises_recorded
from tests.strategies.test_model_parallel import Attending, Sequences
from tests.tiers import selected
from trainer import CheckpointError, ConfigError
from trainer.callbacks import LambdaCallback, ModelCheckpoint
from trainer.checkpoint.directory import locate
from trainer.checkpoint.format import read_checkpoint
from trainer.cli.main import main
from trainer.model.adapters import CONFIG_FILE, WEIGHTS_FILE
from trainer.strategies import FSDPStrategy
from trainer.strategies.parallel.adapters import refuse_adapted_parameters
from trainer.strategies.parallel.plan import find_plan, resolve_plan

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
    # Not imported by who only collects the tests.
    pytest.mark.skipif(find_spec("peft") is None, reason='needs peft: pip install "exact-trainer[dev]"'),
]

NAMES = (SINGLE, "DDP x2", "FSDP x2", "FSDP 2x2", "TP x2", "TP 2 x FSDP 2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")


class LoRA(HFModule):
    """A model with adapters in its attention, of layers whose outputs or inputs tensor parallel splits."""

    def __init__(self, seed: int = 5) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__("Llama, tied")
        if seed != 5:
            with torch.no_grad():
                self.net.model.layers[0].mlp.up_proj.weight.mul_(1.01)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
        self.net = get_peft_model(self.net, config)

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(way: str, folder: str, steps: int, seed: int = 5, **options: Any) -> LoRA:
    module = LoRA(seed)
    saving = ModelCheckpoint(folder, every_n_train_steps=2, trainable_only=True)
    saves = LambdaCallback(on_train_end=lambda trainer, module: module.net.save_pretrained(f"{folder}-adapter-{steps}"))
    trainer = WAYS[way].trainer(
        max_steps=steps,
        callbacks=[saving, saves],
        enable_checkpointing=True,
        log_every_n_steps=1,
        seed=3,
        gradient_clip_val=0.05,
    )
    trainer.fit(module, DataLoader(data("Llama, tied"), WAYS[way].micro_batch), **options)
    return module


def train(way: str, folder: str) -> dict[str, Any]:
    """Train four steps in one go, and two and two; then resume on another base model."""
    folder = f"{folder}/{way}"
    fit(way, f"{folder}/full", 4)
    fit(way, f"{folder}/broken", 2)
    fit(way, f"{folder}/broken", 4, ckpt_path=f"{folder}/broken/last")
    try:
        fit(way, f"{folder}/other", 4, seed=6, ckpt_path=f"{folder}/broken/last")
    except CheckpointError as error:
        return {"refusal": str(error)}
    return {"refusal": ""}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("adapters")
    return folder, run_each(train, dict.fromkeys((SINGLE, *selected(request, "way"))), str(folder))


@pytest.mark.parametrize("way", NAMES)
def test_adapters_alone_are_saved_and_resumed_to_the_same_bits(way: str, runs: tuple[Path, dict[str, Any]]) -> None:
    skip_if_missing(way)
    folder, results = runs
    full, broken = (read_checkpoint(locate(folder / way / name / "last"))["model"] for name in ("full", "broken"))
    assert full
    assert all("lora_" in name for name in full)
    for name, value in full.items():
        torch.testing.assert_close(broken[name], value, rtol=0, atol=0)
    for rank in results[way]:
        assert "has another base model" in rank["refusal"]
        assert "layers.0.mlp.up_proj" in rank["refusal"]


@pytest.mark.parametrize("way", NAMES[1:])
def test_adapters_are_those_of_one_process(way: str, runs: tuple[Path, dict[str, Any]]) -> None:
    skip_if_missing(way)
    folder, _ = runs
    expected, found = (read_checkpoint(locate(folder / one / "full" / "last"))["model"] for one in (SINGLE, way))
    # Adam divides by the gradients' sizes, so that an update moves by more than their rounding where they are small.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", NAMES)
def test_the_folder_is_pefts_own(way: str, runs: tuple[Path, dict[str, Any]]) -> None:
    from peft import PeftModel

    skip_if_missing(way)
    folder, _ = runs
    adapter = folder / way / "full-adapter-4"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    read = PeftModel.from_pretrained(HFModule("Llama, tied").net, str(adapter)).state_dict()
    saved = LoRA.load_from_checkpoint(folder / way / "full" / "last").net.state_dict()
    assert saved.keys() == read.keys()
    for name, value in saved.items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=0)
    exported = folder / way / "exported"
    assert main(["checkpoint", "export", str(folder / way / "full"), str(exported), "--peft", "--force"]) == 0
    assert json.loads((exported / CONFIG_FILE).read_text()) == json.loads((adapter / CONFIG_FILE).read_text())
    ours, theirs = (load_file(path / WEIGHTS_FILE) for path in (exported, adapter))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class SplitSequences(Sequences):
    """Adapters in layers between which activations are split along the sequence."""

    def __init__(self, *blocks: nn.Module) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__(*blocks)
        config = LoraConfig(r=4, target_modules=["qkv", "out", "head"], init_lora_weights=False, lora_bias=True)
        inject_adapter_in_model(config, self)


def train_on_split_sequences(way: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module, trainer = SplitSequences(Attending(), Attending()), WAYS[way].trainer(max_steps=3, gradient_clip_val=0.05)
    data = torch.randn(24, 8, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(data), 8))
    return trainer.full_state_dict(everywhere=True)


def test_adapters_of_layers_that_split_sequences() -> None:
    results = run_each(train_on_split_sequences, (SINGLE, "TP x2"))
    for of_rank in results["TP x2"]:
        torch.testing.assert_close(of_rank, results[SINGLE][0], rtol=1e-5, atol=1e-6)


def test_a_plan_stands_for_the_parts_of_a_wrapped_layer() -> None:
    plan = {"*embed_tokens": "rowwise", "*.[qv]_proj*": "colwise", "*.o_proj": "rowwise"}
    styles = resolve_plan(LoRA(), plan, 2)
    first = {name.partition("layers.0.self_attn.")[2] for name in styles} - {""}
    assert {name for name in first if name.startswith("q_proj")} == {
        "q_proj.base_layer",
        "q_proj.lora_A.default",
        "q_proj.lora_B.default",
    }
    assert {name for name in first if name.startswith("o_proj")} == {"o_proj.base_layer", "o_proj.lora_A.default"}


@pytest.mark.parametrize(("kind", "options"), [("Lora", {"use_dora": True}), ("IA3", {"feedforward_modules": []})])
def test_other_adapters_cannot_be_split_with_their_layers(kind: str, options: dict[str, Any]) -> None:
    import peft

    module = HFModule("Qwen2")
    config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    module.net = peft.get_peft_model(module.net, config)
    with raises_recorded(ConfigError):
        resolve_plan(module, find_plan(module), 2)


def test_adapters_of_parameters_are_refused() -> None:
    import peft

    module = HFModule("Mixtral")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    refuse_adapted_parameters(module)
    module.net = peft.get_peft_model(module.net, config)
    with raises_recorded(ConfigError):
        refuse_adapted_parameters(module)
    strategy = FSDPStrategy()
    with raises_recorded(ConfigError):
        strategy._refuse(module)
