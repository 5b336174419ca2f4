"""Speed relative to a plain loop and to torchrun, and what recovery costs, in rounds of interleaved arms."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from harness.rounds import Rounds, in_turn, interleave, median, ratios

from gpu_probes.probe import NotHereError, ProbeError
from helpers.machines.shared_gpu import shared_gpu_ray
from orchestrator import run
from orchestrator.driver.process.run_context import RunResult
from orchestrator.strategies.update.confirmation import Confirmation, no_confirmation
from orchestrator.worker.measure.flops import peak_flops_per_s

LOADING_PROCESSES = 2
"""The processes that load data for each rank, in every arm."""
ON_GPU = ("train.precision=bf16", f"data.num_workers={LOADING_PROCESSES}")
STEP_MS = 5
"""Of the steps that show what a confirmation costs."""


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


TINY = gpt(layers=2, width=32, heads=2, context=32, batch=4, steps=12)
"""On CPUs."""
SMALL = gpt(layers=11, width=960, heads=15, context=1024, batch=16, steps=200)
WORKLOADS = {"123M": SMALL, "1.0B": gpt(layers=20, width=2048, heads=16, context=1024, batch=8, steps=60)}
"""By their number of parameters."""
NEEDED_GB = {"123M": 0.0, "1.0B": 60.0}


def one_gpu(*, size: str, rounds: int, compile: bool = False, on_cpu: bool) -> str:
    """Compare ``single`` with a plain loop, and return the model FLOPs utilization of both too."""
    require_memory(NEEDED_GB[size])
    workload = TINY if on_cpu else WORKLOADS[size]
    overrides = [*ON_GPU, *(["train.compile=true"] if compile else [])]
    arms = {
        "ours": ours(workload, strategy="single", overrides=overrides),
        "plain loop": plain_loop(workload, compile=compile, loading_processes=LOADING_PROCESSES),
    }
    results = interleave(arms, rounds=rounds)
    found = [relative(results, to="plain loop")]
    if not on_cpu and (peak := peak_flops_per_s(torch.cuda.get_device_name(0), "bf16")) is not None:
        rate = flops_per_sample(workload) / peak
        found += [f"MFU {arm} {100 * rate * median(results, arm, 'samples_per_s'):.1f} %" for arm in arms]
    return ", ".join(found)


def flops_per_sample(workload: Workload) -> float:
    """Floating-point operations of a training step per sample (Chowdhery et al., 2022, arXiv:2204.02311, B)."""
    sizes = workload.fields
    weights = 12 * sizes["layers"] * sizes["width"] ** 2
    return float(sizes["context"] * (6 * weights + 12 * sizes["layers"] * sizes["width"] * sizes["context"]))


def relative(rounds: Rounds, *, to: str) -> str:
    """Return the samples/s of each arm relative to another: the median, and the spread of several rounds."""
    found = []
    for arm in rounds[0]:
        if arm == to:
            continue
        each = ratios(rounds, arm, to, "samples_per_s")
        spread = f" ({min(each):.3f} to {max(each):.3f})" if len(each) > 1 else ""
        found.append(f"{arm} / {to} {statistics.median(each):.3f}{spread}")
    return ", ".join([*found, f"ours {median(rounds, 'ours', 'samples_per_s'):,.1f} samples/s"])


def require_memory(gigabytes: float) -> None:
    """Raise unless the GPU has so much memory.

    Raises:
        NotHereError: it has less.
    """
    if gigabytes and torch.cuda.is_available():
        there = torch.cuda.get_device_properties(0).total_memory / 1e9
        if there < gigabytes:
            raise NotHereError(f"needs {gigabytes:.0f} GB of GPU memory; this GPU has {there:.0f} GB")


def stall(*, on_cpu: bool) -> str:
    """Return how long training waits for a checkpoint, and how long the checkpoint then takes."""
    workload = TINY if on_cpu else SMALL
    overrides = [*basic_overrides("local", strategy="single", workers=1), "tracking=none", "train.precision=bf16"]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        run_dir = launch(workload, overrides, Path(folder), checkpoint_every=max(1, workload.steps // 4))
        saved = stalling_checkpoints(run_dir, steps=workload.steps)
    waited = statistics.median(event["stall_ms"] for event in saved)
    written = statistics.median(event["seconds"] for event in saved)
    return f"{saved[0]['size_bytes'] / 1e6:,.0f} MB: waits {waited:.1f} ms, then {written:.2f} s in the background"


def large_state(*, on_cpu: bool) -> str:
    """Return the time from the death of one of two ranks to the next step, with 8 GB of state."""
    width = 200 if on_cpu else 18700
    require_memory(2 * 20 * 2 * width**2 / 1e9)  # parameters, gradients, AdamW and a copy that is on its way
    words = ["strategy=ddp", "job._target_=helpers.jobs.quick_jobs.AdamDigits", "job.depth=3", f"job.hidden={width}"]
    words += ["train.steps=30", "train.eval_every=0", "checkpoint.every=0", "recovery.chaos=[kill@20:1]"]
    with shared_gpu_ray(2), tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        (seconds,) = finished([*words, f"output_dir={folder}"]).summary["recovery_s"]
    return f"{12 * 2 * width**2 / 1e9:.1f} GB: next step {seconds:.1f} s after a kill"


def shared(*, on_cpu: bool) -> str:
    """Compare ``ddp`` with torchrun, each with two ranks that share the first GPU."""
    workload = TINY if on_cpu else SMALL
    words = ["strategy=ddp", f"strategy.num_workers={WORKERS}", *workload_overrides(workload), *ON_GPU]

    def with_ray(folder: Path) -> Timing:
        with shared_gpu_ray(WORKERS):
            summary = finished([*words, f"output_dir={folder}"]).summary
        return Timing(**{name: summary[name] for name in Timing.__dataclass_fields__})

    arms = {"ours": with_ray, "torchrun": torchrun(workload, loading_processes=LOADING_PROCESSES, share_gpu=True)}
    return relative(interleave(arms, rounds=1), to="torchrun")


def all_gpus(*, on_cpu: bool) -> str:
    """Compare ``ddp`` and ``fsdp`` on all GPUs with torchrun.

    ``ddp`` also without recovery, which shows what it costs to confirm each update before it is made, and with NVLink
    SHARP, which shows what it costs to leave that unused. ``fsdp`` is compared with a hand-written ``fully_shard``.
    """
    count = torch.cuda.device_count()
    if count < 2:
        raise NotHereError("needs two GPUs")
    workload = replace(SMALL, global_batch_size=SMALL.global_batch_size * count)

    def variant(*overrides: str, strategy: str = "ddp") -> Arm:
        return ours(workload, strategy=strategy, workers=count, overrides=[*ON_GPU, *overrides])

    def plain(script: str) -> Arm:
        return torchrun(workload, script=script, workers=count, loading_processes=LOADING_PROCESSES)

    arms: Mapping[str, Mapping[str, Arm]] = {
        "ddp": {
            "ours": variant(),
            "without recovery": variant("recovery.max_failures=0", "cluster.env.NCCL_NVLS_ENABLE=0"),
            "with NVLink SHARP": variant("cluster.env.NCCL_NVLS_ENABLE=2"),
            "torchrun": plain("torchrun_ddp.py"),
        },
        "fsdp": {"ours": variant(strategy="fsdp"), "torchrun": plain("torchrun_fsdp.py")},
    }
    compared = {name: relative(interleave(of, rounds=2), to="torchrun") for name, of in arms.items()}
    return f"{count} GPUs; " + "; ".join(f"{name}: {text}" for name, text in compared.items())


def confirmation(*, on_cpu: bool) -> str:
    """Return the milliseconds of a step by how its update is confirmed. On a CPU, a step only waits."""
    steps = 5 if on_cpu else 100
    size = 8 if on_cpu else 4096
    device = torch.device("cpu" if on_cpu else "cuda")
    matrix = torch.randn(size, size, device=device)
    weights = [torch.nn.Parameter(torch.zeros(1024, device=device)) for _ in range(100)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=not on_cpu)

    def timed_ms(confirm: Callable[[], None], products: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            for _ in range(products):
                torch.mm(matrix, matrix)
            confirm()
            optimizer.step()
        synchronize(device)
        return (time.perf_counter() - began) * 1e3 / steps

    def record() -> torch.cuda.Event:
        return Deadline(time.perf_counter() + STEP_MS / 1e3) if on_cpu else torch.cuda.current_stream().record_event()

    timed_ms(no_confirmation, 1)  # the first call of a kernel takes longer
    products = max(1, round(STEP_MS / timed_ms(no_confirmation, 1)))
    arms = {
        "never": no_confirmation,
        "spinning": Confirmation(no_confirmation, waits=True, record=record),
        "sleeping": Confirmation(no_confirmation, waits=True, record=record, spin_s=0.0),
    }
    rounds = [{how: timed_ms(arms[how], products) for how in in_turn(arms, number)} for number in range(3)]
    return ", ".join(f"{how} {statistics.median(ms[how] for ms in rounds):.2f} ms" for how in arms)


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


def finished(words: Sequence[str]) -> RunResult:
    """Return the result of a run in the Ray of this process.

    Raises:
        ProbeError: it did not finish.
    """
    result = run(["tracking=none", *words])
    if result.status != "FINISHED":
        raise ProbeError(f"the run failed: {result.reason}")
    return result
