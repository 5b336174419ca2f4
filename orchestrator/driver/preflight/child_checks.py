"""Checks of the job's model in a child process: of a plan, and whether it can go on from a checkpoint.

What code of the job does to fake tensors can end its process. What the driver cannot know, such as data on a node, the
workers check.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchestrator.compat import deferred_dynamo
from orchestrator.config.schema import Config
from orchestrator.job import Job, has_training_step
from orchestrator.planning.plan import Plan
from orchestrator.records.process_identity import end_with_parent
from orchestrator.state.checkpoint import load, step_of
from orchestrator.state.model_state import LEFT_OUT, further_entries, mismatches, own_tensors
from orchestrator.state.optimizer_state import optimizers_in
from orchestrator.state.optimizers import AnyOptimizer, label_of
from orchestrator.state.schedule import ScheduleError, made_for
from orchestrator.state.train_state import TrainState, outline, restore
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import opened_dataset, size_error
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.training_step import joined, optimizers_of
from orchestrator.strategies.update.job_optimizer import optimizer_of, schedule_of
from orchestrator.user_code.errors import exits_refused

T = TypeVar("T")


class ChildDiedError(Exception):
    """The child has no result; the text is a clause that says why."""


def in_child(function: Callable[[], T], *, timeout_s: float) -> T:
    """Return what ``function`` returns in a fork of this process.

    A fork has all that this process has loaded, so it costs milliseconds and needs no pickle of the job. It uses one
    thread: the other threads of this process do not exist in it.

    Args:
        function: returns plain data, and does not use Ray.
        timeout_s: the maximum wait for the result, ``recovery.build_max_s``.

    Raises:
        ChildDiedError: the child was killed, crashed, or did not return in time.
        Exception: whatever ``function`` raises, with its traceback as a note.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(function, sender))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of the threads of this process
        child.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise ChildDiedError(f"took longer than recovery.build_max_s={timeout_s:g}")
        result, error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ChildDiedError(how) from None
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
    if error is not None:
        raise error
    value: T = result
    return value


def _serve(function: Callable[[], object], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    deferred_dynamo.install()
    try:
        with exits_refused():
            message = pickle.dumps((function(), None))
    except BaseException as e:
        e.add_note(f"in a child process: {traceback.format_exc()}")
        message = pickle.dumps((None, _with_its_text(e)))
    sender.send_bytes(message)


def _with_its_text(error: BaseException) -> BaseException:
    """Return the error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def check_job(rules: type[Rules[Any]], config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check in a child process whether ``job`` can be trained by ``plan``; arguments and result as ``rules.check``.

    If the child dies, this is an error where the workers would build the model in the same way, and else a note.
    """

    def check() -> tuple[tuple[str, ...], list[str]]:
        found: list[str] = []
        return rules.check(config, job, plan, found), found

    try:
        notes, found = in_child(check, timeout_s=config.recovery.build_max_s)
    except ChildDiedError as e:
        what = f"a process that built the job's model without memory, to check it, {e}"
        if plan.pipeline is None:
            return (f"{what}: nothing is known about the model",)
        errors.append(
            f"strategy={config.strategy.name}: {what}; the workers would build it in the same way to cut it into "
            "stages: use strategy=ddp, or find the cause in the code of the model"
        )
        return ()
    errors += found
    return notes


def continuation_errors(
    config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any], *, is_own: bool
) -> list[str]:
    """Return why ``job`` cannot go on from a checkpoint, without allocating its model.

    The checks run in child processes, because the model is built of fake tensors and the data may be large.

    Args:
        config: of the run that would go on.
        job: the job.
        checkpoint: its directory.
        meta: its metadata.
        is_own: whether the run would read the data of before to their end.
    """

    checks: list[Callable[[], list[str]]] = [lambda: _model_errors(config, job, checkpoint, meta)]
    if is_own:
        checks.append(lambda: _data_errors(config, job, checkpoint, meta))
    found: list[str] = []
    for check in checks:
        with contextlib.suppress(ChildDiedError):
            found += in_child(check, timeout_s=config.recovery.build_max_s)
    return found


def _data_errors(config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any]) -> list[str]:
    """Return whether the training set has another size; empty if it cannot be opened here."""
    try:
        dataset = opened_dataset(job, "train", config.seed)
    except Exception:  # the data may be on the workers alone
        return []
    error = size_error(dataset, meta, step=step_of(checkpoint.name), checkpoint=checkpoint)
    return [] if error is None else [error]


def _model_errors(config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any]) -> list[str]:
    """Return how model, optimizer and schedule differ; empty if the model cannot be built without memory."""
    model = Outline(job, config.train).model
    if model is None:
        return []
    state = load(checkpoint)
    own = {name: t for name, t in own_tensors(model).items() if name not in meta.get(LEFT_OUT, {})}
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    further = further_entries(model)
    saved = {name: t for name, t in outline(state.model).items() if name not in further}
    errors = [f"of another model: {line}" for line in mismatches(shapes, saved)]
    made = joined(optimizers_of(job, model)) if has_training_step(job) else optimizer_of(job, model)
    optimizer = label_of(made)
    if optimizer != meta["optimizer"]:
        errors.append(f"of another optimizer: {meta['optimizer']}, the job has {optimizer}")
    if not errors and config.evaluate is None and (error := _schedule_error(config, job, model, made, state)):
        errors.append(error)
    return errors


def _schedule_error(
    config: Config, job: Job, model: nn.Module, optimizer: AnyOptimizer, state: TrainState
) -> str | None:
    """Return why the schedule of a checkpoint cannot go on for ``train.steps``; None if it can, or if unknown.

    The settings of the optimizer are loaded without tensors, so a setting that is a tensor lacks its value.
    """
    if state.meta["scheduler"] is None or _has_tensors(optimizer.param_groups):
        return None
    before = made_for(state.meta["scheduler"]["state"])
    try:
        schedule = schedule_of(
            job,
            optimizers_in(optimizer),
            steps=config.train.steps,
            steps_per_epoch=before.get("steps_per_epoch"),
        )
        shapes = {name: tensor.to("meta") for name, tensor in outline(state.model).items()}
        restore(replace(state, model=shapes, optimizer={}), model, optimizer, schedule)
    except ScheduleError as e:
        return str(e)
    except Exception:  # of the job, or because of the missing values
        pass
    return None


def _has_tensors(groups: Sequence[Mapping[str, Any]]) -> bool:
    return any(isinstance(value, Tensor) for group in groups for value in group.values())
