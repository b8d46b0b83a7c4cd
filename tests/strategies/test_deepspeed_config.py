"""The user's DeepSpeed JSON is kept, completed, and compared with the trainer's settings."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.messages import raises_recorded
from trainer.errors import ConfigError
from trainer.precision import PRECISIONS
from trainer.strategies.deepspeed.config import (
    AgreedSettings,
    config_problems,
    hidden_size_of,
    read_config,
    resolve_config,
    write_config,
)
from trainer.strategies.deepspeed.config_checks import key_problems, known_keys


@pytest.fixture(autouse=True, scope="module")
def _deepspeed() -> None:
    """Import DeepSpeed, and ignore its warnings about torch functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("deepspeed")


# The JSON files that users bring, as they stand in their documents.
FROM_A_GUIDE = """
{ "fp16": {"enabled": false}, "bf16": {"enabled": true}, "zero_optimization": { "stage": 2,
"offload_optimizer": {"device": "cpu"}, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8 }}
"""
ZERO_2 = """
{
  "train_batch_size": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 1.0,
  "fp16": { "enabled": true, "loss_scale": 0, "loss_scale_window": 1000 },
  "zero_optimization": {
    "stage": 2,
    "allgather_partitions": true,
    "allgather_bucket_size": 5e8,
    "reduce_scatter": true,
    "reduce_bucket_size": 5e8,
    "overlap_comm": true,
    "contiguous_gradients": true
  }
}
"""
ZERO_3 = """
{
  "train_batch_size": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 1.0,
  "fp16": { "enabled": true },
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  }
}
"""
FILES = {"guide": (FROM_A_GUIDE, "bf16-mixed", 2), "zero2": (ZERO_2, "16-mixed", 2), "zero3": (ZERO_3, "16-mixed", 3)}
WEIGHT = torch.nn.Parameter(torch.ones(2))


def adamw(**options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([WEIGHT], **{"lr": 3e-4, **options})


def run(**facts: Any) -> AgreedSettings:
    """Return the settings of 2 processes with micro-batches of 4 and windows of 3."""
    known = {
        "precision": PRECISIONS["32-true"],
        "micro_batch": 4,
        "window": 3,
        "world_size": 2,
        "optimizer": adamw(),
        "schedulers": [],
        "hidden_size": 64,
    }
    return AgreedSettings(**{**known, **facts})


def problems_of(given: Any, **facts: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolve_config(given, run(**facts))
    return str(error.value)


# -- JSONs that users bring --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("as_file", [True, False])
def test_a_json_is_taken_unmodified_and_all_its_keys_pass_through(name: str, as_file: bool, tmp_path: Path) -> None:
    text, precision, stage = FILES[name]
    given = json.loads(text)
    (tmp_path / "ds.json").write_text(text)
    facts = run(precision=PRECISIONS[precision], stage=stage)
    read = read_config(str(tmp_path / "ds.json") if as_file else given)
    assert config_problems(read, AgreedSettings(precision=PRECISIONS[precision])) == []

    resolved = resolve_config(read, facts)

    def same(one: dict[str, Any], other: dict[str, Any]) -> None:
        for key, value in one.items():
            if isinstance(value, dict):
                same(value, other[key])
            elif value != "auto":
                assert other[key] == value
            else:
                assert isinstance(other[key], int)

    same(given, resolved)
    assert "auto" not in json.dumps(resolved)
    assert given == json.loads(text)
    assert resolved["train_batch_size"] == 24
    assert resolved["train_micro_batch_size_per_gpu"] == 4
    assert resolved["gradient_accumulation_steps"] == 3
    # Any optimizer, offloaded too: the engine gets the one of configure_optimizers.
    assert resolved["zero_allow_untested_optimizer"] is True
    assert resolved["zero_force_ds_cpu_optimizer"] is False


def test_buckets_follow_from_the_width_of_the_model_as_in_accelerate() -> None:
    zero = resolve_config(json.loads(ZERO_3), run(precision=PRECISIONS["16-mixed"]))["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert zero["stage3_param_persistence_threshold"] == 640


def test_without_a_width_they_are_deepspeeds_own() -> None:
    resolved = resolve_config(json.loads(ZERO_3), run(precision=PRECISIONS["16-mixed"], hidden_size=None))
    zero = resolved["zero_optimization"]
    assert not {"reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"} & zero.keys()


def test_what_is_resolved_is_what_deepspeed_reads(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    resolved = resolve_config(json.loads(ZERO_2), run(precision=PRECISIONS["16-mixed"], world_size=1))
    write_config(resolved, tmp_path)
    read = DeepSpeedConfig(json.loads((tmp_path / "deepspeed.json").read_text()))
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (12, 4, 3)
    assert read.gradient_clipping == 1.0
    assert read.float16_config.enabled
    assert read.zero_optimization_stage == 2


def test_a_file_with_comments_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  # ours\n  "zero_optimization": {"stage": 3,},\n}')
    assert read_config(tmp_path / "ds.json") == {"zero_optimization": {"stage": 3}}


def test_no_json_is_a_configuration_too() -> None:
    resolved = resolve_config(
        {}, run(stage=1, offload_optimizer="cpu", clip_norm=0.5, precision=PRECISIONS["bf16-mixed"])
    )
    assert resolved["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert resolved["gradient_clipping"] == 0.5
    assert resolved["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("precision", "enabled"),
    [("32-true", []), ("bf16-mixed", ["bf16"]), ("bf16-true", ["bf16"]), ("16-mixed", ["fp16"])],
)
def test_auto_precision_is_the_trainers(precision: str, enabled: list[str]) -> None:
    given = {"fp16": {"enabled": "auto", "loss_scale": "auto"}, "bf16": {"enabled": "auto"}}
    config = resolve_config(given, run(precision=PRECISIONS[precision]))
    assert [name for name in ("fp16", "bf16") if config[name]["enabled"]] == enabled
    assert "loss_scale" not in config["fp16"]


def test_a_batch_size_that_multiplies_out_says_the_micro_batch_where_the_loader_does_not() -> None:
    config = resolve_config({"train_batch_size": 24}, run(micro_batch=None))
    assert config["train_micro_batch_size_per_gpu"] == 4


# -- optimizer and scheduler -------------------------------------------------------------------------------------------


def test_the_rate_is_the_modules_even_when_a_schedule_has_begun() -> None:
    optimizer = adamw(betas=(0.8, 0.9))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9], "eps": "auto"}}}
    assert "optimizer" not in resolve_config(given, run(optimizer=optimizer))


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw", "auto"])
def test_an_optimizer_that_is_the_modules_is_no_contradiction(kind: str) -> None:
    given = {"optimizer": {"type": kind, "params": {"lr": 3e-4, "torch_adam": True}}}
    assert "optimizer" not in resolve_config(given, run())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "SGD"}, "configure_optimizers returned a AdamW"),
        ({"type": "AdamW", "params": {"lr": 1e-2}}, "lr=0.01"),
        ({"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.5}}, "weight_decay=0.5"),
    ],
)
def test_another_optimizer_than_the_modules_is_a_contradiction(section: dict[str, Any], message: str) -> None:
    assert message in problems_of({"optimizer": section})


