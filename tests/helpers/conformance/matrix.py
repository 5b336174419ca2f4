"""The conformance matrix: each strategy in each scenario has the losses, norms, weights and averages of plain torch.

A new strategy joins by one entry in ``LAYOUTS`` (``layouts.py``): it is in every scenario, which CI runs in some
layouts in turn (:func:`cells`), and in the tests of checkpoints (``test_any_checkpoint.py``), unless it is a variant
of another one (:data:`VARIANTS`). A new rule joins by one entry in :data:`SCENARIOS`. What does not hold stands in
:data:`EXCEPTIONS`, with the reason.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import ADAMW, EVERY, LAYOUTS, SGD, STAGED, in_turn, kind_of, passes_constants
from helpers.conformance.reference import Seen
from helpers.conformance.training import Steps
from helpers.jobs.block_jobs import BlockDigits
from helpers.jobs.matrix_optimizers import OfColumns, OfMarked, OfTall, Orthogonal, Preconditioned
from helpers.jobs.quick_jobs import MeasuredDigits, SteppedDigits, TinyGPT, digits
from helpers.jobs.toys import Tokens, Toy
from helpers.jobs.uneven_jobs import Uneven
from helpers.ranks.streams import StreamToy, Weighed
from orchestrator.job import Job
from orchestrator.worker.data.batches import SampleOrder

SYNCHRONOUS = {**LAYOUTS, "dp-2": EVERY["dp-2"]}


def nothing_more(ranks: list[Steps], reference: Seen) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A rule, as a job and how it is trained.

    Args:
        rtol: the tolerance of the losses.
        atol: the tolerance of the weights; AdamW makes whole updates from gradients that are nothing but rounding.
        constants: whether a stage receives a tensor without a gradient, which not every torch allows.
        layouts: the layouts that the rule is about; empty for all.
        in_ci: the layout that CI runs, if those whose turn it is take long.
        want_grad_norm: whether the norm is formed although nothing is clipped.
        happened: whether the two replicas of ``ddp-2`` saw what the rule is about.
    """

    job: Job
    train: dict[str, Any]
    rtol: float = SGD
    atol: float = 0.0
    constants: bool = False
    layouts: tuple[str, ...] = ()
    in_ci: str | None = None
    want_grad_norm: bool = True
    happened: Callable[[list[Steps], Seen], bool] = nothing_more

    @property
    def case(self) -> Case:
        return Case(
            job=self.job, train=having(**{"steps": 6, "global_batch_size": 32, "check": "always", **self.train})
        )


def clipped(ranks: list[Steps], reference: Seen) -> bool:
    return any(norm > 0.2 for norm in reference.steps.norms if norm is not None)


def averaged(ranks: list[Steps], reference: Seen) -> bool:
    return not torch.allclose(reference.averages["head.weight"], reference.steps.model["head.weight"])


def uneven(ranks: list[Steps], reference: Seen) -> bool:
    return len({rank.weights[0] for rank in ranks}) == 2


def one_has_none(ranks: list[Steps], reference: Seen) -> bool:
    weights = [weight for rank in ranks for weight in rank.weights]
    return 0 in weights and any(weights)


BAD_STEP = 3


def skipped(ranks: list[Steps], reference: Seen) -> bool:
    return [step for step, skipped in enumerate(reference.steps.skipped, 1) if skipped] == [BAD_STEP]


def each_step_measured(ranks: list[Steps], reference: Seen) -> bool:
    measured = [metrics["large/logit"] for metrics in reference.steps.metrics]
    return len(set(measured)) == len(measured)


def rounded(ranks: list[Steps], reference: Seen) -> bool:
    return not torch.allclose(torch.tensor(ranks[0].norms), torch.tensor(reference.steps.norms), rtol=1e-5, atol=0)


WHOLE_TENSORS = {
    Orthogonal: ("sharded-ddp-3", "hsdp-2x2", "mesh-hsdp-in-stages-2x2x2"),
    Preconditioned: ("fsdp-2", "fsdp-ZBVZeroBubble-2x2", "mesh-zero1-in-stages-2x2"),
    OfColumns: ("sharded-ddp-3",),
    torch.optim.Adafactor: ("sharded-ddp-3", "fsdp-2"),
}
"""Optimizers that need whole tensors, in layouts with shards."""

