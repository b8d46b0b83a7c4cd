"""The release: files, metadata, the names that consoles and other projects see, and private names of torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from types import ModuleType

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import trainer
import trainer.callbacks
import trainer.strategies
from trainer.cli.collisions import collisions
from trainer.errors import refuse_other_package

ROOT = Path(__file__).parent.parent
FOLDERS = ("trainer", "strategies", "callbacks")
PACKAGED = (*FOLDERS, "examples", "tests", "docs", "benchmarks")


WITH_STUBS = ("trainer.loggers", "trainer.profilers")
"""Modules of Lightning's that are served, and have a file for type checkers."""


def test_dir_lists_the_public_names_alone() -> None:
    assert set(trainer.__all__) == set(dir(trainer))
    assert {"ModelCheckpoint", "EarlyStopping", "read_predictions"} <= set(dir(trainer.callbacks))
    assert {"FSDPStrategy", "DDPStrategy"} <= set(dir(trainer.strategies))
    assert {"CSVLogger", "TensorBoardLogger"} <= set(dir(import_module("trainer.loggers")))
    for package in (trainer.callbacks, trainer.strategies, import_module("trainer.loggers")):
        others = [name for name in dir(package) if not callable(getattr(package, name)) or name.startswith("_")]
        assert others == [], package


def test_the_version_is_the_same_everywhere() -> None:
    from importlib.metadata import version

    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == trainer.__version__
    assert f"## {trainer.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert version("exact-trainer") == trainer.__version__


def test_the_lowest_versions_are_tried() -> None:
    """In the environment of `make test-xla`, which has the torch that is the lowest."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    tried = dict(re.findall(r"^([\w-]+)==(.*)$", (ROOT / "constraints-xla.txt").read_text(), re.MULTILINE))
    for name, lowest in (text.partition(",")[0].split(">=") for text in required):
        assert f"{tried[name]}.".startswith(f"{lowest}."), name


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that was built from it."""
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("source")
    unwanted = ignore_patterns("__pycache__", "version_*")
    for folder in PACKAGED:
        copytree(ROOT / folder, source / folder, symlinks=True, ignore=unwanted)
    for file in [*ROOT.glob("*.md"), *ROOT.glob("*.txt")]:
        copy(file, source)
    for name in (
        *("pyproject.toml", "setup.py", "LICENSE", "MANIFEST.in", "Makefile", "mkdocs.yml"),
        *("CITATION.cff", ".pre-commit-config.yaml"),
    ):
        copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "absent from the `packages` configuration" not in built.stdout + built.stderr
    return source / "dist"


def test_the_wheel_has_the_linked_folders_under_the_package(release: Path) -> None:
    with zipfile.ZipFile(next(release.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name.partition("/")[0] + "/"}
    source = release.parent
    inside = [path for path in (source / "trainer").rglob("*") if path.is_file()]
    linked = [path for folder in (*FOLDERS[1:], "examples") for path in (source / folder).rglob("*") if path.is_file()]
    expected = {path.relative_to(source).as_posix() for path in inside}
    assert names == expected | {f"trainer/{path.relative_to(source).as_posix()}" for path in linked}


def test_a_module_that_was_deleted_is_not_packed(release: Path, tmp_path: Path) -> None:
    """Although pip builds in the clone, and leaves build/ there."""
    source = release.parent
    (source / "build" / "lib" / "trainer").mkdir(parents=True)
    (source / "build" / "lib" / "trainer" / "ghost.py").touch()
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert "trainer/trainer.py" in wheel.namelist()
        assert "trainer/ghost.py" not in wheel.namelist()


def test_an_index_takes_the_sdist_and_the_wheel(release: Path) -> None:
    pytest.importorskip("twine")
    files = sorted(release.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_wheel_works_away_from_the_repository(release: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(next(release.glob("*.whl")))], check=True)
    environ = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command: str | Path) -> str:
        ran = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr
        return ran.stdout

    places = run(sys.executable, "-c", "import trainer, trainer.strategies as s; print(trainer.__file__, s.__file__)")
    assert all(Path(place).is_relative_to(site) for place in places.split())
    command = site / "bin" / "trainer"
    run(command, "init", "--template", "gpt", "gpt")
    small = ("--config", "gpt/config.yaml", "--trainer.max_steps", "2", "--trainer.accelerator", "cpu")
    run(command, "fit", *small)
    assert "step=2" in run(command, "checkpoint", "ls", "runs")
    run(command, "fit", *small[:3], "3", *small[4:], "--ckpt-path", "last")
    assert "step=3" in run(command, "checkpoint", "ls", "runs")


