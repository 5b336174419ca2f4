"""Predictions of published training runs, and how far off they are.

A stack of software gets the shares of the peak rates that it reaches from one of its rows on a single node, and that of
attention from one with a long context, if there is one. All its other rows are predicted.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.config.build import ConfigError
from orchestrator.planning.mesh import Mesh
from orchestrator.prediction.cost import Stack, Step, StepTime, step_time
from orchestrator.prediction.devices import Cluster, Precision, Tables, parse_cluster, read_tables
from orchestrator.prediction.work import ModelWork, Transformer

PUBLISHED = Path(__file__).with_name("published_runs.csv")
COLUMNS = (
    *("source", "framework", "model", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "glu", "experts"),
    *("active", "gpu", "gpus", "precision", "seq", "tp", "pp", "vp", "cp", "ep", "shard", "mbs", "gbs", "recompute"),
    *("options", "tokens_s_gpu", "tflops_gpu"),
)
"""The columns that a file of runs has; ``replicate``, ``date``, ``memory_gib`` and others may follow."""
_COUNTS = (
    *("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "gpus", "seq", "tp", "pp", "cp", "ep", "shard", "gbs"),
)
_MOST = 10**9
LARGE = 128
"""The devices of a large run."""

Row = Mapping[str, str]

FUSED = 0.73
"""The share of elementwise traffic that is left where a compiler or hand-written kernels fuse it."""
USUAL_ATTENTION = 0.55
"""Attention's share of the peak rate in stacks that have no row with a long context."""
_RECOMPUTED = {
    "full": (1.0, 1.0),
    "selective": (0.36, 0.36),
    "selective per op": (0.36, 0.36),
    "selective+SP": (0.0, 1.0),
}
"""The shares of the forward products and of attention that the backward pass computes again; nothing otherwise."""


@dataclass(frozen=True)
class Calibration:
    """The rows of a stack, as (model, tokens of a sample, devices), from which its shares come.

    Attributes:
        products: the row for products; the name of another stack to take its shares.
        attention: the row for attention; None for :data:`USUAL_ATTENTION`.
        experts: the row for the time of the host to dispatch tokens to experts; None if the stack has none.
    """

    products: tuple[str, int, int] | str
    attention: tuple[str, int, int] | None = None
    experts: tuple[str, int, int] | None = None


_LLAMA_8B, _LLAMA_70B = ("LLAMA3_8B", 8192, 8), ("LLAMA3_70B", 8192, 64)
_QWEN_30B = ("Qwen3_30B_a3B", 4096, 8)
CALIBRATIONS: Mapping[str, Calibration] = {
    "llm-foundry BF16 A100": Calibration(("MPT-7b", 2048, 8), ("MPT-7b", 65536, 8)),
    "llm-foundry BF16 H100": Calibration(("MPT-7b", 2048, 8), ("MPT-7b", 65536, 8)),
    "llm-foundry FP8 H100": Calibration(("MPT-3b", 2048, 8), ("MPT-3b", 32768, 8)),
    "torchtitan eager BF16": Calibration(_LLAMA_8B),
    "torchtitan compile BF16": Calibration(_LLAMA_8B),
    "torchtitan compile FP8": Calibration(_LLAMA_8B, ("LLAMA3_8B", 32768, 8)),
    "Megatron FP16 A100": Calibration(("megatron-22B", 2048, 8)),
    "Megatron FP8 H100": Calibration(_LLAMA_8B, experts=("Qwen3_30B_a3B", 4096, 16)),
    "Megatron FP8 B200": Calibration(_LLAMA_8B),
    "Megatron FP8 GB200": Calibration(_LLAMA_8B),
    "Megatron MXFP8 B200": Calibration("Megatron FP8 B200", experts=_QWEN_30B),
    "Megatron MXFP8 GB200": Calibration(_LLAMA_70B, experts=_QWEN_30B),
    "Megatron NVFP4 GB200": Calibration(_LLAMA_70B),
    "Megatron BF16 H100": Calibration("llm-foundry BF16 H100"),
    "Megatron BF16 B200": Calibration("Megatron MXFP8 B200"),
    "Megatron BF16 GB200": Calibration("Megatron MXFP8 GB200"),
    "Meta BF16 H100": Calibration("llm-foundry BF16 H100"),
}
"""By the name that :func:`stack_name` returns. Rows of other stacks take the shares of the most similar one."""
_MEGATRON = ("megatron", "nemo")
"""How the names of frameworks begin whose kernels and communication are Megatron's."""
_WIDTH = re.compile(r"F\D*(\d+)")
"""Finds the bits of ``BF16``, ``MXFP8`` and their like."""


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


