"""Read YAML, JSON and TOML into trees that know file and line (of TOML the file), and write YAML."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trainer.arguments import local_path
from trainer.config.tree import COMMAND_LINE, KEYS, MAX_DEPTH, Diagnostics, Node, Source, entries
from trainer.errors import ConfigError, did_you_mean

# The core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema). PyYAML follows 1.1, in which 1e-3 is text,
# 10:00:00:00 is a number, and `on` is true. Underscores in numbers are allowed as in Python.
SCALARS = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
    "merge": (re.compile(r"^<<$"), ["<"]),
}
TAG = "tag:yaml.org,2002:"


MAX_BYTES = 500_000
MAX_VALUES = 20_000
"""Maximum number of values in a file, where an alias (*) counts with everything that it stands for."""
PLACEHOLDER = re.compile(r"\{\w+(:[^{}\s]*)?\}")
"""A field of a text to fill in, as in `{epoch}-{val_loss:.2f}`, which YAML reads as a mapping."""
MAX_DIGITS = 100
"""Maximum number of digits of an integer."""


class UnreadableError(ConfigError):
    """A text is not a configuration, or contains more than one may."""

    def __init__(self, source: Source, message: str) -> None:
        super().__init__(message)
        self.source = source


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}

    def flatten_mapping(self, node: Any) -> None:
        """Merge `<<` into a mapping. Keys that are there several times would multiply with each level."""
        super().flatten_mapping(node)
        last = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, value) for key, value in node.value}
        node.value = list(last.values())


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, text: str) -> Any:
        """Escape the line break U+0085: PyYAML reads it as a space."""
        return self.represent_scalar(f"{TAG}str", text, '"' if "\x85" in text else None)


for _name, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(TAG + _name, _pattern, _first)
_Dumper.add_representer(str, _Dumper.text)


def to_yaml(data: Any, ascii_only: bool = False) -> str:
    """Return plain data as YAML in the order given; reading it gives the same data."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=not ascii_only, default_flow_style=False, width=110
    )


def yaml_for(encoding: str, text: str) -> str:
    """Return YAML with the same data whose characters this encoding has."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return to_yaml(yaml.safe_load(text), ascii_only=True)
    return text


TRANSLATED = {
    "an Accelerate configuration": ("compute_environment", "distributed_type", "num_machines", "mixed_precision"),
    "a DeepSpeed configuration": (
        *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16"),
        *("gradient_accumulation_steps", "gradient_clipping", "zero_allow_untested_optimizer"),
    ),
}
"""Configurations of other programs that `trainer config` translates, with the keys that identify them."""
OTHER_PROGRAMS = {
    **TRANSLATED,
    "a configuration of Hydra": ("defaults", "hydra", "_target_"),
    "a configuration of LightningCLI": ("model", "seed_everything"),
}
"""The same, with those that `trainer migrate` rewrites."""


def read_file(name: str, findings: Diagnostics) -> Node | None:
    """Read the configuration in a file; record a problem and return None if it cannot be read."""
    tree = read_tree(name, findings)
    kind = None if tree is None else other_program(tree)
    if kind is None:
        return tree
    command = "trainer config --from" if kind in TRANSLATED else "trainer migrate"
    findings.add(
        Source(name),
        f"this is {kind}; fit reads the keys module, data and trainer. Translate it: {command} {shlex.quote(name)}",
    )
    return None


def other_program(tree: Node) -> str | None:
    """Return the key of OTHER_PROGRAMS for a file that was written for one of them, else None."""
    names = {*entries(tree)}
    if names & {"module", "allow_changes"} or (names & {"data", "trainer", "ckpt_path"} and "model" not in names):
        return None
    return next((kind for kind, known in OTHER_PROGRAMS.items() if names & set(known)), None)


def read_tree(name: str, findings: Diagnostics, change: Callable[[str], str] | None = None) -> Node | None:
    """Read a file as `read_file` does, also one that was written for another program; `change` translates its text."""
    path = local_path(name)
    source = Source(name, folder=path.absolute().parent)
    findings.files.append(name)
    return _reported(lambda: _parsed_file(path, source, findings, change), source, findings)


def _reported(parse: Callable[[], Node], source: Source, findings: Diagnostics) -> Node | None:
    """Return the tree that `parse` reads; None after a problem, which goes to `findings`."""
    before = len(findings.problems)
    try:
        tree = parse()
    except RecursionError:
        findings.add(source, f"it is nested more than {MAX_DEPTH} levels deep.")
    except UnreadableError as error:
        findings.add(error.source, str(error))
    return tree if len(findings.problems) == before else None


def _parsed_file(path: Path, source: Source, findings: Diagnostics, change: Callable[[str], str] | None) -> Node:
    """Return the mapping in a file.

    Raises:
        UnreadableError, RecursionError: it is not a configuration.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if path.is_fifo():  # --config <(command)
        parse = _parsed_yaml
    elif not path.is_file():
        siblings = [file.name for file in path.parent.glob("*") if file.suffix.lower() in _PARSERS]
        problem = "this is a folder." if path.is_dir() else f"there is no such file in {path.absolute().parent}."
        raise UnreadableError(source, problem + did_you_mean(path.name, siblings))
    if parse is None:
        allowed = ", ".join(_PARSERS)
        raise UnreadableError(source, f"a configuration cannot end in {path.suffix!r}; allowed: {allowed}.")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(source, f"cannot be read: {error}.") from None
    if len(data) > MAX_BYTES:
        words = f"the file has more than {MAX_BYTES} bytes, which is too much for a configuration."
        raise UnreadableError(source, words)
    tree = parse(text, source, findings)
    if change is not None:
        tree = parse(change(text), source, findings)
    if not entries(tree):
        words = f"this is not a mapping of names to values: give one or more of {', '.join(KEYS)}."
        findings.add(tree.source, words)
    return tree


