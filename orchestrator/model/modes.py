"""The mode of a model's modules, training or evaluation, each of which is the job's to choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn


def in_train_mode(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a constructor whose model is in train mode if that of ``build`` is wholly in eval mode.

    That is how ``from_pretrained`` returns a model. If only some modules are in eval mode, each keeps its mode.
    """

    def built() -> nn.Module:
        model = build()
        if not any(module.training for module in model.modules()):
            model.train()
        return model

    return built


@contextlib.contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode, and give each its own mode back at the end."""
    before = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            if module.training != training:
                module.train(training)  # a module may do more in it; this also reaches the modules below
        for module, training in before.items():
            module.training = training
