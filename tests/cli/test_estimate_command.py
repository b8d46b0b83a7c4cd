"""`trainer estimate`: from a number of parameters, and from a configuration without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run_python
from tests.helpers.project import Command

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
    code, out, err = command("estimate", *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def row(found: dict[str, Any], processes: int, word: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = found["processes"][str(processes)]
    return next(row for row in rows if word in row["label"])


# -- from a number -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--params", "7B", "--zero"]])
def test_help_and_the_table_of_the_paper_need_no_torch(arguments: list[str]) -> None:
    result = run_python(
        "import sys\nfor name in ('torch', 'numpy', 'pydantic'):\n    sys.modules[name] = None\n"
        "from trainer.__main__ import main\nsys.exit(main())\n",
        "estimate",
        *arguments,
    )
    result.check()
    assert result.stdout


def test_the_table_of_the_zero_paper_with_and_without_master_weights(command: Command) -> None:
    code, out, _ = command("estimate", "--params", "7e9", "--devices", "4", "--zero")
    assert code == 0
    lines = {line[:26].strip(): line[26:].split() for line in out.splitlines()}
    assert lines["without master weights"] == ["84.00", "42.00", "31.50", "21.00"]
    assert lines["all"] == ["112.00", "49.00", "38.50", "28.00"]


def test_a_table_for_every_number_of_devices(command: Command) -> None:
    code, out, _ = command("estimate", "--params", "7e9", "--devices", "1", "4", "--precision", "bf16")
    assert code == 0
    assert "on each of 1 processes" in out
    assert "on each of 4 processes" in out
    lines = [line.split() for line in out.splitlines() if "fsdp, xla_fsdp" in line]
    assert [line[-3] for line in lines] == ["112.00", "28.00"]
    assert "activations are not counted" in out
    assert "--layers" in out


@pytest.mark.parametrize(("text", "number"), [("7e9", 7_000_000_000), ("7B", 7_000_000_000), ("350M", 350_000_000)])
def test_numbers_are_written_as_people_do(command: Command, text: str, number: int) -> None:
    assert estimated(command, "--params", text)["parameters"] == number


def test_the_unit_is_that_of_the_model_not_of_buckets(command: Command) -> None:
    _, printed, _ = command("estimate", "--params", "1e6", "--devices", "1")
    assert "host  MB" in printed
    assert "2,000.00" in printed  # of DeepSpeed's bucket


def test_frozen_parameters_have_no_gradients(command: Command) -> None:
    found = row(estimated(command, "--params", "8e9", "--trainable", "20e6", "--devices", "1"), 1, "ddp")
    assert (found["weights"], found["gradients"]) == (32 * 10**9, 80 * 10**6)


def test_machines_and_the_hybrid_layout(command: Command) -> None:
    found = estimated(command, "--params", "8e9", "--devices", "4", "--num-nodes", "2")
    assert row(found, 8, "HYBRID")["weights"] == 8 * 10**9
    assert row(found, 8, "fsdp, xla_fsdp")["weights"] == 4 * 10**9


def test_activations_are_an_estimate_and_say_their_assumptions(command: Command) -> None:
    sizes = ["--layers", "32", "--hidden", "4096", "--sequence", "2048", "--batch", "1"]
    code, out, _ = command("estimate", "--params", "7e9", *sizes, "--precision", "bf16-mixed")
    assert code == 0
    assert "activations, an estimate: 9.66 GB" in out
    assert "fused attention, no dropout" in out
    few = estimated(command, "--params", "7e9", *sizes, "--checkpointing")["activations"]
    assert few < 0.1 * estimated(command, "--params", "7e9", *sizes)["activations"]


def test_one_strategy(command: Command) -> None:
    found = estimated(command, "--params", "7e9", "--strategy", "deepspeed_stage_2")
    assert [row["label"] for row in found["processes"]["8"]] == [
        "deepspeed, deepspeed_stage_2",
        "deepspeed_stage_2_offload",
    ]
    assert len(estimated(command, "--params", "7e9", "--strategy", "fsdp")["processes"]["8"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--params 7e9"),
        ("--params 7e9 --config run.yaml", "either a configuration"),
        ("--params seven", "write 7e9, 7B or 350M"),
        ("--params 0", "write 7e9, 7B or 350M"),
        ("--parms 7e9", "Did you mean '--params'?"),
        ("--params 7e9 --strategy deepspeed_stage_4", "Did you mean 'deepspeed_stage_"),
        ("--params 7e9 --precision bf15", "unknown precision 'bf15'"),
        ("--params 7e9 --optimizer adamww", "Did you mean 'AdamW'?"),
        ("--params 7e9 --devices 0", "give a number from 1"),
        ("--params 7e9 --trainable 8e9", "more than --params"),
        ("--config no.yaml", "no.yaml"),
    ],
)
def test_mistakes_name_the_fix(command: Command, arguments: str, message: str) -> None:
    code, out, err = command("estimate", *arguments.split())
    assert (code, out) == (2, "")
    assert message in err


# -- from a configuration ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nets")
def test_a_configuration_is_counted_without_memory(command: Command) -> None:
    Path("run.yaml").write_text(
        "module: nets.py:Big\ntrainer: {devices: 2, precision: bf16-mixed, strategy: ddp, accelerator: cuda}\n"
    )
    code, out, err = command("estimate", "--config", "run.yaml")
    assert code == 0, err
    assert "Big: 100,130,000 parameters in 3 tensors, 30,000 of them frozen" in out
    assert "100,000 of them trained by no optimizer, 1 tied; 28 bytes of buffers" in out
    assert "SGD (1 numbers for each parameter)" in out
    assert "on each of 2 processes" in out
    assert "\n* ddp, single_device, xla " in out

    found = row(estimated(command, "--config", "run.yaml"), 2, "ddp")
    assert found["weights"] == 4 * 100_130_000 + 28
    assert found["gradients"] == 4 * 100_100_000
    assert found["optimizer"] == 4 * 100_000_000


@pytest.mark.usefixtures("nets")
def test_values_of_the_configuration_can_be_changed(command: Command) -> None:
    found = estimated(
        command, "--module", "nets.py:Big", "--module.width", "10", "--devices", "3", "--optimizer", "adam"
    )
    assert found["parameters"] == 10 * 10 + 10 * 10 + 30
    assert found["optimizer"]["per_element"] == 2
    # The optimizer is named on the command line, so all parameters that train are assumed to be in it.
    assert row(found, 3, "ddp")["optimizer"] == 4 * 2 * 200 + 4 * 2


@pytest.mark.usefixtures("nets")
def test_the_strategy_of_the_configuration_counts_with_its_options(command: Command) -> None:
    given = ["--module", "nets.py:Big", "--trainer.strategy", "fsdp", "--trainer.strategy.sharding_strategy"]
    _, out, _ = command("estimate", *given, "SHARD_GRAD_OP")
    assert [line.split()[1:3] for line in out.splitlines() if line.startswith("* fsdp")] == [["fsdp", "SHARD_GRAD_OP"]]
    _, out, _ = command("estimate", *given, "SHARD_GRAD_OP", "--trainer.strategy.cpu_offload", "true")
    assert "\n* fsdp as given " in out


@pytest.mark.usefixtures("nets")
def test_what_cannot_be_asked_is_assumed_and_said(command: Command) -> None:
    code, out, err = command("estimate", "--module", "nets.py:Looks")
    assert code == 0, err
    assert "the module was built in memory" in out
    assert "configure_optimizers cannot be asked here (ValueError: no data here); AdamW is assumed" in out


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(("name", "message"), [("Empty", "has no parameters"), ("Lazy", "lazy layers")])
def test_modules_that_cannot_be_counted(command: Command, name: str, message: str) -> None:
    code, _, err = command("estimate", "--module", f"nets.py:{name}")
    assert code == 2
    assert message in err
    assert "--params" in err


def test_the_sizes_of_a_transformer_are_found_in_the_module(command: Command) -> None:
    root = Path(__file__).parents[2]
    found = estimated(command, "--config", str(root / "examples" / "gpt" / "config.yaml"), "--devices", "1")
    assert found["parameters"] == 363_840
    tokens, width, layers = 64 * 16, 96, 3
    assert found["activations"] == layers * tokens * width * 16 * 4 + tokens * 256 * 4