WARMUP = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}}}


def test_a_schedule_of_autos_is_the_modules_and_is_not_given_to_the_engine() -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw(), lambda step: 1.0)
    given = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}
    assert "scheduler" not in resolve_config(given, run(schedulers=[schedule]))


def test_a_schedule_that_would_have_no_effect_is_reported() -> None:
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    optimizer = adamw()
    schedule = WarmupDecayLR(optimizer, total_num_steps=100, warmup_num_steps=10)
    of_autos = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    advice = "Return it there (from deepspeed.runtime.lr_schedules import WarmupDecayLR)"
    assert advice in problems_of(WARMUP, optimizer=optimizer, schedulers=[schedule])
    assert advice in problems_of(of_autos, optimizer=optimizer)
    assert resolve_config(of_autos, run(optimizer=optimizer, schedulers=[schedule]))
    misspelt = {"scheduler": {**of_autos["scheduler"], "type": "WarmupDecay"}}
    assert "'WarmupDecay' is not a schedule of DeepSpeed" in problems_of(
        misspelt, optimizer=optimizer, schedulers=[schedule]
    )


# -- contradictions ----------------------------------------------------------------------------------------------------


def test_all_contradictions_come_in_one_message_with_both_values() -> None:
    given = json.loads(ZERO_3)
    given |= {"train_batch_size": 60, "gradient_accumulation_steps": 2}
    given["zero_optimization"] |= {"offload_param": {"device": "nvme"}}
    text = problems_of(given, stage=2, clip_norm=0.5, precision=PRECISIONS["bf16-mixed"])
    for message in (
        "6 problems",
        "stage=3 in the DeepSpeed configuration, but the strategy has stage=2",
        "fp16.enabled=true in the DeepSpeed configuration, but the trainer has precision='bf16-mixed'",
        "gradient_accumulation_steps=2 in the DeepSpeed configuration, but accumulate_grad_batches=3",
        "train_batch_size=60 in the DeepSpeed configuration, but micro-batch 4 x window 3 x processes 2 = 24",
        "gradient_clipping=1.0 in the DeepSpeed configuration, but gradient_clip_val=0.5",
        "needs a folder: give nvme_path=",
    ):
        assert message in text


