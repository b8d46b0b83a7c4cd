"""`trainer config --from`: other programs' files, with an account of every key."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest
import yaml

from tests.helpers.accelerate_files import ACCELERATE, COMMON, DEEPSPEED
from tests.helpers.config_files import HERE, accepted, trainer_section
from tests.helpers.project import Command, assert_recorded, done, refused
from trainer.callbacks import CALLBACKS
from trainer.cli.config.command import translate
from trainer.precision import resolve_precision
from trainer.strategies import STRATEGIES

FILES = {**ACCELERATE, **DEEPSPEED}


@pytest.fixture
def foreign(project: Path) -> Path:
    """Return a folder with all files of other programs."""
    for name, text in FILES.items():
        (project / name).write_text(text)
    return project


def keys_of(name: str) -> set[str]:
    """Return every key, with the sections before it."""
    data = yaml.safe_load(FILES[name])
    inner = {
        f"{key}.{child}": value
        for key, section in data.items()
        if isinstance(section, dict)
        for child, value in section.items()
    }
    nested = {f"{key}.{child}" for key, section in inner.items() if isinstance(section, dict) for child in section}
    plain = {key for key, value in {**data, **inner}.items() if not isinstance(value, dict)}
    return plain | nested


@pytest.mark.parametrize("name", FILES)
def test_no_key_is_dropped_and_fit_takes_the_result(command: Command, foreign: Path, name: str) -> None:
    if name == "fp8.yaml":
        pytest.importorskip("torchao")
    code, out, err = command("config", "--from", name)
    assert (code, err) == (0, "")
    assert {row.key for row in translate(name).entries} >= keys_of(name)
    for key in keys_of(name):
        assert f"  {key}: " in out
    assert_recorded(f"{out}\n{Path('run.yaml').read_text()}")
    accepted(command, "run.yaml", HERE)


def report_of(command: Command, name: str) -> dict[str, str]:
    """Return the report's explanation of each key."""
    assert command("config", "--from", name, "--force")[0] == 0
    return {row.key: f"{row.kind}: {row.message}" for row in translate(name).entries}


def test_what_deepspeed_does_not_read_is_not_taken_over(command: Command, project: Path) -> None:
    pytest.importorskip("deepspeed")
    (project / "ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 2, "contigous_gradients": True, "overlap_comm": False},
                "gradient_cliping": 1.0,
                "gradient_clipping": 0.5,
                "comms_config": {"verbose": True},
                "compile": {"backend": "inductor"},
                "fp8": {"enabled": True},
            }
        )
    )
    rows = report_of(command, "ds.json")
    for key in (
        "zero_optimization.contigous_gradients",
        "gradient_cliping",
        "comms_config.verbose",
        "compile.backend",
        "fp8.enabled",
    ):
        assert rows[key].startswith("to do by hand"), key
    assert "Did you mean 'gradient_clipping'" in rows["gradient_cliping"]
    strategy = trainer_section("run.yaml")["strategy"]["init_args"]
    assert strategy == {"config": {"zero_optimization": {"overlap_comm": False}}}
    accepted(command, "run.yaml", HERE)


@pytest.mark.parametrize(
    "text",
    [
        "mixed_precison: bf16",
        "num_processes: 3\nnum_machines: 2",
        "distributed_type: MULTI_NPU",
        "distributed_type: FSDP\nfsdp_config: {fsdp_shardng_strategy: 1}",
        "fsdp_config: {fsdp_offload_params: true}",
        "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: two}",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 7}",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: x}",
        # beside a file that is named, and says otherwise
        "mixed_precision: 'no'\ndistributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero2.json}",
        "mixed_precision: bf16\ndistributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero2.json}",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero2.json, zero_stage: 3}",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero2.json, gradient_clipping: 2}",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero2.json, offload_param_device: cpu}",
    ],
)
def test_odd_values_are_reported(command: Command, foreign: Path, text: str) -> None:
    lines = [line for line in COMMON.splitlines() if line.split(":")[0] not in text]
    Path("odd.yaml").write_text("\n".join([*lines, text]) + "\n")
    out, _ = done(command("config", "--from", "odd.yaml"))
    assert_recorded(f"{out}\n{Path('run.yaml').read_text()}")
    accepted(command, "run.yaml", HERE)


