"""Blocks of 16 numbers, each with an idiom that a strategy could break, and the stack that has three of them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.l2(self.l1(h).tanh())


class Net(nn.Module):
    """A stack of equal blocks between two layers."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.a = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.c = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        for block in self.blocks:
            h = block(h)
        return self.c(h)


class Clamped(Block):
    """Clips its weights in the forward pass, as the critic of a Wasserstein GAN does."""

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.l1.weight.clamp_(-0.05, 0.05)
        return super().forward(h)


class Experts(nn.Module):
    """A mixture whose experts are skipped if no sample chooses them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        share, out = self.gate(h).softmax(1), torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = (share.argmax(1) == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]) * share[rows, i : i + 1])
        return h + out


class Stacked(nn.Module):
    """All experts in one tensor of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.einsum("bi,eio,be->bo", h, self.weight, self.gate(h).softmax(1)).tanh()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm(h.unflatten(1, (4, 4)))
        return h + self.attention(x, x, x, need_weights=False)[0].flatten(1)


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(h.unflatten(1, (4, 4))).flatten(1)


class Convolved(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(2, 4, 3, padding=1, bias=False), norm()
        self.back = nn.ConvTranspose1d(4, 2, 1)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.back(F.silu(self.norm(self.convolution(h.unflatten(1, (2, 8)))))).flatten(1)


class Lists(nn.Module):
    """Parameters in a list and in a dict, one of them with a single number and one without any dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 8 for _ in range(2))
        self.named = nn.ParameterDict({"shift": torch.zeros(1), "scale": torch.tensor(0.9)})

    def forward(self, h: Tensor) -> Tensor:
        for matrix in self.matrices:
            h = h + (h @ matrix).tanh() * self.named["scale"] + self.named["shift"]
        return h


class Buffers(nn.Linear):
    """Buffers of several types, one of which is not saved."""

    mask: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(WIDTH) % 3 != 0)
        self.register_buffer("scale", torch.linspace(0.5, 1, WIDTH), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.where(self.mask, super().forward(h).tanh() * self.scale, 0)


class Film(nn.Module):
    """One layer makes the scale and the shift of another one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.maker = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        scale, shift = self.maker(h).chunk(2, dim=1)
        return h + (self.body(h) * (1 + scale) + shift).tanh()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Adversarial(Block):
    """A gradient that is reversed, as in domain adaptation."""

    def forward(self, h: Tensor) -> Tensor:
        return h + self.l2(Reversed.apply(self.l1(h)).tanh())  # type: ignore[no-untyped-call]


class Recomputed(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(super().forward, h, use_reentrant=self.reentrant)


class Equilibrium(Block):
    """Iterates to a fixed point without gradients, and then once with them."""

    def forward(self, h: Tensor) -> Tensor:
        z = torch.zeros_like(h)
        with torch.no_grad():
            for _ in range(4):
                z = self.l2((z + h).tanh()) * 0.3
        return self.l1(h) + self.l2((z + h).tanh()) * 0.3


class Hyper(nn.Module):
    """The weights of a layer are the output of another."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(4)), nn.Linear(4, WIDTH * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + F.linear(h, self.maker(self.code).view(WIDTH, WIDTH)).tanh()


class Vectorized(Block):
    def forward(self, h: Tensor) -> Tensor:
        return torch.func.vmap(super().forward)(h)


class Functional(Block):
    """Calls itself with weights that it has changed, as meta-learning does."""

    def forward(self, h: Tensor) -> Tensor:
        changed = {name: p * 0.9 for name, p in self.l1.named_parameters()}
        return h + self.l2(torch.func.functional_call(self.l1, changed, (h,)).tanh())


class Gated(Block):
    """Decides with its own numbers, read as Python floats."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * (1 + float(self.l1.weight.detach().abs().max()))


class Half(Block):
    """Computes in bfloat16 whatever surrounds it."""

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, torch.bfloat16):
            out = self.l2(self.l1(h).tanh())
        return h + out.float()


class Stateful(Block):
    """Warms its output up with a counter in a buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(h) * (self.steps / 10).clamp(max=1)


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def orthogonal() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def old_weight_norm() -> nn.Module:
    """``weight_norm`` as a hook, which has made the weight a plain attribute."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def pruned() -> nn.Module:
    import torch.nn.utils.prune

    layer = nn.Linear(WIDTH, WIDTH)
    torch.nn.utils.prune.l1_unstructured(layer, "weight", amount=0.3)
    return nn.Sequential(layer, nn.Tanh())


def decorated() -> nn.Module:
    """``forward`` is wrapped on the instance."""
    block, before = Block(), Block.forward
    block.forward = lambda h: before(block, h) * 2  # type: ignore[method-assign]
    return block


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "clamps its weights": Clamped,
    "experts, skipped": Experts,
    "experts, stacked": Stacked,
    "attention": Attention,
    "encoder layer": Encoder,
    "parameter lists": Lists,
    "buffers": Buffers,
    "FiLM": Film,
    "reversed gradient": Adversarial,
    "equilibrium": Equilibrium,
    "hypernetwork": Hyper,
    "vmap": Vectorized,
    "functional call": Functional,
    "reads its weights": Gated,
    "autocast": Half,
    "counts steps": Stateful,
    "weight norm": weight_norm,
    "weight norm, as a hook": old_weight_norm,
    "orthogonal": orthogonal,
    "spectral norm": spectral,
    "pruned": pruned,
    "decorated": decorated,
    "checkpoint": functools.partial(Recomputed, False),
    "reentrant checkpoint": functools.partial(Recomputed, True),
    "GroupNorm": functools.partial(Convolved, lambda: nn.GroupNorm(2, 4)),
    "BatchNorm": functools.partial(Convolved, lambda: nn.BatchNorm1d(4)),
    "InstanceNorm": functools.partial(Convolved, lambda: nn.InstanceNorm1d(4, affine=True)),
}
