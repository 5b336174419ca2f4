"""Which modules of a model are gathered together before they run. Pure functions of the modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Literal

from torch import Tensor, nn

from orchestrator.compat.torch import own_parameters
from orchestrator.config.text import did_you_mean
from orchestrator.model.blocks import blocks_of
from orchestrator.state.boxes import is_divisible

Wrap = Literal["auto"] | tuple[str, ...]
Group = tuple[nn.Module, ...]


def groups_of(model: nn.Module, wrap: Wrap, root: nn.Module | None = None) -> list[Group]:
    """Return the modules whose parameters are gathered together, the innermost first.

    The parameters outside of all groups are gathered with the root. Modules that share a parameter are in one group;
    one that shares a parameter with a module around it is in none.

    Args:
        model: the model, which may be of fake tensors.
        wrap: the names of classes; ``auto`` for the repeated blocks of the model.
        root: the module that is called, and may have only some of the model's modules; None for the model.

    Raises:
        ValueError: a name is not that of a class of the model's modules.
    """
    root = model if root is None else root
    chosen = _chosen(model, wrap) & {*root.modules()}
    while True:
        users = _users(root, chosen)
        kept = set[nn.Module]().union(*users) - {root}
        kept -= {inner for together in users for inner in together for outer in together if _contains(outer, inner)}
        if kept == chosen:
            break
        chosen = kept  # the parameters of a module that is left out belong to the module around it
    groups = {module: [module] for module in root.modules() if module in chosen}
    for together in users:
        owners = [module for module in groups if module in together]
        for other in owners[1:]:
            joined, added = groups[owners[0]], groups[other]
            if added is not joined:
                joined += added
                groups.update(dict.fromkeys(added, joined))
    depth = {module: name.count(".") for name, module in root.named_modules()}
    distinct = {id(group): tuple(group) for group in groups.values()}.values()
    return sorted(distinct, key=lambda group: -max(depth[module] for module in group))


def parameters_together(model: nn.Module, groups: Sequence[Group]) -> list[list[nn.Parameter]]:
    """Return the parameters that are gathered together: those of each group, and at the end the others."""
    taken: set[nn.Parameter] = set()
    found = []
    for modules in (*groups, (model,)):
        own = dict.fromkeys(
            p for module in modules for p in module.parameters() if is_divisible(p.shape) and p not in taken
        )
        taken.update(own)
        found.append(list(own))
    return found


def bytes_by_group(model: nn.Module, wrap: Wrap) -> list[int]:
    """Return the bytes of the parameters that are gathered together; at the end, of those outside of all groups.

    Args:
        model: the model, which may be of fake tensors.
        wrap: the classes of the modules that are gathered one by one, or ``auto``.
    """
    return [sum(p.nbytes for p in parameters) for parameters in parameters_together(model, groups_of(model, wrap))]


def _chosen(model: nn.Module, wrap: Wrap) -> set[nn.Module]:
    if wrap == "auto":
        return {*blocks_of(model)}
    by_class: dict[str, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        by_class[type(module).__name__].add(module)
    for name in wrap:
        if name not in by_class:
            known = did_you_mean(name, by_class)
            raise ValueError(f"strategy.wrap=[{','.join(wrap)}]: the model has no module of class {name}; {known}")
    return set[nn.Module]().union(*(by_class[name] for name in wrap)) - {model}


def _users(model: nn.Module, chosen: Collection[nn.Module]) -> list[set[nn.Module]]:
    """Return, for each parameter, the innermost of the ``chosen`` modules that hold it, or else the model."""
    found: dict[Tensor, set[nn.Module]] = defaultdict(set)

    def walk(module: nn.Module, owner: nn.Module) -> None:
        owner = module if module in chosen else owner
        for parameter in own_parameters(module).values():
            if parameter is not None:
                found[parameter].add(owner)
        for child in module.children():
            walk(child, owner)

    walk(model, model)
    return list(found.values())


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return outer is not inner and any(module is inner for module in outer.modules())
