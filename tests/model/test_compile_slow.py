"""compile= works with torch's own compiler, and on several processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.compile_models import Model, batches, trained
from tests.helpers.processes import run_distributed
from trainer import Trainer


@pytest.fixture(autouse=True)
def _fresh_torch_compile() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def without_dropout(module: Model) -> Model:
    """Return the module without dropout, since inductor draws its own random numbers."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return module


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch 2.13 imports its own
def test_inductor_gives_the_same_losses() -> None:
    plain, compiled = without_dropout(Model()), without_dropout(Model())
    trained(plain, False)
    trained(compiled, True)
    assert counters["stats"]["unique_graphs"] > 0
    torch.testing.assert_close(compiled.losses, plain.losses, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), atol=1e-5, rtol=1e-5)


def on_a_process(strategy: str, setting: Any) -> dict[str, Any]:
    data = ConcatDataset([TensorDataset(*batch) for batch in batches((8, 8, 8, 8))])
    module = without_dropout(Model())
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_epochs=2, seed=3, compile=setting, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    losses = torch.tensor(module.losses)
    torch.distributed.all_reduce(losses)
    return {
        "losses": (losses / 2).tolist(),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "graphs": int(counters["stats"]["unique_graphs"]),
        "names": list(module.state_dict()),
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("setting", [{"backend": "aot_eager"}, {"backend": "aot_eager", "blocks": True}])
def test_two_processes(strategy: str, setting: Any) -> None:
    plain = run_distributed(on_a_process, 2, strategy, False, timeout=250)[0]
    compiled = run_distributed(on_a_process, 2, strategy, setting, timeout=250)[0]
    assert plain["graphs"] == 0
    assert compiled["graphs"] > 0
    assert compiled["names"] == plain["names"] == list(Model().state_dict())
    torch.testing.assert_close(compiled["losses"], plain["losses"], atol=1e-6, rtol=1e-5)
    assert compiled["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-5, abs=1e-6)
