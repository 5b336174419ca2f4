"""The logs of a run, read while its ranks write."""

from pathlib import Path

import pytest

from helpers.files.golden import Golden
from orchestrator import logs
from orchestrator.records import run_dir as rundir
from orchestrator.records.rank_log import LogLine, LogReader
from orchestrator.records.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = rundir.create(tmp_path, "digits-ddp")
    run.update_record(name="digits-ddp", state="finished")
    write(run, 0, "a0\nb0\n")
    write(run, 10, "a10\nb10\n")
    write(run, 2, "a2\nb2\n", folder="host-1234")
    return run


def write(run: RunDir, rank: int, text: str, *, folder: str = "") -> None:
    file = run.log_file(rank)
    file = file.parent / folder / file.name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as log:
        log.write(text)


def test_ranks_come_in_the_order_of_their_numbers(run: RunDir) -> None:
    """Those of other nodes, whose logs are in a directory of their own, too."""
    reader = LogReader(run)
    assert reader.ranks() == [0, 2, 10]
    assert [(line.rank, line.text) for line in reader.read()] == [
        (0, "a0"), (0, "b0"), (2, "a2"), (2, "b2"), (10, "a10"), (10, "b10"),
    ]  # fmt: skip


def test_only_new_and_whole_lines_are_read(run: RunDir) -> None:
    reader = LogReader(run, [10])
    list(reader.read())
    write(run, 10, "c10\nhal")
    assert list(reader.read(complete=False)) == [LogLine(10, "c10")]
    assert list(reader.read(complete=False)) == []
    write(run, 10, "f\nrest")
    assert list(reader.read()) == [LogLine(10, "half"), LogLine(10, "rest")]


def test_the_verb_shows_the_last_lines_of_each_rank(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.main([str(run.path), "--tail", "1"]) == 0
    assert capsys.readouterr().out == "rank 0 | b0\nrank 2 | b2\nrank 10 | b10\n"
    assert logs.main([str(run.path), "--rank", "2", "--follow"]) == 0
    assert capsys.readouterr().out == "a2\nb2\n"
    for name in ("last", run.path.name):
        assert logs.main([name, "--output-dir", str(run.path.parents[1]), "--rank", "2"]) == 0
        assert capsys.readouterr().out == "a2\nb2\n"


def test_the_parts_of_a_log_are_one(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.log_file(0).parent
    for part in (10, 9, 1):
        (folder / f"rank-10.{part}.log").write_text(f"of part {part}\n")
    assert [line.text for line in LogReader(run, [10]).read()] == ["a10", "b10", "of part 1", "of part 9", "of part 10"]
    assert logs.main([str(run.path), "--rank", "10", "--tail", "2"]) == 0
    assert capsys.readouterr().out == "of part 9\nof part 10\n"


def test_the_verb_names_a_wrong_run_and_a_wrong_rank(
    run: RunDir, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert logs.main([str(run.path / "nowhere")]) == 2
    golden.says(capsys.readouterr().err, RUN=run.path)
    assert logs.main([str(run.path), "--rank", "3"]) == 2
    golden.says(capsys.readouterr().err, RUN=run.path)


def test_the_verb_says_if_the_ranks_have_written_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for log in run.log_file(0).parent.rglob("rank-*.log"):
        log.write_text("")
    assert logs.main([str(run.path)]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"logs: the ranks of {run.path} have written nothing\n")


def test_a_reader_goes_on_in_another_directory_of_the_run(run: RunDir, tmp_path: Path) -> None:
    """As on the host of a driver that has died, when another host continues the run."""
    reader = LogReader(run, [10])
    list(reader.read())
    copy = RunDir(tmp_path / "copy")
    write(copy, 10, "a10\nb10\nc10\n")
    reader.move_to(copy)
    assert list(reader.read()) == [LogLine(10, "c10")]
