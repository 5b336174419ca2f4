"""Train and eval modes. The job chooses the mode of each module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from orchestrator.config.text import first_few

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def in_train_mode(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a constructor whose model is in train mode if the model of ``build`` is wholly in eval mode.

    That is how ``from_pretrained`` returns a model. If only some modules are in eval mode, each keeps its mode. A
    ``train()`` that a module overrides is called as a hand-written loop does, and may set further ones to eval mode.
    """

    def built() -> nn.Module:
        model = build()
        modes = {module: module.training for module in model.modules()}
        if not any(modes.values()):
            model.train()
        elif any(getattr(module.train, "__func__", None) is not nn.Module.train for module in modes):
            model.train()
            for module, training in modes.items():
                module.training = module.training and training
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


def note_on_dropout(model: nn.Module) -> str | None:
    """Return a note if dropout is off in a part of the model that is trained; None if it is not.

    ``from_pretrained`` returns a model in eval mode. Wrapped by a new module, it is only a part of one, and then keeps
    its mode.
    """
    trained = {name for name, child in model.named_children() if any(p.requires_grad for p in child.parameters())}
    off = [
        name
        for name, module in model.named_modules()
        if isinstance(module, DROPOUT) and module.p > 0 and not module.training and name.split(".")[0] in trained
    ]
    if not off:
        return None
    return (
        f"dropout is off in training ({first_few(off, 2)}), because these modules are in eval mode, as from_pretrained "
        "returns them; call .train() on the model in job.model() to turn it on"
    )
