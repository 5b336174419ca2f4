"""A hand-written ``fully_shard`` script for torchrun. The model is a sequence, whose repeated modules are blocks."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.distributed.fsdp import fully_shard
from torchrun_ddp import main


def sharded(model: nn.Module) -> nn.Module:
    """Return a model whose parameters are divided over the ranks, and gathered block by block."""
    kinds = Counter(map(type, model.children()))
    for block in model.children():
        if kinds[type(block)] > 1:
            fully_shard(block)
    fully_shard(model)
    return model


if __name__ == "__main__":
    main(sharded)
