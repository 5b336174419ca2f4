"""Shares of the peak rates by known runs, and how far off predictions with them are.

A setup (software, precision and device) has one factor, with experts one for each family of models. One known run
tells it: the shares of products and of attention change, more what takes more of its step, until it is predicted as it
was measured. Without one, the share of products is the median of those of the most similar setups, and that of
attention what its kernels are known to reach.
"""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from orchestrator.config.build import ConfigError
from orchestrator.features.plan.prediction.cost import Stack, StepTime
from orchestrator.features.plan.prediction.devices import Tables
from orchestrator.features.plan.prediction.published import PUBLISHED, Row, Run, Setup, as_run, published_runs

Case = Literal["calibrated", "new device", "new software", "all new"]
"""What is known where something is predicted: a run of its setup; its software and precision on another device; other
software on its device; neither."""
CASES: Mapping[Case, str] = {
    "calibrated": "calibrated by one run of the same software, precision and device",
    "new device": "of software that is known on other devices",
    "new software": "of other software on a known device",
    "all new": "of software and devices without a known run",
}
SPREADS = Path(__file__).with_name("spreads.csv")
"""The errors by what is known, which ``benchmarks/spreads.py`` writes."""
LeftOut = Callable[[Setup], bool]
OURS = "orchestrator"
"""How the software of runs of this program begins."""

FUSED = 0.73
"""The share of elementwise traffic that is left where a compiler or hand-written kernels fuse it."""
_FUSING = ("Megatron", "Meta")
"""Software with hand-written kernels."""
USUAL_PRODUCTS = 0.5
"""The share of products before anything is known."""
_ATTENTION_VARIES = 4.0
"""The variance of the logarithm of attention's share, relative to that of products: the first lies between 17 %, where
later tokens are computed too, and 75 % (arXiv:2407.08608), the second between 35 and 76 % in published runs."""
_MOST_CHANGE = 5.0
"""The logarithm of the largest factor of a share."""
_ATTENTION, _OF_TRANSFORMER_ENGINE, _ON_NEWER = 0.6, 0.55, 0.35
"""The shares of the peak rate that attention reaches: FlashAttention-2 on A100 (arXiv:2307.08691: 50 to 73 %), cuDNN's
on newer devices, and FlashAttention-2 there (arXiv:2407.08608: 35 % on H100)."""
_NEWER = ("H", "B")
DISPATCH_S = 0.003
"""The time of the host to dispatch the tokens of a micro-batch to the experts of a layer and back: what the two setups
take whose dense runs tell the share of products too, Megatron's FP8 on H100 and MXFP8 on GB200."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What a prediction is made with.

    Attributes:
        known: the run that calibrates it; None if none of its setup is known.
    """

    stack: Stack
    case: Case
    known: Run | None


def usual(setup: Setup) -> Stack:
    """Return shares of a setup that differ from its own by one factor."""
    is_fused = setup.software.startswith(_FUSING) or setup.software.endswith("compile")
    on_newer = _OF_TRANSFORMER_ENGINE if setup.software.startswith("Megatron") else _ON_NEWER
    return Stack(
        products=USUAL_PRODUCTS,
        attention=on_newer if setup.generation in _NEWER else _ATTENTION,
        moved=FUSED if is_fused else 1.0,
        dispatch_s=DISPATCH_S,
    )


def fitted(time: Callable[[Stack], StepTime], seconds: float, stack: Stack) -> Stack:
    """Return ``stack`` with shares, at most 1, with which a step takes so long, or as near to that as can be.

    One time tells one number: of products and attention, what takes more of the step and is less certain changes more.

    Args:
        time: returns the time of the step.
        seconds: how long it took.
        stack: the shares without this step.
    """
    before = time(stack)
    of_products, of_attention = before.products, _ATTENTION_VARIES * before.attention
    most = max(of_products, of_attention)

    def changed(factor: float) -> Stack:
        products = stack.products * factor ** (of_products / most)
        attention = stack.attention * factor ** (of_attention / most)
        return replace(stack, products=min(1.0, products), attention=min(1.0, attention))

    low, high = -_MOST_CHANGE, _MOST_CHANGE
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if time(changed(math.exp(middle))).total > seconds else (low, middle)
    return changed(math.exp(low))


