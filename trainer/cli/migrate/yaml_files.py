"""Rewrite class paths and arguments of a YAML or JSON file of LightningCLI or Hydra, keeping everything else."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Iterator

import yaml
from yaml.constructor import SafeConstructor

from trainer.cli.migrate.names import (
    ARGUMENTS,
    VALUES,
    Finding,
    Place,
    argument_words,
    lightning_root,
    mode_words,
    name_here,
)
from trainer.config.files import TAG, plain_value
from trainer.config.tree import KEYS

GPUS = ("accelerator", "devices")
ARGUMENTS_KEYS = ("init_args", "dict_kwargs")
CLASSES = ("model", "data", "trainer", "optimizer", "lr_scheduler")
DOTTED = re.compile(rf"({'|'.join(CLASSES)})\.")
SEED = "use 'seed:' under 'trainer:', with a number"
MODULE = "use 'module:' for 'trainer fit', with the class as 'class_path:'"
UNKNOWN = (
    "not a key of a configuration here: write NAME: {NAME: ...} for one with dots, and use a reference, ${KEY.NAME}, "
    "for a value in several places"
)
PLAIN = {f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str")}
YAML_11 = "a text in YAML 1.1, which LightningCLI reads, and {} here: write it in quotes if it is a text"
Change = tuple[int, int, str]
"""The start of a text, its length, and the text in its place."""
Entries = dict[str, tuple[yaml.ScalarNode, yaml.Node]]
"""Keys and values of a mapping, by the text of the key."""


class _Loader(yaml.SafeLoader):
    """Reads plain values as LightningCLI's parser, jsonargparse, does: of YAML 1.1, but for dates and for numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (f"{TAG}timestamp", f"{TAG}float")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{TAG}float",
    re.compile(
        r"^([-+]?[0-9][0-9_]*(\.[0-9_]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9_]+([eE][-+][0-9]+)?"
        r"|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def migrate_yaml(text: str, of_cli: bool = False) -> tuple[str, list[Finding]]:
    """Return a file of YAML or JSON in this package's names, and what a person must decide in it.

    Args:
        of_cli: it is a file of LightningCLI, whatever its keys are.

    Raises:
        yaml.YAMLError: the file is not YAML.
    """
    values = _Rewriter(text)
    for document in _documents(text):
        if (of_cli or _is_of_cli(document)) and "module" not in _entries(document):
            values.rewrite_plain_values(document)
    text = values.changed()  # first, because lines with such values may be moved
    rewriter = _Rewriter(text)
    for document in _documents(text):
        for node in _nodes(document):
            rewriter.rewrite_class(_entries(node), node)
        rewriter.rewrite_keys(_entries(document), document)
    return rewriter.changed(), sorted({*values.findings, *rewriter.findings})


def _documents(text: str) -> list[yaml.Node]:
    readable = text.replace("\t", " ") if text.lstrip().startswith("{") else text  # JSON is YAML but for tabs
    return [one for one in yaml.compose_all(readable, Loader=_Loader) if one is not None]


def _is_of_cli(document: yaml.Node) -> bool:
    """Whether a document is a file of LightningCLI, whole or with what another one changes, and none of Hydra."""
    entries = _entries(document)
    inside = {name: _entries(entries[name][1]) for name in CLASSES if name in entries}
    if "_target_" in inside.get("trainer", ()):
        return False
    if "seed_everything" in entries or (inside.get("trainer") and entries.keys() <= {*KEYS, "model"}):
        return True
    of_classes = {"class_path", *ARGUMENTS_KEYS}
    return any(map(DOTTED.match, entries)) or any(of_classes & one.keys() for one in inside.values())


class _Rewriter:
    """Collects the changes of a file, and what a person must decide in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.changes: set[Change] = set()
        self.findings: list[Finding] = []

    def changed(self) -> str:
        """Return the text with the changes."""
        text = self.text
        for start, length, new in sorted(self.changes, reverse=True):
            text = text[:start] + new + text[start + length :]
        return text

    def rewrite_plain_values(self, document: yaml.Node) -> None:
        """Write values as LightningCLI reads them where they are others here, such as `no`, `010` and `12:30`."""
        for node in _nodes(document):
            if not isinstance(node, yaml.ScalarNode) or node.style is not None or node.tag not in PLAIN:
                continue
            there, here = _plain(node), plain_value(node.value)
            if isinstance(there, str) and there != here:
                self._add(node, node.value, YAML_11.format(here))
            elif repr(there) != repr(here):
                self._replace(node, json.dumps(there))

    def rewrite_class(self, entries: Entries, mapping: yaml.Node) -> None:
        """Rewrite a class that is written with its arguments."""
        if {"class_path", "init_args", "dict_kwargs"} <= entries.keys():
            self._add(entries["dict_kwargs"][0], "dict_kwargs", "write these arguments among those of init_args")
        elif {"class_path", "dict_kwargs"} <= entries.keys():  # jsonargparse keeps the arguments of **kwargs apart
            self._replace(entries["dict_kwargs"][0], "init_args")
        inside = [entries[one][1] for one in entries.keys() & ARGUMENTS_KEYS]
        for name_of_key, arguments in (("class_path", inside), ("_target_", [mapping])):
            _, path = entries.get(name_of_key, (None, None))
            if isinstance(path, yaml.ScalarNode):
                self._rewrite_path(path, arguments)

    def _rewrite_path(self, path: yaml.ScalarNode, arguments: list[yaml.Node]) -> None:
        """Rewrite the path of a class, and the names of its arguments in these mappings."""
        module, _, name = path.value.rpartition(".")
        is_lightnings = lightning_root(path.value) is not None
        place = name_here(module, name) if is_lightnings else Place(path.value)
        if not place.path:
            self._add(path, path.value, f"use {place.instead}")
        elif is_lightnings:
            self._replace(path, place.path)
        if is_lightnings or module.startswith("trainer"):
            self._rewrite_arguments(name, arguments)

    def rewrite_keys(self, entries: Entries, document: yaml.Node) -> None:
        """Rewrite the arguments of the trainer, and the other keys at the top of a file of LightningCLI."""
        self._rewrite_arguments("Trainer", [value for name, (_, value) in entries.items() if name == "trainer"])
        if not _is_of_cli(document):
            return
        if "seed_everything" in entries and not self._move_seed(entries, document):
            self._add(entries["seed_everything"][0], "seed_everything", SEED)
        if "model" in entries and "module" not in entries:
            key, value = entries["model"]
            if {"class_path", *ARGUMENTS_KEYS} & _entries(value).keys():
                self._replace(key, "module")
            elif "_target_" not in _entries(value):
                self._add(key, "model", MODULE)
        for name, (key, _) in entries.items():
            if name not in (*KEYS, "model", "seed_everything"):
                self._add(key, name, UNKNOWN)

    def _rewrite_arguments(self, kind: str, mappings: list[yaml.Node]) -> None:
        """Rewrite the arguments of a class in these mappings."""
        for arguments, given in [(mapping, _entries(mapping)) for mapping in mappings]:
            if (words := mode_words(kind, {name: _plain(value) for name, (_, value) in given.items()})) is not None:
                self._add(arguments, f"{kind}(monitor=)", f"use {words}")
            for name, (key, value) in given.items():
                new = ARGUMENTS.get(kind, {}).get(name)
                if new is not None and new not in given:
                    self._replace(key, new)
                elif kind == "Trainer" and self._rewrite_value(key, value, given, _in_braces(arguments)):
                    continue
                elif (words := argument_words(kind, name, _plain(value))) is not None:
                    self._add(key, f"{kind}({name}=)", f"use {words}")

    def _rewrite_value(self, key: yaml.ScalarNode, value: yaml.Node, given: Entries, in_braces: bool) -> bool:
        """Rewrite an argument that is another one here, with another value; return whether there is such a one."""
        if key.value == "gpus" and str(_plain(value)).strip("0").isdigit() and given.keys().isdisjoint(GPUS):
            between, quote = ", " if in_braces else f"\n{' ' * key.start_mark.column}", key.style or ""
            self._replace(key, f"accelerator{quote}: {quote}gpu{quote}{between}{quote}devices")
            return True
        new, written = VALUES.get((key.value, repr(_plain(value))), (key.value, ""))
        if not isinstance(value, yaml.ScalarNode) or not (written and value.value) or new in {*given} - {key.value}:
            return False
        meant = literal_eval(written)
        self._replace(key, new)
        as_json = key.style and not value.style
        self._replace(value, json.dumps(meant) if as_json else yaml.safe_dump(meant).splitlines()[0])
        return True

    def _move_seed(self, entries: Entries, document: yaml.Node) -> bool:
        """Move the line of a seed into the settings of the trainer; return False if that is not possible."""
        key, number = entries["seed_everything"]
        if type(_plain(number)) is not int or _in_braces(document) or key.start_mark.column:
            return False
        line = self._line_of(key)
        if "trainer" not in entries:
            self._change(key.start_mark.index, len(line), "trainer:\n" + line.replace("seed_everything", "  seed", 1))
            return True
        settings = entries["trainer"][1]
        if _in_braces(settings) or not _entries(settings) or "seed" in _entries(settings):
            return False
        first = settings.value[0][0].start_mark
        moved = line.rstrip("\r\n").replace("seed_everything", "seed", 1)
        self._change(key.start_mark.index, len(line), "")
        self._change(first.index, 0, f"{moved}\n{' ' * first.column}")
        return True

    def _line_of(self, key: yaml.Node) -> str:
        """Return the line on which a key stands first, with its end."""
        return self.text[key.start_mark.index - key.start_mark.column :].splitlines(keepends=True)[0]

    def _change(self, start: int, length: int, new: str) -> None:
        self.changes.add((start, length, new))

    def _replace(self, node: yaml.ScalarNode, new: str) -> None:
        """Replace a text, keeping the quotes around it, and an anchor before it."""
        end = len(self.text[: node.end_mark.index].rstrip("'\" \t\r\n"))
        self._change(end - len(node.value), len(node.value), new)

    def _add(self, node: yaml.Node, what: str, todo: str) -> None:
        self.findings.append(Finding(node.start_mark.line + 1, what, todo))


def _entries(node: yaml.Node) -> Entries:
    """Return the entries of a mapping whose keys are texts; none for anything else."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return {key.value: (key, value) for key, value in pairs if isinstance(key, yaml.ScalarNode)}


def _in_braces(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and bool(node.flow_style)


def _nodes(document: yaml.Node) -> Iterator[yaml.Node]:
    """Yield the nodes of a document, each once, although anchors may repeat them."""
    waiting, seen = [document], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, yaml.MappingNode):
            waiting += [node for pair in one.value for node in pair]
        elif isinstance(one, yaml.SequenceNode):
            waiting += one.value


def _plain(node: yaml.Node) -> object:
    """Return the value of a node."""
    return SafeConstructor().construct_document(node)
