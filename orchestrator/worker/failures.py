"""An error of a worker, as the driver and the user are told of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.job import has_training_step
from orchestrator.protocol.messages import Assignment, Failure
from orchestrator.records.rank_log import log_tail
from orchestrator.state.left_out import FrozenError
from orchestrator.state.schedule import ScheduleError
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import DatasetError
from orchestrator.strategies.device_precision import PrecisionError
from orchestrator.strategies.measure.memory import TensorSize
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.exits import error_text
from orchestrator.worker.data.loader import LoaderError
from orchestrator.worker.loop import Loop
from orchestrator.worker.measure.metrics import NonFiniteError, NoUpdateError
from orchestrator.worker.process.shared_directory import NotSharedError
from orchestrator.worker.reports.evaluation import MetricError
from orchestrator.worker.reports.job_calls import ModelChangedError
from orchestrator.worker.reports.out_of_memory import explain_out_of_memory, is_out_of_memory

_CONNECTION_ERRORS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError, ConnectionError)
_CONNECTION_TEXTS = (
    *("Connection closed by peer", "Connection reset by peer", "Read error", "Timed out"),  # gloo
    # nccl2 of torch 2.15, of which the older backend would make a DistBackendError.
    *("NCCL Last Error: ", "NCCL operation timed out", "NCCL communicator was aborted after a previous error"),
    "Failed to initialize NCCL communicator",
)
"""What a ``RuntimeError`` says if the connection to another rank has broken."""

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
    is_explained = isinstance(error, EXPLAINED)
    collateral = _is_connection_error(error) or (after_abort and _may_follow_from_abort(error))
    return Failure(
        message=_encodable(_message(error, assignment, loop)),
        traceback="" if is_explained else _encodable("".join(traceback.format_exception(error))),
        time=time.time(),
        collateral=collateral,
        log_tail=log_tail(log),
        final=not collateral
        and (_will_come_again(error, loop) or isinstance(error, (*EXPLAINED, ModelChangedError, NonFiniteError))),
    )


def last_step(error: BaseException, failure: Failure, loop: Loop | None) -> int:
    """Return the last step before the error, which ``failure`` describes."""
    if isinstance(error, NonFiniteError) and not failure.collateral:
        return error.step - 1
    return loop.position.step if loop is not None else 0


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
    if loop is not None and _will_come_again(error, loop):
        return f"{text} (in a trial of the {loop.trial}, which would fail later)"
    return text


def _will_come_again(error: BaseException, loop: Loop | None) -> bool:
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
        traceback.print_exc()
        return ()


def _gathered_bytes(loop: Loop | None) -> float:
    """Return the most that this rank has of the shards of other ranks; 0 if it is unknown."""
    try:
        if loop is None or not loop.strategy.context.mesh.divides_tensors:
            return 0.0
        model = Outline(loop.job, loop.config.train).model
        return 0.0 if model is None else loop.strategy.gathered_bytes(loop.config, loop.strategy.context.mesh, model)
    except Exception:
        traceback.print_exc()
        return 0.0


def _is_connection_error(error: BaseException) -> bool:
    """Return whether the error looks like the loss of another rank, rather than a failure of this one."""
    looks = isinstance(error, _CONNECTION_ERRORS) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _CONNECTION_TEXTS)
    )
    return looks and not _is_device_error(error)


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
