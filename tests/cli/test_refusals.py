"""Wrong command lines and configurations are refused, each in the words that messages.json has for it."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from tests.helpers.project import Command, refused
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.main import COMMANDS

NET = "module: mymodel.py:Net\n"
BARE = """
import torch
from trainer import TrainModule

class Bare(TrainModule):
    def training_step(self, batch, batch_idx): ...

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1))
"""

LINES = """\
fti
--verison
train
help ModelCheckpoin
help mymodel.py
completion bsh

fit
fit run.yaml
fit --config
fit --config rum.yaml
fit --config .
fit -c mymodel.py --dry-run --world-size 2
fit --config run.yaml --ckpt_path=
fit --config run.yaml --ckpt_path nothing --print_config
fit --config run.yaml --weights ''
fit --config run.yaml --weights nowhere
fit --config run.yaml --name=
fit --config run.yaml --print-conf
fit --config run.yaml --max_epochs 3
fit --config run.yaml --lr=3
fit --config run.yaml --trainer.max_epoch 3
fit --config run.yaml --trianer.max_epochs 3
fit --config run.yaml --trainer..seed 3
fit --config run.yaml --trainer.fast_dev_run
fit --config run.yaml --trainer.seed --print-config
fit --config run.yaml --trainer a=3
fit --config run.yaml trainer.max_epochs=3
fit --config run.yaml --module.sizes '[1'
fit --config run.yaml --seed x
fit --config run.yaml --trainer.callbacks.1.patience 3
fit --config run.yaml --trainer.logger.0.save_dir x
fit --module mymodel.py:Net --trainer.callbacks.patience 3
fit --config run.yaml --module mymodel.py:Nett
fit --config run.yaml --data.batch_size 3
fit --config run.yaml --world-size 16
fit --config run.yaml --trainer.strategy FSDPStrategy
fit --config run.yaml --trainer.strategy DDPStrategy
fit --config run.yaml --trainer.strategy zero2
fit --config list.yaml --trainer.max_epochs=1 --dry-run
fit --module mymodel.py
fit --data.help
fit --trainer.strategy.help
fit --config run.yaml --module.width '${env:}'
fit --config run.yaml --module.width '1${trainer.max_steps}'
fit --config run.yaml --module.width '${module.nothing}'
fit --config run.yaml --module.width '${module.width}'
fit --config run.yaml --module.width '${env:NOT_SET_ANYWHERE}'
fit --module=builtins.object
fit --module=os.getcwd
fit --module=odd.py:lie

fit --module bare.py:Bare
fit --module mymodel.py:Net --optimizer SGD
fit --module bare.py:Bare --optimizer Adamw
fit --module bare.py:Bare --optimizer SGD --optimizer.learning_rate=1
fit --module bare.py:Bare --optimizer torch.nn.Linear
fit --module bare.py:Bare --lr_scheduler StepLR
fit --module bare.py:Bare --optimizer SGD --lr_scheduler StepLR
fit --module bare.py:Bare --optimizer SGD --lr-scheduler StepLr

fit --config run.yaml --dry-run
fit --config run.yaml --dry-run --world-size 0
fit --config run.yaml --dry-run --world-size x
fit --config run.yaml --dry-run --worldsize 8
fit --config run.yaml --dry-run --world-size 12 --nproc-per-node 8
fit --config run.yaml --dry-run --world-size 12 --trainer.devices 5
fit --config run.yaml --dry-run --world-size 8 --trainer.max_epoch 3 --module.widht 3
fit --config run.yaml --dry-run --world-size 8 --module.widht 3 --module.nmae x
fit --config run.yaml --dry-run --world-size 8 --trainer.accelerator gpus

fit --config run.yaml --ray num_worker=2 use_gpu resources_per_worker=2 --trainer.max_step 3
fit --config run.yaml --ray num_workers=2 storage_path=s3://bucket/runs
validate --config run.yaml --ray num_workers=2
validate --config run.yaml --ckpt-path best