def stack_name(row: Row) -> str:
    """Return the stack of software of a row."""
    precision, gpu = row["precision"].removesuffix("-CS"), row["gpu"].split("-")[0]
    precision = "MXFP8" if precision == "FP8-MX" else precision
    if row["framework"] == "torchtitan":
        return f"torchtitan {'compile' if 'compile' in row['options'] else 'eager'} {precision}"
    framework = "Megatron" if row["framework"].lower().startswith(_MEGATRON) else row["framework"]
    return f"{framework} {precision} {gpu}"


def known_stack(name: str) -> str:
    """Return the stack itself if its shares are known, or the most similar one."""
    return name if name in CALIBRATIONS else _most_similar(name, CALIBRATIONS)


def other_stack(name: str) -> str:
    """Return the most similar stack whose shares come from no row of this one."""
    own = _origin(name)
    return _most_similar(name, [other for other in CALIBRATIONS if _origin(other) != own])


def _origin(name: str) -> str:
    """Return the stack whose row the share in products comes from."""
    rule = CALIBRATIONS.get(name)
    return _origin(rule.products) if rule is not None and isinstance(rule.products, str) else name


def _most_similar(name: str, known: Iterable[str]) -> str:
    """Return one of the same framework, if there is one; then as wide in its products; then on the nearest device."""

    def likeness(other: str) -> tuple[object, ...]:
        words, others = name.split(), other.split()
        same_width = _WIDTH.findall(name) == _WIDTH.findall(other)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(words[-1], others[-1], strict=False))
        return words[0] == others[0], same_width, len([*same]), len({*words} & {*others})

    return max(known, key=likeness)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run as the cost model sees it. ``measured``: its tokens in a second on a device."""

    row: Row
    stack: str
    work: ModelWork
    step: Step
    cluster: Cluster
    measured: float

    @property
    def devices(self) -> int:
        """The number of its devices."""
        return int(self.row["gpus"])

    @property
    def is_sparse(self) -> bool:
        """Whether its model has experts."""
        return self.work.layer.experts > 0

    @property
    def key(self) -> tuple[str, int, int]:
        """What :class:`Calibration` names it by."""
        return self.row["model"], int(self.row["seq"]), self.devices

    def time(self, stack: Stack) -> StepTime:
        """Return the predicted time of its step."""
        return step_time(self.work, self.step, self.cluster, stack)

    def predicted(self, stack: Stack) -> float:
        """Return the predicted tokens in a second on a device."""
        return self.step.samples * self.work.tokens / self.devices / self.time(stack).total


def as_run(row: Row, tables: Tables) -> Run:
    """Return a row as the cost model sees it.

    Raises:
        ConfigError: the device is unknown.
        ValueError: a number of the row is none.
    """
    for column in _COUNTS:
        if not 1 <= int(row[column]) <= _MOST:
            raise ValueError(f"{column}={row[column]}: expected a whole number of at least 1")
    tensor, pipeline, context, shard, expert = (int(row[k]) for k in ("tp", "pp", "cp", "shard", "ep"))
    devices, tokens, hidden, heads = (int(row[k]) for k in ("gpus", "seq", "hidden", "heads"))
    is_titan, is_foundry = row["framework"] == "torchtitan", row["framework"] == "llm-foundry"
    replicas = devices // (tensor * pipeline * context)
    rows = 1.0 if is_titan and pipeline > 1 else _number(row["mbs"], 1.0)
    passes = max(1.0, int(row["gbs"]) / replicas / rows)
    chunks = int(_number(row["vp"], 4 if row["vp"] == "?" else 2))
    if "Interleaved" in row["options"]:
        chunks = 2
    precision = _precision(row)
    again, attention_again = _RECOMPUTED.get(row["recompute"], (0.0, 0.0))
    per_node = 64 if row["gpu"].startswith("GB") else 8
    gpu, name = re.sub(r"(?<=\d)GB$", "G", row["gpu"]), row["model"].lower()
    gpu = "A100" if gpu == "A100-80G" else gpu
    model = Transformer(
        layers=int(row["layers"]),
        hidden=hidden,
        inner=int(row["ffn"]),
        heads=heads,
        kv_heads=int(row["kv_heads"]),
        head=128 if name.startswith(("qwen", "llama")) else 64 if "oss" in name else hidden // heads,
        vocabulary=int(row["vocab"]),
        gated=row["glu"] == "1",
        experts=int(row["experts"]),
        active=int(row["active"]),
        causal=1.0 if is_foundry or row["gpu"].startswith("A100-80G") else 0.5,
    )
    work = model.work(tokens)
    gathered, summed = 1.0 if precision != "bf16" and is_titan else 2.0, 2.0 if "PURE" in row["options"] else 4.0
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
        overlaps_tensor=0.55 if "AsyncTP" in row["options"] or "overlap" in row["options"] else 0.0,
    )
    if row["tokens_s_gpu"]:
        measured = float(row["tokens_s_gpu"])
    else:
        measured = float(row["tflops_gpu"]) * 1e12 / (replace(model, causal=0.5).work(tokens).step_flops / tokens)
    nodes = max(1, devices // per_node)
    cluster = parse_cluster(f"{nodes}x{min(per_node, devices)}x{gpu}", tables)
    return Run(row=row, stack=stack_name(row), work=work, step=step, cluster=cluster, measured=measured)


def _number(text: str, otherwise: float) -> float:
    try:
        return float(text)
    except ValueError:
        return otherwise


def _precision(row: Row) -> Precision:
    return "fp4" if "FP4" in row["precision"] else "fp8" if "FP8" in row["precision"] else "bf16"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run and its prediction.

    Attributes:
        predicted: tokens in a second on a device.
        tuned: whether the shares of a stack come from this row.
        known: the stack whose shares it took.
        unseen: the same as ``predicted``, with the shares of the most similar other stack.
    """

    run: Run
    predicted: float
    tuned: bool
    known: str
    unseen: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.run.measured - 1

    @property
    def unseen_error(self) -> float:
        """The relative error without any row of its stack."""
        return self.unseen / self.run.measured - 1


