"""How a model is divided over workers: what of each block, and which rows of its vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from orchestrator.model.peers import Peers
from orchestrator.model.proofs.divided_layers import ProvenBlock
from orchestrator.model.tensor.block_calls import Ends
from orchestrator.model.tensor.region import BlockParts, divide
from orchestrator.model.tensor.vocabulary import ROWS, divide_rows, of_rows
from orchestrator.planning.placement import AxisCut, Placement, Shape


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """Blocks that compute alike.

    Attributes:
        names: the blocks in the model.
        first: the block that has been proven for them.
        kind: their class.
        proof: how they can be divided.
        sizes: the number of elements of each parameter of one of them.
        experts: those of the parameters of experts, which are divided like other layers, or not at all.
    """

    names: tuple[str, ...]
    first: str
    kind: str
    proof: ProvenBlock
    sizes: Mapping[str, int]
    experts: frozenset[str] = frozenset()

    @property
    def divided(self) -> int:
        """The number of elements of the divided parameters."""
        return sum(self.sizes[name] for name in self.proof.parts.cuts) * len(self.names)

    @property
    def total(self) -> int:
        """The number of elements of all parameters, without :attr:`whole_experts`."""
        return sum(size for name, size in self.sizes.items() if name not in self.whole_experts) * len(self.names)

    @property
    def whole_experts(self) -> frozenset[str]:
        """The parameters of experts that stay whole."""
        return self.experts - self.proof.parts.cuts.keys()

    def __str__(self) -> str:
        pairs = ", ".join(map(str, self.proof.parts.pairs))
        text = f"{len(self.names)} x {self.kind}: {self.divided / max(1, self.total):.0%} of the parameters"
        text += " beside experts" if self.whole_experts else ""
        return text + (f" ({pairs})" if pairs else "")


def experts_of(block: nn.Module) -> frozenset[str]:
    """Return the parameters of experts: matrices one after another in one tensor, or what is named so."""
    return frozenset(name for name, p in block.named_parameters() if p.ndim == 3 or "expert" in name)


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model is divided over ``size`` workers.

    Attributes:
        size: the number of parts.
        kinds: the blocks.
        vocabulary: the embeddings and output layers that are divided by rows.
        rows: how many their parameters have, by name.
        divided_logits: whether the loss is computed of outputs that are not gathered.
        ends: the blocks that need all tokens, where a worker has its own between the divided layers.
    """

    size: int
    kinds: tuple[BlockKind, ...]
    vocabulary: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    divided_logits: bool = False
    ends: Ends = field(default_factory=Ends)

    @property
    def share(self) -> float:
        """The part of the parameters of the blocks that is divided, without experts that stay whole."""
        return sum(kind.divided for kind in self.kinds) / max(1, sum(kind.total for kind in self.kinds))

    @property
    def reasons(self) -> list[str]:
        """Why the rest stays whole, if it has been tried."""
        return [f"{pair}: {reason}" for kind in self.kinds for pair, reason in kind.proof.whole.items()]

    @functools.cached_property
    def blocks(self) -> Mapping[str, BlockParts]:
        """How each block is divided, by its name."""
        return {name: kind.proof.parts for kind in self.kinds for name in kind.names}

    @functools.cached_property
    def cuts(self) -> Mapping[str, AxisCut]:
        """How each divided parameter is cut, by its name in the model."""
        cuts = {f"{b}.{name}": cut for b, parts in self.blocks.items() for name, cut in parts.cuts.items()}
        return cuts | dict.fromkeys(self.rows, ROWS)

    @functools.cached_property
    def partial(self) -> frozenset[str]:
        """The whole parameters of whose gradients each worker computes a part."""
        return frozenset(f"{block}.{name}" for block, parts in self.blocks.items() for name in parts.partial)

    def placement(self, name: str, part: Shape) -> Placement:
        """Return where a parameter is of which a worker has a part of this shape."""
        if (cut := self.cuts.get(name)) is None:
            return Placement(shape=part, partial=("tensor",) if name in self.partial else ())
        whole = tuple(
            self.rows.get(name, size * self.size) if axis == cut.axis else size for axis, size in enumerate(part)
        )
        return Placement(shape=whole, cuts=(cut,))

    def divided(self, build: Callable[[], nn.Module], *, index: int, peers: Peers) -> Callable[[], nn.Module]:
        """Return a constructor of the part number ``index`` of the model that ``build`` returns."""

        def built() -> nn.Module:
            model = build()
            for name, parts in self.blocks.items():
                ends = {"enters": name in self.ends.enters, "leaves": name in self.ends.leaves}
                divide(model.get_submodule(name), parts, index=index, count=self.size, peers=peers, **ends)
            divided = self.divided_logits
            divide_rows(model, self.vocabulary, index=index, count=self.size, peers=peers, divided_logits=divided)
            return model

        return built

    def with_tables(self, model: nn.Module, tables: Mapping[str, nn.Module]) -> TensorPlan:
        """Return the plan with other modules of ``model`` that are divided by rows, by name."""
        weights = {parameter for module in tables.values() for parameter in of_rows(module).values()}
        rows = {name: len(p) for name, p in model.named_parameters(remove_duplicate=False) if p in weights}
        return replace(self, vocabulary=tuple(tables), rows=rows, divided_logits=self.divided_logits and bool(tables))
