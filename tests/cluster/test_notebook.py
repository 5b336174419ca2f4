"""A real Jupyter kernel: the example notebook, and interrupts."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.records.runs import ROOT, events_below, losses

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: pip install -e '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install -e '.[test]'")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel: pip install -e '.[test]'")

EXAMPLE = ROOT / "docs/examples/notebook.ipynb"

LONG = """
import time, orchestrator
from jobs.digits import Digits

class Slow(Digits):
    def loss(self, output, target):
        time.sleep(PAUSE_S)
        return super().loss(output, target)

result = orchestrator.run(Slow, strategy="single", tracking="none", job={"hidden": 16}, name="long",
    train={"steps": 5000, "eval_every": 0, "log_every": 1}, resume="auto", cluster={"stop_grace_s": 60})
"""


@pytest.fixture
def kernel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def client_of(notebook: Any, folder: Path) -> Any:
    return nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )


def printed(cell: Any) -> str:
    """The text below a cell. It may be neither a display of its own for each line nor a warning."""
    assert {o.output_type for o in cell.outputs} <= {"stream", "execute_result"}
    assert {o.name for o in cell.outputs if o.output_type == "stream"} <= {"stdout"}
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def value_of(cell: Any) -> str:
    (result,) = [o for o in cell.outputs if o.output_type == "execute_result"]
    return str(result.data["text/plain"])


@pytest.mark.campaign
@pytest.mark.usefixtures("kernel_environment")
def test_the_example(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    client_of(notebook, tmp_path).execute()
    _, first, summary, checkpoint = [cell for cell in notebook.cells if cell.cell_type == "code"]
    lines = printed(first)
    assert "moons-ddp: strategy ddp, job moons, 2 workers, 100 steps" in lines
    assert "\x1b" not in lines
    assert value_of(first).startswith("RunResult(FINISHED, steps=100, ")
    accuracy, _ = eval(value_of(summary))
    assert accuracy > 0.8
    assert value_of(checkpoint) == "('step-00000100', True)"


class Kernel:
    """A kernel in which one cell is interrupted a number of times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notebook = nbformat.v4.new_notebook()
        self.client = client_of(self.notebook, folder)

    async def run(self, source: str, *, interrupt_when: Sequence[Callable[[], bool]] = ()) -> Any:
        """Execute ``source``, and interrupt it at each of these moments."""
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)
        self.client.allow_errors = True
        running = asyncio.create_task(self.client.async_execute_cell(cell, len(self.notebook.cells) - 1))
        for begun in interrupt_when:
            deadline = time.monotonic() + 200
            while not begun() and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            await self.client.km.interrupt_kernel()
        return await running

    def has_step(self, step: int) -> bool:
        journals = self.folder.glob("outputs/*/*/metrics.jsonl")
        return any(max(losses(journal.parent), default=0) >= step for journal in journals)

    def has(self, times: int, event: str) -> bool:
        return len(events_below(self.folder, event)) >= times


@pytest.mark.campaign  # one interrupt ends a run as one of a terminal does, which ``tests/ray/test_training.py`` shows
@pytest.mark.usefixtures("kernel_environment")
def test_an_interrupt_ends_the_run_and_not_the_kernel(tmp_path: Path) -> None:
    async def story() -> None:
        kernel = Kernel(tmp_path)
        async with kernel.client.async_setup_kernel():
            once = await kernel.run(LONG.replace("PAUSE_S", "0.02"), interrupt_when=[lambda: kernel.has_step(5)])
            assert "stopped by SIGINT at step" in printed(once)
            assert "next: orchestrator.run(Slow, 'strategy=single', " in printed(once)
            assert value_of(await kernel.run("result.status, result.exit_code")) == "('KILLED', 130)"

    asyncio.run(story())


@pytest.mark.usefixtures("kernel_environment")
def test_interrupts_end_the_run_and_not_the_kernel(tmp_path: Path) -> None:
    """A step lasts longer than this test, so that only the second interrupt ends the run."""

    async def story() -> None:
        kernel = Kernel(tmp_path)
        async with kernel.client.async_setup_kernel():
            moments = [lambda: kernel.has(1, "generation_started"), lambda: kernel.has(1, "stop_requested")]
            twice = await kernel.run(LONG.replace("PAUSE_S", "600"), interrupt_when=moments)
            assert [o.ename for o in twice.outputs if o.output_type == "error"] == ["KeyboardInterrupt"]
            assert {o.name for o in twice.outputs if o.output_type == "stream"} == {"stdout"}

            after = "import json, ray; from pathlib import Path; from orchestrator.records.run_dir import RunDir"
            after += "; (record,) = Path('outputs').glob('*/*/run.json')"
            after += "; (not ray.is_initialized(), RunDir(record.parent).read_record()['state'])"
            assert value_of(await kernel.run(after)) == "(True, 'killed')"

    asyncio.run(story())
