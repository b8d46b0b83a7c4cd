"""Precisions of 8 bits: near float32 under every strategy that has them, with the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.counted_collectives import CountCollectives
from tests.helpers.decoder import Architecture, Decoder
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import GPT
from tests.helpers.strategy_runs import SINGLE, WAYS, StepLosses, run_each
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.errors import ConfigError
from trainer.precision import PRECISIONS, resolve_precision
from trainer.strategies import STRATEGIES

FLOAT8 = [name for name, precision in PRECISIONS.items() if precision.float8 in ("tensorwise", "rowwise")]
COMPARED = (
    *(SINGLE, "DDP x2", "FSDP x2", "FSDP x2, SHARD_GRAD_OP", "FSDP x2, CPU offload", "FSDP 2x2", "TP x2", "CP x2"),
    *("PP x2", "TP 2 x FSDP 2", "CP 2 x FSDP 2", "CP 2 x TP 2", "PP 2 x FSDP 2", "PP 2 x TP 2", "PP 2 x CP 2"),
    *("HYBRID 2 x TP 2", "EP x2", "EP 2 x TP 2"),
)
CONVERTED = {
    **dict.fromkeys(("TP x2", "TP 2 x FSDP 2", "CP 2 x TP 2", "HYBRID 2 x TP 2"), 4),
    "PP 2 x TP 2": 6,
    "EP x2": 6,
    "EP 2 x TP 2": 2,
}
"""Of the 8 layers of two blocks, those whose parts have fitting sizes; the parts of an attention's have not.

The block of the other stage is not split, and there is one block less of plain layers with experts.
"""
STEPS, HALF = 10, 5
BOUND = 1e-2
"""Of a loss; bf16-mixed stays within 3e-3."""


def fit(way: str, precision: str, folder: Path, steps: int = STEPS, ckpt_path: str | None = None) -> dict[str, Any]:
    recorder = StepLosses()
    trainer = WAYS[way].trainer(
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        seed=3,
        default_root_dir=str(folder),
        enable_checkpointing=True,
        callbacks=[recorder, ModelCheckpoint(save_last=True, every_n_train_steps=HALF)],
    )
    torch.manual_seed(3)
    module = GPT(tied=True, deferred=True, experts=4 if "EP" in way else 0)
    trainer.fit(module, DataLoader(module.data(40), WAYS[way].micro_batch, shuffle=True), ckpt_path=ckpt_path)
    converted = [name for name, child in module.named_modules() if type(child).__name__ == "Float8Linear"]
    weights = trainer.full_state_dict(everywhere=True)
    return {"losses": recorder.losses, "converted": converted, "weights": weights}


def everything(way: str, root: str) -> dict[str, Any]:
    folder = Path(root, way)
    found = {"32-true": fit(way, "32-true", folder / "float32")}
    found.update({precision: fit(way, precision, folder / precision) for precision in FLOAT8})
    fit(way, "fp8", folder / "broken", HALF)
    found["resumed"] = fit(way, "fp8", folder / "broken", ckpt_path="last")
    found["from float32"] = fit(way, "fp8", folder / "float32", STEPS + HALF, ckpt_path="last")
    found["to float32"] = fit(way, "32-true", folder / "fp8", STEPS + HALF, ckpt_path="last")
    return found


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("float8")
    return run_each(everything, {SINGLE: None, **dict.fromkeys(selected(request, "way"))}, str(root))


@pytest.mark.parametrize("precision", FLOAT8)
@pytest.mark.parametrize("way", COMPARED)
def test_losses_are_near_those_of_float32(way: str, precision: str, results: Any) -> None:
    expected = results[way if "EP" in way else SINGLE][0]["32-true"]["losses"]
    for of_rank in results[way]:
        found = of_rank[precision]["losses"]
        assert found == pytest.approx(expected, rel=BOUND)
        assert found != pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("way", COMPARED)
def test_layers_of_fitting_sizes_are_converted(way: str, results: Any) -> None:
    for of_rank in results[way]:
        assert len(of_rank["fp8"]["converted"]) == CONVERTED.get(way, 8)
        assert of_rank["to float32"]["converted"] == []


@pytest.mark.parametrize("way", COMPARED)
def test_a_resumed_run_has_the_same_bits(way: str, results: Any) -> None:
    for of_rank in results[way]:
        assert_same_bits(of_rank["resumed"]["weights"], of_rank["fp8"]["weights"])
        assert of_rank["resumed"]["losses"] == of_rank["fp8"]["losses"][HALF:]


@pytest.mark.parametrize("way", COMPARED)
def test_checkpoints_go_between_precisions(way: str, results: Any) -> None:
    for of_rank in results[way]:
        assert of_rank["from float32"]["losses"] == pytest.approx(of_rank["to float32"]["losses"], rel=2 * BOUND)
        assert set(of_rank["from float32"]["weights"]) == set(of_rank["32-true"]["weights"])


# -- weights that are gathered in 8 bits -------------------------------------------------------------------------------


class Gathered(Callback):
    """Count the collectives of the second step."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, *args: Any) -> None:
        if trainer.global_step == 1:
            self.mode = CountCollectives()
            self.mode.__enter__()

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == 2:
            self.mode.__exit__(None, None, None)
            self.sizes = {size for kind, size in self.mode.counted if kind == "all_gather"}


