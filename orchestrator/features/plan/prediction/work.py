"""What a model computes and moves for a sample: traced from any model, or by the sizes of a transformer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2
"""The bytes of an activation: passes compute in 16 bits."""
HIDDEN_PASSES, FEED_FORWARD_PASSES = 60, 10
"""How often the elements of a transformer's hidden and inner vectors are read or written, forward and backward, by what
is neither a product nor attention, if nothing is fused."""
ROUTED_PASSES = 12
"""How often the vectors that go to experts are read or written on their way there and back, forward and backward."""
LOGIT_BYTES = 14
"""The bytes that a logit of the loss moves, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A part of a model: its parameters, and what it does for one sample.

    Attributes:
        parameters: their number, without ``experts``.
        experts: the parameters in experts.
        used: those of ``experts`` that a token uses.
        products: the operations of matrix products in a forward pass.
        product_bytes: what these read and write of activations.
        attention: the operations of attention in a forward pass.
        moved_bytes: what everything else reads and writes in a forward and a backward pass, if nothing is fused.
        output_bytes: its output, which a later stage needs.
        summed_bytes: that in the type of products, in which ranks sum it that divide these.
        key_bytes: its keys and values.
        routed: the experts that a token is sent to; 0 if no worker has other experts than the others.
        operators: how many operators a forward pass over any number of samples runs; 0 if it is unknown.
    """

    parameters: float
    products: float
    product_bytes: float = 0.0
    attention: float = 0.0
    moved_bytes: float = 0.0
    output_bytes: float = 0.0
    summed_bytes: float = 0.0
    key_bytes: float = 0.0
    experts: float = 0.0
    used: float = 0.0
    routed: int = 0
    operators: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """A model of equal layers.

    Attributes:
        ends: everything else: embeddings, the head and the loss.
        tokens: the tokens of a sample; 1 if samples have none.
        tensors: how many have the parameters; 0 if it is unknown.
    """

    layers: int
    layer: Work
    ends: Work
    tokens: int
    tensors: int = 0

    @property
    def parameters(self) -> float:
        """The number of all parameters."""
        return self.layers * (self.layer.parameters + self.layer.experts) + self.ends.parameters

    @property
    def active_parameters(self) -> float:
        """The number of those that a token uses."""
        return self.parameters - self.layers * (self.layer.experts - self.layer.used)

    @property
    def step_flops(self) -> float:
        """The operations of a forward and a backward pass over a sample."""
        return 3 * (self.layers * (self.layer.products + self.layer.attention) + self.ends.products)


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The sizes of a decoder-only transformer.

    Attributes:
        head: the size of a head.
        gated: whether the feed-forward part has a gate.
        experts: the feed-forward parts of a layer; 0 for one that all tokens use.
        active: how many of them a token uses.
        causal: the share of the square of attention that is computed.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    gated: bool
    experts: int = 0
    active: int = 0
    causal: float = 0.5

    def work(self, tokens: int) -> ModelWork:
        """Return the work of samples of so many tokens."""
        used = self.active or 1
        of_attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head
        of_expert = (3 if self.gated else 2) * self.hidden * self.inner
        layer = Work(
            parameters=of_attention + (0 if self.experts else of_expert),
            experts=self.experts * of_expert,
            used=self.active * of_expert,
            products=2 * tokens * (of_attention + used * of_expert),
            product_bytes=BYTES * tokens * (6 * self.hidden + 4 * self.inner * used),
            attention=4 * tokens**2 * self.heads * self.head * self.causal,
            moved_bytes=BYTES
            * tokens
            * ((HIDDEN_PASSES + ROUTED_PASSES * self.active) * self.hidden + FEED_FORWARD_PASSES * self.inner * used),
            output_bytes=BYTES * tokens * self.hidden,
            summed_bytes=BYTES * tokens * self.hidden,
            key_bytes=2 * BYTES * tokens * self.kv_heads * self.head,
            routed=self.active,
        )
        ends = Work(
            parameters=2 * self.vocabulary * self.hidden,
            products=2 * tokens * self.hidden * self.vocabulary,
            moved_bytes=LOGIT_BYTES * tokens * self.vocabulary,
        )
        return ModelWork(layers=self.layers, layer=layer, ends=ends, tokens=tokens)
