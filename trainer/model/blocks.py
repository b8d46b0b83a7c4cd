"""Find the blocks of a module: the submodules that are sharded, gathered or recomputed one at a time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from trainer.arguments import PositiveInt, failed_function
from trainer.errors import ConfigError, did_you_mean, first_of, raise_problems

BlockPolicy = str | type | PositiveInt | Collection[str | type] | Callable[[str, nn.Module], bool]
"""The choice of blocks: `"auto"`, class names or classes, a least number of parameters, or a function of a
submodule's name and the submodule."""

LISTS = (nn.ModuleList, nn.Sequential)
MIN_BLOCK_FRACTION = 20
"""Least fraction (1 / 20) of the parameters in a block, in a module without repetition."""


def find_blocks(module: nn.Module, policy: BlockPolicy = "auto") -> dict[str, nn.Module]:
    """Return the blocks of `module` by name: children before their parents, siblings in the order of registration.

    Blocks exclude `module` itself and containers without a `forward`, such as `nn.ModuleList`, and the parametrizations
    of a layer, whose values it uses after them. A submodule with several names has the first one. By policy:

    - `"auto"`: the `_no_split_modules` of Hugging Face models, and elsewhere the members of one class of the outermost
      `nn.ModuleList`s and `nn.Sequential`s (an encoder and a decoder, say; members with children before plain layers),
      and three or more attributes of one class; without any of these, two attributes of one class. Classes with less
      than a tenth of the largest class's parameters are left out. If these blocks hold less than half of the
      parameters, the large submodules of the rest are blocks too. Blocks do not overlap, and submodules that share a
      parameter with the rest of the module are left out. May be empty.
    - class names (`"Block"`, `"package.Block"`) or classes (subclasses count), one or a collection: all submodules of
      these classes. Each class has to match something.
    - an int: submodules with at least this many parameters outside of the blocks within them.
    - a callable: the submodules for which `policy(name, submodule)` is true.

    Raises:
        ConfigError: the policy has another type, or matches nothing.
    """
    if policy == "auto":
        return _auto(module)
    if isinstance(policy, bool) or (isinstance(policy, int) and policy < 1):
        raise ConfigError(f"the blocks' least number of parameters has to be at least 1, and is {policy!r}.")
    if isinstance(policy, int):
        found = _by_size(module, policy)
        problem = f"no submodule of {type(module).__name__} has {policy:,} parameters or more"
    elif isinstance(policy, (str, type)):
        return _by_class(module, [policy])
    elif callable(policy):
        try:
            found = {name: child for name, child in _submodules(module) if policy(name, child)}
        except Exception as error:
            words = "True or False for a name and a submodule"
            raise failed_function("the choice of blocks (policy", words, error) from error
        problem = "the function that chooses the blocks returned False for every submodule with a forward"
    elif isinstance(policy, Collection) and policy and all(isinstance(entry, (str, type)) for entry in policy):
        return _by_class(module, policy)
    else:
        raise ConfigError(
            f"blocks are chosen by 'auto', class names, classes, a least number of parameters, or a function of a name "
            f"and a submodule; got {policy!r}."
        )
    if not found:
        raise ConfigError(f"{problem}. {_list_classes(module)}")
    return found