def gather(ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, options in ways.items():
        torch.manual_seed(3)
        module, gathered, recorder = GPT(tied=True), Gathered(), StepLosses()
        callbacks = [gathered, recorder]
        trainer = Trainer(
            **QUIET,
            strategy=STRATEGIES["fsdp"](**options),
            devices=2,
            accelerator="cpu",
            precision="fp8",
            max_steps=3,
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            callbacks=callbacks,
        )
        trainer.fit(module, DataLoader(module.data(24), 4), DataLoader(module.data(4), 2))
        found[name] = (recorder.losses, trainer.full_state_dict(everywhere=True), gathered.sizes)
    return found


def test_weights_are_gathered_in_8_bits_with_the_same_numbers() -> None:
    """Those in the CPU's memory are gathered in bfloat16."""
    for found in run_distributed(gather, 2, {"8 bits": {}, "bfloat16": {"cpu_offload": True}}):
        losses, weights, sizes = found["8 bits"]
        expected_losses, expected_weights, expected_sizes = found["bfloat16"]
        assert losses == expected_losses
        assert_same_bits(weights, expected_weights)
        # A block has 2048 weights of such layers, and 128 other ones.
        assert sizes - expected_sizes == {2048 + 2 * 128}
        assert expected_sizes - sizes == {2 * 2048 + 2 * 128}


class Odd(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as error:
        Trainer(**QUIET, max_steps=1, precision="fp8").fit(Odd(), DataLoader(TensorDataset(torch.ones(2, 4))))
    return str(error.value)


def a_second_run(name: str) -> tuple[list[str], bool]:
    """Return the types of a layer in a run of 8 bits and in one of float32 after it, and whether the weight stayed."""
    module = GPT()
    data = DataLoader(module.data(8), 8)
    assert module.net is not None
    types, weight = [], module.net.blocks[0].qkv.weight
    for precision in ("fp8", "32-true"):
        Trainer(**QUIET, max_steps=1, precision=precision).fit(module, data)
        types.append(type(module.net.blocks[0].qkv).__name__)
    return types, module.net.blocks[0].qkv.weight is weight


def test_a_module_without_fitting_layers_is_refused() -> None:
    assert "has sizes that are multiples of 16" in run_each(refusal, [SINGLE])[SINGLE][0]


def test_a_later_run_of_float32_computes_in_float32() -> None:
    assert run_each(a_second_run, [SINGLE])[SINGLE][0] == (["Float8Linear", "Linear"], True)


@pytest.mark.parametrize("name", ["deepspeed_stage_2", "xla"])
def test_engines_without_it_refuse_it_in_words(name: str) -> None:
    problems = STRATEGIES[name]().problems(PRECISIONS["fp8"], "cpu", 1)
    assert any("'fp8'" in problem and "bf16-mixed" in problem for problem in problems)


@pytest.mark.parametrize("other", ["transformer-engine", "nvfp4"])
def test_other_names_are_answered(other: str) -> None:
    with raises_recorded(ConfigError):
        resolve_precision(other)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.precision.find_spec", lambda name: None)
    with raises_recorded(ConfigError):
        resolve_precision("fp8")


@pytest.mark.parametrize("precision", [*FLOAT8, "mxfp8"])
@pytest.mark.parametrize("rows", [(1,), (5, 3), (2, 16), (), (0,), (3, 0)])
def test_products_have_sizes_that_gpus_multiply(precision: str, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 64))
    resolve_precision(precision).convert_module(layer)
    single = nn.Linear(32, 64)
    single.load_state_dict(layer[0].state_dict())
    x = torch.randn(*rows, 32, requires_grad=True)
    with CountProducts() as products:
        output = layer(x)
        output.square().sum().backward()
    expected = single(x.detach())
    assert output.shape == expected.shape == (*rows, 64)
    torch.testing.assert_close(output, expected, rtol=0.1, atol=0.1)
    expected.square().sum().backward()
    error = (layer[0].weight.grad - single.weight.grad).norm()
    assert error <= 0.1 * single.weight.grad.norm()
    assert len(products.sizes) == 3
    assert all(inner % 16 == columns % 16 == 0 for _, inner, columns in products.sizes)


class CountProducts(TorchDispatchMode):
    """Record the sizes of all products of matrices: rows, inner size, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default):
            self.sizes.append((*args[0].shape, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def test_converted_layers_keep_their_hooks_and_attributes() -> None:
    module = nn.Sequential(nn.Linear(32, 32))
    called: list[str] = []
    module[0].name = "first"
    handle = module[0].register_forward_hook(lambda layer, args, output: called.append(layer.name))
    for precision in ("fp8", "32-true"):  # there, and back
        resolve_precision(precision).convert_module(module)
        module(torch.zeros(16, 32))
    assert type(module[0]) is nn.Linear
    assert called == ["first", "first"]
    assert "config" not in vars(module[0])
    handle.remove()
    module(torch.zeros(16, 32))
    assert called == ["first", "first"]


# -- a scale for each block --------------------------------------------------------------------------------------------

WIDE = Architecture(layers=2, hidden=64, heads=4, vocabulary=96, kv_heads=2, head_dim=16, intermediate=160)


class WideDecoder(Decoder):
    """Layers of multiples of 32, and sequences and micro-batches that are no multiples of it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss


def fit_blocks(way: str, precision: str, folder: Path, steps: int, ckpt_path: str | None = None) -> list[float]:
    torch.manual_seed(0)
    recorder, module = StepLosses(), WideDecoder(WIDE)
    trainer = WAYS[way].trainer(
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        seed=3,
        activation_checkpointing="auto",
        default_root_dir=str(folder),
        enable_checkpointing=True,
        callbacks=[recorder, ModelCheckpoint(save_last=True, every_n_train_steps=2)],
    )
    tokens = torch.randint(96, (48, 31), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(tokens), WAYS[way].micro_batch, shuffle=True), ckpt_path=ckpt_path)
    converted = sum(type(child).__name__ == "MXLinear" for child in module.modules())
    assert converted == (15 if precision == "mxfp8" else 0)
    return recorder.losses


