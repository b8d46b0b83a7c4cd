"""TensorBoardLogger writes files that TensorBoard itself reads."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.stops import Crash
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.callbacks import BadStepGuard, LambdaCallback, ModelCheckpoint, TensorBoardLogger
from trainer.callbacks.tensorboard import _EventFile

pytest.importorskip("tensorboard")


KINDS = ("scalars", "images", "histograms", "tensors")


def read(folder: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance=dict.fromkeys(KINDS, 0))
    events.Reload()
    return events


def curves(folder: Any) -> dict[str, list[tuple[int, float]]]:
    events = read(folder)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def train(folder: str, crash_at: int | None = None, **settings: Any) -> Path:
    """Train three epochs of 8 steps, with a checkpoint after every 4."""
    crash = [] if crash_at is None else [Crash(crash_at)]
    trainer = quiet(
        max_epochs=3,
        log_every_n_steps=1,
        logger=TensorBoardLogger(),
        default_root_dir=folder,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=4), *crash],
        **settings,
    )
    try:
        trainer.fit(Toy(), loader(8, shuffle=True), loader(2), ckpt_path="last")
    except RuntimeError:
        assert crash_at is not None
    return trainer.run_dir


def test_curves() -> None:
    found = curves(train("runs"))
    assert [step for step, _ in found["train_loss"]] == list(range(1, 25))
    assert [step for step, _ in found["val_loss"]] == [8, 16, 24]


@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 4}], ids=["val by epoch", "val by step"])
@pytest.mark.parametrize("crash_at", [4, 9, 15])
def test_an_interrupted_run_leaves_the_curves_of_one_that_was_not(crash_at: int, settings: dict[str, Any]) -> None:
    uninterrupted = train("uninterrupted", **settings)
    assert train("broken", crash_at, **settings) == train("broken", **settings)
    assert curves("broken/version_0") == curves(uninterrupted)


class Everything(Toy):
    """Logs media, by the writer of torch, and values over another axis than steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.logger.experiment.add_scalar("by samples", float(loss.detach()), 4000 + 1000 * self.global_step)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.trainer.logger.log_image("picture", torch.zeros(3, 2, 2))
        self.trainer.logger.log_text("note", f"at {self.global_step}")
        self.trainer.logger.log_histogram("weights", self.layer.weight)

    def on_validation_end(self) -> None:
        self.trainer.logger.experiment.add_scalar("direct", 1.0, self.global_step)


class OneBadStep(Callback):
    """Makes a step bad, once, so that the run goes back to a checkpoint."""

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        if trainer.global_step == 14 and not BAD:
            BAD.append(14)
            loss.mul_(float("nan"))


BAD: list[int] = []


