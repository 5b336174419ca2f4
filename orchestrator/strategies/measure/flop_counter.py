"""Counts the floating-point operations of what a rank computes for its model, each once, and its work by blocks.

The matrix products, convolutions and attention operators are counted by torch's own formulas, while they run. Two
things count otherwise. Activations that are computed again are no work of the model. And of compiled code only some
operators can be seen, so the code from which it was compiled runs too, with fake tensors, which takes no memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from orchestrator.compat.attention import FUSED
from orchestrator.compat.torch import (
    CAST,
    GROUPED_PRODUCT,
    MOVES_NOTHING,
    FakeTensorMode,
    TorchDispatchMode,
    flop_formula,
    is_view_operator,
    next_node_number,
    running_node_number,
    storage_key,
)
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.recorder import fake_like
from orchestrator.model.repeated_blocks import ReplacedBuffers, is_recomputing

ComputePrecision = Literal["fp32", "tf32", "bf16", "fp16"]
"""What matrix products and convolutions are computed in. ``tf32``: float32, in TF32 if the device has it."""


class FlopCounter(TorchDispatchMode):
    """Counts FLOPs by the type of the operands, in its own thread and in the backward passes that this starts.

    Attributes:
        active: the counter that is counting; None if there is none.
        flops: the operations by precision; None for a type without one, such as float64.
        error: why the count is incomplete; None if it is not.
    """

    supports_higher_order_operators = True
    active: ClassVar[FlopCounter | None] = None

    def __init__(self, share: Callable[[], float] = lambda: 1) -> None:
        """Prepare to count; ``share``: returns how much the operations that run now count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._share = share
        self.flops: Counter[ComputePrecision | None] = Counter()  # with fractions if there are shares
        self.error: Exception | None = None
        self._runs_compiled = False
        self._compiled_nodes: list[range] = []  # the numbers of the autograd nodes that compiled code has made
        self._known: dict[Hashable, Counter[ComputePrecision | None]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled as without a counter."""
        return True

    def __enter__(self) -> FlopCounter:
        super().__enter__()  # type: ignore[no-untyped-call]
        FlopCounter.active = self
        return self

    def __exit__(self, *error: Any) -> None:
        FlopCounter.active = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (formula := flop_formula(func)) is not None and not self._counts_otherwise():
            try:
                self.flops[_precision_of(func, args[0])] += round(self._share() * formula(*args, **kwargs, out_val=out))
            except Exception as e:
                self.error = e
        return out

    @contextlib.contextmanager
    def running_compiled(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Count ``forward(module, *args, **kwargs)`` and its backward pass, in place of the compiled code that runs.

        Args:
            module: the module whose parameters it uses.
        """
        if not is_recomputing():
            try:
                self._count_with_fakes(forward, module, args, kwargs)
            except Exception as e:  # fake tensors have no values, which the code may ask for
                self.error = e
        first = next_node_number()
        self._runs_compiled = True
        try:
            yield
        finally:
            self._runs_compiled = False
            self._compiled_nodes.append(range(first, next_node_number()))

    def _counts_otherwise(self) -> bool:
        if self._runs_compiled or is_recomputing():
            return True
        node = running_node_number()
        return node is not None and any(node in numbers for numbers in self._compiled_nodes)

    def _count_with_fakes(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tensors = tensors_in((args, kwargs))
        key = forward, torch.is_grad_enabled(), *((t.shape, t.dtype, t.requires_grad) for t in tensors)
        if (known := self._known.get(key)) is not None:
            self.flops += known
            return
        before = self.flops.copy()
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(tensor: Tensor) -> Tensor:
            return fake_like(tensor, mode).requires_grad_(tensor.requires_grad)

        fake_args, fake_kwargs = map_tensors(fake, (args, kwargs))
        # Without the hooks of activation checkpointing, which would compute what the fake pass keeps again.
        with ReplacedBuffers(module, fake), saved_tensors_hooks(_unchanged, _unchanged), mode:
            outputs = [t for t in tensors_in(forward(module, *fake_args, **fake_kwargs)) if t.requires_grad]
            leaves = [t for t in (*tensors_in((fake_args, fake_kwargs)), *module.parameters()) if t.requires_grad]
            if outputs:
                torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
        self._known[key] = self.flops - before


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _precision_of(operator: Any, operand: Tensor) -> ComputePrecision | None:
    match operand.dtype:
        case torch.bfloat16:
            return "bf16"
        case torch.float16:
            return "fp16"
        case torch.float32:
            backends: Any = torch.backends
            settings = backends.cudnn.conv if "convolution" in str(operator) else backends.cuda.matmul
            return "tf32" if settings.fp32_precision == "tf32" else "fp32"
    return None


class WorkCounter(TorchDispatchMode):
    """Counts the operations and the bytes of operators.

    Attributes:
        blocks: the weighted sums of what runs in the blocks: ``products`` and ``attention`` in operations,
            ``product_bytes``, ``moved_bytes`` and ``output_bytes`` in bytes, the elements of ``output``, the parameters
            in ``experts``, the operations of ``expert_products`` among the products, and the number of ``operators``.
            And the most tokens ``routed`` to the experts of a layer, each as often as it has experts.
        rest: those of everything else.
    """

    def __init__(self, blocks: Mapping[nn.Module, float], parameters: Collection[Tensor]):
        """Prepare to count.

        Args:
            blocks: the weight of each block.
            parameters: what is done to whole ones, such as casts, is left out.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks, self.rest = defaultdict[str, float](float), defaultdict[str, float](float)
        self._weights = [0.0]
        self._casts: list[Tensor] = []  # kept, because another storage could get the key of one that is freed
        self._parameters = {storage_key(p.untyped_storage()) for p in parameters}
        self._hooks = [
            handle
            for block, weight in blocks.items()
            for handle in (
                block.register_forward_pre_hook(lambda *_, weight=weight: self._weights.append(weight)),
                block.register_forward_hook(self._leave),
            )
        ]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._hooks:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inside, weight = len(self._weights) > 1, self._weights[-1]
        counted, weight = (self.blocks, weight) if inside else (self.rest, 1.0)
        counted["operators"] += weight
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
                counted["moved_bytes"] += weight * size
            return out
        operations = formula(*args, **kwargs, out_val=out)
        if (place := FUSED.get(getattr(func, "overloadpacket", func))) is not None:
            is_causal = args[place : place + 1] == (True,)
            counted["attention"] += weight * (operations // 2 if is_causal else operations)
        else:
            counted["products"] += weight * operations
            counted["product_bytes"] += weight * size
            if func.overloadpacket is GROUPED_PRODUCT:
                counted["experts"] += weight * args[1].numel()
                counted["expert_products"] += weight * operations
                counted["routed"] = max(counted["routed"], args[0].shape[0])
        return out

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        weight = self._weights.pop()
        self.blocks["output"] += weight * sum(t.numel() for t in tensors_in(output))
        self.blocks["output_bytes"] += weight * sum(t.nbytes for t in tensors_in(output))
