"""The choice of a strategy whose measuring runs are on a store, without workers."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.records.job_profile import PROFILE
from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.auto.chooser import FOLDER, Chooser
from orchestrator.driver.preflight.run_config import absolute_paths, output_dir
from orchestrator.driver.process.run_context import RunResult
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import save
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.train_state import TrainState
from orchestrator.strategies import registry
from orchestrator.strategies.tuned.auto import PROFILE_KEY
from orchestrator.tuning.choice import Contender

pytestmark = pytest.mark.slow

NODES = (Node(node_id="here", name="here", cpus=1, gpus=0), Node(node_id="there", name="there", cpus=1, gpus=0))
JOB = Digits(hidden=8, depth=1, lr=0.1, momentum=0.9)


class Runs:
    """Executes runs that only save a checkpoint, on a node of which the driver does not see the directory."""

    def __init__(self, there: Path, *, saves: bool = True):
        self.executed: list[RunDir] = []
        self._there = there
        self._saves = saves

    def __call__(self, config: Config, plan: Plan, job: Job, show_failure: bool) -> RunResult:
        output = output_dir(config)
        output.prepare()
        run_dir = output.create(plan.run_name)
        run_dir.update_record(state="finished", location=run_dir.location)
        if self._saves:
            self._save(run_dir, config.train.steps)
        self.executed.append(run_dir)
        summary = {"step_ms_p50": 10.0}
        return RunResult(status="FINISHED", exit_code=0, run_dir=run_dir.path, url=run_dir.url, summary=summary)

    def _save(self, run_dir: RunDir, step: int) -> None:
        meta = {"step": step, "samples_consumed": 0, PROFILE_KEY: dataclasses.asdict(PROFILE)}
        state = TrainState(model={"w": torch.zeros(1)}, optimizer={}, meta=meta)
        staged = self._there / run_dir.path.name
        saved = save(staged, state, run_uid="run")
        CheckpointStore(staged, run_dir.remote_checkpoints).upload(saved.name, fence=None)


def chooser(
    store: Path, staging: Path, runs: Runs, *, candidates: str = "single,ddp", node_bytes: int = 0, cpus: int = 1
) -> tuple[Chooser, OutputDir]:
    nodes = tuple(replace(node, memory_bytes=node_bytes, cpus=cpus) for node in NODES)
    words = ["strategy=auto", f"strategy.candidates=[{candidates}]", f"output_dir={store.as_uri()}", "tracking=none"]
    errors: list[str] = []
    config, _ = compose([*words, f"storage.staging_dir={staging}"], errors, registry.config_class)
    assert config is not None, errors
    config = absolute_paths(config)
    plan = make_plan(config, registry.load("auto"), nodes, oversubscribe_cpus=False)
    made = Chooser(config, JOB, plan, nodes, runs, redactor=Redactor(), oversubscribe_cpus=False)
    return made, output_dir(replace(config, output_dir=f"{config.output_dir}/{FOLDER}"))


def test_the_runs_that_measure_are_read_from_the_store_and_removed_there(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "there")
    auto, output = chooser(tmp_path / "store", tmp_path / "here", runs)
    decision = auto.choose()
    assert [contender.measured_ms for contender in decision.contenders if not contender.refused] == [10.0, 10.0]
    assert len(runs.executed) == 3, "the profile, and both candidates"
    assert list(output.runs()) == []
    assert not [run_dir for run_dir in runs.executed if run_dir.path.exists()]


def test_the_errors_of_a_choice_are_shown_in_the_next_one_on_the_same_hardware(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "there")

    def choice(**words: int) -> dict[str, Contender]:
        auto, _ = chooser(tmp_path / "store", tmp_path / "here", runs, **words)
        return {contender.name: contender for contender in auto.choose().contenders}

    first = choice()
    assert [contender.past_errors for contender in first.values()] == [(), ()]
    assert [c.past_errors for c in choice().values()] == [(c.error,) for c in first.values()]
    assert [c.past_errors for c in choice().values()] == [(c.error,) * 2 for c in first.values()]
    assert [c.past_errors for c in choice(cpus=2).values() if c.prediction] == [(), ()]

    (file, _) = sorted((tmp_path / "here").rglob("errors-*.json"), key=lambda file: file.stat().st_mtime_ns)
    file.write_text("{")
    assert [c.past_errors for c in choice().values()] == [(), ()], "a damaged file is no reason to stop"


def test_measurements_that_cannot_be_read_are_an_error_and_not_a_crash(tmp_path: Path) -> None:
    auto, _ = chooser(tmp_path / "store", tmp_path / "here", Runs(tmp_path / "there", saves=False))
    with pytest.raises(ConfigError, match=r"strategy=auto: the measurements cannot be read: .* has no checkpoint"):
        auto.choose()


def test_where_no_node_has_room_for_the_whole_model_parts_of_it_are_chosen(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "there")
    words = "single,ddp,fsdp"
    auto, _ = chooser(tmp_path / "store", tmp_path / "here", runs, candidates=words, node_bytes=6_500)
    decision = auto.choose(measure=False)
    single, ddp, fsdp = decision.contenders
    assert re.match(
        r"strategy=single: parameters, gradients and optimizer state take .* for one worker", single.refused
    )
    assert "parameters, gradients and optimizer state take" in ddp.refused
    assert decision.overrides == fsdp.overrides == ("strategy=fsdp", "strategy.num_workers=2")
