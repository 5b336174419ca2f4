"""Trouble of every kind at random moments, under nine strategies: each run has to end as if there had been none.

python benchmarks/campaign.py --trials 300 --slow 50 --record campaign.jsonl

A trial is one run that is disturbed in one way (``campaigns/kinds.py``), drawn from the seed and the trial's number.
Two of three trials are faults of workers, the others everything else in turn. A trial passes if the run ends as
promised, leaves no process, placement group or shared memory behind and, where the strategy is deterministic, has the
losses and weights of an undisturbed run.

A slow trial is one run without faults, but with one to three kinds of stalls (``stalling_job.py``). It passes if no
worker is killed.

With ``--record``, each trial is appended to a file as one line of JSON, and trials that the file has are not run again:
a campaign can be run in pieces. A file belongs to one version of the code.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # for tests/helpers: disks, and waiting for what a run does

from campaigns.kinds import FAULTY, KINDS  # noqa: E402
from campaigns.trial import LAYOUTS, Outcome, Setting, Trial, TrialId, run_trial, train  # noqa: E402
from harness.arms import RESULTS  # noqa: E402
from harness.rounds import code_version, table  # noqa: E402

from orchestrator.driver.process.cluster import EMBEDDED_ENVIRONMENT  # noqa: E402

FAULTS, STALLS = "worker faults", "stalls"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300, help="disturbed runs (default: %(default)s)")
    parser.add_argument("--slow", type=int, default=50, help="healthy runs with stalls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that is drawn (default: %(default)s)")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="layouts to run, separated by semicolons")
    parser.add_argument("--kinds", default=";".join(KINDS), help="kinds of trouble, separated by semicolons")
    parser.add_argument("--record", type=Path, help="append the trials to this file, and skip those that it has")
    parser.add_argument("--keep", action="store_true", help="write the tables to results/")
    arguments = parser.parse_args()
    layouts, kinds = arguments.layouts.split(";"), arguments.kinds.split(";")
    planned = [
        *in_turn(arguments.trials, arguments.seed, slots(kinds), layouts),
        *in_turn(arguments.slow, arguments.seed, [STALLS], layouts),
    ]
    record = arguments.record.resolve() if arguments.record else None
    trials = read_record(record)
    for trial in run_all([trial_id for trial_id in planned if trial_id not in trials]):
        trials[trial.id] = trial
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
    text = report([trials[trial_id] for trial_id in planned])
    print(text)
    if arguments.keep:
        head = f"# campaign\n\n{date.today()}, {code_version()}, seed {arguments.seed}"
        (RESULTS / "campaign.md").write_text(f"{head}\n\n{text}\n")
    return 0 if all(trials[trial_id].passed for trial_id in planned) else 1


def slots(kinds: Sequence[str]) -> list[str]:
    """Return the order of the kinds of trouble: before each other kind, two trials with faults of workers."""
    others = [kind for kind in kinds if kind not in (FAULTS, STALLS)]
    faults = [FAULTS] * (FAULTS in kinds)
    return [slot for other in others for slot in (*faults, *faults, other)] or faults


def in_turn(count: int, seed: int, kinds: Sequence[str], layouts: Sequence[str]) -> list[TrialId]:
    """Return the first ``count`` trials. Over time, each kind of trouble meets every layout."""
    return [
        TrialId(seed, number, kinds[number % len(kinds)], layouts[(number + number // len(kinds)) % len(layouts)])
        for number in range(count)
    ]


def run_all(planned: Sequence[TrialId]) -> Iterator[Trial]:
    """Run trials on one Ray, and yield each when it has ended. The files of a trial that failed are kept."""
    if not planned:
        return
    os.environ |= {key: value for key, value in EMBEDDED_ENVIRONMENT.items() if key not in os.environ}
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    os.chdir(root)

    @functools.cache
    def reference(name: str) -> Outcome:
        folder = root / file_name(f"reference {name}")
        setting = Setting(layout=LAYOUTS[name], folder=folder, rng=random.Random())
        undisturbed = train(setting, *FAULTY)
        assert undisturbed.exit_code == 0, undisturbed.reason
        return undisturbed.outcome

    failed = False
    try:
        for number, trial_id in enumerate(planned, start=1):
            kind = KINDS[trial_id.kind]
            folder = root / file_name(f"{trial_id.kind} {trial_id.number}")
            folder.mkdir()
            setting = Setting(
                layout=LAYOUTS[trial_id.layout],
                folder=folder,
                rng=random.Random(str(trial_id)),
                tracking_uri=f"sqlite:///{root}/mlflow.db" if kind.tracked else None,
                experiment=folder.name,
            )
            expected, shared_before = reference(trial_id.layout), shared_memory()
            trial = run_trial(trial_id, kind, setting, expected)
            left = tuple(f"{file} left in shared memory" for file in sorted(shared_memory() - shared_before))
            trial = replace(trial, problems=trial.problems + left)
            print(f"{number:4} {line(trial)}", flush=True)
            yield trial
            if trial.passed:
                shutil.rmtree(folder, ignore_errors=True)
            failed |= not trial.passed
    finally:
        ray.shutdown()
        if failed:
            print(f"the files of the failed trials are in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def shared_memory() -> set[str]:
    """Return the names of all shared-memory files of this machine."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def file_name(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def read_record(path: Path | None) -> dict[TrialId, Trial]:
    """Read the trials that earlier commands have run."""
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    trials = [Trial(**{**fields, "id": TrialId(*fields["id"])}) for fields in lines]
    return {trial.id: trial for trial in trials}


