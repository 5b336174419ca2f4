"""What a block has for each head is cut with the heads, and torch's own attention is divided by heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.proofs.divided_layers import ProvenBlock, proven
from orchestrator.model.tensor.block_calls import BlockCall
from orchestrator.model.tensor.heads import HeadCuts, Heads
from orchestrator.model.tensor.pairs import candidates
from orchestrator.model.tensor.region import Pair, divide

WIDTH, HEADS, TOKENS = 16, 4, 5
PAIR = Pair(columns=("q", "v", "k"), rows=("out",))


class Attention(nn.Module):
    """``per_head``: what is added to, or multiplied with, the scores of each head."""

    def __init__(self, *, per_head: str = ""):
        super().__init__()
        self.num_heads, self.per_head = HEADS, per_head
        self.q, self.v, self.k, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if per_head == "table":
            self.table = nn.Embedding(2 * TOKENS, HEADS)
        if per_head == "buffer":
            self.register_buffer("slopes", torch.linspace(0.1, 1, HEADS))
        if per_head == "features":
            self.factor = nn.Parameter(torch.ones(WIDTH, 1))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        return self.split(self.k(x))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:
        q, k, v = self.q(x), self.keys(x), self.split(self.v(x))
        if self.per_head == "features":
            q = q * self.factor[:, 0]
        scores = self.split(q) @ k.transpose(-1, -2)
        tokens = torch.arange(x.shape[1])
        if self.per_head == "table":
            bias = self.table(tokens[:, None] - tokens + TOKENS).permute(2, 0, 1)[None]
        if self.per_head == "buffer":
            bias = -(tokens[:, None] - tokens).abs() * self.slopes[:, None, None]
        if bias is not None:
            scores = scores + (bias if bias.ndim == 4 else bias.view(-1, self.num_heads, *bias.shape[1:]))
        weights = scores.softmax(-1)
        out = self.out((weights @ v).transpose(1, 2).flatten(2))
        return (out, weights, bias) if self.per_head == "table" else (out, weights)


def tried(block: nn.Module, *others: Tensor) -> ProvenBlock:
    torch.manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, TOKENS, WIDTH).requires_grad_()
    return proven(block, BlockCall(args=(x, *others), kwargs={}), 2)


@pytest.mark.parametrize(("per_head", "name", "axis"), [("table", "table.weight", 1), ("features", "factor", 0)])
def test_parameters_are_cut_with_the_heads(per_head: str, name: str, axis: int) -> None:
    found = tried(Attention(per_head=per_head))
    assert found.parts.pairs == (PAIR,), found.whole
    assert found.parts.cuts[name].axis == axis


def test_a_rank_reads_its_part_of_a_buffer() -> None:
    found = tried(Attention(per_head="buffer"))
    assert found.parts.pairs == (PAIR,), found.whole
    assert found.parts.heads == HeadCuts(buffers={"slopes": 0})


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.ones(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("slopes").sum()


def test_the_part_of_a_buffer_is_read_where_a_stage_calls_a_module_without_its_block() -> None:
    block = nn.Sequential(nn.Sequential(Sized()))
    HeadCuts(buffers={"0.0.slopes": 0}).apply(block, index=0, count=2, peers=Peers())
    found = [float(module(torch.zeros(()))) for module in (block, block[0], block[0][0])]
    assert found == [HEADS / 2] * 3
    assert block.get_buffer("0.0.slopes").numel() == HEADS


@pytest.mark.parametrize(
    ("bias", "place"),
    [
        (torch.randn(1, HEADS, TOKENS, TOKENS, requires_grad=True), Heads(1, HEADS)),
        (torch.randn(2 * HEADS, 1, TOKENS), Heads(None, HEADS)),
    ],
    ids=["relative biases", "heads after samples"],
)
def test_a_rank_reads_its_part_of_an_argument(bias: Tensor, place: Heads) -> None:
    found = tried(Attention(), bias)
    assert found.parts.pairs == (PAIR,), found.whole
    assert found.parts.heads == HeadCuts(arguments={"": {1: place}})


class Latent(Attention):
    """Adds keys that all heads share to those of each head, as DeepSeek does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.k = nn.Linear(WIDTH, 6 + WIDTH // HEADS), nn.Linear(6, WIDTH)

    def keys(self, x: Tensor) -> Tensor:
        latent, shared = self.a(x).split([6, WIDTH // HEADS], dim=-1)
        return self.split(self.k(latent)) + shared[:, None]


class Around(nn.Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention = attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)[0]


def test_keys_that_all_heads_share_are_computed_by_each_rank() -> None:
    found = tried(Around(Latent))
    (pair,) = found.parts.pairs
    assert found.parts.wide == (pair,), found.whole
    assert found.parts.partial == ("attention.a.weight",)


def _see(layer: nn.Module, args: Any, out: Tensor) -> None:
    layer.get_buffer("largest").copy_(out.detach().amax())


class Counting(Around):
    def __init__(self) -> None:
        super().__init__()
        self.attention.v.register_buffer("largest", torch.zeros(()))
        self.attention.v.register_forward_hook(_see)


def changed(change: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """A block that changes what its attention projects."""
    block = Around()
    block.attention.out.register_forward_pre_hook(lambda module, args: (change(module, args[0]),))
    return block


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Counting(), "would change attention.v.largest"),
        (changed(lambda module, x: x if module.training else x - x.mean(-1, keepdim=True)), "would change its output"),
        (changed(lambda module, x: x * (9 / x.norm(dim=-1, keepdim=True)).clamp(max=1)), "would change its output"),
    ],
)
def test_buffers_evaluations_and_limits_are_compared(block: nn.Module, reason: str) -> None:
    (said,) = tried(block).whole.values()
    assert said.startswith(reason)


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without weights": {"need_weights": False},
    "weights of heads": {"average_attn_weights": False},
    "mask": {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)},
    "mask of heads": {"attn_mask": torch.randn(2 * HEADS, TOKENS, TOKENS), "need_weights": False},
    "padding": {"key_padding_mask": torch.arange(TOKENS).repeat(2, 1) > 3},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_the_attention_of_torch_is_divided_by_heads(name: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64)
    nn.init.normal_(whole.in_proj_bias)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    wanted, wanted_weights = whole(x, x, x, **MASKS[name])
    wanted.square().sum().backward()
    block = nn.ModuleDict({"inner": whole})
    block.forward = lambda x: whole(x, x, x, need_weights=False)[0]  # type: ignore[method-assign]
    (pair,) = candidates(block, BlockCall(args=(x.requires_grad_(),), kwargs={}))
    assert str(pair) == "inner -> inner.out_proj"
    parts = tried(Multihead()).parts

    def of_rank(index: int, peers: Peers) -> tuple[Tensor, Tensor | None, Tensor]:
        own = Multihead().double()
        own.inner.batch_first = batch_first
        own.inner.load_state_dict(whole.state_dict())
        divide(own, parts, index=index, count=2, peers=peers)
        out, weights = own.inner(x.detach(), x.detach(), x.detach(), **MASKS[name])
        out.square().sum().backward()
        return out, weights, own.inner.in_proj_weight.grad

    for index, (out, weights, gradient) in enumerate(in_lockstep(2, of_rank)):
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(weights, wanted_weights)
        own = [part.chunk(2)[index] for part in whole.in_proj_weight.grad.chunk(3)]
        torch.testing.assert_close(gradient, torch.cat(own))


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


@pytest.mark.parametrize("mode", [True, False])
def test_a_layer_of_torch_calls_its_divided_attention(mode: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
    found = proven(layer, BlockCall(args=(torch.randn(2, TOKENS, WIDTH).requires_grad_(),), kwargs={}), 2)
    assert len(found.parts.pairs) == 2, found.whole
    x = torch.randn(2, TOKENS, WIDTH)
    layer.float().train(mode)
    with torch.no_grad():
        wanted = layer(x)

        def of_rank(index: int, peers: Peers) -> Tensor:
            own = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True).train(mode)
            own.load_state_dict(layer.state_dict())
            divide(own, found.parts, index=index, count=2, peers=peers)
            with torch.no_grad():
                return own(x)

        for out in in_lockstep(2, of_rank):
            torch.testing.assert_close(out, wanted)
