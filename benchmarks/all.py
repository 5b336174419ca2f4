"""The benchmarks of docs/benchmarks.md in one command, and its tables from their results.

python benchmarks/all.py [--only NAME ...] [--list] [--check]

The commands and how long they take are those of the table in benchmarks/README.md. Each one is a process of its own,
which is ended after four times that duration. What fails is named at the end. Those whose results the page does not
show run with --only. With --check, nothing runs: it compares docs/benchmarks.md with the results.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness import published
from harness.arms import HERE, RESULTS, kill_tree

from orchestrator.records.git import carried, git_facts

PAGE = HERE.parent / "docs" / "benchmarks.md"
PATIENCE = 4
"""The limit of a command is this many times its duration: rounds are repeated, and other machines are slower."""
NOT_HERE = 2
"""The exit code of a benchmark that this machine cannot run."""
_ROW = re.compile(r"\| `(python benchmarks/\w+\.py[^`A-Z]*)` \|.*\| (\d+) (s|min)\b[^|]*\|")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A command of the table in benchmarks/README.md, and the seconds that it takes there."""

    command: str
    duration_s: float

    @property
    def name(self) -> str:
        """The name of its results; see :func:`harness.rounds.report`."""
        script, *arguments = self.command.removeprefix("python benchmarks/").split()
        return "-".join([script.removesuffix(".py"), *arguments]).replace("_", "-")


def benchmarks(readme: str) -> list[Benchmark]:
    """Return the benchmarks in the table of ``readme``, without those that need a file of the user's."""
    rows = filter(None, map(_ROW.match, readme.splitlines()))
    return [Benchmark(command=row[1], duration_s=float(row[2]) * (60 if row[3] == "min" else 1)) for row in rows]


def main() -> int:
    known = {benchmark.name: benchmark for benchmark in benchmarks((HERE / "README.md").read_text())}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help="run only these")
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--check", action="store_true", help="compare the documentation with the results; run nothing")
    arguments = parser.parse_args()
    shown = published.names(PAGE.read_text())
    chosen = [known[name] for name in arguments.only or (name for name in known if name in shown)]
    if arguments.list:
        print(listing(chosen, [b for b in known.values() if b not in chosen]))
        return 0
    if arguments.check:
        return check()
    os.environ |= carried(git_facts(HERE))  # of the code before the results of the first benchmark change it
    codes = {b.name: run(b) for b in chosen}
    PAGE.write_text(published.written(PAGE.read_text(), results(), {b.name: b.command for b in known.values()}))
    print("\n" + outcome(codes))
    return 1 if any(code not in (0, NOT_HERE) for code in codes.values()) else 0


def listing(chosen: Sequence[Benchmark], others: Sequence[Benchmark]) -> str:
    """Return the names, durations and commands of the benchmarks that would run, and the names of the others."""
    rows = [(b.name, b.duration_s, b.command) for b in chosen]
    rows.append(("all of these", sum(b.duration_s for b in chosen), ""))
    lines = [f"{name:22} {seconds / 60:5.1f} min  {command}".rstrip() for name, seconds, command in rows]
    return "\n".join([*lines, f"with --only: {', '.join(b.name for b in others)}"])


def run(benchmark: Benchmark) -> int | None:
    """Run a benchmark and return its exit code; None if it was killed because it took too long."""
    print(f"\n{benchmark.command}", flush=True)
    process = subprocess.Popen(
        [sys.executable, *benchmark.command.split()[1:]], cwd=HERE.parent, stdin=subprocess.DEVNULL
    )
    began = time.monotonic()
    try:
        code = process.wait(PATIENCE * benchmark.duration_s)
        print(
            f"took {(time.monotonic() - began) / 60:.1f} min; {benchmark.duration_s / 60:.1f} are expected", flush=True
        )
        return code
    except BaseException as error:  # also an interrupt
        kill_tree(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None


def outcome(codes: Mapping[str, int | None]) -> str:
    """Return how many benchmarks succeeded, and the others with their exit codes."""
    others = {name: code for name, code in codes.items() if code != 0}
    lines = [f"{len(codes) - len(others)} of {len(codes)} benchmarks succeeded"]
    for name, code in others.items():
        left_out = f"left out: this machine cannot run it (exit code {code})"
        failed = "killed: it took too long" if code is None else f"failed with exit code {code}"
        lines.append(f"{name}: {left_out if code == NOT_HERE else failed}")
    return "\n".join(lines)


def results() -> Mapping[str, published.Result]:
    """Return the results of all benchmarks, by their names."""
    return {path.stem: published.read_result(path.read_text()) for path in sorted(RESULTS.glob("*.md"))}


def check() -> int:
    """Print what is published and not supported by the results; returns 1 if there is any, and 0 otherwise."""
    found: Sequence[str] = published.differences(PAGE.read_text(), results())
    print("\n".join(found) or f"{PAGE.name}: every figure lies in the spread of its results")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
