"""Let torchvision be imported beside a torch that is built for CPUs.

The torchvision of the registry loads its operators from a library that needs CUDA's. Without it, the import ends where
torchvision registers shapes for them. Python imports this file at its start if the folder is in PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

LIBRARIES: list[Any] = []
"""Kept: what a library declares is undone with the object."""


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing, but declares the operators when torchvision is first looked for: torch takes seconds to import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


def declare_operators() -> None:
    """Declare `nms`, which torchvision looks for, and leave out the shapes of operators that are not there."""
    import torch

    if torch.version.cuda is not None:
        return
    LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
    LIBRARIES[0].define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    register_fake = torch.library.register_fake

    def register_known(name: Any, *args: Any, **options: Any) -> Any:
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register_fake(name, *args, **options)

    torch.library.register_fake = register_known


sys.meta_path.insert(0, BeforeTorchvision())
