"""The proof that a model computes the same if ranks have some tokens each: whole, and as all of them, in one process.

The output, the gradients of all parameters and the buffers are compared, relative to the largest entry of each tensor.
The ranks run the code that training and evaluation run, with the exchange between them. All blocks run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orchestrator.compat.modules import hooks_of
from orchestrator.model.batch import leaves, map_leaves, map_tensors, tensors_in
from orchestrator.model.context.division import Division, divide_tokens
from orchestrator.model.context.tokens import ContextPart, NotDivisible
from orchestrator.model.failed_call import error_with_place
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.proofs.proven_model import ProvenModel
from orchestrator.model.proofs.proving import TOLERANCE, counted, difference
from orchestrator.model.repeated_blocks import blocks_of

SINGLE_TOLERANCE = 2e-4
"""How much a tensor may differ where a model needs float32, as grouped products do."""


class CallsModel(Protocol):
    """The part of a job that calls its model."""

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the output for the input of a batch."""

    def positioned(self, inputs: Any) -> Any:
        """Return the input of a batch with positions."""


class Differs(NotDivisible):
    """The parts compute something else.

    Attributes:
        module: the name of the first module that does; None if none can be named.
    """

    def __init__(self, text: str, module: str | None):
        super().__init__(text)
        self.module = module


class NotCalled(NotDivisible):
    """The model cannot be called."""


@dataclass(frozen=True)
class Pass:
    """A pass through the model.

    Attributes:
        inputs: whole samples.
        trains: whether it is one of training; otherwise one of an evaluation.
        factor: by what matrices are multiplied before it, to reach thresholds that usual ones do not.
    """

    inputs: Any
    trains: bool = True
    factor: float = 1.0


@dataclass
class _Seen:
    """What a model has computed in a pass.

    Attributes:
        output: what it returns.
        gradients: those of its parameters, by name.
        modules: the inputs of each module and its first output, in the order in which they have returned.
        running: the names of the modules that have not, and their inputs.
    """

    output: Any = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, tuple[list[Tensor], Tensor | None]] = field(default_factory=dict)
    running: list[tuple[str, list[Tensor]]] = field(default_factory=list)


def prove(job: CallsModel, proven: ProvenModel, division: Division, passes: Sequence[Pass], count: int) -> None:
    """Compare a model with itself in parts, in several passes one after another.

    Args:
        job: calls the model.
        proven: the model.
        division: which modules compute what.
        passes: what they are called with.
        count: the number of parts.

    Raises:
        Differs: the parts compute something else; the text says where.
        NotCalled: the model cannot be called.
    """
    whole = proven.model()
    ranks = [_Rank(ContextPart(index=index, count=count), proven.model()) for index in range(count)]
    for rank in ranks:
        divide_tokens(rank.model, division, rank.part)
    draws: bool | None = None
    for each in passes:
        proven.multiply(each.factor)
        inputs = map_tensors(lambda t: t.to(proven.dtype) if t.is_floating_point() else t, each.inputs)
        state = torch.get_rng_state()
        try:
            if draws is None:
                _seen(job.forward, proven.model(), inputs, replace(each, trains=True), draws=False)
                draws = not torch.equal(state, torch.get_rng_state())  # beside dropout
            torch.set_rng_state(state)
            seen = _seen(job.forward, whole, inputs, each, draws)
        except Exception as e:
            raise NotCalled(f"the model cannot be called with short samples ({error_with_place(e)})") from e
        if each.factor == 1 or all(bool(t.isfinite().all()) for t in tensors_in(seen.output)):
            tolerance = TOLERANCE if proven.dtype is torch.float64 else SINGLE_TOLERANCE
            _Comparison(job, division, each, inputs, draws, tolerance).compare(whole, seen, ranks)


@dataclass
class _Rank:
    part: ContextPart
    model: nn.Module


