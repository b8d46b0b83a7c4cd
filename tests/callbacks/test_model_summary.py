"""ModelSummary counts parameters and shows them as a table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.processes import run_python
from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import ModelSummary, RichModelSummary
from trainer.callbacks.model_summary import summarize


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
        self.head = nn.Linear(20, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.body[0].bias.requires_grad_(False)


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if not line.startswith("---")}


def test_counts() -> None:
    table = rows(summarize(Net()))
    assert table["layer"] == ["type", "parameters", "trainable", "buffers", "MB"]
    assert table["body"] == ["Sequential", "260", "240", "41", "0.001"]
    assert table["head"] == ["Linear", "200", "200", "0", "0.001"]
    assert table["total"] == ["Net", "463", "443", "41", "0.002"]
    assert "(its own)  Parameter            3          3        0" in summarize(Net())


def test_depth() -> None:
    assert list(rows(summarize(Net(), 0))) == ["layer", "total"]
    assert list(rows(summarize(Net(), 1))) == ["layer", "body", "head", "(its", "total"]
    assert list(rows(summarize(Net(), 2))) == ["layer", "body", "body.0", "body.1", "head", "(its", "total"]
    assert rows(summarize(Net(), -1)) == rows(summarize(Net(), 2))


def test_a_shared_weight_counts_once_in_the_total() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    table = rows(summarize(net))
    assert (table["0"][1], table["1"][1], table["total"][1]) == ("16", "16", "16")


def test_shapes_that_are_not_known_yet() -> None:
    table = rows(summarize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))))
    assert table["0"] == ["LazyLinear", "?", "?", "?", "?"]
    assert table["1"][1] == "4"


@pytest.mark.parametrize(("depth", "times"), [(-1, 1), (1, 1), (0, 0)])
def test_printed_once_at_the_start_of_fit(depth: int, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(max_epochs=1, callbacks=[ModelSummary(max_depth=depth)])
    trainer.fit(Toy(), loader(1))
    trainer.validate(Toy(), loader(1))
    assert capsys.readouterr().out.count("total  Toy") == times


def test_sharded_layers_have_the_names_of_their_own_classes() -> None:
    script = """
from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import ModelSummary
from trainer.strategies import FSDPStrategy

strategy = FSDPStrategy(auto_wrap_policy=["Linear"])
quiet(strategy=strategy, devices=1, max_steps=1, callbacks=ModelSummary()).fit(Toy(), loader())
"""
    shown = rows(run_python(script).check(0).stdout)
    assert shown["layer"][0] == "Linear"


def test_rich_draws_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    quiet(max_steps=1, callbacks=[RichModelSummary(max_depth=1, title="layers")]).fit(Toy(), loader(1))
    shown = capsys.readouterr().out
    assert "layers" in shown
    for row in rows(summarize(Toy())).values():
        assert all(cell in shown for cell in row)
