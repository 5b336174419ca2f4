"""``strategy=auto`` on the driver, before anything runs: the candidates of a job, and the record of the choice."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest

from helpers.conformance.cases import CLUSTER, Case, config_of, plan_of
from helpers.jobs.step_toys import GAN
from jobs.digits import Digits
from jobs.gpt import GPT
from jobs.names import Names
from orchestrator.config.compose import compose
from orchestrator.config.overrides import with_strategy
from orchestrator.config.redact import Redactor
from orchestrator.driver.brief_runs import without_samples
from orchestrator.driver.checked_runs import check_all
from orchestrator.features.auto.choice import Contender, StrategyName
from orchestrator.features.auto.chooser import Chooser
from orchestrator.features.auto.decision import Decision, chosen_before
from orchestrator.job import Job, has_training_step
from orchestrator.planning.plan import Node, make_plan
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry

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
    assert not any(c.predicted_ms for c in found.contenders)
    assert (found.plan.strategy, found.plan.threads_per_worker) == ("single", HERE.cpus)


def test_a_strategy_that_would_leave_the_gpus_unused_is_no_candidate() -> None:
    words = ("strategy.candidates=[ddp,parameter_server]",)
    served = "parameter_server num_workers=2 num_shards=1"
    assert [c.name for c in chooser(Digits(), *words).contenders()] == ["ddp num_workers=2", served]
    assert [c.name for c in chooser(Digits(), *words, node=WITH_GPUS).contenders()] == ["ddp num_workers=2"]


@pytest.mark.parametrize(("candidates", "cpus"), [("[single,ddp]", 2), ("[ddp,parameter_server]", 3)])
def test_a_ray_of_its_own_has_room_for_the_shards_of_a_candidate(candidates: str, cpus: int, tmp_path: Path) -> None:
    words = ("strategy=auto", "strategy.num_workers=2", f"strategy.candidates={candidates}", "tracking=none")
    (found,) = check_all([[*words, f"output_dir={tmp_path}"]])
    assert found.max_cpus == cpus


def test_a_model_that_cannot_be_traced_has_candidates_without_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    """The lengths of its packed sequences are values, which fake and random tensors do not have."""
    contenders = chooser(Names(), "strategy.candidates=[single,ddp,pipeline]").contenders()
    assert [(c.name, c.predicted_ms, c.refused) for c in contenders] == [
        ("single", None, ""),
        ("ddp num_workers=2", None, ""),
    ]
    assert "auto measures every candidate: the model cannot be traced" in capsys.readouterr().out


@pytest.mark.campaign
def test_every_layout_of_the_plan_has_its_prediction_and_the_product_can_train_it() -> None:
    job = GPT(variant="llama", layers=2, width=32, heads=4, hidden=64, context=16)
    auto = chooser(job, "strategy.num_workers=4", "strategy.schedules=[1F1B]")
    found = {c.name: c for c in auto.contenders()}
    names = {name.partition(" ")[0] for name in found}
    assert names == {*get_args(StrategyName)} - {"fsdp_pipeline"}, "which is a mesh with other keys"
    assert [name for name, c in found.items() if c.predicted_ms is None] == ["dp num_workers=4"]
    assert {"mesh num_workers=4 tensor=2 shard=2", "hsdp num_workers=4 shard_size=2"} <= {*found}
    assert not [c for c in found.values() if c.refused]
    assert not {name: why for name in found if (why := auto._checked(found[name]).refused)}


@dataclass(frozen=True, kw_only=True)
class Talkative(Digits):
    def model(self) -> NoReturn:
        raise RuntimeError(f"cannot log in with {SECRET}")


def test_a_refusal_tells_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    chooser(Talkative(), "strategy.candidates=[fsdp]").contenders()
    printed = capsys.readouterr().out
    assert "cannot log in with" in printed
    assert SECRET not in printed


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


def test_the_strategy_of_a_command_is_exchanged() -> None:
    typed = ("strategy=auto", "job=gpt", "strategy.measured=0", "train.steps=5")
    assert with_strategy(typed, ["strategy=ddp", "strategy.num_workers=2"]) == (
        "strategy=ddp",
        "strategy.num_workers=2",
        "job=gpt",
        "train.steps=5",
    )


def decision() -> Decision:
    config = config_of(Case(job=Digits()), 1)
    single = Contender(overrides=("strategy=single",), predicted_ms=1.5, memory_bytes=2e9)
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
        (120, ["strategy", "predicted ms", "memory GiB"]),
        (25, ["strategy", "predicted ms"]),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns(width: int, heads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    (shown,) = (line for line in decision().text.splitlines() if line.startswith("strategy"))
    assert re.split("  +", shown) == heads
