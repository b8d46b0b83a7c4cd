"""Nothing is unpickled, evaluated or run by a shell, but for the places that SECURITY.md lists."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.errors import OPTIONAL_PACKAGES

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    ("trainer/launchers/notebook.py", "torch.load"),
    ("trainer/cli/checkpoint/from_lightning.py", "import pickle"),
    ("trainer/cli/checkpoint/from_lightning.py", "torch.load"),
    ("trainer/checkpoint/lightning_file.py", "import pickle"),
    ("trainer/checkpoint/lightning_file.py", "torch.load"),
    ("trainer/compat/plugins.py", "torch.load"),
    ("trainer/compat/helpers.py", "import pickle"),
    ("trainer/compat/helpers.py", "pickle.dumps"),
    ("trainer/compat/helpers.py", "torch.load"),
    ("trainer/arguments.py", "eval"),
    ("trainer/arguments.py", "get_type_hints"),
    ("trainer/config/classes.py", "spec.loader.exec_module"),
    ("trainer/launchers/multinode.py", "C10dRendezvousBackend"),
}
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pickletools", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__", "get_type_hints", "C10dRendezvousBackend"}
CALLS = re.compile(
    r"(torch|np|numpy|yaml)\.(load|full_load|unsafe_load)|pickle\.\w+|os\.(system|popen)|torch\.package\.\w+"
    r"|torch\.(jit|export|hub)\.load\w*|typing\.get_type_hints|inspect\.get_annotations|spec\.loader\.exec_module"
    r"|(dist|torch\.distributed|distributed_c10d)\.\w*_object(_list)?"
)


def findings(source: str) -> Iterator[str]:
    """Yield what in a source can run code that is data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {one.name}" for one in node.names if one.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {one.name for one in node.names}
            if (node.module or "").split(".")[0] in MODULES:
                yield f"import {node.module}"
            if (node.module or "").startswith("torch") and any(
                re.fullmatch(r"load|\w+_object(_list)?", n) for n in names
            ):
                yield f"from {node.module} import {', '.join(sorted(names))}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in BUILTINS or CALLS.fullmatch(name):
                yield name
            for option in node.keywords:
                unsafe = (
                    option.arg in ("shell", "allow_pickle", "eval_str", "trust_remote_code")
                    and ast.unparse(option.value) != "False"
                )
                if unsafe:
                    yield f"{name}({option.arg}=...)"


def sources() -> Iterator[Path]:
    for folder in ("trainer", "strategies", "callbacks", "examples", "benchmarks", "docs"):
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


def test_no_source_unpickles_or_evaluates_but_where_it_is_listed() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), finding)
        for path in sources()
        if not {"strategies", "callbacks", "examples"} & set(path.relative_to(ROOT).parts[1:2])
        for finding in findings(path.read_text())
    }
    assert found == ALLOWED
    listed = (ROOT / "SECURITY.md").read_text()
    assert {path for path, _ in ALLOWED} == set(re.findall(r"^\| `(trainer/\S+\.py)`", listed, re.M))


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "from torch import load"),
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        *("from torch.distributed import broadcast_object_list", "eval('1')", "np.load('x', allow_pickle=True)"),
        *("subprocess.run('ls', shell=True)", "from typing import get_type_hints\nget_type_hints(print)"),
        *("inspect.signature(print, eval_str=True)", "AutoModel.from_pretrained('x', trust_remote_code=True)"),
    ],
)
def test_the_walk_finds(source: str) -> None:
    assert list(findings(source))


def test_every_test_that_is_named_exists() -> None:
    names = re.findall(r"`(tests/\S+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(names) > 4
    assert [name for name in names if not (ROOT / name).is_file()] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_optional_packages_are_named_as_the_extras_have_them() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {
        one
        for name in (
            *("deepspeed", "fp8", "ray", "tensorboard", "metrics", "wandb", "mlflow", "plots"),
            *("monitors", "migrate", "onnx"),
        )
        for one in extras[name]
    } == set(OPTIONAL_PACKAGES.values())


def test_no_message_or_page_advises_a_name_that_is_not_ours_on_the_index() -> None:
    files = [*sources(), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    advice = re.compile(r"pip install[^`\n]*(exact-trainer|['\" ]trainer\b)")
    assert [str(file) for file in files if advice.search(file.read_text())] == []
