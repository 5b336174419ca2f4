"""Every command of the documentation that starts a run is one that the command line accepts."""

from pathlib import Path

import pytest

from helpers.files.documents import PAGES, ROOT, files, launches
from orchestrator.config.compose import compose, preset_sweep
from orchestrator.config.overrides import example, expand_sweep, is_search
from orchestrator.strategies import registry

WITH_COMMANDS = [page for page in PAGES if launches(page)]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=[str(page.relative_to(ROOT)) for page in WITH_COMMANDS])
def test_the_keys_and_values_of_its_commands_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files(page).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    refused = []
    for words in launches(page):
        overrides = [word for word in words if "=" in word and not word.startswith("-")]
        preset, errors = preset_sweep(overrides), list[str]()
        searches = is_search(overrides, preset)
        for run in [example(overrides, preset)] if searches else expand_sweep(overrides, preset)[:1]:
            compose(run, errors, registry.config_class)
        refused += [f"{' '.join(words)}: {error}" for error in errors]
    assert refused == []
