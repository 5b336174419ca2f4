"""Gradients across ranks: their sum, of sparse ones by exchanging rows, the norm of the whole model, and clipping.

Hooks on gradients run once for each part of a batch: is the sum of their results that of the batch? A hook that scales
or masks a gradient is linear, and one that reads it changes nothing. Clipping and normalising are neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.compat.modules import has_backward_hooks
from orchestrator.compat.process_groups import all_reduce_together
from orchestrator.compat.torch import FakeTensor, has_gradient_hooks
from orchestrator.config.schema import TrainConfig
from orchestrator.config.text import first_few
from orchestrator.planning.plan import Plan
from orchestrator.user_code.errors import JobError

BUCKET_BYTES = 25 * 2**20
ROW = 2**10
"""So many squares are added one by one without much rounding."""


def sum_over(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks of ``group``."""
    begin_sum(group, tensors)()


def begin_sum(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin to replace each tensor by its sum over the ranks of ``group``.

    Dense tensors are reduced in buckets of at most ``BUCKET_BYTES``, sparse ones one at a time, at the end.

    Returns:
        A function that waits for the sums. Until then, the tensors must not be used.
    """
    dense = [tensor for tensor in tensors if not tensor.is_sparse and tensor.numel()]
    reduced = [tensor.contiguous() for tensor in dense]
    works = [all_reduce_together(bucket, group) for bucket in buckets(reduced)]

    def finish() -> None:
        for work in works:
            work.wait()
        for tensor, total in zip(dense, reduced, strict=True):
            if total is not tensor:
                tensor.copy_(total)
        for tensor in tensors:
            if tensor.is_sparse:
                tensor.copy_(sparse_sum(tensor, group))

    return finish


def weighted_sum_over(
    group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], weight: float, device: torch.device
) -> None:
    """Replace the gradients by their sum over the ranks of ``group``, each weighted by the ``weight`` of its rank.

    A gradient that only some ranks have counts as zero on the others; one that no rank has stays None. One that is
    sparse on some ranks and dense on others becomes dense.
    """
    own = [p.grad is not None for p in parameters]
    own += [p.grad is not None and not p.grad.is_sparse for p in parameters]
    found = found_anywhere(group, own, device)
    gradients = []
    for parameter, exists, dense in zip(parameters, found, found[len(parameters) :], strict=False):
        if not exists:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter) if dense else _no_rows(parameter)
        elif dense and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        gradients.append(parameter.grad.mul_(weight))
    sum_over(group, gradients)


def found_anywhere(group: dist.ProcessGroup, found: Sequence[bool], device: torch.device) -> Sequence[bool]:
    """Return what is true on any rank of ``group``. A rank on which all is true does not wait for its device."""
    everything = all(found)
    flags = torch.ones(len(found), device=device) if everything else torch.tensor(found, device=device).float()
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return found if everything else flags.bool().tolist()


def _no_rows(parameter: Tensor) -> Tensor:
    """Return a sparse gradient without entries, as of an embedding."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def norm_over(
    group: dist.ProcessGroup | None,
    parameters: Sequence[Tensor],
    device: torch.device,
    copies: Callable[[Tensor], int] = lambda parameter: 1,
) -> Tensor:
    """Return the 2-norm of the gradient of all ranks together, as a float32 scalar on ``device``, the same on each.

    The dtypes of the gradients may differ between the ranks.

    Args:
        group: the ranks that together have the whole gradient; None if this rank has it.
        parameters: the parameters of this rank. Those without a gradient do not count.
        device: the device of the result.
        copies: returns how many ranks of ``group`` have the gradient of a parameter.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(copies(parameter), []).extend(_with_norm_of(_entries(parameter.grad)))
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for number, gradients in by_copies.items():
        squares += nn.utils.get_total_norm(gradients).to(device, torch.float64).square() / number
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().float()


def clip(parameters: Iterable[nn.Parameter], train: TrainConfig, norm: Tensor | None) -> None:
    """Clip the gradients as the configuration says, in place.

    Args:
        parameters: the parameters; those without a gradient are left out.
        norm: the norm of the whole gradient, for ``train.clip_norm``.
    """
    if train.clip_norm is not None:
        assert norm is not None
        nn.utils.clip_grads_with_norm_(parameters, train.clip_norm, norm)
    if (limit := train.clip_value) is not None:
        dense = []
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # the sum of several entries for one index counts
                parameter.grad.values().clamp_(-limit, limit)
            elif parameter.grad is not None:
                dense.append(parameter)
        if dense:  # torch refuses none
            nn.utils.clip_grad_value_(dense, limit)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of consecutive tensors of one dtype, of at most ``BUCKET_BYTES`` unless a single tensor is larger."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _entries(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, without duplicate entries: a sparse one may have several for one index."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _with_norm_of(gradient: Tensor) -> list[Tensor]:
    """Return tensors that together have the norm of ``gradient``, so that adding their squares one by one is exact
    enough: on CPUs, torch adds so, and in 16 bits it rounds the norm of each tensor to them.
    """
    narrow = gradient.dtype in (torch.bfloat16, torch.float16)
    if not narrow and (gradient.device.type != "cpu" or gradient.numel() <= ROW):
        return [gradient]
    flat, dtype = gradient.reshape(-1), torch.float32 if narrow else None
    end = flat.numel() // ROW * ROW
    parts = [part for part in (flat[:end].view(-1, ROW), flat[end:].view(1, -1)) if part.numel()]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in parts]
    return [part for norm in norms for part in _with_norm_of(norm)]


def sparse_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of a sparse tensor over the ranks of ``group``, coalesced. A collective operation.

    Each rank gathers the entries of all ranks and adds them in the order of the ranks, so that the result is the same
    everywhere.

    Args:
        tensor: a sparse COO tensor of the same shape, sparse dimensions and dtype on every rank.
        group: None for the default group.
    """
    own = tensor.coalesce()
    rows = own.values().shape[0]
    counts = _gathered(own.indices().new_full((1,), rows), [1] * dist.get_world_size(group), group).tolist()
    indices = _gathered(own.indices().T.contiguous(), counts, group).T
    values = _gathered(own.values(), counts, group)
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()


