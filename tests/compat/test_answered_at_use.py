"""Names of Lightning's that are not here can be imported, subclassed and compared, and fail when they are used."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import typing
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Optional, TypeVar

import pytest
import torch

import trainer
from tests.compat import modules_of_lightning
from tests.helpers.toy import Toy
from tests.messages import raises_recorded

pytest.importorskip("libcst", reason="of `trainer migrate`, which is not installed")
from trainer import ConfigError
from trainer.cli.migrate.python_files import migrate_python
from trainer.compat import accelerate, finder, names
from trainer.compat.names import MODULES, NAMES

lightning = pytest.importorskip("pytorch_lightning")
MISSING: Any = importlib.import_module("trainer.callbacks").LearningRateFinder
WORDS = r"^LearningRateFinder is not here\. Use Tuner"


def in_words() -> list[str]:
    """Return the names of the tables that only have words."""
    return sorted(name for name, target in NAMES.items() if ":" not in target or " " in target)


@pytest.mark.parametrize("name", [*in_words(), "_ResultCollection", "_FabricModule", "Throughput", "Interval"])
@pytest.mark.parametrize("module", ["trainer.utilities", "trainer.pytorch.strategies", "trainer.fabric.plugins"])
def test_a_name_that_is_not_here_fails_when_it_is_used(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    own: Any = type("Own", (kind,), {"__init__": lambda self: None})
    beside_module: Any = type("Both", (torch.nn.Module, kind), {})
    assert not isinstance(3, kind)
    assert issubclass(own, kind)
    assert inspect.isclass(kind[int])
    assert type(None) in (kind | None).__args__
    for one in (kind, own, beside_module):
        with pytest.raises(ConfigError, match=f"^{name} is not here. Use "):
            one()
    with pytest.raises(AttributeError, match=f"^{name}.is_available: {name} is not here. Use "):
        kind.is_available()


@pytest.mark.parametrize("name", accelerate.NAMES)
def test_names_of_accelerate_too(name: str) -> None:
    kind = getattr(importlib.import_module("trainer"), name)
    with pytest.raises(ConfigError, match=f"^{name} is not here. Use "):
        kind()


def test_every_name_of_every_module_can_be_imported() -> None:
    for module, listed in MODULES.items():
        place = importlib.import_module(f"trainer.{module}")
        for name in listed:
            assert hasattr(place, name) or module == "pytorch", (module, name)


def test_the_table_of_modules_is_that_of_the_installed_lightning() -> None:
    file = Path(names.__file__).with_name("modules.txt")
    assert file.read_text() == modules_of_lightning.text(), modules_of_lightning.__doc__


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from trainer import Nonsense", "unknown name in trainer: 'Nonsense'. Known:"),
        ("from trainer.callbacks import EarlyStoping", "Did you mean 'EarlyStopping'?"),
        ("from trainer.strategies import DDPStrateg", "Did you mean 'DDPStrategy'?"),
        ("from trainer.loggers import CSVLoger", "Did you mean 'CSVLogger'?"),
        ("from trainer.utilities.types import STEP_OUTPT", "Did you mean 'STEP_OUTPUT'?"),
        ("from trainer.pytorch.profilers import SimpleProfilr", "Did you mean 'SimpleProfiler'?"),
        ("from trainer.fabric.plugins.environments import SLURMEnvironmnt", "Did you mean 'SLURMEnvironment'?"),
        ("from trainer.loggers.base import LightningLoggerBase", "No module named 'trainer.loggers.base'"),
        ("from trainer.loops import FitLoop", "Use trainer.progress and the hooks"),
        ("from trainer.utilities.exceptions import zzz", "Use trainer.ConfigError."),
    ],
)
def test_a_name_that_lightning_has_not_fails_at_the_import(line: str, words: str) -> None:
    with pytest.raises(ImportError, match=re.escape(words)):
        exec(line)
    module, _, name = line.removeprefix("from ").partition(" import ")
    if "base" not in module:
        assert not hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("line", ["from trainer.utilities import zzz", "from trainer.data import LightningDataset"])
def test_the_error_of_the_import(line: str) -> None:
    with raises_recorded(ImportError):
        exec(line, {})


def test_the_words_of_a_name_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "_answered", {})  # by other paths in other tests
    with raises_recorded(ConfigError):
        exec("from trainer.callbacks.timer import Interval\nInterval('step')")
    with raises_recorded(ConfigError):
        exec("from trainer.trainer.connectors.data_connector import _DataLoaderSource\n_DataLoaderSource(1, 2)")


def test_a_configuration_that_names_it_is_refused_in_words() -> None:
    from trainer.callback import Callback
    from trainer.config.classes import find_class
    from trainer.config.tree import COMMAND_LINE

    with pytest.raises(ConfigError, match=WORDS):
        find_class("trainer.callbacks.LearningRateFinder", (Callback,), {}, COMMAND_LINE)


# -- what packages do with names that they never use -------------------------------------------------------------------


def test_it_is_one_class_at_all_its_places() -> None:
    for module in ("callbacks", "callbacks.lr_finder", "pytorch.callbacks", "pytorch.callbacks.lr_finder", "utilities"):
        assert importlib.import_module(f"trainer.{module}").LearningRateFinder is MISSING


def test_it_can_be_stored_and_copied() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(MISSING, protocol)) is MISSING
    assert copy.copy(MISSING) is MISSING
    assert copy.deepcopy([MISSING]) == [MISSING]
    assert {MISSING: 1}[MISSING] == 1


T = TypeVar("T")


def test_it_annotates() -> None:
    namespace: dict[str, Any] = {"Name": MISSING, "Optional": Optional, "Any": Any}
    exec("def function(a: Name, b: Optional[Name] = None, *c: 'Name | int') -> Name[int]: ...", namespace)
    hints = typing.get_type_hints(namespace["function"], namespace)
    assert (hints["a"], hints["b"], hints["return"]) == (MISSING, Optional[MISSING], MISSING)  # noqa: UP045
    shown = inspect.signature(namespace["function"], eval_str=True, globals=namespace)
    assert shown.parameters["a"].annotation is MISSING

    class Own(MISSING, Generic[T]):
        pass

    assert issubclass(Own, MISSING)

    @dataclass
    class Settings:
        finder: MISSING | None = None
        kind: type = MISSING

    assert Settings().kind is MISSING
    assert len(fields(Settings)) == 2


def test_models_of_pydantic_annotate_with_it() -> None:
    pydantic = pytest.importorskip("pydantic")
    settings = {"arbitrary_types_allowed": True}
    annotations = {"finder": MISSING | None}
    namespace = {"__annotations__": annotations, "finder": None, "model_config": settings}
    model: Any = type("Model", (pydantic.BaseModel,), namespace)
    assert model().finder is None
    with pytest.raises(ValueError, match="instance of LearningRateFinder"):
        model(finder=3)


def test_parsers_of_jsonargparse_annotate_with_it() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")

    def function(count: int = 1, finder: Any = None) -> int:
        return count

    function.__annotations__["finder"] = MISSING | None
    assert jsonargparse.CLI(function, args=["--count=2"]) == 2


def test_it_registers() -> None:
    @functools.singledispatch
    def kind_of(value: object) -> str:
        return "any"

    @kind_of.register(MISSING)
    def _(value: object) -> str:
        return "finder"

    assert kind_of(3) == "any"
    assert kind_of.dispatch(type("Own", (MISSING,), {}))(None) == "finder"


def test_as_a_decorator_it_fails_when_the_function_is_called() -> None:
    @MISSING
    def function(a: int) -> int:
        """Say what it is."""
        return a

    assert (function.__name__, function.__doc__) == ("function", "Say what it is.")
    with pytest.raises(ConfigError, match=WORDS):
        function(1)


def test_names_of_errors_are_caught() -> None:
    missing = importlib.import_module("trainer.utilities.exceptions")._TunerExitException
    with pytest.raises(KeyError), pytest.raises(missing):
        raise KeyError
    assert issubclass(importlib.import_module("trainer.utilities.warnings").PossibleUserWarning, UserWarning)


def test_it_is_shown() -> None:
    assert "Use Tuner" in pydoc.render_doc(MISSING)
    assert str(inspect.signature(MISSING)) == "(*args: 'Any', **options: 'Any') -> 'Any'"
    assert inspect.getmembers(MISSING)
    assert not hasattr(MISSING, "__wrapped__")
    assert "LearningRateFinder" in repr(MISSING)


def test_it_has_no_members_to_go_through() -> None:
    with pytest.raises(TypeError):
        iter(MISSING)
    assert not isinstance(MISSING, Iterable)


def test_names_that_classes_of_protocols_inherit() -> None:
    types = importlib.import_module("trainer.fabric.utilities.types")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1)

    class Own(types.Optimizable, typing.Protocol):
        def add(self) -> None: ...

    assert isinstance(optimizer, types.Optimizable)
    assert not isinstance(3, types.Optimizable)


# -- constants and registries -----------------------------------------------------------------------------------------


def flags() -> list[tuple[str, str, Any]]:
    """Return module, name and value of Lightning's constants that say what there is."""
    found = []
    for module, listed in modules_of_lightning.modules().items():
        for name in listed:
            if re.search("_AVAILABLE$|_EQUAL_[0-9_]+$|^_IS_(WINDOWS|INTERACTIVE)", name):
                package = "lightning_fabric" if module.startswith("fabric.") else "pytorch_lightning"
                theirs = importlib.import_module(f"{package}.{module.removeprefix('fabric.')}")
                found.append((module, name, getattr(theirs, name)))
    return found


