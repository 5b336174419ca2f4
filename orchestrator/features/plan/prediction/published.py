"""Published training runs as the cost model sees them."""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.config.build import ConfigError
from orchestrator.features.plan.prediction.cost import Stack, Step, StepTime, step_time
from orchestrator.features.plan.prediction.devices import (
    Cluster,
    Precision,
    Tables,
    name_of_gpu,
    parse_cluster,
    read_tables,
)
from orchestrator.features.plan.prediction.work import ModelWork, Transformer
from orchestrator.planning.mesh import Mesh

PUBLISHED = Path(__file__).with_name("published_runs.csv")
COLUMNS = (
    *("source", "framework", "model", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "glu", "experts"),
    *("active", "gpu", "gpus", "precision", "seq", "tp", "pp", "vp", "cp", "ep", "shard", "mbs", "gbs", "recompute"),
    *("options", "tokens_s_gpu", "tflops_gpu"),
)
"""The columns that a file of runs has. Others may follow, such as ``known``, ``date``, and ``moved``, the bytes that
elementwise operators of a layer move for a token."""
_COUNTS = (
    *("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "gpus", "seq", "tp", "pp", "cp", "ep", "shard", "gbs"),
)
_MOST = 10**9

Row = Mapping[str, str]

_RECOMPUTED = {
    "full": (1.0, 1.0),
    "selective": (0.36, 0.36),
    "selective per op": (0.36, 0.36),
    "selective+SP": (0.0, 1.0),
}
"""The shares of the forward products and of attention that the backward pass computes again; nothing otherwise."""
_MEGATRON = ("megatron", "nemo")
"""How the names of frameworks begin whose kernels and communication are Megatron's."""
_BITS = re.compile(r"F[^\d\s]*(\d+)", re.IGNORECASE)
"""Finds the bits of ``BF16``, ``MXFP8`` and their like."""
_OF_BITS: Mapping[int, Precision] = {16: "bf16", 8: "fp8", 4: "fp4"}


@dataclass(frozen=True, order=True)
class Setup:
    """What has one factor: software, the precision of products, and a device without the size of its memory."""

    software: str
    precision: str
    device: str

    @property
    def bits(self) -> int:
        """The bits of a factor of products."""
        found = _BITS.search(self.precision)
        return int(found[1]) if found else 0

    @property
    def generation(self) -> str:
        """The letter of the device's generation, as in ``H100`` or ``GB200``."""
        return self.device.removeprefix("G")[:1]

    def __str__(self) -> str:
        return f"{self.software} {self.precision} {self.device}"


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of published runs.

    Raises:
        ConfigError: it cannot be read, or columns are missing.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file, restval="")
            columns = reader.fieldnames or ()
            rows: list[Row] = [*reader]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ConfigError([f"--published {path}: cannot be read: {e}"]) from e
    if missing := [column for column in COLUMNS if column not in columns]:
        reason = f"lacks the columns {', '.join(missing)}; take {PUBLISHED.name} in the package as a pattern"
        raise ConfigError([f"--published {path}: {reason}"])
    return rows


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run as the cost model sees it.

    Attributes:
        measured: its tokens in a second on a device.
        is_known: whether others are calibrated by it.
    """

    row: Row
    setup: Setup
    work: ModelWork
    step: Step
    cluster: Cluster
    measured: float
    is_known: bool

    @property
    def devices(self) -> int:
        """The number of its devices."""
        return int(self.row["gpus"])

    @property
    def is_sparse(self) -> bool:
        """Whether its model has experts."""
        return self.work.layer.experts > 0

    @property
    def family(self) -> str:
        """The first word of the name of a model with experts; empty for dense ones, which have one factor."""
        return re.split(r"[\W_]", self.row["model"].strip().lower())[0] if self.is_sparse else ""

    def time(self, stack: Stack) -> StepTime:
        """Return the predicted time of its step."""
        return step_time(self.work, self.step, self.cluster, stack)

    def predicted(self, stack: Stack) -> float:
        """Return the predicted tokens in a second on a device."""
        return self._tokens / self.time(stack).total

    @property
    def seconds(self) -> float:
        """The measured time of its step."""
        return self._tokens / self.measured

    @property
    def _tokens(self) -> float:
        return self.step.samples * self.work.tokens / self.devices

    def error(self, stack: Stack) -> float:
        """Return the relative error of that."""
        return self.predicted(stack) / self.measured - 1

    def unlike(self, other: Run) -> float:
        """Return how far it is from another in what shares of the peak rate depend on."""
        mine, theirs = self._sizes, other._sizes
        return math.fsum(abs(math.log2(a / b)) for a, b in zip(mine, theirs, strict=True))

    @property
    def _sizes(self) -> tuple[float, ...]:
        hidden = self.work.layer.output_bytes / self.work.tokens
        rows = self.step.rows * self.work.tokens / self.step.mesh.context
        return rows, hidden, self.step.mesh.tensor, math.sqrt(self.work.tokens), 1 + 3 * self.step.recompute


def _setup(row: Row, device: str) -> Setup:
    name, options = row["framework"].strip() or "unknown", row["options"].lower()
    software = "Megatron" if name.lower().startswith(_MEGATRON) else name
    how = next((f" {word}" for word in ("compile", "eager") if word in options), "")
    precision = row["precision"].strip().upper().replace("FLOAT", "FP").removesuffix("-CS")
    precision = {"FP8-MX": "MXFP8", "MX-FP8": "MXFP8", "FP16": "BF16"}.get(precision, precision)
    return Setup(software + how, precision, device.split("-")[0])


def as_run(row: Row, tables: Tables) -> Run:
    """Return a row as the cost model sees it.

    Raises:
        ConfigError: the device is unknown.
        ValueError: a number of the row is none.
    """
    for column, least in {**dict.fromkeys(_COUNTS, 1), "experts": 0, "active": 0}.items():
        if not least <= int(row[column]) <= _MOST:
            raise ValueError(f"{column}={row[column]}: expected a whole number of at least {least}")
    experts, active, kv_heads = int(row["experts"]), int(row["active"]), int(row["kv_heads"])
    if not min(1, experts) <= active <= experts:
        raise ValueError(f"active={active}: of experts={experts}, a token uses one at least and all at most")
    tensor, pipeline, context, shard, expert = (int(row[k]) for k in ("tp", "pp", "cp", "shard", "ep"))
    devices, tokens, hidden, heads = (int(row[k]) for k in ("gpus", "seq", "hidden", "heads"))
    cluster, options, name = _cluster(row["gpu"].strip(), devices, tables), row["options"], row["model"].strip().lower()
    setup = _setup(row, cluster.name)
    is_titan, is_foundry = row["framework"] == "torchtitan", row["framework"] == "llm-foundry"
    if not kv_heads <= heads <= hidden:
        raise ValueError(f"heads={heads}: expected kv_heads={kv_heads} at least and hidden={hidden} at most")
    replicas = devices // (tensor * pipeline * context)
    if replicas < 1:
        raise ValueError(f"gpus={devices}: tp, pp and cp need more")
    a_replica = int(row["gbs"]) / replicas
    # torchtitan divides the batch of a replica into as many micro-batches as there are ranks of the pipeline, unless
    # it is told otherwise (`pipeline_parallel_microbatches`).
    usual = max(1.0, a_replica / pipeline) if is_titan and pipeline > 1 else 1.0
    rows = min(_number(row, "mbs", usual), max(1.0, a_replica))
    passes = max(1.0, a_replica / rows)
    chunks = 2 if "Interleaved" in options else int(_number(row, "vp", 4 if row["vp"] == "?" else 2))
    precision = _precision(setup)
    again, attention_again = _RECOMPUTED.get(row["recompute"], (0.0, 0.0))
    model = Transformer(
        layers=int(row["layers"]),
        hidden=hidden,
        inner=int(row["ffn"]),
        heads=heads,
        kv_heads=kv_heads,
        head=128 if name.startswith(("qwen", "llama")) else 64 if "oss" in name else hidden // heads,
        vocabulary=int(row["vocab"]),
        gated=row["glu"] == "1",
        experts=experts,
        active=active,
        causal=1.0 if is_foundry or row.get("date", "").startswith("2022") else 0.5,
    )
    work = model.work(tokens)
    if row.get("moved"):
        work = replace(work, layer=replace(work.layer, moved_bytes=tokens * _number(row, "moved")))
    gathered, summed = 1.0 if precision != "bf16" and is_titan else 2.0, 2.0 if "PURE" in options else 4.0
    step = Step(
        mesh=Mesh(
            pipeline=pipeline,
            replicate=max(1, replicas // shard),
            shard=min(shard, replicas),
            context=context,
            tensor=tensor,
            replicas_close=True,
        ),
        rows=rows,
        passes=passes,
        expert=expert,
        chunks=chunks,
        bubble=(pipeline - 1) / (chunks * passes),
        recompute=again,
        recompute_attention=attention_again,
        gathers=shard > 1,
        divides_update=True,
        gathers_each_pass=pipeline == 1,
        sums_each_pass=pipeline == 1,
        precision=precision,
        gathered_bytes=gathered,
        summed_bytes=summed,
        exchanged_bytes=gathered + summed,
        overlaps_tensor=0.55 if "AsyncTP" in options or "overlap" in options else 0.0,
    )
    if row["tokens_s_gpu"]:
        measured = _number(row, "tokens_s_gpu")
    else:
        flops = replace(model, causal=0.5).work(tokens).step_flops / tokens
        measured = _number(row, "tflops_gpu") * 1e12 / flops
    return Run(
        row=row,
        setup=setup,
        work=work,
        step=step,
        cluster=cluster,
        measured=measured,
        is_known=row.get("known", "").strip() not in ("", "0"),
    )


def _cluster(gpu: str, devices: int, tables: Tables) -> Cluster:
    """Return the devices of a row, whose name may have the size of its memory, as in ``A100-80G``."""
    if not gpu:
        raise ValueError("gpu=: expected the name of a device, as in H100")
    memory = re.search(r"(\d+) ?G", gpu)
    name = gpu if gpu in tables.devices else name_of_gpu(gpu, float(memory[1]) if memory else 0.0, tables) or gpu
    each = min(64 if name.startswith("GB") else 8, devices)
    return parse_cluster(f"{math.ceil(devices / each)}x{each}x{name}", tables)


def _number(row: Row, column: str, otherwise: float | None = None) -> float:
    """Return a number above 0, or ``otherwise`` if there is none, as in ``?``."""
    try:
        found = float(row[column])
    except ValueError:
        if otherwise is not None:
            return otherwise
        found = 0.0
    if not 0 < found <= _MOST:
        raise ValueError(f"{column}={row[column]}: expected a number above 0")
    return found


def _precision(setup: Setup) -> Precision:
    if (found := _OF_BITS.get(setup.bits)) is None:
        raise ValueError(f"precision={setup.precision}: expected products in 16, 8 or 4 bits, as in BF16, FP8 or NVFP4")
    return found


@functools.cache
def published_runs() -> tuple[Run, ...]:
    """The runs that come with this package."""
    tables = read_tables()
    return tuple(as_run(row, tables) for row in read_rows(PUBLISHED))
