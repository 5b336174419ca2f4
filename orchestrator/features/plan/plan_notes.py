"""What `plan=true` of a launch says of the speed of its layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from orchestrator.config.schema import Config
from orchestrator.driver.preflight.child_checks import with_samples
from orchestrator.features.plan.forecasts import scaled_note
from orchestrator.features.plan.layouts import usual_stack
from orchestrator.features.plan.prediction.calibration import has_published_runs
from orchestrator.features.plan.prediction.devices import name_of_gpu, parse_cluster, read_tables
from orchestrator.features.plan.prediction.forecast import DEVICE_HOURS, Question
from orchestrator.features.plan.shown import speed_text
from orchestrator.features.plan.traced_job import TracedJob
from orchestrator.job import Job, has_training_step
from orchestrator.planning.memory import GIB
from orchestrator.planning.plan import Node, Plan
from orchestrator.strategies import registry


def notes(config: Config, job: Job, plan: Plan, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield what is predicted of a plan."""
    if note := speed_note(config, job, plan, nodes):
        yield note


def speed_note(config: Config, job: Job, plan: Plan, nodes: Sequence[Node]) -> str | None:
    """Return what is predicted of a plan, for users.

    The model is traced in a child process, which what it does to fake tensors may end.

    Returns:
        None unless the plan is for GPUs of one kind that the tables know, and trains a model by ``Job.loss``.
    """
    if plan.device == "cpu" or has_training_step(job) or registry.load(config.strategy.name).runs_script:
        return None
    tables = read_tables()
    with_gpus = [node for node in nodes if node.gpus]
    names = {name_of_gpu(node.gpu_name, node.gpu_memory_bytes / GIB, tables) for node in with_gpus}
    name = names.pop() if len(names) == 1 else None
    if plan.devices_per_worker > 1 or name is None:
        return None
    each = min(node.gpus for node in with_gpus)
    shape = (math.ceil(plan.world_size / each), min(plan.world_size, each))

    def predicted() -> str | None:
        cluster = parse_cluster("x".join(map(str, (*shape, name))), tables)
        traced = TracedJob(config, job, on_gpus=True)
        stack, case = usual_stack(cluster, config, traced.work)
        asked = Question(work=traced.work, cluster=cluster, stack=stack, device_hours=DEVICE_HOURS)
        forecast = asked.answered(traced.forecast(config, plan))
        note = "" if has_published_runs(name) else f"; {scaled_note(cluster)}"
        return None if forecast.time is None else speed_text(asked, forecast, case) + note

    try:
        return with_samples(config, job, predicted)
    except Exception as e:  # the plan does not depend on it
        return f"its speed cannot be predicted: {e}"