tune lrs
tune lr
tune lr --config run.yaml --steps many
tune lr --config run.yaml --stepz 3
tune lr --config run.yaml --min-lr 2
tune batch-size --config run.yaml --memory-limit much
tune batch-size --config run.yaml --name size
tune batch-size --config run.yaml --mode fast

init
init new
init --template digits
init --template digit new
init --template ../digits new
init --template gpt mymodel.py
init --template gpt .
init --template gpt mymodel.py/new
init --template gpt new newer

config --preset zero4
config --preset cpu
config --preset cpu --output x.json
config --preset cpu --output nowhere/x.yaml
config --preset cpu --from x.json
config --output -
config --from nowhere.json
config --from run.yaml --output new.yaml
config --pressed cpu

doctor --module mymodel.py:Net --trainer.max_epoch 3
doctor --devices 0
doctor --jsn

plan --params 7b
estimate
estimate 7B
estimate --params 7e9 --config run.yaml
estimate --params seven
estimate --params 0
estimate --params 1e999
estimate --parms 7e9
estimate --params 7e9 --precision bf15
estimate --params 7e9 --devices 0
estimate --params 7e9 --vocabulary 900000 --hidden 4096
estimate --params 7e9 --gpus 8
estimate --params 7e9 --gpus 8 --memory 80
estimate --params 7e9 --gpus 8 --memory 80G
estimate --config wrong.json --module.width 3
estimate --config wrong.json --gpus 8 --memory 80G --sequence 4k
estimate --config no.yaml
estimate --module bare.py:Bare

runs
runs list
runs ls nowhere
runs ls empty
runs ls runs --sort scor
runs ls runs --sort
runs ls runs --filter score
runs ls runs --metric scor
runs ls runs --hparam module.rl
plot nowhere
plot runs/version_1
plot runs/version_0/hparams.json
plot runs/version_O
plot runs --metric scor
plot runs --output taken.png
plot runs --output curves.gif
plot runs --output nowhere/curves.png
plot runs --smooth 1

checkpoint
checkpoint lst x
checkpoint ls
checkpoint ls nowhere
checkpoint ls runs --metric val_los
checkpoint ls runs --jsno
checkpoint show runs/version_O
checkpoint show runs/version_0 --ckpt bets
checkpoint show runs/version_0/checkpoints/step=10 --ckpt best
checkpoint show runs/version_0/checkpoints/best --ckpt last
checkpoint show empty
checkpoint verify mymodel.py
checkpoint verify empty
checkpoint import nowhere.ckpt new
checkpoint export runs/version_0 new --dtype bf17
checkpoint export runs/version_0 empty
checkpoint export runs/version_0 run.yaml
checkpoint export runs/version_0 w.pt
checkpoint export runs/version_0 w.safetensors --prefix nett.
checkpoint export runs/version_0 no/such.safetensors
checkpoint export runs/version_0 new --max-shard-size x
checkpoint export runs/version_0 new --max_shard_size much
checkpoint export runs/version_0 empty --max-shard-size 5GB --force
checkpoint export runs/version_0 new --hf

