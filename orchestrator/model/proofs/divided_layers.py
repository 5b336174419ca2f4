"""The proof that a block computes the same if it is divided: whole, and as all of its ranks together, in one process.

Outputs, the gradients of inputs and those of all parameters are compared, relative to the largest entry of each tensor.
The ranks run the code that training runs, with the sums between them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from orchestrator.model.batch import tensors_in
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.proofs.proving import TOLERANCE, counted, difference
from orchestrator.model.tensor.block_calls import BlockCall
from orchestrator.model.tensor.heads import HeadCuts, head_cuts
from orchestrator.model.tensor.pairs import candidates, packed_outputs
from orchestrator.model.tensor.region import (
    BlockParts,
    Packed,
    Pair,
    cuts_of,
    divide,
    home_of,
    inner_sizes,
    is_linear,
    is_parametrized,
    part_of,
)
from orchestrator.model.tensor.token_shards import with_first

COARSE_TOLERANCE = 3e-4
"""How much tensors may differ where some are computed in float32, relative to their largest entries."""
LARGER = 3.0
"""The factor of all matrices, and the root of that of the input, where larger numbers are tried."""


class Unproven(Exception):
    """The divided block computes something else; the text says what, as a predicate."""


@dataclass(frozen=True, kw_only=True)
class ProvenBlock:
    """What has been proven of a block.

    Attributes:
        parts: how it can be divided.
        whole: what has not been proven, with the reason.
        whole_tokens: why each rank has to compute all tokens between the pairs, as a predicate; empty if it need not.
    """

    parts: BlockParts
    whole: Mapping[str, str]
    whole_tokens: str = ""


def proven(
    block: nn.Module, call: BlockCall, count: int, *, pairs: Sequence[Pair] | None = None, sequence: bool = False
) -> ProvenBlock:
    """Return how a block can be divided into ``count`` parts.

    Args:
        block: a block with real tensors, whose parameters become double precision and get gradients.
        call: what it is called with, by random numbers.
        count: the number of parts.
        pairs: what to divide; None for what is found.
        sequence: whether to divide also the tokens between the pairs.

    Raises:
        Exception: whatever the block raises if it is called.
    """
    for parameter in block.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    block, call = _precise(block, call)
    found = candidates(copied(block), call) if pairs is None else pairs
    packed = packed_outputs(copied(block), call)
    odd = {pair: next((size for size in inner_sizes(block, pair, packed) if size % count), None) for pair in found}
    reasons = {pair: f"{size} is no multiple of {count}" for pair, size in odd.items() if size is not None}
    pairs = [pair for pair in found if pair not in reasons]
    precise = not call.is_in(torch.float32)
    looks = [_Look.at(block, call, TOLERANCE)]
    looks.append(_Look.at(copied(block).eval(), call, TOLERANCE if precise else COARSE_TOLERANCE))
    if precise:  # larger numbers have larger errors too
        looks.append(_Look.at(*_larger(block, call), TOLERANCE))
    if not looks[0].is_finite:
        raise ValueError("what it returns is not finite")

    def tried(parts: BlockParts) -> BlockParts | str:
        try:
            partial = [_prove(look, parts, count) for look in looks if look.is_finite]
            return replace(parts, partial=partial[0])
        except Exception as e:  # whatever a model raises that views by a number of heads, for example
            return str(e) if isinstance(e, Unproven) else f"raises {type(e).__name__}: {e}"

    def with_heads(pairs: Sequence[Pair], heads: HeadCuts, wide: Sequence[Pair] = ()) -> BlockParts | str:
        reasons: list[str] = []
        cuts = {**cuts_of(block, pairs, packed), **heads.parameters}
        for attributes in _attributes(block, pairs, packed, count):
            parts = BlockParts(pairs=tuple(pairs), cuts=cuts, attributes=attributes, heads=heads, wide=tuple(wide))
            found = tried(parts)
            if not isinstance(found, str):
                return found
            reasons.append(found)
        return next((reason for reason in reversed(reasons) if not reason.startswith("raises")), reasons[-1])

    def attempt(pairs: Sequence[Pair]) -> BlockParts | str:
        """Return how to divide ``pairs``, or why that is wrong."""
        found = with_heads(pairs, HeadCuts(), [pair for pair in pairs if pair.shared])
        wide = [pair for pair in pairs if pair.home]
        if isinstance(found, str) and wide and "gradient" in found:
            wider = with_heads(pairs, HeadCuts(), wide)
            found = found if isinstance(wider, str) else wider
        if not isinstance(found, str):
            return found
        parts = (with_heads(pairs, heads) for heads in _head_cuts(copied(block), call, pairs, packed, count))
        return next((more for more in parts if not isinstance(more, str)), found)

    together = attempt(pairs)
    if isinstance(together, str):
        alone = {pair: attempt([pair]) for pair in pairs}
        reasons |= {
            pair: (_too_few_heads(block, pair, count) if reason.startswith("raises") else "") or reason
            for pair, reason in alone.items()
            if isinstance(reason, str)
        }
        others = [more for pair in pairs if pair in reasons and (more := _with_shared(block, pair))]
        fitting = [more for more in others if not isinstance(attempt([more]), str)]
        reasons = {pair: reason for pair, reason in reasons.items() if all(pair.rows != more.rows for more in fitting)}
        pairs = [pair for pair in pairs if all(pair.rows != more.rows for more in fitting) and pair not in reasons]
        pairs += fitting
        together = attempt(pairs)
    if isinstance(together, str):
        reasons |= dict.fromkeys(pairs, together)
        together = BlockParts(pairs=(), cuts={})
    in_tokens = tried(replace(together, sequence=True)) if sequence else together
    return ProvenBlock(
        parts=together if isinstance(in_tokens, str) else in_tokens,
        whole={
            str(pair): f"with a part of the features, it {reason}" if reason.startswith("raises") else reason
            for pair, reason in reasons.items()
        }
        | {
            name: "its weight is computed, as by weight_norm" for name, m in block.named_modules() if is_parametrized(m)
        },
        whole_tokens=in_tokens if isinstance(in_tokens, str) else "",
    )


def _with_shared(block: nn.Module, pair: Pair) -> Pair | None:
    """Return a pair of which every rank computes the smallest columns, as the keys and values of all heads."""
    sizes = {name: len(block.get_submodule(name).get_parameter("weight")) for name in pair.columns}
    shared = tuple(name for name, size in sizes.items() if size == min(sizes.values()))
    columns = tuple(name for name in sizes if name not in shared)
    return replace(pair, columns=columns, shared=shared) if columns and not pair.shared else None


def _too_few_heads(block: nn.Module, pair: Pair, count: int) -> str:
    """Return which number of heads cannot be divided; empty if none is known."""
    numbers = _multiples(block.get_submodule(pair.home), 1)
    if odd := next((name for name, number in numbers.items() if _counts_heads(name) and number % count), None):
        return f"its {odd}, {numbers[odd]}, is no multiple of {count}"
    features = {name: len(block.get_submodule(name).get_parameter("weight")) for name in pair.columns}
    sizes = [size for name, size in numbers.items() if "dim" in name or "size" in name]
    of_heads = [size for size in sizes if 1 < size < max(features.values())]
    found = ((name, n // size) for size in of_heads for name, n in features.items() if n % size == 0)
    name, heads = next(((name, heads) for name, heads in found if heads % count), ("", 0))
    return f"{name} has {heads} heads, no multiple of {count}" if name else ""


def copied(block: nn.Module) -> nn.Module:
    """Return a copy of a block, also if calls have left tensors with a graph in attributes of its modules."""
    kept = {id(t): t for module in block.modules() for t in tensors_in(vars(module)) if not t.is_leaf}
    return copy.deepcopy(block, {key: tensor.detach().clone() for key, tensor in kept.items()})


def _precise(block: nn.Module, call: BlockCall) -> tuple[nn.Module, BlockCall]:
    """Return both in float64, unless the block insists on another type; then in float32."""
    precise = copied(block).double(), call.to(torch.float64)
    try:
        precise[1].run(copied(precise[0]))
    except Exception:
        return block.float(), call.to(torch.float32)
    return precise


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a block has computed.

    Attributes:
        outputs, inputs: its outputs, and the gradients of its inputs.
        parameters: the gradients of its parameters.
        buffers: its buffers afterwards.
        random_state: that of the random generator afterwards.
    """

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor | None]
    parameters: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    random_state: Tensor

    @classmethod
    def of(cls, block: nn.Module, call: BlockCall, *, without: Collection[int] = ()) -> _Seen:
        """Run a block; the outputs whose numbers are in ``without`` have no gradients."""
        own = call.fresh()
        state = torch.get_rng_state()
        outputs = [t for t in tensors_in(block(*own.args, **own.kwargs)) if t.is_floating_point()]
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        loss = sum((t * counted(t)).sum() for n, t in enumerate(outputs) if t.requires_grad and n not in without)
        named = {name: p for name, p in block.named_parameters() if p.requires_grad}
        leaves = [*own.inputs, *named.values()]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
        count = len(own.inputs)
        return cls(
            outputs=[output.detach() for output in outputs],
            inputs=gradients[:count],
            parameters=dict(zip(named, gradients[count:], strict=True)),
            buffers={name: b.to(torch.promote_types(b.dtype, torch.float64)) for name, b in block.named_buffers()},
            random_state=after,
        )

    @property
    def scale(self) -> float:
        """The largest entry of a gradient."""
        return max((float(g.abs().max()) for g in self.parameters.values() if g is not None and g.numel()), default=0.0)


