"""A hand-written ``parallelize_module`` script for torchrun, for ``jobs.gpt.GPT`` in the variant ``llama``."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchrun_ddp import main

COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.mix", "mlp.down")


def divided(model: nn.Module) -> nn.Module:
    """Return a model whose blocks, embedding and head are divided over the ranks."""
    return parallelize_module(
        model,
        init_device_mesh("cpu", (dist.get_world_size(),)),
        {
            "embed.token": RowwiseParallel(input_layouts=Replicate()),
            **{f"block*.{name}": ColwiseParallel() for name in COLUMNS},
            **{f"block*.{name}": RowwiseParallel() for name in ROWS},
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )


if __name__ == "__main__":
    main(divided, together=True)
