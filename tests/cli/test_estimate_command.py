"""`trainer estimate`: from a number of parameters, and from a configuration without memory; the layouts that fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.project import Command, assert_recorded, done
from trainer.precision import PRECISIONS
from trainer.strategies import FSDPStrategy

NETS = """
import torch
from trainer import TrainModule

class Big(TrainModule):
    '''100 million parameters, which nobody has to hold; the embedding is tied, and one layer frozen.'''

    def __init__(self, width: int = 10_000, lr: float = 0.1):
        super().__init__()
        self.width, self.lr = width, lr

    def configure_model(self):
        self.head = torch.nn.Linear(self.width, 10, bias=False)
        self.embedding = torch.nn.Embedding(10, self.width)
        self.embedding.weight = self.head.weight
        self.layer = torch.nn.Linear(self.width, self.width, bias=False)
        self.frozen = torch.nn.Linear(self.width, 3, bias=False).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(7))

    def training_step(self, batch, batch_idx): ...

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD([self.layer.weight], lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]

class Looks(Big):
    def __init__(self):
        super().__init__(width=4)
        self.rates = [rate.item() for rate in torch.arange(3) / 2]

    def configure_optimizers(self):
        raise ValueError("no data here")

class Closes(Big):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())

class Empty(Big):
    def configure_model(self): ...

class Lazy(Big):
    def configure_model(self):
        self.layer = torch.nn.LazyLinear(3)