@dataclass(frozen=True)
class _Look:
    """A block as it is called once, and what it computes then."""

    block: nn.Module
    call: BlockCall
    whole: _Seen
    tolerance: float

    @classmethod
    def at(cls, block: nn.Module, call: BlockCall, tolerance: float) -> _Look:
        return cls(block, call, _Seen.of(copied(block), call), tolerance)

    @property
    def is_finite(self) -> bool:
        return all(bool(output.isfinite().all()) for output in self.whole.outputs)


@torch.no_grad()
def _larger(block: nn.Module, call: BlockCall) -> tuple[nn.Module, BlockCall]:
    """Return both with larger numbers, which reach limits that others do not."""
    block = copied(block)
    for parameter in block.parameters():
        if parameter.ndim > 1:
            parameter.mul_(LARGER)
    args, kwargs = with_first((call.args, call.kwargs), lambda x: (x * LARGER**2).requires_grad_(x.requires_grad))
    return block, BlockCall(args=args, kwargs=kwargs)


def _prove(look: _Look, parts: BlockParts, count: int) -> tuple[str, ...]:
    """Return the whole parameters whose gradients are parts of a sum.

    Raises:
        Unproven: the ranks together compute something else.
        Exception: whatever the divided block raises.
    """

    block, call, whole = look.block, look.call, look.whole

    def compare(what: str, found: Tensor | None, wanted: Tensor | None, scale: float = 0.0) -> None:
        if (apart := difference(found, wanted, scale)) > look.tolerance:
            raise Unproven(f"would change {what} by {apart:.2g} of its largest entry")

    def run(without: Collection[int]) -> list[_Seen]:
        def of_rank(index: int, peers: Peers) -> _Seen:
            own = copied(block)
            divide(own, parts, index=index, count=count, peers=peers)
            return _Seen.of(own, call, without=without)

        return in_lockstep(count, of_rank)

    ranks = run(())
    of_heads = _parts_among(ranks, look)
    if of_heads:  # such as attention weights, or biases for the next block; the whole model shows who reads them
        whole, ranks = _Seen.of(copied(block), call, without=of_heads), run(of_heads)
    scale = whole.scale
    for rank in ranks:
        if not torch.equal(rank.random_state, whole.random_state):
            raise Unproven("draws other random numbers, as for dropout inside")
        for number, (output, expected) in enumerate(zip(rank.outputs, whole.outputs, strict=True)):
            if number not in of_heads:
                compare("its output", output, expected)
        for name, buffer in whole.buffers.items():
            compare(name, rank.buffers[name], buffer)
        for gradient, given in zip(rank.inputs, whole.inputs, strict=True):
            compare("the gradient of its input", gradient, given, scale)
    partial = []
    for name, wanted in whole.parameters.items():
        found = [rank.parameters[name] for rank in ranks]
        if name in parts.cuts:
            for index, part in enumerate(found):
                own = None if wanted is None else part_of(wanted, parts.cuts[name], index=index, count=count)
                compare(f"the gradient of {name}", part, own, scale)
        elif any(difference(part, wanted, scale) > look.tolerance for part in found):
            total = sum(part for part in found if part is not None)
            compare(f"the gradient of {name}", total if isinstance(total, Tensor) else None, wanted, scale)
            partial.append(name)
    return tuple(partial)


