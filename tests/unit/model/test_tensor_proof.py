"""What can be divided over workers is found in a block, and divided only if the parts compute the same."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.files.golden import Golden
from helpers.jobs.head_norms import WIDTH, Parallel, adapted
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.proofs.divided_layers import ProvenBlock, proven
from orchestrator.model.tensor.block_calls import BlockCall
from orchestrator.model.tensor.pairs import candidates
from orchestrator.model.tensor.region import Pair, divide

ATTENTION = Pair(columns=("q", "k", "v"), rows=("out",))
MLP = Pair(columns=("gate", "up"), rows=("down",))


def mixing() -> nn.Module:
    """Return a block that mixes the outputs of all heads before it projects them."""
    block = Parallel()
    block.out.register_forward_pre_hook(lambda module, args: (args[0].cumsum(-1),))
    return block


def tried(block: nn.Module, count: int = 2, **given: list[Pair]) -> ProvenBlock:
    torch.manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.4)
    return proven(block, BlockCall(args=(torch.randn(2, 5, WIDTH).requires_grad_(),), kwargs={}), count, **given)


def test_both_pairs_of_a_block_are_found_with_the_number_of_heads_and_the_partial_gradient() -> None:
    found = tried(Parallel(kv_heads=2))
    assert {*found.parts.pairs} == {ATTENTION, MLP}
    assert found.whole == {}
    assert found.parts.attributes[""] == ["num_heads"]
    assert found.parts.partial == ("q_norm.weight",)
    cut = {"q", "k", "v", "gate", "up"}
    rows = {f"{name}.{of}": 0 for name in cut for of in ("weight", "bias")}
    assert {name: cut.axis for name, cut in found.parts.cuts.items()} == {**rows, "out.weight": 1, "down.weight": 1}


class Gated(nn.Module):
    """Queries with several heads for each key and value, and the gate of an MLP, in one projection each."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.config = config
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv, size = self.qkv(x), self.config.num_heads * 4
        q, k, v = qkv[..., :size], qkv[..., size : size + size // 2], qkv[..., size + size // 2 :]
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(up * F.silu(gate))


def test_a_rank_has_an_equal_part_of_all_that_a_projection_packs() -> None:
    config = SimpleNamespace(num_heads=4)
    block = Gated(config)
    found = tried(block)
    assert found.whole == {}
    packed = {name: cut.packed for name, cut in found.parts.cuts.items() if cut.packed}
    parts = {"qkv": (16, 8, 8), "gate_up": (24, 24)}
    assert packed == {f"{name}.{of}": sizes for name, sizes in parts.items() for of in ("weight", "bias")}
    whole = block.qkv.weight.detach().clone()
    divide(block, found.parts, index=1, count=2, peers=Peers())
    assert torch.equal(block.qkv.weight, torch.cat([whole[8:16], whole[20:24], whole[28:32]]))
    assert (config.num_heads, block.config.num_heads) == (4, 2)


def test_an_adapter_is_divided_with_its_layer_and_sums_its_inputs() -> None:
    found = tried(adapted())
    layers = {"columns": ("q", "k", "v"), "rows": ("out",)}, {"columns": ("gate", "up"), "rows": ("down",)}
    parts = {"columns": ("layer", "b"), "rows": ("layer", "a")}
    pairs = {
        Pair(**{side: tuple(f"{name}.{of}" for name in pair[side] for of in parts[side]) for side in pair})
        for pair in layers
    }
    assert {*found.parts.pairs} == pairs
    assert found.parts.partial == ("q_norm.weight",)


@pytest.mark.parametrize(
    ("block", "count", "pair", "reason"),
    [
        (mixing(), 2, ATTENTION, "would change its output by"),
        (Parallel(dropout=0.1), 2, ATTENTION, "draws other random numbers"),
        (Parallel(kv_heads=2), 4, ATTENTION, "raises RuntimeError"),
    ],
    ids=["mixing", "dropout", "shared heads"],
)
def test_what_is_not_proven_stays_whole_and_the_rest_is_divided(
    block: nn.Module, count: int, pair: Pair, reason: str
) -> None:
    found = tried(block, count)
    assert found.parts.pairs == (MLP,)
    assert [*found.whole] == [str(pair)]
    assert reason in found.whole[str(pair)]


class Rounding(nn.Linear):
    """Multiplies by weights that have been rounded to multiples of the largest one."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.detach().abs().max() / 8
        return F.linear(x, (self.weight / step).round() * step, self.bias)


class Multiplying(nn.Linear):
    """Writes the product as it is done for some models."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_a_layer_with_a_forward_of_its_own_is_divided_if_it_computes_a_product() -> None:
    block = Parallel()
    block.gate, block.up, block.down = (Multiplying(*size) for size in ((WIDTH, 24), (WIDTH, 24), (24, WIDTH)))
    block.out = Rounding(WIDTH, WIDTH)
    found = tried(block)
    assert found.parts.pairs == (MLP,)
    assert [*found.whole] == [str(ATTENTION)]


def test_a_block_that_returns_no_numbers_is_not_divided(golden: Golden) -> None:
    def masked(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].masked_fill(torch.ones_like(args[0], dtype=torch.bool), float("nan")),)

    block = Parallel()
    block.register_forward_pre_hook(masked)
    with golden.raises(ValueError):
        tried(block)


