"""The training loop on ranks without Ray: evaluation over all of them, and resuming from a checkpoint."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from helpers.conformance.cases import CHECKPOINT, Case, assignment, having
from helpers.conformance.layouts import EVERY, LAYOUTS, PARAMETER_SERVER, Layout
from helpers.conformance.training import CPU
from helpers.jobs.quick_jobs import digits
from helpers.jobs.stage_toys import frozen, plain
from helpers.jobs.toys import Cliff, Dropped, Normed, Poisoned, Tokens, Toy, TwoHeads
from helpers.ranks.discarded import Abandoning
from helpers.ranks.gang import SOON_S
from helpers.ranks.loops import evaluation, loop_of, losses_by_step, run_loop
from helpers.ranks.streams import Measured, Stateful
from helpers.records.runs import in_campaign
from orchestrator.config.redact import Redactor
from orchestrator.protocol.core_metrics import evaluation_metrics
from orchestrator.protocol.events import BestFound, Warned
from orchestrator.protocol.messages import ANY_RANK, EvalPoint, RecoverableSteps, TrainPoint
from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint import list_checkpoints, load
from orchestrator.strategies import registry
from orchestrator.strategies.data.batch_parts import Remark
from orchestrator.strategies.trainer import Trainer
from orchestrator.worker.control.control import AbandonedError, Outbox
from orchestrator.worker.control.rendezvous import context_of
from orchestrator.worker.data.batches import SampleOrder
from orchestrator.worker.failures import EXPLAINED
from orchestrator.worker.loop import Loop


class LostAtEvaluation:
    """A confirmation that finds the generation ended in an evaluation."""

    def __init__(self, loop: Loop):
        self.lost = False
        self._outbox = loop.outbox

    def __call__(self) -> None:
        if self._outbox.collect({}).phase == "eval":
            self.lost = True
            raise AbandonedError("another rank was lost")


@pytest.mark.parametrize("val_size", [2, 7, 33])
def test_each_sample_is_evaluated_once(gang, tmp_path, val_size):
    case = Case(job=digits(val_size=val_size), train=having(steps=2, global_batch_size=14))
    expected = evaluation(gang.run(run_loop, case, tmp_path / "1", world_size=1))
    assert expected["weight"] == val_size
    for world_size in (2, 3, 4):
        ranks = gang.run(run_loop, case, tmp_path / f"{world_size}", world_size=world_size)
        found = evaluation(ranks)
        assert found["weight"] == val_size
        assert found["accuracy"] == expected["accuracy"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert all(r.training for r in ranks)


def keeps_after_a_step(rank: int, case: Case, folder: str) -> bool:
    """Whether a worker that gathers keeps a large block when it has trained."""
    from orchestrator.worker.process import process_memory

    process_memory.set_allocator(gathers=True)
    run_loop(rank, case, folder)
    block = torch.ones(30 * 2**18)  # 30 MiB, just below what glibc can keep
    before = process_memory._status()["VmData"]
    del block
    return process_memory._status()["VmData"] == before


def test_a_first_step_shows_that_there_is_memory_to_keep(gang, tmp_path):
    case = LAYOUTS["fsdp-2"].of(Case(job=digits(), train=having(steps=1, global_batch_size=14)))
    assert gang.run(keeps_after_a_step, case, str(tmp_path), world_size=2) == [True, True]


def test_a_step_that_is_skipped_is_told_once(gang, tmp_path):
    (bad,) = SampleOrder(n=200, seed=3).indices(2 * 14, 1)
    case = Case(job=Poisoned(bad=(bad,)), train=having(steps=4, global_batch_size=14, on_nonfinite="skip"))
    ranks = gang.run(run_loop, case, tmp_path, world_size=2)
    warned = [[event.message for event in rank.events if isinstance(event, Warned)] for rank in ranks]
    assert warned == [["step 3 skipped: gradient not finite"], []]


def endless(output, target):
    return F.cross_entropy(output, target) * math.inf


def refused(rank, case, run_dir, *checkpoint):
    """Why the run fails on this rank; None if it does not."""
    try:
        run_loop(rank, case, run_dir, *checkpoint)
    except EXPLAINED as e:
        return str(e)
    return None


@pytest.mark.parametrize(
    ("name", "train", "said"),
    [
        ("ddp-2", {"on_nonfinite": "skip"}, "train.on_nonfinite=skip: no step has made an update"),
        ("hogwild-2", {"on_nonfinite": "skip"}, "train.on_nonfinite=skip: no step has made an update"),
        ("parameter_server-2+2", {"on_nonfinite": "skip"}, "train.on_nonfinite=skip: no step has made an update"),
        ("single", {"precision": "fp16"}, "train.precision=fp16: no step has made an update"),
    ],
)
def test_a_run_without_an_update_fails_and_saves_no_last_checkpoint(gang, tmp_path, name, train, said):
    of, case = EVERY[name], Case(job=Toy(loss_of=endless), train=having(steps=3, global_batch_size=16, **train))
    whys = gang.run(refused, of.of(case), tmp_path, world_size=of.world_size)
    assert all(why is not None and why.startswith(said) for why in whys), whys
    assert list_checkpoints(tmp_path / "checkpoints") == []


class Cooling(Toy):
    """The learning rate falls to 0 at the last step."""

    def scheduler(self, optimizer, steps):
        return CosineAnnealingLR(optimizer, T_max=steps)


@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2", "parameter_server-2+2"])
def test_a_resume_with_more_steps_follows_the_schedule_of_the_new_length(gang, tmp_path, name):
    case = Case(job=Cooling(build=plain), train=having(steps=3, global_batch_size=16, eval_splits=()))
    gang.run(run_loop, case, tmp_path / "first", world_size=2)
    (saved,) = (tmp_path / "first" / "checkpoints").iterdir()
    case = replace(case, train=having(case.train, steps=6))
    resumed = {
        name: gang.run(run_loop, of.of(case), tmp_path / name, saved, world_size=of.world_size)
        for name, of in {name: LAYOUTS[name], "single": LAYOUTS["single"]}.items()
    }
    rates = {p.step: p.metrics["train/lr"].value for p in resumed[name][0].points if isinstance(p, TrainPoint)}
    assert rates == pytest.approx({step: 0.05 * (1 + math.cos(math.pi * step / 6)) for step in (4, 5, 6)}, abs=1e-9)
    assert losses_by_step(resumed[name]) == pytest.approx(losses_by_step(resumed["single"]), rel=1e-5)


class OwnFile(Toy):
    """Each rank reads a file of its own."""

    def dataset(self, split):
        own = replace(self, samples=self.samples + dist.get_rank()) if dist.is_initialized() else self
        return super(OwnFile, own).dataset(split)


def test_another_number_of_samples_is_refused_in_the_same_run_and_taken_by_a_new_one(gang, tmp_path):
    train, run_dir = having(steps=2, global_batch_size=16, eval_splits=()), str(tmp_path / "run")
    gang.run(run_loop, Case(job=Toy(), train=train), run_dir, world_size=1)
    (saved,) = map(str, (tmp_path / "run" / "checkpoints").iterdir())
    grown = Case(job=Toy(samples=1200), train=replace(train, steps=3))
    (why,) = gang.run(refused, grown, run_dir, saved, world_size=1)
    assert "has 1,200 samples, and had 200 at step 2 of this run" in why
    assert why.endswith(f"start_from={saved}")
    assert gang.run(refused, grown, tmp_path / "new", saved, world_size=1) == [None]


class GrowingStream(Stateful):
    def __len__(self) -> int:
        return len(self.items)


class Growing(Toy):
    def dataset(self, split):
        rows = super().dataset(split)
        return GrowingStream(rows.items) if split == "train" else rows


def test_a_stream_that_has_grown_is_read_on_from_its_saved_position(gang, tmp_path):
    train, run_dir = having(steps=2, global_batch_size=16, eval_splits=()), str(tmp_path)
    gang.run(run_loop, Case(job=Growing(samples=40), train=train), run_dir, world_size=1)
    (saved,) = map(str, (tmp_path / "checkpoints").iterdir())
    grown = Case(job=Growing(samples=50), train=replace(train, steps=3))
    assert gang.run(refused, grown, run_dir, saved, world_size=1) == [None]


def test_workers_that_read_data_of_different_sizes_are_refused(gang, tmp_path):
    case = Case(job=OwnFile(), train=having(steps=2, global_batch_size=16))
    why = "job.dataset('train') has 200 samples on rank 0 and 201 on rank 1; let every worker read the same data"
    assert [w[: len(why)] for w in gang.run(refused, case, tmp_path, world_size=2)] == [why, why]


@pytest.mark.parametrize("empty", [0, 6])
def test_each_valid_token_is_evaluated_once(gang, tmp_path, empty):
    case = Case(job=Tokens(samples=31, empty=empty), train=having(steps=2, global_batch_size=10))
    expected = evaluation(gang.run(run_loop, case, tmp_path / "1", world_size=1))
    assert expected["weight"] == sum(int((target != -100).sum()) for _, target in case.job.dataset("val").items)
    ranks = gang.run(run_loop, case, tmp_path / "4", world_size=4)
    assert evaluation(ranks) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("job", [Dropped(), Normed(), Toy()], ids=["dropout", "buffers", "plain"])
def test_two_workers_resume_from_a_checkpoint_bit_for_bit(gang, tmp_path, job):
    case = Case(job=job, train=having(steps=6, global_batch_size=9, eval_every=2))
    whole = gang.run(run_loop, case, tmp_path / "whole", None, 3, world_size=2)
    half_way = min((tmp_path / "whole" / "checkpoints").iterdir(), key=lambda p: p.name)
    resumed = gang.run(run_loop, case, tmp_path / "resumed", half_way, world_size=2)
    for before, after in zip(whole, resumed, strict=True):
        expected = [(type(p), p.step, p.loss_sum, p.weight) for p in before.points if p.step > 3]
        assert [(type(p), p.step, p.loss_sum, p.weight) for p in after.points] == expected
        assert expected[0][1] == 4
        assert after.outcome.status == "done"
        assert not after.owns_reducer, "it would outlive the process group"


def adapted(base: int = 0) -> nn.Module:
    """A chain whose last layer alone is trained, and other layers if its base is another."""
    model = frozen("first", "second")
    with torch.no_grad():
        model.get_parameter("second.weight")[-1, -1] += base
    return model


def test_a_checkpoint_of_what_is_trained_is_continued_in_any_layout(gang, tmp_path):
    """One with all parameters, too, if the frozen ones are those that the job builds."""

    def run(case, name, checkpoint, every=0):
        layout, run_dir = LAYOUTS[name], tmp_path / f"{len(list(tmp_path.iterdir()))}"
        ranks = gang.run(run_loop, layout.of(case), run_dir, checkpoint, every, world_size=layout.world_size)
        points = [p for rank in ranks for p in rank.points if isinstance(p, TrainPoint) and p.step == 6]
        return math.fsum(p.loss_sum for p in points), list_checkpoints(run_dir / "checkpoints")[0]

    case = Case(job=Toy(build=adapted), train=having(steps=6, global_batch_size=12))
    only = replace(case, checkpoint=replace(CHECKPOINT, only_trained=True))
    expected, whole = run(case, "single", None, 3)
    _, by_shards = run(only, "fsdp-2", whole, 4)
    _, by_stages = run(only, "1F1B-2", by_shards, 5)
    for checkpoint in (by_shards, by_stages):
        assert not any(name.startswith(("first.", "second.")) for name in load(checkpoint).model)
    assert load(by_shards).meta["left_out"] == load(by_stages).meta["left_out"]
    for continues, name in ((only, "sharded-ddp-2"), (only, "hsdp-2x2"), (case, "ddp-2")):
        loss, last = run(continues, name, by_stages)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert ("first.weight" in load(last).model) == (continues is case)
    other = replace(only, job=replace(case.job, build=partial(adapted, 1)))
    for checkpoint, name in ((whole, "fsdp-2"), (by_shards, "1F1B-2"), (by_shards, "single")):
        with pytest.raises(AssertionError, match=r"second\.weight; let it read the same weights"):
            run(other, name, checkpoint)


class Worsening(Measured):
    """Its evaluations are best after some steps: from then on, each update goes back."""

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 if step < 4 else -1)


BEST = replace(CHECKPOINT, keep=1, best="val/loss")


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS["single"],
        LAYOUTS["ddp-2"],
        LAYOUTS["GPipe-2x2"],
        Layout(options=replace(PARAMETER_SERVER, consistency="async"), world_size=4),
    ],
    ids=["single", "ddp", "ddp_pipeline", "parameter_server-async"],
)
def test_a_run_that_no_longer_improves_ends_on_all_ranks_and_keeps_its_best_checkpoint(gang, tmp_path, layout):
    train = having(steps=20, global_batch_size=12, eval_every=2, stop_after=2)
    case = layout.of(Case(job=Worsening(samples=24), train=train, checkpoint=BEST))
    world_size = layout.world_size
    ranks = gang.run(run_loop, case, tmp_path, world_size=world_size)
    found = {(r.outcome.status, r.outcome.step, r.outcome.ended_early) for r in ranks}
    ((status, step, why),) = found
    best = [e for e in ranks[0].events if isinstance(e, BestFound)][-1]
    assert (status, step) == ("done", best.step + 4)
    assert why.startswith("train.stop_after=2: val/loss has not improved in the last 2 evaluations; its best is ")
    assert step < 20
    saved = [load(path) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert [state.step for state in saved] == [best.step, step]
    assert [BestSoFar.from_meta(state.meta).step for state in saved] == [best.step] * 2
    parts = [next(p for p in r.points if isinstance(p, EvalPoint) and p.step == best.step) for r in ranks]
    assert evaluation_metrics(parts)["val/loss"] == best.value
    of_best, folder = str(list_checkpoints(tmp_path / "checkpoints")[0]), tmp_path / "evaluated"
    case = replace(case, train=replace(train, stop_after=None), checkpoint=CHECKPOINT, evaluate="the run")
    evaluated = gang.run(run_loop, case, folder, of_best, 1, world_size=world_size)
    assert [[replace(p, time=0) for p in r.points] for r in evaluated] == [[replace(p, time=0)] for p in parts]
    assert list_checkpoints(folder / "checkpoints") == []


def test_a_run_that_starts_from_another_one_looks_for_its_own_best_evaluation(gang, tmp_path):
    train = having(steps=6, global_batch_size=12, eval_every=2)
    case = Case(job=Worsening(samples=24), train=train, checkpoint=BEST)
    gang.run(run_loop, case, tmp_path, world_size=1)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert BestSoFar.from_meta(load(newest).meta).step < 6
    case = replace(case, train=replace(train, steps=8))
    gang.run(run_loop, case, tmp_path / "new", newest, world_size=1)
    (saved,) = list_checkpoints(tmp_path / "new" / "checkpoints")
    assert BestSoFar.from_meta(load(saved).meta).step == 8


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("at", [3, 6])
def test_no_checkpoint_has_parameters_that_are_not_finite(gang, tmp_path, at, world_size):
    case = Case(job=Cliff(at=at), train=having(steps=6, log_every=100))
    answers = gang.ask(run_loop, case, tmp_path, None, 3, world_size=world_size, timeout_s=SOON_S)
    assert answers[0].error is not None
    assert answers[0].error.startswith(f"NonFiniteError: the parameter 0.weight is no longer finite at step {at}; ")
    saved = [load(path) for path in (tmp_path / "checkpoints").iterdir()]
    assert [state.step for state in saved] == ([] if at == 3 else [3])
    assert all(tensor.isfinite().all() for state in saved for tensor in state.model.values())


class Grouped(Toy):
    """The head has a learning rate of its own, which falls to that of the body at the third step."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        *body, weight, bias = parameters
        return torch.optim.SGD([{"params": body}, {"params": [weight, bias], "lr": 0.4}], lr=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, [lambda step: 1, lambda step: 1 if step < 3 else 0.25])


