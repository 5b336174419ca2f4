"""What a test trains: configurations, and the plans and assignments made from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from helpers.jobs.quick_jobs import digits
from orchestrator.config import schema
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.protocol.messages import Assignment, WorkerEnvironment
from orchestrator.records.json_file import write_json
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.strategies.presets.replicas import DDPConfig, SingleConfig
from orchestrator.user_code.callbacks import Callback

TRAIN = schema.TrainConfig(
    steps=20,
    global_batch_size=64,
    grad_accumulation=1,
    log_every=1,
    eval_every=0,
    eval_splits=("val",),
    stop_after=None,
    stop_min_delta=0,
    histograms_every=0,
    clip_norm=None,
    clip_value=None,
    precision="fp32",
    activation_checkpointing="none",
    compile=False,
    on_nonfinite="stop",
    ema_decay=None,
    init="seeded",
    deterministic=False,
)
SINGLE = SingleConfig(name="single", num_workers=1)
DDP = DDPConfig(
    name="ddp",
    num_workers="auto",
    bucket_mb=0.001,  # several buckets even in these models
    comm_hook="none",
    powersgd_rank=4,
    find_unused_parameters=False,
    static_graph=False,
    shard_optimizer=False,
    sync_batchnorm=False,
    tensor=1,
    tensor_pairs="auto",
    sequence=False,
)
CLUSTER = schema.ClusterConfig(
    address=None,
    device="cpu",
    cpus_per_worker=1,
    autoscaling=False,
    exclude_nodes=(),
    dashboard=False,
    env={},
    queue=True,
    priority=0,
    user_share=None,
    queue_timeout_s=None,
    unfit_timeout_s=None,
    pip=(),
    py_modules=(),
    pending_timeout_s=5,
    start_timeout_s=20,
    rendezvous_timeout_s=20,
    collective_timeout_s=100,
    heartbeat_s=1,
    node_timeout_s=4,
    heartbeat_timeout_s=5,
    stopped_timeout_s=5,
    stop_grace_s=5,
)
CHECKPOINT = schema.CheckpointConfig(every=0, keep=3, only_trained=False, best=None, best_direction=None)
RECOVERY = schema.RecoveryConfig(
    max_failures=0,
    spares=0,
    peer_copy_every=0,
    backoff_s=1,
    hang_factor=10,
    hang_min_s=10,
    hang_max_s=20,
    build_max_s=20,
    replace_stragglers=False,
    chaos=(),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and how it is trained; ``options`` are for more than one rank, ``alone`` for one (None: ``single``)."""

    job: Job
    train: schema.TrainConfig = TRAIN
    options: schema.StrategyConfig = DDP
    alone: schema.StrategyConfig | None = None
    seed: int = 3
    checkpoint: schema.CheckpointConfig = CHECKPOINT
    evaluate: str | None = None
    callbacks: tuple[Callback, ...] = ()


def config_of(case: Case, world_size: int, **changes: Any) -> schema.Config:
    """The configuration of ``case`` for that many workers and servers."""
    num_workers = world_size - getattr(case.options, "num_shards", 0)
    options = (case.alone or SINGLE) if world_size == 1 else replace(case.options, num_workers=num_workers)
    config = schema.Config(
        name="test",
        seed=case.seed,
        resume="never",
        evaluate=case.evaluate,
        start_from=None,
        output_dir="outputs",
        plan=False,
        profile=False,
        callbacks=(),
        train=case.train,
        data=schema.DataConfig(num_workers=0),
        checkpoint=case.checkpoint,
        sweep=schema.SweepConfig(
            unfit="refuse",
            parallel=1,
            trials=None,
            metric="val_loss",
            direction="minimize",
            pruner=None,
            min_steps=None,
            reduction_factor=3,
        ),
        recovery=RECOVERY,
        tracking=schema.TrackingConfig(
            uri=None,
            experiment="test",
            log_model=False,
            log_dataset=False,
            request_timeout_s=1,
            upload_every_s=0,
            flush_timeout_s=1,
            background_timeout_s=1,
            system_metrics_every_s=0,
            tensorboard=False,
            sinks=(),
        ),
        storage=schema.StorageConfig(staging_dir=None, upload_every_s=1, timeout_s=1, flush_timeout_s=1),
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
