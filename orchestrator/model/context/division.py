"""A model of which each rank computes some tokens of every sample, together with the ranks that have the others.

The model is called with whole samples, so that it makes positions, masks and embeddings as ever. A block then keeps the
rows of this rank's tokens, of all that it is called with. What follows it has these rows alone, or all again. Attention
sees all tokens. So does a module of a block in which tokens see each other in another way: every rank computes all of
them there.

The gradient of a parameter, and of each tensor outside of blocks, is a sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orchestrator.model.context.tokens import Axes, ContextPart
from orchestrator.model.repeated_blocks import Block

_TOKENS = "_tokens_of_rank"
"""The attribute of a module that has the tokens, the axes of what it is called with, and of what it returns."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Which modules of a model compute what of a sample.

    Attributes:
        blocks: the axes of what each block is called with, by its name.
        gathered: the axes of the results of blocks that return all tokens.
        whole: the axes of the arguments and of the results of the modules in blocks that compute all tokens.
        outputs: those of the output of the model. None of its leaves has one if it is computed of all tokens.
        length_of: the number of the tensor among the inputs that has the tokens, and their axis.
    """

    blocks: Mapping[str, Axes]
    outputs: Axes
    gathered: Mapping[str, Axes] = field(default_factory=dict)
    whole: Mapping[str, tuple[Axes, Axes]] = field(default_factory=dict)
    length_of: tuple[int, int] = (0, 1)

    @property
    def ends_whole(self) -> bool:
        """Whether what follows the blocks is computed of all tokens, on every rank."""
        return bool(self.gathered)


@dataclass(frozen=True)
class _Functions:
    """What takes the place of functions in blocks. It is not compiled."""

    attention: Callable[..., Tensor]
    multi_head_attention: Callable[..., Any]
    dropout: Callable[..., Tensor]


class _OfRows(TorchFunctionMode):
    """Lets attention see all tokens, and dropout draw other numbers for the tokens of other ranks."""

    def __init__(self, functions: _Functions):
        super().__init__()
        self._attention = functions.attention
        self._multi_head_attention = functions.multi_head_attention
        self._dropout = functions.dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self._attention
        elif func is F.multi_head_attention_forward:
            func = self._multi_head_attention
        elif func is F.dropout and _draws(*args, **(kwargs or {})):
            func = self._dropout
        return func(*args, **(kwargs or {}))


def _draws(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


def divide_tokens(model: nn.Module, division: Division, part: ContextPart) -> None:
    """Let the blocks of a model compute the tokens of a rank.

    Args:
        model: the model. The names of its tensors do not change.
        division: which modules compute what.
        part: the tokens.
    """
    part.length_of = division.length_of
    classes: dict[tuple[type[nn.Module], Any], type[nn.Module]] = {}
    # Here, because it imports the compiler, which only a model with divided tokens needs.
    disable: Callable[[Any], Any] = torch.compiler.disable
    functions = _Functions(*map(disable, (part.attention, part.multi_head_attention, part.dropout)))
    for name, axes in division.blocks.items():
        _become(
            model.get_submodule(name), classes, _class_of_rows, (part, axes, division.gathered.get(name), functions)
        )
    all_of = disable(part.all_of)
    for name, (axes, results) in division.whole.items():
        _become(model.get_submodule(name), classes, _class_of_all, (part, axes, results, all_of))


def _become(
    module: nn.Module,
    classes: dict[tuple[type[nn.Module], Any], type[nn.Module]],
    class_of: Callable[[type[nn.Module]], type[nn.Module]],
    tokens: Any,
) -> None:
    key = type(module), class_of
    if key not in classes:
        classes[key] = class_of(type(module))
    module.__class__ = classes[key]
    vars(module)[_TOKENS] = tokens


def _class_of_rows(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of blocks that compute the tokens of a rank; also if they compute them again."""

    def of_rows(block: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        part, axes, results, functions = vars(block)[_TOKENS]
        own_args, own_kwargs = part.enter((args, kwargs), axes)
        with _OfRows(functions):
            out = forward(block, *own_args, **own_kwargs)
        return out if results is None else part.all_of(out, results)

    def called(block: Any, *args: Any, **kwargs: Any) -> Any:
        return of_rows(block, kind.forward, *args, **kwargs)

    member = {"__block_around__": of_rows} if issubclass(kind, Block) else {"forward": called}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **member})


def _class_of_all(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules in blocks that compute all tokens, and return those of a rank."""

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        part, axes, results, all_of = vars(module)[_TOKENS]
        whole_args, whole_kwargs = all_of((args, kwargs), axes)
        with part.all_tokens():
            out = kind.forward(module, *whole_args, **whole_kwargs)
        return part.rows(out, results)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": called})
