"""``single`` relative to a plain loop, model FLOPs utilization, checkpoints, and two ranks on one GPU.

With several GPUs, also ``ddp`` on all of them relative to torchrun, and what it costs to be able to recover. On both
sides, the updates are fused and as many processes load data.

python benchmarks/gpu.py
python benchmarks/gpu.py --smoke

Takes about ten minutes with one GPU: rounds that would begin late are left out. With ``--smoke``, a tiny model is
trained on whatever device there is, to try the script. Two ranks that share one GPU show that losses are equal, that a
killed rank is replaced, and that recoveries leave no memory behind. They communicate through sockets: of their speed,
only the ratio to torchrun's on the same GPU means anything.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from harness.arms import (
    WORKERS,
    Arm,
    Timing,
    Workload,
    basic_overrides,
    launch,
    ours,
    plain_loop,
    stalling_checkpoints,
    torchrun,
    workload_overrides,
)
from harness.rounds import (
    Claim,
    Rounds,
    argument_parser,
    in_turn,
    interleave,
    median,
    rates_table,
    ratios,
    report,
    run_round,
    table,
)

from orchestrator import run
from orchestrator.config.schema import TrainConfig
from orchestrator.records.journal import read_lines
from orchestrator.strategies.update.confirmation import Confirmation, DeviceEvent, no_confirmation
from orchestrator.worker.measure.peak_flops import peak_flops_per_s

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 400.0
"""No round of the throughput begins later than this after the start."""
COMPILES = "compile" in {field.name for field in fields(TrainConfig)}
STEP_MS = 5
"""Of the steps that show what a confirmation costs."""
STEPS, FAULTS = 60, ("kill@20:1", "raise@30:1", "raise@40:1")
"""Of the run of two ranks."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``single`` and the plain loop on one workload.

    Attributes:
        memory_gb: what the GPU must have.
    """

    name: str
    workload: Workload
    rounds: int
    compile: bool = False
    memory_gb: float = 0.0

    @property
    def arms(self) -> Mapping[str, Arm]:
        """The arms by name."""
        overrides = [*ON_GPU, *(["train.compile=true"] if self.compile else [])]
        return {
            "ours": ours(self.workload, strategy="single", overrides=overrides),
            "plain loop": plain_loop(self.workload, compile=self.compile, loading_processes=LOADING_PROCESSES),
        }

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of a training step per sample (Chowdhery et al., 2022, arXiv:2204.02311, B)."""
        gpt = self.workload.fields
        weights = 12 * gpt["layers"] * gpt["width"] ** 2
        return float(gpt["context"] * (6 * weights + 12 * gpt["layers"] * gpt["width"] * gpt["context"]))


