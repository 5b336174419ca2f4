"""Counts what the forward pass of a model computes and moves, by the blocks of the model and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.attention import FUSED
from orchestrator.compat.torch import (
    CAST,
    GROUPED_PRODUCT,
    MOVES_NOTHING,
    TorchDispatchMode,
    flop_formula,
    is_view_operator,
    storage_key,
)
from orchestrator.model.batch import tensors_in


class WorkCounter(TorchDispatchMode):
    """Counts the operations and the bytes of operators.

    Attributes:
        blocks: the sums of what runs in the blocks: ``products`` and ``attention`` in operations, ``product_bytes``,
            ``moved_bytes`` and ``output_bytes`` in bytes, the elements of ``output``, the parameters in
            ``experts``, and the operations of ``expert_products`` among the products.
        rest: those of everything else.
    """

    def __init__(self, blocks: Collection[nn.Module], parameters: Collection[Tensor]):
        """Prepare to count. What is done to whole ``parameters``, such as casts, is left out."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks, self.rest = Counter[str](), Counter[str]()
        self._inside = 0
        self._casts: list[Tensor] = []  # kept, because another storage could get the key of one that is freed
        self._parameters = {storage_key(p.untyped_storage()) for p in parameters}
        self._hooks = [
            handle
            for block in blocks
            for handle in (block.register_forward_pre_hook(self._enter), block.register_forward_hook(self._leave))
        ]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._hooks:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        counted = self.blocks if self._inside else self.rest
        inputs = [t for t in tensors_in((args, kwargs)) if storage_key(t.untyped_storage()) not in self._parameters]
        if not inputs and func is CAST:
            self._casts.append(out)
            self._parameters.add(storage_key(out.untyped_storage()))
        size = sum(t.nbytes for t in (*inputs, *tensors_in(out)))
        if (formula := flop_formula(func)) is None:
            if (
                inputs
                and func.namespace == "aten"
                and func.overloadpacket not in MOVES_NOTHING
                and not is_view_operator(func)
            ):
                counted["moved_bytes"] += size
            return out
        operations = formula(*args, **kwargs, out_val=out)
        if (place := FUSED.get(getattr(func, "overloadpacket", func))) is not None:
            is_causal = args[place : place + 1] == (True,)
            counted["attention"] += operations // 2 if is_causal else operations
        else:
            counted["products"] += operations
            counted["product_bytes"] += size
            if func.overloadpacket is GROUPED_PRODUCT:
                counted["experts"] += args[1].numel()
                counted["expert_products"] += operations
        return out

    def _enter(self, *_: Any) -> None:
        self._inside += 1

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside -= 1
        self.blocks["output"] += sum(t.numel() for t in tensors_in(output))
        self.blocks["output_bytes"] += sum(t.nbytes for t in tensors_in(output))