def test_the_tests_of_the_sdist_run(release: Path, tmp_path: Path) -> None:
    with tarfile.open(next(release.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = next(tmp_path.iterdir())
    assert {"LICENSE", "CHANGELOG.md", "README.md"} <= {path.name for path in unpacked.iterdir()}
    selection = ["tests/test_optimizers.py", "tests/test_seed.py", "tests/config"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *selection]
    ran = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr


def test_a_type_checker_of_another_project_finds_the_editable_install(tmp_path: Path) -> None:
    if not [*Path(sys.prefix).glob("lib/python*/site-packages/exact_trainer_types.pth")]:
        pytest.skip("the package was not installed by make")
    script = tmp_path / "script.py"
    modules = (trainer, trainer.callbacks, trainer.strategies, *map(import_module, WITH_STUBS))
    names = {module.__name__: [name for name in dir(module) if not name.startswith("__")] for module in modules}
    imports = [
        f"from {module} import {', '.join(f'{name} as {name}_{number}' for name in listed)}"
        for number, (module, listed) in enumerate(names.items())
    ]
    script.write_text("\n".join([*imports, "Trainer_0(max_epoch=3)", ""]))
    # Without the packages that ours imports, through which mypy would go for a minute.
    others = ",".join(f"{name}.*" for name in ("torch", "deepspeed", "torchmetrics", "transformers", "numpy", "sympy"))
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{others}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", script.name]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = re.findall("^script.py:(.*)", checked.stdout, re.MULTILINE)
    assert errors == [
        '6: error: Argument "max_epoch" to "Trainer" has incompatible type "int"; expected "Never"  [arg-type]'
    ]


# -- private names of torch ------------------------------------------------------------------------------------------


@cache
def product_trees() -> list[ast.Module]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [ast.parse(path.read_text()) for path in files if not any(parent.is_symlink() for parent in path.parents)]


def test_private_names_of_torch_are_those_of_the_list() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Private interfaces of torch")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(torch\.\S+)` \|", text, re.MULTILINE))
    assert {name for tree in product_trees() for name in private_names(tree)} == listed


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield names of torch up to the first part that begins with an underscore."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in node.names}
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from filter(None, map(_private_part, imported))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            start, _, rest = ast.unparse(node).partition(".")
            if name := _private_part(f"{known.get(start, '')}.{rest}"):
                yield name


def _private_part(name: str) -> str | None:
    found = re.match(r"torch(\.[a-zA-Z]\w*)*?\._[a-zA-Z]\w*", name)
    return re.sub(r"(torch\._foreach_)\w+", r"\1*", found[0]) if found else None


