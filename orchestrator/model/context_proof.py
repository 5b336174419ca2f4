"""The proof that a model computes the same if ranks have some tokens each: whole, and as all of them, in one process.

The output and the gradients of all parameters are compared, relative to the largest entry of each tensor. The ranks run
the code that training runs, with the exchange between them. Of blocks that are alike, the first and the last run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.context_part import Axes, ContextPart, NotDivisible, divide_tokens
from orchestrator.model.partial_init import build_fake
from orchestrator.model.proving import TOLERANCE, built_at_random, counted, difference
from orchestrator.model.repeated_blocks import blocks_of, likeness
from orchestrator.model.tensor.peers import Peers, in_lockstep
from orchestrator.model.tensor_slots import tensor_slots

MOST_PRECISE = 2**27
"""The number of elements up to which parameters are in float64."""


class CallsModel(Protocol):
    """The part of a job that calls its model."""

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the output for the input of a batch."""

    def positioned(self, inputs: Any) -> Any:
        """Return the input of a batch with positions."""


@dataclass
class _Seen:
    """What a model has computed.

    Attributes:
        output: what it returns.
        gradients: those of its parameters, by name.
        modules: the first output of each module, in the order in which they have returned.
        running: the modules that have not.
    """

    output: Any = None
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    modules: dict[str, Tensor] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)


def prove(
    job: CallsModel,
    build: Callable[[], nn.Module],
    blocks: Mapping[str, Axes],
    outputs: Axes,
    inputs: Any,
    count: int,
) -> None:
    """Compare a model with itself in parts.

    Args:
        job: calls the model.
        build: the constructor of the model.
        blocks: the axes of what each block is called with, by its name.
        outputs: those of the output.
        inputs: whole samples.
        count: the number of parts.

    Raises:
        NotDivisible: the parts compute something else; the text says where.
    """
    model = _real_model(build)
    try:
        state = torch.get_rng_state()
        whole = _seen(job, model, inputs, _Seen(), _all_counted)
        if not torch.equal(state, torch.get_rng_state()):  # as for dropout
            whole = _seen(job, model.eval(), inputs, _Seen(), _all_counted)
    except Exception as e:
        raise NotDivisible(f"the model cannot be called with short samples ({type(e).__name__}: {e})") from e
    weights, seen = _all_counted(whole.output), [_Seen() for _ in range(count)]
    parts = [ContextPart(index=index, count=count) for index in range(count)]

    def of_rank(index: int, peers: Peers) -> None:
        part = parts[index]
        part.peers = peers
        shared = {id(slot.tensor): slot.tensor for slot in tensor_slots(model)}
        own = copy.deepcopy(model, shared)
        divide_tokens(own, blocks, part)
        part.begin(inputs)
        _seen(job, own, job.positioned(inputs), seen[index], lambda _: part.rows(weights, outputs))

    error: Exception | None = None
    try:
        in_lockstep(count, of_rank)
    except Exception as e:
        error = e
    differing = "the output" if error is not None else _first_difference(whole, seen, parts, outputs)
    if differing is None:
        return
    for name, output in whole.modules.items():
        of_ranks = [(rank.modules.get(name), part) for rank, part in zip(seen, parts, strict=True)]
        found = max((_of_rows(own, output, part) for own, part in of_ranks if own is not None), default=0.0)
        if found > TOLERANCE:
            raise NotDivisible(
                f"{name or 'the model'} computes something else of some tokens than of all, which differs by "
                f"{found:.2g} of its largest entry: tokens may see each other by scaled_dot_product_attention alone, "
                "and positions and masks have to be made before the blocks"
            )
    if error is not None:
        where = next((rank.running[-1] for rank in seen if rank.running), "") or "the model"
        said = error if isinstance(error, NotDivisible) else f"raises {type(error).__name__} for some tokens: {error}"
        raise NotDivisible(f"{where} {said}") from error
    raise NotDivisible(f"{differing} of the model is not that of the parts")


