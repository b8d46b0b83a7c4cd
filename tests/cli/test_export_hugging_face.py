"""`trainer checkpoint export --hf`: `from_pretrained` reads a model that was trained in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.data.test_hugging_face_data import make_tokenizer
from tests.helpers.hf_models import HFModule, data
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.cli.main import main

transformers = pytest.importorskip("transformers", reason="needs transformers")

MODELS = {
    SINGLE: "Llama, tied",
    "DDP x2": "BERT",
    "FSDP x2": "Llama, tied",
    "TP x2": "Qwen3",
    "CP x2": "Llama, tied",
    "PP x2": "Llama, tied",
    "EP x2": "Mixtral",
    "ZeRO-3 x2": "Llama, tied",
}


def save(way: str, folder: str) -> dict[str, torch.Tensor]:
    """Train a step and save a checkpoint with the way's name; return the weights."""
    module = HFModule(MODELS[way])
    trainer = WAYS[way].trainer(max_steps=1)
    trainer.fit(module, DataLoader(data(MODELS[way]), WAYS[way].micro_batch))
    trainer.save_checkpoint(f"{folder}/{way}")
    return trainer.full_state_dict(everywhere=True)


def export(*words: object) -> int:
    return main(["checkpoint", "export", *map(str, words)])


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_each(save, selected(request, "way"), str(folder))


@pytest.mark.parametrize("way", MODELS)
def test_from_pretrained_reads_a_model_of_any_layout(way: str, saved: tuple[Path, dict[str, Any]]) -> None:
    skip_if_missing(way)
    folder, weights = saved
    out = folder / f"{way}-hf"
    assert export(folder / way, out, "--hf", "--max-shard-size", "20KB") == 0
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    config = json.loads((out / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model, found = kind.from_pretrained(out, output_loading_info=True)
    assert not any(found.values()), found
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[way][0][f"net.{name}"], rtol=0, atol=0, msg=name)


class OfOneself(TrainModule):
    """Two Hugging Face models, one of which has tied its embeddings by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (HFModule("Qwen2").net for _ in range(2))
        self.student.lm_head.weight = self.student.model.embed_tokens.weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.student(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def test_one_of_several_models_by_its_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = WAYS[SINGLE].trainer(max_steps=1)
    module = OfOneself()
    trainer.fit(module, DataLoader(data("Qwen2"), 8))
    trainer.save_checkpoint(tmp_path / "c")
    assert export(tmp_path / "c", tmp_path / "out", "--hf") == 2
    assert "--hf: give --prefix and one of: student., teacher.." in capsys.readouterr().err
    assert export(tmp_path / "c", tmp_path / "out", "--hf", "--prefix", "student.", "--dtype", "bfloat16") == 0
    model, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found
    assert model.dtype is torch.bfloat16  # of config.json
    assert torch.equal(model.lm_head.weight, module.student.lm_head.weight.bfloat16())


def test_names_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = WAYS[SINGLE].trainer(max_steps=1)
    trainer.fit(HFModule("Llama, tied"), DataLoader(data("Llama, tied"), 8))
    trainer.save_checkpoint(tmp_path / "c")
    out = tmp_path / "w.safetensors"
    options = ("--prefix", "net.", "--rename", r"^model\.=", "--rename", r"\.self_attn\.(.)_proj\.=.attention.w\1.")
    assert export(tmp_path / "c", out, *options) == 0
    assert {"embed_tokens.weight", "layers.0.attention.wq.weight"} <= load_file(out).keys()
    for rule, says in {
        "norm": "write PATTERN=NAME",
        "(=x": "is no regular expression",
        r".*=x": "two weights would be 'x",
    }.items():
        assert export(tmp_path / "c", tmp_path / "other", "--rename", rule, "--max-shard-size", "1GB") == 2
        assert says in capsys.readouterr().err


class WithTokenizer(HFModule):
    """A model with its tokenizer."""

    def __init__(self) -> None:
        super().__init__("Qwen2")
        self.tokenizer = make_tokenizer()


def test_the_tokenizer_of_the_module_is_in_the_folder(tmp_path: Path) -> None:
    trainer, module = WAYS[SINGLE].trainer(max_steps=1), WithTokenizer()
    trainer.fit(module, DataLoader(data("Qwen2"), 8))
    trainer.save_checkpoint(tmp_path / "c")
    assert export(tmp_path / "c", tmp_path / "hf", "--hf") == 0
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert read("a b c").input_ids == module.tokenizer("a b c").input_ids
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config is not None


def test_trained_weights_alone_are_no_full_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = HFModule("Qwen2")
    module.net.model.embed_tokens.requires_grad_(False)
    saving = ModelCheckpoint(tmp_path, trainable_only=True)
    trainer = WAYS[SINGLE].trainer(max_steps=1, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, DataLoader(data("Qwen2"), 8))
    assert export(saving.last_model_path, tmp_path / "hf", "--hf") == 2
    assert "holds trained weights alone" in capsys.readouterr().err