def listed_attributes() -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### Private attributes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_private_attributes_of_foreign_objects_are_those_of_the_list() -> None:
    own = {name for tree in product_trees() for name in defined(tree)}
    found = {name for tree in product_trees() for name in private_attributes(tree, own)}
    found |= {name for tree in product_trees() for name in names_in_strings(tree) if name not in {*own, *SUFFIXES}}
    found |= {name for tree in product_trees() for name in names_by_which_others_work(tree)}
    assert {name for name in listed_attributes() if OF_OTHERS.fullmatch(name)} == found


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the list is of the classes of torch 2.13")
def test_public_names_in_private_classes_of_fsdp2_are_those_of_the_list() -> None:
    own = {name for tree in product_trees() for name in defined(tree)}
    public = {name for one in (*PUBLIC_OBJECTS, FSDPModule, torch, torch.distributed) for name in dir(one)}
    of_fsdp = {name for path in FSDP2.glob("*.py") for name in defined(ast.parse(path.read_text()))} - public - own
    strategies = [ast.parse(path.read_text()) for path in (ROOT / "strategies").rglob("*.py")]
    used = {node.attr for tree in strategies for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in used & of_fsdp if name[0] != "_"} == {
        name for name in listed_attributes() if not OF_OTHERS.fullmatch(name)
    }


OF_OTHERS = re.compile(r"_\w+|(ds|co|f|gi)_\w+|cell_contents|dis")
"""Private names, those of DeepSpeed in parameters, and those of CPython's frames and compiled code."""
SUFFIXES = {"_core", "_dataloader", "_file_", "_model_eval", "_model_train", "_norm", "_norm_total", "_of", "_parallel"}
SUFFIXES |= {"_parsing", "_per_s", "_type", "_shtab_few_or_file", "_hparams", "_extra_state", "_toggled_parameters"}
SUFFIXES |= {"_batch_end", "_batch_start", "_epoch_end", "_epoch_start", "_REGISTRY"}
"""Texts that are no names of attributes of other packages."""
FSDP2 = Path(torch.distributed.fsdp.__file__).parent / "_fully_shard"


def names_in_strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch("_[a-zA-Z]\\w*", node.value):
            yield node.value


def names_by_which_others_work(tree: ast.Module) -> Iterator[str]:
    """Yield DeepSpeed's names of what it keeps in parameters and modules, and names of CPython's compiled code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch("(ds|co|gi)_[a-z]\\w+|f_lasti|cell_contents", node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch("ds_[a-z_]*[a-z]", str(node.value)):
            yield str(node.value)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "dis")


OF_PYTHON = {"_actions", "_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"}
PUBLIC_OBJECTS = (
    nn.Module(),
    torch.optim.SGD([torch.zeros(1)]),
    torch.zeros(1),
    torch.utils.data.DataLoader([1]),
    torch.amp.GradScaler("cpu"),
    DTensor,
    DeviceMesh,
    LocalElasticAgent,
    nn.parallel.DistributedDataParallel,
)
OF_TORCH = {name for one in PUBLIC_OBJECTS for name in dir(one)}


def private_attributes(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield the private attributes in a file that the product does not define, or torch's objects have as well."""
    imported = {  # of torch, whose names are in the other list, and of Python
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if getattr(node, "module", alias.name).partition(".")[0] in {"torch", *sys.stdlib_module_names}
    }
    here = set(defined(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[value, ast.Constant(value=str(name)), *_]
            ):
                pass
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars"), args=[value]), slice=ast.Constant(value=str(name))
            ):
                pass
            case _:
                continue
        if not re.match("_[a-zA-Z]", name) or name in OF_PYTHON or ast.unparse(value).partition(".")[0] in imported:
            continue
        inherited = ast.unparse(value) == "super()"
        asked = isinstance(node, ast.Call)  # as it may be missing, which is not so of names of our own
        if asked or (name in OF_TORCH and (inherited or name not in here)) or name not in own:
            yield name


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes that a file defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Dict(keys=keys):  # of an object that is made by updating its __dict__
                yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
            case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Store()):
                yield name


# -- two things of one name ------------------------------------------------------------------------------------------

OWN_FILE = "raise SystemExit('the file of the user was imported')\n"


