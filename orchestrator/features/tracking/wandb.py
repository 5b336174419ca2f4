"""Weights & Biases as a sink: ``tracking.sinks=[wandb]``."""

from __future__ import annotations

import contextlib
import html
import netrc
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from orchestrator.features.tracking.views import run_name
from orchestrator.protocol.metrics import summary_value
from orchestrator.records.journal import OF_NO_ATTEMPT, Point, Sample

if TYPE_CHECKING:
    from wandb import Settings

_EXIT_CODES = {"FINISHED": 0, "PRUNED": 0, "KILLED": 255}
"""What W&B has for a run that Ctrl-C has ended is 255."""


class Wandb:
    """The :class:`~orchestrator.features.tracking.sinks.TrackingSink` that writes a run of W&B, whose step is ours.

    The variables of W&B decide what they name, such as ``WANDB_MODE``, ``WANDB_PROJECT`` and ``WANDB_ENTITY``. The id
    is that of the run, so that a run that is resumed continues. W&B can take nothing back: of steps that it has, it
    keeps what came first.
    """

    def __init__(self, run: Mapping[str, Any], folder: Path) -> None:
        import wandb

        sweep = run.get("sweep") or {}
        tags = [f"strategy:{run['strategy']}", f"job:{run['job']}", *filter(None, _variable("WANDB_TAGS").split(","))]
        self._run = wandb.init(
            dir=folder,
            id=run["uid"],
            resume="allow",
            project=_variable("WANDB_PROJECT") or run["tracking"]["experiment"],
            name=_variable("WANDB_NAME") or run_name(run),
            group=_variable("WANDB_RUN_GROUP") or sweep.get("name"),
            job_type=_variable("WANDB_JOB_TYPE") or ("evaluate" if "evaluated" in run else "train"),
            tags=[tag[:64] for tag in tags],
            config={**nested(run["params"]), "run": _facts(run)},
            allow_val_change=True,
            reinit="finish_previous",
            settings=_settings(wandb.Settings),
        )
        self._has_before = int(self._run.starting_step)
        self._step = self._has_before
        self._has_begun = self._has_before == 0

    def log_points(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.name.startswith(OF_NO_ATTEMPT):  # whose own steps count readings
                if self._has_begun:
                    self._log({point.name: point.value}, self._step)
            else:
                self._log({point.name: point.value}, point.step)

    def log_sample(self, sample: Sample) -> None:
        """An image or a text; the numbers of histograms (``.json``) stay in the run directory."""
        import wandb

        caption = f"step {sample.step}"
        if sample.path.suffix == ".png":
            self._log({f"samples/{sample.name}": wandb.Image(str(sample.path), caption=caption)}, sample.step)
        elif sample.path.suffix == ".txt":
            text = html.escape(sample.path.read_text(errors="replace"))
            self._log({f"samples/{sample.name}": wandb.Html(f"<p>{caption}</p><pre>{text}</pre>")}, sample.step)

    def discard(self) -> None:
        """Let another sink of this process take the place of this one."""
        with contextlib.suppress(Exception):  # of any type: what it has is written again
            self._run.finish(exit_code=1)

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        results = {f"summary/{key}": value for key in summary if (value := summary_value(summary, key)) is not None}
        self._run.summary.update({**results, "status": status})
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        """Log at ``step``, or at the last one if that was passed. W&B would drop what it gets for a lower step."""
        if step < self._has_before:
            return
        self._step, self._has_begun = max(self._step, step), True
        self._run.log(dict(values), step=self._step)


def nested(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by dotted key as W&B has them: sections in sections."""
    tree: dict[str, Any] = {}
    for key, value in params.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):  # a key of a job's own dict, with a dot
                place, name = tree, key
                break
            place = inner
        if isinstance(place.get(name), dict):
            place, name = tree, key
        place[name] = value
    return tree


def why_unusable() -> str | None:
    """Return why W&B would refuse a run for lack of a login, and what to do; None if it may accept it."""
    is_offline = _variable("WANDB_MODE") in ("offline", "disabled", "dryrun")
    files = (Path("wandb/settings"), Path("~/.config/wandb/settings").expanduser())  # `wandb offline` writes to one
    logins = (_variable("WANDB_API_KEY"), _variable("WANDB_IDENTITY_TOKEN_FILE"), _in_netrc())
    if is_offline or any(logins) or any(file.exists() for file in files):
        return None
    return "W&B has no login; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"


def sync_command(sinks: Path) -> str | None:
    """Return the command that uploads what W&B has written offline for a run; None if it has written nothing so.

    ``sinks``: the directory of the run for the files of its sinks.
    """
    offline = sorted(sinks.glob("wandb/wandb/offline-run-*"))
    return shlex.join(["wandb", "sync", *map(str, offline)]) if offline else None


def _in_netrc() -> bool:
    host = urlsplit(_variable("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(_variable("NETRC") or None).authenticators(host) is not None
    return False


def _variable(name: str) -> str:
    return os.environ.get(name, "")


def _facts(run: Mapping[str, Any]) -> dict[str, Any]:
    source = run.get("source") or {}
    commit = {"commit": source["source.git.commit"]} if "source.git.commit" in source else {}
    return {"directory": run.get("location"), "command": run.get("command"), **(run.get("tags") or {}), **commit}


def _settings(settings: type[Settings]) -> Settings:
    """What W&B itself would say is true of the process that uploads, not of the run."""
    return settings(
        console="off", save_code=False, disable_git=True, disable_job_creation=True, silent=True,
        x_disable_meta=True, x_disable_stats=True,
    )  # fmt: skip
