"""``train.activation_checkpointing`` and ``train.compile``: the repeated blocks of a model run in another way."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from orchestrator.config.schema import TrainConfig
from orchestrator.config.text import to_cli
from orchestrator.model.repeated_blocks import Block, ForwardPass, blocks_of, likeness
from orchestrator.strategies.measure.flop_counter import FlopCounter


def uses_blocks(train: TrainConfig) -> bool:
    """Return whether ``train`` changes how the repeated blocks of a model run."""
    return train.compiles_blocks or train.activation_checkpointing != "none"


def compile_in_place(module: nn.Module, train: TrainConfig) -> None:
    """Let later calls of ``module``, or of its blocks, run compiled code, if ``train`` says so.

    The names of its tensors do not change. Blocks that are alike share their compiled code.
    """
    if train.compile is False:
        return
    autotuned = "max-autotune-no-cudagraphs"
    mode = autotuned if train.compile == autotuned else "default"
    if not train.compiles_blocks:
        forward = module.forward
        module.forward = functools.partial(compiled(lambda _, *args, **kw: forward(*args, **kw), mode=mode), module)
        return
    shared: dict[Hashable, ForwardPass] = {}
    for block in module.modules():
        if isinstance(block, Block):
            block.__block_compiled__ = shared.setdefault(
                likeness(block), compiled(block.__block_kind__.forward, mode=mode)
            )


def compiled(forward: ForwardPass, *, mode: str) -> ForwardPass:
    """Return ``forward`` as compiled code, whose FLOPs can be counted. It is compiled when it is called.

    ``nn.Module.compile`` does not serve: up to torch 2.13 it compiles nothing of an ``nn.Sequential``, because the
    compiler skips functions that are defined in torch. It inlines them when they are called by another function.
    """

    def inlined(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    # The compiler keeps what it has compiled, up to a limit, with the code object. So each function gets one.
    inlined.__code__ = inlined.__code__.replace()
    fast = torch.compile(inlined, mode=mode)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (counter := FlopCounter.active) is None:
            return fast(module, *args, **kwargs)
        with counter.running_compiled(forward, module, args, kwargs):
            return fast(module, *args, **kwargs)

    return run


def blocks_note(model: nn.Module, train: TrainConfig) -> str | None:
    """Return a note if the model lacks the blocks that ``train`` asks for; None if it has some."""
    if not uses_blocks(train) or blocks_of(model):
        return None
    keys = [f"train.compile={to_cli(train.compile)}"] if train.compiles_blocks else []
    if train.activation_checkpointing != "none":
        keys.append(f"train.activation_checkpointing={train.activation_checkpointing}")
    return (
        f"{' with '.join(keys)} has no effect: the model has no nn.ModuleList or nn.Sequential with several blocks of "
        "one class; put the repeated part of the model into one"
    )
