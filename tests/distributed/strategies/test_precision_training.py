"""Every precision in every layout: equal losses, skipped steps, and checkpoints."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.conformance.cases import Case, having
from helpers.conformance.exact_evaluation import evaluated_in_slices
from helpers.conformance.layouts import DP, HOGWILD, LAYOUTS, assert_as_alone, whole_model
from helpers.conformance.training import losses, make, model_of, piece, snapshot, steps, train
from helpers.jobs.quick_jobs import AdamDigits, TinyGPT, digits
from helpers.jobs.stage_toys import Marked
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.strategies.trained import INITIAL
from orchestrator.strategies.trainer import Trainer
from orchestrator.worker.data.batches import SampleOrder

DATA_PARALLEL = replace(DP, loss_on="replicas")
SYNCHRONOUS = ("ddp-2", "sharded-ddp-2", "fsdp-2", "model_parallel-2", "1F1B-2", "ZBVZeroBubble-2", "GPipe-2x2")
TOLERANCE = {"tf32": 1e-5, "bf16": 0.02, "bf16-true": 0.05, "fp16": 0.005}
"""Relative, of every loss: about the unit roundoff of the dtype, times the number of steps."""


def in_turns(*names: str) -> list[Any]:
    """Every fourth layout; the campaign has the others."""
    return [*names[2::4], *in_campaign(*(name for i, name in enumerate(names) if i % 4 != 2))]


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [
        ("bf16", ("ddp-2", "fsdp-2", "1F1B-2")),
        *in_campaign(*((p, SYNCHRONOUS) for p in ("bf16", "tf32", "bf16-true", "fp16"))),
    ],
)
def test_every_layout_has_the_losses_of_one_worker(gang: Gang, precision: str, layouts: tuple[str, ...]) -> None:
    """With fp16, the conformance matrix has it too."""
    settings = {"grad_accumulation": 2, **({"clip_value": 0.01} if precision == "fp16" else {"clip_norm": 0.5})}
    case = Case(job=TinyGPT(), train=having(precision=precision, **settings))
    seen = assert_as_alone(gang, case, *layouts, rtol=TOLERANCE[precision])
    (exact,) = gang.run(train, replace(case, train=having(**settings)), world_size=1)
    torch.testing.assert_close(losses(seen["ddp-2"]), losses([exact]), rtol=TOLERANCE[precision], atol=0)
    same = [torch.equal(losses(ranks), losses([exact])) for ranks in seen.values()]
    assert precision == "tf32" or not any(same), "nothing was computed in this precision"
    dtypes = {t.dtype for ranks in seen.values() for r in ranks for t in r.model.values() if t.is_floating_point()}
    assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


class Loud(AdamDigits):
    """The gradients are beyond float16 until the scale has fallen. AdamW makes the same updates of any loss."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 4096 * super().loss(output, target)


@pytest.mark.parametrize("name", in_turns("single", *SYNCHRONOUS))
def test_the_scale_falls_until_no_gradient_overflows(gang: Gang, name: str) -> None:
    """How far differs between layouts, because they divide the global batch differently."""
    case = Case(job=Loud(hidden=24, depth=3, lr=0.01), train=having(precision="fp16", grad_accumulation=2))
    ranks = gang.run(train, LAYOUTS[name].of(case), world_size=LAYOUTS[name].world_size)
    (skipped,) = {tuple(rank.skipped) for rank in ranks}
    assert all(skipped[:4])
    assert sum(skipped) < 15
    assert losses(ranks)[-1] < losses(ranks)[0]
    whole_model(ranks)  # of which the copies are equal


BAD_STEP = 3


