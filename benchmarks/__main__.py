"""`python -m benchmarks NAME [options]` runs one of the benchmarks; without a name it lists them."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

import benchmarks


def main(arguments: list[str]) -> int:
    """Each benchmark is a module of this package with `main(arguments)`; `import_` is called `import`."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    modules = {name.removesuffix("_"): name for name in names}
    if not arguments or arguments[0] not in modules:
        print("usage: python -m benchmarks NAME [options]\n")
        for name, module in modules.items():
            text = import_module(f"benchmarks.{module}").__doc__ or ""
            print(f"  {name:16}{text.strip().splitlines()[0]}")
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    return import_module(f"benchmarks.{modules[arguments[0]]}").main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
