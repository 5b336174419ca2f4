"""Small models of one's own, each with an idiom that a strategy could break. Ten numbers in, four classes out."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from helpers.jobs import batch_toys, stage_toys, uneven_jobs
from helpers.jobs.special_modules import ROOTS, SPECIAL, model_with
from helpers.models.blocks import BLOCKS, WIDTH, Block, Net
from helpers.models.tasks import VOCABULARY, Exhibit, Numbers, Task, Tokens

PACKAGE = "by hand"


class Doubled(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class FrozenNorm(nn.Module):
    """Keeps its BatchNorm in eval mode, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.c = nn.Linear(10, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.a(x)).tanh())


class Penalized(Net):
    """Returns the gradient of its output too, which is differentiated once more."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            out = super().forward(x)
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out, gradient


class Weighed(Net):
    """Adds the size of all its weights to what it returns."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), sum(p.pow(2).sum() for p in self.parameters()).expand(len(x))


class Exits(Net):
    """A head after each block."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        h, out = self.a(x).tanh(), OrderedDict()
        for i, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            h = block(h)
            out[f"exit{i}"] = head(h)
        return {**out, "last": self.c(h)}


Output = namedtuple("Output", ["logits", "hidden"])


class Named(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        for block in self.blocks:
            h = block(h)
        return Output(self.c(h), h)


class UShaped(Net):
    """Blocks of the way up get what those of the way down have returned."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def forward(self, x: Tensor) -> Any:
        one = self.blocks[0](self.a(x))
        two = self.blocks[1](one)
        return self.c(self.blocks[3](self.blocks[2](two) + two) + one)


class Siamese(Net):
    """The same blocks for two views of a sample."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + super().forward(-x).tanh()


class Universal(Net):
    """One block, called three times."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for _ in range(3):
            h = self.blocks[0](h)
        return self.c(h)

    def __init__(self) -> None:
        super().__init__(depth=1)


class Momentum(nn.Module):
    """A frozen teacher, an exact copy at first, that follows the student in the forward pass."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.training and self.through_data:
                    old.data = old.data.lerp(new.data, 0.3)
                elif self.training:
                    old.lerp_(new, 0.3)
            target = self.teacher(x)
        return self.student(x) + 0.1 * target


class WideClamped(nn.Module):
    """Clips a weight whose second dimension is the longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.wide, self.c = nn.Linear(10, 64), nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.wide.weight.clamp_(-0.05, 0.05)
        return self.c(self.wide(self.a(x).tanh()).tanh())


class ReadsAhead(Net):
    """Scales its input by the size of its last weight, without a gradient."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            size = self.c.weight.square().mean()
        return super().forward(x * (1 + size))


class RootScale(Net):
    """Parameters of the root itself, one of which no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale + self.shift


class Unused(Net):
    """A layer that no sample needs."""

    def __init__(self) -> None:
        super().__init__()
        self.old_head = nn.Linear(WIDTH, 9)


class Empty(Net):
    """A parameter without elements, as one that is filled when a model is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.prompt.sum()


class ByTask(Net):
    """A sample uses the head of its task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"left": nn.Linear(WIDTH, 4), "right": nn.Linear(WIDTH, 4)})

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        for block in self.blocks:
            h = block(h)
        return torch.where(x[:, :1] > 0, self.heads["left"](h), self.heads["right"](h)) + self.c(h)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.body = nn.Linear(2, 8), kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.body(self.embed(x.unflatten(1, (5, 2))))
        return self.head(out[:, -1])


class Settling(Net):
    """Calls a block until the last sample has a small output, so that parts of a batch need more calls or fewer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        while (large := h.abs().mean(1, keepdim=True) > 0.2).any():
            h = torch.where(large, self.blocks[0](h) * 0.5, h)
        return self.c(self.blocks[2](self.blocks[1](h)))


class Cells(nn.Module):
    """Steps through a sequence in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for part in x.unflatten(1, (5, 2)).unbind(1):
            h = self.cell(part, h)
        return self.head(h)


class Language(nn.Module):
    """A transformer of torch with a tied table, learned positions and a mask that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, 8), nn.Parameter(torch.randn(1, 8, 8) / 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.table(tokens) + self.positions, mask=mask, is_causal=True))


class Frequencies(nn.Module):
    """Divides the gradient of a token's row by the number of its uses in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True), Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens)))


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.body, self.c = (
            nn.Linear(10, WIDTH),
            nn.Sequential(*(Block() for _ in range(4))),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint_sequential(self.body, 2, self.a(x), use_reentrant=False))


def sharing_memory() -> nn.Module:
    model = Net()
    model.blocks[1].l1.weight.data = model.blocks[0].l1.weight.data
    return model


def one_large_tensor() -> nn.Module:
    """Parameters that are parts of one tensor, without a common element."""
    model = Net()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view_as(p)
    return model


def tied_blocks() -> nn.Module:
    model = Net()
    model.blocks[2] = model.blocks[0]
    return model


def partly_frozen(*names: str) -> nn.Module:
    model = Net()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def in_double() -> nn.Module:
    class Double(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.double())

    return Double().double()


