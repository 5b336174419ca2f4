"""What the first quarter of an hour on a GPU has to show, the most valuable first.

python benchmarks/gpu_quarter.py
python benchmarks/gpu_quarter.py --only recovery,speed --budget 300
python benchmarks/gpu_quarter.py --cpu

Each probe is a process of its own with a limit, so that one that hangs costs its limit and no more. Its verdict is
printed and saved as soon as it is known. Several ranks share the first GPU and communicate through sockets, which shows
that failures are survived and losses equal, and says nothing about NVLink, nor about the speed of several ranks. Exits
with 1 if a verdict is FAIL.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from gpu_probes.probe import Probe, Verdict, answer, judge
from harness.arms import HERE, RESULTS
from harness.rounds import slug, table

EQUAL_LOSS, FAILURES, RUNS, STATE, CLOCK, INPUT = (
    f"tests/gpu/test_gpu_{name}.py" for name in ("equal_loss", "failures", "runs", "state", "clock", "input")
)
PROBES: Mapping[str, Probe] = {
    "facts": Probe(question="card, driver, versions", function="device.facts", limit_s=30),
    "recovery": Probe(
        question="a rank is killed in a step, three times",
        function="recovery.recoveries",
        arguments={"communicators": 1, "kills": 3},
        limit_s=110,
    ),
    "communicators": Probe(
        question="the same with three communicators, one queued behind the other",
        function="recovery.recoveries",
        arguments={"communicators": 3, "kills": 2},
        limit_s=80,
    ),
    "assert": Probe(
        question="a rank makes an error of the device",
        function="recovery.recoveries",
        arguments={"communicators": 1, "kills": 1, "fails": True},
        limit_s=60,
    ),
    "memory": Probe(question="does fsdp keep the whole model in bf16", function="device.memory", limit_s=75),
    "losses": Probe(
        question="equal losses of all layouts, offloaded, gathered ahead",
        function="suite.run_tests",
        arguments={"words": (EQUAL_LOSS, "-k", "every_layout or offloaded or ahead"), "limit_s": 100},
        limit_s=160,
    ),
    "ray": Probe(
        question="a run from the command to the checkpoint",
        function="suite.run_tests",
        arguments={"words": (RUNS, "-k", "from_the_command or interface_of_the_node"), "limit_s": 60},
        limit_s=120,
    ),
    "faults": Probe(
        question="kills, an error of the device, an endless kernel and a hang under Ray",
        function="suite.run_tests",
        arguments={
            "words": (
                FAILURES,
                "-k",
                "(survived and kill and (ddp or fsdp or hsdp)) or error_of_the_device or never_ends or hangs_is_found",
            ),
            "limit_s": 150,
        },
        limit_s=210,
    ),
    "snapshot": Probe(question="copies of a state to the host", function="device.snapshot", limit_s=40),
    "speed": Probe(
        question="single relative to a plain loop, 123M parameters in bf16",
        function="speed.one_gpu",
        arguments={"size": "123M", "rounds": 1},
        limit_s=100,
    ),
    "confirmation": Probe(
        question="a step of 5 ms by how its update is confirmed", function="speed.confirmation", limit_s=40
    ),
    "state": Probe(
        question="checkpoints, recovered state, clock and input",
        function="suite.run_tests",
        arguments={"words": (STATE, CLOCK, INPUT), "limit_s": 80},
        limit_s=140,
    ),
    "stall": Probe(question="what training waits for in a checkpoint", function="speed.stall", limit_s=100),
    "large-state": Probe(question="recovery with 8 GB of state", function="speed.large_state", limit_s=150),
    "compiled": Probe(
        question="as speed, compiled",
        function="speed.one_gpu",
        arguments={"size": "123M", "rounds": 1, "compile": True},
        limit_s=240,
    ),
    "1B": Probe(
        question="as speed, 1.0B parameters",
        function="speed.one_gpu",
        arguments={"size": "1.0B", "rounds": 1},
        limit_s=240,
    ),
    "shared": Probe(question="ddp relative to torchrun, two ranks on one GPU", function="speed.shared", limit_s=200),
    "all-gpus": Probe(
        question="ddp and fsdp on all GPUs relative to torchrun", function="speed.all_gpus", limit_s=1200
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=840.0, metavar="S", help="seconds for all probes (%(default)s)")
    parser.add_argument("--only", type=chosen, default=list(PROBES), metavar="NAMES", help="these probes, with commas")
    parser.add_argument("--cpu", action="store_true", help="try the probes on CPUs with gloo; keeps no results")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for logs and the table; by default a temporary one")
    parser.add_argument("--ask", choices=PROBES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path += [str(HERE.parent), str(HERE.parent / "tests")]
    if arguments.ask:
        return answer(PROBES[arguments.ask], on_cpu=arguments.cpu, file=arguments.out / f"{arguments.ask}.txt")
    device = "CPU" if arguments.cpu else first_gpu()
    if device is None:
        print("gpu_quarter.py: torch sees no GPU; run it on a machine with one, or with --cpu", file=sys.stderr)
        return 2
    os.environ.setdefault("DISTURBED_FROM", "1")  # there is no time to repeat a round
    out = arguments.out or Path(tempfile.mkdtemp(prefix="gpu-quarter-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"{device}; logs are in {out}", flush=True)
    is_whole = not arguments.cpu and arguments.only == list(PROBES)
    files = [out / "table.md", *([RESULTS / f"gpu-{slug(device)}.md"] if is_whole else [])]
    return ask_all(arguments.only, device, out=out, files=files, budget_s=arguments.budget, on_cpu=arguments.cpu)


def ask_all(names: list[str], device: str, *, out: Path, files: list[Path], budget_s: float, on_cpu: bool) -> int:
    """Ask the probes in turn, print each verdict, and write the table of all so far to ``files``.

    ``out``: the folder for the logs. Returns the exit code.
    """
    deadline = time.monotonic() + budget_s
    verdicts: dict[str, Verdict] = {}
    for name in names:
        command = [sys.executable, __file__, "--ask", name, "--out", str(out), *(["--cpu"] if on_cpu else [])]
        verdicts[name] = judge(
            command,
            limit_s=PROBES[name].limit_s,
            left_s=deadline - time.monotonic(),
            log=out / f"{name}.log",
            file=out / f"{name}.txt",
        )
        print(f"{name}: {verdicts[name]}", flush=True)
        for file in files:
            file.write_text(page(device, verdicts))
    return int(any(verdict.outcome == "FAIL" for verdict in verdicts.values()))


def page(device: str, verdicts: Mapping[str, Verdict]) -> str:
    """Return a page with a row for each verdict."""
    rows = [
        [name, PROBES[name].question, v.outcome, " ".join(v.text.replace("|", "/").split()), f"{v.seconds:.0f}"]
        for name, v in verdicts.items()
    ]
    head = ["probe", "question", "verdict", "what was found", "s"]
    return f"# gpu-{slug(device)}\n\n{date.today()}: {device}\n\n{table(head, rows)}\n"


def chosen(text: str) -> list[str]:
    """Return the names of probes in a list with commas.

    Raises:
        ArgumentTypeError: there is no such probe.
    """
    names = text.split(",")
    if unknown := [name for name in names if name not in PROBES]:
        raise argparse.ArgumentTypeError(f"no probe is named {unknown[0]!r}; there are {', '.join(PROBES)}")
    return names


def first_gpu() -> str | None:
    """Return the name of the first GPU; None if torch sees none."""
    import torch  # here, because the ranks of a probe import this module too

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main())
