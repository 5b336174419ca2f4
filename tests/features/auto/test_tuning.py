"""The choice among contenders, and the correction of predictions by measured times, without workers."""

import dataclasses

import pytest

from helpers.files.golden import Golden
from orchestrator.features.auto.choice import (
    SHOWN,
    Contender,
    best,
    columns,
    markdown,
    next_to_measure,
    reason,
    verdict,
    worker_counts,
)
from orchestrator.features.plan.prediction.correction import correction
from orchestrator.features.plan.prediction.cost import StepTime
from orchestrator.planning.memory import GIB

NOTHING = StepTime(**{field.name: 0.0 for field in dataclasses.fields(StepTime)})


def step(**parts: float) -> StepTime:
    return dataclasses.replace(NOTHING, **parts)


def test_the_numbers_of_workers_are_powers_of_two_and_all() -> None:
    assert [worker_counts(n) for n in (1, 2, 6)] == [(1,), (1, 2), (1, 2, 4, 6)]


def test_measured_steps_tell_computation_from_communication() -> None:
    """A device half as fast, and links a third as fast, as predicted."""
    alone, replicas, shards = (
        step(products=0.04, update=0.01),
        step(products=0.02, replicate=0.03),
        step(moved=0.02, shard=0.05),
    )
    found = correction([(alone, 0.1), (replicas, 0.13)])
    assert found.seconds(shards) == pytest.approx(0.19, rel=0.1)
    assert correction([]).seconds(shards) == pytest.approx(0.07)


def test_what_a_step_has_little_of_is_hardly_corrected() -> None:
    found = correction([(step(products=0.04), 0.02)])
    assert found.exchanging == 1.0
    assert found.seconds(step(products=1.0)) == pytest.approx(0.5, rel=0.1)


def test_the_two_best_predictions_are_measured_and_the_measurement_decides() -> None:
    contenders = [
        Contender(overrides=("strategy=single",), predicted_ms=50),
        Contender(overrides=("strategy=ddp",), predicted_ms=20),
        Contender(overrides=("strategy=dp",), predicted_ms=10, refused="too large"),
        Contender(overrides=("strategy=pipeline",), predicted_ms=25, memory_bytes=1.5 * GIB),
    ]
    measured = []
    for step_ms in (32.0, 22.0):
        index = next_to_measure(contenders, 2)
        assert index is not None
        measured.append(index)
        contenders[index] = dataclasses.replace(contenders[index], measured_ms=step_ms)
    assert measured == [1, 3]
    assert next_to_measure(contenders, 2) is None
    winner = best(contenders)
    assert winner is contenders[3]
    assert verdict(contenders) == (
        "auto chooses strategy=pipeline: 22 ms per step (measured), 1.45 times as fast as ddp"
    )
    assert columns(contenders)[0] == ("strategy", "pipeline", "ddp", "single")
    assert markdown(contenders).splitlines() == [
        "| strategy | predicted ms | memory GiB | measured ms | error |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| pipeline | 25 | 1.5 | 22 | +14% |",
        "| ddp | 20 |  | 32 | -38% |",
        "| single | 50 |  |  |  |",
        "",
        "- dp: refused: too large",
        "",
        verdict(contenders),
    ]


def test_slow_ones_of_many_are_only_counted() -> None:
    contenders = [Contender(overrides=("strategy=mesh", f"strategy.shard={n}"), predicted_ms=n) for n in range(1, 21)]
    assert columns(contenders)[0][-1] == f"mesh shard={SHOWN}"
    assert f"and {20 - SHOWN} more, which are predicted to be slower" in markdown(contenders)
    refused = [dataclasses.replace(c, refused="too large") for c in contenders]
    assert markdown([contenders[0], *refused]).count("too large") == SHOWN
    assert f"- and {20 - SHOWN} more are refused" in markdown([contenders[0], *refused])


def test_a_report_has_no_empty_columns_and_explains_none() -> None:
    predicted, unknown = ([Contender(overrides=("strategy=single",), predicted_ms=p)] for p in (30, None))
    assert [head for head, *_ in columns(predicted)] == ["strategy", "predicted ms"]
    assert columns(unknown) == [("strategy", "single")]
    assert markdown(unknown).splitlines()[:3] == ["| strategy |", "| --- |", "| single |"]


