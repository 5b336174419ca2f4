"""The outputs of an output layer that is divided by rows: a rank has those of its own words.

Whatever reads them sees a tensor with all words, which is gathered when it is first needed. A cross-entropy does not
need it: it takes a few numbers of each row from each rank (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from orchestrator.compat.torch import FakeTensor, make_wrapper, mutates, pytree, version_of, without_torch_functions
from orchestrator.model.batch import map_tensors
from orchestrator.model.peers import Peers
from orchestrator.model.tensor.region import enter, leave

CHUNK_ELEMENTS = 2**24
"""The number of logits of which the losses are computed at a time, in float32."""


@dataclass(frozen=True, eq=False)
class Share:
    """The words that a rank has.

    Attributes:
        index: the number of the rank.
        count: the number of ranks, the last of which may have fewer.
        peers: the ranks that have the others.
        words: how many there are in all.
    """

    index: int
    count: int
    peers: Peers
    words: int

    @property
    def first(self) -> int:
        """The first word of the part."""
        return self.index * self.most

    def place(self, words: Tensor, size: int, *, ignored: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the place of each word among the ``size`` of this part, and which of them are in it.

        Args:
            words: numbers of words.
            size: how many words this part has.
            ignored: a number that stands for no word.

        Raises:
            IndexError: one of them is no word. On a GPU, whatever takes their places as indices fails as torch does.
        """
        own, lacking = words - self.first, (words < 0) | (words >= self.words)
        if ignored is not None:
            lacking &= words != ignored
        if words.is_cpu and not isinstance(words, FakeTensor) and bool(lacking.any()):
            raise IndexError(f"{int(words[lacking][0])} is out of bounds: the vocabulary has {self.words} words")
        return own.clamp(0, size - 1).masked_fill(lacking, size), (own >= 0) & (own < size)

    def gathered(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks along the last axis. Collective."""
        if lacking := self.most - part.shape[-1]:
            part = F.pad(part, (0, lacking))
        return self.peers.gather(part, self.count, axis=-1)[..., : self.words].contiguous()

    @property
    def most(self) -> int:
        """The number of words of the largest part."""
        return -(-self.words // self.count)


class DividedLogits(Tensor):
    """A tensor along whose last axis this rank has one part.

    Attributes:
        part: what this rank has, with its graph.
        share: which part that is.
    """

    part: Tensor
    share: Share
    _whole: Tensor | None = None

    @classmethod
    def of(cls, part: Tensor, share: Share) -> DividedLogits:
        """Return the tensor of which ``part`` is this rank's share."""
        logits: DividedLogits = _Whole.apply(part, share, True)
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the part if that is possible, and otherwise, or after a change of a view, with the whole."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with without_torch_functions():
            found = NotImplemented
            if name in _ELEMENTWISE:
                found = _elementwise(func, args, kwargs)
            elif name in _RULES and args and isinstance(args[0], cls) and not version_of(args[0]):
                found = _RULES[name](args[0], func, *args[1:], **kwargs)
            return func(*args, **kwargs) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the whole.

        Raises:
            TypeError: the operator would change the tensor.
        """
        if mutates(func):
            raise TypeError(f"{func} changes logits in place, of which each worker has a part; let the loss copy them")
        args, kwargs = pytree.tree_map_only(cls, cls._gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _gathered(self) -> Tensor:
        if self._whole is None:
            self.share.peers.gathered_logits = True
            self._whole = self.share.gathered(self.part.detach())
        return self._whole


def gathered(part: Tensor, share: Share) -> Tensor:
    """Return the tensor of which ``part`` is this rank's share, along its last axis. Collective."""
    whole: Tensor = _Whole.apply(part, share, False)
    return whole


def without_parts(tree: Any) -> Any:
    """Return a tree with gathered tensors in place of those of which this rank has a part. Collective."""
    return map_tensors(lambda t: gathered(t.part, t.share) if isinstance(t, DividedLogits) else t, tree)


class _Whole(torch.autograd.Function):
    """The whole of a part, gathered at once or when it is needed; its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, share: Share, when_needed: bool) -> Tensor:
        ctx.share, ctx.size = share, part.shape[-1]
        share.peers.cross(inside=False)
        if not when_needed:
            return share.gathered(part)
        logits: Tensor = make_wrapper(DividedLogits, part, (*part.shape[:-1], share.words))
        assert isinstance(logits, DividedLogits)
        logits.part, logits.share = part, share
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.share.peers.cross(inside=True)
        return gradient.narrow(-1, ctx.share.first, ctx.size).contiguous(), None, None


def _elementwise(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Compute with the own words of every argument. What is the same on all ranks gets the sum of their gradients."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    divided = [tensor for tensor in tensors if isinstance(tensor, DividedLogits)]
    share, own = divided[0].share, divided[0].part.shape[-1]
    taken: dict[int, Tensor] = {}

    def has_words(tensor: Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[-1] == share.words

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, DividedLogits):
            return leaf.part
        if id(leaf) not in taken:
            entered = enter(leaf, share.peers) if leaf.requires_grad and torch.is_grad_enabled() else leaf
            taken[id(leaf)] = entered.narrow(-1, share.first, own) if has_words(leaf) else entered
        return taken[id(leaf)]

    if "out" in kwargs or any(version_of(tensor) for tensor in divided):
        return NotImplemented
    if any(tensor.ndim and tensor.shape[-1] != 1 and not has_words(tensor) for tensor in tensors):
        return NotImplemented
    args, kwargs = pytree.tree_map(part, (args, kwargs))
    found = func(*args, **kwargs)
    fits = isinstance(found, Tensor) and found.ndim and found.shape[-1] == own
    return DividedLogits.of(found, share) if fits else NotImplemented


def _reshaped(logits: DividedLogits, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(argument, torch.dtype) for argument in (*args, *kwargs.values())):
        return NotImplemented
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    return DividedLogits.of(logits.part.reshape(*shape[:-1], logits.part.shape[-1]), logits.share)


def _indexed(logits: DividedLogits, func: Callable[..., Any], index: Any) -> Any:
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(one, (bool, list)) for one in indices):
        return NotImplemented
    axes = sum(_num_axes(one) for one in indices)
    to_the_end = axes >= logits.ndim or (any(one is Ellipsis for one in indices[:-1]))
    if to_the_end and not (isinstance(indices[-1], slice) and indices[-1] == slice(None)):
        return NotImplemented
    return DividedLogits.of(logits.part[index], logits.share)


def _num_axes(index: Any) -> int:
    """Return how many axes of a tensor an index takes; none for an ellipsis, whatever that takes."""
    if index is None or index is Ellipsis:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _logsumexp(logits: DividedLogits, func: Callable[..., Any], dim: Any, keepdim: bool = False) -> Any:
    if dim not in (-1, logits.ndim - 1, (-1,), [-1]):
        return NotImplemented
    sums = _of_rows(logits, None)
    return sums[..., None] if keepdim else sums


def _log_softmax(
    logits: DividedLogits, func: Callable[..., Any], dim: int | None = None, *others: Any, dtype: Any = None, **_: Any
) -> Any:
    if others or dim not in (-1, logits.ndim - 1):
        return NotImplemented
    of_all = enter(_of_rows(logits, None), logits.share.peers)
    values = logits.part.to(of_all.dtype) - of_all[..., None]
    return DividedLogits.of(values if dtype is None else values.to(dtype), logits.share)


def _picked(logits: DividedLogits, func: Callable[..., Any], dim: int, index: Tensor) -> Any:
    if dim not in (-1, logits.ndim - 1):
        return NotImplemented
    own, here = logits.share.place(index, logits.part.shape[-1])
    return leave(logits.part.gather(-1, own).masked_fill(~here, 0), logits.share.peers)


def _nll_loss(logits: DividedLogits, func: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any) -> Any:
    options = _loss_options(logits, target, *args, **kwargs)
    if options is None:
        return NotImplemented
    counts = target != options.ignored
    picked = _picked(logits, func, -1, target.where(counts, 0)[:, None])[:, 0]
    return options.reduced(-picked, counts)


def _cross_entropy(logits: DividedLogits, func: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any) -> Any:
    options = _loss_options(logits, target, *args, **kwargs)
    if options is None:
        return NotImplemented
    losses = _of_rows(logits, target, ignored=options.ignored, smoothing=options.smoothing)
    return options.reduced(losses, target != options.ignored)


@dataclass(frozen=True)
class _LossOptions:
    ignored: int
    reduction: str
    smoothing: float

    def reduced(self, losses: Tensor, counts: Tensor) -> Tensor:
        losses = losses.where(counts, 0)
        if self.reduction == "none":
            return losses
        return losses.sum() / counts.sum() if self.reduction == "mean" else losses.sum()


def _loss_options(
    logits: DividedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> _LossOptions | None:
    """Return the arguments of a loss of torch; None if a loss with them needs the whole."""
    if logits.ndim != 2 or target.ndim != 1 or weight is not None or size_average is not None or reduce is not None:
        return None
    return _LossOptions(ignore_index, reduction, label_smoothing)


_ELEMENTWISE = frozenset(
    (
        *("add", "sub", "rsub", "mul", "div", "true_divide", "neg", "pow", "tanh", "sigmoid"),
        *("exp", "where", "masked_fill", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
        *(f"__{name}__" for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow")),
        *("to", "float", "double", "half", "bfloat16", "contiguous", "detach", "clone"),
    )
)
"""The functions that compute each number by itself, also of others that are the same on all ranks, by name."""

_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "flatten"), _reshaped),
    "__getitem__": _indexed,
    "logsumexp": _logsumexp,
    "log_softmax": _log_softmax,
    "gather": _picked,
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "register_hook": lambda logits, func, hook: logits.part.register_hook(hook),
}
"""What is computed of parts, by the name of the function; NotImplemented if it has to be computed of the whole."""


def _of_rows(
    logits: DividedLogits, labels: Tensor | None, *, ignored: int | None = None, smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy of each row, or, without ``labels``, the logarithm of its sum of exponentials.

    It is in float32 at least, and of no meaning for a label that is ``ignored``. Collective.
    """
    flat = logits.part.reshape(-1, logits.part.shape[-1])
    losses: Tensor = _RowLosses.apply(flat, labels, logits.share, ignored, smoothing)
    return losses.reshape(logits.part.shape[:-1])


class _RowLosses(torch.autograd.Function):
    """What :func:`_of_rows` returns. The gradient of this rank's words is made at once, and kept in their type."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, labels: Tensor | None, share: Share, ignored: int | None, smoothing: float
    ) -> Tensor:
        ctx.share = share
        share.peers.cross(inside=False)
        rows, size = part.shape
        exact = torch.promote_types(part.dtype, torch.float32)
        losses = part.new_empty(rows, dtype=exact)
        slopes = torch.empty_like(part) if ctx.needs_input_grad[0] else None
        step = max(1, CHUNK_ELEMENTS // share.most)  # the same on all ranks
        for chunk in (slice(start, start + step) for start in range(0, rows, step)):
            own = part[chunk].to(exact)
            top = own.amax(-1).clamp(min=torch.finfo(exact).min)  # so that words may be ruled out
            slope = (own - top[:, None]).exp_()
            known = [top, slope.sum(-1)]
            if labels is not None:
                place, here = share.place(labels[chunk], size, ignored=ignored)
                known += [own.gather(1, place[:, None])[:, 0].where(here, 0)]
                known += [own.sum(-1)] if smoothing else []
            tops, sums, *of_labels = share.peers.gather(torch.stack(known)[None], share.count, axis=0).unbind(1)
            most = tops.amax(0)
            total = (sums * (tops - most).exp()).sum(0)
            losses[chunk] = most + total.log()
            slope *= ((top - most).exp() / total)[:, None]
            if labels is not None:
                wanted, *summed = (values.sum(0) for values in of_labels)
                wanted = (1 - smoothing) * wanted
                for values in summed:
                    wanted += smoothing / share.words * values
                losses[chunk] -= wanted
                slope -= smoothing / share.words
                slope.scatter_add_(1, place[:, None], (smoothing - 1) * here.to(exact)[:, None])
            if slopes is not None:
                slopes[chunk] = slope
        ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.share.peers.cross(inside=True)
        (slopes,) = ctx.saved_tensors
        return slopes * gradients[:, None].to(slopes.dtype), None, None, None, None