def read_value(text: str, option: str) -> Node:
    """Read a value of the command line, or of an environment variable, as YAML. The option is named where it is not.

    What YAML has around a value (comments, anchors, tags, the marks of documents) belongs to the text.
    """
    found = Diagnostics()
    tree = _reported(lambda: _parsed_yaml(text, COMMAND_LINE, found), COMMAND_LINE, found)
    if tree is None:
        if PLACEHOLDER.search(text):  # a template such as '{epoch}-{val_loss:.2f}'
            return Node(text, COMMAND_LINE, text)
        return Node(text, COMMAND_LINE, text, f"{option} {text!r}: {found.problems[0].message}")
    word = text.strip()
    is_template = PLACEHOLDER.search(text) and all(child.value is None for child in entries(tree).values())
    is_nested = isinstance(tree.value, (dict, list)) and not is_template and word != "-"
    is_quoted = re.fullmatch(r"""(['"]).*\1""", text, re.DOTALL)
    if not (is_nested or is_quoted or any(word and pattern.match(word) for pattern, _ in SCALARS.values())):
        tree = Node(text, COMMAND_LINE)
    tree.text = text
    return tree


# -- YAML -------------------------------------------------------------------------------------------------------------


def _parsed_yaml(text: str, source: Source, findings: Diagnostics) -> Node:
    _check_brackets(text)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return _YamlReader(loader, source, findings).node(root, root) if root else Node(None, source)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise UnreadableError(source.at(line), f"not valid YAML: {error.reason}.") from None
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        reason = " ".join(filter(None, (error.context, error.problem)))
        words = f"not valid YAML: {reason} (column {mark.column + 1})."
        raise UnreadableError(source.at(mark.line + 1), words) from None


def _check_brackets(text: str) -> None:
    """Raise RecursionError for more open brackets than any value has: the parser takes the square of their number."""
    depth = 0
    for match in re.finditer(r"[][{}]", text):
        depth = max(0, depth + (1 if match[0] in "[{" else -1))
        if depth > 2 * MAX_DEPTH:
            raise RecursionError