def test_a_wrong_pair_by_hand_is_not_proven() -> None:
    wrong = Pair(columns=("gate",), rows=("down",))
    found = tried(Parallel(), pairs=[wrong, ATTENTION])
    assert found.parts.pairs == (ATTENTION,)
    assert [*found.whole] == [str(wrong)]


def test_a_bias_of_a_row_counts_once() -> None:
    assert {*tried(Parallel(), 4).parts.pairs} == {ATTENTION, MLP}
    assert "out.bias" not in tried(Parallel()).parts.cuts | dict.fromkeys(tried(Parallel()).parts.partial)


def test_a_block_sums_twice_in_each_direction() -> None:
    class Counting(Peers):
        sums = 0

        def sum(self, tensor: Tensor) -> Tensor:
            self.sums += 1
            return tensor

    block, peers = Parallel(), Counting()
    divide(block, tried(Parallel()).parts, index=0, count=2, peers=peers)
    out = block(torch.randn(2, 5, WIDTH).requires_grad_())
    assert peers.sums == 2
    out.sum().backward()
    assert peers.sums == 4


def test_a_layer_that_is_used_twice_is_no_column() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.up(x)))

    block = Twice()
    assert candidates(block, BlockCall(args=(torch.randn(2, WIDTH).requires_grad_(),), kwargs={})) == []


def test_ranks_in_lockstep_see_each_others_sums_and_own_random_numbers() -> None:
    def run(index: int, peers: Peers) -> tuple[float, float]:
        first = torch.rand(())
        return float(peers.sum(torch.tensor(10.0**index))), float(first + peers.sum(torch.rand(())))

    torch.manual_seed(0)
    found = in_lockstep(3, run)
    assert found == [found[0]] * 3
    assert found[0][0] == 111


def test_ranks_that_differ_in_their_sums_end_with_an_error(golden: Golden) -> None:
    with golden.raises(RuntimeError):
        in_lockstep(3, lambda index, peers: peers.sum(torch.ones(index + 1)))
    with golden.raises(RuntimeError):
        in_lockstep(2, lambda index, peers: peers.sum(torch.ones(1)) if index else None)


def test_no_gradient_goes_from_rank_to_rank_in_one_process() -> None:
    """As between processes: a second derivative that needs it is not proven by the graphs of all ranks."""

    def of_rank(index: int, peers: Peers) -> list[bool]:
        own = torch.ones(4, requires_grad=True) * index
        found = [peers.sum(own), peers.gather(own, 2, axis=0), peers.scatter(own, index, 2, axis=0)]
        return [tensor.requires_grad for tensor in found]

    assert in_lockstep(2, of_rank) == [[False] * 3] * 2