def calibrated(name: str, runs: Sequence[Run]) -> tuple[Stack, list[Run]]:
    """Return the shares of a stack, and the runs that they come from.

    Args:
        runs: the runs among which the rows of its calibration are.
    """
    rule = CALIBRATIONS[name]
    own = [run for run in runs if run.stack == name]

    def row(key: tuple[str, int, int] | None) -> Run | None:
        return next((run for run in own if run.key == key), None)

    moved = 1.0 if "eager" in name or "foundry" in name else FUSED
    if isinstance(rule.products, str):
        stack, base = replace(calibrated(rule.products, runs)[0], moved=moved), None
    else:
        stack, base = Stack(products=0.5, attention=USUAL_ATTENTION, moved=moved), row(rule.products)
    long, sparse = row(rule.attention), row(rule.experts)
    for _ in range(8 if base and long else 1):
        if base is not None:
            stack = fitted(base.predicted, base.measured, stack, lambda stack, share: replace(stack, products=share))
        if long is not None:
            stack = fitted(long.predicted, long.measured, stack, lambda stack, share: replace(stack, attention=share))
    if sparse is not None:
        stack = fitted(
            sparse.predicted,
            sparse.measured,
            stack,
            lambda stack, share: replace(stack, dispatch_s=0.05 * (1 - share)),
        )
    return stack, [run for run in (base, long, sparse) if run is not None]


