"""Write `docs/lightning-names.md` and `docs/accelerate-names.md` from the tables of names.

`python docs/names_pages.py lightning` (or `accelerate`) prints a page; a test compares them.
"""

from __future__ import annotations

import sys

from trainer import Trainer
from trainer.compat import accelerate
from trainer.compat.names import COLLECTIVES, HOMES, MODULES, NAMES, STRATEGY_ALIASES, TRAINER_ARGUMENTS, VIEWED, WORDS
from trainer.names.aliases import Alias

HEAD = """# Lightning's names

Lightning's public names and what became of them here, from the table in `trainer/compat/names.py`. Replace
`lightning` (also `lightning.pytorch`, `pytorch_lightning`) by `trainer` in imports: `import trainer as pl`, `from
trainer.loggers import CSVLogger`, `from trainer.callbacks.model_checkpoint import ModelCheckpoint`. `LightningModule`
is `TrainModule`, `LightningDataModule` is `DataModule`. Of the modules, the data modules and the Trainer every public
name is here, or in a table below; of other classes those that scripts use.

- A member or argument of a class that is not here is answered by an error that says what the table says; `hasattr` and
  `getattr` with a default work, and `dir` shows no such member.
- A name that is not here can be imported from the modules of Lightning, also one that no table shows, because packages
  import many names that a run never uses; `import *` takes none that a table shows. It is a class, of which nothing is
  an instance, to subclass and to annotate with. The error comes when it is called, when an object of a subclass is
  made, or when one of its attributes is read.
- Constants such as `_TORCH_GREATER_EQUAL_2_4` and `_RICH_AVAILABLE` have their values.
- A name that Lightning 2 does not have fails at the import, as it does there. `trainer migrate` knows older ones, and
  lists all names that are not here.

What differs in meaning stands on the page [Coming from Lightning](migrating.md).

Checkpoints are folders of safetensors and JSON: `torch.load(path)` of one fails with "Is a directory". Use
`Module.load_from_checkpoint(path)`, or `trainer checkpoint export` for one file of weights.
"""


ACCELERATE_HEAD = """# Accelerate's names

Accelerate's names that scripts use and what to use here, from the tables in `trainer/compat/accelerate.py`. A name that
is not here is answered by an error that says what the table says: an argument of `Accelerator` given to `Trainer` or
`Engine`, a member of it read from an `Engine`, an option of a plugin given to a strategy, an option of
`accelerate launch` given to `trainer launch`. `trainer config --from FILE` translates configuration files.
[Scripts of Accelerate, before and after](from-accelerate.md) shows how a script changes.
"""
ACCELERATE_TABLES = {
    "Arguments, for a Trainer": accelerate.TRAINER_ARGUMENTS,
    "Arguments, for an Engine": accelerate.ENGINE_ARGUMENTS,
    "Members of Accelerator, for an Engine": accelerate.ENGINE_MEMBERS,
    "FullyShardedDataParallelPlugin, for FSDPStrategy": accelerate.FSDP_OPTIONS,
    "MegatronLMPlugin and ParallelismConfig, for FSDPStrategy": accelerate.PARALLEL_OPTIONS,
    "DeepSpeedPlugin, for DeepSpeedStrategy": accelerate.DEEPSPEED_OPTIONS,
    "Options of accelerate launch": accelerate.LAUNCH_OPTIONS,
    "Names to import": accelerate.NAMES,
}


def accelerate_page() -> str:
    """Return the page of Accelerate's names as Markdown."""
    sections = [
        "\n".join(
            [f"## {title}", "", "| Accelerate | here |", "|---|---|"]
            + [f"| `{name}` | {_escaped(text)} |" for name, text in table.items()]
        )
        for title, table in ACCELERATE_TABLES.items()
    ]
    return "\n\n".join([ACCELERATE_HEAD.rstrip(), *sections]) + "\n"


def page() -> str:
    """Return the page of Lightning's names as Markdown."""
    parts = [HEAD, *(_section(name) for name in WORDS)]
    exported = [f"| `{name}` | {_target(target)} |" for name, target in NAMES.items() if not name.startswith("_")]
    parts.append("\n".join(["## Names that modules export", "", "| Lightning | here |", "|---|---|", *exported]) + "\n")
    served = ", ".join(f"`trainer.{name}`" for name in MODULES if "." not in name)
    parts.append(f"## Modules by Lightning's paths\n\nServed, with those below them: {served}.\n")
    return "\n".join(parts)


def _section(name: str) -> str:
    title = f"## {name}" + (f": `{HOMES[name].partition(':')[2]}`" if name in HOMES else "")
    return "\n".join([title, "", "| Lightning | here |", "|---|---|", *_rows(name)]) + "\n"


def _rows(name: str) -> list[str]:
    """Return the rows of a class: names that are other ones here, and names that are not here."""
    rows = []
    if name == "ParallelStrategy":
        rows += [f"| `{one}` | `{path}` |" for one, path in STRATEGY_ALIASES.items()]
        rows += [f"| `{one}` | the same, by `strategy.processes` |" for one in COLLECTIVES]
    words = dict(WORDS.get(name, {}))
    if name == "Engine":
        words = {one: text for one, text in words.items() if one not in accelerate.ENGINE_MEMBERS}
    if name == "Trainer":
        rows += [f"| `{one}` | `{alias.path}` |" for one, alias in vars(Trainer).items() if isinstance(alias, Alias)]
        others = {one: text for one, text in TRAINER_ARGUMENTS.items() if one not in accelerate.TRAINER_ARGUMENTS}
        words |= {f"({one})": text for one, text in others.items()}
    viewed = [one for one, owner in VIEWED.items() if owner == name]
    rows += [f"| `{one}` | a view to read, see [Coming from Lightning](migrating.md) |" for one in viewed]
    for one, text in words.items():
        shown = f"`{name}({one[1:-1]}=)`" if one.startswith("(") else f"`{one}`"
        rows.append(f"| {shown} | {_escaped(text)} |")
    return rows


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _target(target: str) -> str:
    home, _, name = target.partition(":")
    return f"`{home}.{name}`" if name and " " not in target else _escaped(target)


if __name__ == "__main__":
    print(accelerate_page() if sys.argv[1:] == ["accelerate"] else page(), end="")