def exclude_tied_weights(module: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks that share no parameter with the rest of the module: each can be sharded by itself."""
    owners = _number_of_owners(module)
    return {name: block for name, block in blocks.items() if not _tied(block, owners)}


def main_stack(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks of the one list that has several of them; all blocks if there is no such list, or several."""
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, block in blocks.items():
        lists.setdefault(name.rpartition(".")[0], {})[name] = block
    several = [found for found in lists.values() if len(found) > 1]
    return several[0] if len(several) == 1 else blocks


def without_caches(arguments: Any) -> Any:
    """Return a tuple or dict of a block's arguments with None for Hugging Face's caches of keys and values.

    A block adds its keys to the cache, so that a second forward, on the same or other tokens, would attend to both.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return arguments
    if isinstance(arguments, dict):
        return {name: None if isinstance(value, transformers.Cache) else value for name, value in arguments.items()}
    return tuple(None if isinstance(value, transformers.Cache) else value for value in arguments)


def describe_blocks(blocks: dict[str, nn.Module]) -> str:
    """Return text such as `"12 x Block (net.blocks.0 to net.blocks.11), Embedding (net.embedding)"`, or `"nothing"`."""
    names: dict[str, list[str]] = {}
    for name, block in blocks.items():
        names.setdefault(class_of(block).__name__, []).append(name)
    groups = (
        f"{len(own)} x {kind} ({own[0]} to {own[-1]})" if len(own) > 1 else f"{kind} ({own[0]})"
        for kind, own in names.items()
    )
    return ", ".join(groups) or "nothing"


def _submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules that can be a block, children first, each once."""
    seen = {id(module)}

    def below(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            if id(child) in seen or isinstance(child, ParametrizationList):
                continue
            seen.add(id(child))
            if not isinstance(child, nn.MultiheadAttention):  # it uses the weight of its layer, and never calls it
                yield from below(child, f"{prefix}{name}.")
            if has_forward(child):
                yield f"{prefix}{name}", child

    return below(module, "")


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called, unlike an nn.ModuleList."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module itself are compiled, by the Trainer or by the user."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _size(module: nn.Module) -> int:
    return sum(map(_elements, module.parameters()))


def _elements(parameter: nn.Parameter) -> int:
    """Return the full number of elements, also of a parameter that ZeRO-3 has sharded (locally empty)."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


# -- by size -----------------------------------------------------------------------------------------------------------


def _by_size(module: nn.Module, minimum: int, taken: Collection[nn.Module] = ()) -> dict[str, nn.Module]:
    """Return submodules with at least `minimum` parameters that are in no `taken` module and no block below."""
    covered = {id(parameter) for block in taken for parameter in block.parameters()}
    found = {}
    for name, child in _submodules(module):
        rest = {id(p): _elements(p) for p in child.parameters() if id(p) not in covered}
        if sum(rest.values()) >= minimum:
            found[name] = child
            covered |= rest.keys()
    return found


# -- by class ----------------------------------------------------------------------------------------------------------


def _by_class(module: nn.Module, kinds: Collection[str | type]) -> dict[str, nn.Module]:
    children = list(_submodules(module))
    unmatched = [kind for kind in kinds if not any(_is_a(child, kind) for _, child in children)]
    problems = [_no_such_class(module, kind) for kind in unmatched]
    if problems:
        problems[-1] += " " + _list_classes(module)
    raise_problems(problems, "the choice of blocks")
    return {name: child for name, child in children if any(_is_a(child, kind) for kind in kinds)}


def _is_a(module: nn.Module, kind: str | type) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    cls = class_of(module)
    return kind in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def class_of(module: nn.Module) -> type:
    """Return the class of a module as its author named it.

    FSDP2 gives sharded modules a subclass `FSDP<name>`, and torch gives modules with parametrizations one, too.
    """
    cls = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule) and cls.__bases__[:1] == (fsdp.FSDPModule,):
        cls = cls.__bases__[1]
    return cls.__bases__[0] if is_parametrized(module) and cls.__name__.startswith("Parametrized") else cls


def _no_such_class(module: nn.Module, kind: str | type) -> str:
    if any(_is_a(child, kind) for child in module.modules() if child is not module):
        return f"{_named(kind)} has no forward, so it cannot be a block: name the class of its members."
    if _is_a(module, kind):
        return f"{_named(kind)} is the module itself: name a class within it."
    known = {class_of(child).__name__ for _, child in _submodules(module)}
    suggestion = did_you_mean(_named(kind), known)
    return f"no submodule of {type(module).__name__} is a {_named(kind)}.{suggestion}"


def _named(kind: str | type) -> str:
    return kind.__name__ if isinstance(kind, type) else kind


def _list_classes(module: nn.Module) -> str:
    """Return the classes of the submodules, those with most parameters first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for _, child in _submodules(module):
        counts[class_of(child).__name__] += 1
        sizes[class_of(child).__name__] += _size(child)
    if not counts:
        return f"{type(module).__name__} has no submodules with a forward."
    ordered = sorted(counts, key=lambda name: -sizes[name])
    shown = first_of((f"{name} ({counts[name]})" for name in ordered), 20)
    return f"Its classes, with how many there are of each: {shown}."


# -- auto --------------------------------------------------------------------------------------------------------------


def _auto(module: nn.Module) -> dict[str, nn.Module]:
    owners = _number_of_owners(module)
    declared = _not_to_be_split(module)
    stacks = _stacks(module, declared, _repeated)
    if not declared and not stacks:
        stacks = _stacks(module, [], partial(_repeated_attributes, minimum=2))
    stacks += _stacks(module, declared + [block for stack in stacks for block in stack], _plain_members)
    by_kind: Counter[type] = Counter()
    for stack in stacks:
        by_kind[class_of(stack[0])] += sum(map(_size, stack))
    largest = max(by_kind.values(), default=0)
    large_stacks = [stack for stack in stacks if by_kind[class_of(stack[0])] * 10 >= largest]
    chosen = declared + [block for stack in large_stacks for block in stack]
    chosen = [block for block in chosen if not _tied(block, owners)]

    total = _size(module)
    if sum(map(_size, chosen)) * 2 < total:
        own = [sum(map(_elements, child.parameters(recurse=False))) for _, child in _submodules(module)]
        minimum = max(1, min(total // MIN_BLOCK_FRACTION, max(own, default=1)))
        large = [block for block in _by_size(module, minimum, chosen).values() if not _tied(block, owners)]
        # A parent of a block is no block.
        around = _around(module, chosen + large)
        chosen += [block for block in large if id(block) not in around]
    wanted = set(map(id, chosen))
    return {name: child for name, child in _submodules(module) if id(child) in wanted}


def _not_to_be_split(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in the `_no_split_modules` of Hugging Face models."""
    declared: list[nn.Module] = []
    for model in module.modules():
        names = vars(type(model)).get("_no_split_modules") or vars(model).get("_no_split_modules") or ()
        declared += [child for child in model.modules() if class_of(child).__name__ in names and child is not module]
    unique = {id(block): block for block in declared if has_forward(block) and _size(block)}
    within = {id(child) for block in unique.values() for child in block.modules() if child is not block}
    return [block for key, block in unique.items() if key not in within]


def _stacks(
    module: nn.Module, taken: list[nn.Module], repeated: Callable[[nn.Module], list[list[nn.Module]]]
) -> list[list[nn.Module]]:
    """Return the outermost groups of repeated modules that do not overlap with `taken`."""
    within = {id(child) for block in taken for child in block.modules()}
    around = _around(module, taken)

    def below(parent: nn.Module) -> list[list[nn.Module]]:
        found = [group for group in repeated(parent) if not any(id(m) in around or id(m) in within for m in group)]
        inside = {id(member) for group in found for member in group} | within
        for child in parent.children():
            if id(child) not in inside and not isinstance(child, ParametrizationList):
                found += below(child)
        return found

    return below(module)


def _repeated(module: nn.Module) -> list[list[nn.Module]]:
    """Return groups of list members, or of at least three attributes: two are likely towers with their own blocks."""
    return _composite_members(module) if isinstance(module, LISTS) else _repeated_attributes(module, minimum=3)


def _composite_members(module: nn.Module) -> list[list[nn.Module]]:
    """Return the groups of a container's members of one class that have children.

    In a ModuleList one member is enough, because a list is meant to repeat. Lists of blocks are no blocks.
    """
    minimum = 1 if isinstance(module, nn.ModuleList) else 2
    groups = [group for group in _by_kind(module) if len(group) >= minimum and _is_composite(group[0])]
    return [g for g in groups if not (isinstance(g[0], LISTS) and any(map(_composite_members, g)))]


def _plain_members(module: nn.Module) -> list[list[nn.Module]]:
    """Return the groups of a container's plain layers of one class, as in an MLP."""
    if not isinstance(module, LISTS):
        return []
    return [group for group in _by_kind(module) if len(group) > 1 and not _is_composite(group[0])]


def _repeated_attributes(module: nn.Module, minimum: int) -> list[list[nn.Module]]:
    """Return the groups of attributes of one class that have children: `self.block1`, `self.block2`."""
    groups = _by_kind(module)
    return [g for g in groups if len(g) >= minimum and _is_composite(g[0]) and not isinstance(g[0], LISTS)]


def _is_composite(module: nn.Module) -> bool:
    children = module.named_children()
    return any(not (name == "parametrizations" and is_parametrized(module)) for name, _ in children)


def _by_kind(module: nn.Module) -> list[list[nn.Module]]:
    groups: dict[type, list[nn.Module]] = {}
    for child in module.children():
        if has_forward(child) and _size(child):
            groups.setdefault(class_of(child), []).append(child)
    return list(groups.values())


def _around(module: nn.Module, blocks: list[nn.Module]) -> set[int]:
    """Return the ids of the modules that contain one of `blocks`."""
    wanted = set(map(id, blocks))
    return {id(m) for m in module.modules() if any(id(child) in wanted for child in m.modules() if child is not m)}


def _number_of_owners(module: nn.Module) -> Counter[int]:
    """Count the submodules that hold each parameter directly; a tied weight has more than one."""
    tables = (child.named_parameters(recurse=False, remove_duplicate=False) for child in module.modules())
    return Counter(id(parameter) for table in tables for _, parameter in table)


def _tied(block: nn.Module, owners: Counter[int]) -> bool:
    """Return True if `block` shares a parameter with the rest of the module."""
    within = _number_of_owners(block)
    return any(owners[key] > number for key, number in within.items())
