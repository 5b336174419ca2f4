"""What a comparison says about runs: speeds, scaling, repeats, noise and settings that differ."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden
from orchestrator.display.comparison import ComparedRun, Curve, read_run, run_of
from orchestrator.features.sweep.comparison_analysis import Comparison, differences, noise, settings, verdict
from orchestrator.features.sweep.comparison_report import columns, table
from orchestrator.protocol.metrics import Column, MetricSpec, Summary, to_record
from orchestrator.records.run_dir import RunDir

_numbers = itertools.count()


def run(
    strategy: str,
    workers: int,
    samples_per_s: float | None = None,
    *,
    final_loss: float | None = None,
    machine: dict[str, str] | None = None,
    losses: tuple[float, ...] = (),
    **params: Any,
) -> ComparedRun:
    summary = {"samples_per_s": samples_per_s, "final_loss": final_loss}
    place = f"run-{next(_numbers)}"
    given = {"seed": 0, "strategy.name": strategy} | {key.replace("__", "."): value for key, value in params.items()}
    return ComparedRun(
        name=place,
        location=place,
        state="finished",
        strategy=strategy,
        job="digits",
        work="digits",
        workers=workers,
        summary={key: value for key, value in summary.items() if value is not None},
        params=given,
        machine=machine or {},
        curve=lambda: Curve(losses=losses, samples=range(len(losses)), seconds=[2.0 * i for i in range(len(losses))]),
    )


def test_the_keys_of_a_sweep_are_no_label_of_a_run() -> None:
    kept, skipped = run("ddp", 2, sweep__unfit="refuse"), run("ddp", 2, sweep__unfit="skip")
    assert list(Comparison([kept, skipped]).names.values()) == [f"ddp x2, {r.name}" for r in (kept, skipped)]


def efficiencies(*runs: ComparedRun) -> list[float | None]:
    comparison = Comparison(runs)
    found = [comparison.scaling_efficiency(run) for run in runs]
    return [None if e is None else round(e, 3) for e in found]


def test_efficiency_is_relative_to_the_smallest_run_of_the_strategy() -> None:
    assert efficiencies(run("ddp", 2, 200.0), run("ddp", 4, 300.0), run("ddp", 8, 400.0)) == [None, 0.75, 0.5]


def test_efficiency_is_relative_to_single_where_it_is_smaller() -> None:
    assert efficiencies(run("single", 1, 100.0), run("ddp", 2, 150.0), run("ddp", 4, 200.0)) == [None, 0.75, 0.5]
    assert efficiencies(run("single", 1, 100.0), run("ddp", 1, 80.0), run("ddp", 2, 120.0)) == [None, None, 0.75]


def test_efficiency_is_unknown_without_a_smaller_run_of_the_same_work() -> None:
    assert efficiencies(run("ddp", 2, 200.0), run("pipeline", 4, 300.0), run("ddp", 4)) == [None, None, None]


def test_time_to_a_target_loss_is_that_of_the_first_point_that_reaches_it() -> None:
    runs = [run("ddp", 2, losses=(2.0, 0.9, 1.1, 0.5)), run("single", 1, losses=(2.0, 1.5))]
    comparison = Comparison(runs, target_loss=1.0)
    assert [comparison.seconds_to_target(r) for r in runs] == [2.0, None]


def test_repeats_become_their_mean_in_the_place_of_the_first() -> None:
    runs = [
        run("single", 1, 90.0, seed=0, losses=(2.0, 1.0)),
        run("ddp", 2, 200.0),
        run("single", 1, 110.0, seed=1, losses=(4.0, 3.0, 2.0)),
    ]
    comparison = Comparison(runs)
    single, ddp = comparison.grouped.runs
    assert comparison.has_repeats
    assert (single.repeats, single.value("samples_per_s"), single.spread["samples_per_s"]) == (2, 100.0, 10.0)
    assert list(single.curve().losses) == [3.0, 2.0]
    assert ddp is runs[1]


@pytest.mark.parametrize(
    "other",
    [
        run("ddp", 2, 200.0, seed=1, train__steps=7),
        run("ddp", 2, 200.0, seed=1, strategy__bucket_mb=1),
        run("ddp", 2, 200.0, seed=1, machine={"host": "b"}),
    ],
    ids=["a setting", "a setting of the strategy", "the host"],
)
def test_runs_that_differ_in_more_than_the_seed_are_no_repeats(other: ComparedRun) -> None:
    assert not Comparison([run("ddp", 2, 200.0), other]).has_repeats
    without_effect = {"tracking__uri": "x", "cluster__queue": False, "cluster__priority": 3, "cluster__user_share": 0.5}
    assert Comparison([run("ddp", 2, 200.0), run("ddp", 2, 200.0, seed=1, **without_effect)]).has_repeats


def test_a_difference_is_within_the_noise_if_the_repeats_overlap() -> None:
    single = [run("single", 1, 100.0), run("single", 1, 110.0, seed=1)]
    near = [run("ddp", 2, 108.0), run("ddp", 2, 120.0, seed=1)]
    far = [run("ddp", 2, 150.0), run("ddp", 2, 160.0, seed=1)]
    assert "within the noise: ddp x2 and single x1" in noise(Comparison([*single, *near]))
    assert noise(Comparison([*single, *far])) == [
        "noise: the repeats of a configuration differ by up to ±4.8% in speed"
    ]


def test_a_run_without_repeats_gets_the_widest_noise_of_the_others() -> None:
    single = [run("single", 1, 90.0), run("single", 1, 110.0, seed=1)]
    assert "within the noise: ddp x2 and single x1" in noise(Comparison([*single, run("ddp", 2, 118.0)]))
    assert len(noise(Comparison([*single, run("ddp", 2, 130.0)]))) == 1


def test_without_repeats_only_close_speeds_are_doubted() -> None:
    assert noise(Comparison([run("single", 1, 100.0), run("ddp", 2, 150.0)])) == []
    (line,) = noise(Comparison([run("single", 1, 100.0), run("ddp", 2, 103.0)]))
    assert line == "too close to tell from one run each: ddp x2; repeat with -m seed=0,1,2"


def test_settings_that_differ_beside_the_strategy_are_listed() -> None:
    runs = [
        run("single", 1, train__global_batch_size=64, cluster__node_timeout_s=3, machine={"host": "a"}),
        run("ddp", 2, train__global_batch_size=128, cluster__node_timeout_s=4, machine={"host": "b"}, seed=1),
    ]
    assert differences(runs) == [
        "digits runs differ in more than the strategy: seed (0, 1), train.global_batch_size (64, 128), host (a, b)"
    ]


def test_another_machine_or_commit_is_a_difference_wherever_the_runs_are_read_from() -> None:
    tags = {"host": "a", "processor": "Xeon", "cores": "8", "version.torch": "2.13.0", "generation": "1"}
    local: dict[str, Any] = {"tags": tags, "source": {"source.git.commit": "0123456789abcdef"}}
    tracked: dict[str, Any] = {"tags": {**tags, "cores": "2", "mlflow.source.git.commit": "123456789abcdef0"}}
    read = [run_of(record, name=name, location=name, curve=no_curve) for name, record in
            (("one", local), ("other", tracked))]  # fmt: skip
    assert read[0].machine == {
        "host": "a", "processor": "Xeon", "cores": "8", "version.torch": "2.13.0", "commit": "012345678"
    }  # fmt: skip
    assert differences(read) == ["- runs differ in more than the strategy: cores (8, 2), commit (012345678, 123456789)"]


def no_curve() -> Curve:
    return Curve()


def test_a_row_names_the_settings_that_distinguish_it() -> None:
    pipelines = [run("pipeline", 2, strategy__num_microbatches=m, name=f"m{m}", tracking__uri="x" * m) for m in (2, 4)]
    seeds = [run("ddp", 2, seed=seed, job__lr=0.1 * (seed + 1)) for seed in (0, 1)]
    assert settings([*pipelines, *seeds, run("ddp", 4), run("single", 1)]) == [
        "num_microbatches=2",
        "num_microbatches=4",
        "seed=0, lr=0.1",
        "seed=1, lr=0.2",
        "",
        "",
    ]


def test_seeds_are_no_difference_if_every_configuration_has_the_same() -> None:
    runs = [run(strategy, 2, seed=seed) for strategy in ("ddp", "hogwild") for seed in (0, 1)]
    assert differences(runs) == []
    assert differences(runs[1:]) == ["digits runs differ in more than the strategy: seed (1, 0)"]


def test_labels_name_every_setting_that_tells_runs_apart() -> None:
    grid = [run("ddp", 2, job__lr=lr, job__hidden=hidden) for lr in (0.1, 0.2) for hidden in (8, 16)]
    assert list(Comparison(grid).names.values()) == [
        "ddp x2, lr=0.1, hidden=8",
        "ddp x2, lr=0.1, hidden=16",
        "ddp x2, lr=0.2, hidden=8",
        "ddp x2, lr=0.2, hidden=16",
    ]
    without_effect = [dataclasses.replace(run("ddp", 2), settings=f"priority={n}") for n in (1, 2)]
    assert list(Comparison(without_effect).names.values()) == ["ddp x2, priority=1", "ddp x2, priority=2"]
    again = dataclasses.replace(run("ddp", 2, job__lr=0.1, job__hidden=8), name="03-30-55-digits-ddp")
    labels = list(Comparison([*grid[:2], again]).names.values())
    assert labels[2] == "ddp x2, hidden=8, 03:30:55"


@pytest.mark.parametrize(
    ("direction", "best"), [("minimize", "lr=0.1 with 0.3000"), ("maximize", "lr=0.2 with 0.4000")]
)
def test_a_verdict_on_settings_of_the_job_is_one_sentence_with_the_best_metric(direction: str, best: str) -> None:
    def of(lr: float, rate: float, val_loss: float) -> ComparedRun:
        found = run("single", 1, rate, final_loss=lr, job__lr=lr, sweep__metric="val_loss", sweep__direction=direction)
        return dataclasses.replace(found, work=f"lr={lr}", summary={**found.summary, "val_loss": val_loss})

    runs = [of(0.1, 100.0, 0.3), of(0.2, 90.0, 0.4)]
    fastest = "fastest: single x1, lr=0.1 with 100 samples/s"
    assert verdict(Comparison(runs)) == [f"{fastest}; best val_loss: single x1, {best}"]
    assert verdict(Comparison([*runs, dataclasses.replace(of(0.3, 900.0, 0.1), state="pruned")])) == verdict(
        Comparison(runs)
    )


@pytest.mark.parametrize(
    ("losses", "end"),
    [((0.5, 0.50001), "all reach the same loss, 0.5000"), ((0.5, 0.4), "lowest loss: ddp x2 with 0.4000")],
)
def test_verdict_names_the_fastest_run_and_the_losses(losses: tuple[float, float], end: str) -> None:
    runs = [run("single", 1, 100.0, final_loss=losses[0]), run("ddp", 2, 170.0, final_loss=losses[1])]
    start = "fastest: ddp x2 with 170 samples/s, 1.70x single x1 (85% scaling efficiency)"
    assert verdict(Comparison(runs)) == [f"{start}; {end}"]
    assert verdict(Comparison([run("ddp", 2)])) == []
    failed = dataclasses.replace(run("hogwild", 16, 900.0), state="failed")
    assert verdict(Comparison([*runs, failed])) == verdict(Comparison(runs))


def test_verdict_names_runs_that_are_as_fast_within_the_noise() -> None:
    repeats = [run("ddp", 2, 150.0), run("ddp", 2, 170.0, seed=1)]
    (sentence,) = verdict(Comparison([*repeats, run("hogwild", 2, 150.0), run("single", 1, 100.0)]))
    assert sentence.endswith("(80% scaling efficiency); within the noise of it: hogwild x2")


def test_no_winner_is_named_without_a_warning_if_a_machine_was_shared(golden: Golden) -> None:
    def compared(*, idle_cpu_pct: float) -> list[str]:
        single, ddp = run("single", 1, 100.0), run("ddp", 2, 170.0)
        others = {"others_cpu_pct": 32.0, "idle_cpu_pct": idle_cpu_pct}
        return verdict(Comparison([dataclasses.replace(single, summary={**single.summary, **others}), ddp]))

    fastest, warning = compared(idle_cpu_pct=3.0)
    assert "ddp x2 with 170 samples/s" in fastest
    assert "single x1 (32% of the CPUs)" in warning
    golden.says([fastest, warning])
    (fastest,) = compared(idle_cpu_pct=60.0)
    assert fastest.startswith("fastest: ddp x2")


def test_more_than_perfect_scaling_is_never_named_without_a_warning() -> None:
    runs = [run("single", 1, 100.0), run("ddp", 2, 710.0)]
    fastest, warning = verdict(Comparison(runs))
    assert fastest.startswith("fastest, if the speeds are right: ddp x2")
    assert "more than 100% scaling efficiency: ddp x2 (355%)" in warning
    assert len(verdict(Comparison([run("single", 1, 100.0), run("ddp", 2, 200.0)]))) == 1


def result(loss: float, f1: float | None = None, *, state: str = "finished", **params: Any) -> ComparedRun:
    made = run("single", 1, 100.0, final_loss=loss, sweep__metric="val_loss", job__lr=loss, **params)
    summary = {**made.summary, "val_loss": loss, **({} if f1 is None else {"best_val_f1": f1})}
    return dataclasses.replace(made, state=state, summary=summary)


BY_F1 = {"checkpoint__best": "val/f1", "checkpoint__best_direction": "maximize"}


@pytest.mark.parametrize(
    ("runs", "rows"),
    [
        ([result(3.0), result(1.0), result(2.0)], [1, 2, 0]),
        ([result(3.0), result(1.0, state="failed"), result(2.0)], [2, 0, 1]),
        ([result(1.0, 0.5, **BY_F1), result(2.0, 0.9, **BY_F1)], [1, 0]),
        ([result(2.0, 0.5, **BY_F1), result(1.0, **BY_F1)], [1, 0]),
        ([result(1.0, 0.5, sweep__trials=2, **BY_F1), result(2.0, 0.9, sweep__trials=2, **BY_F1)], [0, 1]),
        ([result(1.0, sweep__direction="maximize"), result(2.0, sweep__direction="maximize")], [1, 0]),
        ([result(1.0002), result(1.0), result(1.0001)], [0, 1, 2]),
        ([result(2.0), dataclasses.replace(result(1.0), job="gpt")], [0, 1]),
        ([result(2.0)], [0]),
        ([], []),
    ],
)
def test_the_rows_of_a_sweep_begin_with_the_best_by_its_own_metric(runs: list[ComparedRun], rows: list[int]) -> None:
    best_first, as_given = (Comparison(runs, best_first=flag) for flag in (True, False))
    assert best_first.rows == rows
    assert best_first.grouped.rows == rows
    assert as_given.rows == sorted(rows)
    names, *_ = columns(best_first, unicode=True)
    assert names.cells == [runs[row].name for row in rows]
    assert ("best val/f1" in [c.heading for c in columns(as_given, unicode=True)]) == (
        len(runs) > 1 and all("best_val_f1" in r.summary and "sweep.trials" not in r.params for r in runs)
    )


def test_a_declared_metric_has_a_column_if_a_run_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    summaries = (Summary(key="staleness_p50", derive="median", column=Column(heading="staleness")),)
    spec = MetricSpec(name="async/staleness", reduce="max", format="{:.1f}", summaries=summaries)
    runs = {name: RunDir(tmp_path / name) for name in ("12-30-01-old", "12-31-01-new")}
    for run in runs.values():
        run.path.mkdir()
        run.update_record(strategy="hogwild", job="digits", summary={"final_loss": 0.5})
    before = table(Comparison([read_run(run.path) for run in runs.values()]))
    assert "staleness" not in before
    runs["12-31-01-new"].update_record(summary={"final_loss": 0.5, "staleness_p50": 4.25}, metrics=[to_record(spec)])
    text = table(Comparison([read_run(run.path) for run in runs.values()]))
    headings = text.splitlines()[0].split()
    assert headings == [*before.splitlines()[0].split()[:-3], "staleness", *before.splitlines()[0].split()[-3:]]
    (new,) = (line.split() for line in text.splitlines() if line.startswith("12-31-01-new"))
    assert "4.2" in new
