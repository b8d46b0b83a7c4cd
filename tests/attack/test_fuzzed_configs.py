"""Configurations with drawn values, keys and bytes train as they say, or are refused with a message and exit code 2."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.drawn_values import COLLECTIONS, NUMBERS, ODD, TEXTS, conforms, draw, parameters
from tests.helpers.fuzzing import ACCEPTED, REFUSED, WrongError, called, try_each
from tests.helpers.project import USERS_FILE
from tests.tiers import Inputs
from trainer.callbacks import CALLBACKS
from trainer.config.types import wants_text
from trainer.settings import ARGUMENTS, Settings
from trainer.strategies import STRATEGIES

END = """

class Ended(Callback):
    def on_fit_end(self, trainer, module):
        Path("ended").write_text(str(trainer.global_step))


def stop_after_many(self, outputs, batch, batch_idx):
    if self.trainer.global_step == 40:
        self.trainer.stop("enough")


Net.on_train_batch_end = stop_after_many
"""
PLAIN = (type(None), bool, int, float, str)
OBJECTS = ("strategy", "callbacks", "logger", "profiler", "precision")
"""Settings for which a file gives a name, or a class and its arguments."""


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a file can hold the value."""
    if depth > 60:
        return False
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(is_plain(one, depth + 1) for one in value.values())
    if type(value) is list:
        return all(is_plain(one, depth + 1) for one in value)
    return type(value) in PLAIN


VALUES = [value for value in (*NUMBERS, *TEXTS, *COLLECTIONS, *ODD, None) if is_plain(value)]
CLASSES = (
    *("builtins.object", "sys.exit", "time.sleep", "os.path.join", "typing.Any", "torch.nn.Module"),
    *("abc.ABC", "trainer"),
    *("collections.abc.Mapping", "trainer.TrainModule", "trainer.Trainer", "trainer.nothing.Net", "__main__.Net"),
    *("mymodel.py:", "mymodel.py:Net.training_step", "mymodel.py:Net:Net", "mymodel.py:Abstract", "mymodel.py:Needy"),
    *("mymodel.py:Failing", "mymodel.py:make_net", "mymodel.py:Color", "mymodel.py:Open", "mymodel.Net", "mymodel:Net"),
    *(":Net", ".Net", "Net.", "..", "a..b", ":", "", "/", "./mymodel.py:Net", "../mymodel.py:Net", ".:mymodel.Net"),
    *("/dev/null:Net", "run.yaml:Net", "mymodel.py\0:Net", "ä.ö", "~/x.py:Net", "EarlyStopping", "CSVLogger", "ddp"),
    *("broken.py:Net", "leaving.py:Net", "odd.py:getattr", "odd.py:lie", "odd.py:Alias"),
    *("odd.py:Net", "odd.py:nothing"),
    *("numpy.float64", "xml.dom.minidom.Node", "os.environ", "sys.modules", "mymodel.py:torch.nn.Linear", "x" * 5000),
)
"""Names that are given for classes; some mean one."""
FILES = {
    "broken.py": "def (",
    "leaving.py": "import sys\nsys.exit(3)\n",
    "odd.py": "class Meta(type):\n    def __subclasscheck__(cls, other):\n        raise OSError('no')\n"
    "    def __repr__(cls):\n        raise OSError('no')\n"
    "class Net(metaclass=Meta):\n    pass\nAlias = list[int]\nlie = Net()\n"
    "def __getattr__(name):\n    raise RuntimeError(f'no {name}')\n",
}
OF_THE_MODULE = (
    *("lr", "width", "name", "sizes", "flag", "maybe", "mode", "color", "file", "steps", "layers"),
    *("encoder", "encoders"),
    *("kind", "anything"),
)


def right() -> dict[str, Any]:
    return {
        "module": {"class_path": "mymodel.py:Net", "init_args": {"lr": 0.1}},
        "data": {"class_path": "mymodel.py:Data", "init_args": {"batch_size": 4}},
        "trainer": {"max_steps": 2, "accelerator": "cpu", "callbacks": ["mymodel.py:Ended"]},
    }


def drawn_tree(rng: random.Random) -> dict[str, Any]:
    """Return a configuration with some values of the trainer, and of one callback and a strategy, drawn."""
    tree = right()
    for name in rng.sample(ARGUMENTS, rng.choice([0, 0, 1, 2])):
        if name not in OBJECTS:
            tree["trainer"][name] = plain(rng, parameters(Settings)[name])
    if rng.random() < 0.4:
        tree["trainer"]["callbacks"].append(described(rng, CALLBACKS, "class_path"))
    if rng.random() < 0.3:
        kinds = {name: kind for name, kind in STRATEGIES.items() if kind.multi_process or name == "single_device"}
        tree["trainer"]["strategy"] = described(rng, kinds, "name")
    for name in rng.sample(OF_THE_MODULE, rng.choice([0, 0, 0, 1])):
        tree["module"]["init_args"][name] = rng.choice([rng.choice(VALUES), named(rng), [named(rng)]])
    if rng.random() < 0.2:
        tree[rng.choice(["module", "data", "trainer", "seed", "ckpt_path", "allow_changes"])] = rng.choice(VALUES)
    if rng.random() < 0.15:
        change(rng, tree)
    return tree