def gpt(*, layers: int, width: int, heads: int, context: int, batch: int, steps: int) -> Workload:
    """Return a workload that trains a byte-level transformer."""
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context}
    return Workload(
        job="jobs.gpt.GPT",
        fields={**sizes, "lr": 1e-4, "sample_tokens": 0},
        steps=steps,
        global_batch_size=batch,
        log_every=max(1, steps // 4),
    )


LOADING_PROCESSES = 2
"""The processes that load data for each rank, in every arm."""
ON_GPU = ("train.precision=bf16", f"data.num_workers={LOADING_PROCESSES}")
SMALL = gpt(layers=11, width=960, heads=15, context=1024, batch=16, steps=200)
LARGE = gpt(layers=20, width=2048, heads=16, context=1024, batch=8, steps=60)
TINY = gpt(layers=2, width=32, heads=2, context=32, batch=4, steps=12)
COMPARISONS = (
    Comparison(name="123M parameters", workload=SMALL, rounds=3),
    Comparison(name="123M parameters, compiled", workload=SMALL, rounds=2, compile=True),
    Comparison(name="1.0B parameters", workload=LARGE, rounds=2, memory_gb=60),
    Comparison(name="1.0B parameters, compiled", workload=LARGE, rounds=1, compile=True, memory_gb=60),
)
STATES = {"1 GB": 6600, "8 GB": 18700}
"""The width of two layers whose training state with AdamW has this size."""
SMOKE = (
    Comparison(name="a tiny model", workload=TINY, rounds=1),
    Comparison(name="a tiny model, compiled", workload=TINY, rounds=1, compile=True),
)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--smoke", action="store_true", help="train a tiny model on any device, and save nothing")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU; run it on a machine with one, or with --smoke", file=sys.stderr)
        return 2
    deadline = time.monotonic() + BUDGET_S
    comparisons = SMOKE if arguments.smoke else tuple(filter(fits, COMPARISONS))
    recovery = two_ranks()
    saved = checkpoints(comparisons[0].workload)
    results = throughput(comparisons, deadline, rounds=1 if arguments.quick else None)
    grown = recovery_by_state({"1 MB": 200} if arguments.smoke else STATES)
    few = 1 if arguments.smoke or arguments.quick else 2
    replicas = {**on_one_gpu(TINY if arguments.smoke else SMALL, rounds=few)}
    replicas |= {} if arguments.smoke else all_gpus(rounds=few)
    confirmed = confirmed_steps(steps=5 if arguments.smoke else 200)
    report(
        f"gpu-{slug(device_name())}",
        [
            *(
                Claim(
                    name=f"samples/s, ours / plain loop, {name}",
                    ratios=ratios(rounds, "ours", "plain loop", "samples_per_s"),
                    at_least=0.99,
                )
                for name, rounds in results.items()
            ),
            Claim(
                name="training stalled by a checkpoint / total time to save it",
                ratios=[e["stall_ms"] / (e["stall_ms"] + 1e3 * e["seconds"]) for e in saved],
                at_most=0.05,
            ),
            Claim(name="last loss, two ranks with three failures / one rank", ratios=[recovery.loss], at_least=0.99),
            *(
                Claim(
                    name=f"samples/s, {name}, {arm} / torchrun",
                    ratios=ratios(rounds, arm, "torchrun", "samples_per_s"),
                    at_least=0.99,
                )
                for name, rounds in replicas.items()
                for arm in rounds[0]
                if arm != "torchrun"
            ),
            Claim(
                name=f"a step of {STEP_MS} ms whose confirmation spins / sleeps",
                ratios=[ms["spinning"] / ms["sleeping"] for ms in confirmed],
                at_most=1.0,
            ),
            Claim(name="memory of tensors, after three recoveries / before", ratios=[recovery.memory], at_most=1.01),
        ],
        ceiling=None,
        rounds={**results, **replicas},
        notes="\n\n".join(
            [
                f"{device_name()}, CUDA {torch.version.cuda}, bf16.",
                *(f"{name}:\n\n{rates_table(rounds)}" for name, rounds in results.items()),
                utilization_table(comparisons, results),
                checkpoints_table(saved),
                f"Two ranks on one GPU, with {', '.join(FAULTS)}: the next step came after "
                f"{', '.join(f'{s:.1f}' for s in recovery.seconds)} s.",
                f"A step of {STEP_MS} ms, by how its update is confirmed: "
                + ", ".join(f"{how} {statistics.median(ms[how] for ms in confirmed):.2f} ms" for how in confirmed[0])
                + ".",
                "With a larger state: "
                f"{', '.join(f'{size} after {seconds:.1f} s' for size, seconds in grown.items())}.",
            ]
        ),
        keep=not (arguments.smoke or arguments.quick),
    )
    return 0


def fits(comparison: Comparison) -> bool:
    """Return whether this GPU and this version can run a comparison."""
    memory_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    return memory_gb >= comparison.memory_gb and (COMPILES or not comparison.compile)