def fitted(
    speed: Callable[[Stack], float], measured: float, stack: Stack, change: Callable[[Stack, float], Stack]
) -> Stack:
    """Return ``stack`` with the share between 0 and 1 at which the predicted speed is the measured one, or nearest."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(change(stack, middle)) < measured else (low, middle)
    return change(stack, low or high)


def stack_for(device: str, *, compiled: bool) -> Stack:
    """Return the shares that plain PyTorch reaches in published runs on a device like this one.

    Args:
        compiled: whether the blocks of the model are compiled.
    """
    if device.startswith("A100"):
        stack, _ = _calibrated("llm-foundry BF16 A100")
        return replace(stack, moved=FUSED if compiled else 1.0)
    stack, _ = _calibrated(f"torchtitan {'compile' if compiled else 'eager'} BF16")
    return stack


def compare(rows: Sequence[Row], tables: Tables) -> list[Compared]:
    """Predict the rows.

    Raises:
        ConfigError: a row is damaged, or there is none.
    """
    found = []
    for number, row in enumerate(rows, 1):
        try:
            run = as_run(row, tables)
            known = known_stack(run.stack)
            stack, tuned_on = _calibrated(known)
            predicted, unseen = run.predicted(stack), run.predicted(_calibrated(other_stack(run.stack))[0])
            if not (0 < run.measured < math.inf and 0 < predicted < math.inf):
                raise ValueError("its tokens per second are no positive number")
        except (ValueError, ArithmeticError, TypeError) as e:
            reason = f"--published: row {number} ({row['model']}) cannot be read: {e}; compare it with {PUBLISHED.name}"
            raise ConfigError([reason]) from e
        tuned = any(run.row == other.row for other in tuned_on)
        found.append(Compared(run=run, predicted=predicted, tuned=tuned, known=known, unseen=unseen))
    if not found:
        raise ConfigError([f"--published: the file has no rows; {PUBLISHED.name} in the package is an example"])
    return found


@functools.cache
def published_runs() -> tuple[Run, ...]:
    """The runs that come with this package."""
    tables = read_tables()
    return tuple(as_run(row, tables) for row in read_rows(PUBLISHED))


@functools.cache
def _calibrated(name: str) -> tuple[Stack, list[Run]]:
    return calibrated(name, published_runs())


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The errors of predictions.

    Attributes:
        median: of the absolute relative errors.
        mean: of the same.
        ninth: what nine of ten of these do not exceed.
        worst: the largest.
        low: nine of ten runs are at least so fast, relative to their predictions, and at most ``high``.
        high: see ``low``.
    """

    count: int
    median: float
    mean: float
    ninth: float
    worst: float
    low: float
    high: float

    @classmethod
    def of(cls, compared: Sequence[Compared], *, unseen: bool = False) -> Spread:
        """Return that of some predictions.

        Args:
            compared: with some that nothing was tuned on; the others count only if ``unseen``.
            unseen: whether no row of a stack is known when its rows are predicted, as in a new program.
        """
        found = [c.unseen_error for c in compared] if unseen else [c.error for c in compared if not c.tuned]
        errors, speeds = sorted(map(abs, found)), sorted(1 / (1 + error) for error in found)
        beyond = int(0.05 * (len(speeds) - 1))
        return cls(
            count=len(errors),
            median=statistics.median(errors),
            mean=statistics.mean(errors),
            ninth=errors[int(0.9 * (len(errors) - 1))],
            worst=errors[-1],
            low=speeds[beyond],
            high=speeds[-1 - beyond],
        )
