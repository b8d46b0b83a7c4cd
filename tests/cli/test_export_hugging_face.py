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
        "(=x": "is not a regular expression",
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


def _peft(kind: str, **options: Any) -> Any:
    return lambda: getattr(pytest.importorskip("peft"), kind)(task_type="CAUSAL_LM", **options)


LINEAR = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS = {
    "LoRA": _peft("LoraConfig", r=2, **LINEAR),
    "DoRA and a full head": _peft("LoraConfig", use_dora=True, modules_to_save=["lm_head"], **LINEAR),
    "LoRA of embeddings": _peft("LoraConfig", target_modules=["embed_tokens", "q_proj"]),
    "tokens": _peft("LoraConfig", trainable_token_indices=[3, 5], **LINEAR),
    "IA3": _peft("IA3Config", feedforward_modules=["down_proj"], target_modules=["k_proj", "down_proj"]),
    "VeRA": _peft("VeraConfig", r=4, target_modules=["q_proj", "o_proj"]),
    "prompts": _peft("PromptTuningConfig", num_virtual_tokens=3),
}


class Adapted(HFModule):
    """A model with an adapter, or two."""

    def __init__(self, config: Any, *more: str) -> None:
        super().__init__("Qwen2")
        self.net = pytest.importorskip("peft").get_peft_model(self.net, config())
        for name in more:
            self.net.add_adapter(name, config())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def save_adapters(module: HFModule, folder: Path, trainable_only: bool = True) -> Path:
    """Train a step; write a checkpoint, and PEFT's folder beside it."""
    saving = ModelCheckpoint(folder / "run", trainable_only=trainable_only)
    trainer = WAYS[SINGLE].trainer(max_steps=1, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, DataLoader(data("Qwen2"), 8))
    module.net.save_pretrained(folder / "theirs")
    return folder / "run"


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.is_gradient_checkpointing. is dep:FutureWarning")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_written_as_peft_writes_them(kind: str, tmp_path: Path, capsys: Any) -> None:
    run = save_adapters(Adapted(ADAPTERS[kind]), tmp_path, trainable_only=kind != "LoRA of embeddings")
    code = export(run, tmp_path / "ours", "--peft")
    if kind == "prompts":
        assert code == 2
        assert "does not hold all weights that 'default' saves" in capsys.readouterr().err
        return
    assert code == 0
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.is_gradient_checkpointing. is dep:FutureWarning")
def test_several_adapters_and_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_adapters(Adapted(ADAPTERS["LoRA"], "other"), tmp_path, trainable_only=False)
    assert export(run, tmp_path / "ours", "--peft", "--dtype", "bfloat16") == 0
    for place in (".", "other"):
        ours, theirs = (load_file(tmp_path / name / place / "adapter_model.safetensors") for name in ("ours", "theirs"))
        assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in theirs | ours)
    for words, says in {
        ("ours", "--peft"): "ours exists: give another name",
        ("new", "--peft", "--hf"): "--peft goes without --hf and --max-shard-size",
        ("new", "--peft", "--ema"): "--ema: the checkpoint has no average",
        ("new", "--peft", "--prefix", "teacher."): "--peft: give --prefix and one of: net.",
        ("new", "--hf"): "--peft writes adapters",
        ("no/new", "--peft"): "there is no folder",
    }.items():
        assert export(run, tmp_path / words[0], *words[1:]) == 2
        assert says in capsys.readouterr().err
    assert export(run, tmp_path / "ours", "--peft", "--force") == 0
    (tmp_path / "mine").mkdir()
    assert export(run, tmp_path / "mine", "--peft", "--force") == 2
    assert (
        "mine exists: give another name. --force replaces the file, or the folder, of an export"
        in capsys.readouterr().err
    )
