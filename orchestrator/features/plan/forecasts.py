"""What `orchestrator plan` answers: the layouts of a job on a cluster that is not here, timed and compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_job
from orchestrator.config.overrides import values
from orchestrator.config.recorded_config import overrides_to_evaluate, to_dict
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.config.text import to_cli
from orchestrator.features.plan.layouts import Layouts, best_of_each, usual_stack
from orchestrator.features.plan.prediction.calibration import fitted, has_published_runs
from orchestrator.features.plan.prediction.cost import Stack, StepTime, step_time
from orchestrator.features.plan.prediction.devices import CPU, Cluster
from orchestrator.features.plan.prediction.forecast import DEVICE_HOURS, Answer, Forecast, Question
from orchestrator.features.plan.traced_job import TracedJob
from orchestrator.job import Job
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry

USUAL = {"strategy": "mesh", "train.precision": "bf16"}
"""What is planned for GPUs where the command line does not say it."""
USUAL_TOKENS = 2**22
"""The tokens of a step where the command line does not say its samples: as many as Llama 3 (arXiv:2407.21783) begins
with."""


def answer(
    words: Sequence[str],
    cluster: Cluster,
    redactor: Redactor,
    *,
    tokens: float | None = None,
    price: float | None = None,
    device_hours: float | None = None,
    measured: RunDir | None = None,
) -> Answer:
    """Return the layouts of a job on a cluster.

    Args:
        words: the overrides of a launch.
        redactor: learns the secrets of the job.
        tokens: of the whole run; None if no whole run is asked for.
        price: of an hour of a device; None if it is unknown.
        device_hours: the mean hours between the failures of one device; None for the published ones.
        measured: a run on such devices that says which shares of the peak rates are reached; None for published ones.

    Raises:
        ConfigError: the configuration or the job is wrong, the model cannot be traced, or see :func:`measured_stack`.
    """
    given = values(words)
    on_cpus = cluster.name == CPU
    of_cpus = {"train.precision": "fp32", "strategy.num_workers": cluster.devices} if on_cpus else {}
    assumed = tuple(f"{key}={value}" for key, value in {**USUAL, **of_cpus}.items() if key not in given)
    config, job = _composed([*words, *assumed], redactor)
    if isinstance(config.strategy.num_workers, tuple):
        reason = f"strategy.num_workers={to_cli(config.strategy.num_workers)}: each size of an elastic run has a layout"
        raise ConfigError([f"{reason} of its own; plan one of them"])
    traced = TracedJob(config, job, on_gpus=not on_cpus)
    stack, case = usual_stack(cluster, config, traced.work)
    if measured:
        stack, is_sparse = measured_stack(measured, cluster, config, redactor)
        case = "calibrated" if is_sparse == (traced.work.layer.experts > 0) else case
    question = Question(
        work=traced.work,
        cluster=cluster,
        stack=stack,
        tokens=tokens,
        price=price,
        device_hours=DEVICE_HOURS if device_hours is None else device_hours,
    )
    forecasts: list[Forecast] = []
    pruned: Mapping[str, int] = {}
    chosen: tuple[str, ...] = ()
    for workers in _numbers_of_workers(config, cluster):
        set_keys: dict[str, int] = {} if workers == _workers(config, cluster) else {"strategy.num_workers": workers}
        if "train.global_batch_size" not in given:
            set_keys["train.global_batch_size"] = usual_batch(config, job, workers)
        search = Layouts.elsewhere(_changed(config, set_keys), traced, cluster, given.keys())
        found = best_of_each([question.answered(f) for f in search.forecasts()])
        if not forecasts or any(not f.refused for f in found):
            forecasts, pruned = found, search.pruned
            chosen = tuple(f"{key}={value}" for key, value in set_keys.items())
        if any(not f.refused for f in found):
            break
    assumed = (*assumed, *chosen)
    return Answer(
        question=question,
        command=(*words, *assumed),
        assumed=assumed,
        fitting=tuple(f for f in forecasts if not f.refused),
        refused=tuple(f for f in forecasts if f.refused),
        pruned=pruned,
        case=case,
        measured=measured.location if measured else "",
        notes=(*traced.notes, *([] if on_cpus or has_published_runs(cluster.name) else [scaled_note(cluster)])),
    )


def usual_batch(config: Config, job: Job, workers: int) -> int:
    """Return the samples of a step that are planned where the command line does not say it."""
    samples = USUAL_TOKENS / job.tokens_per_sample if job.tokens_per_sample else config.train.global_batch_size
    return workers * _divisible(samples / workers)


def _workers(config: Config, cluster: Cluster) -> int:
    workers = config.strategy.num_workers
    return workers if isinstance(workers, int) else cluster.devices


def _numbers_of_workers(config: Config, cluster: Cluster) -> list[int]:
    """Return all workers, and what to try if these fit no layout: fewer of them, which several sizes divide."""
    every = _workers(config, cluster)
    if config.strategy.name != "mesh" or config.strategy.num_workers != "auto":
        return [every]
    fewer = {every // size * size for size in (2, 4, 8)} | {2 ** (every.bit_length() - 1)}
    return [every, *sorted(fewer - {0, every}, reverse=True)]


def _changed(config: Config, keys: Mapping[str, int]) -> Config:
    workers, batch = keys.get("strategy.num_workers"), keys.get("train.global_batch_size")
    strategy = config.strategy if workers is None else replace(config.strategy, num_workers=workers)
    train = config.train if batch is None else replace(config.train, global_batch_size=batch)
    return replace(config, strategy=strategy, train=train)


def _divisible(samples: float) -> int:
    """Return the number nearest to ``samples`` that passes and stages can divide: a power of two, or three of them."""
    power: int = 2 ** max(0, math.floor(math.log2(max(1.0, samples))))
    return min((power, 3 * power // 2 if power > 1 else 1, 2 * power), key=lambda size: abs(size - samples))


def scaled_note(cluster: Cluster) -> str:
    """Return from what the rates of devices are known on which no run was published."""
    return f"no published run is on {cluster.name}: its rates are scaled from other devices by its data sheet"


def measured_stack(run_dir: RunDir, cluster: Cluster, planned: Config, redactor: Redactor) -> tuple[Stack, bool]:
    """Return the shares with which the step of a run is predicted as it was measured, and whether it has experts.

    One step time tells one number: the share that takes more of the step changes more.

    Args:
        run_dir: a run that has ended.
        cluster: of such devices as the run had.
        planned: the configuration whose layouts are asked for.
        redactor: learns the secrets of the run's job.

    Raises:
        ConfigError: the run has no step time, differs in device or precision, or was faster than the peak rates allow;
            or its configuration cannot be read any more.
    """
    record, where = run_dir.read_record(), f"--measured {run_dir.location}"
    plan, step_ms = record.get("plan"), record.get("summary", {}).get("step_ms_p50")
    if not plan or not step_ms:
        raise ConfigError([f"{where}: has no median of step times; name a run of several steps that has ended"])
    if (plan["device"] == "cpu") != (cluster.name == CPU):
        raise ConfigError(
            [f"{where}: ran on {plan['device']}, and --cluster names {cluster.name}; name the same device"]
        )
    if (precision := record.get("precision")) != planned.train.precision:
        raise ConfigError([f"{where}: computed in {precision}; plan with train.precision={precision}"])
    workers = plan["world_size"]
    try:
        words = overrides_to_evaluate(run_dir.config_file, [f"strategy.num_workers={workers}"])
    except ValueError as e:
        raise ConfigError([f"{where}: {e}"]) from e
    config, job = _composed(words, redactor)
    there = replace(cluster, nodes=math.ceil(workers / cluster.per_node), per_node=min(workers, cluster.per_node))
    traced = TracedJob(config, job, on_gpus=cluster.name != CPU)
    forecast = Layouts.elsewhere(config, traced, there, ()).as_configured()
    if forecast.refused:
        raise ConfigError([f"{where}: {forecast.refused}"])
    usual, _ = usual_stack(cluster, config, traced.work)

    def predicted(stack: Stack) -> StepTime:
        return step_time(traced.work, forecast.step, there, stack)

    found = fitted(predicted, step_ms / 1e3, usual)
    if (least := 1e3 * predicted(found).total) > 1.01 * step_ms:
        reason = f"its steps took {step_ms:.3g} ms, and at the peak rate of {cluster.name} they take {least:.3g} ms"
        raise ConfigError([f"{where}: {reason}"])
    return found, traced.work.layer.experts > 0


def _composed(words: Sequence[str], redactor: Redactor) -> tuple[Config, Job]:
    errors: list[str] = []
    config, spec = compose(words, errors, registry.config_class)
    job = load_job(spec, errors, redactor) if spec is not None else None
    if errors or config is None or job is None:
        raise ConfigError(errors)
    redactor.learn(to_dict(config))
    return config, job
