"""The arguments of `orchestrator plan`."""

import json
from pathlib import Path

import pytest

from orchestrator.features.plan.prediction.published import PUBLISHED
from orchestrator.plan import main

ROWS = PUBLISHED.read_text().splitlines()
DEVICE = "memory_gib: 80, memory_gb_s: 100, inside: NVLink4, between: NDR, node: 8, domain: null, source: me}}}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--cluster", "8x8xH10"], "did you mean H100?"),
        (["--cluster", "8x8xH100", "--link", "NDX"], "did you mean NDR?"),
        (["--cluster", "1x9xH100"], "at most 8 of H100"),
        (["--published", "none.csv"], "none.csv: cannot be read"),
        (["--cluster", "9" * 5000 + "x8xH100"], "expected NODESxDEVICESxNAME"),
        (["--cluster", "1x8xH100", "strategy=ddp", "strategy.num_workers=[2,8]", "job=toy"], "plan one of them"),
        (["--cluster", "1x8xH100", "--devices", "{devices: {Z: {bf16: 0, " + DEVICE], "bf16=0.0: must be between"),
        (["--cluster", "1x8xH100", "--devices", "{devices: {Z: {bf16: -5, " + DEVICE], "bf16=-5.0: must be between"),
        (["--cluster", "1x8xH100", "--devices", "{devices: {Z: {bf16: .inf, " + DEVICE], "expected a number"),
        (["--cluster", "1x8xH100", "--devices", "{devices: {Z: {bf16: 5, reached: 2, " + DEVICE], "at most 1"),
        (["--cluster", "1x8xH100", "--devices", "{links: {W: {gb_s: 0, source: me}}}"], "gb_s=0.0: must be between"),
        (["--cluster", "1x8xH100", "--devices", "[" * 5000], "cannot be read"),
        (["--cluster", "1x8xH100", "--devices", "5"], "cannot be read"),
        (["--published", ""], "lacks the columns"),
        (["--published", ROWS[0]], "has no rows"),
        (["--published", ROWS[0] + "\na,b"], "row 1 () cannot be read"),
        (
            ["--published", "\n".join([ROWS[0], ROWS[1].replace(",64,", ",0,")])],
            "expected a whole number of at least 1",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[-2] in ("--devices", "--published") and words[-1] != "none.csv":
        (tmp_path / "file").write_text(words[-1])
        words = [*words[:-1], str(tmp_path / "file")]
    assert main(words) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert not said.out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--cluster", "1x1xH100", "--published", "x.csv"],
        *(
            [option, value]
            for option in ("--tokens", "--price", "--failure-hours")
            for value in ("many", "0", "-5", "nan")
        ),
        ["--tokens", "9" * 5000],
        ["--rows", "0"],
        ["--picture", "out.txt"],
        ["--picture", "nowhere/out.png"],
    ],
)
def test_wrong_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_published_runs_as_json_and_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.csv"
    path.write_text("\n".join([ROWS[0], *ROWS[-3:]]) + "\n")
    assert main(["--published", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3
    assert all(row["predicted"] / row["measured"] - 1 == pytest.approx(row["error"]) for row in found)
    assert main(["--published", str(path)]) == 0
    assert "dense" in capsys.readouterr().out