class _YamlReader:
    """Turns composed YAML into nodes."""

    def __init__(self, loader: _Loader, source: Source, findings: Diagnostics) -> None:
        self.loader = loader
        self.source = source
        self.findings = findings
        self.open: list[int] = []
        """The ids of the values around the one that is read."""
        self.values = 0

    def node(self, node: Any, where: Any) -> Node:
        """Return the node for a value. `where` is the YAML node whose line it gets: its key."""
        source = self.source.at(where.start_mark.line + 1)
        if id(node) in self.open:
            self.findings.add(source, "this value contains itself, through an alias (*).")
            return Node(None, source)
        self.values += 1
        if self.values > MAX_VALUES:
            words = f"it has more than {MAX_VALUES} values, including those that each alias (*) repeats."
            raise UnreadableError(source, words)
        if len(self.open) > MAX_DEPTH:
            raise RecursionError
        self.open.append(id(node))
        try:
            if not isinstance(node, yaml.ScalarNode) and node.tag not in (f"{TAG}map", f"{TAG}seq"):
                self.findings.add(source, f"the tag {node.tag!r} is not supported here; allowed: plain values.")
            if isinstance(node, yaml.MappingNode):
                return Node(self.mapping(node), source)
            if isinstance(node, yaml.SequenceNode):
                return Node([self.node(item, item) for item in node.value], source)
            value = self.scalar(node, source)
            is_text = value is None or node.tag == f"{TAG}str"
            return Node(value, source, None if is_text else node.value)
        finally:
            self.open.pop()

    def mapping(self, node: Any) -> dict[Any, Node]:
        lines: dict[Any, int] = {}
        for one in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            line = one.start_mark.line + 1
            if one.value in lines:
                first = f"first in line {lines[one.value]}"
                self.findings.add(self.source.at(line), f"key {one.value!r} is given twice, {first}. Keep one.")
            lines[one.value] = line
        self.loader.flatten_mapping(node)  # `<<: *defaults`
        children: dict[Any, Node] = {}
        for key_node, value_node in node.value:
            source = self.source.at(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                raise UnreadableError(source, "a key must be a name, not a list or mapping.")
            children[self.scalar(key_node, source)] = self.node(value_node, key_node)
            if (value_node.tag, value_node.value) == (f"{TAG}null", ""):
                self.findings.notes.append(f"{source}: {key_node.value} is empty, which is null.")
        return children

    def scalar(self, node: Any, source: Source) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(TAG)
        if kind in ("str", "merge"):  # JSON escapes some characters in two parts, and PyYAML reads two characters
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if kind not in SCALARS or not SCALARS[kind][0].match(text):
            self.findings.add(source, f"the tag {node.tag!r} is not supported here; allowed: plain values.")
            return None
        if kind == "int" and len(text) > MAX_DIGITS:
            self.findings.add(source, f"an integer of more than {MAX_DIGITS} digits: {text[:20]} and so on.")
            return None
        return _TO_PYTHON[kind](text)


def plain_value(text: str) -> Any:
    """Return what a text without quotes is in a file of YAML."""
    kind = next((kind for kind, (pattern, _) in SCALARS.items() if pattern.match(text)), "str")
    return _TO_PYTHON[kind](text)


_TO_PYTHON: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
    "merge": str,
}


# -- JSON -------------------------------------------------------------------------------------------------------------


def _parsed_json(text: str, source: Source, findings: Diagnostics) -> Node:
    try:
        with suppress(RecursionError):  # which the YAML parser reports
            json.loads(text, parse_int=str)
    except json.JSONDecodeError as error:
        words = f"not valid JSON: {error.msg} (column {error.colno})."
        raise UnreadableError(source.at(error.lineno), words) from None
    # JSON is YAML but for tabs; the YAML parser knows the lines.
    return _parsed_yaml(text.replace("\t", " "), source, findings)


# -- TOML -------------------------------------------------------------------------------------------------------------


def _parsed_toml(text: str, source: Source, findings: Diagnostics) -> Node:
    if any(key.count(".") > MAX_DEPTH for key in re.split(r"[=,\n]", text)):  # it takes the square of their number
        raise RecursionError
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r"at line (\d+)", str(error))
        line = int(position[1]) if position else text.count("\n") + 1
        raise UnreadableError(source.at(line), f"not valid TOML: {error}.") from None
    except ValueError:  # Python converts no more digits than sys.get_int_max_str_digits()
        raise UnreadableError(source, f"an integer of more than {MAX_DIGITS} digits.") from None
    return as_node(values, source)


def as_node(value: Any, source: Source, depth: int = 0) -> Node:
    """Return the node of plain data. The parser of TOML does not report lines: all have the file as their source."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        return Node({key: as_node(child, source, depth + 1) for key, child in value.items()}, source)
    if isinstance(value, (list, tuple)):
        return Node([as_node(child, source, depth + 1) for child in value], source)
    if type(value) is int and abs(value) >= 10**MAX_DIGITS:
        raise UnreadableError(source, f"an integer of more than {MAX_DIGITS} digits.")
    if isinstance(value, (datetime.date, datetime.time)):
        value = value.isoformat()
    return Node(value, source)


_PARSERS = {".yaml": _parsed_yaml, ".yml": _parsed_yaml, ".json": _parsed_json, ".toml": _parsed_toml}
"""Readers of a file's text, by its ending."""
