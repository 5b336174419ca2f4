"""``orchestrator new``: names that cannot be used are refused, and what it writes is whole."""

from pathlib import Path

import pytest

from helpers.files.golden import Golden
from orchestrator.new import FILES, main


@pytest.mark.parametrize("name", ["My-Project", "class", "torch", "digits", "there", "there/file/below"])
def test_a_name_that_cannot_be_used_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert main([name]) == 2
    golden.says(capsys.readouterr().err)


def test_a_project_has_its_name_everywhere(tmp_path: Path) -> None:
    assert main([str(tmp_path / "deep" / "two_spirals")]) == 0
    texts = {
        file: (tmp_path / "deep" / "two_spirals" / file.replace("NAME", "two_spirals")).read_text() for file in FILES
    }
    assert not [file for file, text in texts.items() if "NAME" in text or "CLASS" in text]
    assert "_target_: two_spirals.TwoSpirals" in texts["conf/job/NAME.yaml"]
    assert "class TwoSpirals(Job)" in texts["NAME.py"]