@pytest.mark.parametrize("name", ["ddp-2", "1F1B-2", *in_campaign("fsdp-2", "parameter_server-2+2")])
def test_a_run_that_looks_for_a_rate_saves_nothing(gang, tmp_path, name):
    train = having(steps=9, global_batch_size=16, lr_range=(1e-8, 1.0), eval_splits=(), on_nonfinite="stop")
    case, world_size = LAYOUTS[name].of(Case(job=Toy(), train=train)), LAYOUTS[name].world_size
    ranks = gang.run(run_loop, case, tmp_path, None, 2, world_size=world_size)
    rates = {p.step: p.metrics["train/lr"].value for p in ranks[0].points if isinstance(p, TrainPoint)}
    assert [rates[step] for step in range(1, 9)] == pytest.approx([10.0**n for n in range(-7, 1)])
    assert list((tmp_path / "checkpoints").glob("step-*")) == []
    assert [rank.outcome.status for rank in ranks] == ["done"] * world_size


def test_the_learning_rate_of_each_group_is_logged_while_they_differ(gang, tmp_path):
    for job, expected in {
        Grouped(): [(0.1, 0.1, 0.4), (0.1, 0.1, 0.4), (0.1, None, None)],
        Toy(): [(0.1, None, None)] * 3,
    }.items():
        case = Case(job=job, train=having(steps=3))
        for ran in gang.run(run_loop, case, tmp_path / type(job).__name__, world_size=2):
            points = [p.metrics for p in ran.points if isinstance(p, TrainPoint)]
            names = ("train/lr", "train/lr_group_0", "train/lr_group_1")
            assert [tuple(m[n].value if n in m else None for n in names) for m in points] == expected