def scales(rank: int, case: Case) -> tuple[list[bool], list[float], dict[str, Tensor]]:
    """Which steps this rank skipped, the scale after each, and its model at the end."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    skipped, factors = [], []
    for result in steps(strategy):
        assert strategy.trained.loss_scale is not None
        skipped.append(result.skipped)
        factors.append(strategy.trained.loss_scale.factor)
    return skipped, factors, snapshot(model_of(strategy))


@pytest.mark.parametrize("name", in_turns(*SYNCHRONOUS))
def test_a_bad_gradient_on_one_stage_skips_the_step_on_all_ranks(gang: Gang, name: str) -> None:
    (bad,) = SampleOrder(n=200, seed=3).indices((BAD_STEP - 1) * 16, 1)
    case = Case(job=Marked(marked=(bad,)), train=having(steps=6, global_batch_size=16, precision="fp16"))
    ranks = gang.run(scales, LAYOUTS[name].of(case), world_size=LAYOUTS[name].world_size)
    ((skipped, factors, model),) = gang.run(scales, case, world_size=1)
    assert skipped == [step == BAD_STEP for step in range(1, 7)]
    assert factors == [INITIAL] * (BAD_STEP - 1) + [INITIAL / 2] * 4
    for rank_skipped, rank_factors, own in ranks:
        assert (rank_skipped, rank_factors) == (skipped, factors)
        for tensor_name, tensor in own.items():
            torch.testing.assert_close(tensor, model[tensor_name], rtol=0.02, atol=0.002)


@pytest.mark.parametrize("precision", ["bf16-true", *in_campaign("fp32")])
def test_an_evaluation_has_one_value_in_slices_of_any_size(gang: Gang, precision: str) -> None:
    train_config = having(global_batch_size=32, precision=precision)
    case = Case(job=digits(depth=3, val_size=45), train=train_config)
    sliced = replace(case, train=having(train_config, grad_accumulation=4))
    ((rows, expected),) = gang.run(evaluated_in_slices, case, world_size=1)
    assert rows == 32
    for name, slice_rows in {"single": 8, "ddp-2": 4, "fsdp-2": 4, "1F1B-2": 8, "GPipe-2x2": 4}.items():
        ranks = gang.run(evaluated_in_slices, LAYOUTS[name].of(sliced), world_size=LAYOUTS[name].world_size)
        assert {rows for rows, _ in ranks} == {slice_rows}
        assert sum(point.weight for _, point in ranks) == expected.weight == 45
        loss = sum(point.loss_sum for _, point in ranks)
        assert loss == pytest.approx(expected.loss_sum, rel=1e-6 if precision == "fp32" else 0.01)
        assert sum(point.sums.get("accuracy", 0.0) for _, point in ranks) == expected.sums["accuracy"]


@pytest.mark.parametrize("precision", ["fp16", *in_campaign("bf16-true")])
def test_dp_has_the_losses_of_one_device(gang: Gang, precision: str) -> None:
    case = Case(job=TinyGPT(), train=having(precision=precision, grad_accumulation=2))
    (alone,) = gang.run(train, case, world_size=1)
    (parts,) = gang.run(train, replace(case, alone=DATA_PARALLEL), world_size=1)
    torch.testing.assert_close(losses([parts]), losses([alone]), rtol=TOLERANCE[precision], atol=0)


def test_workers_share_parameters_in_bfloat16(gang: Gang) -> None:
    case = Case(job=TinyGPT(), options=HOGWILD, train=having(precision="bf16-true"))
    ranks = gang.run(train, case, world_size=2)
    assert losses(ranks)[-1] < losses(ranks)[0]
    assert {t.dtype for rank in ranks for t in rank.model.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("fp16", "fsdp-2"),
        ("bf16-true", "1F1B-2"),
        *in_campaign(("fp16", "ddp-2"), ("fp16", "1F1B-2"), ("bf16-true", "fsdp-2")),
    ],
)
def test_a_resumed_run_has_the_same_curve(gang: Gang, precision: str, name: str) -> None:
    """The step that lowers the scale is before the checkpoint."""
    (bad,) = SampleOrder(n=200, seed=3).indices((BAD_STEP - 1) * 16, 1)
    job = Marked(marked=(bad,)) if precision == "fp16" else digits(depth=3)
    case = LAYOUTS[name].of(Case(job=job, train=having(steps=8, global_batch_size=16, precision=precision)))
    world_size = LAYOUTS[name].world_size
    whole = gang.run(piece, case, None, 8, world_size=world_size)
    begun = gang.run(piece, case, None, 4, world_size=world_size)[0][1]
    resumed = gang.run(piece, case, begun, 8, world_size=world_size)
    assert begun is not None
    if precision == "fp16":
        assert begun.meta["loss_scale"] == {"factor": INITIAL / 2, "updates": 1}
    else:
        assert {t.dtype for t in begun.model.values()} == {torch.bfloat16}
    assert torch.equal(losses([s for s, _ in resumed]), losses([s for s, _ in whole])[4:])
    assert resumed[0][1].meta == whole[0][1].meta


@pytest.mark.parametrize(("of", "to"), [("fp16", "bf16-true"), *in_campaign(("fp32", "fp16"), ("bf16-true", "fp32"))])
def test_a_checkpoint_is_continued_in_another_precision(gang: Gang, of: str, to: str) -> None:
    case = Case(job=TinyGPT(), train=having(steps=6, precision=of))
    ((_, state),) = gang.run(piece, case, None, 3, world_size=1)
    other = LAYOUTS["1F1B-2"].of(replace(case, train=having(steps=6, precision=to)))
    ranks = gang.run(piece, other, state, 6, world_size=2)
    ((same, _),) = gang.run(piece, case, state, 6, world_size=1)
    torch.testing.assert_close(losses([s for s, _ in ranks]), losses([same]), rtol=0.05, atol=0)
