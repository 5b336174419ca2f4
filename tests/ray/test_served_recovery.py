"""Workers and servers die where the parameters are on servers, or in memory that all workers have in common."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.conformance.cases import Case, having
from helpers.conformance.reference import trained_plainly
from helpers.ranks.job_trials import one_thread
from helpers.records.runs import events, in_campaign, losses
from jobs.digits import Digits

STEPS = 24
WORDS = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=8",
    "job.lr=0.05",
    "recovery.backoff_s=0.1",
    "recovery.hang_min_s=30",
    "recovery.hang_max_s=60",
)
SERVER = (*WORDS, "strategy=parameter_server", "strategy.num_workers=2", "strategy.num_shards=2")
NO_CHECKPOINT = "checkpoint.every=0"
NORMED = "job._target_=helpers.jobs.normed_job.Normed"
"""A model with buffers."""
FIRST_SERVER = 2
UNTRAINED_LOSS = math.log(10)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, ...], dict[str, torch.Tensor]]:
    return {}


@pytest.fixture
def assert_undisturbed(
    run: Callable[..., Any], undisturbed: dict[tuple[str, ...], dict[str, torch.Tensor]]
) -> Callable[..., None]:
    """The run's last weights are, bit for bit, those of a synchronous run without faults."""

    def compare(run_dir: Path, *words: str) -> None:
        if words not in undisturbed:
            undisturbed[words] = weights(run(*SERVER, *words).run_dir)
        final = weights(run_dir)
        assert final.keys() == undisturbed[words].keys()
        assert [n for n in final if not torch.equal(final[n], undisturbed[words][n])] == []

    return compare


def assert_learned(result: Any) -> None:
    assert result.exit_code == 0, result.reason
    assert result.summary["steps"] == STEPS
    assert losses(result.run_dir)[STEPS] < 0.97 * UNTRAINED_LOSS


def assert_as_plain(run_dir: Path) -> None:
    job, train = Digits(lr=0.05), having(steps=STEPS, global_batch_size=64)
    with one_thread():
        expected = trained_plainly(Case(job=job, train=train, seed=0)).steps.model
    torch.testing.assert_close(weights(run_dir), expected, rtol=1e-3, atol=1e-4)


def recoveries(result: Any) -> list[tuple[list[int], bool]]:
    assert result.exit_code == 0, result.reason
    return [(e["replaced"], e["in_place"]) for e in events(result.run_dir, "recovered")]


@pytest.mark.parametrize(("rank", "words"), in_campaign((0, ()), (0, (NORMED,)), (1, (NORMED,)), (1, ())))
def test_a_killed_worker_of_synchronous_shards(
    run: Any, assert_undisturbed: Any, rank: int, words: tuple[str, ...]
) -> None:
    result = run(*SERVER, NO_CHECKPOINT, *words, f"recovery.chaos=[kill@13:{rank}]")
    assert recoveries(result) == [([rank], True)]
    (lost,) = events(result.run_dir, "worker_lost")
    (recovered,) = events(result.run_dir, "recovered")
    assert recovered["step"] in (11, 12), "its last push may have been on its way"
    assert lost["step"] in (12, 13), "the other one has ended a step when it has pushed"
    assert result.summary["steps_lost"] == lost["step"] - recovered["step"]
    assert_undisturbed(result.run_dir, *words)


@pytest.mark.parametrize(("rank", "consistency"), in_campaign((0, "stale"), (0, "async"), (1, "async"), (1, "stale")))
def test_a_killed_worker_of_asynchronous_shards(run: Any, consistency: str, rank: int) -> None:
    result = run(*SERVER, NO_CHECKPOINT, f"strategy.consistency={consistency}", f"recovery.chaos=[kill@13:{rank}]")
    assert recoveries(result) == [([rank], True)]
    (recovered,) = events(result.run_dir, "recovered")
    assert 0 < recovered["step"] <= 12, "the step of the slower one"
    assert_learned(result)


@pytest.mark.campaign
def test_workers_die_one_after_another(run: Any, assert_undisturbed: Any) -> None:
    result = run(*SERVER, NO_CHECKPOINT, "recovery.chaos=[kill@8:1:eval,kill@13:0,kill@19:1]")
    assert recoveries(result) == [([1], True), ([0], True), ([1], True)]
    assert_undisturbed(result.run_dir)


@pytest.mark.parametrize(
    ("server", "consistency"),
    [(0, "sync"), *in_campaign((1, "async"), (0, "stale"), (0, "async"), (1, "sync"), (1, "stale"))],
)
def test_a_killed_server_is_in_its_neighbours_memory(run: Any, server: int, consistency: str) -> None:
    rank = FIRST_SERVER + server
    words = (f"strategy.consistency={consistency}", "recovery.peer_copy_every=4", f"recovery.chaos=[kill@15:{rank}]")
    result = run(*SERVER, NO_CHECKPOINT, *words)
    assert recoveries(result) == [([rank], True)]
    (recovered,) = events(result.run_dir, "recovered")
    assert recovered["step"] in (8, 12), "the last copy may have been on its way"
    assert_learned(result)
    if consistency == "sync":
        assert_as_plain(result.run_dir)


@pytest.mark.campaign
def test_without_copies_a_killed_server_comes_from_the_checkpoint(run: Any, assert_undisturbed: Any) -> None:
    result = run(*SERVER, NORMED, "checkpoint.every=8", f"recovery.chaos=[kill@15:{FIRST_SERVER}]")
    assert [in_place for _, in_place in recoveries(result)] == [False]
    (recovered,) = events(result.run_dir, "recovered")
    assert recovered["step"] in (0, 8)
    assert_undisturbed(result.run_dir, NORMED)


@pytest.mark.parametrize(
    ("rank", "strategy"), in_campaign((0, "hogwild"), (1, "locked_sgd"), (1, "hogwild"), (0, "locked_sgd"))
)
def test_a_killed_worker_leaves_the_memory_that_all_have(run: Any, strategy: str, rank: int) -> None:
    words = (f"strategy={strategy}", "strategy.num_workers=2", f"recovery.chaos=[kill@13:{rank}]")
    result = run(*WORDS, NO_CHECKPOINT, *words)
    assert recoveries(result) == [([rank], True)]
    (recovered,) = events(result.run_dir, "recovered")
    assert 0 < recovered["step"] <= 12, "the step of the slower one"
    assert_learned(result)