(BAD,) = SampleOrder(n=200, seed=3).indices((BAD_STEP - 1) * 16, 1)

SCENARIOS = {
    "slices, clipping, loss by step": Scenario(
        job=SteppedDigits(hidden=24, depth=3, lr=0.3),
        train={"grad_accumulation": 2, "clip_norm": 0.1},
        happened=clipped,
    ),
    "adamw, schedule, groups and average": Scenario(
        job=of.ScheduledChain(build=of.plain),
        train={"grad_accumulation": 2, "ema_decay": 0.8},
        rtol=ADAMW,
        happened=averaged,
    ),
    "uneven shares in three slices": Scenario(
        job=digits(depth=3, hidden=23, lr=0.3),
        train={"steps": 8, "grad_accumulation": 3, "clip_norm": 0.2, "ema_decay": 0.8, "global_batch_size": 35},
        happened=uneven,
    ),
    "metrics and clipped values": Scenario(
        job=MeasuredDigits(hidden=24, depth=3),
        train={"grad_accumulation": 2, "clip_value": 0.05},
        happened=each_step_measured,
    ),
    "weights per sample, tied": Scenario(
        job=Tokens(build=of.tied_ends, empty=6, lr=0.5),
        train={"grad_accumulation": 2, "clip_norm": 0.2, "global_batch_size": 8},
        happened=one_has_none,
    ),
    "language model": Scenario(job=TinyGPT(layers=2, variant="llama", kv_heads=1, tied=True), train={}, rtol=ADAMW),
    "frozen, by train()": Scenario(job=Toy(build=of.freezes_in_train), train={"global_batch_size": 16}, constants=True),
    "skipped step": Scenario(
        job=of.Marked(marked=(BAD,)),
        train={"on_nonfinite": "skip", "ema_decay": 0.8, "global_batch_size": 16},
        constants=True,
        happened=skipped,
    ),
    "recompute": Scenario(
        job=BlockDigits(hidden=24, dropout=0.0, normed=False), train={"activation_checkpointing": "blocks"}
    ),
    "fp16": Scenario(
        job=TinyGPT(layers=2),
        train={"precision": "fp16", "grad_accumulation": 2, "clip_value": 0.01},
        rtol=1e-4,
        atol=1e-2,
        happened=rounded,
    ),
    "bf16, gathered": Scenario(
        job=digits(depth=3, lr=0.3),
        train={"precision": "bf16", "grad_accumulation": 2, "clip_norm": 0.2},
        rtol=2e-3,
        layouts=("fsdp-3", "hsdp-2x2", "fsdp-1F1B-2x2", "fsdp-ZBVZeroBubble-2x2"),
        happened=rounded,
    ),
    "bf16, gathered, adamw, tied": Scenario(
        job=TinyGPT(layers=2, variant="llama", kv_heads=1, tied=True),
        train={"precision": "bf16", "grad_accumulation": 2, "activation_checkpointing": "blocks"},
        rtol=5e-4,
        atol=2e-2,
        layouts=("fsdp-3", "fsdp-ZBVZeroBubble-2x2"),
        in_ci="fsdp-3",
    ),
    "samples that use different parameters": Scenario(
        job=Uneven(adamw=True),
        train={"steps": 16, "grad_accumulation": 2, "clip_norm": 1.0, "global_batch_size": 16},
        rtol=ADAMW,
        layouts=("fsdp-2", "hsdp-2x2", "fsdp-ZBVZeroBubble-2x2"),
        in_ci="fsdp-2",
    ),
    **{
        f"whole tensors, {kind.__name__}": Scenario(
            job=OfTall(kind=kind),
            train={"grad_accumulation": 2, "clip_norm": 0.2, "ema_decay": 0.8, "global_batch_size": 16},
            rtol=ADAMW,
            layouts=layouts,
        )
        for kind, layouts in WHOLE_TENSORS.items()
    },
    "whole tensors, skipped step": Scenario(
        job=OfMarked(kind=Preconditioned, marked=(BAD,)),
        train={"steps": 30, "on_nonfinite": "skip", "global_batch_size": 16},
        rtol=ADAMW,
        layouts=("fsdp-2",),
    ),
    "stream": Scenario(job=StreamToy(kind="Stateful"), train={"global_batch_size": 48}, want_grad_norm=False),
    "samples drawn by weight": Scenario(job=Weighed(), train={"global_batch_size": 48}, want_grad_norm=False),
}