def test_constants_have_lightnings_values() -> None:
    for module, name, value in flags():
        here = getattr(importlib.import_module(f"trainer.{module}"), name)
        assert type(here) is bool
        assert here == bool(value), name


def test_constants_of_other_versions() -> None:
    imports = importlib.import_module("trainer.utilities.imports")
    assert imports._TORCHMETRICS_AVAILABLE is True
    assert imports._NOTHINGLIKEIT_AVAILABLE is False
    assert imports._NOTHINGLIKEIT_LESS_EQUAL_1_0 is False
    assert imports._TORCH_GREATER_EQUAL_1_10 is True
    assert imports._TORCH_GREATER_EQUAL_99_0 is False
    assert imports._TORCH_LESS_EQUAL_99_0 is True
    major, minor = torch.__version__.split(".")[:2]
    assert getattr(imports, f"_TORCH_EQUAL_{major}_{minor}") is True
    assert getattr(imports, f"_TORCH_EQUAL_{major}_{int(minor) + 1}") is False
    assert getattr(imports, f"_PYTHON_GREATER_EQUAL_{'_'.join(map(str, sys.version_info[:3]))}") is True
    assert getattr(imports, f"_PYTHON_LESS_EQUAL_{'_'.join(map(str, sys.version_info[:3]))}") is True


