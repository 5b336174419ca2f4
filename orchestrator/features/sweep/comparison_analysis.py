"""What a comparison of runs says: speeds, scaling, repeats, noise, and settings that differ. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.config.text import first_few
from orchestrator.display.comparison import (
    NO_EFFECT,
    RATE,
    ComparedRun,
    Curve,
    configuration,
    mean_of,
    repeats,
    setting_text,
)
from orchestrator.display.plain_text import number, rate
from orchestrator.features.sweep.ranking import ranking
from orchestrator.protocol.metrics import describe_sharing

_CLOSE_SPEED = 0.05
"""Relative difference of speeds below which a single run of each may well be noise."""

_TOO_EFFICIENT = 1.005
"""A scaling efficiency that is printed as more than 100 %."""

_MOST_SETTINGS = 3
"""The settings that a row names."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in this order.

    Attributes:
        target_loss: the training loss to which the time is compared.
        best_first: whether tables begin with the run that is the best by its own metric.
    """

    runs: Sequence[ComparedRun]
    target_loss: float | None = None
    best_first: bool = False

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The labels of the runs by their location."""
        return {run.location: label for run, label in zip(self.runs, labels(self.runs), strict=True)}

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        """The loss curves of the runs by their location."""
        return {run.location: run.curve() for run in self.runs}

    @cached_property
    def baselines(self) -> Mapping[str, ComparedRun]:
        """By work, the run that speeds are relative to: the first ``single`` one with a throughput, else the first."""
        measured = [run for run in self.runs if run.value(RATE)]
        found = {run.work: run for run in reversed(measured)}
        return found | {run.work: run for run in reversed(measured) if run.strategy == "single"}

    @cached_property
    def num_measured(self) -> Counter[str]:
        """By work, the number of runs with a throughput."""
        return Counter(run.work for run in self.runs if run.value(RATE))

    def name(self, run: ComparedRun) -> str:
        """Return the label of ``run``."""
        return self.names[run.location]

    def relative_speed(self, run: ComparedRun) -> float | None:
        """Return the throughput of ``run`` relative to its baseline; None if no two runs of this work have one."""
        base = self.baselines.get(run.work) if self.num_measured[run.work] > 1 else None
        speed, base_speed = run.value(RATE), base and base.value(RATE)
        return speed / base_speed if speed and base_speed else None

    def scaling_efficiency(self, run: ComparedRun) -> float | None:
        """Return the throughput per worker relative to the smallest run of the same work.

        That is the run with the fewest workers of the same strategy, or of ``single``. None if it has as many workers
        as ``run``.
        """
        own = _rate_per_worker(run)
        smaller = [self._smallest.get((run.work, strategy)) for strategy in (run.strategy, "single")]
        bases = [base for base in smaller if base is not None and (base.workers or 0) < (run.workers or 0)]
        if own is None or not bases:
            return None
        per_worker = _rate_per_worker(min(bases, key=lambda base: base.workers or 0))
        return own / per_worker if per_worker else None

    @cached_property
    def _smallest(self) -> Mapping[tuple[str, str], ComparedRun]:
        """By work and strategy, the run with the fewest workers."""
        measured = [run for run in self.runs if _rate_per_worker(run)]
        by_size = sorted(measured, key=lambda run: run.workers or 0, reverse=True)
        return {(run.work, run.strategy): run for run in by_size}

    def seconds_to_target(self, run: ComparedRun) -> float | None:
        """Return the seconds that ``run`` takes to reach the target loss; None if it does not."""
        return None if self.target_loss is None else self.curves[run.location].seconds_to(self.target_loss)

    @cached_property
    def grouped(self) -> Comparison:
        """The same comparison with one row for each configuration: the mean of its runs that have finished."""
        groups = repeats(self.runs)
        first = {group[0].location: mean_of(group) for group in groups}
        others = {run.location for group in groups for run in group[1:]}
        runs = [first.get(run.location, run) for run in self.runs if run.location not in others]
        return Comparison(runs, self.target_loss, self.best_first)

    @property
    def rows(self) -> list[int]:
        """The places of the runs in the order of a table's rows. Equal runs, and those of several jobs, keep theirs."""
        order = list(range(len(self.runs)))
        found = ranking(self.runs) if self.best_first and len({run.job for run in self.runs}) == 1 else None
        if found is None or found.is_tie:
            return order
        sign = -1 if found.maximize else 1
        values = [found.values.get(run.location) for run in self.runs]
        return sorted(order, key=lambda i: math.inf if (value := values[i]) is None else sign * value)

    @property
    def has_repeats(self) -> bool:
        """Whether a configuration has several runs."""
        return len(self.grouped.runs) < len(self.runs)


