"""Checkpoints with changed content and right checksums are refused with a message or train on, and do nothing else."""

from __future__ import annotations

import copy
import json
import logging
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from tests.checkpoint.conftest import reseal
from tests.helpers.toy import loader
from tests.tiers import Inputs
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import CSVLogger, EarlyStopping, JSONLLogger, ModelCheckpoint, TensorBoardLogger, Timer
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.flat_slice import FlatSlice
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.shards import Shard
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.checkpoint.command import run as checkpoint_command
from trainer.errors import CheckpointError, TrainerError

MEMORY = 1 << 30
"""Bytes that a checkpoint of a few kilobytes may make the process reserve."""
HANGS_S = 300

# -- the trainings whose checkpoints are changed -----------------------------------------------------------------------


class Net(TrainModule):
    """Dropout, BatchNorm and a metric of torchmetrics; the optimizer and the scheduler are those of `kind`."""

    def __init__(self, kind: str = "adamw", width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        prediction = self.layers(batch[0])
        self.error(prediction, batch[1])
        self.log("error", self.error, on_epoch=True)
        loss = nn.functional.mse_loss(prediction, batch[1])
        self.log("loss", loss, on_epoch=True)
        self.log("number", 0.5, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        schedulers = torch.optim.lr_scheduler
        if self.kind == "adamw":
            adamw = torch.optim.AdamW(self.parameters(), lr=1e-3, amsgrad=True)
            step = {"scheduler": schedulers.CosineAnnealingLR(adamw, 50), "interval": "step"}
            return [adamw], [step, {"scheduler": schedulers.ReduceLROnPlateau(adamw), "monitor": "val_loss"}]
        sgd = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        parts = [schedulers.LinearLR(sgd, 0.1, total_iters=4), schedulers.StepLR(sgd, 10)]
        return [sgd], [{"scheduler": schedulers.SequentialLR(sgd, parts, milestones=[3]), "interval": "step"}]


class Counting:
    """An iterable with a state of its own."""

    def __init__(self) -> None:
        self.batches, self.position = list(loader(8)), 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])


class StopAfter(Callback):
    """Stop after some more steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_train_step_end(self, trainer: Trainer, module: Any) -> None:
        self.left -= 1
        if self.left <= 0:
            trainer.stop("enough")


def run(kind: str, root: Path, steps: int) -> tuple[Trainer, Callable[..., None]]:
    """Return a trainer for some more steps, and its `fit`, which takes `ckpt_path`."""
    callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(filename="{step}", monitor="val_loss", save_top_k=2)]
    loggers = [CSVLogger(), TensorBoardLogger(), JSONLLogger()]
    trainer = Trainer(
        callbacks=[*callbacks, Timer(), StopAfter(steps)],
        logger=loggers,
        default_root_dir=root,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=100,
    )
    data = loader(8, shuffle=True) if kind == "adamw" else Counting()
    return trainer, lambda **more: trainer.fit(Net(kind), data, loader(2), **more)


@pytest.fixture(scope="module")
def originals(memory_folder: Path) -> dict[str, Path]:
    """Return the run directories: stopped inside the second epoch, and one checkpoint with its tensors in parts."""
    runs = {}
    for kind in ("adamw", "sgd"):
        trainer, fit = run(kind, memory_folder / kind, 11)
        fit()
        runs[kind] = trainer.run_dir
    runs["sharded"] = memory_folder / "sharded" / "version_0"
    shutil.copytree(runs["adamw"], runs["sharded"])
    for path in CheckpointDirectory(runs["sharded"] / "checkpoints").list():
        assert isinstance(path, Path)
        state = read_checkpoint(path)
        parts = {name: _shard(value) for name, value in state["model"].items() if value.dim()}
        info = json.loads((path / "manifest.json").read_text())["info"]
        write_checkpoint(path, {**state, "model": {**state["model"], **parts}}, info=info, overwrite=True)
    return runs


def _shard(value: torch.Tensor) -> Shard:
    return Shard(value, tuple(value.shape), FlatSlice(0, value.numel()))


# -- the changes -------------------------------------------------------------------------------------------------------

KeyPath = tuple[Any, ...]

NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 7, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.5, 1e308, -1e308, 1e-320),
    *({"$float": name} for name in ("nan", "inf", "-inf")),
    {"$int": "0x" + "f" * 2000},
]
TEXTS = [
    *("", "a", "x" * 100_000, "..", "../../../victim", "/etc/passwd", "\0", "\x1b[2J", "ünï\ud800", "$tensor", "step"),
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], {"a": 1}, {"$tuple": []}, {"$items": [[1, 2]]}]


def anything(rng: Random, tree: Any) -> Any:
    """Return a value that may stand anywhere, or one of the tree."""
    kind = rng.randrange(6)
    if kind == 0:
        return copy.deepcopy(at(tree, rng.choice(list(paths(tree)))))
    if kind == 1:
        nested: Any = rng.choice(NUMBERS)
        for _ in range(rng.choice([1, 50, 99, 101, 300, 3000])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    if kind == 2:
        name, dtype = rng.choice(["layers.0.weight", "victim"]), rng.choice(["float32", "bool", "complex64", "object"])
        reference = {"$tensor": name, "dtype": dtype, "shape": [rng.choice([0, 1, 3, 2**40]) for _ in range(3)]}
        if rng.random() < 0.5:
            reference["parts"] = [[rng.choice([0, 1]), 0, rng.choice([1, 12, 2**40]), 0, 1] for _ in range(2)]
        return reference
    return copy.deepcopy(rng.choice([NUMBERS, TEXTS, OTHERS][kind - 3]))


def paths(tree: Any, here: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all values, but for those that a change has put very deep."""
    yield here
    if len(here) > 30:
        return
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        yield from paths(value, (*here, key))