def named(rng: random.Random) -> Any:
    """Return a class by its name, with arguments or without."""
    name = rng.choice([*CLASSES, "mymodel.py:Encoder", "mymodel.py:Layers", "mymodel.py:Net", "mymodel.py:Watcher"])
    arguments = {rng.choice(["size", "width", "lr", "", "class_path", "init_args"]): rng.choice(VALUES)}
    return rng.choice([name, {"class_path": name}, {"class_path": name, "init_args": arguments}, {**arguments}])


def change(rng: random.Random, tree: Any) -> None:
    """Change a value, a key, or the place of a value, somewhere in the tree."""
    keys = [(tree, key) for key in tree]
    for parent, key in keys:  # grows
        child = parent[key]
        if isinstance(child, (dict, list)) and len(keys) < 200:
            keys += [(child, one) for one in (list(child) if isinstance(child, dict) else range(len(child)))]
    parent, key = rng.choice(keys)
    how = rng.randrange(5)
    if how == 0:
        del parent[key]
    elif how == 1:
        parent[key] = rng.choice([[parent[key]], {"class_path": parent[key]}, {"0": parent[key]}, str(parent[key])])
    elif how == 2 and isinstance(parent, dict):
        parent[rng.choice(["", " ", "x", "a b", "9" * 5000, "k" * 100_000, "0", "init_args", "class_path", "<<"])] = 1
    elif how == 3:
        parent[key] = named(rng)
    else:
        parent[key] = rng.choice(VALUES)


def described(rng: random.Random, kinds: dict[str, Any], key: str) -> dict[str, Any]:
    name = rng.choice(list(kinds))
    known = parameters(kinds[name])
    chosen = rng.sample([one for one in known if one != "self"], min(len(known), rng.choice([0, 1, 1, 2])))
    given = {one: plain(rng, known[one]) for one in chosen}
    return {key: name, **given} if key == "name" else {key: name, "init_args": given}


def plain(rng: random.Random, parameter: Any) -> Any:
    value = draw(rng, parameter)
    return value if is_plain(value) else rng.choice(VALUES)


def written(rng: random.Random, tree: dict[str, Any]) -> Path:
    """Write the tree as YAML, JSON or TOML; sometimes with a part of the text changed."""
    kind = rng.choice(["yaml", "yaml", "json", "toml"])
    text = {"yaml": yaml.safe_dump, "json": json.dumps, "toml": as_toml}[kind](tree)
    for _ in range(rng.choice([0] * 7 + [1, 1, 3])):
        text = edited(rng, kind, text)
    path = Path(rng.choice([f"run.{kind}"] * 20 + [f"RUN.{kind.upper()}", f"ä b\n.{kind}", "run.txt", f".{kind}"]))
    data = text.encode(rng.choice(["utf-8"] * 8 + ["utf-16", "utf-8-sig", "latin-1"]), errors="replace")
    data = data.replace(b"\n", rng.choice([b"\n"] * 8 + [b"\r\n", b"\r"]))
    if rng.random() < 0.03:
        no_file(rng, path, data)
    else:
        path.write_bytes(data)
    return path


PIECES = {
    "yaml": (
        *("\t", "\0", "\n", "  ", "{", "]", '"', "&a", "*a", "- ", ": ", "!!python/name:os.system ", "ä"),
        *("\x85", "\ufeff"),
        *("!!set ", "!!binary ", "!!float ", "!!int ", "!!str ", "!!python/object/apply:os.system ", "!x "),
        *("! ", "!!map "),
        *("%YAML 1.1\n---\n", "---\n", "...\n", "? [a]\n: ", "<<: *a\n", "<<: 3\n", "<<: [1]\n", "# ", "|\n"),
        *(">-\n", "@"),
        *("a: &a [*a]\n", "a: &a {<<: *a}\n", "b: &b [x, x]\nc: &c [*b, *b]\n", "0o17", "1_000", "12:30:00"),
        *("yes", "~"),
        *("2030-01-01", ".inf", "-.nan", "1e999", "9" * 200, "0x" + "f" * 200, "null: 1\n", "1.5: 2\n"),
        *("true: 1\n", "`"),
    ),
    "json": (
        *("NaN", "-Infinity", "1e999", "9" * 5000, '"\\ud800"', "// x\n", ",", '{"a": 1, "a": 2}', "\0", "'", "\u2028"),
        *("[[[[", "}", '"x": 1,', "\\", "tru", "\ufeff", "/* */", "-", "0x1", "\x7f", "\t", "\n"),
    ),
    "toml": (
        *("2030-01-01", "2030-01-01T10:00:00Z", "10:00:00", "inf", "-nan", "9" * 5000, "0o17"),
        *("[trainer]\n", "[[trainer]]\n"),
        *("a.b.c = 1\n", "a = 1\na = 2\n", "'''", '"""', "# ", "\0", "= ", "[", "{}", "1_000", "\r", "\n", '"" = 1\n'),
        *("date = 2030-01-01\n", "time = 10:00:00\n", "[[a]]\n[[a.b]]\n", '"\\U00110000"', '"\\ud800"', "true"),
    ),
}
"""Texts that are inserted into files of each kind."""