def norms_in_float32() -> nn.Module:
    """bfloat16 weights beside norms in float32."""

    class Mixed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            return h + super().forward(self.norm(h).bfloat16()).float()

    model = Net(Mixed)
    for block in model.blocks:
        block.l1.bfloat16()
        block.l2.bfloat16()
    return model


def lazily() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(4))
    model(torch.zeros(2, 10))
    return model


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Each parameter has this hook on its gradient."""

    def build() -> nn.Module:
        model = Net()
        for p in model.parameters():
            p.register_hook(hook)
        return model

    return build


def clipping_itself() -> nn.Module:
    def clip(p: Tensor) -> None:
        p.grad.clamp_(-0.01, 0.01)

    model = Net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clip)
    return model


def first_of(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


def exits(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(logits, target) for logits in output.values()]).sum()


def penalty(output: Any, target: Tensor) -> Tensor:
    return first_of(output, target) + 0.1 * output[1].pow(2).sum(1).mean()


def weighed(output: Any, target: Tensor) -> Tensor:
    return first_of(output, target) + 1e-2 * output[1].mean()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    z = F.normalize(output, dim=1)
    return F.cross_entropy(z @ z.T.roll(1, 0) / 0.5, torch.arange(len(z)))


def mlp(middle: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: batch_toys.mlp(middle())


def _tokens(build: Callable[[], nn.Module]) -> tuple[Callable[[], nn.Module], Task]:
    return build, Tokens()


BUILT: dict[str, Callable[[], nn.Module] | tuple[Callable[[], nn.Module], Task]] = {
    "plain": Net,
    **{f"block {name}": functools.partial(Net, block) for name, block in BLOCKS.items()},
    "call overridden": lambda: Doubled(nn.Linear(10, WIDTH), nn.Tanh(), Block(), nn.Linear(WIDTH, 4)),
    "frozen BatchNorm": FrozenNorm,
    "waits for a number": Settling,
    "gradient penalty": (Penalized, Numbers(loss_of=penalty)),
    "size of the weights": (Weighed, Numbers(loss_of=weighed)),
    "exits": (Exits, Numbers(loss_of=exits)),
    "named tuple": (Named, Numbers(loss_of=first_of)),
    "U shape": UShaped,
    "siamese": Siamese,
    "universal": Universal,
    "momentum teacher": functools.partial(Momentum, False),
    "momentum teacher, by data": functools.partial(Momentum, True),
    "wide layer clamps its weights": WideClamped,
    "reads a weight ahead": ReadsAhead,
    "parameters of the root": RootScale,
    "unused layer": Unused,
    "empty parameter": Empty,
    "heads by task": ByTask,
    "LSTM": functools.partial(Recurrent, nn.LSTM),
    "GRU": functools.partial(Recurrent, nn.GRU),
    "cells": Cells,
    "language model": _tokens(Language),
    "rare tokens learn more": _tokens(Frequencies),
    "checkpointed parts": Checkpoints,
    "memory shared": sharing_memory,
    "one large tensor": one_large_tensor,
    "blocks tied": tied_blocks,
    "first frozen": functools.partial(partly_frozen, "a", "blocks.0"),
    "middle frozen": functools.partial(partly_frozen, "blocks.1"),
    "head alone": functools.partial(partly_frozen, "a", "blocks"),
    "float64": in_double,
    "norms in float32": norms_in_float32,
    "lazy": lazily,
    "hook that scales": hooked(lambda gradient: gradient * 0.5),
    "hook that normalizes": hooked(lambda gradient: gradient / (gradient.norm() + 1e-3)),
    "hook that clips": clipping_itself,
    "sum of losses": (Net, Numbers(loss_of=batch_toys.summed)),
    "contrastive loss": (Net, Numbers(loss_of=contrastive)),
    "class weights": (Net, Numbers(loss_of=batch_toys.class_weighted)),
    "own batch norm": mlp(batch_toys.OwnBatchNorm),
    "codebook": mlp(batch_toys.Codebook),
    "observer": mlp(batch_toys.Observer),
    "uneven parts": lambda: nn.Sequential(*(uneven_jobs.Parts(False) for _ in range(3)), uneven_jobs.Heads()),
    "repeated blocks": uneven_jobs.Repeated,
    **{f"special: {name}": functools.partial(model_with, name) for name in SPECIAL},
    **{f"root: {name}": build for name, build in ROOTS.items()},
    **{f"chain: {build.__name__}": build for build in (
        stage_toys.tied_thrice, stage_toys.used_twice, stage_toys.norm_used_twice, stage_toys.frozen_in_between,
        stage_toys.freezes_in_train, stage_toys.pairs, stage_toys.skips, stage_toys.nested, stage_toys.same_twice,
        stage_toys.views, stage_toys.beside, stage_toys.text_between,
    )},
}  # fmt: skip

BY_HAND: dict[str, Exhibit] = {
    f"hand/{name}": Exhibit(
        title=name,
        package=PACKAGE,
        build=entry[0] if isinstance(entry, tuple) else entry,
        task=entry[1] if isinstance(entry, tuple) else Numbers(),
        coarse=name in ("block autocast", "norms in float32"),
    )
    for name, entry in BUILT.items()
}
