"""Which GPU it is, what ``fsdp`` takes of its memory, and what it costs to copy a state to the host."""

from __future__ import annotations

import gc
import subprocess
import time

import torch
import torch.distributed as dist
from harness.rounds import code_version
from torch import Tensor

from gpu_probes.probe import ProbeError
from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import make, steps
from helpers.ranks.gang import GLOO, NCCL, close_gangs, gang_on
from jobs.gpt import GPT
from orchestrator.state.tensor_memory import host_copies
from orchestrator.strategies.trainer import Trainer

PRECISIONS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16 recomputed": {"precision": "bf16", "activation_checkpointing": "blocks"},
    "bf16-true": {"precision": "bf16-true"},
}
COPIES = 3


def facts(*, on_cpu: bool) -> str:
    """Return the GPU, its driver and the versions."""
    versions = f"{code_version()}, torch {torch.__version__}"
    if on_cpu:
        return f"CPU; {versions}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,mig.mode.current", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    has_nccl2 = hasattr(dist, "ProcessGroupNCCL2")
    return f"{'; '.join(gpus)}; {versions}, NCCL {nccl}, {'with' if has_nccl2 else 'without'} nccl2"


def memory(*, on_cpu: bool) -> str:
    """Return the peak memory of two ranks of ``fsdp`` in each precision.

    Raises:
        ProbeError: the ranks keep a copy of the whole model in bfloat16 between the passes.
    """
    sizes = (2, 32, 2, 32) if on_cpu else (8, 1024, 8, 64)
    job = GPT(**dict(zip(("layers", "width", "heads", "context"), sizes, strict=True)), sample_tokens=0)
    gang, peaks, whole = gang_on(GLOO if on_cpu else NCCL), {}, 0
    try:
        for name, changes in PRECISIONS.items():
            case = LAYOUTS["fsdp-2"].of(Case(job=job, train=having(steps=3, global_batch_size=2, **changes)))
            (peaks[name], whole), _ = gang.run(peak_bytes, case, world_size=2, timeout_s=60)
    finally:
        close_gangs()
    if on_cpu:
        return "trained in each precision; on CPUs, its memory is not counted"
    found = ", ".join(f"{name} {peak / 1e9:.2f} GB" for name, peak in peaks.items())
    found += f"; 2 bytes a parameter are {whole / 1e9:.2f} GB"
    if peaks["bf16"] - peaks["fp32"] > 0.5 * whole:
        raise ProbeError(f"bf16 keeps the whole model: {found}")
    return found


def peak_bytes(rank: int, case: Case) -> tuple[int, int]:
    """Return what two steps take at most beyond what was there, and the size of the whole model in bfloat16."""
    on_gpu = torch.cuda.is_available()
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    strategy = make(case, rank)
    list(steps(strategy, last=1))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    list(steps(strategy, first=2, last=3))
    assert isinstance(strategy, Trainer)
    whole = sum(2 * parameter.numel() for parameter in strategy.passes.model.parameters())
    return (torch.cuda.max_memory_allocated() - before if on_gpu else 0), whole


def snapshot(*, on_cpu: bool) -> str:
    """Return what training waits for in a checkpoint: the first and a later copy of 4 GB to the host."""
    tensors = [torch.ones(2**18 if on_cpu else 2**28, device="cpu" if on_cpu else "cuda") for _ in range(4)]
    copies: list[Tensor | None] = [None] * len(tensors)
    seconds = []
    for _ in range(COPIES):
        if not on_cpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        copies = [*host_copies(tensors, into=copies)]
        seconds.append(time.perf_counter() - began)
    if not all(torch.equal(copy, torch.ones_like(copy)) for copy in copies if copy is not None):
        raise ProbeError("a copy differs from its source")
    gigabytes = sum(tensor.nbytes for tensor in tensors) / 1e9
    rate = gigabytes / seconds[-1]
    return (
        f"{gigabytes:.3g} GB: first {seconds[0]:.3f} s, which pins memory, later {seconds[-1]:.3f} s, {rate:.1f} GB/s"
    )