def log_everything(folder: str, how: str) -> Path:
    """Train in one go, stopped by an error and resumed twice, killed and resumed, or gone back to a checkpoint."""

    def fit(*callbacks: Callback) -> Path:
        trainer = quiet(
            max_epochs=3,
            log_every_n_steps=2,
            default_root_dir=folder,
            logger=TensorBoardLogger(),
            callbacks=[ModelCheckpoint(every_n_train_steps=4), *callbacks],
            enable_checkpointing=True,
        )
        trainer.fit(Everything(), loader(8), loader(2), ckpt_path="last")
        return trainer.run_dir

    if how == "resumed":
        for step in (10, 19):
            with pytest.raises(RuntimeError, match="crash"):
                fit(Crash(step))
    elif how == "killed":
        if (child := os.fork()) == 0:
            fit(LambdaCallback(on_train_batch_start=lambda trainer, *_: trainer.global_step == 14 and os._exit(9)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    return fit()


def by_accumulator(folder: Path) -> dict[str, list[int]]:
    events = read(folder)
    found = {
        tag: [one.step for one in getattr(events, kind.title())(tag)] for kind in KINDS for tag in events.Tags()[kind]
    }
    return {tag: steps for tag, steps in found.items() if not tag.startswith("hp")}


SERVER = """
import json, os, sys
from tensorboard.context import RequestContext
from tensorboard.data import provider, server_ingester
from tensorboard.util.grpc_util import ChannelCredsType

ingester = server_ingester.SubprocessServerDataIngester(
    server_binary=server_ingester.get_server_binary(),
    logdir=sys.argv[1],
    reload_interval=1,
    channel_creds_type=ChannelCredsType.LOCAL,
)
ingester.start()
read, of, found = ingester.data_provider, provider.RunTagFilter(runs=[sys.argv[2]]), {}
plugins = {"scalars": read.read_scalars, "images": read.read_blob_sequences, "histograms": read.read_tensors}
for plugin, series in plugins.items():
    of_runs = series(RequestContext(), experiment_id="", plugin_name=plugin, downsample=1000, run_tag_filter=of)
    found |= {tag: [one.step for one in points] for tag, points in of_runs.get(sys.argv[2], {}).items()}
print(json.dumps(found), flush=True)
os._exit(0)
"""


def by_server(folder: Path) -> dict[str, list[int]]:
    """Return the steps of all series, as the server of the command `tensorboard` gives them."""
    command = [sys.executable, "-c", SERVER, str(folder.parent), folder.name]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return {tag: steps for tag, steps in found.items() if not tag.startswith("hp")}


@pytest.mark.parametrize("how", ["resumed", "killed"])
def test_what_was_logged_is_there_once_whatever_interrupts_the_run(how: str) -> None:
    whole, broken = log_everything("whole", "in one go"), log_everything("broken", how)
    expected = by_accumulator(whole)
    assert expected["picture"] == expected["direct"] == expected["weights"] == [8, 16, 24]
    assert len(expected["by samples"]) == 24
    assert by_accumulator(broken) == expected
    assert by_server(broken) == {tag: steps for tag, steps in expected.items() if tag != "note/text_summary"}


def test_what_was_logged_is_there_once_after_a_step_back() -> None:
    steps, settings = ModelCheckpoint(every_n_train_steps=4), {"z_score": None}
    trainer = quiet(
        max_epochs=3,
        log_every_n_steps=1,
        logger=TensorBoardLogger(),
        callbacks=[OneBadStep(), BadStepGuard("rewind", **settings), steps],
        enable_checkpointing=True,
    )
    BAD.clear()
    trainer.fit(Everything(), loader(8), loader(2))
    found = by_accumulator(trainer.run_dir)
    assert BAD
    assert found["train_loss"] == [*range(1, 24)]  # the bad batch is left out
    assert found["by samples"] == [4000 + 1000 * step for step in range(23)]
    assert found["picture"] == found["direct"] == found["weights"] == found["note/text_summary"] == [8, 15, 23]


def test_other_files_of_the_folder_stay_after_a_resume() -> None:
    """As those of a test, and of a writer of the user's."""
    run_dir = train("runs", max_steps=4)
    tested = quiet(logger=TensorBoardLogger(), default_root_dir="runs")
    tested.test(Toy(), loader(1), ckpt_path="last")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run_dir)) as own:
        own.add_scalar("mine", 2.0, 100)
    assert train("runs") == run_dir
    found = curves(run_dir)
    assert [step for step, _ in found["train_loss"]] == list(range(1, 25))
    assert found["mine"] == [(100, 2.0)]
    assert len(found["val_loss"]) == 3 + 1  # that of `test_step`


def test_the_curves_of_add_scalars_survive_a_crash() -> None:
    """Each is in a folder of its own; the folder of another run beside them is left alone."""
    steps = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: trainer.logger.experiment.add_scalars(
            "both", {"a": trainer.global_step, "b/c": 0}, trainer.global_step
        )
    )

    def run(crash_at: int | None) -> None:
        crash = [] if crash_at is None else [Crash(crash_at)]
        trainer = quiet(
            max_steps=8,
            logger=TensorBoardLogger("log"),
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(every_n_train_steps=2), steps, *crash],
        )
        with suppress(RuntimeError):
            trainer.fit(Toy(), loader(8), ckpt_path="last")

    run(3)
    foreign = Path("log/version_1/events.out.tfevents.1.host.1.0.training")
    foreign.parent.mkdir()
    foreign.write_bytes(b"mine")
    run(7)
    run(None)
    for name in ("both_a", "both_b/c"):
        assert [step for step, _ in curves(f"log/{name}")["both"]] == list(range(1, 9))
    assert foreign.read_bytes() == b"mine"


