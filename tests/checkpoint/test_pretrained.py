"""Pretrained weights from safetensors files, read into every layout."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET
from tests.helpers.hf_models import HFModule, data, make
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import GPT, Transformer
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each
from tests.messages import raises_recorded
from trainer import CheckpointError, ConfigError, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.flat_slice import FlatSlice
from trainer.checkpoint.pretrained import open_weights, weights_for
from trainer.distributed.environment import detect_environment
from trainer.strategies import STRATEGIES

LAYOUTS = (SINGLE, "DDP x2", "FSDP x2", "TP x2", "CP x2", "PP x2", "ZeRO-3 x2")


class Frozen(GPT):
    """Trains with a learning rate of 0, so that the weights stay as they were read."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def weights_of(seed: int = 7) -> dict[str, torch.Tensor]:
    """Return the weights of a pretrained model as its author would save them: a tied weight once."""
    torch.manual_seed(seed)
    state = Transformer(tied=True, frozen=False).state_dict()
    return {name: value.contiguous() for name, value in state.items() if name != "head.weight"}


def save_sharded(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a folder of two files and an index, as `save_pretrained` does."""
    names = list(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def fit(way: str, folder: str, init_device: str = "cpu") -> dict[str, torch.Tensor]:
    torch.manual_seed(99)
    module = Frozen(tied=True, deferred=True)
    trainer = WAYS[way].trainer(max_steps=1)
    trainer.fit(module, DataLoader(module.data(8), WAYS[way].micro_batch), weights=folder)
    return trainer.full_state_dict(everywhere=True)


def test_every_layout_reads_the_same_weights(tmp_path: Path) -> None:
    weights = weights_of()
    save_sharded(tmp_path, weights)
    expected = {f"net.{name}": value for name, value in weights.items()}
    expected["net.head.weight"] = expected["net.tokens.weight"]
    for way, ranks in run_each(fit, LAYOUTS, str(tmp_path)).items():
        for found in ranks:
            assert found.keys() == expected.keys(), way
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{way}: {name}")


WIDTH, LAYERS = 1024, 40
SIZE, LARGEST = 4 * WIDTH**2 * (LAYERS + 4), 4 * WIDTH**2 * 4
"""Bytes of the weights of `Large`, and of the largest one."""
SLACK = 32 << 20
"""For what is imported, and for buffers."""
HALVES = {
    "FSDP x2": STRATEGIES["fsdp"](init_device="meta"),
    "TP x2": STRATEGIES["fsdp"](init_device="meta", tensor_parallel=2),
    "PP x2": STRATEGIES["fsdp"](init_device="meta", pipeline_parallel=2),
}


class LargeNet(nn.Module):
    """Initializes its layers and a table that no checkpoint has, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.table.fill_(1.0)


class Large(TrainModule):
    """Records by how much the memory of its process grew from before its layers are built until they are loaded."""

    tensor_parallel_plan: ClassVar = {"net.embed": "rowwise", "net.layers.*": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        self.net: LargeNet | None = None

    def configure_model(self) -> None:
        if self.net is None:
            Path("/proc/self/clear_refs").write_text("5")
            self.before, self.net = peak_memory(), LargeNet()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.net is not None
        x = self.net.embed(batch)
        for layer in self.net.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        self.growth = peak_memory() - self.before
        return torch.optim.SGD(self.parameters(), lr=0.0)


def peak_memory() -> int:
    """Return the most bytes that this process has held at once, since the number was reset."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


_M_MMAP_THRESHOLD = -3


def growths(ways: dict[str, Any], folder: str) -> dict[str, int]:
    found = {}
    # Otherwise malloc keeps some of the tensors' memory for later ones.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    for name, strategy in ways.items():
        module = Large()
        options = {"accelerator": "cpu", "devices": 2 if strategy else 1, "strategy": strategy or "auto", **QUIET}
        Trainer(**options, max_steps=1).fit(module, DataLoader(torch.zeros(4, 2, dtype=torch.int64), 2), weights=folder)
        found[name] = module.growth
        del module
        gc.collect()
    return found


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LargeNet().state_dict().items()}
    save_sharded(folder, {name: torch.zeros(shape) for name, shape in shapes.items()})
    return str(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes in /proc")
def test_one_process_holds_the_weights_and_one_more_tensor(large_folder: str) -> None:
    (found,) = run_distributed(growths, 1, {SINGLE: None}, large_folder)
    assert found[SINGLE] < SIZE + LARGEST + 2 * SLACK  # far from twice the weights; what is imported counts, too


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes in /proc")
def test_no_process_holds_more_than_its_shard_and_one_tensor(large_folder: str) -> None:
    for found in run_distributed(growths, 2, HALVES, large_folder):
        for way, growth in found.items():
            assert growth < SIZE / 2 + LARGEST + SLACK, way


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes in /proc")
def test_no_process_of_zero_3_holds_more_than_its_shard_and_two_tensors(large_folder: str) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    ways = {"ZeRO-3 x2": STRATEGIES["deepspeed_stage_3"](init_device="meta")}
    for found in run_distributed(growths, 2, ways, large_folder):
        assert found["ZeRO-3 x2"] < SIZE / 2 + 2 * LARGEST + SLACK


def train(module: GPT, weights: Path, **arguments: Any) -> Trainer:
    trainer = Trainer(max_steps=1, **{**QUIET, **arguments.pop("settings", {})})
    trainer.fit(module, DataLoader(module.data(8), 8), weights=weights, **arguments)
    return trainer


def test_a_file_in_another_dtype(tmp_path: Path) -> None:
    file = tmp_path / "some.safetensors"
    save_file({name: value.bfloat16() for name, value in weights_of().items()}, file)
    module = Frozen(tied=True)
    train(module, file)
    assert module.net is not None
    expected = weights_of()["blocks.1.qkv.weight"].bfloat16().float()
    assert torch.equal(module.net.blocks[1].qkv.weight, expected)


class Renamed(Frozen):
    key_mapping: ClassVar = {r"^transformer\.": "", r"\.c_attn\.": ".qkv."}


def test_names_are_mapped(tmp_path: Path) -> None:
    weights = {f"transformer.{name.replace('.qkv.', '.c_attn.')}": value for name, value in weights_of().items()}
    save_file(weights, tmp_path / "model.safetensors")
    module = Renamed(tied=True)
    train(module, tmp_path)
    assert module.net is not None
    assert torch.equal(module.net.blocks[1].qkv.weight, weights_of()["blocks.1.qkv.weight"])


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    save_sharded(tmp_path / "blobs", weights_of())
    for blob in (tmp_path / "blobs").iterdir():
        name = blob.name
        blob.rename(blob.with_name(f"{len(name)}{name[8:11]}"))
        (tmp_path / "snapshots" / name).symlink_to(f"../blobs/{len(name)}{name[8:11]}")
    found = open_weights(tmp_path / "snapshots")
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        name: list(value.shape) for name, value in weights_of().items()
    }
    module = Frozen(tied=True)
    train(module, tmp_path / "snapshots")
    assert module.net is not None
    assert torch.equal(module.net.blocks[1].qkv.weight, weights_of()["blocks.1.qkv.weight"])


class Colliding(Frozen):
    key_mapping: ClassVar = {r"blocks\.\d\.": "blocks.0."}


def test_a_pattern_that_gives_two_weights_one_name_is_reported(tmp_path: Path) -> None:
    save_file(weights_of(), tmp_path / "model.safetensors")
    with raises_recorded(CheckpointError):
        train(Colliding(tied=True), tmp_path)


def test_one_file_counts_before_an_index(tmp_path: Path) -> None:
    save_sharded(tmp_path, weights_of(1))
    save_file(weights_of(2), tmp_path / "model.safetensors")
    assert torch.equal(open_weights(tmp_path)["norm.weight"].read(), weights_of(2)["norm.weight"])
    assert torch.equal(open_weights(tmp_path)["tokens.weight"].read(), weights_of(2)["tokens.weight"])


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path, weights_of())
    (tmp_path / "model.safetensors.index.json").unlink()
    with raises_recorded(ConfigError):
        train(Frozen(tied=True), tmp_path)


def test_weights_that_are_tied_in_the_module_alone_are_reported(tmp_path: Path) -> None:
    weights = weights_of()
    same = {**weights, "head.weight": weights["tokens.weight"].clone()}
    save_file(same, tmp_path / "model.safetensors")
    train(Frozen(tied=True), tmp_path)
    save_file({**same, "head.weight": same["head.weight"] + 1}, tmp_path / "model.safetensors")
    with raises_recorded(CheckpointError):
        train(Frozen(tied=True), tmp_path)

    with raises_recorded(CheckpointError):
        train(Frozen(tied=True), tmp_path)
    unknown = {name: torch.full_like(value, math.nan) for name, value in same.items()}
    save_file(unknown, tmp_path / "model.safetensors")
    assert "head.weight" in {
        name.removeprefix("net.") for name in weights_for(Frozen(tied=True), open_weights(tmp_path), {}, True)
    }


def train_from_its_own(way: str, folders: list[str]) -> str:
    module = Frozen(tied=True)
    trainer = WAYS[way].trainer(max_steps=1)
    with pytest.raises(ConfigError) as refused:
        trainer.fit(
            module, DataLoader(module.data(8), WAYS[way].micro_batch), weights=folders[detect_environment().rank]
        )
    return str(refused.value)


@pytest.mark.parametrize("way", ["DDP x2", "FSDP x2"])
def test_copies_that_differ_are_reported(way: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for number, folder in enumerate(folders):
        weights = weights_of()
        weights["norm.weight"] = torch.full_like(weights["norm.weight"], number)
        Path(folder).mkdir()
        save_file(weights, Path(folder) / "model.safetensors")
    for message in run_distributed(train_from_its_own, 2, way, folders):
        begin, name, fix = message.splitlines()
        assert begin == "the processes do not agree:"
        assert re.fullmatch(r" +net.norm.weight: .* crc32=\d+' on rank 0, and .* crc32=\d+' on rank 1", name)
        assert fix.startswith("Have the same pretrained weights on all machines.")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_are_reported(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = weights_of()
    weights["blocks.0.qkv.weight"] = weights["blocks.0.qkv.weight"].to(dtype)
    save_file(weights, tmp_path / "model.safetensors")
    for module in (Frozen(tied=True), Lenient(tied=True)):
        with raises_recorded(CheckpointError):
            train(module, tmp_path)


@pytest.mark.parametrize(
    ("stored", "own", "fits"),
    [
        (torch.int32, torch.int64, True),
        (torch.uint8, torch.int16, True),
        (torch.bool, torch.int64, True),
        (torch.int64, torch.int8, False),
        (torch.int8, torch.uint8, False),
        (torch.int64, torch.bool, False),
        (torch.int64, torch.complex64, False),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.int64, False),
    ],
)
def test_integers_are_read_only_where_all_fit(
    stored: torch.dtype, own: torch.dtype, fits: bool, tmp_path: Path
) -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("table", torch.zeros(2, dtype=own))
    values = torch.tensor([0, 1]).to(stored)
    save_file({**nn.Linear(1, 1).state_dict(), "table": values}, tmp_path / "model.safetensors")
    if fits:
        assert "table" in weights_for(module, open_weights(tmp_path), {}, True)
    else:
        with raises_recorded(CheckpointError):
            weights_for(module, open_weights(tmp_path), {}, True)


class Mixture(TrainModule):
    """A Hugging Face mixture, whose experts files have one by one."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = make(name)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(input_ids=batch).logits.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def save_mixtures(folder: Path) -> dict[str, str]:
    pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    folders = {name: str(folder / name) for name in ("Mixtral", "Qwen3-MoE")}
    for name, path in folders.items():
        Mixture(name, 2).net.save_pretrained(path, max_shard_size="20KB")
        index = json.loads(Path(path, "model.safetensors.index.json").read_text())
        assert any("experts.3." in key for key in index["weight_map"])
    return folders


def test_experts_that_are_saved_one_by_one_are_one_tensor_with_slices(tmp_path: Path) -> None:
    for name, folder in save_mixtures(tmp_path).items():
        expected = Mixture(name, 2).state_dict()
        found = weights_for(Mixture(name, 1), open_weights(folder), {}, strict=True)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key].read(), value)
            last = FlatSlice(value.numel() // 2, value.numel() // 2)
            assert torch.equal(found[key].read(last), value.flatten()[value.numel() // 2 :])


def fit_mixtures(ways: list[str], folders: dict[str, str]) -> dict[str, Any]:
    found = {}
    for way in ways:
        for name, folder in folders.items():
            trainer = WAYS[way].trainer(max_steps=1)
            trainer.fit(Mixture(name, 1), DataLoader(torch.ones(4, 8, dtype=torch.int64), 2), weights=folder)
            found[way, name] = trainer.full_state_dict(everywhere=True)
    return found


@pytest.mark.long
def test_experts_that_are_saved_one_by_one_are_read_into_every_layout(tmp_path: Path) -> None:
    folders = save_mixtures(tmp_path)
    for found in run_distributed(fit_mixtures, 2, ["FSDP x2", "TP x2", "EP x2", "PP x2"], folders):
        for (way, name), weights in found.items():
            expected = {f"net.{key}": value for key, value in Mixture(name, 2).net.state_dict().items()}
            assert weights.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(weights[key], value), f"{way}, {name}: {key}"


class Lenient(Frozen):
    strict_loading = False


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers for it
def test_a_model_with_adapters_takes_the_weights_of_its_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft", reason='needs peft: pip install "exact-trainer[huggingface]"')
    make("Qwen2").save_pretrained(tmp_path)
    weights = {f"net.base_model.model.{name}": value for name, value in open_weights(tmp_path).items()}
    module = HFModule("Qwen2")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"])
    module.net = peft.get_peft_model(module.net, config)
    with raises_recorded(CheckpointError):
        weights_for(module, open_weights(tmp_path), {}, strict=True)
    found = weights_for(module, open_weights(tmp_path), {}, strict=False)
    assert "not all is loaded" not in caplog.text
    layer = "net.base_model.model.model.layers.0.self_attn.q_proj"
    assert torch.equal(found[f"{layer}.base_layer.weight"].read(), weights[f"{layer}.weight"].read())
    head = weights["net.base_model.model.lm_head.weight"].read()
    for name in ("original_module", "modules_to_save.default"):
        assert torch.equal(found[f"net.base_model.model.lm_head.{name}.weight"].read(), head)
    assert set(module.state_dict()) - set(found) == {name for name in module.state_dict() if ".lora_" in name}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # which is the case here
def test_a_head_that_is_trained_with_adapters_takes_the_weights_to_which_it_was_tied(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason='needs peft: pip install "exact-trainer[huggingface]"')
    make("Llama, tied").save_pretrained(tmp_path)
    module = HFModule("Llama, tied")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    module.net = peft.get_peft_model(module.net, config)
    found = weights_for(module, open_weights(tmp_path), {}, strict=False)
    expected = open_weights(tmp_path)["model.embed_tokens.weight"].read()
    assert torch.equal(found["net.base_model.model.lm_head.modules_to_save.default.weight"].read(), expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"trainable_token_indices": [1, 2]}],
    ids=["DoRA", "PiSSA", "tokens"],
)
def test_adapters_that_were_computed_from_other_weights_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason='needs peft: pip install "exact-trainer[huggingface]"')
    make("Qwen2").save_pretrained(tmp_path)
    module = HFModule("Qwen2")
    module.strict_loading = False
    module.peft_config = peft.LoraConfig(r=4, target_modules=["q_proj"], **options)  # which is not the model's dict
    module.net = peft.get_peft_model(module.net, module.peft_config)
    with raises_recorded(ConfigError):
        Trainer(max_steps=1, **QUIET).fit(module, DataLoader(data("Qwen2"), 8), weights=tmp_path)