@dataclass(frozen=True)
class _Comparison:
    """A comparison of a pass through parts with one through the whole model."""

    job: CallsModel
    division: Division
    of: Pass
    inputs: Any
    draws: bool
    tolerance: float

    def compare(self, model: nn.Module, whole: _Seen, ranks: Sequence[_Rank]) -> None:
        """
        Raises:
            Differs: they have computed something else.
        """
        seen, sums, failed = [_Seen() for _ in ranks], dict[str, Tensor](), list[str]()

        def of_rank(index: int, peers: Peers) -> None:
            part = ranks[index].part
            part.peers = peers
            part.begin(self.inputs)

            def forward(model: nn.Module, inputs: Any) -> Any:
                output = self.job.forward(model, inputs)
                return output if torch.is_grad_enabled() else part.whole(output, self.division.outputs)

            inputs = self.job.positioned(self.inputs)
            counts = self._shares(part.rows(_all_counted(whole.output), self.division.outputs), len(ranks))
            try:
                _seen(forward, ranks[index].model, inputs, self.of, self.draws, into=seen[index], counts=counts)
            except Exception:
                failed.append(seen[index].running[-1][0] if seen[index].running else "")
                raise
            for name, gradient in seen[index].gradients.items():
                sums[name] = sums[name] + gradient if name in sums else gradient

        error: Exception | None = None
        try:
            in_lockstep(len(ranks), of_rank)
        except Exception as e:
            error = e
        found = None if error is not None else self._difference(model, whole, ranks, seen, sums)
        if error is None and found is None:
            return
        mode = "" if self.of.trains else " in evaluation mode"
        for name, (given, output) in whole.modules.items():
            pairs = [(own.modules[name], r.part) for own, r in zip(seen, ranks, strict=True) if name in own.modules]
            apart = max((_apart(own, output, part) for (_, own), part in pairs), default=0.0)
            if apart > self.tolerance and all(self._agree(own, given, part) for (own, _), part in pairs):
                raise Differs(
                    f"{name or 'the model'} computes something else of some tokens than of all{mode}, which differs by "
                    f"{apart:.2g} of its largest entry: tokens may see each other by scaled_dot_product_attention "
                    "alone, and positions and masks have to be made before the blocks",
                    name,
                )
        if error is not None:
            where = next(iter(failed), "")
            refuses = isinstance(error, NotDivisible)
            said = error if refuses else f"raises {type(error).__name__} for some tokens{mode}: {error}"
            raise Differs(f"{where or 'the model'} {said}", where) from error
        assert found is not None
        raise Differs(f"{found[0]}{mode}", found[1])

    def _shares(self, own: Any, count: int) -> Any:
        """Return what the entries of a rank's output count, where all ranks have what they compute alike."""
        axes = iter(self.division.outputs)

        def share(leaf: Any) -> Any:
            same = next(axes) is None
            return leaf / count if same and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return map_leaves(share, own)

    def _difference(
        self,
        model: nn.Module,
        whole: _Seen,
        ranks: Sequence[_Rank],
        seen: Sequence[_Seen],
        sums: dict[str, Tensor],
    ) -> tuple[str, str | None] | None:
        """Return what the parts have computed otherwise, and the module that has it; None if nothing."""
        for rank, own in zip(ranks, seen, strict=True):
            wanted = whole.output if not self.of.trains else rank.part.rows(whole.output, self.division.outputs)
            pairs = list(zip(leaves(own.output), leaves(wanted), strict=False))
            tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
            alike = len(tensors_in(own.output)) == len(tensors_in(wanted)) == len(tensors)
            if not alike or any(difference(a.detach(), b.detach()) > self.tolerance for a, b in tensors):
                return f"the output of the model is not that of the parts{_reader(model)}", ""
            buffers = dict(rank.model.named_buffers())
            for name, buffer in model.named_buffers():
                if difference(_number(buffers.get(name)), _number(buffer)) > self.tolerance:
                    return f"{name}, a buffer that the model changes, is not that of the parts", name.rpartition(".")[0]
        scale = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
        for name in whole.gradients.keys() | sums.keys():
            known = next(of[name] for of in (whole.gradients, sums) if name in of)
            total, wanted = (of.get(name, torch.zeros_like(known)) for of in (sums, whole.gradients))
            if difference(total, wanted, scale) > self.tolerance:
                return f"the gradient of {name} is not that of the parts", None
        return None

    def _agree(self, found: Sequence[Tensor], whole: Sequence[Tensor], part: ContextPart) -> bool:
        """Return whether a module has been called with the same, as far as can be seen."""
        pairs = zip(found, whole, strict=False)
        return len(found) == len(whole) and all(_apart(own, of_all, part) <= self.tolerance for own, of_all in pairs)


