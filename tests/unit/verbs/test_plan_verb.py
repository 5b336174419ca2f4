"""The arguments of `orchestrator plan`."""

import json
from pathlib import Path

import pytest

from orchestrator.plan import main
from orchestrator.prediction.published import PUBLISHED


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--cluster", "8x8xH10"], "did you mean H100?"),
        (["--cluster", "8x8xH100", "--link", "NDX"], "did you mean NDR?"),
        (["--cluster", "1x9xH100"], "at most 8 of H100"),
        (["--published", "none.csv"], "none.csv: cannot be read"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert not said.out


@pytest.mark.parametrize("words", [[], ["--cluster", "1x1xH100", "--published", "x.csv"], ["--tokens", "many"]])
def test_wrong_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_published_runs_as_json_and_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = PUBLISHED.read_text().splitlines()
    path = tmp_path / "few.csv"
    path.write_text("\n".join([rows[0], *rows[-3:]]) + "\n")
    assert main(["--published", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3
    assert all(row["predicted"] / row["measured"] - 1 == pytest.approx(row["error"]) for row in found)
    assert main(["--published", str(path)]) == 0
    assert "dense" in capsys.readouterr().out
