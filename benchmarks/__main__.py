"""`python -m benchmarks NAME [options]` runs one of the benchmarks; without a name it lists them."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

import benchmarks


def main(arguments: list[str]) -> int:
    """Each benchmark is a module of this package with `main(arguments)`."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    runnable = {name: module for name in names if hasattr(module := import_module(f"benchmarks.{name}"), "main")}
    if not arguments or arguments[0] not in runnable:
        print("usage: python -m benchmarks NAME [options]\n")
        for name, module in runnable.items():
            print(f"  {name:16}{(module.__doc__ or '').strip().splitlines()[0]}")
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    return runnable[arguments[0]].main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