def _first_difference(whole: _Seen, seen: Sequence[_Seen], parts: Sequence[ContextPart], outputs: Axes) -> str | None:
    """Return what the parts have computed otherwise than the whole model; None if nothing."""
    for rank, part in zip(seen, parts, strict=True):
        rows = part.rows(map_tensors(Tensor.detach, whole.output), outputs)
        of_rank = zip(tensors_in(rank.output), tensors_in(rows), strict=True)
        if any(difference(found.detach(), wanted) > TOLERANCE for found, wanted in of_rank):
            return "the output"
    scale = max((float(g.abs().max()) for g in whole.gradients.values() if g is not None and g.numel()), default=0.0)
    for name, gradient in whole.gradients.items():
        found = [g for rank in seen if (g := rank.gradients[name]) is not None]
        known = [*found, *([] if gradient is None else [gradient])]
        if not known:
            continue
        total, wanted = (sum(of_them, torch.zeros_like(known[0])) for of_them in (found, known[len(found) :]))
        if difference(total, wanted, scale) > TOLERANCE:
            return f"the gradient of {name}"
    return None


def _of_rows(found: Tensor, whole: Tensor, part: ContextPart) -> float:
    """Return how much the output of a module for some tokens differs from that for all; 0 if that cannot be seen."""
    if found.shape == whole.shape:
        return difference(found, whole)
    if found.ndim != whole.ndim:
        return 0.0  # the same for all samples, where another pass has it for each
    axes = [axis for axis, (own, every) in enumerate(zip(found.shape, whole.shape, strict=True)) if own != every]
    if len(axes) != 1 or whole.shape[axes[0]] != part.length:
        return 0.0  # tokens of all samples one after the other, for example
    return difference(found, part.rows([whole], (axes[0],))[0])


def _seen(job: CallsModel, model: nn.Module, inputs: Any, seen: _Seen, weights: Callable[[Any], Any]) -> _Seen:
    """Run a model forward and backward; ``weights`` returns what each entry of the output counts."""

    def before(name: str) -> Any:
        return lambda *_: seen.running.append(name)

    def after(name: str) -> Any:
        def returned(module: nn.Module, args: Any, output: Any) -> None:
            seen.running.pop()
            tensor = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            if tensor is not None:
                seen.modules.setdefault(name, tensor.detach())

        return returned

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(before(name)), module.register_forward_hook(after(name))]
    try:
        seen.output = job.forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    pairs = zip(tensors_in(seen.output), tensors_in(weights(seen.output)), strict=True)
    loss = torch.stack([(out * counts).sum() for out, counts in pairs if out.requires_grad]).sum()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    seen.gradients = dict(zip(named, found, strict=True))
    return seen


def _all_counted(output: Any) -> Any:
    return map_tensors(counted, output)


def _real_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with random weights, in which the blocks between the first and the last of a kind do nothing.

    Its parameters are in float64 if there are not too many of them.
    """
    first = build_fake(build, torch.device("cpu")).model
    kinds: dict[Hashable, list[str]] = {}
    names = {module: name for name, module in first.named_modules()}
    for block in blocks_of(first):
        kinds.setdefault(likeness(block), []).append(names[block])
    left_out = {name for blocks in kinds.values() for name in blocks[1:-1]}
    outside = {
        id(slot.tensor)
        for slot in tensor_slots(first)
        if not any(slot.name.startswith(f"{block}.") for block in left_out)
    }
    wanted = {slot.name for slot in tensor_slots(first) if id(slot.tensor) in outside}
    model = built_at_random(build, wanted.__contains__)
    for name in left_out:
        block = model.get_submodule(name)
        vars(block)["forward"] = lambda *args, **kwargs: next(iter((*args, *kwargs.values())))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model.double() if sum(p.numel() for p in model.parameters()) <= MOST_PRECISE else model.float()