def test_all_keys_that_deepspeed_has_not_come_in_one_message() -> None:
    text = problems_of({"steps_per_pint": 1, "zero_optimization": {"stge": 3, "stage3_x": 1}, "fp16": {"on": 1}})
    for message in (
        "4 problems",
        "'steps_per_pint' is not a DeepSpeed key, and it would be ignored. Did you mean 'steps_per_print'?",
        "zero_optimization.stge=3: Extra inputs are not permitted.",
        "zero_optimization.stage3_x=1",
        "fp16.on=1",
    ):
        assert message in text


@pytest.mark.parametrize(
    ("given", "facts", "message"),
    [
        ({"fp16": {"enabled": True}}, {}, "the trainer has precision='32-true'"),
        ({"bf16": {"enabled": False}}, {"precision": PRECISIONS["bf16-mixed"]}, "bf16.enabled=false"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}, "torch_autocast"),
        ({"train_micro_batch_size_per_gpu": 8}, {}, "the DataLoader's batch_size=4"),
        ({"train_batch_size": 25}, {"micro_batch": None}, "micro-batch 4 x window 3 x processes 2 = 24"),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, {"offload_optimizer": "cpu"}, "'cpu'"),
        ({"gradient_allreduce_op": "sum"}, {}, "averages"),
        ({"zero_optimization": {"stage": 7}}, {}, "zero_optimization.stage=7"),
        ({"data_efficiency": {"enabled": True}}, {}, "it needs DeepSpeed's own data loader"),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, {}, "valid integer"),
        ({"zero_optimization": 2}, {}, "zero_optimization: "),
        ({"optimizer": "AdamW"}, {}, "optimizer: "),
        ({"train_batch_size": "8"}, {}, 'train_batch_size="8" in the DeepSpeed configuration'),
        ({"amp": {"enabled": True}}, {}, "removed"),
    ],
)
def test_a_contradiction_is_reported(given: Any, facts: dict[str, Any], message: str) -> None:
    assert message in problems_of(given, **facts)


@pytest.mark.parametrize(
    "given",
    ['{"fp16": {"enabled": tr', "[1]", '{"fp16": {}, "fp16": {}}', Path("no/such.json"), {"dtype": torch.float32}],
    ids=str,
)
def test_what_cannot_be_read_is_reported(given: Any, tmp_path: Path) -> None:
    if isinstance(given, str):
        (tmp_path / "ds.json").write_text(given)
        given = tmp_path / "ds.json"
    with raises_recorded(ConfigError):
        read_config(given)


def test_nothing_is_said_of_what_is_not_known_yet() -> None:
    given = {**json.loads(ZERO_2), "train_batch_size": 7, "optimizer": {"type": "SGD"}, **WARMUP}
    assert config_problems(given, AgreedSettings()) == []


# -- the machine, and DeepSpeed itself ---------------------------------------------------------------------------------


def test_the_keys_of_the_top_level_are_those_that_the_installed_deepspeed_reads() -> None:
    looked_up_in_other_ways = {"data_efficiency", "curriculum_learning", "torch_autocast", "optimizer", "scheduler"}
    assert {"zero_optimization", "steps_per_print", "flops_profiler", *looked_up_in_other_ways} <= known_keys()
    assert len(known_keys()) > 50
    assert key_problems({"flops_profilr": {}, "flops_profiler": {}}) == [
        "'flops_profilr' is not a DeepSpeed key, and it would be ignored. Did you mean 'flops_profiler'?"
    ]


def test_the_width_is_found_in_the_config_of_a_model_inside_the_module() -> None:
    inner, outer = torch.nn.Linear(1, 1), torch.nn.Module()
    outer.model = inner
    assert hidden_size_of(outer) is None
    inner.config = SimpleNamespace(hidden_size=32)  # type: ignore[assignment]
    assert hidden_size_of(outer) == 32
    inner.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=16))  # type: ignore[assignment]
    assert hidden_size_of(outer) == 16


@pytest.mark.parametrize("given", [None, {"timers": {"throughput": {"enabled": True}}}, {"timers": {"throughput": {}}}])
def test_the_throughput_timer_waits_for_the_device_only_if_asked(given: Any) -> None:
    config = resolve_config(given or {}, run())
    assert config["timers"]["throughput"]["enabled"] is bool(given and given["timers"]["throughput"])
