"""``script``: runs a script of the user on each worker, as ``torchrun`` does. The worker is the agent of its rank.

The training is the script's own: :mod:`orchestrator.features.scripts.script_run` starts it and follows it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from orchestrator.config.schema import Config
from orchestrator.features.scripts.strategies import ScriptConfig
from orchestrator.job import Job
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.external.job import Script
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules


@register("script")
class ScriptRules(Rules[ScriptConfig]):
    """Layout rules alone: a rank is a process of the script, and no model is known."""

    runs_script = True

    @classmethod
    def is_synchronous(cls, options: ScriptConfig) -> bool:
        return False

    @classmethod
    def worker(cls, *, debug: bool) -> type[Any]:
        if debug:
            from orchestrator.features.scripts.debug_script import DebugScriptWorker  # whose base imports torch

            return DebugScriptWorker
        from orchestrator.features.scripts.script_actor import ScriptWorker

        return ScriptWorker

    @classmethod
    def trainer(cls, options: ScriptConfig, mesh: Mesh, job: Job) -> NoReturn:
        raise NotImplementedError("a script trains itself")

    @classmethod
    def check(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        if not isinstance(job, Script):
            errors.append(f"strategy=script: it runs job.script, not job={plan.job}; leave out job")
        return ()