def test_registries_take_what_is_registered() -> None:
    registry = importlib.import_module("trainer.strategies").StrategyRegistry
    registry.register("mine", Toy, description="x")

    @registry.register("other")
    class Other:
        pass

    again = importlib.import_module("trainer.fabric.strategies.registry").STRATEGY_REGISTRY
    assert dict(again) == {"mine": Toy, "other": Other}
    assert again.available_strategies() == ["mine", "other"]
    assert importlib.import_module("trainer.accelerators").AcceleratorRegistry == {}
    registry.clear()


def test_warnings_that_packages_silence_are_not_all_warnings() -> None:
    silenced = importlib.import_module("trainer.utilities.warnings").PossibleUserWarning
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        importlib.import_module("trainer.utilities").disable_possible_user_warnings()
        warnings.warn("something else", UserWarning, stacklevel=1)
        warnings.warn("this", silenced, stacklevel=1)
    assert [str(one.message) for one in seen] == ["something else"]


# -- names of packages, and of lightning_utilities --------------------------------------------------------------------


def names_of_packages() -> list[list[str]]:
    """Return module, name and packages of names of Lightning 2.6.6 that packages of the registry import."""
    lines = Path(__file__).with_name("names_of_packages.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def test_names_that_packages_import_are_here_after_their_imports_are_renamed() -> None:
    for module, name, *_ in names_of_packages():
        renamed = re.sub(r"^(lightning|pytorch_lightning)\b", "trainer", module)
        renamed = re.sub(r"^lightning_fabric\b", "trainer.fabric", renamed)
        exec(f"from {renamed} import {name}", {})


def test_names_that_packages_import_are_here_in_a_process_that_runs_as_lightning(tmp_path: Path) -> None:
    program = "\n".join(f"from {module} import {name}" for module, name, *_ in names_of_packages())
    (tmp_path / "imports.py").write_text(program)
    command = [sys.executable, "-m", "trainer", "run-as-lightning", "imports.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["import trainer as L; L.LightningModule", "from trainer.loggers import Logger"])
def test_the_rank_of_lightning_utilities_is_set(first: str) -> None:
    pytest.importorskip("lightning_utilities")
    program = f"{first}\nfrom lightning_utilities.core.rank_zero import rank_zero_only as only\nprint(only.rank)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from lightning.pytorch.callbacks import LearningRateFinder", "LearningRateFinder"),
        ("from pytorch_lightning.callbacks.timer import Interval", "Interval"),
        ("from lightning.fabric.wrappers import _FabricModule", "_FabricModule"),
        ("from pytorch_lightning.trainer.connectors.data_connector import _DataLoaderSource", "_DataLoaderSource"),
        ("from lightning import Fabric", "Fabric"),
        ("from trainer.trainer.connectors.data_connector import _DataLoaderSource", "_DataLoaderSource"),  # once more
        ("from trainer.callbacks import LearningRateFinder", "LearningRateFinder"),
        ("import pytorch_lightning as pl\nx = pl.callbacks.LearningRateFinder", "LearningRateFinder"),
        ("from lightning.pytorch import loops\nx = loops.fetchers._DataFetcher", "_DataFetcher"),
        (
            "import lightning as L\nx = L.pytorch.trainer.connectors.data_connector._DataLoaderSource",
            "_DataLoaderSource",
        ),
    ],
)
def test_migrate_lists_names_that_are_only_answered_at_use(line: str, name: str) -> None:
    found = migrate_python(line.encode())[1]
    assert [one.what for one in found] == [name]
    assert found[0].todo


