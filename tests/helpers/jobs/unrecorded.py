"""Models in which a recording of the code between the layers misses something, so that stages train another one."""

from collections.abc import Callable

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.special_modules import Model, _DoubledGradient
from helpers.jobs.toys import Toy


def linear() -> nn.Module:
    return nn.Linear(16, 16)


class Plain(Model):
    """A model whose pieces are as they should be."""

    def __init__(self) -> None:
        super().__init__(linear)


class CustomFunctionInGlue(Plain):
    """Its own ``forward`` applies a custom function, whose backward pass a recording does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(_DoubledGradient.apply(self.special(self.first(x)))))


class CountsInGlue(Plain):
    """Its own ``forward`` counts calls, which a recording does not, and keeps the count where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = numpy.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.third(F.relu(self.special(self.first(x))) * float(self.calls[0])))


class Reaches(Plain):
    """Its third layer uses the second one by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.third = Reaching(lambda: self.special)


class Reaching(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]):
        super().__init__()
        self.own = linear()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.layer()(x)


class HandCut(Toy):
    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Plain)
        return [
            nn.Sequential(model.first, nn.Tanh(), Shift(model)),
            nn.Sequential(model.special, model.third, model.head),
        ]


class Shift(nn.Module):
    def __init__(self, model: Plain):
        super().__init__()
        self.shift = model.shift

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class EvaluatesOtherwise(Plain):
    """Looks at something in evaluation that a recording, which is made with gradients, does not have."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if torch.is_grad_enabled() else 2.0
        return self.head(self.third(self.special(self.first(x)) * factor))


class Prepared(nn.Linear):
    """Works only once the model has set it up."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            raise ValueError("not ready")
        return super().forward(x)


class PreparesALayer(Model):
    """Sets up a layer in its first pass, as BigBird chooses its attention, before it is recorded."""

    def __init__(self) -> None:
        super().__init__(lambda: Prepared(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.special.ready = True
        return super().forward(x)


class ChangesItsPrecision(nn.Sequential):
    """A recording has no autocast."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))

    forward = torch.autocast("cpu", torch.bfloat16)(nn.Sequential.forward)
