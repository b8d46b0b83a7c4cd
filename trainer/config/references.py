"""Replace references in a configuration: `${data.size}` by that value, `${env:NAME}` by an environment variable."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from types import NoneType
from typing import Any

from trainer.config.files import read_value
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node, OfData, children_of, entries, mapped
from trainer.errors import did_you_mean

REFERENCE = re.compile(r"(\$?)\$\{\s*((?:[^${}]|\$\{[^${}]*\})*?)\s*\}")
"""`${name}`, which may contain another one; a second `$` before it makes it plain text."""
ENVIRONMENT = ("env:", "oc.env:")


def with_references(tree: Node, findings: Diagnostics, typed: Iterable[str] = ()) -> Node:
    """Return a configuration of canonical form without references; those that lead nowhere are problems.

    So are `typed` names below `vars` that nothing refers to: they would change nothing.
    A value that is one reference has the type of its target. Within a text, the target's own text is inserted.
    `${env:NAME}` is read as YAML, and `${env:NAME,default}` has a value for a variable that is not set. References to
    attributes of the data, which are not known before there is the object, stay as `OfData`.
    """
    resolver = _Resolver(tree, findings)
    found = resolver.resolved(tree)
    for name in (name for name in typed if name.startswith("vars.")):
        if not any(f"{a}.".startswith(f"{b}.") for one in resolver.used for a, b in ((one, name), (name, one))):
            close = did_you_mean(name, resolver.used)
            findings.add(COMMAND_LINE, f"{name} is given, but no ${{{name}}} in the configuration refers to it.{close}")
    return found


def escaped(value: Any) -> Any:
    """Return plain data with its references escaped, for a file that is read again; those to the data stay."""
    return mapped(value, _escaped_text)


def _escaped_text(value: Any) -> Any:
    if isinstance(value, OfData):
        return str(value)
    return REFERENCE.sub(lambda match: f"${match[0]}", value) if isinstance(value, str) else value


class _Resolver:
    def __init__(self, tree: Node, findings: Diagnostics) -> None:
        self.tree = tree
        self.findings = findings
        self.open: list[str] = []
        self.used: set[str] = set()

    def resolved(self, node: Node) -> Node:
        if isinstance(node.value, (dict, list)):
            children = {key: self.resolved(child) for key, child in children_of(node).items()}
            value = children if isinstance(node.value, dict) else [*children.values()]
            text = None if "${" in (node.text or "") else node.text
            return replace(node, value=value, text=text)
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        only = REFERENCE.fullmatch(node.value)
        if only is not None and not only[1]:
            return replace(self.look_up(only[2], node), source=node.source)
        return Node(REFERENCE.sub(lambda match: self.as_text(match, node), node.value), node.source)

    def as_text(self, match: re.Match[str], node: Node) -> str:
        """Return the text that stands for one reference among other text."""
        if match[1]:
            return match[0].removeprefix("$")
        found = self.look_up(match[2], node)
        if found.text is not None:
            return found.text
        if isinstance(found.value, (dict, list, OfData)):
            self.findings.add(node.source, f"{match[0]} is not a single value, and cannot be a part of a text.")
        return json.dumps(found.value) if isinstance(found.value, (bool, NoneType)) else str(found.value)

    def look_up(self, name: str, node: Node) -> Node:
        """Return the value of a name, without references; for an unknown name a problem, and null."""
        name = REFERENCE.sub(lambda match: self.as_text(match, node), name)
        self.used.add(name)
        if name.startswith(ENVIRONMENT):
            return self.variable(name.partition(":")[2], node)
        if name in self.open:
            circle = " -> ".join([*self.open[self.open.index(name) :], name])
            return self.without_value(node, f"${{{name}}} refers to itself: {circle}.")
        found, before = self.tree, "the configuration"
        for part in name.split("."):
            children = _children(found)
            if part not in children:
                if name.startswith("data.") and "class_path" in entries(entries(self.tree).get("data")):
                    return Node(OfData(f"${{{name}}}"), node.source)  # an attribute of the data's object
                words = f"${{{name}}}: {before} has no value {part!r}.{did_you_mean(part, children)}"
                return self.without_value(node, words)
            found, before = children[part], part
        self.open.append(name)
        try:
            return self.resolved(found)
        finally:
            self.open.pop()

    def without_value(self, node: Node, problem: str) -> Node:
        """Report a problem with a reference, and return null for it."""
        self.findings.add(node.source, problem)
        return Node(None, node.source)

    def variable(self, text: str, node: Node) -> Node:
        """Return an environment variable, read as YAML."""
        name, comma, default = (part.strip() for part in text.partition(","))
        value = os.environ.get(name, default if comma else None)
        if value is None:
            fix = f"Set it, or give a default: ${{env:{name},VALUE}}."
            return self.without_value(node, f"the environment variable {name} is not set. {fix}")
        return read_value(value, f"${{env:{name}}}")


def _children(node: Node) -> dict[str, Node]:
    """Return what can follow a name: entries, arguments of a class as if they stood in its place, or positions."""
    found: dict[Any, Node] = {**entries(entries(node).get("init_args")), **children_of(node)}
    return {str(key): child for key, child in found.items()}
