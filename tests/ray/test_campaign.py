"""One trial of each kind of trouble of ``benchmarks/campaign.py`` that no other test causes in a whole run."""

import random
from pathlib import Path

import pytest

from helpers.records.runs import ROOT


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("loader processes", "ddp"),
        ("slow file system", "ddp"),
        ("clock step", "ddp"),
        ("lost fence", "ddp"),
        ("full disk", "ddp"),
        ("full for one write", "ddp"),
        ("death in a save of the best", "ddp"),
        ("second driver", "ddp"),
        ("two resume at once", "ddp"),
        ("reader on a node", "ddp"),
        ("two users", "ddp"),
        ("sweep and run", "ddp"),
        ("busy machine", "ddp"),
        ("small TMPDIR", "ddp"),
        ("cut JSON", "ddp"),
        ("worker faults", "ddp, own optimizer"),
        ("worker faults", "pipeline with copies, own optimizer"),
    ],
)
def test_a_disturbed_run_ends_as_promised(
    kind: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    from campaigns.kinds import KINDS
    from campaigns.trial import LAYOUTS, Setting, TrialId, run_trial, train

    def setting(name: str) -> Setting:
        folder = tmp_path / name
        folder.mkdir()
        uri = f"sqlite:///{tmp_path}/mlflow.db" if KINDS[kind].tracked else None
        return Setting(layout=LAYOUTS[layout], folder=folder, rng=random.Random(0), tracking_uri=uri, experiment=name)

    undisturbed = train(setting("undisturbed"))
    trial = run_trial(TrialId(0, 0, kind, layout), KINDS[kind], setting("disturbed"), undisturbed.outcome)
    if trial.skipped:
        pytest.skip(trial.skipped)
    assert trial.passed, trial.problems
