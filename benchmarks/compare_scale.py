"""How long `orchestrator compare` takes over many runs, whose directories it generates.

python benchmarks/compare_scale.py
python benchmarks/compare_scale.py --runs 2000 --points 200
"""

from __future__ import annotations

import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from harness.rounds import Claim, argument_parser, interleave, report, table

from orchestrator.display.comparison import CURVE_METRICS
from orchestrator.protocol.core_metrics import CORE_METRICS
from orchestrator.protocol.metrics import to_record
from orchestrator.records.json_file import write_json
from orchestrator.records.run_dir import RunDir

STRATEGIES = ("single", "ddp", "pipeline", "parameter_server")
FORMS = {"table, picture and page": [], "table": ["--no-picture"], "JSON": ["--json"]}
"""By their names, the options of ``compare``."""
GOAL_S = 3.0
ROUNDS = 5


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=500, help="number of runs (default: %(default)s)")
    parser.add_argument("--points", type=int, default=50, help="logged points of each run (default: %(default)s)")
    arguments = parser.parse_args()
    claims, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        output_dir = Path(folder) / "outputs"
        generate(output_dir, num_runs=arguments.runs, points=arguments.points)
        words = ["--output-dir", str(output_dir), "--last", str(arguments.runs)]
        for name, options in FORMS.items():
            arm = partial(timed, [*words, *options])
            rounds = interleave({name: arm}, rounds=1 if arguments.quick else ROUNDS)
            wall_s, cpu_s = zip(*(r[name] for r in rounds), strict=True)
            claims.append(Claim(name=f"{name}, s", ratios=wall_s, at_most=GOAL_S))
            rows.append([name, f"{statistics.median(cpu_s):.2f}"])
    size = f"`compare` over {arguments.runs} runs of {arguments.points} points."
    notes = f"{size}\n\n{table(['output', 'CPU time, s'], rows)}"
    report("compare-scale", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


def generate(output_dir: Path, *, num_runs: int, points: int) -> None:
    """Write run directories as finished runs leave them, below ``output_dir``."""
    draw = random.Random(0)
    for number in range(num_runs):
        strategy, seed = STRATEGIES[number % len(STRATEGIES)], number // len(STRATEGIES) % 5
        minute, second = divmod(number % 3600, 60)
        path = output_dir / f"2026-05-{1 + number // 3600:02d}" / f"12-{minute:02d}-{second:02d}-digits-{strategy}"
        path.mkdir(parents=True)
        _write_run(RunDir(path), strategy=strategy, seed=seed, width=64 << number // 20 % 6, points=points, draw=draw)


def _write_run(run_dir: RunDir, *, strategy: str, seed: int, width: int, points: int, draw: random.Random) -> None:
    workers = 1 if strategy == "single" else 2
    speed = 4000 * workers**0.8 * draw.uniform(0.97, 1.03)
    loss = [2.3 * math.exp(-4 * i / points) * draw.uniform(0.9, 1.1) for i in range(points)]
    record = {
        "name": f"digits-{strategy}",
        "state": "finished",
        "driver": {"host": "generated"},
        "strategy": strategy,
        "job": "digits",
        "plan": {"mesh": {"data_parallel_size": workers, "pipeline_parallel_size": 1}},
        "params": {"seed": seed, "job.width": width, **{f"train.key_{i}": i for i in range(60)}},
        "tags": {"device": "cpu", "version.torch": "2.13.0"},
        "summary": {"samples_per_s": speed, "final_loss": loss[-1], "step_ms_p50": 64e3 / speed, "comm_pct": 20.0},
        "metrics": [to_record(spec) for spec in CORE_METRICS],
    }
    write_json(run_dir.record_file, record)
    names = [spec.name for spec in CORE_METRICS]
    with run_dir.metrics_file.open("w") as file:
        for i, value in enumerate(loss):
            others = ", ".join(f'"{name}": {draw.random()}' for name in names if name not in CURVE_METRICS)
            line = (
                f'"step": {10 * i}, "time": {1e9 + i}, "train/loss": {value}, "train/samples_seen": {640 * i}, {others}'
            )
            file.write(f"{{{line}}}\n")


def timed(words: list[str], _: Path) -> tuple[float, float]:
    """Return the seconds of one command: by the clock, and of its CPU time."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "orchestrator.compare", *words], stdout=subprocess.DEVNULL, check=True, timeout=120
    )
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
