"""`python -m orchestrator.compare` on real run directories."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden
from orchestrator.compare import main
from orchestrator.display.comparison import read_curve, read_run
from orchestrator.features.sweep.comparison_analysis import Comparison, labels
from orchestrator.features.sweep.comparison_report import table
from orchestrator.protocol.events import MetricsLogged
from orchestrator.records import run_dir as rundir
from orchestrator.records.journal import Journal
from orchestrator.records.run_dir import RunDir

SUMMARY: dict[str, Any] = {
    "samples_per_s": 4000.0,
    "step_ms_p50": 14.94,
    "step_ms_p95": 16.31,
    "final_loss": 0.0423,
    "val_accuracy": 0.978,
    "startup_s": 4.21,
    "restarts": 0,
}


def make_run(
    output_dir: Path,
    name: str,
    *,
    strategy: str,
    workers: int = 2,
    points: int = 20,
    job: str = "digits",
    hidden: int = 512,
    **summary: Any,
) -> RunDir:
    path = output_dir / "2026-05-01" / name
    (path / "logs").mkdir(parents=True)
    run = RunDir(path)
    run.update_record(
        state="finished",
        name=f"{job}-{strategy}",
        strategy=strategy,
        job=job,
        params={"job.hidden": hidden, "train.steps": points},
        plan={"mesh": {"data_parallel_size": workers, "pipeline_parallel_size": 1}},
        summary=summary,
    )
    journal = Journal(run)
    for step in range(1, points + 1):
        metrics = {"train/loss": 2.0 / step, "train/samples_seen": step * 64.0}
        journal.emit(MetricsLogged(time=1e9 + step * 0.5, step=step, metrics=metrics))
    journal.close()
    return run


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    make_run(tmp_path, "12-30-01-digits-ddp", strategy="ddp", **{**SUMMARY, "samples_per_s": 7000.0})
    make_run(tmp_path, "12-31-01-digits-single", strategy="single", workers=1, **SUMMARY)
    make_run(tmp_path, "12-32-01-digits-ddp", strategy="ddp", workers=4)
    return tmp_path


def table_of(runs: Iterable[RunDir]) -> str:
    return table(Comparison([read_run(run.path) for run in runs]))


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a table by the name of the run."""
    cells = [line.split() for line in text.splitlines()]
    return {c[0]: c[1:] for c in cells if c and c[0][:2].isdigit()}