def line(trial: Trial) -> str:
    verdict = "passed" if trial.passed else f"FAILED: {'; '.join(trial.problems)}"
    if trial.skipped:
        verdict = f"skipped: {trial.skipped}"
    return f"{trial.id.kind:18} {trial.id.layout:23} {' '.join(trial.drawn):40} {trial.seconds:5.1f} s  {verdict}"


def report(trials: Sequence[Trial]) -> str:
    """Return the results as Markdown: faults of workers by layout, everything else by kind, and the stalls."""
    faults = [t for t in trials if t.id.kind == FAULTS]
    others = [t for t in trials if t.id.kind not in (FAULTS, STALLS)]
    stalls = [t for t in trials if t.id.kind == STALLS]
    texts = []
    if faults:
        drawn = Counter(fault.partition("@")[0] for t in faults for fault in t.drawn)
        texts += [faults_table(faults), f"faults: {', '.join(f'{n} {kind}' for kind, n in drawn.most_common())}"]
    if others:
        texts.append(others_table(others))
    if stalls:
        passed = sum(t.passed for t in stalls)
        texts.append(f"{len(stalls)} healthy runs with stalls: no worker killed in {passed}")
    return "\n\n".join(texts)


def faults_table(trials: Sequence[Trial]) -> str:
    rows = []
    for name in dict.fromkeys(t.id.layout for t in trials):
        group = [t for t in trials if t.id.layout == name]
        recoveries = sorted(s for t in group for s in t.recovery_s)
        rows.append(
            [
                name,
                str(len(group)),
                str(sum(t.passed for t in group)),
                str(sum(t.restarts for t in group)),
                f"{recoveries[len(recoveries) // 2]:.2f} s" if recoveries else "",
                f"{recoveries[-1]:.2f} s" if recoveries else "",
                str(sum(t.steps_lost for t in group)),
                duration(group),
            ]
        )
    head = ["strategy", "trials", "passed", "recoveries", "median", "longest", "steps repeated", "median trial"]
    return table(head, rows)


def others_table(trials: Sequence[Trial]) -> str:
    rows = []
    for kind in dict.fromkeys(t.id.kind for t in trials):
        group = [t for t in trials if t.id.kind == kind and not t.skipped]
        skipped = sum(t.id.kind == kind for t in trials) - len(group)
        rows.append([kind, str(len(group)), str(sum(t.passed for t in group)), str(skipped), duration(group)])
    return table(["trouble", "trials", "passed", "skipped", "median trial"], rows)


def duration(trials: Sequence[Trial]) -> str:
    return f"{statistics.median(t.seconds for t in trials):.1f} s" if trials else ""


if __name__ == "__main__":
    sys.exit(main())