def test_a_file_of_the_user_called_trainer_is_named_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(OWN_FILE)
    start = "import sys; sys.path.remove(''); from trainer.__main__ import main; sys.exit(main())"
    model = ["--module", f"{ROOT}/examples/gan/module.py:GAN", "--print-config"]
    ended = run([sys.executable, "-c", start, "fit", *model], tmp_path)
    note = f"{tmp_path}/trainer.py: scripts, spawned workers and `python -m trainer` in this folder import it"
    assert note in ended.stderr
    launched = run([sys.executable, "-c", start, "launch", "--nproc-per-node", "2", "trainer", "fit", *model], tmp_path)
    assert "the file of the user" not in launched.stdout + launched.stderr
    assert launched.returncode == 0, launched.stderr
    assert launched.stderr.count(note) == 1  # a launched command prints its notes, once
    (tmp_path / "train.py").write_text("import trainer")
    script = [f"{tmp_path.name}/train.py"]
    assert (
        note in run([sys.executable, "-c", start, "launch", "--nproc-per-node", "1", *script], tmp_path.parent).stderr
    )


SPAWNING = """
import torch
from torch.utils.data import DataLoader
from trainer import TrainModule


class Spawning(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(1, 1), num_workers=1, multiprocessing_context="spawn")
"""


def test_a_run_whose_spawned_workers_import_that_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(OWN_FILE)
    (tmp_path / "module.py").write_text(SPAWNING)
    start = "import sys; sys.path.remove(''); from trainer.__main__ import main; sys.exit(main())"
    model = ["--module", "module.py:Spawning", "--trainer.fast_dev_run", "true"]
    ended = run([sys.executable, "-c", start, "fit", *model], tmp_path)
    assert ended.returncode == 1
    assert f"note: {tmp_path}/trainer.py: " in ended.stderr


def test_a_file_called_trainer_is_named_wherever_python_searches_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "trainer.py").touch()
    assert not [note for note in collisions() if "trainer.py" in note]
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert [note for note in collisions() if note.startswith(f"{folder}/trainer.py: ")]
    (folder / "pyproject.toml").write_text('[project]\nname = "exact-trainer"\n')  # a checkout of this package
    assert not collisions()


@pytest.mark.parametrize("package", ["trainer", "coqui-tts-trainer"])
def test_the_other_distributions_of_this_name_are_found(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in ((package, "trainer/__init__.py"), ("my-trainer", "my_trainer/trainer/__init__.py")):
        folder = tmp_path / f"{name.replace('-', '_')}-0.0.36.dist-info"
        folder.mkdir()
        (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{file},sha256=abc,298\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    (note,) = (note for note in collisions() if "is installed" in note)
    assert f"pip uninstall {package} exact-trainer" in note


# Their first lines: of `trainer`, of `coqui-tts-trainer`; and what `pip uninstall` leaves of ours.
@pytest.mark.parametrize("first", ["from trainer.model import *", "from trainer.config import TrainerArgs", None])
def test_another_distribution_that_was_installed_over_this_one_is_named(first: str | None, tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    for path in (ROOT / "trainer").iterdir():
        if path.name not in ("__init__.py", "trainer.py"):
            (tmp_path / "trainer" / path.name).symlink_to(path)
    if first is not None:
        (tmp_path / "trainer/__init__.py").write_text(first)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from trainer.__main__ import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", start, "--version"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "another distribution with the import name 'trainer' is, or was, installed over this one" in ended.stderr


def test_a_folder_of_the_users_own_is_to_be_renamed(tmp_path: Path) -> None:
    """Where this package is installed editable, its command is found behind the user's package."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/__init__.py").write_text("")
    package = ModuleType("trainer")
    package.__path__ = [str(tmp_path / "trainer")]
    with pytest.raises(ImportError, match="give it another name") as caught:
        refuse_other_package(package)
    assert f"the folder {tmp_path / 'trainer'} for this package" in str(caught.value)
    assert "ninstall" not in str(caught.value)
    package.__path__ = [str(tmp_path / "site-packages" / "trainer")]
    with pytest.raises(ImportError, match="pip uninstall"):
        refuse_other_package(package)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environ)