def edited(rng: random.Random, kind: str, text: str) -> str:
    """Return the text with a piece inserted at the begin of a value or anywhere, or with a part of it gone."""
    values = [position + 1 for position, character in enumerate(text) if character in "\n ="]
    at, piece = (
        rng.choice([0, rng.randrange(len(text) + 1), *rng.choices(values or [0], k=3)]),
        rng.choice(PIECES[kind]),
    )
    inserted = text[:at] + piece + text[at:]
    end = text.find("\n", at) % (len(text) + 1)
    return rng.choice([inserted, inserted, text[:at] + piece + text[end:], text[:at] + text[at + 1 :], text[:at]])


def no_file(rng: random.Random, path: Path, data: bytes) -> None:
    """Put something else in the place of a configuration file."""
    kind = rng.choice(["folder", "pipe", "loop", "dangling", "nothing", "link", "endless", "empty", "large", "zeros"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("loop", "dangling", "link", "endless"):
        Path("target").write_bytes(data)
        path.symlink_to({"loop": path.name, "dangling": "nowhere", "link": "target", "endless": "/dev/zero"}[kind])
    elif kind != "nothing":
        path.write_bytes({"empty": b"", "large": data + b"\n# " + b"x" * 600_000, "zeros": bytes(5000)}[kind])


def as_toml(tree: dict[str, Any]) -> str:
    """Return the tree as TOML, which has no null: text stands for it."""

    def value(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {value(inner)}" for key, inner in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ", ".join(map(value, one)) + "]"
        return {None: '"null"'}.get(one, str(one)) if type(one) in (type(None), float) else json.dumps(one)

    return "".join(f"{key} = {value(inner)}\n" for key, inner in tree.items())


def check_refusal(code: int, error: str) -> str:
    """Check how a command has refused: exit code 2 (of a checkpoint 1), and one line for each problem."""
    lines = error.splitlines()
    codes = (1, 2) if "checkpoint" in error else (2,)
    if code not in codes or "Traceback" in error or not any(line.startswith("error: ") for line in lines):
        raise WrongError(f"exit code {code}: {error[-3000:]}")
    if len(error) > 20_000:
        raise WrongError(f"an error of {len(error)} characters: {error[:300]}")
    return REFUSED


def config_file(rng: random.Random) -> str:
    """Try one configuration."""
    Path("mymodel.py").write_text(USERS_FILE.replace("=self.batch_size)", "=max(1, self.batch_size))") + END)
    for name, source in FILES.items():
        Path(name).write_text(source)
    tree = drawn_tree(rng)
    path = written(rng, tree)
    text = path.read_text(errors="replace")[:5000] if path.is_file() else "no file"
    more = rng.choice([(), (), ("--dry-run",), ("--print-config",)])
    try:
        code, _, error = called("fit", "--config", str(path), "--trainer.enable_progress_bar=false", *more)
    except BaseException as error:
        raise RuntimeError(text) from error
    try:
        if code != 0:
            return check_refusal(code, error)
        if "Traceback" in error:
            raise WrongError(f"a traceback of an accepted one: {error[-2000:]}")
        if not more:
            check_accepted(path)
    except WrongError as error:
        raise WrongError(f"{path} {' '.join(more)}\n{text}\n{error}") from None
    return ACCEPTED


def check_accepted(path: Path) -> None:
    """Check that an accepted file was trained to its end, and that its values are of the annotated types."""
    if not Path("ended").exists() and "Ended" in path.read_text(errors="replace"):
        raise WrongError("accepted, and fit did not end")
    is_json = path.suffix.lower() == ".json"
    try:
        tree = json.loads(path.read_text("utf-8-sig")) if is_json else yaml.load(path.read_bytes(), yaml.SafeLoader)
    except (yaml.YAMLError, ValueError):  # a TOML file, or YAML that only one of the readers takes
        return
    if not isinstance(tree, dict):
        return
    for name, value in (tree.get("trainer") or {}).items() if isinstance(tree.get("trainer", {}), dict) else ():
        known = parameters(Settings)
        comparable = name in known and name not in OBJECTS and isinstance(value, (int, list))
        text = comparable and wants_text(value, known[name].annotation)  # `name: true` is the text "true"
        if comparable and not text and not conforms(value, known[name].annotation):
            raise WrongError(f"trainer.{name}={value!r} was taken, annotated {known[name].annotation}")


def test_configuration_files(inputs: Inputs) -> None:
    try_each(inputs, config_file)