def not_on_rank_1_at_third_call(rank: int, call: int) -> bool:
    return not (rank == 1 and call == 3)


def test_a_rank_that_fails_alone_ends_the_others_soon(gang, tmp_path):
    train = having(steps=5, eval_splits=())
    case = Case(job=TwoHeads(uses=not_on_rank_1_at_third_call), train=train)
    for attempt in range(3):
        answers = gang.ask(run_loop, case, tmp_path / str(attempt), world_size=3, timeout_s=SOON_S)
        assert "take no part in the loss: spare.weight, spare.bias" in answers[1].error
        assert all(a.error is not None for a in answers)


class Noted(Trainer):
    """Has something to say about its set-up."""

    def setup_warnings(self):
        return (Remark("something was not checked"),)


def offered_by_a_survivor_and_a_new_rank(rank: int, case: Case, run_dir: str) -> tuple[RecoverableSteps, bool]:
    """Rank 1 is replaced after step 2, and the evaluation that follows is interrupted. What each rank then offers."""
    orders = assignment(rank=rank, world_size=2, generation=1, store_port=0, run_dir=run_dir, case=case)
    strategy = registry.load(orders.config.strategy.name)
    loop = loop_of(orders, case, strategy.create(context_of(orders, CPU), case.job), gate=Abandoning(timeout_s=60))
    with pytest.raises(AbandonedError):
        loop.run({})
    loop.strategy.close()
    if rank == 1:
        loop = loop_of(orders, case, strategy.create(context_of(orders, CPU), case.job))
    loop.reassign(replace(orders, generation=2, sources=(0, 0), source_step=2))
    loop.strategy.hooks.confirm = lost_at_evaluation = LostAtEvaluation(loop)
    with contextlib.suppress(AbandonedError):
        loop.run({})
    loop.strategy.close()
    return loop.recoverable_steps(), lost_at_evaluation.lost


def test_a_new_rank_offers_what_it_has_received_although_the_evaluation_after_that_fails(gang, tmp_path):
    case = Case(job=digits(val_size=8), train=having(steps=4, global_batch_size=8, eval_every=2))
    found = gang.run(offered_by_a_survivor_and_a_new_rank, case, str(tmp_path), world_size=2)
    assert found == [({ANY_RANK: (2,)}, True)] * 2


def test_what_a_strategy_says_of_its_setup_reaches_the_user(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    case = Case(job=Toy(samples=20), train=having(steps=1, global_batch_size=10))
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir=str(tmp_path), case=case)
    strategy, outbox = Noted(context_of(orders, CPU), case.job), Outbox(Redactor())
    loop = loop_of(orders, case, strategy, outbox=outbox)
    loop.run({})
    loop.finish(timeout_s=60)
    warnings = [event.message for event in outbox.collect({}).events if isinstance(event, Warned)]
    assert warnings == ["something was not checked"]
