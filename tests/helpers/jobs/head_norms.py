"""A model whose blocks have attention beside an MLP, and a norm of each head: its gradient is a sum over the heads."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from helpers.jobs.toys import Rows
from orchestrator.job import Job, Split

WIDTH, HEADS = 16, 4


class Parallel(nn.Module):
    """Attention beside a gated MLP, in one module, with a norm of each head of the queries."""

    def __init__(self, *, kv_heads: int = HEADS, packed: bool = False, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        self.packed, self.dropout, self.num_heads = packed, dropout, HEADS
        size = WIDTH // HEADS
        self.norm, self.q_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(size)
        if packed:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        else:
            self.q = nn.Linear(WIDTH, WIDTH, bias=bias)
            self.k, self.v = (nn.Linear(WIDTH, kv_heads * size, bias=bias) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=bias) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        parts = self.qkv(h).chunk(3, dim=-1) if self.packed else (self.q(h), self.k(h), self.v(h))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(
            self.q_norm(q), k, v, is_causal=True, enable_gqa=True, dropout_p=self.dropout
        )
        mixed = mixed.transpose(1, 2).reshape(*x.shape[:-1], -1 if self.packed else self.num_heads * WIDTH // HEADS)
        return x + self.out(mixed) + self.down(F.silu(self.gate(h)) * self.up(h))


class Adapter(nn.Module):
    """A frozen layer, and a product of two small matrices that is trained beside it, as by LoRA."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))


def adapted() -> nn.Module:
    """Return a block of which adapters are trained, and norms."""
    block = Parallel(kv_heads=2)
    for name, module in list(block.named_children()):
        if isinstance(module, nn.Linear):
            setattr(block, name, Adapter(module))
    return block


@dataclass(frozen=True, kw_only=True)
class HeadNorms(Job):
    """Learns the next of some numbers, by AdamW or by plain SGD. One of the blocks packs its projections."""

    adamw: bool = False

    def model(self) -> nn.Module:
        bias = not self.adamw  # the gradient of a key's bias is nothing but rounding
        blocks = [Parallel(kv_heads=2, bias=bias), Parallel(packed=True, bias=bias)]
        return nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 4))

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, Tensor]]:
        numbers = torch.randn(64, 7, 4, generator=torch.Generator().manual_seed(0))
        return Rows([(row[:-1], row[1:].cumsum(0).tanh()) for row in numbers])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01) if self.adamw else torch.optim.SGD(parameters, lr=0.2)


class Adapted(HeadNorms):
    """Trains adapters."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, WIDTH), adapted(), adapted(), nn.Linear(WIDTH, 4))
