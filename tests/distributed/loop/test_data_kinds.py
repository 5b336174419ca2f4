"""Streams, samples drawn by weight, and no validation set: equal losses in every layout, and resumed in another."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.conformance.cases import DDP, Case, assignment, having
from helpers.conformance.layouts import EVERY, LAYOUTS, SGD
from helpers.conformance.training import CPU
from helpers.jobs.toys import Toy
from helpers.ranks.loops import Ran, evaluation, loop_of, losses_by_step, ran, run_loop
from helpers.ranks.streams import Measured, Plain, StreamToy, Unvalidated, Weighed, shuffled
from helpers.records.runs import in_campaign
from orchestrator.config.redact import Redactor
from orchestrator.protocol.messages import Assignment, EvalPoint
from orchestrator.records.json_file import write_json
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import load
from orchestrator.strategies import registry
from orchestrator.strategies.base import StepResult
from orchestrator.worker.control.control import Outbox, StepGate
from orchestrator.worker.control.rendezvous import context_of
from orchestrator.worker.loop import Loop

EVERYWHERE = ("ddp-2", "fsdp-2", "ddp-4", "model_parallel-2", "1F1B-2", "GPipe-2x2", "parameter_server-2+2")


def loop(gang, job, path: Path, world_size: int, *, checkpoint: Path | None = None, every: int = 0) -> list[Ran]:
    case = Case(job=job, options=DDP, train=having(steps=12, global_batch_size=36, eval_every=4))
    return gang.run(run_loop, case, path, checkpoint, every, world_size=world_size)


def checkpoints(path: Path) -> list[Path]:
    return sorted((path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("job", "warning"),
    [
        (StreamToy(kind="Epochs"), "reading past 88 samples of the stream to the next one; with state_dict() and"),
        (StreamToy(kind="Stateful"), None),
        (Weighed(), None),
        *in_campaign(
            (StreamToy(kind="Plain"), "reading past 288 samples of the stream to the next one; with state_dict() and"),
            (
                StreamToy(kind="Counting"),
                "reading past 288 samples of the stream to the next one; with state_dict() and",
            ),
            (StreamToy(kind="Unsavable"), "reading past 288 samples of the stream to the next one"),
        ),
    ],
    ids=lambda value: value.__class__.__name__ + getattr(value, "kind", "") if isinstance(value, Toy) else "",
)
def test_a_run_resumes_at_the_next_sample_on_another_number_of_workers(gang, tmp_path, job, warning):
    alone = loop(gang, job, tmp_path / "alone", 1)
    expected = losses_by_step(alone)
    assert len(expected) == 12
    assert expected[12] < expected[1]
    for first, second in ((2, 3), (3, 1)):
        path = tmp_path / f"{first}"
        whole = loop(gang, job, path, first, every=8)
        assert losses_by_step(whole) == pytest.approx(expected, rel=SGD)
        assert evaluation(whole) == pytest.approx(evaluation(alone), rel=SGD)
        checkpoint = checkpoints(path)[0]
        resumed = loop(gang, job, tmp_path / f"{first} to {second}", second, checkpoint=checkpoint)
        rest = {step: loss for step, loss in expected.items() if step > 8}
        assert losses_by_step(resumed) == pytest.approx(rest, rel=SGD)
        warnings = [w for w in resumed[0].warnings if "not plain JSON" not in w]
        assert [warning in w for w in warnings] == ([] if warning is None else [True])
        assert not any(r.warnings for r in resumed[1:]), "one rank warns"


def replaced_after_step_5(rank: int, case: Case, run_dir: str) -> tuple[Ran, int]:
    """Both ranks fail in step 6, when they have read its batch; then rank 1 is a new process, as it were.

    Returns what this rank saw, and how many samples of its last stream it read.
    """
    Path(run_dir, "checkpoints").mkdir(parents=True, exist_ok=True)
    orders = assignment(rank=rank, world_size=2, generation=1, store_port=0, run_dir=run_dir, case=case)
    gate, outbox = StepGate(timeout_s=60), Outbox(Redactor())

    def new_loop(orders: Assignment) -> Loop:
        strategy = registry.load("ddp").create(context_of(orders, CPU), case.job)
        return loop_of(orders, case, strategy, outbox=outbox, gate=gate)

    loop = new_loop(orders)
    train_step, calls = loop.strategy.train_step, itertools.count(1)

    def failing(*args: Any, **options: Any) -> StepResult:
        if next(calls) == 6:
            raise ConnectionError
        return train_step(*args, **options)

    loop.strategy.train_step = failing  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        loop.run({})
    loop.strategy.close()
    again = replace(orders, generation=2, sources=(0, 0), source_step=5)
    write_json(RunDir(Path(run_dir)).fence_file, {"generation": again.fence})
    if rank == 0:
        loop.reassign(again)
    else:
        loop.finish(timeout_s=60)
        loop = new_loop(again)
    outcome = loop.run({})
    loop.strategy.close()
    loop.finish(timeout_s=60)
    assert loop._data is not None
    reader = loop._data._reader
    assert reader is not None
    return ran(outcome, outbox, training=True, owns_reducer=False), reader._stream.yielded


@pytest.mark.parametrize("kind", ["Plain", "Counting", "Epochs", "Stateful"])
def test_a_run_continues_at_the_next_sample_after_a_failure(gang, tmp_path, kind):
    case = Case(job=StreamToy(kind=kind), options=DDP, train=having(steps=12, global_batch_size=36))
    expected = losses_by_step(gang.run(run_loop, case, tmp_path / "1", world_size=1))
    answers = gang.run(replaced_after_step_5, case, str(tmp_path / "2"), world_size=2)
    assert losses_by_step([seen for seen, _ in answers]) == pytest.approx(expected, rel=SGD)
    steps_read = {"Stateful": (6 + 7, 7), "Plain": (12, 12), "Counting": (12, 12)}.get(kind)
    if steps_read is not None:
        assert tuple(yielded for _, yielded in answers) == tuple(36 * steps for steps in steps_read)
    assert len(answers[0][0].warnings) == (kind != "Stateful")


def test_a_checkpoint_has_the_state_of_the_stream(gang, tmp_path):
    loop(gang, StreamToy(kind="Stateful"), tmp_path, 2, every=8)
    stream = load(checkpoints(tmp_path)[0]).meta["stream"]
    assert stream == {"position": 288, "epoch": 1, "state": {"done": 88, "shards": {"open": [0, 2]}}}


def test_a_state_that_is_not_kept_is_warned_of_once(gang, tmp_path):
    ranks = loop(gang, StreamToy(kind="Unsavable"), tmp_path, 2, every=4)
    (warning,) = ranks[0].warnings
    assert "state_dict() of the stream is not plain JSON" in warning
    assert "stream" not in load(checkpoints(tmp_path)[0]).meta


class OwnOrder(Plain):
    """Another order on each rank."""

    def order(self) -> Sequence[Any]:
        return shuffled(self.items, dist.get_rank())


@dataclass(frozen=True, kw_only=True)
class InOwnOrder(Measured):
    split: str

    def dataset(self, split: str) -> Any:
        return (OwnOrder if split == self.split else Plain)(super().dataset(split).items)


@pytest.mark.parametrize("layout", ["ddp-2", *in_campaign("1F1B-2", "fsdp-2", "hogwild-2", "parameter_server-2+2")])
@pytest.mark.parametrize("split", ["train", "val"])
def test_ranks_that_read_a_stream_in_orders_of_their_own_are_told_of(gang, tmp_path, split, layout):
    train = having(steps=3, global_batch_size=36, eval_every=3)
    case = EVERY[layout].of(Case(job=InOwnOrder(split=split), train=train))
    ranks = gang.run(run_loop, case, tmp_path, world_size=EVERY[layout].world_size)
    expected = f"job.dataset({split!r}): ranks 0 and 1 have read different samples of the stream"
    assert [expected in w for r in ranks for w in r.warnings if "have read" in w] == [True]


def test_a_stream_has_no_epoch_to_log(gang, tmp_path):
    (streamed,) = loop(gang, StreamToy(), tmp_path / "stream", 1)
    (indexed,) = loop(gang, Toy(), tmp_path / "index", 1)
    assert "train/epoch" not in streamed.points[0].metrics
    assert "train/epoch" in indexed.points[0].metrics


@pytest.mark.parametrize("names", [("ddp-4", "1F1B-2"), *in_campaign((EVERYWHERE,))])
def test_every_layout_evaluates_each_sample_of_a_stream_once(gang, tmp_path, names):
    found = {}
    sizes = {name: LAYOUTS[name].world_size for name in ("single", *names)} | {"1F1B-4": 3}
    for name, world_size in sizes.items():
        train = having(steps=4, global_batch_size=16, eval_splits=("val", "train"))
        case = LAYOUTS[name].of(Case(job=StreamToy(), train=train))
        ranks = gang.run(run_loop, case, tmp_path / name, world_size=world_size)
        found[name] = evaluation(ranks)
        assert (found[name]["weight"], found[name]["train weight"]) == (33, 200)
        assert found[name] == pytest.approx(found["single"], rel=SGD)


@pytest.mark.parametrize("job", [StreamToy(kind="Epochs"), Weighed()], ids=["stream", "weights"])
@pytest.mark.parametrize("names", [("ddp-2", "1F1B-2"), *in_campaign((EVERYWHERE,))])
def test_every_layout_trains_and_evaluates_the_same_batches(gang, tmp_path, job, names):
    limits = {"limit_batches": 1, "limit_eval_batches": 1, "eval_splits": ("train", "val")}
    train = having(steps=5, global_batch_size=16, eval_every=4, **limits)
    found, checkpoint = {}, None
    for name in ("single", *names):
        world_size, case = LAYOUTS[name].world_size, LAYOUTS[name].of(Case(job=job, train=train))
        ranks = gang.run(run_loop, case, tmp_path / name, checkpoint, 3, world_size=world_size)
        checkpoint = checkpoint or str(checkpoints(tmp_path / name)[0])  # the other layouts continue
        after_step_4 = evaluation([replace(r, points=[p for p in r.points if p.step <= 4]) for r in ranks])
        found[name] = {step: loss for step, loss in losses_by_step(ranks).items() if step > 3}
        assert found[name] == pytest.approx({step: found["single"][step] for step in (4, 5)}, rel=SGD)
        assert (after_step_4["weight"], after_step_4["train weight"]) == (16, 16)
        assert after_step_4["train loss"] / 16 == pytest.approx(found[name][5], rel=SGD), "what the next step trains on"


@pytest.mark.parametrize(
    "layout", ["ddp-2", *in_campaign("GPipe-2x2", "single", "model_parallel-2", "parameter_server-2+2")]
)
def test_no_validation_set_no_evaluation(gang, tmp_path, layout):
    options, world_size = LAYOUTS[layout].options, LAYOUTS[layout].world_size
    train = having(steps=6, global_batch_size=16, eval_every=2)
    runs = {}
    for job in (Unvalidated(), Toy()):
        case, path = Case(job=job, options=options, train=train), tmp_path / type(job).__name__
        runs[type(job)] = gang.run(run_loop, case, path, None, 3, world_size=world_size)
    unvalidated = runs[Unvalidated]
    assert not any(isinstance(p, EvalPoint) for r in unvalidated for p in r.points)
    assert any(isinstance(p, EvalPoint) for r in runs[Toy] for p in r.points)
    assert [r.outcome.status for r in unvalidated] == ["done"] * world_size
    assert losses_by_step(unvalidated) == losses_by_step(runs[Toy])
    (warning,) = unvalidated[0].warnings
    assert "job.dataset('val') returns None" in warning
    assert warning.endswith("train.eval_every=2 has no effect")
    half_way = checkpoints(tmp_path / "Unvalidated")[0]
    case = Case(job=Unvalidated(), options=options, train=train)
    resumed = gang.run(run_loop, case, tmp_path / "resumed", half_way, world_size=world_size)
    rest = {step: loss for step, loss in losses_by_step(unvalidated).items() if step > 3}
    assert losses_by_step(resumed) == pytest.approx(rest, rel=SGD)