"""


@pytest.fixture
def nets(project: Path) -> None:
    (project / "nets.py").write_text(NETS)


def estimated(command: Command, *arguments: str) -> dict[str, Any]:
    out, _ = done(command("estimate", *arguments, "--json"))
    found: dict[str, Any] = json.loads(out)
    return found


def row(found: dict[str, Any], word: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = found["strategies"]
    return next(row for row in rows if word in row["label"])


LINES = (
    "--params 7e9 --devices 1 --precision bf16",
    "--params 7B --devices 4 --precision bf16",
    "--params 350M --precision 64-true",
    "--params 6442450944 --layers 32 --hidden 4096 --sequence 2048 --batch 1 --precision bf16-mixed",
    "--module nets.py:Big --trainer.devices 2 --trainer.precision bf16-mixed --trainer.strategy ddp",
    "--module nets.py:Big --trainer.strategy fsdp --trainer.strategy.sharding_strategy SHARD_GRAD_OP",
    "--module nets.py:Big --trainer.strategy fsdp --trainer.strategy.cpu_offload true",
    "--module nets.py:Looks",
    "--params 70e9 --gpus 64 --memory 80G --layers 80 --hidden 8192 --heads 64 --sequence 32k",
    "--params 70e9 --gpus 8 --memory 16G --layers 8 --hidden 2048 --heads 16 --sequence 4k",  # nothing fits
)


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("line", LINES)
def test_what_is_printed(command: Command, line: str) -> None:
    code, out, err = command("estimate", *line.split())
    assert (code, err) == (int("16G" in line), "")
    assert_recorded(out)


# -- from a number -----------------------------------------------------------------------------------------------------


def test_machines_and_the_hybrid_layout(command: Command) -> None:
    found = estimated(command, "--params", "8e9", "--devices", "4", "--num-nodes", "2")
    assert row(found, "HYBRID")["weights"] == 8 * 10**9
    assert row(found, "fsdp, xla_fsdp")["weights"] == 4 * 10**9


def test_activations_are_those_of_the_formula(command: Command) -> None:
    sizes = ["--layers", "32", "--hidden", "4096", "--sequence", "2048", "--batch", "1", "--precision", "bf16-mixed"]
    kept = row(estimated(command, "--params", "6442450944", *sizes), "ddp")["activations"]
    assert kept == 32 * 36 * 2048 * 4096 + 6 * 2048 * 4096
    few = row(estimated(command, "--params", "6442450944", *sizes, "--checkpointing"), "ddp")["activations"]
    assert few < 0.1 * kept


# -- from a configuration ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nets")
def test_a_configuration_is_counted_without_memory(command: Command) -> None:
    found = row(estimated(command, *["--module", "nets.py:Big", "--trainer.strategy", "ddp", "--devices", "2"]), "ddp")
    assert found["weights"] == 4 * 100_130_000 + 28
    assert found["gradients"] == 4 * 100_100_000
    assert found["optimizer"] == 4 * 100_000_000


@pytest.mark.usefixtures("nets")
def test_values_of_the_configuration_can_be_changed(command: Command) -> None:
    found = estimated(command, "--module", "nets.py:Big", "--module.width", "10", "--devices", "3")
    assert found["parameters"] == 10 * 10 + 10 * 10 + 30
    assert row(found, "ddp")["optimizer"] == 4 * 100


def test_the_sizes_of_a_transformer_are_found_in_the_module(command: Command) -> None:
    root = Path(__file__).parents[2]
    found = estimated(command, "--config", str(root / "examples" / "gpt" / "config.yaml"), "--devices", "1")
    assert found["parameters"] == 363_840
    tokens, width, layers = 64 * 16, 96, 3
    kept = layers * tokens * width * 16 * 4 + tokens * (2 * width + 256) * 4
    assert row(found, "ddp")["activations"] == kept


# -- the layouts that fit ----------------------------------------------------------------------------------------------


LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPUS = ("--gpus", "64", "--memory", "80G", "--sequence", "32k")
SMALL = ("--layers", "8", "--hidden", "2048", "--heads", "16", "--sequence", "4k")


@pytest.fixture
def llama(project: Path) -> str:
    pytest.importorskip("transformers")
    (project / "config.json").write_text(json.dumps(LLAMA_70B))
    return "config.json"


def test_layouts_are_complete_and_sorted_by_what_they_send(command: Command, llama: str) -> None:
    found = estimated(command, "--config", llama, *GPUS)
    assert found["parameters"] == 70_553_706_496
    layouts = found["layouts"]
    assert len(layouts) >= 20
    assert layouts == sorted(layouts, key=lambda one: (one["between"], one["sent"], one["memory"]))
    assert len({json.dumps(one["strategy"]) for one in layouts}) == len(layouts)
    for one in layouts:
        assert found["least"] <= one["memory"] <= 72e9
        strategy = FSDPStrategy(**one["strategy"])
        assert strategy.problems(PRECISIONS["bf16-mixed"], "cuda", 64) == []
        split = strategy.layout
        assert split.tensor <= 8
        assert one["window"] == split.processes
        assert one["bubble"] == pytest.approx((split.pipeline - 1) / (one["window"] + split.pipeline - 1))
        hybrid = one["strategy"].get("device_mesh", [64 // split.processes])
        assert math.prod(hybrid) * split.processes == 64
        assert 0 < one["between"] <= one["sent"]


@pytest.mark.parametrize(
    ("more", "degrees"),
    [
        ((), {"tensor": {1, 2, 4, 8}, "pipeline": {1, 2, 4, 8}, "context": {1, 2, 4, 8}}),
        (("--devices", "4"), {"tensor": {1, 2, 4}}),
        (("--heads", "12"), {"tensor": {1, 2, 4}}),
        (("--kv-heads", "2"), {"tensor": {1, 2}}),
        (("--layers", "2"), {"pipeline": {1, 2}}),
        (("--sequence", "6"), {"context": {1, 2}}),
        (("--precision", "16-mixed"), {"tensor": {1}, "pipeline": {1}}),
        (("--precision", "mxfp8"), {"tensor": {1}}),
    ],
)
def test_only_layouts_that_the_model_and_the_strategy_allow(
    command: Command, more: tuple[str, ...], degrees: dict[str, set[int]]
) -> None:
    given = ("--params", "500M", "--gpus", "8", "--memory", "80G", *SMALL, *more)
    found = [FSDPStrategy(**one["strategy"]).layout for one in estimated(command, *given)["layouts"]]
    for name, wanted in degrees.items():
        assert {getattr(split, name) for split in found} == wanted


def test_less_memory_makes_a_layout_recompute(command: Command) -> None:
    given = ("--params", "500M", "--gpus", "2", *SMALL, "--batch", "8", "--accumulate", "2")
    for memory, checkpointing in (("80G", False), ("12G", True)):
        layouts = estimated(command, *given, "--memory", memory)["layouts"]
        (plain,) = (one for one in layouts if not one["strategy"])
        assert plain["checkpointing"] == checkpointing


def test_experts_are_split_in_layouts_of_a_mixture(command: Command, llama: str) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8}
    mixtral = {**LLAMA_70B, "model_type": "mixtral", **sizes, "num_attention_heads": 8, "num_experts_per_tok": 2}
    Path(llama).write_text(json.dumps(mixtral))
    given = ("--config", llama, "--gpus", "64", "--memory", "80G", "--sequence", "8k")
    assert "8 experts, MLPs of 3584" in command("estimate", *given)[1]
    splits = [FSDPStrategy(**one["strategy"]).layout for one in estimated(command, *given)["layouts"]]
    assert {split.expert for split in splits} == {1, 2, 4, 8}
    assert all(8 % (split.tensor * split.expert) == 0 for split in splits if split.expert > 1)


def _configs() -> list[tuple[str, dict[str, Any]]]:
    small = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "num_hidden_layers": 4}
    keys = {**small, "num_key_value_heads": 2, "intermediate_size": 96}
    return [
        ("LlamaConfig", keys),
        ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 128, "n_positions": 16}),
        ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 128}),
        ("OPTConfig", {**small, "ffn_dim": 96, "max_position_embeddings": 16, "word_embed_proj_dim": 64}),
        ("MixtralConfig", {**keys, "num_local_experts": 4}),
        ("Llama4TextConfig", {**keys, "num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 16}),
        ("Ernie4_5_MoeConfig", {**keys, "moe_num_experts": 4, "moe_layer_start_index": 1, "moe_intermediate_size": 24}),
        ("MiniMaxConfig", {**keys, "num_local_experts": 4, "layer_types": ["full_attention", "linear_attention"] * 2}),
    ]


@pytest.mark.parametrize(("name", "sizes"), _configs(), ids=[name for name, _ in _configs()])
def test_parameters_are_those_of_the_model(command: Command, project: Path, name: str, sizes: dict[str, Any]) -> None:
    """Whatever its layers are: shared experts, dense first layers, tables of positions, recurrence."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = getattr(transformers, name)(**sizes)
    config.save_pretrained(project)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    given = ("--config", "config.json", "--gpus", "4", "--memory", "80G", "--sequence", "16")
    found = estimated(command, *given)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["layouts"]
