"""Rewrite class paths and arguments of a YAML or JSON file of LightningCLI or Hydra, keeping everything else."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Collection, Iterator

import yaml
from yaml.constructor import SafeConstructor

from trainer.cli.migrate.decisions import Finding
from trainer.cli.migrate.names import ARGUMENTS, VALUES, argument_words, lightning_root, name_here
from trainer.config.files import TAG, plain_value
from trainer.config.plug_names import callbacks, optimizers, schedulers, strategies
from trainer.config.tree import KEYS

CLASS_KEYS = ("class_path", "_target_")
ARGUMENTS_KEYS = ("init_args", "dict_kwargs")
CLASSES = ("model", "data", "trainer", "optimizer", "lr_scheduler")
SECTIONS = ("fit", "validate", "test", "predict")
"""Keys of a file of LightningCLI that has a section for each command."""
SECTION = "no sections of commands here: give each command a file with the content of its section at the top"
SEED = "'seed:' under 'trainer:', with a number"
MODULE = "'module:' for 'trainer fit', with the class as 'class_path:'"
UNKNOWN = "no key of a configuration here: a value for several places is a reference, ${KEY.NAME}, to one of them"
PLAIN = {f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str")}
YAML_11 = "a text in YAML 1.1, which LightningCLI reads, and {} here: write it in quotes if it is a text"
Change = tuple[int, int, str]
"""The start of a text, its length, and the text in its place."""


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


def migrate_yaml(text: str) -> tuple[str, list[Finding]]:
    """Return a file of YAML or JSON in this package's names, and what a person must decide in it.

    Raises:
        yaml.YAMLError: the file is not YAML.
    """
    changes: list[Change] = []
    findings: list[Finding] = []
    for document in _documents(text):
        if document is not None and _is_of_cli(document) and not _names(document) & {"module"}:
            _rewrite_plain_values(document, changes, findings)
    text, changes = _changed(text, changes), []  # by themselves: lines with such values may be moved
    for document in _documents(text):
        for mapping in _nodes(document):
            if isinstance(mapping, yaml.MappingNode):
                _rewrite_class(mapping, changes, findings)
        if isinstance(document, yaml.MappingNode):
            _rewrite_cli_keys(document, changes, findings)
    return _changed(text, changes), sorted(set(findings))


def _documents(text: str) -> list[yaml.Node | None]:
    readable = text.replace("\t", " ") if text.lstrip().startswith("{") else text  # JSON is YAML but for tabs
    return list(yaml.compose_all(readable, Loader=_Loader))


def _changed(text: str, changes: Collection[Change]) -> str:
    for start, length, new in sorted(set(changes), reverse=True):
        text = text[:start] + new + text[start + length :]
    return text


def _rewrite_plain_values(document: yaml.Node, changes: list[Change], findings: list[Finding]) -> None:
    """Write values as LightningCLI reads them where they are others here, such as `no`, `010` and `12:30`."""
    for node in _nodes(document):
        if not isinstance(node, yaml.ScalarNode) or node.style is not None or node.tag not in PLAIN:
            continue
        there, here = _plain(node), plain_value(node.value)
        if repr(there) == repr(here):
            continue
        if isinstance(there, str):
            findings.append(Finding(_line(node), node.value, YAML_11.format(here)))
        else:
            changes.append(_scalar(node, json.dumps(there)))


def _rewrite_class(mapping: yaml.MappingNode, changes: list[Change], findings: list[Finding]) -> None:
    """Rewrite a class that is written with its arguments."""
    entries = {key.value: value for key, value in mapping.value if isinstance(key, yaml.ScalarNode)}
    if "class_path" in entries:
        _move_dict_kwargs(mapping, changes, findings)
        path = entries["class_path"]
        if isinstance(path, yaml.ScalarNode) and not {".", ":"} & {*path.value} and path.value not in known_classes():
            todo = f"give it with its module, package.module.{path.value}, or as file.py:{path.value}"
            findings.append(Finding(_line(path), f"class_path: {path.value}", todo))
    for key in CLASS_KEYS:
        path = entries.get(key)
        if not isinstance(path, yaml.ScalarNode) or not (
            lightning_root(path.value) or path.value.startswith("trainer.")
        ):
            continue
        module, _, name = path.value.rpartition(".")
        if lightning_root(path.value):
            here = name_here(module, name)
            if here.path:
                changes.append(_scalar(path, here.path))
            else:
                findings.append(Finding(_line(path), path.value, f"use {here.instead}"))
        arguments = [mapping] if key == "_target_" else [entries.get(one) for one in ARGUMENTS_KEYS]
        for node in arguments:
            if isinstance(node, yaml.MappingNode):
                _rewrite_arguments(name, node, changes, findings)


def _rewrite_cli_keys(document: yaml.MappingNode, changes: list[Change], findings: list[Finding]) -> None:
    """Rewrite the top of a file of LightningCLI, or of a section of one."""
    entries = {key.value: (key, value) for key, value in document.value if isinstance(key, yaml.ScalarNode)}
    for name in [name for name in SECTIONS if name in entries and _is_of_cli(entries[name][1], False)]:
        named, section = entries.pop(name)
        findings.append(Finding(_line(named), name, SECTION))
        _rewrite_cli_keys(section, changes, findings)
    if not _is_of_cli(document):
        return
    _, settings = entries.get("trainer", (None, None))
    key, value = entries.get("model", (None, None))
    dotted = [one for one in _keys(document) if "." in one.value]
    for name in CLASSES:
        dotted += [one for one in _keys(entries.get(name, (None, None))[1]) if "." in one.value]
    findings += [Finding(_line(one), one.value, _without_dots(one.value)) for one in dotted]
    of_cli = bool(dotted) or "seed_everything" in entries or bool(_names(value) & {"class_path", *ARGUMENTS_KEYS})
    if isinstance(settings, yaml.MappingNode):
        _rewrite_arguments("Trainer", settings, changes, findings)
        of_cli |= isinstance(value, yaml.MappingNode) and {*entries} <= {*KEYS, "model"}
    if "seed_everything" in entries:
        seed, number = entries["seed_everything"]
        if not _move_seed(seed, number, document, settings, changes):
            findings.append(Finding(_line(seed), "seed_everything", f"use {SEED}"))
    if isinstance(key, yaml.ScalarNode) and "module" not in entries:
        if _names(value) & {"class_path", *ARGUMENTS_KEYS}:
            changes.append(_scalar(key, "module"))
        elif "_target_" not in _names(value) and of_cli:
            findings.append(Finding(_line(key), "model", f"use {MODULE}"))
    known = (*KEYS, "model", "seed_everything", *(one.value for one in dotted))
    for name in (name for name in entries if of_cli and name not in known):
        findings.append(Finding(_line(entries[name][0]), name, UNKNOWN))


def known_classes() -> set[str]:
    """Return the classes that a configuration names without their modules."""
    return {*callbacks("Callback"), *callbacks("Logger"), *optimizers(), *schedulers(), *strategies()}


def _keys(node: yaml.Node | None) -> list[yaml.ScalarNode]:
    """Return the keys of a mapping that are texts; none for anything else."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return [key for key, _ in pairs if isinstance(key, yaml.ScalarNode)]


