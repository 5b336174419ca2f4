"""Updates of all parameters in one kernel, where the class of the optimizer can."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer


def fuse_updates(optimizer: Optimizer, *, sparse: Iterable[Tensor] = ()) -> None:
    """Let ``optimizer`` update its parameters with one kernel for each group that allows it.

    A group is left as it is if the job has chosen how it is updated (``fused``, ``foreach``, ``capturable`` or
    ``differentiable``), if the class has no such kernel for one of its parameters, or if these are on several devices.

    Args:
        optimizer: the optimizer, before its first update.
        sparse: the parameters whose gradients are sparse.
    """
    excluded = set(sparse)
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("capturable") or group.get("differentiable")
        if "fused" not in group or group["fused"] is not None or chosen:
            continue
        group["fused"] = (
            all(
                parameter.device == group["params"][0].device
                and parameter.is_floating_point()
                and parameter not in excluded
                for parameter in group["params"]
            )
            or None
        )


def sparse_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of which ``DistributedDataParallel`` expects sparse gradients."""
    return [
        parameter
        for root in modules
        for module in root.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for parameter in module.parameters(recurse=False)
    ]
