"""``Job.training_step``: several models, losses and optimizers, with the losses of one worker in every layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import default_collate

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.equal_loss import assert_equal_steps
from helpers.conformance.training import (
    Steps,
    assert_same,
    assert_same_state,
    losses,
    make,
    model_of,
    piece,
    snapshot,
    steps,
    train,
    watched,
)
from helpers.jobs.step_toys import GAN, STEP_JOBS, Distillation, Models, NormedGAN, Optimizers, ScheduledGAN, SomeParts
from helpers.ranks.gang import SOON_S, Gang
from helpers.ranks.loops import losses_by_step, run_loop
from orchestrator import gather_batch
from orchestrator.job import Job
from orchestrator.protocol.messages import ANY_RANK, TrainPoint
from orchestrator.state.checkpoint import load
from orchestrator.state.optimizers import AVERAGE
from orchestrator.strategies.replicated.job_step import JobStep

TRAIN = having(steps=8, global_batch_size=24)
UNEVEN = having(TRAIN, global_batch_size=25)


@pytest.mark.parametrize("name", STEP_JOBS)
def test_equal_loss_in_even_and_uneven_shares(gang: Gang, name: str) -> None:
    assert_equal_steps(gang, Case(job=STEP_JOBS[name], train=TRAIN), 2)
    ranks = assert_equal_steps(gang, Case(job=STEP_JOBS[name], train=UNEVEN), 3)
    assert len({r.weights[0] for r in ranks}) == 2


@pytest.mark.parametrize("clipping", [{"clip_norm": 0.05}, {"clip_value": 0.001}])
def test_gradients_are_clipped_for_each_optimizer_alone(gang: Gang, clipping: dict[str, float]) -> None:
    clipped = Case(job=ScheduledGAN(), train=having(UNEVEN, **clipping))
    ranks = assert_equal_steps(gang, clipped, 2)
    (free,) = gang.run(train, replace(clipped, train=UNEVEN), world_size=1)
    assert (free.model["generator.0.weight"] - ranks[0].model["generator.0.weight"]).abs().max() > 1e-3


def test_unused_parameters_stay_as_they_are(gang: Gang) -> None:
    """A gradient of zeros would let momentum or weight decay change them."""
    case = Case(job=SomeParts(), train=having(UNEVEN, steps=3))
    initial = make(case, 0)
    for rank in gang.run(train, case, world_size=3):
        assert torch.equal(rank.model["never.weight"], model_of(initial).state_dict()["never.weight"])


def test_every_rank_has_the_buffers_of_rank_0(gang: Gang) -> None:
    case = Case(job=NormedGAN(), train=TRAIN)
    ranks = gang.run(train, case, world_size=3)
    assert ranks[0].model["generator.1.num_batches_tracked"] == 8
    for rank in ranks:
        assert_same(rank.model, ranks[0].model)


def test_synchronized_batchnorm_has_the_losses_of_one_worker(gang: Gang) -> None:
    assert_equal_steps(gang, Case(job=NormedGAN(), train=TRAIN, options=replace(DDP, sync_batchnorm=True)), 2)


def test_bf16_stays_close_and_uses_the_updated_weights(gang: Gang) -> None:
    """Autocast keeps its casts of the weights: without a new one, the generator would see the old discriminator."""
    case = Case(job=GAN(lr=0.05), train=having(TRAIN, precision="bf16"))
    (half,) = gang.run(train, case, world_size=1)
    (exact,) = gang.run(train, replace(case, train=TRAIN), world_size=1)
    assert half.loss_sums != exact.loss_sums, "nothing was computed in bf16"
    torch.testing.assert_close(losses([half])[:3], losses([exact])[:3], rtol=0.03, atol=0)
    assert {t.dtype for t in half.model.values()} == {torch.float32}


def test_evaluation_uses_forward_and_loss_and_keeps_the_teacher_in_eval_mode(gang: Gang, tmp_path: Path) -> None:
    case = Case(job=Distillation(), train=having(UNEVEN, eval_every=3))
    alone = gang.run(run_loop, case, tmp_path / "1", world_size=1)
    ranks = gang.run(run_loop, case, tmp_path / "2", world_size=2)
    assert losses_by_step(ranks) == pytest.approx(losses_by_step(alone), rel=1e-5)
    (undisturbed,) = gang.run(train, replace(case, train=UNEVEN), world_size=1)
    assert list(losses_by_step(alone).values()) == pytest.approx(losses([undisturbed]).tolist(), rel=1e-6)


def test_the_metrics_of_a_step_are_logged(gang: Gang, tmp_path: Path) -> None:
    case = Case(job=GAN(), train=having(UNEVEN, log_every=4))
    for rank in gang.run(run_loop, case, tmp_path, world_size=2):
        points = [p for p in rank.points if isinstance(p, TrainPoint)]
        assert [p.step for p in points] == [1, 4, 8]
        assert all(p.sums.keys() == {"discriminator"} for p in points)
        assert "train/grad_norm" in points[0].metrics


# State


@pytest.mark.parametrize("job", [ScheduledGAN(), GAN()], ids=["scheduled", "plain"])
def test_a_resume_in_another_layout_continues_it(gang: Gang, job: Job) -> None:
    case = Case(job=job, train=having(UNEVEN, ema_decay=0.9))
    ((whole, end),) = gang.run(piece, case, None, 8, world_size=1)
    curve, state = [], None
    for world_size, stop in ((2, 3), (1, 5), (3, 8)):
        results = gang.run(piece, case, state, stop, world_size=world_size)
        state = results[0][1]
        curve.append(losses([seen for seen, _ in results]))
    assert state is not None
    torch.testing.assert_close(torch.cat(curve), losses([whole]), rtol=1e-4, atol=0)
    torch.testing.assert_close(state.model, end.model, rtol=1e-3, atol=1e-4)
    assert state.meta == end.meta
    assert state.meta["optimizer"] == ("SGD+Adam" if isinstance(job, ScheduledGAN) else "Adam+Adam")
    assert {path.rpartition("/")[0] for path in state.optimizer if path.endswith(AVERAGE)} == state.model.keys()


def test_two_workers_resume_bit_for_bit(gang: Gang, tmp_path: Path) -> None:
    case = Case(job=NormedGAN(), train=UNEVEN)
    whole = gang.run(run_loop, case, tmp_path / "whole", None, 4, world_size=2)
    half_way = str(tmp_path / "whole" / "checkpoints" / "step-00000004")
    resumed = gang.run(run_loop, case, tmp_path / "resumed", half_way, world_size=2)
    for before, after in zip(whole, resumed, strict=True):
        assert [p.loss_sum for p in after.points] == [p.loss_sum for p in before.points if p.step > 4]
    end = (load(tmp_path / name / "checkpoints" / "step-00000008") for name in ("whole", "resumed"))
    assert_same_state(*end)


def test_one_optimizer_is_saved_as_that_of_any_job(gang: Gang) -> None:
    ((_, state),) = gang.run(piece, Case(job=Distillation(), train=TRAIN), None, 2, world_size=1)
    assert state.meta["optimizer"] == "SGD"


class PlantedError(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class FailingGAN(NormedGAN):
    """Fails before the update number ``fails_before`` of the run, from 1; each step makes two."""

    fails_before: int = 0
    on_rank: int | None = None
    updates: list[int] = field(default_factory=lambda: [0])

    def update(self, optimizer: Optimizer) -> None:
        self.updates[0] += 1
        rank = torch.distributed.get_rank()
        if self.updates[0] == self.fails_before and self.on_rank in (None, rank):
            raise PlantedError
        super().update(optimizer)


def recover_in_place(rank: int, case: Case) -> tuple[Mapping[int, tuple[int, ...]], Steps]:
    """Fail in the third step, before its first update, continue from the memory of rank 0, and train to the end."""
    strategy = make(case, rank)
    assert isinstance(strategy, JobStep)
    results = steps(strategy)
    seen = [next(results), next(results)]
    with pytest.raises(PlantedError):
        next(results)
    offered = strategy.recoverable_steps(2)
    strategy.close()
    strategy.attach()
    meta = strategy.recover_state((0, 0), source_step=2, step=2, samples_consumed=2 * case.train.global_batch_size)
    assert meta["step"] == 2
    return offered, watched(strategy, [*seen, *steps(strategy, first=3)])


def test_a_step_that_fails_before_its_first_update_is_repeated(gang: Gang) -> None:
    undisturbed = gang.run(train, Case(job=NormedGAN(), train=UNEVEN), world_size=2)
    found = gang.run(recover_in_place, Case(job=FailingGAN(fails_before=5), train=UNEVEN), world_size=2)
    for (offered, seen), expected in zip(found, undisturbed, strict=True):
        assert offered == {ANY_RANK: (2,)}
        assert seen.loss_sums == expected.loss_sums
        assert_same(seen.model, expected.model)


def offered_after_failure(rank: int, case: Case) -> Mapping[int, tuple[int, ...]]:
    """What this rank offers after rank 1 has left in the third step."""
    strategy = make(case, rank)
    results = steps(strategy)
    next(results), next(results)
    try:
        next(results)
    except PlantedError:
        raise  # this rank leaves its group, which fails the others
    except RuntimeError:
        return strategy.recoverable_steps(2)
    raise AssertionError("the step did not fail")


@pytest.mark.parametrize(("fails_before", "offered"), [(5, {ANY_RANK: (2,)}), (6, {})], ids=["whole", "partly"])
def test_a_survivor_offers_its_state_unless_a_step_is_partly_updated(
    gang: Gang, fails_before: int, offered: Mapping[int, tuple[int, ...]]
) -> None:
    case = Case(job=FailingGAN(fails_before=fails_before, on_rank=1), train=UNEVEN)
    survivor, lost = gang.ask(offered_after_failure, case, world_size=2, timeout_s=SOON_S)
    assert "PlantedError" in str(lost.error)
    assert survivor.error is None, survivor.trace
    assert survivor.value == offered


@dataclass(frozen=True, kw_only=True)
class MovingTeacher(Distillation):
    """Changes its teacher before the update, and fails in the third step."""

    calls: list[int] = field(default_factory=lambda: [0])

    def training_step(self, models: Models, batch: Any, optimizers: Optimizers) -> Tensor:
        self.calls[0] += 1
        with torch.no_grad():
            models["teacher"].get_submodule("0").bias.mul_(0.9)
        if self.calls[0] == 3:
            raise PlantedError
        return super().training_step(models, batch, optimizers)


def offered_by_moving_teacher(rank: int, case: Case) -> Mapping[int, tuple[int, ...]]:
    strategy = make(case, rank)
    results = steps(strategy)
    next(results), next(results)
    before = strategy.recoverable_steps(2)
    assert before == {ANY_RANK: (2,)}
    with pytest.raises(PlantedError):
        next(results)
    return strategy.recoverable_steps(2)


def test_a_step_that_has_changed_a_teacher_is_partly_updated(gang: Gang) -> None:
    assert gang.run(offered_by_moving_teacher, Case(job=MovingTeacher(), train=UNEVEN), world_size=2) == [{}, {}]


# What is refused


@dataclass(frozen=True, kw_only=True)
class Returning(Distillation):
    value: Any = None
    closure: bool = False

    def training_step(self, models: Models, batch: Any, optimizers: Optimizers) -> Any:
        if self.closure:
            optimizers["student"].step(lambda: 0.0)
        return self.value


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Returning(), "job.training_step returned None; return the loss, a scalar tensor, or a dict"),
        (Returning(value={"los": torch.ones(())}), "job.training_step returned a dict without 'loss'; "),
        (
            Returning(value=torch.ones(3)),
            "job.training_step: the loss is a tensor of shape (3,) and type ",
        ),
        (Returning(value={"loss": 1.0}), "job.training_step: the loss is 1.0; return a scalar tensor"),
        (
            Returning(value={"loss": torch.ones(()), "lr": torch.ones(())}),
            "job.training_step: the run itself logs a metric named 'lr'",
        ),
        (
            Returning(value={"loss": torch.ones(()), "parts": torch.ones(2)}),
            "job.training_step: 'parts' is a tensor of shape (2,) and type torch.float32; return a scalar tensor of "
            "real numbers, a mean over the batch",
        ),
        (Returning(closure=True), "job.training_step: optimizers['student'].step() was given a closure; "),
    ],
)
def test_what_cannot_be_used_is_told(job: Job, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[jJ]ob\.") as error:
        next(steps(make(Case(job=job, train=TRAIN), 0)))
    assert str(error.value).startswith(said)


@dataclass(frozen=True, kw_only=True)
class WithOptimizers(GAN):
    kind: str

    def optimizers(self, models: Models) -> Any:
        generator, discriminator = (list(models[name].parameters()) for name in ("generator", "discriminator"))
        return {
            "none": {},
            "list": [torch.optim.SGD(generator, lr=0.1)],
            "twice": {"a": torch.optim.SGD(generator, lr=0.1), "b": torch.optim.SGD(generator + discriminator, lr=0.1)},
            "foreign": {"a": torch.optim.SGD([*generator, torch.ones(3, requires_grad=True)], lr=0.1)},
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("none", "Job.optimizers returned no optimizer"),
        ("list", "Job.optimizers returned a list; return a dict of optimizers by name"),
        ("twice", "Job.optimizers: generator.0.weight is in the optimizers 'a' and 'b'; put it into one of them"),
        ("foreign", "Job.optimizers: 'a' holds a tensor of shape [3] that is not a parameter of the model"),
    ],
)
def test_optimizers_share_out_the_parameters(kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[jJ]ob\.") as error:
        make(Case(job=WithOptimizers(kind=kind), train=TRAIN), 0)
    assert str(error.value).startswith(said)


# Gathering


def gathered_by(rank: int, rows: list[int]) -> tuple[list[Tensor], list[str]]:
    """Gather different numbers of rows of several types, then rows that do not fit together."""
    from orchestrator.strategies.replicated import gather

    own = torch.arange(rows[rank] * 2).reshape(rows[rank], 2) + 100 * rank
    with gather.training_step():
        found = [gather_batch(t) for t in (own, own.double(), own[:, 0] % 2 == 0, own[:, :0])]
        errors = []
        columns, dtype = [(2, 6), (3, 4), (3, 4)][rank], [torch.float32, torch.int32, torch.float32][rank]
        for wrong in (torch.ones(rows[rank], *columns), torch.ones(rows[rank], 4, dtype=dtype), torch.ones(())):
            with pytest.raises(ValueError, match="gather_batch") as error:
                gather_batch(wrong)
            errors.append(str(error.value))
    with torch.no_grad():
        assert gather_batch(own) is own
    with pytest.raises(RuntimeError, match=r"only Job\.training_step can gather"):
        gather_batch(own)
    return found, errors


@pytest.mark.parametrize("rows", [[2, 2, 2], [3, 1, 0]])
def test_rows_are_gathered_in_the_order_of_ranks(gang: Gang, rows: list[int]) -> None:
    expected = torch.cat([torch.arange(n * 2).reshape(n, 2) + 100 * rank for rank, n in enumerate(rows)])
    for rank, (found, errors) in enumerate(gang.run(gathered_by, rows, world_size=3)):
        whole = (expected, expected.double(), expected[:, 0] % 2 == 0, expected[:, :0])
        assert all(torch.equal(f, e) for f, e in zip(found, whole, strict=True))
        shapes = [[2, 6], [3, 4], [3, 4]]
        assert errors[0].endswith(f"those of rank {rank} are torch.float32 of shape {shapes[rank]}")
        assert "differ in shape or type" in errors[1]
        assert "got a scalar" in errors[2]


def test_a_worker_without_peers_gathers_itself() -> None:
    rows = torch.ones(3, 2)
    assert gather_batch(rows) is rows


def initial_states(rank: int, case: Case) -> tuple[dict[str, Tensor], bool]:
    """What the ranks begin with, if the constructor ignores the seed, and whether the teacher stays in eval mode."""
    strategy = make(case, rank)
    model = snapshot(model_of(strategy))
    strategy.evaluate(default_collate(case.job.dataset("val").items[:4]), 4)  # type: ignore[union-attr]
    teacher = model_of(strategy).get_submodule("teacher")
    return model, any(module.training for module in teacher.modules())


class Unseeded(Distillation):
    def model(self) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.manual_seed(rank)
        return super().model()


def test_all_ranks_begin_with_the_values_of_rank_0(gang: Gang) -> None:
    (first, _), (second, trains) = gang.run(initial_states, Case(job=Unseeded(), train=TRAIN), world_size=2)
    assert_same(first, second)
    assert not trains