def test_no_shard_keeps_no_arguments_of_the_other_strategy(command: Command) -> None:
    section = "fsdp_config: {fsdp_offload_params: true, fsdp_sharding_strategy: NO_SHARD}"
    Path("no.yaml").write_text(f"{COMMON}{section}\ndistributed_type: FSDP\nnum_processes: 2\n")
    assert command("config", "--from", "no.yaml")[0] == 0
    assert trainer_section("run.yaml")["strategy"] == "ddp"
    accepted(command, "run.yaml")


def test_a_json_without_a_stage_means_stage_0(command: Command) -> None:
    Path("small.json").write_text(json.dumps({"train_batch_size": 8, "fp16": {"enabled": True}}))
    rows = report_of(command, "small.json")
    assert "strategy: ddp, as DeepSpeed's stage is 0" in rows["zero_optimization.stage"]
    assert trainer_section("run.yaml")["strategy"] == "ddp"


def test_what_deepspeed_does_besides_training_has_its_name_here(command: Command) -> None:
    sections = ("tensorboard", "csv_monitor", "wandb", "comet", "pipeline", "tensor_parallel")
    text = {"zero_optimization": {"stage": 1}, **{name: {"enabled": True} for name in sections}}
    Path("monitors.json").write_text(json.dumps(text))
    rows = report_of(command, "monitors.json")
    loggers = {"tensorboard": "TensorBoardLogger", "csv_monitor": "CSVLogger", "wandb": "WandbLogger"}
    for name, logger in loggers.items():
        assert rows[f"{name}.enabled"].startswith(f"left out: trainer.logger: {logger}")
        assert logger in CALLBACKS
    assert rows["comet.enabled"] == "to do by hand: write a Logger of your own for it: a class with log_metrics"
    for name, argument in {"pipeline": "pipeline_parallel", "tensor_parallel": "tensor_parallel"}.items():
        assert f"strategy: fsdp has {argument}" in rows[f"{name}.enabled"]
        assert argument in signature(STRATEGIES["fsdp"]).parameters


def test_optimizer_and_schedule_go_into_the_module(command: Command) -> None:
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": 4,
        "data_efficiency": {"enabled": True},
    }
    Path("ds.json").write_text(json.dumps(sections))
    rows = report_of(command, "ds.json")
    assert "torch.optim.AdamW(self.parameters(), lr=3e-05, betas=[0.9, 0.95])" in rows["optimizer.type"]
    assert '"interval": "step"' in rows["scheduler.type"]
    assert "optimizer.params.weight_decay" in rows
    assert rows["data_efficiency.enabled"].startswith("to do by hand")
    strategy = trainer_section("run.yaml")["strategy"]
    assert strategy["init_args"] == {"config": {"train_micro_batch_size_per_gpu": 4}}


def test_deepspeed_itself_takes_what_was_translated(command: Command, foreign: Path) -> None:
    pytest.importorskip("deepspeed")
    for name in (*DEEPSPEED, "plugin.yaml", "with_json.yaml"):
        report_of(command, name)
        section = trainer_section("run.yaml")
        chosen = section["strategy"]
        strategy = STRATEGIES[chosen["class_path"]](**chosen["init_args"])
        assert strategy.problems(resolve_precision(section["precision"]), "cuda", 4) == [], name


@pytest.mark.parametrize("name", ["gpus.yaml", "zero2.json"])
def test_fit_says_what_to_do_with_it(command: Command, foreign: Path, name: str) -> None:
    refused(command, "fit", "--config", name, "--trainer.max_epochs", "1")