def _nothing(setup: Setup) -> bool:
    return False


class Known:
    """Known runs, by which others are calibrated."""

    def __init__(self, runs: Iterable[Run]):
        """Take the runs.

        Args:
            runs: of a setup and a family of models, all count, the most similar one for each prediction.
        """
        self.runs = tuple(runs)
        dense = [run for run in self.runs if not run.is_sparse]
        self._products = {run.setup: fitted(run.time, run.seconds, usual(run.setup)).products for run in dense}
        self._stacks: dict[tuple[int, Stack], Stack] = {}

    def shares(self, setup: Setup, family: str = "", *, of: Run | None = None, without: LeftOut = _nothing) -> Shares:
        """Return what a run is predicted with.

        Args:
            setup: its setup.
            family: of its model, if it has experts.
            of: the run, which does not calibrate itself; the known run most like it counts.
            without: whether a setup counts as unknown.
        """
        known = [run for run in self.runs if run is not of and run.family == family and not without(run.setup)]
        prior = self.prior(setup, family, without)
        if own := [run for run in known if run.setup == setup]:
            nearest = min(own, key=of.unlike) if of is not None else own[0]
            key = (id(nearest), prior)
            if key not in self._stacks:
                self._stacks[key] = fitted(nearest.time, nearest.seconds, prior)
            return Shares(stack=self._stacks[key], case="calibrated", known=nearest)
        others = {run.setup for run in known}
        if any((k.software, k.precision) == (setup.software, setup.precision) for k in others):
            return Shares(stack=prior, case="new device", known=None)
        on_device = any(k.device == setup.device for k in others)
        return Shares(stack=prior, case="new software" if on_device else "all new", known=None)

    def prior(self, setup: Setup, family: str = "", without: LeftOut = _nothing) -> Stack:
        """Return the shares without a known run: of setups as similar as there are any; see :meth:`shares`.

        With experts, the share of products is that of a dense run of the setup, if one is known.
        """
        products = {k: share for k, share in self._products.items() if not without(k) and (family or k != setup)}
        alike = [*products]
        for name in ("software", "bits", "precision", "generation"):
            alike = [k for k in alike if getattr(k, name) == getattr(setup, name)] or alike
        share = statistics.median(products[k] for k in alike) if alike else USUAL_PRODUCTS
        return replace(usual(setup), products=share)


def on_one_node(runs: Sequence[Run]) -> list[Run]:
    """Return the runs on one node, or those on the fewest devices if there are none."""
    least = min(run.devices for run in runs)
    return [run for run in runs if run.devices <= max(least, run.cluster.domain)]


def typical(runs: Sequence[Run]) -> Run:
    """Return the run on one node that is most like the others of its setup. What was measured plays no part."""
    return min(on_one_node(runs), key=lambda run: math.fsum(run.unlike(other) for other in runs))