def at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def change(rng: Random, tree: Any) -> None:
    """Change one value: another number, type, key or place."""
    # By depth first: a few long lists would have most of the values.
    by_depth: dict[int, list[KeyPath]] = {}
    for path in paths(tree):
        by_depth.setdefault(len(path), []).append(path)
    if len(by_depth) == 1:
        return  # nothing is left
    *above, key = rng.choice(by_depth[rng.choice([depth for depth in by_depth if depth])])
    parent = at(tree, tuple(above))
    value, how = parent[key], rng.randrange(6)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[rng.choice([*TEXTS[:-1], "update", "__class__", "optimizer", "lr"])] = anything(rng, tree)
    elif how == 1:
        # More of a list or dict would grow without bounds with the next changes.
        parent.extend([copy.deepcopy(value)] * rng.choice([1, 2 if isinstance(value, (dict, list)) else 1000]))
    elif how == 2 and type(value) in (int, float) and abs(value) < 2**64:
        parent[key] = rng.choice([value + 1, -value, value * 10**6, value / 3, str(value), bool(value)])
    elif how == 3 and isinstance(parent, dict):
        other = rng.choice(list(parent))
        parent[other] = parent.pop(key)
    else:
        parent[key] = anything(rng, tree)


def change_json(rng: Random, file: Path) -> None:
    tree = json.loads(file.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 4])):
        change(rng, tree)
    file.write_text(json.dumps(tree))


def change_header(rng: Random, file: Path) -> None:
    """Change the header of a safetensors file, its length or its data."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, content = json.loads(data[8 : 8 + size]), data[8 + size :]
    how = rng.randrange(6)
    if how == 0:
        size = rng.choice([0, 1, size - 1, size + 1, 10**8, 2**63, 2**64 - 1])
        file.write_bytes(size.to_bytes(8, "little") + data[8:])
        return
    if how == 1:
        content = rng.choice([b"", content[:-1], content + bytes(8), rng.randbytes(len(content))])
    else:
        change(rng, header)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)


@contextmanager
def raised_limit() -> Iterator[None]:
    """Let the changes be deeply nested."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def attack(rng: Random, run_dir: Path) -> Path:
    """Change the last checkpoint of a run, or what leads to it; the checksums are right."""
    folder = run_dir / "checkpoints"
    path = folder / json.loads((folder / "last.json").read_text())["checkpoint"]
    what = rng.choice(["data"] * 6 + ["header", "header", "manifest", "pointer"])
    if what == "data":
        change_json(rng, path / "checkpoint.json")
    elif what == "header":
        change_header(rng, rng.choice(sorted(path.glob("*.safetensors"))))
    elif what == "pointer":
        (folder / "last.json").write_text(json.dumps({"checkpoint": rng.choice([*TEXTS, *OTHERS, 3, path.name])}))
        return path

    def change_manifest(body: dict[str, Any]) -> None:
        if what == "manifest":
            change(rng, body)

    try:
        reseal(path, change_manifest)
    except (ValueError, RecursionError, AttributeError, TypeError):  # there is no manifest to be made of it
        (path / "manifest.json").write_text("{}")
    return path