VARIANTS = {
    "ddp-4", "sharded-ddp-2", "fsdp-2", "GPipe-2", "1F1B-2", "Interleaved1F1B-2", "LoopedBFS-2",
    "InterleavedZeroBubble-2", "DualPipeV-2", "GPipe-2x2", "1F1B-2x2", "1F1B-2x2-replicas-close", "ZBVZeroBubble-2x2",
    "fsdp-1F1B-2x2",
}  # fmt: skip
"""Layouts that differ from another one in a schedule or a number; they are only in the scenarios :data:`PLAIN`."""
PLAIN = ("slices, clipping, loss by step", "language model")

EXCEPTIONS = {
    ("fp16", "parameter_server-2+2"): "it is refused: workers push gradients before they agree on a step to skip",
    **{("uneven shares in three slices", name): "stages refuse micro-batches of different sizes" for name in STAGED},
    ("weights per sample, tied", "mesh-hsdp-in-stages-2x2x2"): "8 samples are too few for 4 replicas of 2 x 2 parts",
}
"""The reason why a layout is not in a scenario."""
WITHOUT: dict[str, dict[str, Any]] = {"parameter_server-2+2": {"ema_decay": None}}
"""What is changed for a layout in every scenario, because its plan refuses it."""


FAST = {"ddp-2", "sharded-ddp-2", "fsdp-2", "model_parallel-2", "1F1B-2", "GPipe-2x2", "parameter_server-2+2"}
"""Layouts that ``pytest`` runs, in the scenario ``slices, clipping, loss by step``."""


def cells() -> list[Any]:
    """Each scenario and each layout that is in it, as parameters of a test.

    CI runs all layouts in the first scenario. In each of the others, it runs ``ddp-2``, another layout of whole models
    and one that divides them, in turn, or those whose turn it is if the rule is about some layouts. The campaign runs
    all.
    The turns begin so that eight workers train no language model, and tied tensors have several stages and replicas.
    """
    found = []
    for turn, (s, scenario) in enumerate(SCENARIOS.items(), 7):
        of_scenario = scenario.layouts or [name for name in SYNCHRONOUS if s in PLAIN or name not in VARIANTS]
        names = [name for name in of_scenario if (s, name) not in EXCEPTIONS]
        turns = in_turn(names, turn)
        if not scenario.layouts:
            others = [name for name in names if name != "ddp-2"]
            of_kinds = (sorted(name for name in others if divides(name) == does) for does in (False, True))
            turns = {"ddp-2", *(of_kind[turn % len(of_kind)] for of_kind in of_kinds)}
        kept = names if s == PLAIN[0] else {scenario.in_ci} if scenario.in_ci else turns
        found += [pytest.param(s, name, marks=list(marks_of(s, name, kept))) for name in names]
    return found


def divides(layout: str) -> bool:
    """Whether the layout divides the model."""
    return len(kind_of(layout)) > 1


def marks_of(scenario: str, layout: str, kept: Collection[str]) -> Iterator[pytest.MarkDecorator]:
    if layout not in kept:
        yield pytest.mark.campaign
    if scenario == PLAIN[0] and layout in FAST:
        yield pytest.mark.fast
    if SCENARIOS[scenario].constants and layout in STAGED:
        yield passes_constants


def case_of(scenario: str, layout: str) -> Case:
    case = SCENARIOS[scenario].case
    return SYNCHRONOUS[layout].of(replace(case, train=having(case.train, **WITHOUT.get(layout, {}))))