def throughput(comparisons: Sequence[Comparison], deadline: float, *, rounds: int | None) -> dict[str, Rounds]:
    """Run the first round of each comparison, then the second, until the deadline; ``rounds`` limits them further."""
    results: dict[str, list[Mapping[str, Timing]]] = {}
    for number in range(rounds or max(c.rounds for c in comparisons)):
        for comparison in comparisons:
            if number < comparison.rounds and time.monotonic() < deadline:
                print(comparison.name)
                results.setdefault(comparison.name, []).append(run_round(comparison.arms, number))
    return dict(results)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What failures did to a run of two ranks on one GPU.

    Attributes:
        loss: its last loss, relative to one rank without failures.
        memory: the memory of tensors at its end, relative to the memory before the first failure.
        seconds: from each failure to the next step.
    """

    loss: float
    memory: float
    seconds: Sequence[float]


def two_ranks() -> Recovery:
    """Train with one rank, then with two that fail three times.

    Raises:
        RuntimeError: a run failed.
    """
    sys.path.append(str(ROOT / "tests"))
    from helpers.machines.shared_gpu import shared_gpu_ray

    words = [
        "tracking=none",
        "job._target_=helpers.jobs.gpu_jobs.Observing",
        f"train.steps={STEPS}",
        "train.log_every=1",
    ]
    with shared_gpu_ray(2), tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        one, two = (
            run([*words, *more, f"output_dir={folder}"])
            for more in (["strategy=single"], ["strategy=ddp", f"recovery.chaos=[{','.join(FAULTS)}]"])
        )
        for result in (one, two):
            if result.status != "FINISHED":
                raise RuntimeError(f"a run on a shared GPU failed: {result.reason}")
        points = [point for point, _ in read_lines(two.run_dir / "metrics.jsonl")]
    allocated = {p["step"]: p["train/allocated_mb"] for p in points if "train/allocated_mb" in p}
    before, after = allocated[10], allocated[STEPS]
    return Recovery(
        loss=two.summary["final_loss"] / one.summary["final_loss"],
        memory=after / before if before else 1.0,
        seconds=two.summary["recovery_s"],
    )


def recovery_by_state(widths: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds from the death of one of two ranks to the next step, by the size of the training state.

    Sizes for which the GPU has no room with two ranks are left out.

    Raises:
        RuntimeError: a run failed.
    """
    from helpers.machines.shared_gpu import shared_gpu_ray

    words = ["tracking=none", "strategy=ddp", "job._target_=helpers.jobs.quick_jobs.AdamDigits", "job.depth=3"]
    words += ["train.steps=30", "train.eval_every=0", "checkpoint.every=0", "recovery.chaos=[kill@20:1]"]
    seconds: dict[str, float] = {}
    with shared_gpu_ray(2), tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        for size, width in widths.items():
            needed_gb = 2 * 20 * 2 * width**2 / 1e9  # parameters, gradients, AdamW and a copy that is on its way
            if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory / 1e9 < needed_gb:
                continue
            result = run([*words, f"job.hidden={width}", f"output_dir={folder}"])
            if result.status != "FINISHED":
                raise RuntimeError(f"a run with a state of {size} failed: {result.reason}")
            (seconds[size],) = result.summary["recovery_s"]
    return seconds


def on_one_gpu(workload: Workload, *, rounds: int) -> dict[str, Rounds]:
    """Compare ``ddp`` with torchrun, each with two ranks that share the first GPU."""
    from helpers.machines.shared_gpu import shared_gpu_ray

    words = ["tracking=none", "strategy=ddp", f"strategy.num_workers={WORKERS}", *workload_overrides(workload), *ON_GPU]

    def shared(folder: Path) -> Timing:
        with shared_gpu_ray(WORKERS):
            result = run([*words, f"output_dir={folder}"])
        if result.status != "FINISHED":
            raise RuntimeError(f"a run on a shared GPU failed: {result.reason}")
        return Timing(**{name: result.summary[name] for name in Timing.__dataclass_fields__})

    arms = {"ours": shared, "torchrun": torchrun(workload, loading_processes=LOADING_PROCESSES, share_gpu=True)}
    return {"two ranks on one GPU": interleave(arms, rounds=rounds)}