@pytest.mark.parametrize(
    "name",
    [
        *(
            "utilities.imports._TORCH_GREATER_EQUAL_2_4",
            "loops._FitLoop",
            "utilities.types.STEP_OUTPUT",
            "seed_everything",
        ),
        *("callbacks.progress.TQDMProgressBar", "loggers.wandb.WandbLogger", "strategies.DDPStrategy", "Trainer.fit"),
        *("utilities.model_summary.ModelSummary", "callbacks.ModelCheckpoint.CHECKPOINT", "__file__", "plugins"),
    ],
)
def test_migrate_does_not_list_names_that_are_here(name: str) -> None:
    module, _, last = name.rpartition(".")
    assert migrate_python(f"import pytorch_lightning as pl\nx = pl.{name}".encode())[1] == []
    if module and module[0].islower() and "." not in last and module != "callbacks.ModelCheckpoint":
        for package in ("lightning.pytorch", "trainer"):
            assert migrate_python(f"from {package}.{module} import {last}".encode())[1] == []


def test_modules_here_are_not_hidden_by_names_of_lightning() -> None:
    """`from trainer.cli import main` asks the package for the name before it imports the module."""
    root = Path(trainer.__file__).parent
    code = "import sys\nfrom importlib import import_module\nfrom types import ModuleType\nwrong = []\n"
    code += "for package, name in PAIRS:\n    found = {}\n    exec(f'from {package} import {name} as it', found)\n"
    code += "    wrong += [] if isinstance(found['it'], ModuleType) else [(package, name)]\nassert not wrong, wrong\n"
    files = [path for path in root.rglob("*.py") if "as_lightning" not in path.parts and path.stem[0] != "_"]
    names = [".".join(("trainer", *path.relative_to(root).with_suffix("").parts)) for path in files]
    pairs = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in names if "strategies.xla" not in name]
    skipped = {("trainer.compat", "lightning")}  # changes the process
    code = f"PAIRS = {sorted({*pairs} - skipped)!r}\n{code}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
