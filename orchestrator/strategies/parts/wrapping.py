"""Which modules of a model are gathered together before they run. Pure functions of the modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from orchestrator.compat.modules import own_parameters
from orchestrator.config.text import did_you_mean
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.planning.placement import is_divisible

Wrap = Literal["auto"] | tuple[str, ...]
Group = tuple[nn.Module, ...]


@dataclass(frozen=True, kw_only=True)
class SeenCalls:
    """The calls that have been seen of modules that are gathered one by one.

    Attributes:
        inside: the names of the modules that have been called in each other, in their order, by the name of the outer
            one; by ``""``, of those called outside of all others.
        complete: whether the forward pass was seen to its end, and read no numbers, on which it may depend.
        gathers_all: whether all parameters have to be gathered before a pass and kept, with their gradients, up to the
            end of the step.
        casts: what autocast does to parameters, as in :attr:`~orchestrator.model.precision.Casts.seen`.
    """

    inside: Mapping[str, Sequence[str]]
    complete: bool
    gathers_all: bool = False
    casts: Mapping[str, bool] = field(default_factory=dict)


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


def order_of_calls(
    model: nn.Module, groups: Sequence[Group], seen: Mapping[str, Sequence[str]], called: Sequence[nn.Module]
) -> Mapping[nn.Module, Sequence[nn.Module]]:
    """Return the modules of ``groups`` that are called in each of the ``called`` ones, and in each other, in order.

    A module that no call has been seen of follows the one before it in the model.

    Args:
        model: the model.
        groups: modules of it that are gathered together.
        seen: the calls that have been seen, as in :attr:`SeenCalls.inside`.
        called: modules that are called as a whole, and have all others.
    """
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    wrapped, alone = {module for group in groups for module in group}, {group[0] for group in groups if len(group) == 1}
    order = {}
    for outer in (*called, *alone):
        inner = _directly_inside(outer, wrapped, alone)
        own = [modules[n] for n in seen.get(names[outer] if outer in alone else "", ()) if modules[n] in inner]
        for before, module in zip([None, *inner], inner, strict=False):
            if module not in own:
                own.insert(len(own) - own[::-1].index(before) if before in own else 0, module)
        order[outer] = own
    return order


def _directly_inside(outer: nn.Module, wrapped: Collection[nn.Module], alone: Collection[nn.Module]) -> Group:
    """Return the ``wrapped`` modules in a module, without those inside of another one that is gathered ``alone``."""
    found: dict[nn.Module, None] = {}
    for child in outer.children():
        if child in wrapped:
            found[child] = None
        if child not in alone:
            found |= dict.fromkeys(_directly_inside(child, wrapped, alone))
    return tuple(found)


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