def _parts_among(ranks: Sequence[_Seen], look: _Look) -> set[int]:
    """Return the numbers of the outputs, but for the first, of which each rank has its heads."""
    found = set()
    for number, expected in enumerate(look.whole.outputs[1:], 1):
        outputs = [rank.outputs[number] for rank in ranks]
        sizes = zip(expected.shape, outputs[0].shape, strict=False)
        axes = [axis for axis, (one, other) in enumerate(sizes) if one != other]
        if len(axes) == 1 and difference(torch.cat(outputs, axes[0]), expected) <= look.tolerance:
            found.add(number)
    return found


def _attributes(
    block: nn.Module, pairs: Sequence[Pair], packed: Packed, count: int
) -> Iterator[Mapping[str, Collection[str]]]:
    """Yield the numbers to divide, from none to many.

    Those of the layers, of heads, all that are sizes inside, also of heads in the configuration of modules, and those
    of heads with the same keys.
    """
    layers: dict[str, Collection[str]] = {}
    inner: set[int] = set()
    for pair in pairs:
        for name in pair.layers:
            own = ("in_features", "nx") if name in pair.rows else ("out_features", "nf")
            layers[name] = [attribute for attribute in own if attribute in vars(block.get_submodule(name))]
        inner |= {*inner_sizes(block, pair, packed)}
    holders = {path for pair in pairs for name in pair.layers for path in _paths_to(name)}
    heads: dict[str, Collection[str]] = {}
    sizes: dict[str, Collection[str]] = {}
    configured: dict[str, Collection[str]] = {}
    grouped: dict[str, Collection[str]] = {}
    for path in sorted(holders):
        module = block.get_submodule(path)
        numbers = _multiples(module, count)
        of_heads = [name for name in numbers if _counts_heads(name)]
        in_config = [f"config.{name}" for name in _multiples(vars(module).get("config"), count) if _counts_heads(name)]
        of_sizes = [n for n, v in numbers.items() if v in inner and ("head" not in n or n == "all_head_size")]
        of_groups = [name for name in numbers if "group" in name or name == "n_rep"]
        if is_linear(module):
            continue
        if of_heads:
            heads[path] = of_heads
        if of_heads or of_sizes:
            sizes[path] = [*of_heads, *of_sizes]
        if in_config:
            configured[path] = [*of_heads, *of_sizes, *in_config]
        if of_groups:
            grouped[path] = [*of_heads, *of_groups]
    yield layers
    if heads:
        yield {**layers, **heads}
    if sizes != heads:
        yield {**layers, **sizes}
    if configured:
        yield {**layers, **sizes, **configured}
    if grouped and any(pair.shared for pair in pairs):
        yield {**layers, **heads, **grouped}


