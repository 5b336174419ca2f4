"""The check of a job for a plan, which builds its model without memory."""

from __future__ import annotations

from orchestrator.config.schema import Config
from orchestrator.driver.preflight.in_child import ChildDiedError, in_child
from orchestrator.job import Job
from orchestrator.planning.plan import Plan
from orchestrator.strategies.base import Strategy


def check_job(rules: type[Strategy], config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
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