def blocks_everywhere(way: str, root: str) -> dict[str, list[float]]:
    folder = Path(root, way)
    found = {precision: fit_blocks(way, precision, folder / precision, 4) for precision in ("32-true", "mxfp8")}
    fit_blocks(way, "mxfp8", folder / "broken", 2)
    found["resumed"] = fit_blocks(way, "mxfp8", folder / "broken", 4, "last")
    found["to float32"] = fit_blocks(way, "32-true", folder / "mxfp8", 6, "last")
    return found


def check_blocks(ways: list[str], root: Path) -> None:
    for way, ranks in run_each(blocks_everywhere, ways, str(root)).items():
        for found in ranks:
            assert found["mxfp8"] == pytest.approx(found["32-true"], rel=BOUND), way
            assert found["mxfp8"] != pytest.approx(found["32-true"], rel=1e-5), way
            assert found["resumed"] == found["mxfp8"][2:], way
            assert len(found["to float32"]) == 2, way


def test_a_scale_for_each_block_is_near_float32_and_exact_on_resume(tmp_path: Path) -> None:
    check_blocks([SINGLE], tmp_path)


@pytest.mark.long
def test_a_scale_for_each_block_on_two_processes(tmp_path: Path) -> None:
    check_blocks(["DDP x2", "FSDP x2", "CP x2, keys", "PP x2"], tmp_path)


def test_a_scale_for_each_block_of_split_weights_is_refused() -> None:
    problems = STRATEGIES["fsdp"](tensor_parallel=2).problems(PRECISIONS["mxfp8"], "cpu", 2)
    assert any("'mxfp8' with tensor_parallel" in problem and "'fp8-rowwise'" in problem for problem in problems)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_a_layer_that_computes_something_else_is_left_as_it_is(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Sequential(nn.Linear(32, 32), Doubled(32, 32))
    with caplog.at_level("INFO", "trainer"):
        resolve_precision(precision).convert_module(module)
    assert type(module[1]) is Doubled
    assert "a subclass may compute something else: " in caplog.text
    resolve_precision("32-true").convert_module(module)
    assert [type(layer) for layer in module] == [nn.Linear, Doubled]
    assert "product" not in vars(module[0])
