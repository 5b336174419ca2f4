"""A sweep without Ray: which runs are to do, errors of single runs, and the report at the end."""

import functools
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from orchestrator.config.build import ConfigError
from orchestrator.config.overrides import expand_sweep
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.features.sweep.sweep import Sweep, open_sweep, output_of
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir
from orchestrator.records.sweep_dir import all_sweeps

STRATEGIES = ("single", "ddp", "hogwild")


def opened(output_dir: Path, *words: str, strategies: tuple[str, ...] = STRATEGIES) -> tuple[Sweep, list[list[str]]]:
    runs = [[f"strategy={name}", f"output_dir={output_dir}", *words] for name in strategies]
    return open_sweep([f"strategy={','.join(strategies)}", *words], runs, Redactor.of_process())


def recorded(
    root: Path, *, sweep: Mapping[str, str] | None, status: str = "FINISHED", checkpoint: bool = False
) -> RunResult:
    """A run that only writes its record."""
    number = int(sweep["run"])
    run_dir = RunDir(root / "2026-05-01" / f"12-3{number}-01-run")
    run_dir.checkpoints.mkdir(parents=True)
    if checkpoint:
        (run_dir.checkpoints / "step-00000010").mkdir()
    strategy = STRATEGIES[number - 1]
    summary = {"samples_per_s": 1000.0 * number, "final_loss": 0.5}
    run_dir.update_record(state=status.lower(), strategy=strategy, job="digits", sweep=dict(sweep), summary=summary)
    return RunResult(status=status, exit_code=0 if status == "FINISHED" else 130, run_dir=run_dir.path)  # type: ignore[arg-type]


def execute(sweep: Sweep, number: int, *, status: str = "FINISHED", checkpoint: bool = False) -> RunResult | None:
    """Execute the run with this number."""
    run = functools.partial(recorded, sweep.output.path, status=status, checkpoint=checkpoint)
    return sweep.run(sweep.runs[number - 1], run)


@pytest.mark.slow
def test_a_resumed_sweep_skips_what_is_finished_and_continues_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, runs = opened(tmp_path)
    first.begin(runs)
    execute(first, 1)
    execute(first, 2, status="KILLED", checkpoint=True)
    first.end()
    output = capsys.readouterr().out
    assert "not finished: 2 runs; continue the sweep with: python -m orchestrator.launch -m " in output
    assert output.strip().endswith("resume=auto")

    second, runs = opened(tmp_path, "resume=auto")
    assert second.sweep_id == first.sweep_id
    stopped = tmp_path / "2026-05-01" / "12-32-01-run"
    assert runs == [
        ["strategy=ddp", f"output_dir={tmp_path}", f"resume={stopped}"],
        ["strategy=hogwild", f"output_dir={tmp_path}"],
    ]
    second.begin(runs)
    execute(second, 3)
    second.end()
    assert "run 3 of 3: strategy=hogwild" in capsys.readouterr().out
    text = second.directory.report.read_text()
    assert [name for name in STRATEGIES if f"| {name} |" in text] == list(STRATEGIES)
    assert second.directory.picture.is_file()
    assert second.directory.report.is_file()


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["strategy=single,ddp"], ["", ""]),
        (["strategy=single,ddp", "name=mine"], ["strategy=single", "strategy=ddp"]),
        (["job.lr=0.1,0.2", "name=a,b"], ["lr=0.1", "lr=0.1", "lr=0.2", "lr=0.2"]),
        (["job.lr=0.1,0.2", "strategy.lr=1"], ["lr=0.1", "lr=0.2"]),
        (["job.lr=0.1,0.2", "+strategy.lr=1,2"], [f"job.lr={a} strategy.lr={b}" for a in (0.1, 0.2) for b in (1, 2)]),
        ([f"job.text={100 * 'a'},b"], [f"text={72 * 'a'}...", "text=b"]),
    ],
)
def test_a_run_records_in_which_settings_it_differs_beside_its_name(
    tmp_path: Path, words: list[str], settings: list[str]
) -> None:
    runs = expand_sweep([*words, f"output_dir={tmp_path}"])
    sweep, _ = open_sweep(words, runs, Redactor.of_process())
    given: list[str] = []

    def execute(*, sweep: Mapping[str, str] | None) -> RunResult:
        given.append(sweep["settings"])
        return RunResult(status="FINISHED", exit_code=0, run_dir=tmp_path)

    sweep.begin(runs)
    for run in runs:
        sweep.run(run, execute)
    assert given == settings