def labels(runs: Sequence[ComparedRun]) -> list[str]:
    """Return short names that distinguish the runs: strategy and workers; what else differs only if necessary."""
    several_jobs = len({run.job for run in runs}) > 1
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        workers = f" x{run.workers}" if run.workers else ""
        short = run.strategy + workers + (f" {run.job}" if several_jobs else "")
        groups.setdefault(short, []).append(run)
    names = {}
    for short, group in groups.items():
        for run, own in zip(group, _distinctions(group), strict=True):
            names[id(run)] = short if len(group) == 1 else f"{short}, {own}"
    return [names[id(run)] for run in runs]


def _distinctions(runs: Sequence[ComparedRun]) -> list[str]:
    """The settings in which each of these runs differs from the others, and its time of day if they do not tell it."""
    found = settings(runs)
    for told in (found, [run.settings for run in runs]):
        if len(set(told)) == len(told) and all(told):
            return told
    return [", ".join(filter(None, [own, _time_of_day(run)])) for own, run in zip(found, runs, strict=True)]


def _time_of_day(run: ComparedRun) -> str:
    """The time of day at which the run started; its name if that does not say it."""
    match = re.match(r"(\d\d)-(\d\d)-(\d\d)-", run.name)
    return ":".join(match.groups()) if match else run.name


def verdict(comparison: Comparison) -> list[str]:
    """Return one sentence for each job, then one for each reason to doubt the speeds.

    The sentence names the fastest of the finished runs, and the one with the best ``sweep.metric`` or loss.
    """
    grouped = comparison.grouped
    jobs = dict.fromkeys(run.job for run in grouped.runs)
    sentences = [sentence for job in jobs if (sentence := _verdict(grouped, job))]
    return [*sentences, *_doubts(comparison)]


def _doubts(comparison: Comparison) -> list[str]:
    """Why the speeds may be wrong."""
    grouped, doubts = comparison.grouped, []
    shared = {
        run.location: text for run in comparison.runs if run.value(RATE) and (text := describe_sharing(run.summary))
    }
    if shared:
        runs = [f"{comparison.names[location]} ({text})" for location, text in shared.items()]
        doubts.append(
            f"warning: the speeds may be wrong, because other programs used the machine while these runs were timed: "
            f"{first_few(runs, 3)}; repeat them on a free machine"
        )
    too_high = [
        f"{grouped.name(run)} ({grouped.scaling_efficiency(run):.0%})"
        for run in grouped.runs
        if _is_too_efficient(grouped, run)
    ]
    if too_high:
        doubts.append(
            f"warning: more than 100% scaling efficiency: {first_few(too_high, 3)}; the smaller run was probably "
            "slowed down by something: repeat both with -m seed=0,1,2"
        )
    return doubts


def _is_too_efficient(comparison: Comparison, run: ComparedRun) -> bool:
    return (comparison.scaling_efficiency(run) or 0.0) >= _TOO_EFFICIENT


def _verdict(comparison: Comparison, job: str) -> str | None:
    runs = [run for run in comparison.runs if run.job == job and run.state == "finished" and run.value(RATE)]
    if not runs:
        return None
    fastest = max(runs, key=lambda run: run.value(RATE) or 0.0)
    base = comparison.baselines[fastest.work]
    compared = [*runs, base]
    doubtful = any(describe_sharing(run.summary) or _is_too_efficient(comparison, run) for run in compared)
    text = "fastest, if the speeds are right" if doubtful else "fastest"
    text += f": {comparison.name(fastest)} with {rate(fastest.value(RATE) or 0.0)} samples/s"
    if fastest is not base:
        text += f", {comparison.relative_speed(fastest):.2f}x {comparison.name(base)}"
        if (efficiency := comparison.scaling_efficiency(fastest)) is not None:
            text += f" ({efficiency:.0%} scaling efficiency)"
    widest = _widest_margin(comparison)
    equal = [run for run in runs if run is not fastest and widest and _overlap(run, fastest, widest)]
    if equal:
        text += f"; within the noise of it: {first_few([comparison.name(run) for run in equal], 3)}"
    return "; ".join(filter(None, [text, _best(comparison, runs)]))


def _best(comparison: Comparison, runs: Sequence[ComparedRun]) -> str | None:
    """The best run by its own metric; None without several."""
    if (found := ranking(runs)) is None:
        return None
    if found.is_tie:
        return f"all reach the same {found.name}, {number(min(found.values.values()))}"
    chosen, *_ = sorted(found.values, key=found.values.__getitem__, reverse=found.maximize)
    what = "lowest loss" if found.name == "loss" else f"best {found.name}"
    return f"{what}: {comparison.names[chosen]} with {number(found.values[chosen])}"


