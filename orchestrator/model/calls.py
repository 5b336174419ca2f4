"""The calls of submodules in a forward pass, and at which of them a model can be cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.torch import pytree
from orchestrator.config.build import did_you_mean
from orchestrator.model.fake_calls import fake_calls
from orchestrator.model.partial_init import FakeModel


def first_modules(whole: FakeModel, inputs: Any, split: Sequence[str]) -> tuple[list[str], pytree.TreeSpec]:
    """Find the modules that begin a piece, in the order of their calls, and the structure of the model's output.

    These are the outermost modules and those that ``split`` names. Only a module that a forward pass calls exactly once
    can begin a piece.
    """
    calls: list[str] = []
    with whole.mode, fake_calls(whole) as real_calls:

        def note(name: str) -> None:
            if not real_calls.active:
                calls.append(name)

        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: note(name))
            for name, module in whole.model.named_modules()
            if name and not isinstance(module, nn.Identity)  # which a traced graph does not show
        ]
        out = whole.model(pytree.tree_map_only(Tensor, whole.fake_like, inputs))
    for hook in hooks:
        hook.remove()
    num_calls = Counter(calls)
    once = [name for name in calls if num_calls[name] == 1]
    setting = f"strategy.split=[{','.join(split)}]"
    for name in split:
        if num_calls[name] > 1:
            raise ValueError(
                f"{setting}: {name} is called {num_calls[name]} times in a forward pass; only a layer that is called "
                "once can begin a stage"
            )
        if name not in num_calls:
            raise ValueError(f"{setting}: {name}: no such layer; {did_you_mean(name, once)}")
    called = set(calls)

    def is_outermost(name: str) -> bool:
        parts = name.split(".")
        return not any(".".join(parts[:depth]) in called for depth in range(1, len(parts)))

    chosen = [name for name in once if is_outermost(name) or name in split]
    # A module and its first child begin at the same point. If split names the child, leave out the module.
    next_call = dict(itertools.pairwise(calls))
    first = [
        name for name in chosen if not (next_call.get(name, "").startswith(f"{name}.") and next_call[name] in split)
    ]
    return first, pytree.tree_structure(out)
