"""Forward passes with fake tensors, also through modules that need values, and where these let a model be cut."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators
from orchestrator.compat.modules import calls_through
from orchestrator.compat.torch import FakeTensor, unset_fake_temporarily, without_fake_tensor_logs
from orchestrator.config.text import did_you_mean
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.failed_call import error_with_place
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.tensor_slots import filled, new_tensors_dropped, random_like


@dataclass
class RealCalls:
    """The calls of modules again, with real tensors.

    Attributes:
        active: whether such a call is in progress.
    """

    active: bool = False


@contextlib.contextmanager
def fake_calls(whole: FakeModel, *, opened: Collection[nn.Module] = ()) -> Iterator[RealCalls]:
    """Let modules that fail with fake tensors be called with real ones, for the shapes of their results.

    These are random, but for the inputs of the model.

    Such modules use operators that fake tensors lack, or branch on the values of tensors. One of them at a time has
    memory. The random generators are left unchanged.

    Args:
        whole: the model.
        opened: modules that raise their error instead, because their own operations are wanted.

    Raises:
        Exception: whatever a module raises with real tensors too.
    """
    real_calls = RealCalls()

    def call(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(module, *args, **kwargs)
        except ValueError:
            raise
        except Exception:
            if module in opened or not any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs))):
                raise
            return call_real(original, module, args, kwargs)

    def real(tensor: Tensor) -> Tensor:
        return whole.real_input(tensor) if isinstance(tensor, FakeTensor) else tensor

    def call_real(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        with unset_fake_temporarily(), kept_generators(), filled(module, random_like):
            was_active, real_calls.active = real_calls.active, True
            try:
                real_args, real_kwargs = map_tensors(real, (args, kwargs))
                out = original(module, *real_args, **real_kwargs)
            finally:
                real_calls.active = was_active
        return map_tensors(lambda t: whole.fake_like(t).requires_grad_(t.requires_grad), out)

    with calls_through(call), without_fake_tensor_logs():
        yield real_calls


def first_modules(
    whole: FakeModel,
    inputs: Any,
    split: Sequence[str],
    *,
    largest_share: float | None = None,
    closed: frozenset[str] = frozenset(),
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> list[str]:
    """Find the modules that begin a piece, in the order of their calls.

    These are the outermost modules and those that ``split`` names. Only a module that a forward pass calls exactly once
    can begin a piece.

    Args:
        whole: the model.
        inputs: a batch for the model, of real tensors.
        split: the names of further modules.
        largest_share: the share of the model's parameters, 0 to 1, above which the modules inside of a module begin
            pieces too; None for no limit.
        closed: large modules that are left in one piece nevertheless.
        call: calls the model with the batch; None to only call it.

    Raises:
        ValueError: a module in ``split`` cannot begin a piece, or the forward pass fails with random values.
    """
    calls: list[str] = []
    names = {module: name for name, module in whole.model.named_modules() if name}
    with whole.mode, new_tensors_dropped(whole.model), fake_calls(whole) as real_calls:

        def note(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if module in names and not real_calls.active:
                calls.append(names[module])
            return original(module, *args, **kwargs)

        try:
            with calls_through(note):
                fake = map_tensors(whole.fake_input, inputs)
                whole.model(fake) if call is None else call(whole.model, fake)
        except Exception as e:
            owner = type(whole.model).__name__ if call is None else "the job"
            raise ValueError(
                f"{owner}: its forward() fails with random values in place of a batch "
                f"({error_with_place(e)}), so it cannot be cut into stages"
            ) from e
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
    if largest_share is not None:
        inside = _inside_of_large(whole.model, num_calls, once, largest_share)
        split = [*split, *(name for name in inside if not closed & {*_callers(name, num_calls)})]
    chosen = [name for name in once if _caller(name, num_calls) == "" or name in split]
    # A module and its first child begin at the same point. If split names the child, leave out the module.
    next_call = dict(itertools.pairwise(calls))
    return [
        name for name in chosen if not (next_call.get(name, "").startswith(f"{name}.") and next_call[name] in split)
    ]


def _inside_of_large(model: nn.Module, calls: Collection[str], once: Sequence[str], largest_share: float) -> list[str]:
    """Return the modules that are called by modules with more than ``largest_share`` of the parameters."""
    total = sum(p.numel() for p in model.parameters())
    large = {n for n in once if sum(p.numel() for p in model.get_submodule(n).parameters()) > largest_share * total}
    inside = [
        name for name in once if _caller(name, calls) and all(caller in large for caller in _callers(name, calls))
    ]
    return [name for name in inside if any(True for _ in model.get_submodule(name).parameters())]


def _caller(name: str, calls: Collection[str]) -> str:
    """Return the innermost module that is called and holds the module ``name``; empty for the model itself."""
    return next(_callers(name, calls), "")


def _callers(name: str, calls: Collection[str]) -> Iterator[str]:
    """Yield the modules that are called and hold the module ``name``, from the innermost one."""
    parts = name.split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))
    yield from (prefix for prefix in prefixes if prefix in calls)