launch
launch gone.py
launch mypackage.train
launch --num_processes 2 mymodel.py
launch --master-addr a mymodel.py
launch --main_process_ip a --main_process_port 1 mymodel.py
launch --main_process_port=1 mymodel.py
launch --num_machines 2 mymodel.py
launch --multi_gpu mymodel.py
launch --config_file a.yaml mymodel.py
launch --mixed_precision bf16 mymodel.py
launch --rdzv-backend etcd mymodel.py
launch --print mymodel.py
launch --nodes 2 --partition gpu mymodel.py
launch --nproc-per-nod 2 mymodel.py
launch --devices 2 mymodel.py
launch --gpus=2 mymodel.py
launch --nproc-per-node two mymodel.py
launch --nnodes 2 mymodel.py
launch --nnodes 4:2 --rdzv a:1 mymodel.py
launch --nnodes 2 --rdzv a:b mymodel.py
launch --nnodes 2 --rdzv a --node-rank 2 mymodel.py
launch --rdzv-conf wait=3 mymodel.py
launch --max-restarts -1 mymodel.py
launch --slurm mymodel.py
launch --slurm --print --nodes 0 mymodel.py
launch --slurm --print --rdzv a:1 mymodel.py
"""


@pytest.fixture
def folder(project: Path) -> Path:
    """Return the folder in which the lines are typed: configurations, a run with a checkpoint, one with nothing."""
    (project / "run.yaml").write_text(NET + "trainer:\n  callbacks: [mymodel.Watcher]\n")
    (project / "list.yaml").write_text(NET + "trainer: [{max_steps: 1}]\n")
    (project / "wrong.json").write_text('{"model_type": "nonsense"}')
    (project / "bare.py").write_text(BARE)
    (project / "odd.py").write_text("lie = 3\ndef __getattr__(name):\n    raise RuntimeError('not here')\n")
    for name in ("empty", "taken.png", "runs/version_1/checkpoints"):
        (project / name).mkdir(parents=True)
    run = project / "runs" / "version_0"
    write_checkpoint(run / "checkpoints" / "step=10", {"model": {}}, info={"step": 10, "metrics": {"score": 1.0}})
    CheckpointDirectory(run / "checkpoints").set_pointer("last", "step=10")
    (run / "hparams.json").write_text(json.dumps({"module": {"lr": 0.1}}))
    (run / "metrics.csv").write_text("step,score\n10,1.0\n")
    return project


@pytest.mark.parametrize("line", ["", *filter(None, LINES.splitlines())])
def test_a_wrong_command_line(line: str, folder: Path, command: Command) -> None:
    before = sorted(folder.rglob("*"))
    refused(command, *shlex.split(line))
    assert sorted(folder.rglob("*")) == before, "it has written something"


def net(*arguments: str) -> str:
    """Return the configuration of a Net with these arguments, from line 4 on."""
    lines = ["module:", "  class_path: mymodel.py:Net", "  init_args:", *(f"    {argument}" for argument in arguments)]
    return "\n".join(lines) + "\n"


def callbacks(*items: str) -> str:
    """Return the configuration of a Net with these callbacks, from line 4 on."""
    return NET + "trainer:\n  callbacks:\n" + "".join(f"  - {item}\n" for item in items)


FILES = {
    "top": NET + "modul: x\n",
    "top setting": NET + "seed: 3\n",
    "trainer": NET + "trainer:\n  max_epocs: 3\n",
    "module": net("lrr: 3"),
    "data": NET + "data:\n  class_path: mymodel.py:Data\n  init_args:\n    bs: 3\n",
    "init_args": "module:\n  class_path: mymodel.py:Net\n  init_arg: {}\n",
    "callback": callbacks("{class_path: mymodel.py:Watcher, init_args: {patince: 3}}"),
    "strategy": NET + "trainer:\n  strategy:\n    name: ddp\n    find_unused: true\n",
    "nested object": net("encoder: {class_path: mymodel.Encoder, init_args: {sise: 3}}"),
    "nested dataclass": net("layers:", "  width: 3", "  dept: 3"),
    "argument of Lightning": NET + "trainer:\n  barebones: true\n",
    "float for int": NET + "trainer: {max_epochs: 2.5}\n",
    "text for int": NET + "trainer:\n  max_epochs: '3'\n",
    "bool for int": NET + "trainer: {seed: true}\n",
    "yes for bool": net("flag: yes"),
    "null for text": net("name: null"),
    "choice": NET + "trainer: {gradient_clip_algorithm: nrm}\n",
    "enum": net("color: blue"),
    "list item": net("sizes:", "- 1", "- two"),
    "mapping key": net("steps: {a: 1}"),
    "list for int": net("width: [1]"),
    "trainer itself": NET + "trainer: 3\n",
    "object": callbacks("3"),
    "wrong object": callbacks("mymodel.Net"),
    "class of nested object": net("kind: mymodel.Net"),
    "strategy name": NET + "trainer:\n  strategy: dpd\n",
    "precision name": NET + "trainer:\n  precision: bf17\n",
    "callback name": callbacks("EarlyStoping"),
    "logger name": NET + "trainer:\n  logger: CVSLogger\n",
    "callback as key": callbacks("EarlyStopping: {monitor: x}"),
    "callback's value": callbacks("class_path: EarlyStopping\n    init_args:\n      monitor: x\n      patience: 0"),
    "negative": NET + "trainer:\n  seed: 1\n  max_steps: -7\n",
    "contradiction": NET + "trainer:\n  min_epochs: 5\n  max_epochs: 1\n",
    "accelerator": NET + "trainer:\n  accelerator: gup\n",
    "auto with arguments": NET + "trainer:\n  strategy: {name: auto, timeout_seconds: 3}\n",
    "checkpoint": NET + "ckpt_path: lats\n",
    "no module": "trainer: {max_epochs: 1}\n",
    "null module": "module:\n",
    "number as module": "module: 3\n",
    "no class": "module: {init_args: {lr: 1}}\n",
    "bare name": "module: Net\n",
    "no file": "module: mymodul.py:Net\n",
    "no class in file": "module: mymodel.py:Ne\n",
    "no package": "module: nopackage.Net\n",
    "no module in package": "module: trainer.modul.TrainModule\n",
    "no folder": "module: mymodel:Net\n",
    "function": "module: mymodel.py:make_net\n",
    "not a module": "module: mymodel.py:Encoder\n",
    "data is no data": NET + "data: mymodel.py:Net\n",
    "abstract": "module: mymodel.py:Abstract\n",
    "missing arguments": "module:\n  class_path: mymodel.py:Needy\n  init_args: {}\n",
    "missing argument of a callback": callbacks("EarlyStopping"),
    "constructor raises": "module: mymodel.py:Failing\n",
    "key twice": net("lr: 1", "width: 2", "lr: 2"),
    "argument twice": "module:\n  class_path: mymodel.py:Net\n  lr: 1\n  init_args: {lr: 2}\n",
    "init_args of no mapping": "module:\n  class_path: mymodel.py:Net\n  init_args: 3\n",
}


@pytest.mark.parametrize("name", FILES)
def test_one_mistake_in_a_file(name: str, command: Command) -> None:
    Path("run.yaml").write_text(FILES[name])
    refused(command, "fit", "--config", "run.yaml")


IMPORTS = {
    "import error": "import os\nimport no_such_thing\n",
    "syntax error": "x = 1\ndef f(:\n",
    "exception": "f = lambda: 1 / 0\nraise RuntimeError('no\\nGPU')\n",
    "inside a library": "import json\njson.loads('{')\n",
    "exit": "import sys\nsys.exit('bye')\n",
    "of a neighbour": "from layers import X\n",
}


@pytest.mark.parametrize("written", ["bad.py:Net", "bad.Net"])
@pytest.mark.parametrize("name", IMPORTS)
def test_a_class_that_cannot_be_imported_shows_its_own_error(name: str, written: str, command: Command) -> None:
    Path("layers.py").write_text("\n\nimport no_such_thing\n")
    Path("bad.py").write_text(IMPORTS[name])
    Path("run.yaml").write_text(f"module: {written}\n")
    said = refused(command, "fit", "--config", "run.yaml")
    assert (f"{Path.cwd()}/layers.py:3: " if name == "of a neighbour" else f"{Path.cwd()}/bad.py:2: ") in said


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_long_word_is_shortened_in_the_error(command: Command, name: str) -> None:
    _, out, err = command(*filter(None, [name, "x" * 50_000]))
    assert len(out) + len(err) < 3000


TOO_LONG = (
    *("estimate --params 7B --nproc-per-node NINES", "launch --nproc-per-node NINES train.py"),
    *("launch --nnodes NINES train.py", "launch --max-restarts NINES train.py"),
    *("launch --nnodes 2 --rdzv host:NINES train.py", "launch --slurm --print --nodes NINES train.py"),
    *("fit --config NINES.yaml", "fit --module NINES", "fit --module NINES.Net"),
)


@pytest.mark.parametrize("line", TOO_LONG)
def test_arguments_that_are_too_long(line: str, command: Command) -> None:
    Path("train.py").write_text("")
    refused(command, *line.replace("NINES", "9" * 5000).split())


@pytest.mark.parametrize(
    ("module", "command_to_type"),
    [("sklearn.datasets", "pip install scikit-learn"), ("wandb", 'pip install "wandb>=0.20"'), ("nosuch", "nosuch")],
)
def test_a_package_that_a_users_file_misses_is_named_in_one_line(
    module: str, command_to_type: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = module.partition(".")[0]
    error = f"ModuleNotFoundError(\"No module named '{top}'\", name='{top}')"
    found = importlib.util.find_spec
    monkeypatch.setattr("trainer.errors.find_spec", lambda name: None if name == top else found(name))
    Path("top.py").write_text(f"raise {error}\n")
    code, _, err = command("fit", "--module", "mymodel.py:Net", "--data", "top.py:D")
    last = err.splitlines()[-1]
    assert code == 2
    assert f"ModuleNotFoundError: No module named '{top}'. " in last
    assert last.endswith(command_to_type)
    assert "Traceback" not in err


def test_all_mistakes_come_at_once_file_by_file_from_top_to_bottom(command: Command) -> None:
    """But unknown keys and files that are not there come before what needs an import."""

    def places(*arguments: str) -> list[str]:
        said = refused(command, "fit", "--config", "base.yaml", *arguments)
        return [line[4:].split(": ")[0] for line in said.splitlines()[1:]]

    wrong = net("lrr: 1", "width: x") + "trainer:\n  strategy: dpd\n  precision: x\n"
    Path("base.yaml").write_text(wrong)
    Path("more.yaml").write_text("trainer:\n  max_steps: 2.5\n  seed: -1\n")
    expected = ["command line"] + [f"base.yaml:{n}" for n in (4, 5, 7, 8)] + [f"more.yaml:{n}" for n in (2, 3)]
    assert places("more.yaml", "--trainer.max_epochs", "{}") == expected
    Path("base.yaml").write_text(wrong + "  max_epocs: 3\n")
    assert places("none.yaml", "--lr", "3", "--trainer.max_epoch", "3") == ["command line"] * 2 + [
        "base.yaml:9",
        "none.yaml",
    ]


def test_an_error_of_the_run_has_no_traceback(command: Command) -> None:
    refused(command, "fit", "--module", "mymodel.py:Net", "--trainer.max_steps", "1")


def test_several_unreadable_files_are_reported_together(command: Command) -> None:
    Path("a.yaml").write_text("x: [1\n")
    Path("b.json").write_text("{\n")
    refused(command, "fit", "--config", "a.yaml", "b.json", "c.toml")


def test_only_one_process_of_a_machine_speaks(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command("fit", "--config", "nothing.yaml") == (2, "", "")
    monkeypatch.delenv("RANK")  # left over from another program: this is the only process
    assert "nothing.yaml" in command("fit", "--config", "nothing.yaml")[2]


def test_a_file_with_very_many_mistakes_gives_a_short_message(command: Command) -> None:
    Path("many.yaml").write_text(NET + "trainer:\n" + "".join(f"  argument_{number}: 1\n" for number in range(5000)))
    refused(command, "fit", "--config", "many.yaml")