def _head_cuts(
    block: nn.Module, call: BlockCall, pairs: Sequence[Pair], packed: Packed, count: int
) -> Iterator[HeadCuts]:
    holders = [
        block.get_submodule(path) for path in {path for pair in pairs for n in pair.layers for path in _paths_to(n)}
    ]
    numbers = [_multiples(owner, count) for module in holders for owner in (module, vars(module).get("config"))]
    known = {value for found in numbers for name, value in found.items() if _counts_heads(name)}
    state = torch.get_rng_state()  # with which all ranks begin
    found = list(
        head_cuts(
            block,
            call,
            layers=[name for name, module in block.named_modules() if is_linear(module)],
            rows=[name for pair in pairs for name in pair.rows],
            homes={home_of(pair.layers) for pair in pairs},
            heads=sorted(known, reverse=True),
            inner=sorted({size for pair in pairs for size in inner_sizes(block, pair, packed)}, reverse=True),
            count=count,
        )
    )
    torch.set_rng_state(state)
    yield from found


def _multiples(owner: object, count: int) -> dict[str, int]:
    """Return the attributes of an object that are positive multiples of ``count``."""
    attributes = getattr(owner, "__dict__", {})
    return {name: v for name, v in attributes.items() if type(v) is int and v > 0 and v % count == 0}


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size", "group"))


def _paths_to(name: str) -> Iterator[str]:
    """Yield the names of the modules in which a module is, the block's own first."""
    steps = name.split(".")
    for length in range(len(steps)):
        yield ".".join(steps[:length])
