"""Workers die, hang and raise; the run goes on where it was."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.records.runs import events, in_campaign, losses, pid_of_rank, series, wait_for
from orchestrator.state.checkpoint import load, path_of

STEPS = 24
WORDS = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=8",
    "checkpoint.every=8",
    "job.hidden=16",
    "recovery.backoff_s=0.1",
    "recovery.hang_min_s=30",
    "recovery.hang_max_s=60",
)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(load(path_of(run_dir / "checkpoints", STEPS)).model)


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, ...], Any]:
    return {}


@pytest.fixture
def reference(run: Callable[..., Any], undisturbed: dict[tuple[str, ...], Any]) -> Callable[..., Any]:
    """The weights and losses of a run without faults, made once."""

    def get(*words: str) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
        if words not in undisturbed:
            result = run(*WORDS, *words)
            assert result.exit_code == 0, result.reason
            undisturbed[words] = weights(result.run_dir), losses(result.run_dir)
        return undisturbed[words]  # type: ignore[no-any-return]

    return get


def assert_same_curve(run_dir: Path, expected: dict[int, float]) -> None:
    """Every point is there, also those that a rank had not handed over when it died."""
    assert losses(run_dir) == {step: pytest.approx(loss, rel=1e-6) for step, loss in expected.items()}


@pytest.mark.parametrize(
    ("rank", "spares"), [pytest.param(1, 0, marks=pytest.mark.fast), *in_campaign((0, 1), (0, 0), (1, 1))]
)
def test_a_killed_worker_costs_no_step(run: Any, reference: Any, rank: int, spares: int) -> None:
    reporting = "helpers.jobs.faulty_jobs"  # which changes nothing
    words = (*WORDS, f"job._target_={reporting}.Reporting", f"callbacks=[{reporting}.Begins]")
    faults = (f"recovery.chaos=[kill@13:{rank}]", f"recovery.spares={spares}", "cluster.heartbeat_s=5")
    result = run(*words, *faults)
    assert (result.status, result.exit_code) == ("FINISHED", 0), result.reason
    expected, curve = reference()
    final = weights(result.run_dir)
    assert final.keys() == expected.keys()
    assert [n for n in final if not torch.equal(final[n], expected[n])] == []
    assert_same_curve(result.run_dir, curve)
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (1, 0)
    (lost,) = events(result.run_dir, "worker_lost")
    assert (lost["rank"], "died" in lost["reason"]) == (rank, True)
    (recovered,) = events(result.run_dir, "recovered")
    assert (recovered["step"], recovered["replaced"], recovered["in_place"]) == (12, [rank], True)
    assert recovered["seconds"] == pytest.approx(result.summary["recovery_s"][0])
    assert [e["generation"] for e in events(result.run_dir, "generation_started")] == [1, 2]
    warnings = [e["message"] for e in events(result.run_dir, "warned")]
    assert len([w for w in warnings if "job.on_step_end raised RuntimeError: the service" in w]) == 1 + (rank == 0)
    begins = sorted((result.run_dir / "begins").read_text().splitlines())
    assert begins == [f"generation {n}: rank {r} after {step}" for n, step in ((1, 0), (2, 12)) for r in (0, 1)]
    samples = [(e["step"], e["name"]) for e in events(result.run_dir, "sample_saved")]
    assert samples == [(step, name) for step in (8, 16, 24) for name in ("image", "text")]
    assert series(result.run_dir, "train/accuracy").keys() == losses(result.run_dir).keys()


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["stop", "raise", "exit", "segv", "sleep", "gil"])
def test_a_run_recovers_from_every_kind_of_failure(run: Any, reference: Any, kind: str) -> None:
    soon = ("recovery.hang_min_s=2", "recovery.hang_max_s=20") if kind in ("sleep", "gil") else ()
    result = run(*WORDS, f"recovery.chaos=[{kind}@13:1]", "cluster.stopped_timeout_s=1", *soon)
    assert result.exit_code == 0, result.reason
    assert_same_weights(result.run_dir, reference()[0])
    assert result.summary["steps_lost"] == 0
    (lost,) = events(result.run_dir, "worker_lost")
    assert lost["rank"] == 1
    if kind == "segv":
        assert "crashed: SIGSEGV (Segmentation fault) in string_at" in lost["reason"]
        assert "control.py" in lost["log_tail"], "the Python stack"
        assert "ffi_call" in lost["log_tail"], "the C stack"
    if kind == "stop":
        assert "is stopped (SIGSTOP" in lost["reason"]
    if kind in ("sleep", "gil"):
        assert "no progress for" in lost["reason"]
        stacks = (result.run_dir / "logs" / "stacks-generation-1.txt").read_text()
        assert "training thread:" in stacks.split("==== rank 1")[0]


def assert_same_weights(run_dir: Path, expected: dict[str, torch.Tensor]) -> None:
    final = weights(run_dir)
    assert final.keys() == expected.keys()
    assert [n for n in final if not torch.equal(final[n], expected[n])] == []


def assert_close_weights(run_dir: Path, expected: dict[str, torch.Tensor]) -> None:
    """Those of another strategy, which rounds otherwise."""
    torch.testing.assert_close(weights(run_dir), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.campaign
def test_a_job_that_makes_its_own_updates_continues_too(run: Any) -> None:
    words = (
        *(word for word in WORDS if not word.startswith("job.")),
        "job._target_=helpers.jobs.step_toys.Distillation",
        "train.global_batch_size=25",
        "train.ema_decay=0.9",
    )
    alone = run("strategy=single", *words)
    assert alone.exit_code == 0, alone.reason
    result = run("strategy=ddp", *words, "recovery.chaos=[kill@13:1]")
    assert result.exit_code == 0, result.reason
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (1, 0)
    curve, expected = losses(result.run_dir), losses(alone.run_dir)
    assert len(curve) >= STEPS // 2
    assert curve == {step: pytest.approx(expected[step], rel=1e-5) for step in curve}
    for name in ("val/loss", "val/ema_loss"):
        evaluated = series(alone.run_dir, name)
        assert evaluated.keys() == {8, 16, 24}
        found = series(result.run_dir, name)  # without those that the lost rank had not reported
        assert found.keys() >= {16, 24}
        assert found == {step: pytest.approx(evaluated[step], rel=1e-4) for step in found}
    assert result.summary["val_ema_loss"] > result.summary["val_loss"], "the average lags behind"


@pytest.mark.parametrize(
    "faults",
    [
        "kill@8:0:checkpoint,stop@13:1",
        *in_campaign(
            "kill@8:0:checkpoint",
            "kill@13:1,kill@12:0:build",
            "stop@0:1:join",
            f"kill@{STEPS}:0:end",
            "kill@0:1:join",
            "kill@0:1:build",
            "kill@8:1:eval",
            f"kill@{STEPS}:1:eval",
            f"kill@{STEPS}:0:checkpoint",
            "kill@13:1,kill@20:0,kill@22:1",
            "kill@13:0,kill@13:1",
        ),
    ],
)
def test_a_fault_in_any_phase_changes_no_weight(run: Any, reference: Any, faults: str) -> None:
    result = run(*WORDS, f"recovery.chaos=[{faults}]", "cluster.stopped_timeout_s=1")
    assert result.exit_code == 0, result.reason
    assert_same_weights(result.run_dir, reference()[0])
    assert result.summary["restarts"] >= (0 if "@0:" in faults else 1)
    if faults.endswith("stop@13:1"):
        assert "is stopped (SIGSTOP" in events(result.run_dir, "worker_lost")[-1]["reason"]


@pytest.mark.campaign
def test_a_rank_that_does_not_join_is_named_by_those_that_wait_and_replaced(run: Any, reference: Any) -> None:
    result = run(*WORDS, "recovery.chaos=[sleep@0:1:join]", "cluster.rendezvous_timeout_s=12")
    assert result.exit_code == 0, result.reason
    (lost,) = events(result.run_dir, "worker_lost")
    assert lost["rank"] == 1
    assert lost["reason"] == "no progress while the others waited 12 s for it (cluster.rendezvous_timeout_s)"
    assert_same_weights(result.run_dir, reference()[0])


def test_a_stop_while_a_worker_is_replaced_saves_what_the_survivor_holds(run: Any, tmp_path: Path) -> None:
    def stop() -> None:
        (path,) = wait_for(lambda: list(tmp_path.glob("outputs/*/*/events.jsonl")), "a run")
        wait_for(lambda: events(path.parent, "worker_lost"), "the loss of a worker")
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    result = run("train.steps=2000", "checkpoint.every=1000", "recovery.chaos=[kill@13:1]", "recovery.backoff_s=0.1",
                 "cluster.stop_grace_s=30", "job._target_=helpers.jobs.leisurely_job.Leisurely")  # fmt: skip
    stopper.join(timeout=60)
    assert (result.status, result.exit_code) == ("KILLED", 130), result.reason
    (saved,) = events(result.run_dir, "checkpoint_saved")
    assert 12 <= saved["step"] < 1000
    assert result.reason == f"stopped by SIGINT at step {saved['step']}"


@pytest.mark.campaign
def test_a_resumed_run_that_loses_a_worker_as_it_starts_begins_from_its_checkpoint(run: Any, reference: Any) -> None:
    """Who has built a model and not yet loaded it has nothing to hand over."""
    first = run(*WORDS, "recovery.chaos=[kill@13:1]", "recovery.max_failures=0")
    assert first.exit_code == 1
    result = run(*WORDS, f"resume={first.run_dir}", "recovery.chaos=[kill@0:1:build]")
    assert result.exit_code == 0, result.reason
    (recovered,) = events(result.run_dir, "recovered")
    assert (recovered["in_place"], recovered["step"]) == (False, 8)
    assert_same_weights(result.run_dir, reference()[0])


@pytest.mark.campaign
def test_a_crash_loop_ends_with_its_cause_said_once(run: Any) -> None:
    faults = ",".join(["kill@13:1"] * 5)
    result = run(*WORDS, f"recovery.chaos=[{faults}]")
    assert (result.status, result.exit_code) == ("FAILED", 1)
    assert "3 failures in a row without progress" in result.reason
    assert len(events(result.run_dir, "worker_lost")) == 2
    assert len(events(result.run_dir, "worker_failed")) == 1


@pytest.mark.campaign
def test_an_error_repeated_at_the_same_step_ends_the_run(run: Any) -> None:
    result = run(*WORDS, "recovery.chaos=[raise@13:1,raise@13:1]")
    assert (result.status, result.exit_code) == ("FAILED", 1)
    assert "the same error occurred twice at the same step" in result.reason


@pytest.mark.parametrize("strategy", ["fsdp", *in_campaign("single", "pipeline", "fsdp_pipeline")])
def test_other_strategies_go_on_from_the_checkpoint(run: Any, reference: Any, strategy: str) -> None:
    rank = 0 if strategy == "single" else 1
    result = run(*WORDS, f"strategy={strategy}", f"recovery.chaos=[kill@13:{rank}]")
    assert result.exit_code == 0, result.reason
    assert result.summary["restarts"] == 1
    assert result.summary["steps"] == STEPS
    (recovered,) = events(result.run_dir, "recovered")
    assert recovered["step"] in (0, 8)  # the checkpoint may not have been whole yet
    assert not recovered["in_place"]
    assert_close_weights(result.run_dir, reference()[0])


@pytest.mark.campaign
def test_a_survivor_that_starts_from_a_checkpoint_frees_its_model_before_it_builds_another(run: Any) -> None:
    words = ("job._target_=helpers.jobs.faulty_jobs.OneModel", "strategy.comm_hook=powersgd")
    result = run(*WORDS, *words, "recovery.chaos=[kill@13:1]")
    assert result.exit_code == 0, result.reason
    (recovered,) = events(result.run_dir, "recovered")
    assert (recovered["in_place"], recovered["replaced"]) == (False, [1])


@pytest.mark.campaign
@pytest.mark.parametrize(("strategy", "size"), [("ddp_pipeline", "pipeline_parallel_size"), ("hsdp", "shard_size")])
def test_a_part_of_the_model_comes_from_its_replica(run: Any, reference: Any, strategy: str, size: str) -> None:
    words = (f"strategy={strategy}", "strategy.num_workers=4", f"strategy.{size}=2", "job.depth=3")
    result = run(*WORDS, *words, "recovery.chaos=[raise@13:1,kill@19:2]")
    assert result.exit_code == 0, result.reason
    assert_same_weights(result.run_dir, reference(*words)[0])
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (2, 0)
    assert [(e["step"], e["in_place"]) for e in events(result.run_dir, "recovered")] == [(12, True), (18, True)]


@pytest.mark.campaign
def test_two_parts_that_are_lost_at_once_come_from_their_replicas(run: Any, reference: Any) -> None:
    words = ("strategy=hsdp", "strategy.num_workers=4", "strategy.shard_size=2", "job.depth=3")
    result = run(*WORDS, *words, "recovery.chaos=[kill@13:1,kill@13:2]")
    assert result.exit_code == 0, result.reason
    assert_same_weights(result.run_dir, reference(*words)[0])
    assert result.summary["steps_lost"] == 0
    assert {rank for e in events(result.run_dir, "recovered") for rank in e["replaced"]} == {1, 2}


@pytest.mark.campaign
def test_a_straggler_is_named_after_ten_seconds(run: Any) -> None:
    words = ("train.steps=36", "train.log_every=2", "train.eval_every=0")
    result = run("job._target_=helpers.jobs.straggling_job.Straggling", *words)
    assert result.exit_code == 0, result.reason
    (found,) = events(result.run_dir, "straggler_found")
    assert found["rank"] == 1
    assert found["node"].startswith(f"{socket.gethostname()} (")
    assert 10 + 20 <= found["step"] <= 36, "ten steps warm up"
    assert found["slower_by"] > 2
    assert found["throughput_loss"] > 0.5
    assert found["compute_ms"] > 400 > found["data_wait_ms"]


@pytest.mark.campaign
def test_a_straggler_is_replaced_if_configured(run: Any, tmp_path: Path) -> None:
    job = ("job._target_=helpers.jobs.straggling_job.SlowProcess", f"job.who={tmp_path / 'who'}")
    words = ("train.steps=60", "train.log_every=2", "train.eval_every=0", "recovery.replace_stragglers=true")
    result = run(*job, *words)
    assert result.exit_code == 0, result.reason
    (lost,) = events(result.run_dir, "worker_lost")
    assert (lost["rank"], "times slower than the others" in lost["reason"]) == (1, True)
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (1, 0)


@pytest.mark.campaign
def test_a_thousand_clean_steps_raise_no_alarm(run: Any) -> None:
    words = ("train.steps=1000", "train.eval_every=200", "checkpoint.every=50", "recovery.hang_min_s=2")
    result = run("job.hidden=16", *words)
    assert result.exit_code == 0, result.reason
    assert (result.summary["restarts"], result.summary["effective_time_pct"]) == (0, 100)
    assert events(result.run_dir, "worker_lost") == []


@pytest.mark.campaign
@pytest.mark.parametrize("pause", ["val_s", "train_s"])
@pytest.mark.parametrize("words", [("strategy=ddp",), ("strategy=hogwild", "data.num_workers=1")])
def test_a_slow_batch_of_a_new_loader_is_not_a_hang(run: Any, pause: str, words: tuple[str, ...]) -> None:
    """In the evaluation, rank 1 has ended its share long before rank 0, and waits for it in the next step."""
    words = (*words, "train.steps=40", "train.eval_every=20", "recovery.hang_min_s=1", "cluster.heartbeat_s=0.2")
    result = run(
        "job._target_=helpers.jobs.stalling_job.Stalling", f"job.{pause}=1.5", *words, "recovery.max_failures=0"
    )
    assert result.exit_code == 0, result.reason
    assert events(result.run_dir, "worker_lost") == []


@pytest.mark.campaign
def test_a_rank_that_hangs_at_the_same_step_again_gets_twice_the_time(run: Any) -> None:
    words = ("train.steps=12", "train.eval_every=0", "recovery.hang_min_s=1", "recovery.hang_max_s=3")
    result = run("job._target_=helpers.jobs.stalling_job.Stalling", "job.val_s=4.5", *words)
    assert result.exit_code == 0, result.reason
    (lost,) = events(result.run_dir, "worker_lost")
    assert "in phase eval (recovery.hang_max_s): " in lost["reason"]


def test_a_spare_has_loaded_the_job_before_it_is_needed(run: Any, tmp_path: Path) -> None:
    enrolled = tmp_path / "enrolled"
    enrolled.mkdir()
    job = (
        "job._target_=helpers.jobs.enrolling_job.Enrolling",
        f"job.folder={enrolled}",
        "job.wanted=4",
    )  # the driver is one of them
    words = ("train.steps=4", "train.eval_every=0", "recovery.hang_min_s=150", "recovery.max_failures=0")
    result = run(*job, *words, "strategy.num_workers=2", "recovery.spares=1")
    assert result.exit_code == 0, result.reason


@pytest.mark.campaign
def test_a_worker_that_stands_still_for_a_while_loses_no_point(run: Any, tmp_path: Path) -> None:
    def pause() -> None:
        pid = pid_of_rank(tmp_path, 1, after_step=40)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        paused.set()

    paused = threading.Event()
    pausing = threading.Thread(target=pause, daemon=True)
    pausing.start()
    result = run(
        "job._target_=helpers.jobs.leisurely_job.Leisurely", "train.steps=120", "train.log_every=1",
        "train.eval_every=0", "cluster.stopped_timeout_s=60",
    )  # fmt: skip
    pausing.join(10)
    assert paused.is_set()
    assert not pausing.is_alive()
    assert result.exit_code == 0, result.reason
    assert events(result.run_dir, "worker_lost") == []
    assert sorted(losses(result.run_dir)) == list(range(1, 121))


@pytest.mark.parametrize(
    ("strategy", "second"),
    [
        (("strategy=pipeline",), ()),
        *in_campaign(
            (("strategy=pipeline",), ("kill@20:0",)),
            (("strategy=fsdp",), ("kill@20:0",)),
            (("strategy=fsdp_pipeline", "strategy.num_workers=4"), ("kill@20:0",)),
            (("strategy=ddp", "strategy.shard_optimizer=true"), ("kill@20:0",)),
        ),
    ],
)
def test_a_part_without_replicas_gets_its_state_from_its_neighbours_memory(
    run: Any, reference: Any, strategy: Any, second: Any
) -> None:
    words = (*strategy, "checkpoint.every=0")
    base = tuple(w for w in WORDS if not w.startswith("checkpoint"))
    faults = ",".join(("kill@11:1", *second))
    result = run(*base, *words, "recovery.peer_copy_every=3", f"recovery.chaos=[{faults}]")
    assert result.exit_code == 0, result.reason
    assert_close_weights(result.run_dir, reference()[0])
    found = events(result.run_dir, "recovered")
    assert [e["in_place"] for e in found] == [True] * (1 + len(second))
    expected = [(6, 9), (15, 18)][: len(found)]  # the last copy may have been on its way
    assert [step for e, steps in zip(found, expected, strict=True) if (step := e["step"]) not in steps] == []
    assert result.summary["steps_lost"] == sum(failed - e["step"] for failed, e in zip((10, 19), found, strict=False))
