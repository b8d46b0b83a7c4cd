"""Small functions of Lightning's that packages call do what Lightning's do."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import ModelCheckpoint
from trainer.compat import finder, helpers

pytest.importorskip("pytorch_lightning")


class Raises:
    """A callable without a name, which raises."""

    def __call__(self) -> int:
        raise ValueError

    def __repr__(self) -> str:
        return "Raises()"


def needs_an_argument(one: int) -> int:
    return one


CALLABLES: dict[str, Any] = {
    "number": 1,
    "class": dict,
    "function": lambda: 3,
    "no arguments": needs_an_argument,
    "returns a function": lambda: needs_an_argument,
    "raises": Raises(),
    "partial": functools.partial(max, 1, 2),
}


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args)

    return around


class Hooks:
    """Methods with different arguments."""

    def hook(self, batch: int, *rest: int) -> None: ...

    def plain(self, index: int) -> None: ...

    @wrapped
    def decorated(self, batch: int) -> None: ...


def theirs(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result, or the class of the error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        *(("pytorch_lightning.utilities.parsing.is_picklable", (one,)) for one in (1, lambda: 1, torch.ones(1))),
        *(
            ("pytorch_lightning.utilities.memory.is_oom_error", (error,))
            for error in (
                RuntimeError("CUDA out of memory."),
                RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. x"),
                RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                RuntimeError("other"),
                ValueError("CUDA out of memory."),
            )
        ),
        *(("lightning_fabric.utilities.data.suggested_max_num_workers", (one,)) for one in (1, 2, 100)),
        *(
            ("pytorch_lightning.utilities.signature_utils.is_param_in_hook_signature", (Hooks.hook, *more))
            for more in (("batch",), ("rest",), ("x",), ("x", True), ("batch", True), ("x", True, 1), ("x", True, 3))
        ),
        *(
            ("pytorch_lightning.utilities.signature_utils.is_param_in_hook_signature", (hook, "batch"))
            for hook in (Hooks.decorated, Hooks.plain, Hooks().hook)
        ),
        *(
            ("pytorch_lightning.cli.instantiate_class", (args, {"class_path": "decimal.Context", "init_args": more}))
            for args, more in (((), {"prec": 3}), ((4,), {}), (5, {}), (5, {"prec": 3}), ((), {"x": 1}))
        ),
        ("pytorch_lightning.cli.instantiate_class", (2, {"class_path": "torch.Size"})),
        ("pytorch_lightning.cli.instantiate_class", ((), {"class_path": "torch.nothing"})),
        *(("lightning_fabric.utilities.logger._add_prefix", ({"a": 1}, one, "-")) for one in ("", "train")),
        *(
            ("lightning_fabric.utilities.logger._convert_params", (one,))
            for one in (None, {}, {"a": 1}, argparse.Namespace(b=2))
        ),
        ("lightning_fabric.utilities.logger._sanitize_callable_params", (CALLABLES,)),
        *(
            ("lightning_fabric.utilities.cloud_io._is_local_file_protocol", (one,))
            for one in ("a/b", Path("a"), "/a", "file:///a", "memory://a", "s3://bucket/key")
        ),
        *(("lightning_utilities.core.imports.module_available", (one,)) for one in ("os.path", "os.zz", "zz.a", "zz")),
        *(("lightning_utilities.core.imports.package_available", (one,)) for one in ("os", "zzz")),
    ],
)
def test_helpers_do_what_lightnings_do(path: str, arguments: tuple[Any, ...]) -> None:
    own = importlib.import_module("trainer.utilities")
    found, expected = (
        outcome(function, *arguments) for function in (getattr(own, path.rpartition(".")[2]), theirs(path))
    )
    assert repr(found) == repr(expected)


def test_the_arguments_of_a_constructor() -> None:
    found: list[Any] = []

    class Base:
        def __init__(self, a: int, *rest: int, b: int = 2, **more: int) -> None:
            frame: Any = inspect.currentframe()
            found.append(helpers.get_init_args(frame))
            found.append(theirs("pytorch_lightning.utilities.parsing.get_init_args")(frame))
            assert __class__  # type: ignore[name-defined]

    Base(1, 5, c=3)
    assert found[0] == found[1] == {"a": 1, "b": 2, "c": 3}


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path)
    assert helpers.load(path)["a"].tolist() == [1, 1]
    with path.open("rb") as file:
        assert helpers.load(file)["a"].tolist() == [1, 1]
    assert helpers.load(path.as_uri(), "cpu")["a"].tolist() == [1, 1]
    assert helpers.get_filesystem(path).exists(str(path))
    torch.save(Toy, path)
    with pytest.raises(Exception, match="weights_only"):
        helpers.load(path)


def test_collections() -> None:
    data = {"a": [torch.ones(1), 2], "b": (torch.zeros(1), "x")}
    moved = helpers.apply_to_collection(data, torch.Tensor, lambda one, by: one + by, 1)
    assert [moved["a"][0].item(), moved["a"][1], moved["b"][0].item(), moved["b"][1]] == [2, 2, 1, "x"]


def test_the_rank_that_a_launcher_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, lightnings = finder.get_rank, theirs("lightning_fabric.utilities.rank_zero._get_rank")
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ours() is lightnings() is None
    for name, value in {"JSM_NAMESPACE_RANK": "3", "SLURM_PROCID": "2", "LOCAL_RANK": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
        assert ours() == lightnings() == int(value)


def test_operations_are_counted() -> None:
    module, batch = torch.nn.Linear(4, 2), torch.ones(3, 4)
    lightnings = theirs("lightning_fabric.utilities.throughput.measure_flops")
    for more in ((), (torch.Tensor.sum,)):
        found = helpers.measure_flops(module, lambda: module(batch), *more)
        assert found == lightnings(module, lambda: module(batch), *more) > 0


def test_a_summary_of_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1)))
    lightnings = theirs("pytorch_lightning.utilities.model_summary.ModelSummary")
    for depth in (-1, 0, 1, 2):
        own = importlib.import_module("trainer.utilities.model_summary").ModelSummary(module, max_depth=depth)
        assert own.named_modules == lightnings.named_modules.fget(argparse.Namespace(_max_depth=depth, _model=module))
    summary = helpers.ModelSummary(module)
    assert "Linear" in str(summary)
    assert (summary.total_parameters, summary.trainable_parameters) == (13, 13)


def test_checkpoints_that_were_not_logged(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="train_loss", save_top_k=2, single_file=True)
    quiet(max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True).fit(Toy(), loader(2))
    lightnings = theirs("pytorch_lightning.loggers.utilities._scan_checkpoints")
    found = helpers.scan_checkpoints(checkpoint, {})
    assert found == lightnings(checkpoint, {})
    assert len(found) == 2
    logged = {found[0][1]: found[0][0]}
    assert helpers.scan_checkpoints(checkpoint, logged) == lightnings(checkpoint, logged) == found[1:]