def _names(node: yaml.Node | None) -> set[str]:
    return {key.value for key in _keys(node)}


def _is_of_cli(document: yaml.Node | None, with_sections: bool = True) -> bool:
    """Whether a file is one of LightningCLI, whole or with what another one changes, and none of Hydra."""
    pairs = document.value if isinstance(document, yaml.MappingNode) else []
    values = {key.value: value for key, value in pairs if isinstance(key, yaml.ScalarNode)}
    names = [name for name in values if with_sections or name in CLASSES]
    settings = values.get("trainer")
    if "_target_" in _names(settings):
        return False
    return (
        isinstance(settings, yaml.MappingNode)
        or "seed_everything" in values
        or any(_names(values[name]) & {"class_path", *ARGUMENTS_KEYS} for name in names)
        or any("." in name and name.partition(".")[0] in CLASSES for name in values)
        or (with_sections and any(name in SECTIONS and _is_of_cli(value, False) for name, value in values.items()))
    )


def _without_dots(name: str) -> str:
    first, *others = name.split(".")
    parts = ["module" if first == "model" else first, *others]
    return f"no key with dots here: write {': {'.join(parts)}: ...{'}' * len(others)}"


def _move_dict_kwargs(mapping: yaml.MappingNode, changes: list[Change], findings: list[Finding]) -> None:
    """Have the arguments of a class's `**kwargs`, which jsonargparse keeps apart, be among the others."""
    names = [key.value for key, _ in mapping.value]
    if "dict_kwargs" not in names:
        return
    at = names.index("dict_kwargs")
    key, value = mapping.value[at]
    before, others = mapping.value[at - 1] if at else (None, None)
    if "init_args" not in names:
        changes.append(_scalar(key, "init_args"))
    elif (
        before is not None
        and before.value == "init_args"
        and isinstance(others, yaml.MappingNode)
        and isinstance(value, yaml.MappingNode)
        and not (mapping.flow_style or others.flow_style or value.flow_style)
        and {one[0].start_mark.column for one in (*others.value, *value.value)} == {value.start_mark.column}
    ):
        start = key.start_mark.index - key.start_mark.column
        line = _text(key)[start:].splitlines(keepends=True)[0]
        changes.append((start, len(line), ""))
    else:
        findings.append(Finding(_line(key), "dict_kwargs", "write these arguments among those of init_args"))