def test_hyperparameters_once() -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    class WithHyperparameters(Toy):
        def __init__(self, lr: float = 0.5, name: str = "x", options: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    def run(steps: int, ckpt_path: str | None) -> Path:
        trainer = quiet(max_steps=steps, logger=TensorBoardLogger(), enable_checkpointing=True)
        trainer.fit(WithHyperparameters(options={"deep": [1, 2]}), loader(4), ckpt_path=ckpt_path)
        return trainer.run_dir

    run(2, None)
    events = read(run(4, "last"))
    texts = events.Tensors("hyperparameters/text_summary")
    assert len(texts) == 1
    assert b'"deep": [' in texts[0].tensor_proto.string_val[0]
    assert set(events.summary_metadata) >= {"_hparams_/session_start_info"}
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    session = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert session["module/lr"].number_value == 0.5
    assert session["module/name"].string_value == "x"
    assert session["module/options/deep"].string_value == "[1, 2]"


def test_the_hparams_page_has_the_metrics_of_each_run() -> None:
    """As TensorBoard's server computes the page."""
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import backend_context

    class WithHyperparameters(Toy):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()

    for lr in (0.1, 0.2):
        quiet(max_epochs=1, logger=TensorBoardLogger()).fit(WithHyperparameters(lr), loader(4), loader(2))
    runs = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory("runs")
    runs.Reload()
    provider = data_provider.MultiplexerDataProvider(runs, "runs")
    page = backend_context.Context(TBContext(data_provider=provider))
    request = RequestContext()
    metadata = page.hparams_metadata(request, "")
    experiment = page.experiment_from_metadata(request, "", True, metadata, 10)
    assert "val_loss" in {metric.name.tag for metric in experiment.metric_infos}
    assert "module/lr" in {parameter.name for parameter in experiment.hparam_infos}


def test_the_writer_is_there_for_other_things() -> None:
    logger = TensorBoardLogger("elsewhere")
    with raises_recorded(ConfigError):
        assert TensorBoardLogger().experiment

    class Histograms(Toy):
        def on_train_epoch_end(self) -> None:
            logger.experiment.add_histogram("weight", self.layer.weight, self.global_step)

    trainer = quiet(max_epochs=1, logger=logger)
    trainer.fit(Histograms(), loader(2))
    assert read("elsewhere").Tags()["histograms"] == ["weight"]
    assert not list(trainer.run_dir.glob("events.*"))


def test_evaluation_after_training_adds_to_the_curves() -> None:
    class Tested(Toy):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", 0.5)

    trainer = quiet(max_epochs=2, log_every_n_steps=1, logger=TensorBoardLogger())
    trainer.fit(Tested(), loader(2))
    trainer.test(Tested(), loader(1))
    found = curves(trainer.run_dir)
    assert found["test_loss"] == [(4, 0.5)]
    assert len(found["train_loss"]) == 4


# -- the event file ----------------------------------------------------------------------------------------------------


def events(path: Path) -> list[Any]:
    """Return all events; the reader checks the checksums of each record."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    return [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]


def points(path: Path) -> list[tuple[int, str, float]]:
    return [(e.step, v.tag, v.simple_value) for e in events(path) for v in e.summary.value]


def test_numbers_that_a_float_cannot_hold() -> None:
    file = _EventFile(Path("a"))
    file.add_scalars({"a": math.inf, "b": -1e300, "c": math.nan}, 2**40)
    file.write()
    (_, _, a), (step, _, b), (_, _, c) = points(file.path)
    assert (a, b, step) == (math.inf, -math.inf, 2**40)
    assert math.isnan(c)


def test_the_command_that_the_docs_give_for_the_time_of_a_scalar_writes_scalars() -> None:
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    command = next(line for line in page.read_text().splitlines() if "timeit" in line and "tensorboard" in line)
    prepare, statement = shlex.split(command.strip().strip("`."))[4:]
    names: dict[str, Any] = {}
    exec(f"{prepare}\n{statement}\nf.write()", names)
    assert points(names["f"].path) == [(1, "loss", 0.5)]


def test_a_second_file_of_the_same_second_has_a_later_name_and_purges() -> None:
    first, second = _EventFile(Path("a")), _EventFile(Path("a"), purges=True)
    assert first.path.name < second.path.name
    last = events(second.path)[-1]
    assert (last.step, last.session_log.status) == (0, last.session_log.START)


def test_points_are_kept_while_the_disk_is_full(caplog: pytest.LogCaptureFixture) -> None:
    file = _EventFile(Path("a"))
    path, file.path = file.path, Path("/dev/full")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            file.add_scalars({"loss": 1.0}, step)
            file.write()
    assert len([r for r in caplog.records if "cannot write" in r.message]) == 1
    file.path = path
    file.write()
    assert points(path) == [(0, "loss", 1.0), (1, "loss", 1.0), (2, "loss", 1.0)]
