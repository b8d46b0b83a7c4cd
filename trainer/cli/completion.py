"""`trainer completion`: a script by which a shell completes commands, options, and values that are one of a few.

shtab writes such scripts from argparse's parsers, for bash and zsh. Most options here are arguments of the Trainer,
which argparse never sees, and fish is wanted as well: so the options are read from the help.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import fields

from trainer.cli.checkpoint.command import DTYPES
from trainer.cli.config.wizard import PRESETS
from trainer.cli.init import TEMPLATES
from trainer.cli.main import COMMANDS, main
from trainer.cli.options import DOTTED_HELP, CommandParser, make_parser, reports_errors
from trainer.cli.settings_help import NAMES, arguments_help
from trainer.cli.tune.command import OPTIONS as TUNE_OPTIONS
from trainer.config.plug_names import callbacks, optimizers, precisions, schedulers, strategies
from trainer.distributed.accelerators import ACCELERATORS
from trainer.settings import Settings

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
    "tune": tuple(TUNE_OPTIONS),
    "completion": SHELLS,
    "help": (*COMMANDS, *callbacks("Callback"), *strategies(), *precisions()),
}
"""Commands whose second word is one of a few."""
WITH_OPTIONS_OF_ITS_OWN = ("checkpoint", "runs", "tune")
"""Commands whose second word decides which options there are."""
OR_A_PATH = ("--ckpt-path",)
"""Options with a few known values, which take any path, too."""

BASH = """\
_trainer() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} option= words= own=0 i
    if [[ ${{COMP_WORDS[1]}} == launch ]]; then  # trainer launch ... trainer fit
        for ((i = 2; i < COMP_CWORD; i++)); do
            [[ ${{COMP_WORDS[i]}} == trainer ]] && own=$i
        done
    fi
    if [[ $current == --*=* ]]; then
        before=${{current%%=*}} option=${{current%%=*}}= current=${{current#*=}}
    elif [[ $current == = ]]; then
        current=
    elif [[ $before == = ]]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case $before in
{values}
    esac
    if [[ $words ]]; then
        COMPREPLY=($(compgen -P "$option" -W "$words" -- "$current"))
        case $before in
            {or_a_path}) COMPREPLY+=($(compgen -P "$option" -f -- "$current")) ;;
        esac
        return
    fi
    if [ "$((COMP_CWORD - own))" -eq 1 ]; then
        words="{commands}"
    elif [[ $current == -* ]]; then
        case "${{COMP_WORDS[own+1]}} ${{COMP_WORDS[own+2]}} " in
{options}
        esac
    elif [ "$((COMP_CWORD - own))" -eq 2 ]; then
        case ${{COMP_WORDS[own+1]}} in
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
        description="Print a script that completes commands, options, and values that are one of a few, such as "
        "strategies; file names are completed as everywhere.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    shell = parser.parse(arguments).shell
    options = {
        (command, word): options_of(command, word)
        for command in COMMANDS
        for word in (SECOND_WORDS[command] if command in WITH_OPTIONS_OF_ITS_OWN else [""])
    }
    print({"bash": "", "zsh": ZSH, "fish": ""}[shell] + (_fish(options) if shell == "fish" else _bash(options)), end="")
    return 0


def options_of(command: str, word: str) -> list[str]:
    """Return the options of a command, or of its second word: with the trainer's arguments, which argparse never sees.

    They are those with which a line of the help begins.
    """
    if command in ("completion", "help"):
        return []
    if command == "tune":
        text = make_parser(command, COMMANDS[command][1]).format_help() + DOTTED_HELP + arguments_help(command, 80)
    else:
        with redirect_stdout(io.StringIO()) as printed:
            main([command, *filter(None, [word]), "--help"])
        text = printed.getvalue()
    heads = [line.strip().split("  ")[0] for line in text.splitlines() if re.match(r" {2}-", line)]
    names = [name for head in heads for name in re.findall(r"(?:^|, )(--[a-z][\w.-]*)", head)]
    found = {name for name in names if not _is_example(name)} | set(TUNE_OPTIONS[word] if command == "tune" else ())
    return sorted(name for name in found if "." in name or name.replace("_", "-") not in found - {name})


def _is_example(name: str) -> bool:
    """Whether the help has an option as an example: those of the user's classes are not known."""
    first, _, rest = name.partition(".")
    return bool(rest) and rest != "help" and (first != "--trainer" or "." in rest)


def values() -> dict[str, list[str]]:
    """Return the values of each option that takes one of a few."""
    found = {f"--trainer.{name}": list(names()) for name, names in NAMES.items()}
    for field in fields(Settings):
        choices = re.findall(r"'(\w+)'", "".join(re.findall(r"Literal\[(.*?)\]", str(field.type).replace('"', "'"))))
        if choices or "bool" in str(field.type):
            found[f"--trainer.{field.name}"] = choices + ["true", "false"] * ("bool" in str(field.type))
    found["--trainer.accelerator"] = list(ACCELERATORS)
    found |= {"--optimizer": optimizers(), "--lr_scheduler": schedulers(), "--preset": [*PRESETS]}
    for option, base in (("--trainer.callbacks", "Callback"), ("--trainer.logger", "Logger")):
        found |= {option: [*callbacks(base), *found.get(option, ())], f"{option}+": callbacks(base)}
    found |= {name: ["last", "best"] for name in ("--ckpt", *OR_A_PATH)}
    return found | {"--precision": [*precisions()], "--template": [*TEMPLATES], "--dtype": [*DTYPES]}


def _cases(words: Mapping[str, Iterable[str]]) -> str:
    return "\n".join(f'            {pattern}) words="{" ".join(names)}" ;;' for pattern, names in words.items())


def _bash(options: dict[tuple[str, str], list[str]]) -> str:
    return BASH.format(
        commands=" ".join(COMMANDS),
        values=_cases(values()),
        or_a_path="|".join(OR_A_PATH),
        options=_cases(
            {f'"{command} {f"{word} " if word else ""}"*': names for (command, word), names in options.items()}
        ),
        second_words=_cases(SECOND_WORDS),
    )


def _fish(options: dict[tuple[str, str], list[str]]) -> str:
    about = {name: words.replace("'", r"\'") for name, (_, words) in COMMANDS.items()}
    lines = [f"complete -c trainer -n __fish_use_subcommand -f -a {name} -d '{about[name]}'" for name in COMMANDS]
    launched = "__fish_seen_subcommand_from launch ; and test (commandline -opc)[-1] = trainer"
    lines.append(f"complete -c trainer -n '{launched}' -f -a '{' '.join(COMMANDS)}'")
    for command, words in SECOND_WORDS.items():
        first = f"__fish_seen_subcommand_from {command} ; and test (count (commandline -opc)) -eq 2"
        lines.append(f"complete -c trainer -n '{first}' -f -a '{' '.join(words)}'")
    few = values()
    for (command, word), names in options.items():
        both = " ; and ".join(f"__fish_seen_subcommand_from {one}" for one in (command, word) if one)
        for name in names:
            files = "-r" if name in OR_A_PATH else "-x"
            takes = f" {files} -a '{' '.join(few[name])}'" if name in few else ""
            lines.append(f"complete -c trainer -n '{both}' -l {name.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"