def noise(comparison: Comparison) -> list[str]:
    """Return which differences of speed are within the noise, as far as repeats show it.

    Two speeds differ if the ranges of their repeats do not overlap. The range of a configuration without repeats is
    taken to be as wide, relative to its speed, as the widest of the others.
    """
    grouped = comparison.grouped
    measured = [run for run in grouped.runs if run.value(RATE)]
    widest = _widest_margin(grouped)
    if widest is None:
        return _untold(grouped, measured)
    lines = [f"noise: the repeats of a configuration differ by up to ±{widest:.1%} in speed"]
    for run in measured:
        base = grouped.baselines[run.work]
        if run is not base and _overlap(run, base, widest):
            lines.append(f"within the noise: {grouped.name(run)} and {grouped.name(base)}")
    return lines


def _overlap(one: ComparedRun, other: ComparedRun, widest: float) -> bool:
    """Whether the ranges of two speeds overlap; ``widest`` is the margin of a run without repeats."""
    speeds = [run.value(RATE) or 0.0 for run in (one, other)]
    margins = [_margin(run) if run.repeats > 1 else widest for run in (one, other)]
    return abs(speeds[0] - speeds[1]) <= sum(s * m for s, m in zip(speeds, margins, strict=True))


def _widest_margin(grouped: Comparison) -> float | None:
    """The widest margin of the configurations with repeats; None without any."""
    return max((_margin(run) for run in grouped.runs if run.repeats > 1 and run.value(RATE)), default=None)


def _untold(comparison: Comparison, measured: Iterable[ComparedRun]) -> list[str]:
    """Name the runs whose speeds are too close to compare without repeats."""
    close = [
        comparison.name(run)
        for run in measured
        if run is not comparison.baselines[run.work] and abs((comparison.relative_speed(run) or 0) - 1) < _CLOSE_SPEED
    ]
    if not close:
        return []
    return [f"too close to tell from one run each: {first_few(close)}; repeat with -m seed=0,1,2"]


def differences(runs: Sequence[ComparedRun]) -> list[str]:
    """Return in which settings, other than the strategy, and in what else the runs of each job differ."""
    lines = []
    for job in dict.fromkeys(run.job for run in runs):
        own = [run for run in runs if run.job == job]
        found = [*_different_params(own), *_different_machines(own)]
        if found:
            lines.append(f"{job} runs differ in more than the strategy: {first_few(found)}")
    if len({run.job for run in runs}) > 1:
        lines.append("the runs train different jobs: compare only runs of the same job")
    return lines


def settings(runs: Sequence[ComparedRun]) -> list[str]:
    """Return in which settings each run differs from others of its job, strategy and size; empty if in none."""
    alike: dict[tuple[str, str, int | None], list[ComparedRun]] = {}
    for run in runs:
        alike.setdefault((run.job, run.strategy, run.workers), []).append(run)
    keys = {kind: list(_varying(group)) for kind, group in alike.items()}

    def of(run: ComparedRun) -> list[str]:
        own = keys[run.job, run.strategy, run.workers]
        return [f"{key.rpartition('.')[2]}={setting_text(run.params.get(key))}" for key in own]

    return [first_few(of(run), _MOST_SETTINGS) for run in runs]


def _different_params(runs: Sequence[ComparedRun]) -> list[str]:
    known = [run for run in runs if run.params]
    return [
        f"{key} ({first_few(values, 4)})"
        for key, values in _varying(known).items()
        if not key.startswith("strategy.") and not (key == "seed" and _same_seeds(known))
    ]


def _varying(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The values of the settings with an effect in which ``runs`` differ, by key."""
    keys = dict.fromkeys(
        key for run in runs for key in run.params if (not key.startswith(NO_EFFECT) and not key.endswith("timeout_s"))
    )
    values = {key: list(dict.fromkeys(setting_text(run.params.get(key)) for run in runs)) for key in keys}
    return {key: found for key, found in values.items() if len(found) > 1}


def _same_seeds(runs: Sequence[ComparedRun]) -> bool:
    """Whether every configuration ran with the same seeds."""
    seeds: dict[str, set[str]] = {}
    for run in runs:
        seeds.setdefault(configuration(run), set()).add(str(run.params.get("seed")))
    return len({frozenset(found) for found in seeds.values()}) == 1


def _different_machines(runs: Sequence[ComparedRun]) -> list[str]:
    known = [run for run in runs if run.machine]
    found = []
    for key in dict.fromkeys(key for run in known for key in run.machine):
        values = dict.fromkeys(run.machine.get(key, "unknown") for run in known)
        if len(values) > 1:
            found.append(f"{key} ({first_few(list(values), 4)})")
    return found


def _margin(run: ComparedRun) -> float:
    """Half the range of the speeds of the repeats, relative to their mean."""
    return run.spread.get(RATE, 0.0) / (run.value(RATE) or 1.0)


def _rate_per_worker(run: ComparedRun) -> float | None:
    speed = run.value(RATE)
    return speed / run.workers if speed and run.workers else None


def shared_baselines(comparison: Comparison) -> list[str]:
    """Return the labels of the runs that the speeds of others are relative to."""
    return [comparison.name(comparison.baselines[work]) for work, n in comparison.num_measured.items() if n > 1]
