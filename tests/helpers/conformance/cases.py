"""What a test trains: configurations, and the plans and assignments made from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import yaml

from helpers.jobs.quick_jobs import digits
from orchestrator.config import schema
from orchestrator.config.files import conf_dir, group_values
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.protocol.messages import Assignment, WorkerEnvironment
from orchestrator.records.json_file import write_json
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.user_code.callbacks import Callback

T = TypeVar("T")


@cache
def _shipped(file: str) -> Mapping[str, Any]:
    return yaml.safe_load((conf_dir() / f"{file}.yaml").read_text())  # type: ignore[no-any-return]


def _made_of(cls: Callable[..., T], shipped: Mapping[str, Any], **changes: Any) -> T:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in shipped.items()}
    return cls(**{**values, **changes})


def section(name: str, cls: type[T], **changes: Any) -> T:
    """The default values of a section of the configuration, but for these ``changes``."""
    return _made_of(cls, _shipped("config").get(name) or _shipped(f"{name}/default"), **changes)


def options_of(strategy: str, **changes: Any) -> Any:
    """The default values of the keys of a strategy, but for these ``changes``; of one that is missing, the name."""
    if strategy not in registry.NAMES:
        return schema.StrategyConfig(name=strategy, num_workers="auto")
    cls = registry.config_class(strategy)
    return _made_of(getattr(cls, "make", cls), group_values("strategy", strategy), **changes)


TRAIN = section("train", schema.TrainConfig, steps=20, log_every=1, eval_every=0, precision="fp32", check="never")
SINGLE = options_of("single", num_workers=1)
DDP = options_of("ddp", bucket_mb=0.001)  # several buckets even in these models
CLUSTER = section(
    "cluster",
    schema.ClusterConfig,
    device="cpu",
    unfit_timeout_s=None,
    pending_timeout_s=5,
    start_timeout_s=20,
    rendezvous_timeout_s=20,
    collective_timeout_s=100,
    heartbeat_s=1,
    node_timeout_s=4,
    heartbeat_timeout_s=5,
    stop_grace_s=5,
)
CHECKPOINT = section("checkpoint", schema.CheckpointConfig, every=0)
RECOVERY = section(
    "recovery", schema.RecoveryConfig, max_failures=0, hang_factor=10, hang_min_s=10, hang_max_s=20, build_max_s=20
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and how it is trained.

    ``options`` are for more than one rank, ``alone`` for one (None: ``single``), and ``loaders`` are processes.
    """

    job: Job
    train: schema.TrainConfig = TRAIN
    options: schema.StrategyConfig = DDP
    alone: schema.StrategyConfig | None = None
    seed: int = 3
    checkpoint: schema.CheckpointConfig = CHECKPOINT
    evaluate: str | None = None
    callbacks: tuple[Callback, ...] = ()
    loaders: int = 0


def config_of(case: Case, world_size: int, **changes: Any) -> schema.Config:
    """The configuration of ``case`` for that many workers and servers."""
    num_workers = world_size - getattr(case.options, "num_shards", 0)
    options = (case.alone or SINGLE) if world_size == 1 else replace(case.options, num_workers=num_workers)
    config = schema.Config(
        name="test",
        **{
            name: _shipped("config")[name]
            for name in ("resume", "start_from", "output_dir", "plan", "debug", "profile")
        },
        callbacks=(),
        seed=case.seed,
        evaluate=case.evaluate,
        train=case.train,
        data=section("data", schema.DataConfig, num_workers=case.loaders),
        checkpoint=case.checkpoint,
        sweep=section("sweep", schema.SweepConfig),
        recovery=RECOVERY,
        tracking=section("tracking", schema.TrackingConfig, uri=None, system_metrics_every_s=0),
        display=section("display", schema.DisplayConfig),
        storage=section("storage", schema.StorageConfig),
        cluster=CLUSTER,
        strategy=options,
        job=schema.JobSpec(target="test.Test", fields={}),
    )
    return replace(config, **changes)


def plan_of(config: schema.Config) -> Plan:
    return make_plan(
        config,
        registry.load(config.strategy.name),
        (Node(node_id="here", name="here", cpus=8, gpus=0),),
        oversubscribe_cpus=True,
    )


def checked(
    case: Case, workers: int, *, config: Mapping[str, Any] = MappingProxyType({}), **planned: Any
) -> tuple[list[str], list[str]]:
    """The errors and the notes of the checks before a start; what the ``config`` and the plan have else."""
    configured, errors = config_of(case, workers, **config), list[str]()
    plan = replace(plan_of(configured), **planned)
    notes = registry.load(configured.strategy.name).check(configured, case.job, plan, errors)
    return errors, list(notes)


def assignment(
    *,
    rank: int,
    world_size: int,
    generation: int,
    store_port: int,
    run_dir: str,
    case: Case | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int = 0,
    rendezvous_timeout_s: float = 20,
    backend: Literal["gloo", "nccl"] = "gloo",
) -> Assignment:
    """Orders as the driver would give them, on this machine; in ``run_dir``, if there is one, they may save."""
    case = case or Case(job=digits(), seed=0)
    config = config_of(
        case,
        world_size,
        output_dir=run_dir,
        checkpoint=replace(case.checkpoint, every=checkpoint_every),
        cluster=replace(CLUSTER, rendezvous_timeout_s=rendezvous_timeout_s),
    )
    orders = Assignment(
        generation=generation,
        global_rank=rank,
        store_host="127.0.0.1",
        store_port=store_port,
        backend=backend,
        run_dir=run_dir,
        run_uid="test",
        environment=WorkerEnvironment(working_dir=run_dir, import_paths=(), config=config),
        plan=plan_of(config),
        checkpoint=checkpoint,
    )
    if run_dir:
        write_json(RunDir(Path(run_dir)).fence_file, {"generation": orders.fence})
    return orders


def having(train: schema.TrainConfig = TRAIN, **changes: Any) -> schema.TrainConfig:
    return replace(train, **changes)