def _reader(model: nn.Module) -> str:
    """Return who may have taken a worker's own tokens from the inside of a block."""
    inside = {module for block in blocks_of(model) for module in block.modules()}
    for name, module in model.named_modules():
        if module in inside and hooks_of(module):
            return f": {name} has a hook, which sees a worker's own tokens"
        kept = [key for key, value in vars(module).items() if isinstance(value, Tensor)] if module in inside else []
        if kept:
            return f": {name}.{kept[0]} is kept of a worker's own tokens"
    return ""


def _number(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _apart(found: Tensor | None, whole: Tensor | None, part: ContextPart) -> float:
    """Return how much a tensor for some tokens differs from that for all; 0 if that cannot be seen."""
    if found is None or whole is None:
        return 0.0
    if found.shape == whole.shape:
        return difference(found, whole)
    if found.ndim != whole.ndim:
        return 0.0  # the same for all samples, where another pass has it for each
    axes = [axis for axis, (own, every) in enumerate(zip(found.shape, whole.shape, strict=True)) if own != every]
    if len(axes) != 1 or (found.shape[axes[0]], whole.shape[axes[0]]) != (part.own, part.length):
        return 0.0  # tokens of all samples one after the other, for example
    return difference(found, part.rows([whole], (axes[0],))[0])


def _seen(
    forward: Callable[[nn.Module, Any], Any],
    model: nn.Module,
    inputs: Any,
    of: Pass,
    draws: bool,
    *,
    into: _Seen | None = None,
    counts: Any = None,
) -> _Seen:
    """Make a pass through a model; ``counts``: what each entry of the output counts in the loss."""
    seen = _Seen() if into is None else into
    mode = contextlib.nullcontext() if of.trains and not draws else evaluation_mode(model)
    with _recorded(model, seen), mode, torch.set_grad_enabled(of.trains), _WithoutDropout():
        seen.output = forward(model, inputs)
    if not of.trains:
        return seen
    counts = _all_counted(seen.output) if counts is None else counts
    pairs = zip(tensors_in(seen.output), tensors_in(counts), strict=False)
    terms = [(out * weight).sum() for out, weight in pairs if out.requires_grad and out.shape == weight.shape]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if terms and named:
        found = torch.autograd.grad(torch.stack(terms).sum(), list(named.values()), allow_unused=True)
        seen.gradients = {name: g for name, g in zip(named, found, strict=True) if g is not None}
    seen.output = map_tensors(Tensor.detach, seen.output)
    return seen


@contextlib.contextmanager
def _recorded(model: nn.Module, seen: _Seen) -> Iterator[None]:
    """Record what the modules of a model are called with and return."""

    def before(name: str) -> Any:
        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.running.append((name, [t.detach() for t in tensors_in((args, kwargs)) if t.is_floating_point()]))

        return called

    def after(name: str) -> Any:
        def returned(module: nn.Module, args: Any, output: Any) -> None:
            while seen.running[-1][0] != name:  # a module that has raised an error that the model has caught
                seen.running.pop()
            _, given = seen.running.pop()
            tensor = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            seen.modules.setdefault(name, (given, None if tensor is None else tensor.detach()))

        return returned

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(before(name), with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(after(name)).remove)
        yield


class _WithoutDropout(TorchFunctionMode):
    """Lets dropout drop nothing, because ranks draw other numbers for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
            return args[0] if args else kwargs["input"]
        place = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}.get(func)
        if place is not None:
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


def _all_counted(output: Any) -> Any:
    return map_tensors(lambda t: counted(t) if t.is_floating_point() else t, output)
