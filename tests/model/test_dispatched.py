"""Models that accelerate has placed in memory and on disk predict as others do; other runs refuse them in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.hf_models import HFModule, data, make
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import ConfigError, TrainModule

accelerate = pytest.importorskip("accelerate", reason='needs accelerate: pip install "exact-trainer[dev]"')
pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')

MODEL = "Qwen2"


class Plain(HFModule):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits: torch.Tensor = self.net(input_ids=batch["input_ids"]).logits
        return logits


class Placed(Plain):
    """Places the model of a folder in `configure_model`, with a layer of its own beside it."""

    def __init__(self, folder: Path, place: Callable[[Any, Path], Any]) -> None:
        TrainModule.__init__(self)
        self.architecture, self.folder, self.place, self.net = MODEL, folder, place, None
        self.own = torch.nn.Linear(2, 2)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.place(make, self.folder)


def by_map(make: Any, folder: Path) -> Any:
    with accelerate.init_empty_weights():
        net = make(MODEL)
    places = accelerate.infer_auto_device_map(
        net, max_memory={"cpu": "60KB"}, no_split_module_classes=["Qwen2DecoderLayer"]
    )
    assert {"cpu", "disk"} == set(places.values())
    return accelerate.load_checkpoint_and_dispatch(net, folder, device_map=places, offload_folder=folder / "offload")


def in_memory(make: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(type(make(MODEL)).from_pretrained(folder), torch.device("cpu"))


def on_disk(make: Any, folder: Path) -> Any:
    net = type(make(MODEL)).from_pretrained(folder)
    accelerate.disk_offload(net, str(folder / "disk"), torch.device("cpu"))
    return net


def outputs(module: TrainModule) -> list[torch.Tensor]:
    found = quiet().predict(module, DataLoader(data(MODEL), 8), return_predictions=True)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plain]:
    folder, module = tmp_path_factory.mktemp("model"), Plain(MODEL)
    module.net.save_pretrained(folder, max_shard_size="20KB")
    return folder, module


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("place", [by_map, in_memory, on_disk])
def test_predictions_are_those_of_a_model_in_memory(place: Any, plain: tuple[Path, Plain]) -> None:
    folder, module = plain
    torch.testing.assert_close(outputs(Placed(folder, place)), outputs(module), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp", "devices": 1}], ids=str)
def test_training_is_refused(settings: dict[str, Any], plain: tuple[Path, Plain]) -> None:
    with raises_recorded(ConfigError):
        quiet(max_steps=1, **settings).fit(Placed(plain[0], by_map), DataLoader(data(MODEL), 8))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings", [{"strategy": "fsdp", "devices": 1}, {"precision": "bf16-true"}], ids=str)
def test_other_runs_are_refused_in_words(settings: dict[str, Any], plain: tuple[Path, Plain]) -> None:
    with raises_recorded(ConfigError):
        quiet(**settings).predict(Placed(plain[0], in_memory), DataLoader(data(MODEL), 8))
