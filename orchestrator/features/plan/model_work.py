"""What the model of a job computes and moves for a sample, and how fast the CPUs of this machine do such work."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from orchestrator.features.plan.prediction.cost import Host, Stack
from orchestrator.features.plan.prediction.devices import CPU, Device, Link, Tables
from orchestrator.features.plan.prediction.work import ModelWork, Work
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.planning.memory import GIB
from orchestrator.strategies.checks.memory_plan import KeptByRows, fake_batch, fake_loss, kept_of
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.measure.flop_counter import WorkCounter

Recomputed = Literal["none", "blocks"]

WHOLE_OUTPUTS = 6
"""What a block keeps outside of the layers that tensor ranks divide, as multiples of its output; an assumption."""
PASSES = 3
"""A backward pass moves and computes twice as much as a forward pass."""
IN_KERNELS = 0.35
"""The share of the bytes of single operators that GPUs move, whose kernels take several at once, as for a norm: what
:class:`.prediction.work.Transformer` counts of a block of Llama, relative to its operators."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model as passes with fake tensors show it.

    Attributes:
        work: of a sample.
        block: the bytes of activations that a block keeps of a sample.
        rest: those that the rest of the model keeps.
        always: the bytes that all of it keeps of any number of samples.
        casts: the bytes of all parameters in 16 bits.
    """

    work: ModelWork
    block: float
    rest: float
    always: float
    casts: float

    def kept(self, recomputes: Recomputed, *, tensor: int = 1, context: int = 1) -> KeptByRows:
        """Return what forward passes keep.

        Where blocks are computed again, each keeps its input, and the one that is computed again keeps everything.

        Args:
            recomputes: ``train.activation_checkpointing``.
            tensor: the workers that divide the layers of each block.
            context: the workers that divide the tokens of a sample, of which each keeps the keys and values of all.
        """
        output = self.work.layer.output_bytes
        whole = min(self.block, WHOLE_OUTPUTS * output)
        block, layers = whole + (self.block - whole) / tensor, self.work.layers
        of_blocks = layers * block if recomputes == "none" else layers * output + block
        of_others = (context - 1) / context * self.work.layer.key_bytes / tensor
        of_blocks = of_blocks / context + (layers if recomputes == "none" else 1) * of_others
        return KeptByRows(a_sample=self.rest / context + of_blocks, always=self.always, casts=self.casts / tensor)


def traced(outline: Outline, *, fused_attention: bool) -> Traced:
    """Trace the model of a job, of whose repeated blocks one or two of each kind run.

    These blocks count as layers, each as their mean. Of blocks whose shapes occur once, only the work is known, and not
    what each keeps, which counts as the rest's.

    Args:
        outline: the job and its model.
        fused_attention: whether attention runs as on a GPU.

    Raises:
        Exception: whatever the job raises with fake tensors.
    """
    blocks = blocks_of(outline.whole.model)
    kinds: dict[Hashable, list[nn.Module]] = {}
    for block in blocks:
        kinds.setdefault((type(block), *(p.shape for p in block.parameters())), []).append(block)
    first: Exception | None = None
    # No block can be left out that returns another shape than it takes; BatchNorm may need two samples.
    for alike in ([*kinds.values()], [[block] for block in blocks]):
        for rows in (1, 2):
            try:
                return _traced(outline, alike, rows, fused_attention=fused_attention)
            except Exception as e:
                first = first or e
    assert first is not None
    raise first


def _traced(outline: Outline, kinds: Sequence[Sequence[nn.Module]], rows: int, *, fused_attention: bool) -> Traced:
    model = outline.whole.model
    parameters, tokens = [*model.parameters()], outline.job.tokens_per_sample or 1
    layers, last = max(1, sum(map(len, kinds))), [alike[-1] for alike in kinds]
    batch = fake_batch(outline, rows)
    with WorkCounter({alike[-1]: len(alike) / layers for alike in kinds}, parameters) as counter:
        fake_loss(outline, batch, last, fused_attention=fused_attention)
    of_layers, of_ends = counter.blocks, counter.rest
    if not kinds:  # stages of equal time are cut from anywhere in the model
        layers = max(1, sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules()))
        of_layers, of_ends = Counter({name: n / layers for name, n in of_ends.items()}), Counter[str]()
    cast = outline.precision.autocast_dtype
    in_blocks = sum(p.numel() for p in {p for alike in kinds for block in alike for p in block.parameters()})
    work = ModelWork(
        layers=layers,
        layer=_work(of_layers, in_blocks / layers, rows, tokens, cast),
        ends=_work(of_ends, sum(p.numel() for p in parameters) - in_blocks, rows, tokens, cast),
        tokens=tokens,
        tensors=len(parameters),
    )
    kept = functools.partial(kept_of, outline, fused_attention=fused_attention)
    one, one_of_more = kept(rows, last), kept(rows + 1, last)
    block = more = others = others_of_more = casts = 0.0  # of all blocks, and of those that have not run
    for alike in kinds:
        if (n := len(alike)) > 1:
            two, two_of_more = kept(rows, [alike[0], *last]), kept(rows + 1, [alike[0], *last])
            of_one, of_more = two.activations - one.activations, two_of_more.activations - one_of_more.activations
            block, more = block + n * of_one, more + n * of_more
            others, others_of_more = others + (n - 1) * of_one, others_of_more + (n - 1) * of_more
            casts += (n - 1) * (two.casts - one.casts)
    sample = one_of_more.activations + others_of_more - one.activations - others
    return Traced(
        work=work,
        block=(more - block) / layers,
        rest=sample - (more - block),
        always=max(0.0, one.activations + others - rows * sample),
        casts=one.casts + casts,
    )


def _work(counted: Mapping[str, float], parameters: float, rows: int, tokens: int, cast: torch.dtype | None) -> Work:
    return Work(
        parameters=parameters - counted["experts"],
        experts=counted["experts"],
        used=counted["expert_products"] / rows / 2 / tokens,
        products=counted["products"] / rows,
        product_bytes=counted["product_bytes"] / rows,
        attention=counted["attention"] / rows,
        moved_bytes=IN_KERNELS * PASSES * counted["moved_bytes"] / rows,
        output_bytes=counted["output_bytes"] / rows,
        summed_bytes=(counted["output_bytes"] if cast is None else counted["output"] * cast.itemsize) / rows,
        key_bytes=2 * counted["output_bytes"] / rows,
        routed=round(counted["routed"] / rows / tokens),
        operators=counted["operators"],
    )


GLOO = Host(
    stage_s=5e-4,
    collective_s=2e-3,
    shard_factor=1.7,
    accumulated_bytes=12.0,
    tensor_operators=6.0,
    summed_operators=16.0,
    divided_operators=22.0,
)
"""By the times of small models on two cores in ``benchmarks/results/auto.md``: orders of magnitude."""
UNFUSED = Stack(products=1.0, attention=1.0, moved=1 / IN_KERNELS, host=GLOO)
"""Each operator moves its own bytes."""
_SIZE, _COPIED = 1024, 2**25
_ROWS, _WIDTH = 2048, 256
"""The tokens of a micro-batch, and the width of a small model, whose wider layer is four times as wide."""
_CHAIN = 100
_MEASURED_S = 0.3
"""How long each rate is measured, of which the first half does not count: what is new to a process is slow."""
_COPIES = 4
"""How often gloo copies a byte from worker to worker through the kernel; an assumption."""


def with_cpus(tables: Tables) -> Tables:
    """Return the tables with a core of this machine as the device ``cpu``. Takes two seconds.

    A matrix product in float32 and a chain of small operators are measured on one core. What a linear layer reaches of
    the first, forward and backward, and how fast memory is copied, is measured on all cores at once, as workers do it.
    """
    cores = os.cpu_count() or 1
    a, b = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peak = 2 * _SIZE**3 / min(_durations(lambda: torch.mm(a, b)))
        with ThreadPoolExecutor(cores) as pool:
            layer_s, copy_s = (max(pool.map(_median_s, [make] * cores)) for make in (_layer, _copy))
        chain_s = _median_s(_operators)
    finally:
        torch.set_num_threads(threads)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gb_s = 2 * _COPIED / copy_s / 1e9
    device = Device(
        bf16=peak / 1e12,
        memory_gib=memory / GIB / cores,
        memory_gb_s=gb_s,
        inside=CPU,
        between=CPU,
        node=cores,
        domain=None,
        source="measured on the cores of this machine, in float32",
        reached=min(1.0, 6 * _ROWS * _WIDTH * 4 * _WIDTH / layer_s / peak),
        operator_us=1e6 * chain_s / (PASSES * _CHAIN),
    )
    link = Link(gb_s=gb_s / 2 / _COPIES, source=f"a byte is copied {_COPIES} times")
    return replace(tables, devices={**tables.devices, CPU: device}, links={**tables.links, CPU: link})


def _layer() -> Callable[[], object]:
    layer, rows = nn.Linear(_WIDTH, 4 * _WIDTH), torch.randn(_ROWS, _WIDTH, requires_grad=True)
    gradient = torch.randn(_ROWS, 4 * _WIDTH)
    return lambda: layer(rows).backward(gradient)


def _copy() -> Callable[[], object]:
    source, target = torch.zeros(_COPIED, dtype=torch.uint8), torch.empty(_COPIED, dtype=torch.uint8)
    return lambda: target.copy_(source)


def _operators() -> Callable[[], object]:
    first = torch.ones(8, requires_grad=True)

    def chain() -> None:
        x = first
        for _ in range(_CHAIN):
            x = x * 1.0
        x.sum().backward()

    return chain


def _median_s(make: Callable[[], Callable[[], object]]) -> float:
    """Return the median duration of what ``make`` returns, on one thread of this one."""
    torch.set_num_threads(1)
    return statistics.median(_durations(make()))


def _durations(run: Callable[[], object]) -> list[float]:
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < 4 or time.perf_counter() < began + _MEASURED_S:
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found[len(found) // 2 :]
