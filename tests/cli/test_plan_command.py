"""`trainer plan` ranks layouts, says why, and refuses what cannot be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.processes import run_python
from tests.helpers.project import Command
from trainer.cli.plan.architecture import assumed, read_config
from trainer.cli.plan.command import PRECISIONS
from trainer.model.memory import number_sizes
from trainer.precision import PRECISIONS as ALL
from trainer.precision import resolve_precision
from trainer.strategies import FSDPStrategy

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
GPUS = ("--gpus", "64", "--memory", "80G", "--seq", "32k")


@pytest.fixture
def llama(project: Path) -> str:
    (project / "config.json").write_text(json.dumps(LLAMA_70B))
    return "config.json"


def test_ten_layouts_with_what_their_time_goes_to(command: Command, llama: str) -> None:
    code, out, _ = command("plan", "--config", llama, *GPUS)
    assert code == 0
    assert out.startswith("70.55 billion parameters: 80 layers, width 8192, 64 heads of 128 (8 of keys)")
    rows = [line for line in out.splitlines() if "computing " in line and " x " in line]
    assert len(rows) == 10
    assert all("+" in row for row in rows[1:])
    assert "tensor_parallel=16 goes beyond a machine of 8 GPUs" in out
    assert "GB of 72.0 (weights, gradients and optimizer" in out


def test_the_layouts_fit_are_complete_and_sorted(command: Command, llama: str) -> None:
    _, out, _ = command("plan", "--config", llama, *GPUS, "--json")
    found = json.loads(out)
    ranked = found["layouts"]
    assert len(ranked) >= 10
    assert [one["seconds"] for one in ranked] == sorted(one["seconds"] for one in ranked)
    for one in ranked:
        layout, memory = one["layout"], one["memory"]
        assert layout.pop("expert") == 1  # a model without experts
        assert math.prod(layout.values()) == 64
        assert layout["tensor"] <= 8
        assert memory["total"] <= 72e9
        assert one["micro_batch"] * one["window"] * layout["shards"] * layout["replicas"] == 128
        assert sum(one["spent"].values()) == pytest.approx(one["seconds"])
        assert one["bubble"] == pytest.approx((layout["pipeline"] - 1) / (one["window"] + layout["pipeline"] - 1))
        assert set(one["sent"]) >= {name for name in ("tensor", "context") if layout[name] > 1}
    assert all(one["reason"] for one in found["excluded"])
    everything = [json.dumps(one["layout"]) for one in (*ranked, *found["excluded"])]
    assert len(set(everything)) == len(everything)


def test_the_settings_of_the_first_are_those_of_a_trainer(command: Command, llama: str) -> None:
    _, out, _ = command("plan", "--config", llama, *GPUS)
    settings = yaml.safe_load(out[out.index("trainer:\n") :])["trainer"]
    strategy = FSDPStrategy(**settings["strategy"]["init_args"])
    processes = settings["devices"] * settings["num_nodes"]
    assert processes == 64
    assert strategy.problems(resolve_precision(settings["precision"]), "cuda", processes) == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((), "PP 64"),
        (("--memory", "20G"), "needs at least"),
        (("--gpus-per-node", "4"), "tensor_parallel=8 goes beyond a machine of 4 GPUs"),
        (("--batch", "8"), "16 readers cannot share 8 sequences of a step evenly"),
        (("--heads", "20", "--head-dim", "128"), "tensor_parallel=8 does not divide 20 heads"),
        (("--layers", "6"), "pipeline_parallel=16 is more than 6 layers"),
        (("--seq", "48"), "context_parallel=32 does not divide sequences of 48"),
    ],
)
def test_why_layouts_are_excluded(command: Command, more: tuple[str, ...], reason: str) -> None:
    sizes = {"--layers": "48", "--hidden": "5120", "--heads": "40", "--vocab": "32000", "--batch": "64"}
    given = {**sizes, **dict(zip(GPUS[::2], GPUS[1::2], strict=True)), **dict(zip(more[::2], more[1::2], strict=True))}
    _, out, _ = command("plan", *(word for pair in given.items() for word in pair))
    assert reason in out


def test_nothing_fits(command: Command) -> None:
    code, out, _ = command("plan", "--params", "70b", "--gpus", "8", "--memory", "16G", "--seq", "8k")
    assert code == 1
    assert "no layout fits" in out
    assert "as settings" not in out


@pytest.mark.parametrize("params", ["100M", "1b", "7b", "70b", "405e9"])
def test_a_number_of_parameters_alone_has_its_shape_printed(command: Command, params: str) -> None:
    number = float(params.lower().replace("m", "e6").replace("b", "e9"))
    model = assumed(round(number))
    assert model.parameters == pytest.approx(number, rel=0.12)
    _, out, _ = command("plan", "--params", params, *GPUS)
    assert "the shape is assumed from --params" in out
    assert f"{model.layers} layers, width {model.hidden}" in out


def test_an_assumed_step_can_be_shared_by_any_number_of_gpus(command: Command) -> None:
    for gpus in ("7", "12", "96"):
        arguments = ("--gpus", gpus, "--gpus-per-node", gpus, "--memory", "80G", "--seq", "4k")
        _, out, _ = command("plan", "--params", "1b", *arguments)
        assert "cannot share" not in out


SHAPE = ("--layers", "2", "--hidden", "64", "--vocab", "128")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", "7b", "--layers", "3"), "give one of --config, --params, and the sizes"),
        (("--layers", "3"), "--hidden, --heads, --vocab missing"),
        (("--config", "none.json"), "give the config.json of a Hugging Face model"),
        (("--config", "empty.json"), "does not say layers, hidden, heads, vocabulary"),
        (("--config", "t5.json"), "is of an encoder-decoder"),
        ((*SHAPE, "--heads", "5"), "--hidden 64 is not a multiple of --heads 5: give --head-dim"),
        ((*SHAPE, "--heads", "4", "--kv-heads", "3"), "--kv-heads 3 does not divide --heads 4"),
        (("--params", "7b", "--memory", "80"), "--memory is 80 bytes: give it with its unit, such as 80G"),
        (("--params", "7b", "--precision", "transformer-engine"), "'fp8'"),
        (("--params", "7b", "--precision", "bf16-mixd"), "bf16-mixed"),
        (("--params", "7b", "--batch", "8", "--global-batch-tokens", "1M"), "either --batch"),
        (("--params", "7b", "--gpus-per-node", "7"), "not a multiple of --gpus-per-node 7"),
        (("--params", "7b", "--global-batch-tokens", "1k"), "less than one sequence"),
        (("--params", "lots"), "give a number such as"),
    ],
)
def test_mistakes_are_reported(command: Command, project: Path, arguments: tuple[str, ...], message: str) -> None:
    (project / "empty.json").write_text("{}")
    (project / "t5.json").write_text('{"is_encoder_decoder": true, "d_model": 512, "num_layers": 6, "num_heads": 8}')
    code, _, err = command("plan", *GPUS, *arguments)
    assert code == 2
    assert message in err


def test_precisions_are_those_of_the_trainer() -> None:
    assert {name: number_sizes(ALL[name]) for name in PRECISIONS} == PRECISIONS


def test_experts_are_split_in_layouts_of_a_mixture(command: Command, project: Path) -> None:
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
    mixtral = {**LLAMA_70B, "model_type": "mixtral", **sizes, "num_attention_heads": 32, "num_experts_per_tok": 2}
    (project / "config.json").write_text(json.dumps(mixtral))
    given = ("--gpus", "64", "--memory", "80G", "--seq", "8k")
    _, out, _ = command("plan", "--config", "config.json", *given, "--json")
    ranked = json.loads(out)["layouts"]
    split = [one for one in ranked if one["layout"]["expert"] > 1]
    assert ranked[0] in split
    for one in split:
        layout = one["layout"]
        assert layout["shards"] * layout["context"] % layout["expert"] == 0
        assert 8 % (layout["tensor"] * layout["expert"]) == 0
        assert one["name"].endswith(f"with EP {layout['expert']}")
        assert one["sent"]["experts"] > 0
        strategy = FSDPStrategy(**one["strategy"])
        assert strategy.layout.expert == layout["expert"]
        assert strategy.problems(ALL["bf16-mixed"], "cuda", 64) == []
    _, out, _ = command("plan", "--config", "config.json", *given)
    assert "tokens to experts" in out
    assert "8 experts cannot be split over 16 processes" in out
    assert "expert_parallel: " in out[out.index("trainer:\n") :]


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "mxfp8", "16-mixed"])
def test_layouts_are_those_that_the_strategy_takes_with_a_precision(command: Command, precision: str) -> None:
    arguments = ("--gpus", "8", "--memory", "80G", "--seq", "4k", "--precision", precision, "--json")
    code, out, _ = command("plan", "--params", "1b", *arguments)
    assert code == 0
    found = json.loads(out)
    assert any("products of 8 bits are faster" in note for note in found["notes"]) == ("fp8" in precision)
    for one in found["layouts"]:
        assert FSDPStrategy(**one["strategy"]).problems(ALL[precision], "cuda", 8) == []


def test_it_starts_without_torch() -> None:
    code = "import sys; from trainer.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    arguments = ["plan", "--params", "7b", *GPUS]
    run_python(f"import sys; sys.argv[1:] = {arguments!r}\n{code}").check()


def _configs() -> list[Any]:
    small = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "num_hidden_layers": 3}
    return [
        ("LlamaConfig", {**small, "num_key_value_heads": 2, "intermediate_size": 160}),
        ("Qwen3Config", {**small, "num_key_value_heads": 2, "intermediate_size": 160, "head_dim": 32}),
        ("MixtralConfig", {**small, "num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4}),
        ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 128}),
        ("Llama4TextConfig", {**small, "num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4}),
        ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 128, "n_positions": 16}),
        (
            "Qwen2MoeConfig",
            {**small, "moe_intermediate_size": 24, "num_experts": 8, "shared_expert_intermediate_size": 96},
        ),
        (
            "Dots1Config",
            {**small, "moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 2}
            | {"first_k_dense_replace": 0, "head_dim": 16},
        ),
        ("FalconConfig", {**small, "multi_query": True}),
        ("FalconConfig", {**small, "new_decoder_architecture": True, "num_kv_heads": 2}),
        ("Jais2Config", {**small, "num_key_value_heads": 2, "intermediate_size": 160, "head_dim": 16}),
        ("BioGptConfig", {**small, "intermediate_size": 160, "max_position_embeddings": 8}),
        ("NemotronConfig", {**small, "num_key_value_heads": 2, "intermediate_size": 160}),
        ("GPTNeoXConfig", {**small, "intermediate_size": 256}),
        ("Gemma2Config", {**small, "num_key_value_heads": 2, "intermediate_size": 160, "head_dim": 16}),
        ("Phi3Config", {**small, "num_key_value_heads": 2, "intermediate_size": 160, "pad_token_id": 0}),
    ]


@pytest.mark.parametrize(("name", "sizes"), _configs())
def test_parameters_are_those_of_the_model(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config = getattr(transformers, name)(**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    # Biases and some norms are left out.
    assert read_config(str(tmp_path / "config.json"))[0].parameters == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "notes"),
    [
        ("llama", []),
        ("gpt2", []),
        ("mixtral", []),
        ("gpt_oss", []),
        ("gemma3_text", []),
        ("qwen3_moe", []),
        ("jamba", ["recurrence or convolution", "without experts"]),
        ("bamba", ["recurrence or convolution"]),
        ("falcon_h1", ["recurrence or convolution"]),
        ("zamba2", ["recurrence or convolution"]),
        ("lfm2", ["recurrence or convolution"]),
        ("qwen3_next", ["recurrence or convolution"]),
        ("recurrent_gemma", ["recurrence or convolution"]),
        ("deepseek_v3", ["without experts", "low rank"]),
        ("llava", ["images or sound"]),
        ("mllama", ["images or sound", "cross-attention"]),
        ("ernie4_5_moe", ["without experts"]),
        ("minimax", ["recurrence or convolution"]),
        ("opt", ["table of positions"]),
        ("llama4_text", []),
        ("mpt", []),
    ],
)
def test_what_is_planned_as_something_else_is_named(kind: str, notes: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    _, found = read_config(str(tmp_path / "config.json"))
    assert len(found) == len(notes)
    assert all(words in note for words, note in zip(notes, found, strict=True))


def test_the_notes_are_printed(command: Command, project: Path) -> None:
    (project / "config.json").write_text(json.dumps({**LLAMA_70B, "mamba_d_state": 16}))
    _, out, _ = command("plan", "--config", "config.json", *GPUS)
    assert "note: the config has mamba_d_state: its layers of recurrence" in out


@pytest.mark.parametrize(
    ("config", "experts", "notes"),
    [
        ({"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}}, (4, 2), 0),
        ({"moe_num_experts": 6, "moe_k": 3}, (6, 3), 0),
        ({"expert_count": 8}, (0, 0), 1),
    ],
    ids=["nested", "other names", "unknown names"],
)
def test_mixtures_are_found_or_a_note_says_that_they_are_not(
    config: dict[str, Any], experts: tuple[int, int], notes: int, tmp_path: Path
) -> None:
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 128, **config}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    model, found = read_config(str(tmp_path / "config.json"))
    assert len(found) == notes
    if experts[0]:
        assert (model.experts, model.experts_per_token) == experts