def known_of(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that are marked, or a typical one of each setup and family that has several and no marked one."""
    found: list[Run] = []
    for group in groups(runs):
        marked = [run for run in group if run.is_known]
        found += marked or ([typical(group)] if len(group) > 1 else [])
    return found


def groups(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the runs by setup and family."""
    found: dict[tuple[Setup, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.setup, run.family), []).append(run)
    return [*found.values()]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run and its prediction.

    Attributes:
        shares: what it was predicted with.
        unseen: what it is predicted with without all runs of its software or its device.
        is_known: whether it calibrates others, so that its own error does not count.
    """

    run: Run
    shares: Shares
    unseen: Stack
    is_known: bool

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.run.error(self.shares.stack)

    @property
    def unseen_error(self) -> float:
        """The relative error without all runs of its software or its device."""
        return self.run.error(self.unseen)


def compare(rows: Sequence[Row], tables: Tables) -> list[Compared]:
    """Predict the rows, calibrated by those of them that are known, and by the runs that come with this package.

    Raises:
        ConfigError: a row is damaged, or there is none.
    """
    runs = []
    for number, row in enumerate(rows, 1):
        try:
            run = as_run(row, tables)
            if not 0 < run.predicted(usual(run.setup)) < math.inf:
                raise ValueError("its predicted tokens per second are no positive number")
        except (ValueError, ArithmeticError, TypeError, ConfigError) as e:
            why = "; ".join(e.errors).replace("--cluster ", "gpu=") if isinstance(e, ConfigError) else str(e)
            where = f"--published: row {number} ({row['model']})"
            raise ConfigError([f"{where} cannot be read: {why}; compare it with {PUBLISHED.name}"]) from e
        runs.append(run)
    if not runs:
        raise ConfigError([f"--published: the file has no rows; {PUBLISHED.name} in the package is an example"])
    marked = known_of(runs)
    replaced, listed = {(run.setup, run.family) for run in marked}, [run.row for run in runs]
    others = [k for k in published().runs if (k.setup, k.family) not in replaced and k.row not in listed]
    known = Known([*marked, *others])
    return [_compared(run, known) for run in runs]


def _compared(run: Run, known: Known) -> Compared:
    def unknown(setup: Setup) -> bool:
        return setup.software == run.setup.software or setup.device == run.setup.device

    return Compared(
        run=run,
        shares=known.shares(run.setup, run.family, of=run),
        unseen=known.prior(run.setup, run.family, unknown),
        is_known=any(run is k for k in known.runs),
    )


@functools.cache
def published() -> Known:
    """The known runs that come with this package."""
    return Known(known_of(published_runs()))


def shares_of_job(device: str, *, compiled: bool, sparse: bool) -> Shares:
    """Return what a job of this program is predicted with, without a run of it.

    Args:
        device: as in the tables.
        compiled: whether the blocks of the model are compiled.
        sparse: whether it has experts.
    """
    setup = Setup(f"{OURS} {'compile' if compiled else 'eager'}", "BF16", device.split("-")[0])
    found = published().shares(setup, "experts" if sparse else "")
    return found if found.case == "calibrated" else replace(found, case="all new")


def has_published_runs(device: str) -> bool:
    """Return whether a published run is on such a device, whatever the size of its memory."""
    return any(run.setup.device == device.split("-")[0] for run in published_runs())


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The errors of predictions, of which those of each setup count as much together as those of any other.

    Attributes:
        count: of the predictions.
        setups: of them.
        median: of the absolute relative errors.
        ninth: what nine of ten of these do not exceed.
        worst: the largest.
        low: nine of ten runs are at least so fast, relative to their predictions, and at most ``high``.
        high: see ``low``.
    """

    count: int
    setups: int
    median: float
    ninth: float
    worst: float
    low: float
    high: float

    @classmethod
    def of(cls, errors: Sequence[tuple[Setup, float]]) -> Spread:
        """Return that of relative errors by setup."""
        runs = Counter(setup for setup, _ in errors)
        absolute = sorted((abs(error), 1 / runs[setup]) for setup, error in errors)
        speeds = sorted((1 / (1 + error), 1 / runs[setup]) for setup, error in errors)
        return cls(
            count=len(errors),
            setups=len(runs),
            median=_quantile(absolute, 0.5),
            ninth=_quantile(absolute, 0.9),
            worst=absolute[-1][0],
            low=_quantile(speeds, 0.05),
            high=_quantile(speeds, 0.95),
        )


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return the first value, of sorted ones with their weights, up to which ``share`` of all weights lie."""
    reached, least = 0.0, share * math.fsum(weight for _, weight in weighted) - 1e-9
    for value, weight in weighted:
        reached += weight
        if reached >= least:
            return value
    return weighted[-1][0]


@functools.cache
def spread(case: Case, *, sparse: bool) -> Spread:
    """Return the errors of a case for published runs, with experts if ``sparse``, as the table that ships has them."""
    with SPREADS.open(newline="") as file:
        found = next(row for row in csv.DictReader(file) if (row["case"], row["sparse"]) == (case, str(int(sparse))))
    median, ninth, worst, low, high = (float(found[name]) for name in ("median", "ninth", "worst", "low", "high"))
    count, setups = int(found["count"]), int(found["setups"])
    return Spread(count=count, setups=setups, median=median, ninth=ninth, worst=worst, low=low, high=high)
