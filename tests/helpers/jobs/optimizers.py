"""Optimizers as people have them: wrappers, lists in the state, keys that are no parameters, attributes, modes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from helpers.jobs.quick_jobs import QuickDigits


class OwnStep(Optimizer):
    """Plain gradient descent, by a factor that a subclass chooses."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p), alpha=group["lr"])

    def begin(self) -> None:
        """Change the state of the whole optimizer."""

    def direction(self, p: nn.Parameter) -> Tensor:
        return p.grad


class Lists(OwnStep):
    """Like SOAP: the state of a parameter has a list with a matrix for each dimension, and a tuple of small things."""

    def direction(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        state.setdefault("GG", [torch.zeros(size) for size in p.shape])
        updates, name = state.get("seen", (0, "begun"))
        state["seen"] = (updates + 1, name)
        for dimension, sums in enumerate(state["GG"]):
            sums += p.grad.transpose(0, dimension).reshape(len(sums), -1).sum(1)  # type: ignore[union-attr]
        return p.grad * (1 + 0.01 * updates) + 0.1 * sum(float(sums.abs().sum()) for sums in state["GG"])  # type: ignore


class Keyed(OwnStep):
    """A counter and a tensor of the whole optimizer in its state, which torch's state_dict() allows."""

    def begin(self) -> None:
        own = self.state["global"]
        own["n"] = own.get("n", 0) + 1
        own.setdefault("decay", torch.ones(2)).mul_(0.9)

    def direction(self, p: nn.Parameter) -> Tensor:
        return p.grad / self.state["global"]["n"] * self.state["global"]["decay"].sum()  # type: ignore[operator]


class Attribute(SGD):
    """A decaying factor kept as an attribute and put into state_dict(), as adaptive wrappers do."""

    def __init__(self, params: Any, lr: float = 0.05):
        self.factor = 1.0
        super().__init__(params, lr=lr, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.factor *= 0.8
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad *= self.factor
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "factor": self.factor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        self.factor = state.pop("factor")
        super().load_state_dict(state)


class Forgetful(Attribute):
    """Keeps its factor to itself."""

    def state_dict(self) -> dict[str, Any]:
        return SGD.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        SGD.load_state_dict(self, dict(state_dict))


class Lookahead(Optimizer):
    """Zhang et al., NeurIPS 2019: slow weights by parameter, the state of another optimizer, and a counter."""

    def __init__(self, params: Any, lr: float = 0.05):
        self.inner = Adam(params, lr=lr)
        self.slow: dict[Tensor, dict[str, Any]] = {}
        self.updates = 0
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.updates += 1
        for p in (p for group in self.inner.param_groups for p in group["params"]):
            slow = self.slow.setdefault(p, {"weights": p.clone(), "moves": 0})
            if self.updates % 2 == 0:
                slow["moves"] += 1
                p.copy_(slow["weights"].lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "inner": self.inner.state_dict(), "updates": self.updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.slow, self.updates = state_dict["slow"], state_dict["updates"]
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups


class Sharpness(Lookahead):
    """A wrapper whose state_dict() leaves out the state of what it wraps."""

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": self.inner.state_dict()["param_groups"], "state": {}, "updates": self.updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.updates = state_dict["updates"]


class TwoPasses(Optimizer):
    """Foret et al., ICLR 2021, as it is widely copied: the state of the inner optimizer is in no state_dict()."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        closure()
        self.inner.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


class InDouble(OwnStep):
    """Its sums are more precise than the parameters, and it remembers a text of each."""

    def direction(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        state.setdefault("sum", torch.zeros_like(p, dtype=torch.float64)).add_(p.grad / 3)  # type: ignore[operator]
        state["kind"] = "matrix" if p.ndim > 1 else "vector"
        return state["sum"].to(p.dtype) * (1.0 if state["kind"] in ("matrix", "vector") else 0.0)


class ScheduleFree(Optimizer):
    """Defazio et al., NeurIPS 2024: evaluated are averages ``x``, trained are ``y``, between them and ``z``."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "k": 0, "training": False})

    @torch.no_grad()
    def _swap(self, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["training"] != training and "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 0.1 if training else 1 - 1 / 0.9)
            group["training"] = training

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=-0.9 * group["lr"] * (1 - 1 / group["k"]))
                z.sub_(p.grad, alpha=group["lr"])


class Global(OwnStep):
    """Divides gradients by the norm of all, which a stage of a pipeline does not know."""

    def begin(self) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.grad /= norm


class Unsavable(OwnStep):
    """Has an object in its state."""

    def direction(self, p: nn.Parameter) -> Tensor:
        self.state[p]["history"] = object()
        return super().direction(p)


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "lists": Lists,
    "keyed": Keyed,
    "attribute": Attribute,
    "lookahead": Lookahead,
    "in-double": InDouble,
    "schedule-free": ScheduleFree,
}
"""Those that can be resumed."""


@dataclass(frozen=True, kw_only=True)
class OptimizedDigits(QuickDigits):
    """Digits with one of these optimizers."""

    hidden: int = 24
    depth: int = 3
    kind: Callable[[Any], Optimizer] = Attribute

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.kind(parameters)
