"""Modules that a tracer would change: each is the middle of a model that takes ten numbers and returns four classes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _DoubledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def linear(forward: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    """A linear layer with a ``forward`` of its own."""
    kind = type("Special", (nn.Linear,), {"forward": forward})
    return lambda: kind(16, 16)


def hooked(register: str, hook: Callable[..., Any], of: str = "") -> Callable[[], nn.Module]:
    """A linear layer with a hook, or with one on the parameter ``of`` it."""

    def make() -> nn.Module:
        layer = nn.Linear(16, 16)
        getattr(layer.get_parameter(of) if of else layer, register)(hook)
        return layer

    return make


class MovingAverage(nn.Linear):
    """Keeps a moving average of its weights in a buffer."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("average", torch.zeros(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(self.weight.detach(), alpha=0.1)
        return super().forward(x) + 0.1 * F.linear(x, self.average)


class PlainTensor(nn.Linear):
    """Uses a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.scale = torch.linspace(0.5, 1.5, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def in_place(self: Any, x: Tensor) -> Tensor:
    out = nn.Linear.forward(self, x)
    out[:, ::2] *= 0.5
    return out.add_(1)


class OwnCall(nn.Linear):
    """Changes its input and its result outside of ``forward``, with a parameter of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x * 2)
        return out * self.bias.sigmoid()


def no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = nn.Linear.forward(self, x)
    return nn.Linear.forward(self, x) + shift


class Keywords(nn.Linear):
    def forward(self, x: Tensor, *, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        return super().forward(x) * factor + (0.0 if bias is None else bias)


def several(self: Any, x: Tensor) -> dict[str, Any]:
    """A dict and a tuple in it."""
    out = nn.Linear.forward(self, x)
    return {"out": out, "more": (out.tanh(), None, 3)}


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.unsqueeze(1))[0].squeeze(1)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))


def shared() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, nn.Tanh(), layer)


class Model(nn.Module):
    """``first``, the module in question, ``third``, ``head``; with glue and a skip connection between them."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.first, self.special, self.third, self.head = nn.Linear(10, 16), make(), nn.Linear(16, 16), nn.Linear(16, 4)
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh() + self.shift
        if isinstance(self.special, Keywords):
            out = self.special(hidden, factor=0.5, bias=self.shift)
        else:
            out = self.special(hidden)
        if isinstance(out, dict):
            out = out["out"] + out["more"][0]
        out = F.gelu(out) + hidden
        return self.head(self.third(out).tanh() + 0.1 * hidden)


SPECIAL: dict[str, Callable[[], nn.Module]] = {
    "custom function": linear(lambda self, x: _DoubledGradient.apply(nn.Linear.forward(self, x))),
    "straight-through": linear(
        lambda self, x: (soft := nn.Linear.forward(self, x).tanh()) + (soft.sign() - soft).detach()
    ),
    "backward hook": hooked("register_full_backward_hook", lambda module, before, after: (before[0] * 0.5,)),
    "forward hook": hooked("register_forward_hook", lambda module, args, out: out.tanh() * 2),
    "forward pre-hook": hooked("register_forward_pre_hook", lambda module, args: (args[0] * 3,)),
    "tensor hook": hooked("register_hook", lambda gradient: gradient * 0.25, of="weight"),
    "moving average": MovingAverage,
    "branch on values": linear(lambda self, x: nn.Linear.forward(self, x if float(x.sum()) > 0 else -x)),
    "plain tensor": PlainTensor,
    "in place": linear(in_place),
    "no_grad": linear(no_grad),
    "activation checkpointing": linear(
        lambda self, x: torch.utils.checkpoint.checkpoint(
            partial(nn.Linear.forward, self), x, use_reentrant=False
        ).relu()
    ),
    "keyword arguments": lambda: Keywords(16, 16),
    "several results": linear(several),
    "recurrent": Recurrent,
    "parametrized": parametrized,
    "shared": shared,
    "own call": lambda: OwnCall(16, 16),
}


def model_with(name: str) -> nn.Module:
    return Model(SPECIAL[name])


# Roots that are more than a list of layers ---------------------------------------------------------


class Scaled(nn.Sequential):
    """An ``nn.Sequential`` with a ``forward`` and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(*_layers())
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def patched_forward() -> nn.Module:
    model = nn.Sequential(*_layers())
    model.forward = lambda x: nn.Sequential.forward(model, x).tanh()  # type: ignore[method-assign]
    return model


def hooked_root() -> nn.Module:
    model = nn.Sequential(*_layers())
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.register_forward_hook(lambda module, args, out: out.tanh() * 2)
    return model


def in_place_layers() -> nn.Module:
    """Layers that overwrite what they are called with, as in most networks for images."""
    first, second, third = (nn.Linear(n, m) for n, m in ((10, 16), (16, 16), (16, 4)))
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True), third)


class InPlaceBlock(nn.Module):
    """A residual block as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.relu(self.first(x)))
        out += x
        return self.relu(out)


class InPlaceNetwork(nn.Module):
    """Residual blocks behind a layer that the root's ``forward`` calls in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu, self.head = nn.Linear(10, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)
        self.layer1 = nn.Sequential(InPlaceBlock(), InPlaceBlock())
        self.layer2 = nn.Sequential(InPlaceBlock(), InPlaceBlock())

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        x = self.layer2(self.layer1(x))
        x = x + 0.1
        x *= 2
        return self.head(x)


class CachesMask(nn.Module):
    """Caches what it computes in its first forward pass, in an attribute and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.mask: Tensor | None = None
        self.scales: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.5, 16, device=x.device)
        if 16 not in self.scales:
            self.scales[16] = torch.full((16,), 0.5, device=x.device)
        return self.head(self.second(hidden * self.mask).tanh() * self.scales[16])


class ChangesBatch(nn.Module):
    """Changes its batch in place, which no loss sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_layers())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mul_(0.5))


class Scripted(nn.Module):
    """A layer of TorchScript between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(10, 16), nn.Linear(16, 4)
        self.middle = torch.jit.script(nn.Sequential(nn.Tanh(), nn.Linear(16, 16)))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x)) * 2)


class Particular(nn.Sequential):
    """Refuses inputs that are no samples, as a vision-language model refuses texts without images."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0.2).all()):
            raise ValueError("no sample")
        return super().forward(x)


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Particular(*_layers()[:4]), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Teacher(nn.Module):
    """A frozen copy of a layer follows the layer in ``forward``, as in BYOL and MoCo."""

    def __init__(self, *, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data
        self.student, self.teacher = nn.Linear(10, 16), nn.Linear(10, 16).requires_grad_(False)
        self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.through_data:
                    old.data = old.data * 0.5 + new.data * 0.5
                else:
                    old.mul_(0.5).add_(new, alpha=0.5)
        hidden = self.middle(self.student(x).tanh())
        return self.head(hidden + self.teacher(x))


def _layers() -> list[nn.Module]:
    return [nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]


ROOTS: dict[str, Callable[[], nn.Module]] = {
    "own forward and parameter": Scaled,
    "patched forward": patched_forward,
    "hooks": hooked_root,
    "in-place layers": in_place_layers,
    "in-place network": InPlaceNetwork,
    "cached tensors": CachesMask,
    "batch changed in place": ChangesBatch,
    "TorchScript layer": Scripted,
    "layer that needs values": NeedsValues,
}