# -- the judgement -----------------------------------------------------------------------------------------------------


class HangError(BaseException):
    """Something takes without end."""


@contextmanager
def limits() -> Iterator[None]:
    """Limit the memory that the block may reserve, and end one that hangs."""

    def end(number: int, frame: FrameType | None) -> None:
        raise HangError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, end)
    signal.alarm(HANGS_S)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def judge(name: str, use: Callable[[], object]) -> str | None:
    """Return what is wrong with the end of `use`; None if it ended well or with an error with a message."""
    try:
        with limits():
            use()
    except TrainerError as error:
        if 20 < len(str(error)) < 5000 and is_plain(str(error)):
            return None
        return f"{name}: says {str(error)[:300]!r} in {len(str(error))} characters"
    except BaseException as error:
        return f"{name}: {type(error).__name__}: {str(error)[:300]}"
    return None


def is_plain(text: str) -> bool:
    """Whether a text controls no terminal."""
    return text.replace("\n", "").isprintable()


def shown(name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command on a checkpoint, and on the run's folder of them; nothing may control the terminal."""
    capsys.readouterr()
    for target in (path, path.parent):
        for options in ([], ["--json"]) if name != "verify" else ([],):
            assert checkpoint_command([name, str(target), *options]) in (0, 1)
    printed = capsys.readouterr()
    assert is_plain(printed.out + printed.err)


class Messages(logging.Handler):
    """Keeps the messages of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of what is logged from here on, in place of printing it."""
    messages = Messages()
    monkeypatch.setattr(logging.getLogger("trainer"), "handlers", [messages])
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", False)
    return messages.texts


@pytest.mark.filterwarnings("ignore")
def test_a_changed_checkpoint_is_refused_with_a_message_or_trains_on(
    inputs: Inputs,
    originals: dict[str, Path],
    memory_folder: Path,
    capsys: pytest.CaptureFixture[str],
    logged: list[str],
) -> None:
    problems = []
    trained = 0
    for rng in inputs:
        kind = rng.choice(list(originals))
        base = memory_folder / "attacked"
        shutil.copytree(originals[kind].parent, base / "runs")
        with raised_limit():
            path = attack(rng, base / "runs" / originals[kind].name)
        inner = "adamw" if kind == "sharded" else kind
        before = {file: file.stat().st_mtime_ns for file in memory_folder.rglob("*") if base not in file.parents}
        trainer, fit = run(inner, base / "runs", 2)
        where = rng.choice([path, "last"])
        found = [judge(f"fit from {where}", lambda where=where, fit=fit: fit(ckpt_path=where))]
        trained += found == [None] and trainer.global_step > 11
        found.append(judge("load_from_checkpoint", lambda path=path: Net.load_from_checkpoint(path)))
        found += [
            judge(name, lambda name=name, path=path: shown(name, path, capsys)) for name in ("ls", "show", "verify")
        ]
        folder = CheckpointDirectory(path.parent)
        found.append(judge("list", lambda folder=folder: (folder.list(), folder.clean(), folder.corruption_report())))
        problems += [f"{rng}, {kind}: {problem}" for problem in found if problem]
        problems += [f"{rng}, {kind}: logs {text[:300]!r}" for text in logged if not is_plain(text)]
        logged.clear()
        after = {file: file.stat().st_mtime_ns for file in memory_folder.rglob("*") if base not in file.parents}
        problems += [f"{rng}: wrote {set(after) ^ set(before) or 'over a file'} outside"] if after != before else []
        problems += [f"{rng}: left {file} beside the runs" for file in base.iterdir() if file.name != "runs"]
        shutil.rmtree(base)
    assert problems == []


def test_unchanged_ones_train_on(originals: dict[str, Path], memory_folder: Path) -> None:
    for kind, original in originals.items():
        shutil.copytree(original.parent, memory_folder / "unchanged")
        trainer, fit = run("adamw" if kind == "sharded" else kind, memory_folder / "unchanged", 2)
        fit(ckpt_path="last")
        assert trainer.global_step == 13, kind
        shutil.rmtree(memory_folder / "unchanged")


def changed(original: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    """Return the last checkpoint of a copy of a run, with its data changed."""
    shutil.copytree(original.parent, folder)
    (path,) = (folder / original.name / "checkpoints").glob("step=11")
    data = json.loads((path / "checkpoint.json").read_text())
    change(data)
    (path / "checkpoint.json").write_text(json.dumps(data))
    reseal(path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["facts"]["optimizers"].update({"AdamW, eps": "1\x1b[2J"}),
            r"eps: 1\x1b[2J in the checkpoint, and 1e-08 here",
        ),
        (
            lambda data: data["facts"]["module"].update({"\x1b[2J": ""}),
            r"module: \x1b[2J:  in the checkpoint, and missing here",
        ),
        (lambda data: data["callbacks"].update({"\x1b[2J": {}}), r"the state of the callback \x1b[2J, which"),
        (
            lambda data: data["facts"]["sampler"].update({"": "\x1b[2J"}),
            r"sampler: \x1b[2J in the checkpoint, and each sample once here",
        ),
    ],
    ids=["value", "name", "callback", "error"],
)
def test_texts_of_a_checkpoint_do_not_control_the_terminal(
    change: Callable[[Any], object], message: str, originals: dict[str, Path], tmp_path: Path, logged: list[str]
) -> None:
    changed(originals["adamw"], tmp_path / "runs", change)
    try:
        run("adamw", tmp_path / "runs", 2)[1](ckpt_path="last")
    except TrainerError as error:
        logged.append(str(error))
    assert message in "\n".join(logged)
    assert is_plain("\n".join(logged))