def test_a_complete_sweep_and_one_of_other_runs_are_not_resumed(tmp_path: Path) -> None:
    first, runs = opened(tmp_path)
    first.begin(runs)
    for number in (1, 2, 3):
        execute(first, number)
    for strategies in (STRATEGIES, STRATEGIES[:2]):
        sweep, runs = opened(tmp_path, "resume=auto", strategies=strategies)
        assert sweep.sweep_id != first.sweep_id
        assert runs == [[f"strategy={name}", f"output_dir={tmp_path}"] for name in strategies]
    assert [s.path.name for s in all_sweeps(OutputDir(tmp_path))] == [first.sweep_id]


def test_runs_that_were_left_out_do_not_keep_a_sweep_unfinished(tmp_path: Path) -> None:
    first, runs = opened(tmp_path)
    first.begin(runs[:2])
    for number in (1, 2):
        execute(first, number)
    assert opened(tmp_path, "resume=auto")[0].sweep_id != first.sweep_id


def test_damaged_records_are_named_and_do_not_keep_a_sweep_from_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, runs = opened(tmp_path)
    first.begin(runs)
    execute(first, 1)
    execute(first, 2)
    damaged = [tmp_path / "2026-05-01" / "12-32-01-run" / "run.json", tmp_path / "sweeps" / "other" / "sweep.json"]
    damaged[1].parent.mkdir()
    for file, text in zip(damaged, ['{"sweep": []}', '{"runs": 5}'], strict=True):
        file.write_text(text)
    second, runs = opened(tmp_path, "resume=auto")
    assert second.sweep_id == first.sweep_id
    assert runs == [[f"strategy={name}", f"output_dir={tmp_path}"] for name in STRATEGIES[1:]]
    output = capsys.readouterr().out
    assert f"run skipped: {damaged[0]} is damaged: sweep is []" in output
    assert f"sweep skipped: {damaged[1]} is damaged: runs is 5" in output


def test_an_error_ends_only_its_own_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*, sweep: Mapping[str, str] | None) -> RunResult:
        raise ConfigError(["output_dir: cannot be written"])

    def broken(*, sweep: Mapping[str, str] | None) -> RunResult:
        raise ZeroDivisionError

    sweep, runs = opened(tmp_path)
    sweep.begin(runs)
    assert sweep.run(runs[0], broken) is None
    assert sweep.exit_code == 1
    assert sweep.run(runs[1], refused) is None
    assert execute(sweep, 3) is not None
    assert sweep.exit_code == 2
    printed = capsys.readouterr()
    assert "ZeroDivisionError" in printed.err
    assert "output_dir: cannot be written" in printed.err
    assert "run 3 of 3: strategy=hogwild; about " not in printed.out  # no run has ended before, so its time is unknown


@pytest.mark.parametrize(("at_run", "code"), [(2, 130), (3, 0)])
def test_a_stop_after_the_last_step_of_a_run_starts_no_other(tmp_path: Path, at_run: int, code: int) -> None:
    """A run whose steps are done finishes, although the signal came while its end was uploaded."""
    stop = StopSignals()

    def run(*, sweep: Mapping[str, str] | None) -> RunResult:
        if int(sweep["run"]) == at_run:
            stop.request(signal.SIGINT, "SIGINT")
        return recorded(tmp_path, sweep=sweep)

    sweep, runs = opened(tmp_path)
    sweep.begin(runs)
    results = sweep.run_in_turn([(overrides, run) for overrides in runs], stop)
    assert [result.status for result in results] == ["FINISHED"] * at_run
    assert sweep.exit_code == code


def test_runs_are_left_out_only_if_the_sweep_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, runs = opened(tmp_path)
    assert not sweep.leaves_out(runs[0], ["x=1: wrong"])
    sweep, runs = opened(tmp_path, "sweep.unfit=skip")
    assert sweep.leaves_out(runs[0], ["x=1: wrong"])
    assert sweep.errors == ["x=1: wrong"]
    line = "left out: strategy=single: x=1: wrong"
    assert line in capsys.readouterr().out
    sweep.begin(runs[1:])
    execute(sweep, 2)
    sweep.end()
    assert f"- {line}\n" in sweep.directory.report.read_text()


def test_equal_runs_are_refused(tmp_path: Path, golden: Golden) -> None:
    with golden.raises(ConfigError):
        opened(tmp_path, strategies=("ddp", "ddp"))


def test_secrets_are_in_no_record(tmp_path: Path) -> None:
    sweep, runs = opened(tmp_path, "job.api_token=hush-hush-1234")
    sweep.begin(runs)
    assert "hush" not in "".join(path.read_text() for path in sweep.directory.path.iterdir())
    assert "job.api_token=hush-hush-1234" in runs[0]


def test_a_primary_file_of_the_user_may_say_where_the_runs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("defaults: [config, _self_]\noutput_dir: mine\n")
    assert output_of(["--config-name=mine", "seed=1,2"]).path == tmp_path / "mine"
