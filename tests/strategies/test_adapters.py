"""LoRA's adapters alone are trained, saved in checkpoints and in PEFT's layout, and resumed, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.helpers.hf_models import HFModule, data
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import CheckpointError
from trainer.callbacks import LambdaCallback, ModelCheckpoint
from trainer.checkpoint.directory import locate
from trainer.checkpoint.format import read_checkpoint
from trainer.cli.main import main
from trainer.model.adapters import CONFIG_FILE, WEIGHTS_FILE

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]

pytest.importorskip("peft", reason='needs peft: pip install "exact-trainer[dev]"')

NAMES = (SINGLE, "DDP x2", "FSDP x2", "FSDP 2x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")


class LoRA(HFModule):
    """A model with adapters in its attention."""

    def __init__(self, seed: int = 5) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__("Llama, tied")
        if seed != 5:
            with torch.no_grad():
                self.net.model.layers[0].mlp.up_proj.weight.mul_(1.01)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.net = get_peft_model(self.net, config)

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(way: str, folder: str, steps: int, seed: int = 5, **options: Any) -> LoRA:
    module = LoRA(seed)
    saving = ModelCheckpoint(folder, every_n_train_steps=2, trainable_only=True)
    saves = LambdaCallback(on_train_end=lambda trainer, module: module.net.save_pretrained(f"{folder}-adapter-{steps}"))
    trainer = WAYS[way].trainer(
        max_steps=steps, callbacks=[saving, saves], enable_checkpointing=True, log_every_n_steps=1, seed=3
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
    return folder, run_each(train, selected(request, "way"), str(folder))


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
