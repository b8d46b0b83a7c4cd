"""`trainer runs ls` lists runs at any depth, and `trainer plot` draws what they have logged."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from pathlib import Path

import pytest

from tests.helpers.processes import run_python
from tests.helpers.project import Command, done
from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import CSVLogger, EarlyStopping, JSONLLogger, ModelCheckpoint
from trainer.cli.plot import MOST_NAMES, smoothed, style_of
from trainer.cli.runs.find import find_runs, read_metrics, with_name
from trainer.config.files import to_yaml
from trainer.fault_tolerance.file_lock import FolderLock


class Logged(Toy):
    stops_at = -1

    def __init__(self, lr: float = 0.1, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        self.log("score", float(self.trainer.global_step) * self.hparams.lr)
        if self.trainer.global_step == self.stops_at:
            self.trainer.should_stop = True


def train(root: Path, lr: float, steps: int, **options: object) -> None:
    checkpoint = ModelCheckpoint(monitor="score", mode="max", every_n_train_steps=1)
    logger = options.pop("logger", CSVLogger())
    trainer = quiet(
        enable_checkpointing=True,
        default_root_dir=root,
        max_steps=4,
        logger=logger,
        callbacks=[checkpoint],
        log_every_n_steps=1,
        **options,
    )
    module = Logged(lr)
    module.stops_at = steps
    trainer.fit(module, loader())


@pytest.fixture
def runs(project: Path) -> Path:
    folder = project / "runs"
    train(folder / "a", 0.1, 4)
    train(folder / "deep" / "er", 0.5, 2, logger=JSONLLogger())
    (folder / "empty" / "checkpoints").mkdir(parents=True)
    return folder


def listed(command: Command, *arguments: str) -> list[dict]:
    out, _ = done(command("runs", "ls", *arguments, "--json"))
    found: list[dict] = json.loads(out)
    return found


def test_states_steps_metrics_and_hyperparameters_that_differ(command: Command, runs: Path) -> None:
    first, second, empty = listed(command, str(runs))
    assert (first["name"], first["state"], first["step"]) == ("a/version_0", "finished", 4)
    assert (second["name"], second["step"]) == ("deep/er/version_0", 2)
    assert second["state"] == "stopped (trainer.should_stop was set)"
    assert first["score"] == pytest.approx(0.4)
    assert second["score"] == pytest.approx(1.0)
    assert (first["module.lr"], second["module.lr"]) == (0.1, 0.5)
    assert "module.width" not in first
    assert (empty["name"], empty["state"], empty["score"]) == ("empty", "no checkpoint", None)
    lock = FolderLock(runs / "a" / "version_0" / "checkpoints")
    assert lock.acquire() is None
    assert [one.state for one in find_runs(runs)] == ["running", second["state"], "no checkpoint"]
    lock.release()


def test_columns_are_those_of_the_runs_that_a_filter_leaves(command: Command, runs: Path) -> None:
    train(runs / "b", 0.1, 3)
    assert [one.get("module.lr") for one in listed(command, str(runs))] == [0.1, 0.1, 0.5, None]
    alike = listed(command, str(runs), "--filter", "module.lr=0.1")
    assert [one["name"] for one in alike] == ["a/version_0", "b/version_0"]
    assert "module.lr" not in alike[0]
    (none,) = listed(command, str(runs), "--filter", "name=empty")
    assert "score" not in none


def test_a_run_that_has_stopped_inside_its_last_epoch_is_not_finished(command: Command, project: Path) -> None:
    for steps, state in ((1, "stopped (trainer.should_stop was set)"), (-1, "finished")):
        module = Logged()
        module.stops_at = steps
        trainer = quiet(max_epochs=1, enable_checkpointing=True, default_root_dir="runs")
        trainer.fit(module, loader(), ckpt_path="last")
        assert [one["state"] for one in listed(command, "runs")] == [state]


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}])
def test_a_run_that_early_stopping_has_ended_says_so(command: Command, project: Path, options: dict[str, int]) -> None:
    trainer = quiet(
        max_epochs=9,
        enable_checkpointing=True,
        default_root_dir="runs",
        callbacks=[EarlyStopping("val_loss", min_delta=1e9, patience=1), ModelCheckpoint(monitor="val_loss")],
        **options,
    )
    trainer.fit(Logged(), loader(), loader())
    assert [one["state"] for one in listed(command, "runs")] == ["stopped (early stopping)"]


def test_a_project_whose_checkpoints_are_a_runs_hides_no_other(command: Command, runs: Path, project: Path) -> None:
    """As `ModelCheckpoint(dirpath="checkpoints")` writes them."""
    (runs / "a" / "version_0" / "checkpoints").rename(project / "checkpoints")
    names = [project.name, "runs/a/version_0", "runs/deep/er/version_0", "runs/empty"]
    assert [one["name"] for one in listed(command, ".")] == names


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--sort", "score"], ["a/version_0", "deep/er/version_0", "empty"]),
        (["--sort", "-score"], ["deep/er/version_0", "a/version_0", "empty"]),
        (["--filter", "score>0.5"], ["deep/er/version_0"]),
        (["--filter", "module.lr = 0.1"], ["a/version_0"]),
        (["--filter", "name<b"], ["a/version_0"]),
        (["--filter", "began>2000"], ["a/version_0", "deep/er/version_0", "empty"]),
        (["--filter", "state!=finished", "--filter", "step>=1"], ["deep/er/version_0"]),
    ],
)
def test_sorted_and_filtered(command: Command, runs: Path, options: list[str], names: list[str]) -> None:
    assert [one["name"] for one in listed(command, str(runs), *options)] == names


def test_the_time_of_a_run_is_not_that_of_a_later_validation(command: Command, runs: Path) -> None:
    before = listed(command, str(runs / "a"))[0]["time"]
    (runs / "a" / "version_0" / "events.of.a.validation").touch()
    later = os.stat(runs).st_mtime + 5000
    os.utime(runs / "a" / "version_0" / "events.of.a.validation", (later, later))
    assert listed(command, str(runs / "a"))[0]["time"] == before < 1000


def test_a_resumed_run_began_with_its_first_session(project: Path) -> None:
    """Although its configuration and hyperparameters are written again, and old checkpoints deleted."""
    found = []
    for steps in (2, 3, -1):
        module = Logged()
        module.stops_at = steps
        options = {"max_steps": 4, "logger": CSVLogger(), "callbacks": [ModelCheckpoint(save_top_k=1)]}
        quiet(default_root_dir="runs", enable_checkpointing=True, **options).fit(module, loader(), ckpt_path="last")
        (one,) = find_runs(Path("runs"))
        found.append(one)
    assert len({one.began for one in found}) == 1
    times = [one.seconds for one in found]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_values_that_are_not_finite_are_last_and_text_in_json(command: Command, project: Path) -> None:
    for name, loss in (("a", "nan"), ("b", "2"), ("c", "inf"), ("d", "1")):
        (project / name).mkdir()
        (project / name / "metrics.csv").write_text(f"step,loss\n1,{loss}\n")
    (project / "e").mkdir()
    os.mkfifo(project / "e" / "hparams.json")  # nobody writes to it
    names = {key: [one["name"] for one in listed(command, ".", "--sort", key)] for key in ("loss", "-loss")}
    assert names == {"loss": ["d", "b", "c", "a", "e"], "-loss": ["c", "b", "d", "a", "e"]}
    assert [one["loss"] for one in listed(command, ".", "--sort", "loss")] == [1, 2, "inf", "nan", None]


def test_tables_for_people_and_programs(command: Command, runs: Path) -> None:
    out, _ = done(command("runs", "ls", str(runs), "--metric", "score"))
    assert out.splitlines()[0].split() == ["name", "state", "step", "epoch", "began", "time", "score", "module.lr"]
    assert len(out.splitlines()) == 4
    _, out, _ = command("runs", "ls", str(runs), "--csv", "--hparam", "module.width")
    assert [row["module.width"] for row in csv.DictReader(io.StringIO(out))] == ["3", "3", ""]


def test_damaged_files_leave_their_cells_empty(command: Command, runs: Path) -> None:
    run = runs / "a" / "version_0"
    (run / "hparams.json").write_text("{")
    (run / "config.yaml").write_bytes(b"\xff: [")
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("[]")
    first = listed(command, str(runs))[0]
    assert (first["state"], first["step"]) == ("no checkpoint", 4)


def test_a_metric_may_be_called_kind(tmp_path: Path) -> None:
    lines = ({"step": 1, "kind": 2.0}, {"step": 1, "key": "texts", "kind": "text", "text": "3"})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_metrics(tmp_path) == {"kind": [(1, 2.0)]}
    (tmp_path / "metrics.csv").write_text("step,kind\n1,2.0\n")
    assert read_metrics(tmp_path) == {"kind": [(1, 2.0)]}


def test_it_imports_no_torch(runs: Path) -> None:
    code = "import sys\nsys.modules['torch'] = None\nfrom trainer.__main__ import main\n"
    ended = run_python(f"{code}sys.exit(main(['runs', 'ls', {str(runs)!r}]))").check()
    assert "finished" in ended.stdout


@pytest.mark.parametrize("name", ["curves.png", "curves.svg", "curves.html"])
def test_curves(command: Command, runs: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    out, _ = done(command("plot", str(runs / "a"), str(runs / "deep"), "--output", str(runs / name), "--smooth", "0.5"))
    assert "score" in out
    if name.endswith("svg"):
        text = (runs / name).read_text()
        assert all(f"version_0, lr={lr}" in text for lr in (0.1, 0.5))
    assert (runs / name).read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype"}[name[7:]])


def test_a_file_of_metrics_stands_for_its_run(command: Command, runs: Path) -> None:
    pytest.importorskip("matplotlib")
    (runs / "a" / "version_0" / "metrics.jsonl").write_text('{"step": 1, "of_jsonl": 2.0}\n')
    for name, metric in (("metrics.csv", "score"), ("metrics.jsonl", "of_jsonl")):
        code, out, err = command("plot", f"runs/a/version_0/{name}")
        assert (code, err) == (0, "")
        assert metric in out


def test_single_values_are_drawn_if_they_are_named_or_there_is_nothing_else(command: Command, project: Path) -> None:
    pytest.importorskip("matplotlib")
    Path("metrics.csv").write_text("step,loss,test\n1,2,\n2,1,\n2,,3\n")
    _, out, _ = command("plot", "metrics.csv")
    assert out.splitlines() == ["curves.png: loss", "left out (a single value; see --metric): test"]
    assert command("plot", "metrics.csv", "--metric", "test")[1] == "curves.png: test\n"
    Path("metrics.csv").write_text("step,test\n2,3\n")
    assert command("plot", "metrics.csv")[1] == "curves.png: test\n"


def test_runs_that_are_named_look_different() -> None:
    lines = {(style_of(number)["color"], style_of(number)["linestyle"]) for number in range(MOST_NAMES)}
    points = {(style_of(number)["color"], style_of(number)["marker"]) for number in range(MOST_NAMES)}
    assert len(lines) == len(points) == MOST_NAMES


def test_smoothing_begins_at_the_first_value() -> None:
    assert smoothed((4.0, 4.0, 4.0), 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed((1.0, 3.0), 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])
    first, second, third = smoothed((1.0, math.nan, 3.0), 0.5)
    assert (first, third) == pytest.approx((1.0, (0.25 * 1 + 0.5 * 3) / 0.75))
    assert math.isnan(second)


def test_a_run_has_one_colour_and_is_named_whatever_its_name(command: Command, project: Path) -> None:
    """Names with $ are no formulas, those with _ are not hidden, and runs may have different metrics."""
    pytest.importorskip("matplotlib")
    for name, head in (("_a", "step,$x_{"), ("$b$", "step,$x_{,late"), ("c", "step,late")):
        (project / name).mkdir()
        cells = ",".join("1" for _ in head.split(",")[1:])
        (project / name / "metrics.csv").write_text(f"{head}\n1,{cells}\n2,{cells}\n")
    code, out, err = command("plot", "_a", "$b$", "c", "-o", "curves.svg")
    assert (code, err) == (0, "")
    assert "$x_{" in out
    first, second = re.split(r'<g id="axes_\d+">', Path("curves.svg").read_text())[1:]
    explained = [re.findall("<!-- (.*?) -->", one.partition('<g id="legend_')[2]) for one in (first, second)]
    assert explained == [["_a", "$b$"], ["$b$", "c"]]
    colours = [set(re.findall("stroke: (#1f77b4|#ff7f0e|#2ca02c)", one)) for one in (first, second)]
    assert colours == [{"#1f77b4", "#ff7f0e"}, {"#ff7f0e", "#2ca02c"}]  # of _a and $b$, and of $b$ and c


def test_the_files_of_a_stranger_control_no_terminal_and_are_no_error(command: Command, runs: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b", "deep"):
        (runs / "foreign" / name).mkdir(parents=True)
    (runs / "foreign" / "a" / "metrics.csv").write_text("step,\x1b[31m\n1,2\n")
    (runs / "foreign" / "b" / "hparams.json").write_text('{"lr": "\\u001b[31m"}')
    (runs / "foreign" / "deep" / "hparams.json").write_text("[" * 100_000)
    for number, info in enumerate(({"step": [3], "epoch": "1"}, {"step": 10**400, "captured": 10**400})):
        folder = runs / "foreign" / str(number) / "checkpoints" / "c"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"info": {**info, "metrics": {"\x1b[31m": 10**400}}}))
        (folder.parent.parent / "config.yaml").write_text("trainer: {max_steps: 1, max_epochs: 1}\n")
    (runs / "foreign" / "1" / "config.yaml").unlink()
    (runs / "foreign" / "1" / "config.yaml").symlink_to("/dev/zero")
    shown = ("--metric", "\x1b[31m", "--hparam", "lr")
    for arguments in ((), shown, (*shown, "--csv"), (*shown, "--json"), ("--sort", "-step", "--filter", "step>1")):
        code, out, err = command("runs", "ls", str(runs), *arguments)
        assert (code, err) == (0, ""), arguments
        assert out.replace("\n", "").isprintable(), arguments
    code, out, err = command("plot", str(runs / "foreign"))
    assert (code, err) == (0, "")
    assert r"\x1b[31m" in out
    assert out.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", ["it's", "'x'", '"q"', "a: b # c", "007", "null", "a\x85b", "x " * 80 + "y", "a\\b"])
def test_any_name_is_shown(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml({"module": "m.py:M", "name": name}))
    assert with_name("version_0", tmp_path) == f"version_0 ({name})"
    (tmp_path / "config.yaml").write_text("name: 'a\n")
    assert with_name("version_0", tmp_path) == "version_0"


def test_a_name_controls_no_terminal(command: Command, runs: Path) -> None:
    run = next(one for one in runs.iterdir() if one.is_dir())
    (run / "config.yaml").write_text(to_yaml({"name": "\x1b[31mred"}))
    _, out, _ = command("runs", "ls", str(runs))
    assert "red" in out
    assert "\x1b" not in out
