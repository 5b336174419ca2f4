"""Tokens are divided over workers where each is computed by itself, and gathered where they are mixed."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from helpers.jobs.head_norms import WIDTH, Parallel
from helpers.jobs.quick_jobs import TinyGPT
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.proofs.divided_layers import ProvenBlock, proven
from orchestrator.model.tensor.block_calls import BlockCall, Ends, ends_of
from orchestrator.model.tensor.region import divide
from orchestrator.model.tensor.token_shards import Tokens


def block() -> nn.Module:
    return TinyGPT(layers=2, variant="llama", kv_heads=2).model().get_submodule("block0")


def tried(module: nn.Module, tokens: int = 6) -> ProvenBlock:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    call = BlockCall(args=(torch.randn(2, tokens, WIDTH).requires_grad_(),), kwargs={})
    return proven(module, call, 2, sequence=True)


@pytest.mark.parametrize("length", [6, 7, 2])
def test_each_rank_computes_its_own_tokens_once(length: int) -> None:
    x = torch.arange(2.0 * length * 3).view(2, length, 3)

    def of_rank(index: int, peers: Peers) -> tuple[Tensor, Tensor, int]:
        layer, seen = nn.Identity(), list[Tensor]()
        Tokens(index, 3, peers).divide(layer, enters=True, leaves=True)
        layer.forward = lambda own: seen.append(own) or own**2  # type: ignore[func-returns-value, method-assign]
        own = x.clone().requires_grad_()
        out = layer(own)
        out.sum().backward()
        return out, own.grad, seen[0].shape[1]

    for out, gradient, tokens in in_lockstep(3, of_rank):
        assert torch.equal(out, x**2)
        assert torch.equal(gradient, 2 * x)
        assert tokens == -(-length // 3)


@pytest.mark.parametrize("tokens", [6, 5])
def test_a_block_whose_layers_alone_mix_tokens_is_proven(tokens: int) -> None:
    found = tried(block(), tokens)
    assert (found.parts.sequence, found.whole_tokens) == (True, "")
    assert found.parts.partial == ("norm1.weight", "norm2.weight")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Parallel(), "raises RuntimeError: shape '[2, 3, 8]' is invalid"),  # attention takes its sizes from the block's
        (Parallel(dropout=0.1), "draws other random numbers"),
    ],
    ids=["sizes", "dropout"],
)
def test_others_compute_all_tokens(module: nn.Module, reason: str) -> None:
    found = tried(module)
    assert not found.parts.sequence
    assert found.whole_tokens.startswith(reason)


class Counting(Peers):
    def __init__(self) -> None:
        self.made = Counter[str]()

    def sum(self, tensor: Tensor) -> Tensor:
        self.made["sum"] += 1
        return super().sum(tensor)

    def gather(self, part: Tensor, count: int, *, axis: int) -> Tensor:
        self.made["gather"] += 1
        return super().gather(part, count, axis=axis)

    def scatter(self, tensor: Tensor, index: int, count: int, *, axis: int) -> Tensor:
        self.made["scatter"] += 1
        return super().scatter(tensor, index, count, axis=axis)


def test_a_block_gathers_and_scatters_twice_in_each_direction() -> None:
    peers, module = Counting(), block()
    divide(module, tried(block()).parts, index=0, count=2, peers=peers, enters=False, leaves=False)
    peers.tokens = 6
    out = module(torch.randn(2, 3, WIDTH).requires_grad_())
    assert out.shape[1] == 3
    assert peers.made == {"gather": 2, "scatter": 2}
    out.sum().backward()
    assert peers.made == {"gather": 4, "scatter": 4}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third, fourth, last = self.blocks
        x = second(first(x))
        x = third(x * 2)
        kept = fourth(x)
        return last(kept), kept


def test_blocks_need_all_tokens_where_others_read_them() -> None:
    """Between the second and the third something is computed, and the output of the fourth is returned too."""
    model = Layers()
    named = {str(i): child for i, child in enumerate(model.blocks)}
    assert ends_of(named, [lambda: model(torch.randn(2, 3, 4))]) == Ends(enters=("0", "2", "4"), leaves=("1", "3", "4"))