def test_more_are_measured_while_one_may_be_faster_than_the_best_measurement() -> None:
    times = {"single": (38, 53), "dp": (39, 63), "model_parallel": (44, 46), "pipeline": (48, 40)}
    contenders = [Contender(overrides=(f"strategy={n}",), predicted_ms=p) for n, (p, _) in times.items()]
    measured = []
    while (index := next_to_measure(contenders, 2)) is not None:
        name = contenders[index].name
        measured.append(name)
        contenders[index] = dataclasses.replace(contenders[index], measured_ms=float(times[name][1]))
    assert measured == ["single", "dp", "model_parallel"], "the pipeline is predicted to be slower than 46 ms"
    assert best(contenders) is contenders[2]


def test_workers_that_gain_less_than_the_noise_are_not_taken() -> None:
    contenders = [
        Contender(overrides=("strategy=single",), world_size=1, predicted_ms=90),
        Contender(overrides=("strategy=pipeline",), world_size=2, predicted_ms=88, measured_ms=87.0),
        Contender(overrides=("strategy=dp",), world_size=2, predicted_ms=89, measured_ms=94.0),
    ]
    assert next_to_measure(contenders, 2) == 0, "predicted to be slower, but not by as much as a worker is worth"
    slower, close = (dataclasses.replace(contenders[0], measured_ms=step_ms) for step_ms in (92.0, 90.0))
    assert best([slower, *contenders[1:]]) is contenders[1]
    assert best([close, *contenders[1:]]) is close
    assert reason([close, *contenders[1:]]) == "90 ms per step (measured); the other worker of pipeline gains 3%"
    more = dataclasses.replace(contenders[1], world_size=4)
    assert reason([close, more]).endswith("; 3 more workers of pipeline gain 3%")


@pytest.mark.parametrize(("predicted_ms", "index"), [(150, 0), (180, None)])
def test_one_worker_alone_is_measured_unless_it_is_far_slower(predicted_ms: float, index: int | None) -> None:
    others = [
        Contender(overrides=(f"strategy={name}",), world_size=2, predicted_ms=88, measured_ms=87.0)
        for name in ("ddp", "pipeline")
    ]
    alone = Contender(overrides=("strategy=single",), world_size=1, predicted_ms=predicted_ms)
    assert next_to_measure([alone, *others], 2) == index


def test_nothing_is_measured_if_the_prediction_is_trusted() -> None:
    assert next_to_measure([Contender(overrides=("strategy=single",), predicted_ms=1)], 0) is None
    assert next_to_measure([Contender(overrides=("strategy=single",))], 0) is None


def test_without_predictions_all_are_measured() -> None:
    contenders = [Contender(overrides=(f"strategy={name}",)) for name in ("single", "ddp", "dp")]
    for _ in contenders:
        index = next_to_measure(contenders, 2)
        assert index is not None
        contenders[index] = dataclasses.replace(contenders[index], measured_ms=1.0 + index)
    assert next_to_measure(contenders, 2) is None
    assert best(contenders) is contenders[0]


def test_one_without_a_prediction_is_measured_only_if_too_few_others_can_be() -> None:
    known = Contender(overrides=("strategy=single",), predicted_ms=1, measured_ms=1.0)
    contenders = [Contender(overrides=("strategy=dp",)), known]
    assert (next_to_measure(contenders, 1), next_to_measure(contenders, 2)) == (None, 0)


def test_if_a_measured_contender_fails_the_next_one_is_measured() -> None:
    contenders = [
        Contender(overrides=("strategy=ddp",), predicted_ms=1, refused="it failed"),
        Contender(overrides=("strategy=dp",), predicted_ms=2, measured_ms=2.0),
        Contender(overrides=("strategy=single",), predicted_ms=3),
    ]
    assert next_to_measure(contenders, 2) == 2


def test_no_contender_is_the_best_of_none(golden: Golden) -> None:
    assert best([Contender(overrides=("strategy=single",), refused="no")]) is None
    only = [Contender(overrides=("strategy=single",), predicted_ms=1)]
    golden.says(reason(only))


def test_a_choice_without_any_time_does_not_claim_one(golden: Golden) -> None:
    unknown = [Contender(overrides=(f"strategy={name}",)) for name in ("single", "ddp")]
    golden.says(reason(unknown))