def test_values_of_a_metric_that_the_module_has_not_are_dropped(
    originals: dict[str, Path], tmp_path: Path, logged: list[str]
) -> None:
    def rename(data: Any) -> None:
        data["metrics"][0]["train"]["error"]["options"]["metric"] = "former"

    changed(originals["adamw"], tmp_path / "runs", rename)
    trainer, fit = run("adamw", tmp_path / "runs", 20)  # beyond the end of the epoch
    fit(ckpt_path="last")
    assert trainer.global_step == 31
    assert "'error': the module has no metric 'former', so its values of this epoch so far are dropped" in logged


def test_progress_that_is_none_is_no_error_of_a_hook(originals: dict[str, Path], tmp_path: Path) -> None:
    path = changed(originals["adamw"], tmp_path / "runs", lambda data: data.update(progress=3))
    with pytest.raises(CheckpointError, match=r"the checkpoint\['progress'\] is 3"):
        Net.load_from_checkpoint(path)


@pytest.mark.parametrize("info", [{"$int": "0xfffffffffffffffff"}, {"$float": "nan"}, {"$tuple": []}], ids=str)
def test_an_info_that_is_no_dict_when_it_is_read(info: Any, originals: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(next((originals["sgd"] / "checkpoints").glob("step=*")), path)
    reseal(path, lambda body: body.update(info=info))
    for use in (lambda: read_checkpoint(path), lambda: CheckpointDirectory(tmp_path).info("c")):
        with pytest.raises(CheckpointError, match="does not have the entries of a manifest"):
            use()


def test_parts_that_no_file_holds_take_no_memory(originals: dict[str, Path], tmp_path: Path) -> None:
    """A reference of a hundred bytes claims a tensor of four gigabytes."""
    run_dir = originals["sharded"]
    path = tmp_path / "c"
    shutil.copytree(next((run_dir / "checkpoints").glob("step=*")), path)
    data = json.loads((path / "checkpoint.json").read_text())
    weight = data["model"]["layers.0.weight"]
    for parts in ([[0, 0, 10**9, 0, 1]], [[0, number, 1, 0, 1] for number in range(10)]):
        weight |= {"shape": [sum(part[2] for part in parts)], "parts": parts}
        (path / "checkpoint.json").write_text(json.dumps(data))
        reseal(path)
        with limits(), pytest.raises(CheckpointError, match=r"model\.00000|layers\.0\.weight"):
            read_checkpoint(path)
