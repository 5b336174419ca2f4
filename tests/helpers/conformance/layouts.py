"""Strategies that cut the model, by name, and what they have to have in common with one worker alone."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.conformance.cases import DDP, SINGLE, Case, config_of, options_of, plan_of
from helpers.conformance.reference import trained_plainly
from helpers.conformance.training import Steps, losses, train
from helpers.jobs.quick_jobs import digits
from helpers.ranks.gang import Gang
from helpers.ranks.job_trials import one_thread
from orchestrator.compat.pipelining import PASSES_CONSTANTS
from orchestrator.config import schema
from orchestrator.planning.mesh import DIMENSIONS, Coords, Mesh
from orchestrator.strategies import registry
from orchestrator.strategies.keys import MeshConfig

# AdamW divides by the square root of tiny second moments, which magnifies rounding.
SGD, ADAMW = 1e-5, 1e-4

MODEL_PARALLEL = options_of("model_parallel", num_workers=2)
PARAMETER_SERVER = options_of("parameter_server", num_workers=2, num_shards=2, consistency="sync")
SHARDED_DDP = replace(DDP, shard_optimizer=True)
FSDP = options_of("fsdp", num_workers=2)
HSDP = options_of("hsdp", num_workers=4, shard_size=2)


def pipeline(schedule: str, num_microbatches: int, split: Any = "auto") -> MeshConfig:
    return options_of("pipeline", num_workers=2, schedule=schedule, num_microbatches=num_microbatches, split=split)


def ddp_pipeline(schedule: str, num_microbatches: int, close: str = "stages", split: Any = "auto") -> MeshConfig:
    """Two replicas of two workers each."""
    return options_of(
        "ddp_pipeline",
        num_workers=4,
        pipeline_parallel_size=2,
        schedule=schedule,
        num_microbatches=num_microbatches,
        close=close,
        split=split,
    )


def fsdp_pipeline(schedule: str, num_microbatches: int, reshard: bool = False) -> MeshConfig:
    """Two stages of two workers each."""
    return options_of(
        "fsdp_pipeline",
        num_workers=4,
        pipeline_parallel_size=2,
        schedule=schedule,
        num_microbatches=num_microbatches,
        reshard_after_forward=reshard,
    )


def mesh(sizes: Mesh, schedule: str = "1F1B", **changes: Any) -> Layout:
    """The layout of ``strategy=mesh`` with these sizes."""
    keys = {
        **{dimension: getattr(sizes, dimension) for dimension in Coords._fields},
        "num_microbatches": 2 if sizes.pipeline > 1 else "auto",
        "schedule": schedule,
        "reshard_after_forward": schedule == "1F1B" or changes.get("shard_optimizer", False),
    }
    return layout(options_of("mesh", **{**keys, **changes}), sizes.num_workers)


@dataclass(frozen=True, kw_only=True)
class Layout:
    options: schema.StrategyConfig
    world_size: int

    def of(self, case: Case, **changes: Any) -> Case:
        options = replace(self.options, **changes)
        return replace(case, options=options, alone=options if self.world_size == 1 else None)


def layout(options: schema.StrategyConfig, world_size: int) -> Layout:
    return Layout(options=options, world_size=world_size)


FSDP_5 = layout(FSDP, 5)
"""Not in the matrix, in which three workers have uneven parts too."""

LAYOUTS = {
    "single": layout(SINGLE, 1),
    "ddp-2": layout(DDP, 2),
    "ddp-4": layout(DDP, 4),
    "sharded-ddp-2": layout(SHARDED_DDP, 2),
    "sharded-ddp-3": layout(SHARDED_DDP, 3),
    "parameter_server-2+2": layout(PARAMETER_SERVER, 4),
    "fsdp-2": layout(FSDP, 2),
    "fsdp-3": layout(FSDP, 3),
    "hsdp-2x2": layout(HSDP, 4),
    "fsdp-1F1B-2x2": layout(fsdp_pipeline("1F1B", 2, reshard=True), 4),
    "fsdp-ZBVZeroBubble-2x2": layout(fsdp_pipeline("ZBVZeroBubble", 2), 4),
    "mesh-hsdp-in-stages-2x2x2": mesh(Mesh(pipeline=2, replicate=2, shard=2)),
    "mesh-zero1-in-stages-2x2": mesh(Mesh(pipeline=2, shard=2), "ZBVZeroBubble", shard_optimizer=True),
    "mesh-replicated-zero1-2x2": mesh(Mesh(replicate=2, shard=2), shard_optimizer=True),
    "model_parallel-2": layout(MODEL_PARALLEL, 2),
    "GPipe-2": layout(pipeline("GPipe", 4), 2),
    "1F1B-2": layout(pipeline("1F1B", 4), 2),
    "1F1B-4": layout(pipeline("1F1B", 4), 4),
    "Interleaved1F1B-2": layout(pipeline("Interleaved1F1B", 4), 2),
    "LoopedBFS-2": layout(pipeline("LoopedBFS", 4), 2),
    "InterleavedZeroBubble-2": layout(pipeline("InterleavedZeroBubble", 4), 2),
    "ZBVZeroBubble-2": layout(pipeline("ZBVZeroBubble", 4), 2),
    "DualPipeV-2": layout(pipeline("DualPipeV", 4), 2),
    "GPipe-2x2": layout(ddp_pipeline("GPipe", 2), 4),
    "1F1B-2x2": layout(ddp_pipeline("1F1B", 2), 4),
    "1F1B-2x2-replicas-close": layout(ddp_pipeline("1F1B", 2, "replicas"), 4),
    "ZBVZeroBubble-2x2": layout(ddp_pipeline("ZBVZeroBubble", 2), 4),
    "InterleavedZeroBubble-2x2": layout(ddp_pipeline("InterleavedZeroBubble", 2), 4),
}
TENSOR = {
    "mesh-tensor-2": mesh(Mesh(tensor=2)),
    "mesh-replicated-tensor-2x2": mesh(Mesh(replicate=2, tensor=2)),
    "mesh-sharded-tensor-2x2": mesh(Mesh(shard=2, tensor=2)),
    "mesh-tensor-in-stages-2x2": mesh(Mesh(pipeline=2, tensor=2)),
    "mesh-zero1-tensor-2x2": mesh(Mesh(shard=2, tensor=2), shard_optimizer=True),
}
"""Those that need a model with blocks whose layers can be divided."""
SEQUENCE = {
    "mesh-sequence-2": mesh(Mesh(tensor=2), sequence=True),
    "mesh-replicated-sequence-2x2": mesh(Mesh(replicate=2, tensor=2), sequence=True),
    "mesh-sharded-sequence-2x2": mesh(Mesh(shard=2, tensor=2), sequence=True),
}
"""Those that divide also the tokens between these layers."""
CONTEXT = {
    "mesh-context-2": mesh(Mesh(context=2)),
    "mesh-replicated-context-2x2": mesh(Mesh(replicate=2, context=2)),
    "mesh-sharded-context-2x2": mesh(Mesh(shard=2, context=2)),
    "mesh-context-tensor-2x2": mesh(Mesh(context=2, tensor=2)),
    "context-in-stages-2x2": layout(replace(pipeline("1F1B", 2), context=2), 4),
    "mesh-context-in-stages-2x2": mesh(Mesh(pipeline=2, context=2)),
    "mesh-zero1-context-2": mesh(Mesh(context=2), shard_optimizer=True),
}
"""Those that need a model whose samples can be divided by tokens."""
DP = options_of("dp", num_workers=2)
HOGWILD = options_of("hogwild", num_workers=2)
LOCKED = options_of("locked_sgd", num_workers=2)
EVERY = {**LAYOUTS, "dp-2": layout(DP, 1), "hogwild-2": layout(HOGWILD, 2), "locked_sgd-2": layout(LOCKED, 2)}
"""Those in one process too, and those whose losses are not those of one worker."""
for _layouts in (LAYOUTS, EVERY):  # a feature may be missing
    for _name in [name for name, of in _layouts.items() if of.options.name not in registry.NAMES]:
        del _layouts[_name]


@cache
def kind_of(name: str) -> tuple[object, ...]:
    """What trains in a layout: the dimensions over which a model is divided, or the strategy of whole models."""
    of = EVERY[name]
    mesh = plan_of(config_of(of.of(Case(job=digits())), of.world_size)).mesh
    divided = [dimension for dimension in DIMENSIONS if dimension != "replicate" and mesh.size(dimension) > 1]
    return (*divided, getattr(of.options, "shard_optimizer", False)) if divided else (of.options.name,)


def in_turn(names: Iterable[str], turn: int = 0) -> set[str]:
    """A layout of each kind, and another one of the kind at the next turn.

    Of the kinds that divide a model, those of one dimension and those of several take turns too, if there are both, and
    one of them is left out in turn.
    """
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    lengths = sorted({len(kind) for kind in kinds if len(kind) > 1})  # with whether the optimizer is sharded
    now = lengths[(turn + 1) % len(lengths)] if lengths else 1
    divided = [kind for kind in kinds if len(kind) == now > 1]
    left_out = divided[(turn // len(lengths) + 1) % len(divided)] if len(divided) > 1 else None
    return {
        of_kind[turn % len(of_kind)] for kind, of_kind in kinds.items() if len(kind) in (1, now) and kind != left_out
    }


def taking_turns(names: Iterable[str], turn: int = 0, fast: Collection[str] = ()) -> list[Any]:
    """Layouts as parameters of a test, which CI runs in one of each kind and in the ``fast`` ones only."""
    names = list(names)
    kept = in_turn(names, turn)
    return [
        pytest.param(n, marks=pytest.mark.fast if n in fast else () if n in kept else pytest.mark.campaign)
        for n in names
    ]


def rows_in_turn(jobs: Mapping[str, Any], names: Sequence[Any], keys: Any = None, **train: Any) -> list[Any]:
    """Rows ``(job, layout, train, keys)`` of each job in each layout, of which CI runs what ``in_turn`` would."""
    kept = {(turn % len(jobs), turn % len(names)) for turn in range(max(len(jobs), len(names)))}
    rows = []
    for (i, (what, job)), (j, name) in itertools.product(enumerate(jobs.items()), enumerate(names)):
        (own,), (layout,) = (getattr(value, "values", (value,)) for value in (job, name))
        marks = [*getattr(job, "marks", ()), *getattr(name, "marks", ())]
        marks += [] if (i, j) in kept else [pytest.mark.campaign]
        rows.append(pytest.param(own, layout, train, keys or {}, id=f"{what}, {layout}", marks=marks))
    return rows


STAGED = [name for name, of in LAYOUTS.items() if isinstance(of.options, MeshConfig) and of.options.pipeline != 1]

passes_constants = pytest.mark.skipif(
    not PASSES_CONSTANTS, reason=f"stages of torch {torch.__version__} receive no tensors without a gradient"
)
"""For tests in which a stage receives a tensor without a gradient."""
refuses_constants = pytest.mark.skipif(
    PASSES_CONSTANTS, reason=f"stages of torch {torch.__version__} receive tensors without a gradient"
)


def whole_model(ranks: list[Steps]) -> dict[str, Tensor]:
    """The tensors of all ranks, of which those that several have are equal to the last bit."""
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        for name, tensor in rank.model.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"{name} differs between workers"
    return whole


@cache
def _alone(gang: Gang, case: Case, want_grad_norm: bool, plain: bool) -> Steps:
    if plain:
        with one_thread():
            return trained_plainly(case).steps
    (alone,) = gang.run(train, case, want_grad_norm, world_size=1)
    return alone


def assert_as_alone(
    gang: Gang,
    case: Case,
    *layouts: str | Layout,
    rtol: float = SGD,
    norm_rtol: float | None = None,
    want_grad_norm: bool = False,
    plain: bool = False,
    **changes: Any,
) -> dict[str | Layout, list[Steps]]:
    """Train in each layout and compare losses, norms and model with one worker.

    Args:
        gang: the processes.
        case: the job and how it is trained.
        layouts: the layouts, or their names.
        rtol: the tolerance of the losses.
        norm_rtol: the tolerance of the norms; None for 100 times that of the losses.
        want_grad_norm: whether the norm is formed although nothing is clipped.
        plain: whether the worker is a loop in plain torch, which costs less; it knows neither precisions nor dropout.
        changes: changes to the options of the layouts.

    Returns:
        What the ranks saw.
    """
    alone = _alone(gang, replace(case, options=DDP), want_grad_norm, plain)
    norm_rtol = 100 * rtol if norm_rtol is None else norm_rtol
    expected = losses([alone])
    assert expected[-1] < expected[0], "nothing was learned, so nothing is compared"
    seen = {}
    for name in layouts:
        of = LAYOUTS[name] if isinstance(name, str) else name
        ranks = gang.run(train, of.of(case, **changes), want_grad_norm, world_size=of.world_size)
        torch.testing.assert_close(losses(ranks), expected, rtol=rtol, atol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert sum(r.weights[0] for r in ranks) == alone.weights[0]
        whole = whole_model(ranks)
        assert whole.keys() == alone.model.keys()
        torch.testing.assert_close(whole, alone.model, rtol=100 * rtol, atol=10 * rtol)
        for rank in ranks:
            assert rank.skipped == alone.skipped
            assert [n is None for n in rank.norms] == [n is None for n in alone.norms]
            if None not in rank.norms:
                torch.testing.assert_close(rank.norms, alone.norms, rtol=norm_rtol, atol=0, equal_nan=True)
        seen[name] = ranks
    return seen
