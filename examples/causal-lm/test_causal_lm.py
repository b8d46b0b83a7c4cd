"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from data import Text
from module import CausalLM
from peft import PeftModel
from transformers import AutoModelForCausalLM

from trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # in peft


def fit(tmp_path: Path, **options: object) -> CausalLM:
    text = Text(length=32, batch_size=4)
    module = CausalLM(width=16, layers=1, heads=2, **options)  # type: ignore[arg-type]
    Trainer(
        max_steps=3,
        limit_val_batches=2,
        seed=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        logger=False,
        accelerator="cpu",
        devices=1,
    ).fit(module, datamodule=text)
    return module


def test_from_pretrained_reads_what_was_trained_and_adapters_train_alone(tmp_path: Path) -> None:
    unbroken = fit(tmp_path, save_to=str(tmp_path / "llama"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    for name, value in model.state_dict().items():
        assert torch.equal(value, unbroken.net.state_dict()[name])
    adapted = fit(tmp_path, folder=str(tmp_path / "llama"), rank=2, save_to=str(tmp_path / "adapter"))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    read = PeftModel.from_pretrained(model, str(tmp_path / "adapter")).state_dict()
    assert all(torch.equal(value, read[name]) for name, value in adapted.net.state_dict().items())