def _gathered(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks, of which rank r has ``counts[r]``.

    Each rank sends as many as the largest count, because NCCL gathers messages of one size.
    """
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


HOOK_SCALES = (1e-6, 1e-3, 1.0, 1e3)
"""The sizes of the elements of the gradients that are tried, because a limit shows only above or below it."""
HOOK_TOLERANCE = 1e-4


def check_gradient_hooks(
    parameters: Iterable[tuple[str, nn.Parameter]], *, by: str, replicas: bool, in_turn: bool
) -> None:
    """Call the gradient hooks of parameters with random gradients, and compare the sum of two parts with the whole.

    Parameters that have no hook are not touched.

    Args:
        parameters: the parameters by name, on the device and without gradients.
        by: what divides the batch, as typed on the command line.
        replicas: whether the gradients of several parts are summed after hooks have run.
        in_turn: whether the gradient of a part is added to those of the parts before it, which hooks have changed.

    Raises:
        JobError: a hook makes another gradient of parts, or cannot run; the text says what to do.
    """
    ways = [way for way, used in ((False, replicas), (True, in_turn)) if used]
    hooked = {name: p for name, p in parameters if ways and p.requires_grad and has_gradient_hooks(p)}
    if fake := [name for name, p in hooked.items() if isinstance(_gradient(p, [torch.zeros_like(p)]), FakeTensor)]:
        raise JobError(
            f"{by}: the gradient hook of {first_few(fake, 2)} uses a tensor that has no values where a part of the "
            "model is built; make it a buffer of the module and read it from there, or use strategy=ddp"
        )
    differing = [
        name
        for name, parameter in hooked.items()
        if any(_depends(parameter, scale, in_turn=way) for way in ways for scale in HOOK_SCALES)
    ]
    if differing:
        raise JobError(
            f"{by}: the gradient hook of {first_few(differing, 2)} would run on the gradients of parts of the batch, "
            "and their sum would differ from what it makes of the gradient of the whole batch. Clip with "
            "train.clip_norm or train.clip_value, change gradients in step() of the optimizer that Job.optimizer "
            "returns, or use strategy=single train.grad_accumulation=1"
        )


def backward_hooks_note(model: nn.Module, plan: Plan) -> str | None:
    """Return a note on modules with backward hooks, whose gradients nobody can try before training."""
    parts = plan.mesh.data_parallel_size * plan.devices_per_worker * plan.grad_accumulation
    hooked = [name or "the model" for name, module in model.named_modules() if has_backward_hooks(module)]
    if not hooked or parts * (plan.pipeline.num_microbatches if plan.pipeline is not None else 1) == 1:
        return None
    return (
        f"the backward hooks of {first_few(hooked, 2)} get the gradients of a part of the batch, which strategy=ddp "
        "also multiplies by the number of workers; if they do more than scale or read them, such as clipping, the run "
        "trains otherwise than strategy=single train.grad_accumulation=1"
    )


def _depends(parameter: nn.Parameter, scale: float, *, in_turn: bool) -> bool:
    """Return whether hooks make another gradient of two parts than of their sum, or change the parameter."""
    before = parameter.detach().clone()
    with kept_generators(parameter.device):
        seed_generators(0)
        first, second = (torch.randn_like(before) * scale for _ in range(2))
        # Opposite signs show a limit in a tensor of any size; other directions show a choice among its elements.
        return any(
            _differs(parameter, parts, in_turn=in_turn) for parts in ((first, first / -2), (first, second))
        ) or not torch.equal(parameter, before)


def _differs(parameter: nn.Parameter, parts: Sequence[Tensor], *, in_turn: bool) -> bool:
    whole = _gradient(parameter, [torch.stack([*parts]).sum(0)])
    summed = [_gradient(parameter, group) for group in ([parts] if in_turn else [[part] for part in parts])]
    of_parts = [gradient for gradient in summed if gradient is not None]
    if whole is None or len(of_parts) < len(summed):
        return True
    tolerance = max(HOOK_TOLERANCE, 4 * torch.finfo(whole.dtype).eps) * float(whole.abs().max())
    return not torch.allclose(torch.stack(of_parts).sum(0), whole, rtol=0, atol=tolerance, equal_nan=True)


def _gradient(parameter: nn.Parameter, parts: Sequence[Tensor]) -> Tensor | None:
    """Return the gradient that hooks leave after backward passes of the parts; None if they take it away."""
    for part in parts:
        parameter.backward(part.clone())
    gradient, parameter.grad = parameter.grad, None
    return gradient
