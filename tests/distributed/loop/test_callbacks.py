"""Callbacks beside a job: told of everything in order, on their ranks, with their rights, and without effect on it."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import EVERY
from helpers.jobs.toys import Toy
from helpers.ranks.gang import SOON_S, Gang
from helpers.ranks.loops import Ran, losses_by_step, run_loop
from helpers.records.runs import in_campaign
from orchestrator import Callback, Evaluation, RunBegin, RunEnd, SavedCheckpoint, StepEnd

SEVEN = having(steps=7, global_batch_size=16, eval_every=3)


@dataclass
class Notes(Callback):
    """Writes down what it is told, in a file of its rank."""

    folder: Path
    ranks: bool = False
    told: Path | None = None

    def __post_init__(self) -> None:
        self.every_rank = self.ranks  # type: ignore[misc]

    def note(self, text: str) -> None:
        torch.rand(3)
        assert self.told is not None
        with self.told.open("a") as file:
            file.write(f"{text}\n")

    def on_run_begin(self, info: RunBegin) -> None:
        self.told = self.folder / f"rank-{info.rank}"
        self.note(f"begin after {info.step} of {info.steps}, {info.generation}, {info.world_size}")

    def on_step_end(self, info: StepEnd) -> None:
        self.note(f"step {info.step}")

    def on_evaluation_end(self, info: Evaluation) -> None:
        self.note(f"evaluation {info.step} {info.metrics['val/loss']:.4f}")

    def on_checkpoint_saved(self, info: SavedCheckpoint) -> None:
        assert (Path(info.path) / "manifest.json").exists()
        self.note(f"saved {info.step}")

    def on_run_end(self, info: RunEnd) -> None:
        self.note(f"end after {info.step} {info.stopped} {info.reason}")


class Ending(Callback):
    may_stop = True

    def on_evaluation_end(self, info: Evaluation) -> str | None:
        return "enough" if info.step == 3 else None


def run(
    gang: Gang, folder: Path, name: str, *callbacks: Callback, checkpoint: Path | None = None, every: int = 0
) -> list[Ran]:
    layout = EVERY[name]
    case = layout.of(Case(job=Toy(), train=SEVEN, callbacks=callbacks))
    return gang.run(run_loop, case, folder, checkpoint, every, world_size=layout.world_size)


@pytest.mark.parametrize(
    "name", ["fsdp-2", "1F1B-2", *in_campaign("ddp-2", "hogwild-2", "single", "dp-2", "parameter_server-2+2")]
)
def test_all_is_told_in_order_and_nothing_changes(gang: Gang, tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").mkdir()
    ranks = run(gang, tmp_path / "told", name, Notes(tmp_path / "notes"), every=3)
    (file,) = (tmp_path / "notes").iterdir()
    told = file.read_text().splitlines()
    assert told[0] == f"begin after 0 of 7, 1, {EVERY[name].world_size}"
    assert [text for text in told if text.startswith("step")] == [f"step {step}" for step in range(1, 8)]
    assert [text.split()[1] for text in told if text.startswith("evaluation")] == ["3", "6", "7"]
    assert [text for text in told if text.startswith("saved")] == ["saved 3", "saved 6", "saved 7"]
    assert told.index("step 3") < told.index("saved 3")
    assert told[-1] == "end after 7 False None"
    assert not any(ran.warnings for ran in ranks)
    if name != "hogwild-2":
        assert losses_by_step(ranks) == losses_by_step(run(gang, tmp_path / "plain", name, every=3))


def test_every_rank_is_told_if_the_callback_says_so_and_a_resume_begins_where_it_continues(
    gang: Gang, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    notes = Notes(tmp_path / "notes", ranks=True)
    run(gang, tmp_path / "run", "ddp-2", notes, every=3)
    first, other = (path.read_text().splitlines() for path in sorted((tmp_path / "notes").iterdir()))
    assert other == [text for text in first if not text.startswith("saved")]
    resumed = tmp_path / "run" / "checkpoints" / "step-00000006"
    run(gang, tmp_path / "again", "1F1B-2", notes, checkpoint=resumed)
    texts = [path.read_text().splitlines() for path in sorted((tmp_path / "notes").iterdir())]
    assert [text[len(first) :][:2] for text in texts[:1]] == [["begin after 6 of 7, 1, 2", "step 7"]]
    evaluations = {text for path in texts for text in path if text.startswith("evaluation 7")}
    assert len(evaluations) == 1, "the metrics are those of all ranks"


@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2", "hogwild-2"])
def test_a_callback_that_may_stop_ends_the_run_on_all_ranks(gang: Gang, tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").mkdir()
    ranks = run(gang, tmp_path / "run", name, Notes(tmp_path / "notes"), Ending())
    for ran in ranks:
        assert (ran.outcome.status, ran.outcome.step, ran.outcome.ended_early) == ("done", 3, "callbacks[1]: enough")
    assert (tmp_path / "notes" / "rank-0").read_text().endswith("saved 3\nend after 3 False callbacks[1]: enough\n")


class Failing(Callback):
    every_rank = True

    def on_step_end(self, info: StepEnd) -> None:
        if info.step == 2:
            raise ValueError("it is broken")


class Unentitled(Ending):
    may_stop = False


class Strict(Failing):
    errors_end_run = True


def test_an_error_is_one_warning_on_its_rank(gang: Gang, tmp_path: Path) -> None:
    ranks = run(gang, tmp_path / "run", "ddp-2", Unentitled(), Failing())
    for rank, ran in enumerate(ranks):
        assert ran.outcome.status == "done"
        warning = next(text for text in ran.warnings if text.startswith("callbacks[1].on_step_end raised ValueError"))
        assert "it is broken (test_callbacks.py, line" in warning
        assert warning.endswith(f"at step 2: see the log of rank {rank}; training continues")
    assert [len(ran.warnings) for ran in ranks] == [2, 1]
    assert ranks[0].warnings[1] == (
        "callbacks[0].on_evaluation_end returns a str; return None, or let the class say may_stop = True, at step 3: "
        "see the log of rank 0; training continues"
    )
    assert losses_by_step(ranks) == losses_by_step(run(gang, tmp_path / "plain", "ddp-2"))


def test_an_error_ends_the_run_if_the_callback_says_so(gang: Gang, tmp_path: Path) -> None:
    case = Case(job=Toy(), train=SEVEN, callbacks=(Strict(),))
    answers = gang.ask(run_loop, replace(case), tmp_path, world_size=1, timeout_s=SOON_S)
    assert answers[0].error.startswith("JobError: callbacks[0].on_step_end raised ValueError: it is broken (test_call")
