"""An error of a worker, as the driver and the user are told of it, and what to do when memory runs out."""

from __future__ import annotations

import bdb
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from orchestrator.compat.process_groups import is_broken_connection
from orchestrator.config.schema import TrainConfig
from orchestrator.job import has_training_step
from orchestrator.model.failed_call import failed_call
from orchestrator.protocol.messages import Assignment, Failure
from orchestrator.records.rank_log import log_tail
from orchestrator.state.model_state import FrozenError
from orchestrator.state.optimizers import ScheduleError
from orchestrator.strategies import registry
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import DatasetError
from orchestrator.strategies.measure.device import PrecisionError, TensorKind, TensorSize
from orchestrator.user_code.breakpoints import no_terminal
from orchestrator.user_code.errors import JobError, error_text
from orchestrator.user_code.own_errors import OwnError, own_error
from orchestrator.worker.anomalies import AnomalyError
from orchestrator.worker.data.data_loader import LoaderError
from orchestrator.worker.loop import Loop
from orchestrator.worker.measure.step_metrics import NonFiniteError, NoUpdateError
from orchestrator.worker.process.output import print_error
from orchestrator.worker.process.shared_directory import NotSharedError
from orchestrator.worker.reports.evaluation import MetricError, ModelChangedError

EXPLAINED = (
    DatasetError,
    FrozenError,
    JobError,
    MetricError,
    NoUpdateError,
    NotSharedError,
    PrecisionError,
    ScheduleError,
)
"""Errors whose text says what the user has to change; the place in the code would not help."""


_OF_THE_TRAINING = (AnomalyError, ModelChangedError, NonFiniteError)
"""Errors that equal steps lead to again."""


def describe_failure(
    error: BaseException, assignment: Assignment, loop: Loop | None, log: Path, *, after_abort: bool
) -> Failure:
    """Describe an error of this rank.

    Args:
        error: the error, while it is handled.
        assignment: the generation in which it was raised.
        loop: the training; None if the error came before there was any.
        log: the log of this rank.
        after_abort: whether the process groups had been aborted, which may be what caused the error.
    """
    if isinstance(error, bdb.BdbQuit):
        error = JobError(no_terminal(f"the debugger{_at(own_error(error))}"))
    is_explained = isinstance(error, EXPLAINED)
    collateral = _is_connection_error(error) or (after_abort and _may_follow_from_abort(error))
    own = None if is_explained or collateral else failed_call(error)
    comes_again = own is not None and own.comes_again and not is_out_of_memory(error) and not _is_device_error(error)
    return Failure(
        message=_encodable(_with_place(_message(error, assignment, loop), own)),
        traceback="" if is_explained else _encodable("".join(traceback.format_exception(error))),
        time=time.time(),
        collateral=collateral,
        log_tail=log_tail(log),
        final=not collateral
        and (comes_again or _is_of_trial(error, loop) or isinstance(error, (*EXPLAINED, *_OF_THE_TRAINING))),
        own_frames="" if own is None else _encodable(own.frames),
    )


def last_step(error: BaseException, failure: Failure, loop: Loop | None) -> int:
    """Return the last step before the error, which ``failure`` describes."""
    if isinstance(error, NonFiniteError) and not failure.collateral:
        return error.step - 1
    return loop.position.step if loop is not None else 0


def _with_place(message: str, own: OwnError | None) -> str:
    """Return the message with the place in the code, which is on its first line."""
    if own is None or not own.place:
        return message
    first, *rest = message.splitlines() or [""]
    return "\n".join([f"{first} ({own.place})", *rest])


def _at(own: OwnError | None) -> str:
    return "" if own is None else f" at {own.place.partition(': ')[0]}"


def _encodable(text: str) -> str:
    """Return ``text`` with escapes in place of what UTF-8 does not have, such as parts of the names of files."""
    return text.encode(errors="backslashreplace").decode()


def _message(error: BaseException, assignment: Assignment, loop: Loop | None) -> str:
    """Return what the user is told of an error, in one paragraph."""
    if is_out_of_memory(error):
        return explain_out_of_memory(
            str(error),
            tensors=_tensor_sizes(loop),
            gathered_bytes=_gathered_bytes(loop),
            train=assignment.config.train,
            is_divided=assignment.plan.mesh.is_divided,
            has_training_step=loop is not None and has_training_step(loop.job),
        )
    text = str(error) if isinstance(error, EXPLAINED) else error_text(error)
    if loop is not None and _is_of_trial(error, loop):
        return f"{text} (in a trial of the {loop.trial}, which would fail later)"
    return text


def _is_of_trial(error: BaseException, loop: Loop | None) -> bool:
    """Return whether the error was raised in a trial of what follows, by the job and not by the machine."""
    if loop is None or loop.trial is None:
        return False
    causes = [e for e in (error, error.__cause__) if e is not None]
    return not any(_is_device_error(e) or isinstance(e, LoaderError) or _is_of_disk(e) for e in causes)


def _is_of_disk(error: BaseException) -> bool:
    """Return whether a disk or a file server has failed. A missing file has another type, a damaged one no number."""
    return isinstance(error, OSError) and type(error) in (OSError, TimeoutError) and error.errno is not None


def _tensor_sizes(loop: Loop | None) -> Sequence[TensorSize]:
    """Return the sizes of the training state; nothing if the error came before all of it was built."""
    try:
        return () if loop is None else list(loop.strategy.tensor_sizes())
    except Exception:
        print_error()
        return ()


def _gathered_bytes(loop: Loop | None) -> float:
    """Return the most that this rank has of the shards of other ranks; 0 if it is unknown."""
    try:
        if loop is None or not loop.strategy.context.mesh.divides_tensors:
            return 0.0
        model, rules = Outline(loop.job, loop.config.train).model, registry.load(loop.config.strategy.name)
        return 0.0 if model is None else rules.gathered_bytes(loop.config, loop.strategy.context.mesh, model)
    except Exception:
        print_error()
        return 0.0


def _is_connection_error(error: BaseException) -> bool:
    """Return whether the error looks like the loss of another rank, rather than a failure of this one."""
    return is_broken_connection(error) and not _is_device_error(error)


def _may_follow_from_abort(error: BaseException) -> bool:
    """Return whether garbage from an aborted collective operation, or a missing group, may have caused the error.

    An error of the device outlives the process groups, and a model that the job has changed has lost its state.
    """
    unrelated = (*EXPLAINED, ModelChangedError)
    return isinstance(error, Exception) and not isinstance(error, unrelated) and not _is_device_error(error)


def _is_device_error(error: BaseException) -> bool:
    """Return whether the GPU of this process has failed, also if a call of NCCL was the first to find out."""
    text = str(error)
    return (
        isinstance(error, torch.AcceleratorError)
        or "unhandled cuda error" in text
        or ("NCCL operation failed" in text and _device_has_failed())
    )


def _device_has_failed() -> bool:
    """Ask the device, which repeats its error in every call: nccl2 says the same of a lost rank."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().query()
    except torch.AcceleratorError:
        return True
    return False


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
