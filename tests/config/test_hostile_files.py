"""Configuration files that would take all memory or time, or end in a traceback, are refused with a message."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.cli.options import overrides_of
from trainer.config.files import read_file, read_value
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node, canonical, from_override, is_index, merge

LISTS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], k{i}: 1}}\n" for i in range(1, 30)
)

REFUSED = {
    "aliases.yaml": (LISTS, "more than 20000 values"),
    "lists.yaml": (f"a: {'[' * 3000}{']' * 3000}", "nested more than 100 levels deep"),
    "open.yaml": (f"a: {'[' * 400_000}", "nested more than 100 levels deep"),
    "mappings.yaml": ("\n".join(" " * depth + "a:" for depth in range(500)), "nested more than 100 levels deep"),
    "dashes.yaml": ("a:\n  " + "- " * 3000, "nested more than 100 levels deep"),
    "digits.yaml": ("a: " + "9" * 5000, "an integer of more than 100 digits"),
    "hexadecimal.yaml": ("a: 0x" + "f" * 5000, "an integer of more than 100 digits"),
    "long.yaml": ("a: 1\n# " + "x" * 500_000, "more than 500000 bytes"),
    "lists.json": (f'{{"a": {"[" * 3000}{"]" * 3000}}}', "nested more than 100 levels deep"),
    "objects.json": ('{"a": ' * 3000 + "1" + "}" * 3000, "nested more than 100 levels deep"),
    "digits.json": ('{"a": ' + "9" * 5000 + "}", "an integer of more than 100 digits"),
    "lists.toml": (f"a = {'[' * 3000}{']' * 3000}", "nested more than 100 levels deep"),
    "dots.toml": (f"{'.'.join(['a'] * 3000)} = 1", "nested more than 100 levels deep"),
    "many-dots.toml": (f"x = {{{'.'.join(['a'] * 200_000)} = 1}}", "nested more than 100 levels deep"),
    "table.toml": (f"[{'.'.join(['a'] * 3000)}]\nx = 1", "nested more than 100 levels deep"),
    "digits.toml": ("a = " + "9" * 5000, "an integer of more than 100 digits"),
    "octal.toml": ("a = 0o" + "7" * 4000, "an integer of more than 100 digits"),
}


@contextmanager
def memory(more: int) -> Iterator[None]:
    """Limit what the process may reserve in the block."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_without_bounds_is_refused_with_a_message(name: str) -> None:
    text, message = REFUSED[name]
    Path(name).write_text(text)
    findings = Diagnostics()
    with memory(300_000_000):
        assert read_file(name, findings) is None
    (problem,) = findings.problems
    assert message in problem.message
    assert len(problem.message) < 300


def test_a_value_without_bounds_on_the_command_line_is_refused_with_a_message() -> None:
    for text in ("[" * 3000, "9" * 5000):
        problem = read_value(text, "--x").unreadable
        assert problem is not None
        assert problem.startswith("--x")


def test_merged_mappings_do_not_multiply() -> None:
    """Each level merges the one before ten times."""
    Path("merges.yaml").write_text(MERGES)
    findings = Diagnostics()
    with memory(300_000_000):
        tree = read_file("merges.yaml", findings)
    assert tree is not None
    assert tree.plain()["a3"] == {"x": 1, "k1": 1, "k2": 1, "k3": 1}


def test_what_is_large_but_a_configuration_is_read() -> None:
    cases = {
        "many.yaml": "a: [" + ", ".join(map(str, range(15_000))) + "]",
        "deep.yaml": "a: " + "[" * 90 + "1" + "]" * 90,
        "brackets.yaml": "a: '" + "[" * 150 + "'",
        "number.toml": f"a = {10**60}",
        "floats.toml": "a = [" + ", ".join(["1.5"] * 5000) + "]",
    }
    for name, text in cases.items():
        Path(name).write_text(text)
        findings = Diagnostics()
        assert read_file(name, findings) is not None, (name, findings.problems)


@pytest.mark.parametrize("text", ["a: !!set {x, y}", "a: !mine {x: 1}", "a: !!python/tuple [1]", "a: !!omap [x: 1]"])
def test_tags_of_mappings_and_lists_are_refused(text: str) -> None:
    Path("tags.yaml").write_text(text)
    findings = Diagnostics()
    assert read_file("tags.yaml", findings) is None
    assert "is not supported here; allowed: plain values" in findings.problems[0].message


def test_keys_of_many_digits_are_names() -> None:
    """Python converts no text of more than 4,300 digits."""
    digits = "9" * 5000
    tree = canonical(from_override(f"trainer.callbacks.{digits}", Node(1, COMMAND_LINE)), Diagnostics())
    merged = merge(Node({"trainer": Node({}, COMMAND_LINE)}, COMMAND_LINE), tree, Diagnostics())
    assert isinstance(merged.value, dict)
    assert not is_index(digits)


def test_options_of_many_names_are_refused() -> None:
    findings = Diagnostics()
    assert overrides_of(["--module." + "x." * 3000 + "x", "1"], findings) == ([], [])
    assert "is not a name: write --trainer.max_epochs" in findings.problems[0].message
