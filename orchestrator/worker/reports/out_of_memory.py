"""What a user is told when memory runs out: how much was asked for, what takes the memory, what to change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from orchestrator.config.schema import TrainConfig
from orchestrator.strategies.measure.memory import TensorKind, TensorSize

LARGEST = 5
"""The number of tensors that the message names."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+ (?:bytes|KiB|MiB|GiB))"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_ASKED_OF_HOST = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")
_CAPACITY = re.compile(rf"total capacity of {_SIZE}")
_ALLOCATED = re.compile(rf"allocated memory {_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_FREE = re.compile(rf"of which {_SIZE} is free")
_IN_USE = re.compile(rf"Including non-PyTorch memory, this process has {_SIZE} memory in use")
_KINDS: tuple[tuple[TensorKind, str], ...] = (
    ("parameter", "parameters"),
    ("gradient", "gradients"),
    ("optimizer state", "optimizer state"),
    ("buffer", "buffers"),
)


def explain_out_of_memory(
    error: str,
    *,
    tensors: Iterable[TensorSize],
    gathered_bytes: float,
    train: TrainConfig,
    is_divided: bool,
    has_training_step: bool,
) -> str:
    """Return the message of an out-of-memory error.

    Args:
        error: the text of an error of torch, whose figures are those at the moment of the failure.
        tensors: the training state on this rank, on any device.
        gathered_bytes: what this rank has of other ranks at most; what else is allocated are mostly activations.
        train: the ``train`` section of the configuration.
        is_divided: whether workers have stages or shards of the model already.
        has_training_step: whether the job makes its own updates, which leaves fewer keys to change.
    """
    full = "cpu" if _ASKED_OF_HOST.search(error) else "cuda"
    on_device = [tensor for tensor in tensors if tensor.device_type == full]
    state, largest = _state(on_device)
    parts = [_figures(error), *state, *_rest(error, sum(t.size_bytes for t in on_device), gathered_bytes), *largest]
    advice = _advice(error, train, is_divided=is_divided, has_training_step=has_training_step)
    return f"{'; '.join(parts)}. To need less memory: {', or '.join(advice)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch found too little memory, on a GPU or in the host."""
    return isinstance(error, torch.OutOfMemoryError) or _ASKED_OF_HOST.search(str(error)) is not None


def _figures(error: str) -> str:
    if (of_host := _ASKED_OF_HOST.search(error)) is not None:
        return f"CPU out of memory: tried to allocate {_text(int(of_host[1]))}"
    asked, capacity, allocated, unused = (
        None if (found := pattern.search(error)) is None else found[1]
        for pattern in (_ASKED, _CAPACITY, _ALLOCATED, _UNUSED)
    )
    if asked is None or allocated is None or unused is None:
        return error.strip().rstrip(".")
    reserved = _text(_bytes(allocated) + _bytes(unused))
    total = "" if capacity is None else f" of {capacity}"
    return f"CUDA out of memory: tried to allocate {asked}, with {allocated} allocated and {reserved} reserved{total}"


def _rest(error: str, state_bytes: float, gathered_bytes: float) -> list[str]:
    """Return what takes the memory beside the training state, as far as it is known."""
    allocated, unused, capacity, free, in_use = (
        None if (found := pattern.search(error)) is None else _bytes(found[1])
        for pattern in (_ALLOCATED, _UNUSED, _CAPACITY, _FREE, _IN_USE)
    )
    sizes = {"gathered blocks": gathered_bytes}
    if allocated is not None and state_bytes:
        sizes["gathered blocks"] = gathered = min(gathered_bytes, max(0.0, allocated - state_bytes))
        sizes["activations"] = allocated - state_bytes - gathered
    if in_use is None and capacity is not None and free is not None:
        in_use = capacity - free
    if allocated is not None and unused is not None and in_use is not None:
        sizes["communicators and others outside of torch's allocator"] = in_use - allocated - unused
    return [f"about {_text(round(size))} of {what}" for what, size in sizes.items() if size > 0]


def _state(tensors: Sequence[TensorSize]) -> tuple[list[str], list[str]]:
    """Return the size of the training state by kind, and its largest tensors; nothing if it is unknown."""
    totals = {plural: sum(t.size_bytes for t in tensors if t.kind == kind) for kind, plural in _KINDS}
    if not any(totals.values()):
        return [], []
    largest = sorted(tensors, key=lambda t: (-t.size_bytes, t.name))[:LARGEST]
    return (
        ["training state: " + ", ".join(f"{plural} {_text(size)}" for plural, size in totals.items() if size)],
        ["largest tensors: " + ", ".join(f"{t.name} ({t.kind}, {_text(t.size_bytes)})" for t in largest)],
    )


def _advice(error: str, train: TrainConfig, *, is_divided: bool, has_training_step: bool) -> list[str]:
    advice = []
    asked, unused = _ASKED.search(error), _UNUSED.search(error)
    if asked is not None and unused is not None and _bytes(unused[1]) > _bytes(asked[1]):
        advice.append("set PYTORCH_ALLOC_CONF=expandable_segments:True, because the free memory is in pieces")
    if not has_training_step:
        advice.append(f"raise train.grad_accumulation={train.grad_accumulation}")
    advice.append(f"lower train.global_batch_size={train.global_batch_size}")
    if train.activation_checkpointing == "none":
        advice.append("set train.activation_checkpointing=blocks")
    if train.precision in ("fp32", "tf32"):
        advice.append("set train.precision=bf16")
    if not is_divided and not has_training_step:
        advice.append("divide the model with strategy=fsdp or strategy=pipeline")
    return advice


def _bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * _UNITS[unit]


def _text(size_bytes: float) -> str:
    unit = next((unit for unit, size in reversed(_UNITS.items()) if size_bytes >= size), "bytes")
    return f"{size_bytes:g} bytes" if unit == "bytes" else f"{size_bytes / _UNITS[unit]:.2f} {unit}"