def test_table_has_every_figure_and_guesses_none(
    output_dir: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert main(["--output-dir", str(output_dir), "--no-picture"]) == 0
    golden("comparison/table", capsys.readouterr().out)
    assert not (output_dir / "compare.png").exists()


def test_bubbles_have_a_column_where_any_run_has_one(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "bubble" not in table_of(rundir.all_runs(output_dir))
    staged = {**SUMMARY, "bubble_pct": 31.4, "bubble_theory_pct": 27.3}
    make_run(output_dir, "12-33-01-digits-pipeline", strategy="pipeline", **staged)
    text = table_of(rundir.all_runs(output_dir))
    assert "bubble (theory)" in text
    assert "31% (27%)" in text
    assert rows(text)["12-31-01-digits-single"][9] == "-"


def test_last_takes_the_newest_in_their_order(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output-dir", str(output_dir), "--last", "2", "--no-picture"]) == 0
    assert list(rows(capsys.readouterr().out)) == ["12-31-01-digits-single", "12-32-01-digits-ddp"]


def test_named_runs_alone_in_the_order_given(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _, last = rundir.all_runs(output_dir)
    assert main([str(first.path), last.path.name, "--output-dir", str(output_dir), "--no-picture"]) == 0
    assert list(rows(capsys.readouterr().out)) == ["12-32-01-digits-ddp", "12-30-01-digits-ddp"]


def test_without_a_single_run_the_first_measured_one_is_the_base(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, "12-30-01-a", strategy="ddp"),
        make_run(tmp_path, "12-31-01-b", strategy="ddp", **SUMMARY),
        make_run(tmp_path, "12-32-01-c", strategy="pipeline", **{**SUMMARY, "samples_per_s": 2000.0}),
    ]
    text = table_of(runs)
    assert "relative to ddp x2, 12:31:01" in text
    assert "0.50x" in rows(text)["12-32-01-c"]


def test_speeds_are_relative_to_a_run_of_the_same_work(tmp_path: Path) -> None:
    def run(name: str, strategy: str, samples_per_s: float, **work: Any) -> Any:
        return make_run(tmp_path, name, strategy=strategy, samples_per_s=samples_per_s, **work)

    runs = [
        run("12-30-01-a", "single", 4000.0),
        run("12-31-01-b", "ddp", 7000.0),
        run("12-32-01-c", "ddp", 90.0, job="gpt"),
        run("12-33-01-d", "single", 60.0, job="gpt"),
        run("12-34-01-e", "ddp", 300.0, hidden=4096),
    ]
    text = table_of(runs)
    speeds = {name: next((cell for cell in cells if cell.endswith("x")), "-") for name, cells in rows(text).items()}
    assert list(speeds.values()) == ["1.00x", "1.75x", "1.50x", "1.00x", "-"]
    assert "speed" not in table_of(runs[-1:])
    assert "speed: relative to single x2 digits, single x2 gpt, of the same job" in text


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_narrow_table_names_what_it_leaves_out(
    columns: int, output_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = table_of(rundir.all_runs(output_dir))
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "columns left out: restarts" in text
    assert "4,000" in text


def test_a_narrow_table_keeps_the_states_that_differ(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert "finished" not in table_of(rundir.all_runs(output_dir))
    next(iter(rundir.all_runs(output_dir))).update_record(state="pruned")
    assert "pruned" in table_of(rundir.all_runs(output_dir))


def test_labels_tell_runs_apart(output_dir: Path) -> None:
    runs = [read_run(run.path) for run in rundir.all_runs(output_dir)]
    assert labels(runs) == ["ddp x4", "single x1", "ddp x2"]
    assert labels([runs[0], runs[0]]) == ["ddp x4, 12:32:01"] * 2


def test_curve_is_loss_against_samples_and_seconds(output_dir: Path) -> None:
    curve = read_curve(next(rundir.all_runs(output_dir)))
    assert curve.losses[:2] == [2.0, 1.0]
    assert curve.samples[:2] == [64.0, 128.0]
    assert curve.seconds[:2] == [0.0, 0.5]
    assert len(curve.losses) == 20


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 6])
def test_picture(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(count):
        # The last one has logged nothing, and a long one is smoothed.
        points = 200 if n == 0 else 0 if n == 5 else 20
        make_run(tmp_path, f"12-3{n}-01-run", strategy="ddp", points=points, **(SUMMARY if n % 2 == 0 else {}))
    assert main(["--output-dir", str(tmp_path), "--last", "6"]) == 0
    picture = tmp_path / "compare.png"
    assert f"picture: {picture}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_json_and_csv_have_the_same_values(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--output-dir", str(output_dir), "--target-loss", "0.5"]
    assert main([*words, "--json"]) == 0
    from_json = json.loads(capsys.readouterr().out)["runs"]
    assert main([*words, "--csv"]) == 0
    from_csv = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in from_json] == from_csv
    assert from_json[0]["scaling_efficiency"] == pytest.approx(0.875)
    assert [row["seconds_to_target_loss"] for row in from_json] == [1.5, 1.5, 1.5]
    assert not (output_dir / "compare.png").exists()


@pytest.mark.parametrize(("chosen", "names"), [("ab", ["12-31-01-b", "12-32-01-c"]), ("last", ["12-33-01-d"])])
def test_the_runs_of_a_sweep(
    chosen: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    for name, sweep in (("12-30-01-a", None), ("12-31-01-b", "abc"), ("12-32-01-c", "abc"), ("12-33-01-d", "xyz")):
        run = make_run(tmp_path, name, strategy="ddp", **SUMMARY)
        run.update_record(sweep=None if sweep is None else {"id": sweep, "name": "seed=0,1"})
    words = ["--output-dir", str(tmp_path), "--no-picture"]
    assert main([*words, "--sweep", chosen]) == 0
    assert list(rows(capsys.readouterr().out)) == names
    assert main([*words, "--sweep", "none"]) == 2
    golden.says(capsys.readouterr().err)


def test_repeats_are_one_row_with_mean_and_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, speed in enumerate((3900.0, 4100.0)):
        run = make_run(tmp_path, f"12-3{seed}-01-a", strategy="ddp", **{**SUMMARY, "samples_per_s": speed})
        run.update_record(params={"job.hidden": 512, "seed": seed})
    words = ["--output-dir", str(tmp_path), "--no-picture"]
    assert main(words) == 0
    assert "--group shows repeats as one row" in capsys.readouterr().out
    assert main([*words, "--group"]) == 0
    text = capsys.readouterr().out
    assert list(rows(text)) == ["12-30-01-a,"]
    assert "12-30-01-a, 2 runs" in text
    assert "4,000 ±2.5%" in text


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output-dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message
    assert "--output-dir" in message


@pytest.mark.parametrize("content", ["{", "[1]", "\xff\xfe"])
def test_unreadable_record(content: str, output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = next(rundir.all_runs(output_dir)).record_file
    record.write_bytes(content.encode("latin-1"))
    assert main([str(record.parent), "--output-dir", str(output_dir)]) == 2
    captured = capsys.readouterr()
    assert f"{record} is damaged: " in captured.err
    assert captured.out == ""
    assert main(["--output-dir", str(output_dir), "--no-picture"]) == 0, "the newest runs without this one"
    assert f"warning: run left out: {record} is damaged: " in capsys.readouterr().err


def test_a_record_with_unexpected_values_is_shown_without_them(tmp_path: Path) -> None:
    run = make_run(tmp_path, "12-30-01-a", strategy="ddp", samples_per_s=None, final_loss="much", step_ms_p50=1.5)
    run.update_record(plan=None, state=None)
    found = rows(table_of([run]))["12-30-01-a"]
    assert found == ["-", "ddp", "-", "-", "1.5", *["-"] * 4]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"compare: {tmp_path}: no such run in " in capsys.readouterr().err


def test_an_unwritable_picture_is_said_after_the_table(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output-dir", str(output_dir), "--picture", str(output_dir / "missing" / "a.png")]) == 1
    captured = capsys.readouterr()
    assert len(rows(captured.out)) == 3
    assert "--picture" in captured.err


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_last_must_be_a_positive_number(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([f"--last={number}"])
    assert stopped.value.code == 2
    assert "whole number" in capsys.readouterr().err


def test_imports_neither_torch_nor_ray_nor_mlflow(output_dir: Path) -> None:
    code = (
        "import json, sys; from orchestrator.compare import main; "
        f"code = main(['--output-dir', {str(output_dir)!r}, '--no-picture']); "
        "print(json.dumps([code, sorted({'torch', 'ray', 'mlflow', 'hydra', 'matplotlib'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_ascii_stdout(output_dir: Path) -> None:
    make_run(output_dir, "12-33-01-größe", strategy="ddp")
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.compare", "--output-dir", str(output_dir), "--no-picture"],
        capture_output=True,
        timeout=60,
        check=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "", "COLUMNS": "160"},
    )
    text = done.stdout.decode("ascii")
    assert "7,000  ##########" in text
    assert "12-33-01-gr??e" in text


def test_a_cluster_is_asked_unless_what_to_compare_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = rundir.create(Path("outputs"), "digits-ddp")
    run.update_record(name="digits-ddp", state="finished")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    assert main(["--no-picture"]) == 2
    assert "compare: --address=http://127.0.0.1:1: " in capsys.readouterr().err
    assert main([str(run.path), "--no-picture"]) == 0
    assert main(["--mlflow", "nothing://"]) == 2
    assert "compare: --mlflow: " in capsys.readouterr().err
