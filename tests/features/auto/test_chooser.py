"""The choice of a strategy whose measuring runs are on a store, without workers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.digits import Digits
from jobs.gpt import GPT
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.preflight.run_config import absolute_paths, output_dir
from orchestrator.driver.process.run_context import RunResult
from orchestrator.features.auto.chooser import FOLDER, Chooser
from orchestrator.job import Job
from orchestrator.planning.memory import MIB
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry

pytestmark = pytest.mark.slow

NODES = (Node(node_id="here", name="here", cpus=1, gpus=0), Node(node_id="there", name="there", cpus=1, gpus=0))
JOB = Digits(hidden=8, depth=1, lr=0.1, momentum=0.9)


class Runs:
    """Executes runs that only have a step time, those of one worker the shortest."""

    def __init__(self, *, step_ms: float = 10.0) -> None:
        self.executed: list[RunDir] = []
        self._step_ms = step_ms

    def __call__(self, config: Config, plan: Plan, job: Job) -> RunResult:
        output = output_dir(config)
        output.prepare()
        run_dir = output.create(plan.run_name)
        run_dir.update_record(state="finished", location=run_dir.location)
        self.executed.append(run_dir)
        summary = {"step_ms_p50": self._step_ms * plan.world_size}
        return RunResult(status="FINISHED", exit_code=0, run_dir=run_dir.path, url=run_dir.url, summary=summary)


def chooser(
    store: Path,
    staging: Path,
    runs: Runs,
    *,
    candidates: str = "single,ddp",
    node_bytes: int = 0,
    job: Job = JOB,
    measured: int = 2,
) -> tuple[Chooser, OutputDir]:
    nodes = tuple(replace(node, memory_bytes=node_bytes) for node in NODES)
    words = ["strategy=auto", f"strategy.candidates=[{candidates}]", f"output_dir={store.as_uri()}", "tracking=none"]
    words.append(f"strategy.measured={measured}")
    errors: list[str] = []
    config, _ = compose([*words, f"storage.staging_dir={staging}"], errors, registry.config_class)
    assert config is not None, errors
    config = absolute_paths(config)
    plan = make_plan(config, registry.load("auto"), nodes, oversubscribe_cpus=False)
    made = Chooser(config, job, plan, nodes, runs, redactor=Redactor(), oversubscribe_cpus=False)
    return made, output_dir(replace(config, output_dir=f"{config.output_dir}/{FOLDER}"))


def test_the_runs_that_measure_are_removed_from_the_store_and_their_times_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs()

    def choice(*, damaged: bool = False) -> list[float | None]:
        auto, output = chooser(tmp_path / "store", tmp_path / "here", runs)
        if damaged:
            for file in (tmp_path / "here").rglob("times-*.json"):
                file.write_text("{")
        found = auto.choose()
        assert found.overrides == ("strategy=single",)
        assert list(output.runs()) == []
        return [contender.measured_ms for contender in found.contenders if contender.measured_ms is not None]

    assert sorted(choice()) == [10.0, 20.0]
    assert len(runs.executed) == 2
    assert not [run_dir for run_dir in runs.executed if run_dir.path.exists()]
    assert sorted(choice()) == [10.0, 20.0]
    assert len(runs.executed) == 2, "the second choice measures nothing"
    assert "auto uses the measurements in " in capsys.readouterr().out
    choice(damaged=True)
    assert len(runs.executed) == 4, "a damaged file is no reason to stop"


def test_what_was_measured_corrects_the_other_predictions(tmp_path: Path) -> None:
    """Steps of a small model take milliseconds, however busy the machine is, but here they take ten seconds."""

    def predicted(*, measure: bool) -> float:
        runs = Runs(step_ms=10_000)
        auto, _ = chooser(tmp_path / "store", tmp_path / "here", runs, candidates="fsdp,ddp", measured=1)
        decision = auto.choose(measure=measure)
        return max(contender.predicted_ms or 0.0 for contender in decision.contenders)

    assert predicted(measure=False) < 1000 < predicted(measure=True)


def test_where_no_node_has_room_for_the_whole_model_parts_of_it_are_chosen(tmp_path: Path) -> None:
    words, large = "single,ddp,fsdp", GPT(layers=8, width=1024, heads=8, context=16)
    auto, _ = chooser(
        tmp_path / "store", tmp_path / "here", Runs(), candidates=words, node_bytes=2_400 * MIB, job=large
    )
    decision = auto.choose(measure=False)
    refused = {contender.name: contender.refused for contender in decision.contenders}
    assert re.fullmatch(r"needs 2\.\d+ of 2\.34 GiB", refused["single"])
    assert re.fullmatch(r"needs 2\.\d+ of 2\.34 GiB", refused["ddp num_workers=2"])
    assert decision.overrides == ("strategy=fsdp", "strategy.num_workers=2")
