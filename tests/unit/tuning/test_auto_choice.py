"""``strategy=auto`` on the driver, before anything runs: the candidates of a job, and the record of the choice."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from helpers.conformance.cases import CLUSTER, Case, config_of, plan_of
from helpers.jobs.step_toys import GAN
from helpers.records.job_profile import PROFILE
from jobs.digits import Digits
from jobs.gpt import GPT
from jobs.names import Names
from orchestrator.config.compose import compose
from orchestrator.config.overrides import with_strategy
from orchestrator.config.redact import Redactor
from orchestrator.driver.auto.brief_runs import without_samples
from orchestrator.driver.auto.chooser import Chooser
from orchestrator.driver.auto.decision import Decision, chosen_before
from orchestrator.driver.checked_runs import check_all
from orchestrator.driver.process.run_context import FailureSink
from orchestrator.job import Job, has_training_step
from orchestrator.planning.plan import Node, make_plan
from orchestrator.protocol.events import Event, RunEnded, Warned
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.tuning.choice import Contender
from orchestrator.tuning.predict import Prediction

pytestmark = pytest.mark.slow

SECRET = "correct-horse"
HERE = Node(node_id="here", name="here", cpus=8, gpus=0)
WITH_GPUS = Node(node_id="there", name="there", cpus=8, gpus=4)


def nothing_runs(*_: Any) -> NoReturn:
    raise AssertionError("a run was started")


def chooser(job: Job, *overrides: str, node: Node = HERE) -> Chooser:
    errors: list[str] = []
    composed, _ = compose(["strategy=auto", "strategy.num_workers=2", *overrides], errors, registry.config_class)
    assert composed is not None, errors
    config = config_of(Case(job=job), 1, strategy=composed.strategy, cluster=replace(CLUSTER, device="auto"))
    redactor = Redactor()
    redactor.learn({"password": SECRET})
    plan = make_plan(config, registry.load("auto"), (node,), oversubscribe_cpus=True)
    return Chooser(config, job, plan, (node,), nothing_runs, redactor=redactor, oversubscribe_cpus=True)


def test_a_job_with_its_own_training_step_has_two_candidates_and_no_predictions() -> None:
    found = chooser(GAN()).choose(measure=False)
    valid = [c.name for c in found.contenders if not c.refused]
    assert valid == ["single", "ddp num_workers=2"]
    assert all("Job.training_step" in c.refused for c in found.contenders if c.refused)
    assert not any(c.prediction for c in found.contenders)
    assert (found.plan.strategy, found.plan.threads_per_worker) == ("single", HERE.cpus)


def test_a_strategy_that_would_leave_the_gpus_unused_is_refused() -> None:
    words = ("strategy.candidates=[ddp,parameter_server]",)
    assert not any(c.refused for c in chooser(Digits(), *words).contenders())
    ddp, served = chooser(Digits(), *words, node=WITH_GPUS).contenders()
    assert (ddp.refused, served.refused) == ("", "its workers run on CPUs only; the job was measured on GPUs")


@pytest.mark.parametrize(("candidates", "cpus"), [("[single,ddp]", 2), ("[ddp,parameter_server]", 3)])
def test_a_ray_of_its_own_has_room_for_the_shards_of_a_candidate(candidates: str, cpus: int, tmp_path: Path) -> None:
    words = ("strategy=auto", "strategy.num_workers=2", f"strategy.candidates={candidates}", "tracking=none")
    (found,) = check_all([[*words, f"output_dir={tmp_path}"]])
    assert found.max_cpus == cpus


def test_a_model_that_raises_while_it_is_cut_is_refused_by_the_strategies_that_cut_it() -> None:
    """The lengths of its packed sequences are values, which fake and random tensors do not have."""
    contenders = chooser(Names(), "strategy.candidates=[pipeline]", "strategy.schedules=[1F1B]").contenders()
    assert all("fails with tensors that have a shape and no values" in c.refused for c in contenders)


@pytest.mark.campaign
def test_layouts_that_divide_layers_or_tokens_are_predicted_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    job = GPT(variant="llama", layers=2, width=32, heads=4, hidden=64, context=16)
    found = chooser(job, "strategy.candidates=[single,mesh]")
    monkeypatch.setattr(Chooser, "_profile", lambda self: replace(PROFILE, free_bytes=10**9))
    _, tensor, context = found.choose(measure=False).contenders
    assert [c.name for c in (tensor, context)] == ["mesh num_workers=2 tensor=2", "mesh num_workers=2 context=2"]
    for contender in (tensor, context):
        assert contender.prediction is not None, contender.refused
        assert contender.prediction.exchange_ms > 0
    assert "several blocks of one class" in chooser(Digits(), "strategy.candidates=[mesh]").contenders()[0].refused


@dataclass(frozen=True, kw_only=True)
class Talkative(Digits):
    def model(self) -> NoReturn:
        raise RuntimeError(f"cannot log in with {SECRET}")


def test_a_refusal_tells_no_secret() -> None:
    (refused, *_) = chooser(Talkative(), "strategy.candidates=[pipeline]").contenders()
    assert "cannot log in with" in refused.refused
    assert SECRET not in refused.refused


def test_if_every_candidate_is_refused_all_reasons_are_told() -> None:
    with pytest.raises(ValueError, match="too few for 4 stages"):
        chooser(
            Digits(hidden=8, depth=1), "strategy.candidates=[pipeline]", "strategy.schedules=[Interleaved1F1B]"
        ).choose()


def test_a_brief_run_has_the_job_without_its_samples() -> None:
    job = GPT(layers=1, width=8, heads=1, context=4)
    brief = without_samples(job)
    assert len(brief.dataset("train")) == len(job.dataset("train"))
    assert (job.draws_samples, brief.draws_samples) == (True, False), "the model would be gathered for them"
    assert type(brief).forward is Job.forward
    assert not has_training_step(brief)
    assert (brief, type(brief).__name__) == (replace(brief), "GPT")


def test_a_run_that_measures_shows_only_why_it_failed_and_offers_no_resume() -> None:
    shown: list[Event] = []

    class Shown:
        def emit(self, event: Event) -> None:
            shown.append(event)

        def close(self) -> None:
            pass

    sink = FailureSink(Shown())
    sink.emit(Warned(message="slow"))
    for status in ("FINISHED", "FAILED"):
        sink.emit(RunEnded(status=status, exit_code=0, reason="", summary={}, next_commands=("resume it",)))
    (ended,) = shown
    assert isinstance(ended, RunEnded)
    assert (ended.status, ended.next_commands) == ("FAILED", ())


def test_the_strategy_of_a_command_is_exchanged() -> None:
    typed = ("strategy=auto", "job=gpt", "strategy.measured=0", "train.steps=5")
    assert with_strategy(typed, ["strategy=ddp", "strategy.num_workers=2"]) == (
        "strategy=ddp",
        "strategy.num_workers=2",
        "job=gpt",
        "train.steps=5",
    )


STEP = Prediction(compute_ms=1.0, exchange_ms=0.0, idle_ms=0.0, input_ms=0.5, memory_bytes=2e6)


def decision() -> Decision:
    config = config_of(Case(job=Digits()), 1)
    single = Contender(overrides=("strategy=single",), prediction=STEP)
    return Decision(
        overrides=single.overrides,
        config=config,
        plan=plan_of(config),
        contenders=(single,),
        planning_s=1.0,
        measuring_s=0.0,
    )


def test_the_choice_is_kept_in_the_directory_of_the_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.update_record(tags={"device": "cpu"})
    assert chosen_before(run_dir) is None
    decision().write_to(run_dir)
    assert chosen_before(run_dir) == ("strategy=single",)
    assert run_dir.read_record()["tags"] == {"device": "cpu", "strategy.chosen_by": "auto"}
    choice = "auto chooses strategy=single: no other strategy can train this job here"
    assert choice in (tmp_path / "auto.md").read_text()


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (120, ["strategy", "predicted ms", "compute", "exchange", "idle", "input", "memory MB"]),
        (45, ["strategy", "predicted ms", "compute", "idle"]),
        (20, ["strategy", "predicted ms"]),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns(width: int, heads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    (shown,) = (line for line in decision().text.splitlines() if line.startswith("strategy"))
    assert re.split("  +", shown) == heads
