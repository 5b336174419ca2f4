"""Submitting a launch or a verb to a Ray cluster as a job, and following it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from ray.job_submission import JobStatus, JobSubmissionClient

from orchestrator.compat.ray.code_packages import never_packaged, upload_file
from orchestrator.compat.ray.connection import use_token_of_user
from orchestrator.compat.ray.side_effects import ray_logs_errors_only
from orchestrator.config.build import ConfigError
from orchestrator.config.overrides import masked
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.code.shipped_code import module_paths
from orchestrator.driver.process.origin import NO_PY_MODULES, PY_MODULES, Origin
from orchestrator.driver.process.signals import STOP_WAIT_VARIABLE, needed_stop_wait_s
from orchestrator.driver.reporting import job_metadata, launch_name
from orchestrator.records.git import GitFacts, carried
from orchestrator.records.run_search import in_job_id

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
RECONNECT_TIMEOUT_S = 60.0
"""A job whose log cannot be read for so long is no longer followed."""
_RETRY_EVERY_S = 2.0
_STATUS_TIMEOUT_S = 20.0
"""The time between the end of a job's output and its final status."""
_POLL_S = 0.2
_NEW_S, _NEW_SIZE = 20.0, 1 << 15
"""For so many seconds and characters, the log of a new job is read whole at each poll."""
_TOKEN_MODE = "RAY_AUTH_MODE"
_STOPPED = 143
"""The exit code of a command that SIGTERM has stopped."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job for Ray.

    Attributes:
        working_dir: the directory that travels to the cluster; None if the job needs none.
        py_modules: the paths of modules that travel too.
        env: environment variables of the job.
        metadata: shown by ``ray job list`` and the dashboard.
    """

    id: str
    entrypoint: str
    working_dir: Path | None = None
    py_modules: Sequence[Path] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def make_submission(
    configs: Sequence[Config],
    words: Sequence[str],
    *,
    working_dir: Path,
    source: GitFacts | None,
    suffix: str,
    origin: Origin,
    redactor: Redactor,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Submission:
    """Return the job that launches ``words``.

    Args:
        configs: the configuration of each run that the words start; several form a sweep.
        words: the arguments of ``orchestrator launch``.
        source: the version of the code there, which becomes metadata.
        suffix: what makes the id unique, such as the time.
        origin: how commands begin where the user is, for those that the run suggests.
        redactor: masks secrets in the metadata.
        variables: environment variables that the job needs as well.
    """
    modules = module_paths(configs[0].cluster.py_modules)
    if modules:  # they are in the job's environment, which workers inherit
        words = [*(w for w in words if not w.startswith(PY_MODULES)), NO_PY_MODULES]
    grace_s = max(c.cluster.stop_grace_s for c in configs)
    return Submission(
        id=in_job_id(f"{launch_name(configs)}-{suffix}"),
        entrypoint=shlex.join(["python", "-m", "orchestrator.launch", *words]),
        working_dir=working_dir,
        py_modules=modules,
        env={
            STOP_WAIT_VARIABLE: str(needed_stop_wait_s(grace_s)),
            "PYTHONUNBUFFERED": "1",
            **{name: redactor.text(value) for name, value in origin.variables().items()},
            **carried(source),
            **variables,
        },
        metadata={
            **job_metadata(configs, redactor),
            "command": shlex.join(masked(w, redactor) for w in words),
            **({} if source is None else {f"git_{name}": str(value) for name, value in asdict(source).items()}),
        },
    )


class JobServer:
    """The job server of a cluster, which is Ray's dashboard, at an address such as ``http://host:8265``.

    Attributes:
        given_address: the address that the user has typed; None for ``RAY_API_SERVER_ADDRESS`` or the default.
        address: the address that is used.
        ray_command: how a user begins a command of Ray for this server, which presents a token only if told to.

    Raises:
        ConfigError: nothing answers there, or it wants another token.
    """

    def __init__(self, given_address: str | None = None):
        address = given_address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
        self.given_address, self.address = given_address, address
        if not address.startswith(("http://", "https://")):
            raise ConfigError([f"--address={address}: expected the dashboard's URL, such as {DEFAULT_ADDRESS}"])
        mode = os.environ.get(_TOKEN_MODE)
        use_token_of_user()
        used = os.environ.get(_TOKEN_MODE)
        self.ray_command = ("ray",) if used == mode else (f"{_TOKEN_MODE}={used}", "ray")
        try:
            self._client = JobSubmissionClient(address)
        except ConnectionError:
            raise ConfigError(
                [
                    f"--address={address}: no Ray dashboard answers there; start Ray with `ray start --head` "
                    "(dashboard on port 8265), or open `ssh -L 8265:127.0.0.1:8265 HEAD`"
                ]
            ) from None
        except Exception as e:  # requests and Ray raise errors of many types
            raise ConfigError([f"--address={address}: {_one_line(e)}{_token_hint(e)}"]) from e

    def command_to_follow(self, submission_id: str) -> str:
        """Return the command line that follows a job."""
        return shlex.join(["orchestrator", "submit", "--attach", submission_id, *self._address_option()])

    def command_to_stop(self, submission_id: str) -> str:
        """Return the command line that stops a job."""
        return shlex.join([*self.ray_command, "job", "stop", submission_id, *self._address_option()])

    def _address_option(self) -> list[str]:
        return [] if self.given_address is None else ["--address", self.given_address]

    def submit(self, submission: Submission) -> None:
        """Upload the working directory and start the job.

        Raises:
            ConfigError: Ray refuses it.
        """
        # Ray leaves these out of a working directory, but not of modules.
        runtime_env: dict[str, Any] = {"env_vars": dict(submission.env), "excludes": never_packaged()}
        if submission.working_dir is not None:
            runtime_env["working_dir"] = str(submission.working_dir)
        try:
            with ray_logs_errors_only():
                if submission.py_modules:
                    runtime_env["py_modules"] = [
                        upload_file(self._client, module) if module.suffix == ".py" else str(module)
                        for module in submission.py_modules
                    ]
                self._client.submit_job(
                    entrypoint=submission.entrypoint,
                    submission_id=submission.id,
                    runtime_env=runtime_env,
                    metadata=dict(submission.metadata),
                )
        except (RuntimeError, ValueError) as e:
            raise ConfigError([f"the cluster refused the job: {_one_line(e)}"]) from e

    def follow(self, submission_id: str, out: TextIO, *, is_new: bool = False) -> int:
        """Copy the output of a job to ``out`` until it ends.

        A lost connection is opened again, for up to ``RECONNECT_TIMEOUT_S``.

        Args:
            is_new: the job has just been submitted, so its log is short and may soon be complete.

        Returns:
            The exit code of the job's command; 143 if the job was stopped.

        Raises:
            ConfigError: there is no such job.
            ConnectionError: the server does not answer any more; the job may be running.
        """
        try:
            self._client.get_job_info(submission_id)
        except RuntimeError as e:
            raise ConfigError([f"{submission_id}: the cluster has no such job ({_one_line(e)})"]) from e
        written, deadline = 0, math.inf
        while True:
            try:
                output = self._output_of_new if is_new and not written else self._output
                for text in output(submission_id, skip=written):
                    out.write(text)
                    out.flush()
                    written += len(text)
                    deadline = math.inf
                if self._client.get_job_status(submission_id).is_terminal():
                    return self._exit_code(submission_id, out)
            except BrokenPipeError:  # nobody reads ``out``
                raise
            except Exception as e:  # aiohttp, requests and Ray raise errors of many types
                deadline = min(deadline, time.monotonic() + RECONNECT_TIMEOUT_S)
                if time.monotonic() > deadline:
                    raise ConnectionError(_one_line(e)) from e
            time.sleep(_RETRY_EVERY_S)

    def remove(self, submission_id: str) -> None:
        """Stop a job if it runs, and remove it from the list of jobs, unless the server does not answer."""
        deadline = time.monotonic() + _STATUS_TIMEOUT_S
        with contextlib.suppress(Exception):  # aiohttp, requests and Ray raise errors of many types
            self._client.stop_job(submission_id)
            while not self._client.get_job_status(submission_id).is_terminal() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._client.delete_job(submission_id)

    def _output_of_new(self, submission_id: str, *, skip: int) -> Iterator[str]:
        """Yield as :meth:`_output`, but early: Ray's tail shows new lines, and the end of a job, seconds late."""
        until = time.monotonic() + _NEW_S
        while skip < _NEW_SIZE and time.monotonic() < until:
            has_ended = self._client.get_job_status(submission_id).is_terminal()
            log = self._client.get_job_logs(submission_id)
            yield log[skip:]
            skip = len(log)
            if has_ended:
                return
            time.sleep(_POLL_S)
        yield from self._output(submission_id, skip=skip)

    def _output(self, submission_id: str, *, skip: int) -> Iterator[str]:
        """Yield what the job writes, without its first ``skip`` characters, until the job or the connection ends."""
        chunks: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()

        async def read() -> None:
            async for text in self._client.tail_job_logs(submission_id):
                chunks.put(text)

        def work() -> None:
            error = None
            try:
                asyncio.run(read())
            except Exception as e:  # aiohttp and Ray raise errors of many types
                error = e
            finally:  # whatever else ends this thread must not leave the other one waiting
                chunks.put(error)

        # In a thread, because asyncio and aiohttp may lose a Ctrl-C, which always ends the wait of this one.
        threading.Thread(target=work, daemon=True).start()
        with ray_logs_errors_only():
            while (text := chunks.get()) is not None:
                if isinstance(text, Exception):
                    raise text
                fresh = text[skip:]
                skip = max(0, skip - len(text))
                if fresh:
                    yield fresh

    def _exit_code(self, submission_id: str, out: TextIO) -> int:
        deadline = time.monotonic() + _STATUS_TIMEOUT_S
        job = self._client.get_job_info(submission_id)
        while job.status == JobStatus.FAILED and job.driver_exit_code is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            job = self._client.get_job_info(submission_id)
        if job.status == JobStatus.SUCCEEDED:
            return 0
        if job.status == JobStatus.STOPPED:
            return _STOPPED
        if job.driver_exit_code is None:  # the command did not run
            out.write(f"the job failed: {_one_line(job.message or job.error_type or 'Ray gives no reason')}\n")
            return 1
        return job.driver_exit_code


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:500]


def _token_hint(error: Exception) -> str:
    if not any(word in str(error).lower() for word in ("token", "unauthenticated", "401", "403")):
        return ""
    return "; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to the token of the cluster"
