"""Write `docs/lightning-names.md` from the table of Lightning's names.

`python -m trainer.compat.page` prints the page; a test compares it.
"""

from __future__ import annotations

from trainer.compat.names import ALIASES, COLLECTIVES, HOMES, MODULES, NAMES, SURFACE, TRAINER_ARGUMENTS, WORDS

OTHERS = ("Engine",)
"""Classes with a table of their own: of the names of Fabric and Accelerate."""

HEAD = """# Lightning's names

Lightning's public names and what became of them here, from the table in `trainer/compat/names.py`. Replace
`lightning` (also `lightning.pytorch`, `pytorch_lightning`) by `trainer` in imports: `import trainer as pl`, `from
trainer.loggers import CSVLogger`, `from trainer.callbacks.model_checkpoint import ModelCheckpoint`. `LightningModule`
is `TrainModule`, `LightningDataModule` is `DataModule`. A name that is not in a table below is here under the same
name. A name that is not here is answered by an error that says what the table says; `hasattr` and `getattr` with a
default work. What differs in meaning stands on the page [Coming from Lightning](migrating.md).

Checkpoints are folders of safetensors and JSON: `torch.load(path)` of one fails with "Is a directory". Use
`Module.load_from_checkpoint(path)`, or `trainer checkpoint export` for one file of weights.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD, *(_section(name) for name in (*SURFACE, *OTHERS) if _rows(name))]
    exported = [f"| `{name}` | {_target(target)} |" for name, target in NAMES.items() if not name.startswith("_")]
    parts.append("\n".join(["## Names that modules export", "", "| Lightning | here |", "|---|---|", *exported]) + "\n")
    served = ", ".join(f"`trainer.{name}`" for name in MODULES.split() if "." not in name)
    parts.append(f"## Modules by Lightning's paths\n\nServed, with those below them: {served}.\n")
    return "\n".join(parts)


def _section(name: str) -> str:
    title = f"## {name}" + (f": `{HOMES[name].partition(':')[2]}`" if name in HOMES else "")
    return "\n".join([title, "", "| Lightning | here |", "|---|---|", *_rows(name)]) + "\n"


def _rows(name: str) -> list[str]:
    """Return the rows of a class: names that are other ones here, and names that are not here."""
    aliases = ALIASES.get("Strategy" if name == "ParallelStrategy" else name, {})
    rows = [f"| `{one}` | `{path}` |" for one, path in aliases.items()]
    if name == "ParallelStrategy":
        rows += [f"| `{one}` | the same, by `strategy.processes` |" for one in COLLECTIVES]
    words = dict(WORDS.get(name, {}))
    if name == "Trainer":
        words |= {f"({one})": text for one, text in TRAINER_ARGUMENTS.items()}
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
    print(page(), end="")
