"""Disturbed rounds are repeated, and docs/benchmarks.md says what benchmarks/results has."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))

import all as every  # noqa: E402
from harness import published  # noqa: E402
from harness.disturbance import first_undisturbed  # noqa: E402
from harness.published import Measured, Result  # noqa: E402
from harness.rounds import Claim, table  # noqa: E402

COMMANDS = {"speed": "python benchmarks/speed.py"}
PAGE = "before\n<!-- benchmarks/all.py writes speed -->\n\n-\n\n<!-- end -->\nafter\n"


def result() -> Result:
    claims = [
        Claim(name="ours / theirs", ratios=[0.901, 0.95, 1.1], at_least=1.0),
        Claim(name="steps of 5 ms", ratios=[338.0], at_least=3.0),
        Claim(name="no goal", ratios=[0.05, 0.06]),
    ]
    head = ["claim", "median", "goal", "reached", "spread", "each round"]
    text = table(head, [claim.row() for claim in claims])
    return published.read_result(f"# speed\n\n2026-11-24: 2 cores. Compare the ratios.\n\n{text}\n\nnotes | more\n")


def test_the_first_round_that_is_not_disturbed_counts(capsys: pytest.CaptureFixture[str]) -> None:
    attempts = iter([("a", 0.3, "process 7 (make)"), ("b", 0.05, ""), ("c", 0.0, "")])
    assert first_undisturbed(attempts) == "b"
    assert next(attempts)[0] == "c"
    assert capsys.readouterr().out == (
        "  disturbed: other programs used 30% of the CPUs, most of it process 7 (make)\n"
    )


def test_a_benchmark_gives_up_when_all_rounds_are_disturbed() -> None:
    with pytest.raises(SystemExit, match="given up after 3 disturbed rounds"):
        first_undisturbed([("a", 0.3, "process 7")] * 3)


def test_a_result_is_read_as_it_was_written() -> None:
    assert result() == Result(
        where="2026-11-24: 2 cores",
        claims=[
            Measured(what="ours / theirs", rounds=[0.901, 0.95, 1.1], median=0.95, goal=">= 1.00", missed=True),
            Measured(what="steps of 5 ms", rounds=[338.0], median=338.0, goal=">= 3.00", missed=False),
            Measured(what="no goal", rounds=[0.05, 0.06], median=0.055, goal="", missed=False),
        ],
    )


def test_a_table_has_the_spread_beside_each_median() -> None:
    assert published.written(PAGE, {"speed": result()}, COMMANDS) == (
        "before\n"
        "<!-- benchmarks/all.py writes speed -->\n"
        "\n"
        "| what | median | spread | goal | command |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| ours / theirs | **0.95** | 0.90 to 1.10 | >= 1.00 | `python benchmarks/speed.py` |\n"
        "| steps of 5 ms | 338 |  | >= 3.00 |  |\n"
        "| no goal | 0.055 | 0.050 to 0.060 |  |  |\n"
        "\n"
        "- `speed`: 2026-11-24: 2 cores\n"
        "\n"
        "<!-- end -->\n"
        "after\n"
    )


def test_a_result_that_is_missing_is_said_and_the_others_are_published() -> None:
    page = PAGE.replace("speed", "speed memory")
    commands = {**COMMANDS, "memory": "python benchmarks/memory.py"}
    text = published.written(page, {"speed": result()}, commands)
    assert "| no goal | 0.055 |" in text
    assert "- `memory`: not measured; run `python benchmarks/memory.py`\n" in text
    assert published.differences(text, {"speed": result()}) == []


@pytest.mark.parametrize(
    ("published_text", "found"),
    [
        ("0.95", []),
        ("1.10", []),
        ("1.11", ["ours / theirs: 1.11 is published, and 0.9 to 1.1 was measured"]),
        ("0.89", ["ours / theirs: 0.89 is published, and 0.9 to 1.1 was measured"]),
    ],
)
def test_a_published_figure_lies_in_the_spread_of_its_rounds(published_text: str, found: list[str]) -> None:
    results = {"speed": result()}
    page = published.written(PAGE, results, COMMANDS).replace("**0.95**", f"**{published_text}**")
    assert published.differences(page, results) == found


def test_each_claim_is_published_under_its_name() -> None:
    results = {"speed": result()}
    page = published.written(PAGE, results, COMMANDS).replace("| no goal |", "| another |")
    assert published.differences(page, results) == [
        "another: published, but not among the results",
        "no goal: measured, but not published",
    ]


def test_the_documentation_says_what_was_measured() -> None:
    """If it fails, run `python benchmarks/all.py --check`."""
    page = every.PAGE.read_text()
    assert len(published.parts(page, published.WRITER)) >= 8
    assert published.differences(page, every.results()) == []


def test_the_table_of_commands_names_every_script_that_measures() -> None:
    readme = (every.HERE / "README.md").read_text()
    known = every.benchmarks(readme)
    assert all((ROOT / benchmark.command.split()[1]).exists() for benchmark in known)
    assert min(benchmark.duration_s for benchmark in known) == 20
    scripts = {path.name for path in every.HERE.glob("*.py") if '\nif __name__ == "__main__":' in path.read_text()}
    assert {name for name in scripts if f"`python benchmarks/{name}" not in readme} == set()


def test_the_outcome_names_what_failed_and_what_was_left_out() -> None:
    assert every.outcome({"a": 0, "b": 1, "gpu": every.NOT_HERE, "c": None}) == (
        "1 of 4 benchmarks succeeded\n"
        "b: failed with exit code 1\n"
        "gpu: left out: this machine cannot run it (exit code 2)\n"
        "c: killed: it took too long"
    )
