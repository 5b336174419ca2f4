"""Steps in place of epochs."""

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from helpers.files.golden import Golden
from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.epochs import Epochs
from orchestrator.config.schema import Config
from orchestrator.driver.preflight.epochs import few_evaluations, in_steps
from orchestrator.job import Job
from orchestrator.strategies import registry


@dataclass(frozen=True, kw_only=True)
class Samples(Digits):
    """Ten samples, a stream of them, or none that the driver can read."""

    kind: str = "list"

    def dataset(self, split: str) -> Any:
        if self.kind == "stream":
            return Endless()
        if self.kind == "absent":
            raise FileNotFoundError("/data/train.bin")
        return TensorDataset(torch.zeros(10, 64), torch.zeros(10, dtype=torch.long))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(64), torch.zeros((), dtype=torch.long)


def configured(words: Sequence[str]) -> Config:
    errors: list[str] = []
    config, _ = compose(["train.global_batch_size=4", *words], errors, registry.config_class)
    if config is None:
        raise ConfigError(errors)
    return config


def resolved(job: Job, *words: str) -> tuple[int, int, int]:
    """Return the steps of a run with batches of 4, of its evaluations and of its checkpoints."""
    found = in_steps(configured(words), job)
    return found.train.steps, found.train.eval_every, found.checkpoint.every


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.epochs=2"], (5, 100, 100)),
        (["train.epochs=1"], (3, 100, 100)),
        (["train.epochs=0.1"], (1, 100, 100)),
        (["train.steps=7", "train.eval_every=1 epoch", "checkpoint.every='2 epochs'"], (7, 3, 5)),
        (["train.epochs=20", "train.eval_every=.5epochs"], (50, 2, 100)),
        (["train.epochs=null", "train.steps=9"], (9, 100, 100)),
    ],
)
def test_epochs_become_the_fewest_steps_that_reach_their_end(words: list[str], expected: tuple[int, int, int]) -> None:
    assert resolved(Samples(), *words) == expected


BEST, ONLY = "checkpoint.best=val/loss", "checkpoint.best=val/loss has one evaluation to choose from"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["train.epochs=3", BEST], "no less than the 8 steps; set train.eval_every='1 epoch'"),
        (["train.epochs=1", BEST], "no less than the 3 steps; set train.eval_every=1"),
        (
            ["train.steps=50", BEST, "train.stop_after=2"],
            "train.eval_every=100 is no less than the 50 steps; set train.eval_every=5",
        ),
        (["train.steps=101", BEST], None),
        (["train.epochs=3"], None),
        (["train.epochs=3", BEST, "train.eval_every=1 epoch"], None),
        (["train.epochs=3", BEST, "train.eval_every=0"], None),
        (["train.steps=1", BEST], None),
    ],
)
def test_a_best_among_one_evaluation_is_noted(words: list[str], remedy: str | None) -> None:
    found = few_evaluations(in_steps(configured(words), Samples()))
    assert found is None if remedy is None else found is not None and found.startswith(ONLY) and found.endswith(remedy)


def test_steps_on_the_command_line_win_over_epochs_in_a_file(tmp_path: Any) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "long.yaml").write_text("# @package _global_\ntrain:\n  epochs: 100\n")
    words = [f"--config-dir={tmp_path}", "experiment=long"]
    assert resolved(Samples(), *words)[0] == 250
    assert resolved(Samples(), *words, "train.steps=3")[0] == 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stream", ["train.epochs=2"]),
        ("absent", ["checkpoint.every=1 epoch"]),
        ("list", ["train.epochs=2", "train.steps=3"]),
        ("list", ["train.eval_every=two epochs"]),
        ("list", ["train.eval_every=0 epochs"]),
        ("list", ["train.epochs=0"]),
        ("list", ["train.steps=2 epochs"]),
    ],
)
def test_what_tells_no_length_is_refused(kind: str, words: list[str], golden: Golden) -> None:
    with golden.raises(ConfigError):
        resolved(Samples(kind=kind), *words)


def test_a_copy_of_epochs_is_equal() -> None:
    given = Epochs(2.5)
    for other in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert (str(other), other.number) == ("2.5 epochs", 2.5)
