"""Which tests run when, in which order, and on how many processes.

Three tiers:

- ``pytest`` runs the fast one, in less than two minutes on two cores: ``tests/unit`` and ``tests/features`` without the
  tests marked ``slow``, and a few tests of other folders that are marked ``fast``: one run at defaults, equal loss over
  five layouts, one recovery.
- ``pytest -m "not campaign"`` runs everything except the campaign. ``.ci/run`` runs this.
- ``pytest -m campaign`` runs the long ones: more kinds of faults at more moments, and combinations (``in_turn``).

``pytest -m gpu`` runs those that need a GPU, which are skipped where torch sees none.

A tier runs on two processes (pytest-xdist), file by file; at the end, one of them runs ``tests/cluster`` and the other
``tests/ray``, each as a whole. Without ``tests/command``, as in ``.ci/run``, these two begin at once, and two more
processes run the other files beside them: a single one leaves CPUs idle, because ranks mostly wait for each other.
With a path or ``-k``, pytest runs the tests selected in this one process, and leaves out only the campaign; tests named
by ``::`` always run.

Every test has the name of its folder as a marker: ``pytest -m "distributed or tracking"``.
"""

import atexit
import gc
import itertools
import math
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden, remove_old_texts

pytest.register_assert_rewrite("helpers.faults.check")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a model hub
os.environ.setdefault("RAY_worker_niceness", "0")  # no run waits for the other tests
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="orchestrator-tests-")  # where runs remember what they compared
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

gc.disable()  # until the tests are collected: what that makes is no garbage, and takes long to look through

HERE = Path(__file__).parent
FEATURES = HERE.parent / "orchestrator/features"
FOLDERS = ("unit", "features", "tracking", "command", "distributed", "gpu", "cluster", "ray")
"""In the order they run, as far as they depend on it:

- ``command`` asserts that no Ray is found on this machine, so it runs well before ``cluster`` and ``ray``.
- ``ray`` is last: the user's token stays in its process until the end, and ``cluster`` starts commands that must not
  inherit it.
"""
QUICK = ("unit", "features")
"""Their tests are fast, except those that are marked otherwise."""
WHOLE = ("gpu", "cluster", "ray")
"""Each runs in one process; ``cluster`` and ``ray`` at the same time, because the tests of ``cluster`` mostly wait."""
LONGEST = ("ray", "distributed")
"""The folders with which the fast tier begins, so that at its end no process waits for a long test of the other."""
WITHOUT_COMMAND = "not command"
"""In an expression of markers, it lets the folders in :data:`WHOLE` begin first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the files in tests/golden anew")


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of the terminal that started the tests would change what a table shows."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.node, renew=request.config.getoption("renew_golden"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, bool | None, bool | None]:
    passed = yield
    if isinstance(golden := pyfuncitem.funcargs.get("golden"), Golden):
        golden.end()
    return passed


@pytest.hookimpl(tryfirst=True)  # before xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    option = config.option
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or option.keyword
    if not option.markexpr:
        if not chosen:
            option.markexpr = "fast"
        elif not any("::" in arg for arg in config.args):
            option.markexpr = "not campaign"
    if option.renew_golden and getattr(option, "numprocesses", None):
        option.dist = "loadfile"  # because each process writes the texts of whole modules
    shown = option.usepdb or option.capture == "no"
    in_one_process = chosen or shown or option.collectonly or option.markexpr == "campaign"
    is_worker = hasattr(config, "workerinput")
    if not in_one_process and not is_worker and getattr(option, "numprocesses", 0) is None:
        option.numprocesses = 4 if _whole_first(config) else 2
        option.dist = "loadfile"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class FilesInOrder(LoadFileScheduling):  # type: ignore[misc]
        """File by file in the order of :data:`FOLDERS`, but the folders in :data:`WHOLE` each in one process."""

        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return next((folder for folder in WHOLE if file.startswith(f"tests/{folder}/")), file)

    config.option.loadscopereorder = False  # by size, the largest first
    return FilesInOrder(config, log) if config.option.dist == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which the tier runs no test, as far as its text tells: the imports take longest."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if any(collection_path.is_relative_to(HERE / folder) for folder in QUICK):
        if config.option.markexpr == "fast":
            is_left_out = re.search(r"^pytestmark = .*mark\.(slow|campaign)", text, re.MULTILINE) is not None
        else:
            is_left_out = "not fast" in config.option.markexpr and "mark.slow" not in text
    else:
        is_left_out = config.option.markexpr == "fast" and "mark.fast" not in text
    return True if is_left_out else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the markers that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_what_is_missing(config, items)
    _take_turns(items)
    for item in items:
        folder = folder_of(item)
        if folder in FOLDERS:
            item.add_marker(folder)
        if folder in QUICK and not {"slow", "campaign"} & {marker.name for marker in item.iter_markers()}:
            item.add_marker("fast")
    is_first_process = getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0"
    if config.option.renew_golden and is_first_process and not any("::" in arg for arg in config.args):
        remove_old_texts(items)
    first = WHOLE if _whole_first(config) else LONGEST if config.option.markexpr == "fast" else ()
    order = [*first, *FOLDERS]
    items.sort(key=lambda item: order.index(f) if (f := folder_of(item)) in FOLDERS else -1)


def _leave_out_what_is_missing(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = {path.name for path in FEATURES.iterdir()}
    missing = [item for item in items if not {n for mark in item.iter_markers("needs") for n in mark.args} <= there]
    if missing:
        config.hook.pytest_deselected(items=missing)
        items[:] = [item for item in items if item not in {*missing}]


def _take_turns(items: list[pytest.Item]) -> None:
    """Of a test marked ``in_turn``, keep each value of each parameter for CI, and all combinations for the campaign.

    The first values of all parameters come together, then the second ones; the values of a shorter list come again.
    """
    tests: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("in_turn"):
            tests[item.function].append(item)  # type: ignore[attr-defined]
    for combined in tests.values():
        lengths = [len(mark.args[1]) for mark in combined[0].iter_markers("parametrize")]
        kept = {tuple(turn % length for length in lengths) for turn in range(max(lengths))}
        if len(combined) == math.prod(lengths):  # and none is chosen by its name
            for item, turn in zip(combined, itertools.product(*map(range, lengths)), strict=True):
                if turn not in kept:
                    item.add_marker("campaign")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries say at the exit what they have leaked


def _whole_first(config: pytest.Config) -> bool:
    return WITHOUT_COMMAND in config.option.markexpr


def folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