def _rewrite_arguments(kind: str, arguments: yaml.MappingNode, changes: list[Change], findings: list[Finding]) -> None:
    given = {key.value for key, _ in arguments.value}
    for key, value in arguments.value:
        new = ARGUMENTS.get(kind, {}).get(key.value)
        if new is not None and new not in given:
            changes.append(_scalar(key, new))
        elif kind == "Trainer" and (same := _same_meaning(key, value, given, arguments.flow_style)):
            changes.extend(same)
        elif (words := argument_words(kind, key.value, _plain(value))) is not None:
            findings.append(Finding(_line(key), f"{kind}({key.value}=)", f"use {words}"))


def _same_meaning(key: yaml.ScalarNode, value: yaml.Node, given: Collection[str], in_braces: bool) -> list[Change]:
    """Return the changes to an argument that is another one here, with another value; none if that is not known."""
    if not isinstance(value, yaml.ScalarNode) or not value.value:
        return []
    plain = _plain(value)
    if key.value == "gpus" and type(plain) is int and plain > 0 and not {"accelerator", "devices"} & set(given):
        between, quote = ", " if in_braces else f"\n{' ' * key.start_mark.column}", key.style or ""
        return [_scalar(key, f"accelerator{quote}: {quote}gpu{quote}{between}{quote}devices")]
    new, written = VALUES.get((key.value, repr(plain)), ("", ""))
    if not new or (new != key.value and new in given):
        return []
    meant = literal_eval(written)
    text = json.dumps(meant) if key.style and not value.style else yaml.safe_dump(meant).splitlines()[0]
    return [_scalar(key, new), _scalar(value, text)]


def _move_seed(
    key: yaml.Node, value: yaml.Node, document: yaml.MappingNode, settings: yaml.Node | None, changes: list[Change]
) -> bool:
    """Move the line of a seed into the settings of the trainer; return False if that is not possible."""
    lines = _text(key)[key.start_mark.index :].splitlines(keepends=True)
    number = _plain(value)
    if key.start_mark.column:  # of a section, whose lines are indented
        return False
    if settings is None and type(number) is int and not document.flow_style:
        moved = lines[0].replace("seed_everything", "  seed", 1)
        changes.append((key.start_mark.index, len(lines[0]), f"trainer:\n{moved}"))
        return True
    if not isinstance(settings, yaml.MappingNode):
        return False
    in_block = not document.flow_style and not settings.flow_style and settings.value
    if type(number) is not int or not in_block or "seed" in {one.value for one, _ in settings.value}:
        return False
    line = lines[0] if lines[0].endswith("\n") else f"{lines[0]}\n"
    first = settings.value[0][0].start_mark
    moved = line.replace("seed_everything", "seed", 1) + " " * first.column
    changes += [(key.start_mark.index, len(lines[0]), ""), (first.index, 0, moved)]
    return True


def _nodes(node: yaml.Node | None) -> Iterator[yaml.Node]:
    """Return the nodes of a document, each once, although anchors may repeat them."""
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, yaml.MappingNode):
            waiting += [node for pair in one.value for node in pair]
        elif isinstance(one, yaml.SequenceNode):
            waiting += one.value


def _scalar(node: yaml.ScalarNode, new: str) -> Change:
    """Return a change of a text that keeps the quotes around it, and an anchor before it."""
    text, end = _text(node), node.end_mark.index
    while text[end - 1] in "'\" \t\r\n":
        end -= 1
    return end - len(node.value), len(node.value), new


def _text(node: yaml.Node) -> str:
    """Return the text of the file."""
    return str(node.end_mark.buffer).removesuffix("\0")


def _plain(node: yaml.Node) -> object:
    """Return the value of a node."""
    return SafeConstructor().construct_document(node)


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
