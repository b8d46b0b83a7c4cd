"""A CheckpointIO is called as Lightning calls it, where files are written, read and removed."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainer as ours
from trainer.compat.plugins import AsyncCheckpointIO as OursAsync
from trainer.compat.plugins import TorchCheckpointIO as OursTorch
from trainer.errors import CheckpointError, ConfigError

pl = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


def library(name: str) -> tuple[Any, Any]:
    """Return a library, and its module of plugins."""
    return (pl, pl.plugins.io) if name == "lightning" else (ours, importlib.import_module("trainer.pytorch.plugins.io"))


def module_of(library: Any) -> Any:
    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("rising", float(self.trainer.current_epoch))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def plugin_of(plugins: Any, base: str = "TorchCheckpointIO") -> Any:
    """Return a plugin that notes its calls, and whose files `torch.load` cannot read."""

    class Reversed(getattr(plugins, base)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []
            self.fails = False

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.calls.append(("save", Path(path).name, sorted(checkpoint)))
            if self.fails:
                raise ValueError("the vault is closed")
            near = io.BytesIO()
            torch.save(checkpoint, near)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(near.getvalue()[::-1])

        def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
            self.calls.append(("load", Path(path).name))
            return torch.load(io.BytesIO(Path(path).read_bytes()[::-1]), weights_only=False)

        def remove_checkpoint(self, path: Any) -> None:
            self.calls.append(("remove", Path(path).name))
            super().remove_checkpoint(path)

        def teardown(self) -> None:
            self.calls.append(("teardown",))

    return Reversed()


def trainer_of(library: Any, folder: Path, plugin: Any, epochs: int = 3, **checkpoint: Any) -> Any:
    saves = library.callbacks.ModelCheckpoint(dirpath=folder / "saved", **checkpoint)
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    places = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    return library.Trainer(max_epochs=epochs, callbacks=[saves], plugins=plugin, **places, **off)


def loader() -> Any:
    return DataLoader(TensorDataset(ROWS), 4)


def calls_of(name: str, folder: Path) -> tuple[list[Any], torch.Tensor]:
    """Return the calls of a fit, of one that continues from its best file alone, and of a test of that file."""
    of, plugins = library(name)
    plugin, module = plugin_of(plugins), module_of(of)
    options = {"monitor": "rising", "mode": "max", "save_top_k": 2, "filename": "{epoch}-{step}"}
    trainer = trainer_of(of, folder, [plugin], **options)
    trainer.fit(module, loader(), loader())
    alone = folder / "alone.ckpt"
    (folder / "saved" / "epoch=2-step=9.ckpt").rename(alone)
    module = module_of(of)
    trainer = trainer_of(of, folder / "again", plugin, 4, **options)
    trainer.fit(module, loader(), loader(), ckpt_path=str(alone))
    trainer.test(module, loader(), ckpt_path=str(alone))
    trainer.save_checkpoint(folder / "by hand.ckpt")
    return plugin.calls, module.layer.weight.detach()


def test_the_calls_are_lightnings(tmp_path: Path) -> None:
    expected, weight = calls_of("lightning", tmp_path / "lightning")
    calls, own_weight = calls_of("trainer", tmp_path / "trainer")
    assert [call[:2] for call in calls] == [call[:2] for call in expected]
    saved, theirs = ({*next(one[2] for one in all_calls if one[0] == "save")} for all_calls in (calls, expected))
    assert theirs - saved == set()
    assert torch.equal(own_weight, weight)


def test_a_checkpoint_is_there_although_the_plugin_fails(tmp_path: Path) -> None:
    plugin = plugin_of(library("trainer")[1])
    plugin.fails = True
    trainer = trainer_of(ours, tmp_path, plugin, every_n_train_steps=2)
    with pytest.raises(CheckpointError, match=r"save_checkpoint failed for .*the vault is closed") as error:
        trainer.fit(module_of(ours), loader())
    assert "'last' finds the folder" in str(error.value)
    plugin.fails = False
    again = trainer_of(ours, tmp_path, plugin, every_n_train_steps=2)
    again.fit(module_of(ours), loader(), ckpt_path="last")
    assert again.global_step == 9
    names = {call[1] for call in plugin.calls if call[0] == "save"}
    assert "epoch=0-step=2.ckpt" in names
    assert not (tmp_path / "saved" / "epoch=0-step=2.ckpt").exists()


def test_a_plugin_of_no_effect_on_the_disk_has_no_record(tmp_path: Path) -> None:
    class Elsewhere(OursTorch):
        kept: dict[str, Any] = {}

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            self.kept[Path(path).name] = checkpoint["global_step"]

        def remove_checkpoint(self, path: Any) -> None:
            del self.kept[Path(path).name]

    trainer = trainer_of(ours, tmp_path, [Elsewhere()], save_top_k=1)
    trainer.fit(module_of(ours), loader())
    assert Elsewhere.kept == {"epoch=2-step=9.ckpt": 9}
    assert not [*(tmp_path / "saved").glob("*.ckpt")]


def test_the_strategy_has_the_plugin(tmp_path: Path) -> None:
    plugin = OursAsync()
    trainer = trainer_of(ours, tmp_path, plugin)
    assert trainer.strategy.checkpoint_io is plugin
    trainer.fit(module_of(ours), loader())
    file = str(trainer.checkpoint_callback.best_model_path)
    assert file.endswith(".ckpt")
    assert trainer.strategy.load_checkpoint(file)["global_step"] == 9
    trainer.strategy.remove_checkpoint(file)
    assert not Path(file).exists()
    plain = trainer_of(ours, tmp_path, None)
    assert type(plain.strategy.checkpoint_io) is OursTorch
    plain.strategy.checkpoint_io = plugin
    plain.fit(module_of(ours), loader(), ckpt_path=None)
    assert plain.checkpoint_callback.best_model_path.endswith(".ckpt")


def test_wrong_plugins_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is another CheckpointIO"):
        trainer_of(ours, tmp_path, [OursTorch(), OursAsync()]).validate(module_of(ours), loader())
    with pytest.raises(TypeError, match="storage_options"):
        OursTorch().save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    with pytest.raises(FileNotFoundError):
        OursTorch().load_checkpoint(tmp_path / "nothing.ckpt")
    with pytest.raises(TypeError, match="abstract"):
        library("trainer")[1].CheckpointIO()