def confirmed_steps(*, steps: int) -> list[dict[str, float]]:
    """Return, for three rounds, the milliseconds of a step on this GPU by how its update is confirmed.

    The step computes for about ``STEP_MS``. On a CPU, which has no work to wait for, a step only waits.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    matrix = torch.randn(4096 if on_gpu else 8, 4096 if on_gpu else 8, device=device)
    weights = [torch.nn.Parameter(torch.zeros(1024, device=device)) for _ in range(100)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=on_gpu)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def timed_ms(confirm: Callable[[], None], products: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            compute(products)
            confirm()
            optimizer.step()
        synchronize(device)
        return (time.perf_counter() - began) * 1e3 / steps

    def record() -> DeviceEvent:
        return torch.cuda.current_stream().record_event() if on_gpu else Deadline(time.perf_counter() + STEP_MS / 1e3)

    timed_ms(no_confirmation, 1)  # the first call of a kernel takes longer
    products = max(1, round(STEP_MS / timed_ms(no_confirmation, 1)))
    arms = {
        "never": no_confirmation,
        "spinning": Confirmation(no_confirmation, waits=True, record=record),
        "sleeping": Confirmation(no_confirmation, waits=True, record=record, spin_s=0.0),
    }
    return [{how: timed_ms(arms[how], products) for how in in_turn(arms, number)} for number in range(3)]


@dataclass(frozen=True)
class Deadline:
    """An event at a time of ``perf_counter``."""

    at_s: float

    def query(self) -> bool:
        """Return whether it has come."""
        return time.perf_counter() >= self.at_s


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_gpus(*, rounds: int) -> dict[str, Rounds]:
    """Compare ``ddp`` and ``fsdp`` on all GPUs with torchrun; none with one GPU.

    ``ddp`` also without recovery, which shows what it costs to confirm each update before it is made, and with NVLink
    SHARP, which shows what it costs to leave that unused. ``fsdp`` is compared with a hand-written ``fully_shard``.
    """
    count = torch.cuda.device_count()
    if count < 2:
        return {}
    workload = replace(SMALL, global_batch_size=SMALL.global_batch_size * count)

    def variant(*overrides: str, strategy: str = "ddp") -> Arm:
        return ours(workload, strategy=strategy, workers=count, overrides=[*ON_GPU, *overrides])

    def plain(script: str) -> Arm:
        return torchrun(workload, script=script, workers=count, loading_processes=LOADING_PROCESSES)

    replicas = {
        "ours": variant(),
        "without recovery": variant("recovery.max_failures=0", "cluster.env.NCCL_NVLS_ENABLE=0"),
        "with NVLink SHARP": variant("cluster.env.NCCL_NVLS_ENABLE=2"),
        "torchrun": plain("torchrun_ddp.py"),
    }
    parts = {"ours": variant(strategy="fsdp"), "torchrun": plain("torchrun_fsdp.py")}
    return {
        f"ddp on {count} GPUs": interleave(replicas, rounds=rounds),
        f"fsdp on {count} GPUs": interleave(parts, rounds=rounds),
    }


def checkpoints(workload: Workload) -> list[dict[str, Any]]:
    """Return the ``checkpoint_saved`` events of one run for which a step has waited."""
    overrides = [*basic_overrides("local", strategy="single", workers=1), "tracking=none", "train.precision=bf16"]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        run_dir = launch(workload, overrides, Path(folder), checkpoint_every=max(1, workload.steps // 4))
        return stalling_checkpoints(run_dir, steps=workload.steps)


def utilization_table(comparisons: Sequence[Comparison], results: Mapping[str, Rounds]) -> str:
    """Return a table of model FLOPs utilization, in percent of the GPU's peak rate in bfloat16."""
    peak = peak_flops_per_s(device_name(), "bf16")
    if peak is None:
        return f"The peak rate of {device_name()} is unknown, so there is no model FLOPs utilization."
    rows = [
        [c.name, *(f"{100 * c.flops_per_sample * median(results[c.name], arm, 'samples_per_s') / peak:.1f} %"
                   for arm in c.arms)]
        for c in comparisons if c.name in results
    ]  # fmt: skip
    return table(["MFU", "ours", "plain loop"], rows)


def checkpoints_table(saved: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the size of a checkpoint and the time that it takes."""
    row = [
        f"{saved[0]['size_bytes'] / 1e6:,.0f} MB",
        f"{statistics.median(e['stall_ms'] for e in saved):.1f}",
        f"{statistics.median(1e3 * e['seconds'] for e in saved):.1f}",
    ]
    return table(["checkpoint", "training stalled, ms", "then written in the background, ms"], [row])


def device_name() -> str:
    """Return the name of the GPU, or ``CPU``."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def slug(name: str) -> str:
    """Return a name for a file: ``NVIDIA H100 80GB HBM3`` is ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