def test_weights_none_of_which_the_module_has_are_refused(tmp_path: Path) -> None:
    save_file({f"module.{name}": value for name, value in weights_of().items()}, tmp_path / "model.safetensors")
    with raises_recorded(CheckpointError):
        train(Lenient(tied=True), tmp_path)


def test_what_is_not_loaded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = weights_of()
    weights["extra"] = weights.pop("blocks.0.qkv.weight")
    save_file(weights, tmp_path / "model.safetensors")
    train(Lenient(tied=True), tmp_path)
    words = "the weights lack net.blocks.0.qkv.weight, the module lacks net.extra"
    assert f"strict_loading is False, and not all is loaded: {words}" in caplog.text


def test_what_is_missing_is_reported_or_left_as_it_is(tmp_path: Path) -> None:
    weights = weights_of()
    weights["extra"] = weights.pop("blocks.0.qkv.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with raises_recorded(CheckpointError):
        train(Frozen(tied=True), tmp_path)
    module = Lenient(tied=True)
    before = module.net.blocks[0].qkv.weight.clone()  # type: ignore[union-attr,operator]
    train(module, tmp_path)
    assert torch.equal(module.net.blocks[0].qkv.weight, before)  # type: ignore[union-attr,arg-type]
    assert torch.equal(module.net.norm.weight, weights["norm.weight"])  # type: ignore[union-attr]


def test_other_shapes_are_reported(tmp_path: Path) -> None:
    save_file({**weights_of(), "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with raises_recorded(CheckpointError):
        train(Frozen(tied=True), tmp_path)


def test_a_checkpoint_counts_before_the_weights(tmp_path: Path) -> None:
    save_file(weights_of(), tmp_path / "model.safetensors")
    settings = {"default_root_dir": tmp_path / "runs", "enable_checkpointing": True}
    module = GPT(tied=True)
    saving = {**settings, "callbacks": [ModelCheckpoint(every_n_train_steps=1)]}
    train(module, tmp_path, ckpt_path="last", settings=saving)  # there is none yet
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    resumed = GPT(tied=True)
    trainer = train(resumed, tmp_path / "gone", ckpt_path="last", settings=settings)
    assert trainer.global_step == 1
    assert all(torch.equal(value, trained[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize("argument", ["weights", "ckpt_path"])
@pytest.mark.parametrize("path", ["x" * 300, "a\0b"], ids=["long", "zero"])
def test_a_path_that_no_file_system_has_is_named_with_its_argument(argument: str, path: str) -> None:
    trainer = Trainer(accelerator="cpu", **QUIET)
    arguments: dict[str, Any] = {argument: path}
    with raises_recorded(ConfigError):
        trainer.fit(GPT(), DataLoader(GPT().data(4), 2), **arguments)


def test_a_folder_without_weights_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with raises_recorded(ConfigError):
        train(Frozen(tied=True), tmp_path)
    with raises_recorded(ConfigError):
        train(Frozen(tied=True), 3)  # type: ignore[arg-type]


def test_weights_that_are_missing_where_no_checkpoint_is_either_are_named(tmp_path: Path) -> None:
    settings = {"default_root_dir": tmp_path / "runs", "enable_checkpointing": True}
    with raises_recorded(ConfigError):
        train(Frozen(tied=True), tmp_path / "gone", ckpt_path="last", settings=settings)


def header(entry: Any) -> bytes:
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 16


DAMAGED = {
    "nothing": b"",
    "a huge header": (2**60).to_bytes(8, "little") + b"{}",
    "no JSON": (3).to_bytes(8, "little") + b"[1,",
    "no object": (2).to_bytes(8, "little") + b"[]",
    "a place outside of the file": header({"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}),
    "another size": header({"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}),
    "a negative place": header({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}),
    "an unknown dtype": header({"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}),
    "no entry": header(None),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_found_by_their_headers(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[name])
    with pytest.raises(CheckpointError):
        open_weights(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 3}}'])
def test_damaged_indexes_are_found(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        open_weights(tmp_path)
