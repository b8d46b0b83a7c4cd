"""`trainer completion`: a script by which a shell completes commands and options."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout

from trainer.cli.main import COMMANDS, main
from trainer.cli.options import CommandParser, reports_errors
from trainer.config.plug_names import callbacks, precisions, strategies

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  trainer completion bash >> ~/.bashrc
  trainer completion zsh >> ~/.zshrc
  trainer completion fish > ~/.config/fish/completions/trainer.fish
"""
SECOND_WORDS = {
    "checkpoint": ("ls", "show", "verify", "export", "import"),
    "runs": ("ls",),
    "tune": ("lr", "batch-size", "throughput"),
    "completion": SHELLS,
    "help": (*COMMANDS, *callbacks("Callback"), *strategies(), *precisions()),
}
"""Commands whose second word is one of a few."""

BASH = """\
_trainer() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [[ $current == -* ]]; then
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    elif [ "$COMP_CWORD" -eq 2 ]; then
        case ${{COMP_WORDS[1]}} in
{second_words}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _trainer trainer
"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the script of a shell. Returns the exit code."""
    parser = CommandParser(
        prog="trainer completion",
        description="Print a script that completes commands and options; file names are completed as everywhere.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    shell = parser.parse(arguments).shell
    options = {command: options_of_help(command) for command in COMMANDS}
    print({"bash": "", "zsh": ZSH, "fish": ""}[shell] + (_fish(options) if shell == "fish" else _bash(options)), end="")
    return 0


def options_of_help(command: str) -> list[str]:
    """Return every option that the help of a command names: with the trainer's arguments, which argparse never sees."""
    if command in ("completion", "help"):
        return []
    with redirect_stdout(io.StringIO()) as text:
        for word in SECOND_WORDS.get(command, ()):
            main([command, word, "--help"])
        main([command, "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?:\.[a-z]\w*)?(?![\w.])", text.getvalue())))


def _bash(options: dict[str, list[str]]) -> str:
    def cases(words: Mapping[str, Iterable[str]]) -> str:
        return "\n".join(f'            {command}) words="{" ".join(names)}" ;;' for command, names in words.items())

    return BASH.format(commands=" ".join(options), cases=cases(options), second_words=cases(SECOND_WORDS))


def _fish(options: dict[str, list[str]]) -> str:
    about = {name: COMMANDS[name][1].replace("'", r"\'") for name in options}
    lines = [f"complete -c trainer -n __fish_use_subcommand -f -a {name} -d '{about[name]}'" for name in options]
    for command, words in SECOND_WORDS.items():
        lines.append(f"complete -c trainer -n '__fish_seen_subcommand_from {command}' -f -a '{' '.join(words)}'")
    for command, names in options.items():
        seen = f"'__fish_seen_subcommand_from {command}'"
        lines += [f"complete -c trainer -n {seen} -l {name.removeprefix('--')}" for name in names]
    return "\n".join(lines) + "\n"
