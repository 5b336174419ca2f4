"""The choice of a strategy: profiles, predictions and the comparison of contenders, without workers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import pytest

from helpers.files.golden import Golden
from helpers.records.job_profile import LAYER, PASSES, PROFILE
from orchestrator.planning.memory import MemoryLimit, WorkerMemory
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan, WorkerPlan
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.prediction.cost import Step
from orchestrator.prediction.work import ModelWork, Work
from orchestrator.timeline import Action
from orchestrator.tuning.choice import (
    Contender,
    StrategyName,
    best,
    columns,
    markdown,
    next_to_measure,
    proposals,
    reason,
    stage_counts,
    verdict,
    worker_counts,
)
from orchestrator.tuning.predict import (
    DividedSamples,
    Prediction,
    memory_error,
    predict,
    step_in_parts_ms,
    step_of_replicas_ms,
)
from orchestrator.tuning.profile import (
    Affine,
    StageDivision,
    fit,
    interpolate,
)


def plan(
    strategy: str, mesh: Mesh, *, pipeline: PipelineLayout | None = None, batch: int = 64, devices: int = 1
) -> Plan:
    share = batch // mesh.data_parallel_size
    return Plan(
        run_name="test",
        strategy=strategy,
        job="job",
        steps=10,
        global_batch_size=batch,
        grad_accumulation=1,
        mesh=mesh,
        device="cpu",
        cpus_per_worker=1,
        gpus_per_worker=0,
        devices_per_worker=1,
        one_node=False,
        threads_per_worker=1,
        loader_processes=0,
        spares=0,
        workers=tuple(
            WorkerPlan(global_rank=r, dp_rank=mesh.dp_rank(r), pp_rank=mesh.coords(r).pipeline, samples_per_step=share)
            for r in range(mesh.world_size)
        ),
        pipeline=pipeline,
    )


def two_stages(microbatches: int) -> PipelineLayout:
    return PipelineLayout(schedule="GPipe", num_stages=2, num_microbatches=microbatches, stage_ranks=(0, 1))


def gpipe(layout: PipelineLayout) -> Sequence[Sequence[Action]]:
    numbers = range(layout.num_microbatches)
    return [[*(("F", s, i) for i in numbers), *(("B", s, i) for i in numbers)] for s in (0, 1)]


# Profiles -----------------------------------------------------------------------------------------


def test_a_fit_of_points_on_a_line_is_that_line() -> None:
    line = fit([(1, 5.0), (2, 7.0), (10, 23.0)])
    assert (line.overhead_ms, line.ms_per_unit) == pytest.approx((3.0, 2.0))
    assert fit([(4, 5.0)]) == Affine(overhead_ms=5.0, ms_per_unit=0.0)


@pytest.mark.parametrize("points", [[(1, 1.0), (2, 4.0)], [(1, 4.0), (2, 1.0)]])
def test_a_fit_has_no_negative_part(points: list[tuple[float, float]]) -> None:
    line = fit(points)
    assert line.overhead_ms >= 0
    assert line.ms_per_unit >= 0


def test_interpolation_goes_on_beyond_the_ends() -> None:
    points = [(2.0, 4.0), (1.0, 2.0), (4.0, 12.0)]
    assert [interpolate(points, x) for x in (1, 1.5, 3, 5, 0.5)] == pytest.approx([2, 3, 8, 16, 1])
    assert interpolate([(3.0, 7.0)], 100) == 7


def test_passes_are_those_of_the_nearest_threads_between_sizes_and_busy_workers() -> None:
    assert PROFILE.pass_ms(16, threads=1, busy=1) == pytest.approx(16)
    assert PROFILE.pass_ms(16, threads=8, busy=2) == pytest.approx(24)
    four = dataclasses.replace(
        PROFILE, passes=(PASSES[0], dataclasses.replace(PASSES[0], busy=3, pass_ms=PASSES[0].pass_ms * 3))
    )
    assert four.pass_ms(8, threads=1, busy=2) == pytest.approx(16)


# Predictions --------------------------------------------------------------------------------------


def test_single_is_a_pass_an_update_and_the_input() -> None:
    prediction = predict(PROFILE, plan("single", Mesh()), gpipe)
    assert prediction == Prediction(
        compute_ms=64 + 3.0, exchange_ms=0.0, idle_ms=0.0, input_ms=0.5 + 6.4, memory_bytes=2000 * 3 + 20 * 64
    )


def test_ddp_computes_its_share_beside_the_others_and_exchanges_gradients() -> None:
    prediction = predict(PROFILE, plan("ddp", Mesh(replicate=2)), gpipe)
    assert prediction.compute_ms == pytest.approx(32 * 1.5 + 3.0)
    assert prediction.exchange_ms == pytest.approx(1.0 + 7.0), "one message, whose overhead ddp_ms has"
    assert prediction.input_ms == pytest.approx(0.5 + 3.2)


def test_on_gpus_gradients_are_exchanged_during_the_backward_pass() -> None:
    profile = dataclasses.replace(PROFILE, device="cuda")
    assert predict(profile, plan("ddp", Mesh(replicate=2)), gpipe).exchange_ms == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mesh", "part", "in_layers_ms"),
    [
        (Mesh(tensor=2), 0.5, 3 * (4 * 2.0 + 7.0 * 4 * 64) + 2 * (2.0 + 7.0 * 64)),
        (Mesh(context=2), 1.0, 3 * 2 * (0.25 + 0.5)),
        (Mesh(tensor=2, shard=2), 0.5, 3 * (4 * 2.0 + 7.0 * 4 * 32) + 2 * (2.0 + 7.0 * 32)),
    ],
)
def test_workers_that_compute_samples_together_exchange_in_each_layer(
    mesh: Mesh, part: float, in_layers_ms: float
) -> None:
    layer = Work(parameters=1, products=1, output_bytes=2**20, summed_bytes=2**20, key_bytes=2**21)
    work = ModelWork(layers=3, layer=layer, ends=Work(parameters=1, products=1), tokens=8)
    rows, gathers = 64 / mesh.data_parallel_size, mesh.shard > 1
    step = Step(mesh=mesh, rows=rows, passes=1, gathers=gathers, divides_ends=mesh.tensor > 1)
    memory = WorkerMemory(parameters=2000 * part / mesh.shard, gradients=10, optimizer=20, activations=30)
    divided = DividedSamples(work=work, step=step, memory=memory)
    found = predict(PROFILE, plan("mesh", mesh), gpipe, divided)
    each = rows / mesh.workers_per_sample
    slowdown = 1 + (mesh.num_workers - 1) / 2
    assert found.compute_ms == pytest.approx(each * slowdown + part * 3.0 / mesh.shard)
    of_parameters = 0.0
    if gathers:  # as of `fsdp`: three groups twice and the last one once, and the sums of all
        of_parameters = 7 * 0.25 + 4 * 0.5 + 0.5
    elif mesh.context > 1:
        of_parameters = 7.0 + 1.0
    assert found.exchange_ms == pytest.approx(in_layers_ms + of_parameters)
    assert found.memory_bytes == memory.total


def test_model_parallel_computes_one_stage_at_a_time() -> None:
    grid = Mesh(pipeline=2)
    prediction = predict(PROFILE, plan("model_parallel", grid, pipeline=two_stages(1)), gpipe)
    assert prediction.compute_ms + prediction.idle_ms == pytest.approx(64 + 1.5), "half of the update on each worker"
    assert prediction.idle_ms == pytest.approx(32)


def test_a_pipeline_is_slower_while_its_workers_compute_at_once() -> None:
    grid = Mesh(pipeline=2)
    alone = dataclasses.replace(PROFILE, passes=tuple(p for p in PASSES if p.busy == 1))
    quick, slow = (predict(p, plan("pipeline", grid, pipeline=two_stages(4)), gpipe) for p in (alone, PROFILE))
    assert quick.compute_ms + quick.idle_ms == pytest.approx(64 * 5 / 8 + 1.5)
    assert 64 * 5 / 8 + 1.5 < slow.compute_ms + slow.idle_ms < 64 * 5 / 8 * 1.5 + 1.5


def test_a_pipeline_pays_for_a_step_once_and_for_its_own_work_at_each_pass() -> None:
    grid = Mesh(pipeline=2)
    alone = dataclasses.replace(
        PROFILE,
        passes=tuple(p for p in PASSES if p.busy == 1),
        base_ms=4.0,
        pipeline=Affine(overhead_ms=0.25, ms_per_unit=0.5),
    )
    step = predict(alone, plan("pipeline", grid, pipeline=two_stages(4)), gpipe)
    passes_in_a_row = 2 * (4 + 1)
    assert step.compute_ms + step.idle_ms == pytest.approx((64 / 4 - 4.0) * 5 / 2 + 0.5 * passes_in_a_row + 1.5)


def test_a_pipeline_with_several_stages_on_a_worker_has_costs_of_its_own() -> None:
    grid = Mesh(pipeline=2)
    layout = dataclasses.replace(two_stages(1), num_stages=4, stage_ranks=(0, 1, 0, 1))
    layers = (StageDivision(num_stages=4, layers=(LAYER,) * 4, refused=""),)
    profile = dataclasses.replace(PROFILE, divisions=layers, parameter_bytes=4000)

    def through(layout: PipelineLayout) -> Sequence[Sequence[Action]]:
        return [[*(("F", s, 0) for s in (r, r + 2)), *(("B", s, 0) for s in (r + 2, r))] for r in (0, 1)]

    step = predict(profile, plan("pipeline", grid, pipeline=layout), through)
    assert step.compute_ms + step.idle_ms == pytest.approx(64 + 8 * 2.0 + 1.5), "one stage after another"
    assert step.input_ms == pytest.approx(0.5 + 0.5 + 6.4)


def test_dp_takes_as_long_as_was_measured_or_computes_at_once_and_copies_the_model() -> None:
    dp = dataclasses.replace(plan("dp", Mesh()), devices_per_worker=2, grad_accumulation=2)
    measured = predict(dataclasses.replace(PROFILE, devices_ms=43.0), dp, gpipe)
    assert (measured.compute_ms, measured.exchange_ms) == pytest.approx((2 * (43.0 - 3.0) + 3.0, 0.0))
    on_gpus = dataclasses.replace(PROFILE, message=Affine(overhead_ms=1.0, ms_per_unit=0.0))
    predicted = predict(on_gpus, dp, gpipe)
    assert (predicted.compute_ms, predicted.exchange_ms) == pytest.approx((2 * 16 * 1.5 + 3.0, 2 * 2 * 1.0))


@pytest.mark.parametrize(
    ("strategy", "mesh", "casts"),
    [
        ("single", Mesh(), 1),
        ("ddp", Mesh(replicate=2), 1),
        ("fsdp", Mesh(shard=2), 0),
        ("pipeline", Mesh(pipeline=2), 4 / 2),
        ("fsdp_pipeline", Mesh(pipeline=2, shard=2), 0),
    ],
)
def test_casts_of_parameters_do_not_grow_with_the_batch(strategy: str, mesh: Mesh, casts: float) -> None:
    """Each micro-batch in flight has those of its stage. Parts are gathered in the type of the passes."""
    stages = two_stages(4) if mesh.pipeline > 1 else None
    layer = dataclasses.replace(LAYER, cast_bytes=2**21)
    divided = (dataclasses.replace(PROFILE.divisions[0], layers=(layer, layer)),)
    before, after = (
        predict(profile, plan(strategy, mesh, pipeline=stages), gpipe).memory_bytes
        for profile in (PROFILE, dataclasses.replace(PROFILE, divisions=divided))
    )
    assert after - before == casts * 2 * 2**21


def test_a_pipeline_holds_the_activations_of_all_its_microbatches_with_gpipe() -> None:
    grid = Mesh(pipeline=2)
    prediction = predict(PROFILE, plan("pipeline", grid, pipeline=two_stages(4)), gpipe)
    assert prediction.memory_bytes == pytest.approx(1000 * 3 + 4 * 10 * 16)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_parameter_server_receives_the_gradients_of_all_workers(servers: int) -> None:
    """Two workers compute at once; servers divide the gradients and the update among them."""
    prediction = predict(PROFILE, plan("parameter_server", Mesh(replicate=2, num_servers=servers)), gpipe)
    assert prediction.compute_ms == pytest.approx(32 * 1.5 + 3.0 / servers)
    assert prediction.exchange_ms == pytest.approx(4.0 + 5.0 * 2 / servers)
    assert prediction.input_ms == pytest.approx(0.5 + 3.2)
    worker_bytes = 2000 + 2000 + 2**20 + 20 * 32
    server_bytes = 2000 * 3 + 2 * 2**20
    assert prediction.memory_bytes == (server_bytes if servers == 1 else worker_bytes)


def test_a_model_that_is_too_large_for_a_worker_is_predicted_from_its_layers() -> None:
    large = dataclasses.replace(PROFILE, passes=())
    assert predict(large, plan("single", Mesh()), gpipe).compute_ms == pytest.approx(2 * 3.0 * 64 / 8)


def test_memory_is_shared_by_the_workers_of_a_node_on_a_cpu() -> None:
    replicas = plan("ddp", Mesh(replicate=2))
    prediction = predict(PROFILE, replicas, gpipe)
    assert memory_error(PROFILE, replicas, prediction, num_nodes=2) is None
    assert "2 workers of a node" in (memory_error(PROFILE, replicas, prediction, num_nodes=1) or "")


def test_fsdp_gathers_blocks_for_both_passes_the_rest_once_and_keeps_parts() -> None:
    mesh = Mesh(shard=2)
    prediction = predict(PROFILE, plan("fsdp", mesh), gpipe)
    assert prediction.compute_ms == pytest.approx(32 * 1.5 + 3.0 / 2), "each worker updates its shard"
    assert prediction.exchange_ms == pytest.approx((3 + 4) * 0.25 + 4 * 0.5 + 0.5)
    gathered = 2 * 600 + 200 + 600
    assert prediction.memory_bytes == pytest.approx(2000 * 3 / 2 + gathered + 20 * 32)
    sliced = dataclasses.replace(plan("fsdp", mesh), grad_accumulation=4)
    assert predict(PROFILE, sliced, gpipe).exchange_ms == pytest.approx(4 * prediction.exchange_ms)
    on_gpus = dataclasses.replace(PROFILE, device="cuda", parts_ms=0.0)
    assert predict(on_gpus, plan("fsdp", mesh), gpipe).exchange_ms == 0.0, "gathered while blocks compute"


@pytest.mark.parametrize(
    ("strategy", "mesh", "known", "rest"),
    [
        ("ddp", Mesh(replicate=2), step_of_replicas_ms, "ddp_ms"),
        ("fsdp", Mesh(shard=2), step_in_parts_ms, "parts_ms"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_layout_that_was_measured_is_predicted_as_measured(
    strategy: str, mesh: Mesh, known: Callable[..., float], rest: str, device: Literal["cpu", "cuda"]
) -> None:
    measured_ms = 90.0
    profile = dataclasses.replace(PROFILE, device=device)
    profile = dataclasses.replace(profile, **{rest: measured_ms - known(profile, 2, rows=32, threads=1)})
    prediction = predict(profile, plan(strategy, mesh), gpipe)
    assert prediction.step_ms - prediction.input_ms == pytest.approx(measured_ms)


def test_hsdp_sums_the_gradients_of_a_part_over_its_replicas() -> None:
    parts = predict(PROFILE, plan("fsdp", Mesh(shard=2)), gpipe)
    replicas = predict(PROFILE, plan("hsdp", Mesh(replicate=2, shard=2)), gpipe)
    assert replicas.exchange_ms == pytest.approx(parts.exchange_ms + 2.0 + 7.0 / 2)
    assert replicas.memory_bytes == pytest.approx(parts.memory_bytes - 20 * 16), "of half as many samples"


def test_stages_in_parts_are_gathered_once_in_a_step_and_stay_whole_during_it() -> None:
    prediction = predict(PROFILE, plan("fsdp_pipeline", Mesh(pipeline=2, shard=2), pipeline=two_stages(4)), gpipe)
    assert prediction.exchange_ms == pytest.approx((4 * 0.25 + 4 * 0.5 + 0.5) / 2), "half of the model is in a stage"
    assert prediction.memory_bytes == pytest.approx(1000 * (2 + 2 / 2) + 4 * 10 * 8)


def test_there_is_no_more_memory_than_the_plan_knows_of() -> None:
    """A container may have less than its machine has free."""
    free = dataclasses.replace(PROFILE, free_bytes=10**9)
    known = dataclasses.replace(
        plan("single", Mesh()), memory=MemoryLimit(largest_bytes=13_000.0, total_bytes=13_000.0)
    )
    needed = predict(free, known, gpipe)
    assert memory_error(free, known, needed, num_nodes=1) is None
    assert memory_error(free, known, needed, num_nodes=2) is not None, "a worker is on one of the two nodes"


# Proposals and the choice -------------------------------------------------------------------------


def test_the_model_is_divided_for_every_number_of_stages_that_is_proposed() -> None:
    assert stage_counts(1, ["1F1B"]) == ()
    assert stage_counts(2, ["1F1B", "Interleaved1F1B"]) == (2, 4)
    assert stage_counts(6, ["Interleaved1F1B"]) == (2, 4, 6, 8, 12)


def test_proposals_are_every_grid_of_every_strategy() -> None:
    assert worker_counts(1) == (1,)
    assert worker_counts(6) == (1, 2, 4, 6)
    found = [" ".join(p) for p in proposals(4, ["single", "ddp", "dp", "ddp_pipeline"], ["1F1B"])]
    assert found[:4] == [
        "strategy=single",
        "strategy=ddp strategy.num_workers=2",
        "strategy=ddp strategy.num_workers=4",
        "strategy=dp strategy.num_workers=4",
    ]
    assert len(found) == 4 + 3
    assert all("strategy.num_workers=4 strategy.pipeline_parallel_size=2" in p for p in found[4:])
    every_strategy = get_args(StrategyName)
    assert list(proposals(1, every_strategy, ["1F1B"])) == [("strategy=single",)]


def test_parts_are_proposed_on_every_number_of_workers_and_every_grid() -> None:
    found = [" ".join(p) for p in proposals(4, ["fsdp", "hsdp", "fsdp_pipeline"], ["1F1B"])]
    assert found[:4] == [
        "strategy=fsdp strategy.num_workers=2",
        "strategy=fsdp strategy.num_workers=4",
        "strategy=hsdp strategy.num_workers=4 strategy.shard_size=2",
        "strategy=fsdp_pipeline strategy.num_workers=4 strategy.pipeline_parallel_size=2 strategy.schedule=1F1B "
        "strategy.num_microbatches=2",
    ]
    assert len(found) == 3 + 3


def test_workers_that_compute_samples_together_have_others_with_replicas_or_shards() -> None:
    sizes = [[word.removeprefix("strategy.") for word in p[2:]] for p in proposals(4, ["mesh"], [])]
    of_two, of_four = (["tensor=2"], ["context=2"]), (["tensor=2"], ["tensor=2", "shard=2"], ["tensor=4"])
    assert sizes == [*of_two, *of_four, *([word.replace("tensor", "context") for word in p] for p in of_four)]


def test_a_parameter_server_has_one_shard_for_two_workers_at_most() -> None:
    sizes = [[word.partition("=")[2] for word in p[1:]] for p in proposals(6, ["parameter_server"], [])]
    assert sizes == [["2", "1"], ["4", "1"], ["4", "2"], ["6", "1"], ["6", "2"], ["6", "3"]]


def prediction(step_ms: float) -> Prediction:
    return Prediction(compute_ms=step_ms, exchange_ms=0.0, idle_ms=0.0, input_ms=0.0, memory_bytes=0.0)


def test_the_two_best_predictions_are_measured_and_the_measurement_decides() -> None:
    contenders = [
        Contender(overrides=("strategy=single",), prediction=prediction(30)),
        Contender(overrides=("strategy=ddp",), prediction=prediction(20)),
        Contender(overrides=("strategy=dp",), prediction=prediction(10), refused="too large"),
        Contender(overrides=("strategy=pipeline",), prediction=prediction(25)),
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
    choice = (
        "auto chooses strategy=pipeline: 22 ms per step (measured), 1.45 times as fast as ddp, which spends 100% of a "
    )
    assert verdict(contenders) == f"{choice}step on compute"
    assert columns(contenders)[0] == ("strategy", "pipeline", "ddp", "single")
    assert markdown(contenders).splitlines()[2:] == [
        "| strategy | predicted ms | compute | exchange | idle | input | memory MB | measured ms | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| pipeline | 25 | 25 | 0 | 0 | 0 | 0 | 22 | +14% |",
        "| ddp | 20 | 20 | 0 | 0 | 0 | 0 | 32 | -38% |",
        "| single | 30 | 30 | 0 | 0 | 0 | 0 |  |  |",
        "",
        "- dp: refused: too large",
        "",
        verdict(contenders),
    ]


def test_a_report_says_how_far_earlier_predictions_were_off() -> None:
    past = (-0.1, 0.3, -0.2)
    contenders = [
        Contender(overrides=("strategy=single",), prediction=prediction(30)),
        Contender(overrides=("strategy=ddp",), prediction=prediction(40), past_errors=past),
    ]
    assert columns(contenders)[-1] == ("past error", "", "-10% (3)")
    assert "past error: the median of earlier predictions" in markdown(contenders)


def test_a_report_has_no_empty_columns_and_explains_none() -> None:
    predicted, unknown = ([Contender(overrides=("strategy=single",), prediction=p)] for p in (prediction(30), None))
    assert [head for head, *_ in columns(predicted)][-1] == "memory MB"
    assert columns(unknown) == [("strategy", "single")]
    assert markdown(unknown).splitlines()[:3] == ["| strategy |", "| --- |", "| single |"]


def test_more_are_measured_while_one_may_be_faster_than_the_best_measurement() -> None:
    times = {"single": (38, 53), "dp": (39, 63), "model_parallel": (44, 46), "pipeline": (48, 40)}
    contenders = [Contender(overrides=(f"strategy={n}",), prediction=prediction(p)) for n, (p, _) in times.items()]
    measured = []
    while (index := next_to_measure(contenders, 2)) is not None:
        name = contenders[index].name
        measured.append(name)
        contenders[index] = dataclasses.replace(contenders[index], measured_ms=float(times[name][1]))
    assert measured == ["single", "dp", "model_parallel"], "the pipeline is predicted to be slower than 46 ms"
    assert best(contenders) is contenders[2]


def test_workers_that_gain_less_than_the_noise_are_not_taken() -> None:
    contenders = [
        Contender(overrides=("strategy=single",), world_size=1, prediction=prediction(90)),
        Contender(overrides=("strategy=pipeline",), world_size=2, prediction=prediction(88), measured_ms=87.0),
        Contender(overrides=("strategy=dp",), world_size=2, prediction=prediction(89), measured_ms=94.0),
    ]
    assert next_to_measure(contenders, 2) == 0, "predicted to be slower, but not by as much as a worker is worth"
    slower, close = (dataclasses.replace(contenders[0], measured_ms=step_ms) for step_ms in (92.0, 90.0))
    assert best([slower, *contenders[1:]]) is contenders[1]
    assert best([close, *contenders[1:]]) is close
    assert reason([close, *contenders[1:]]) == "90 ms per step (measured); the other worker of pipeline gains 3%"
    more = dataclasses.replace(contenders[1], world_size=4)
    assert reason([close, more]).endswith("; 3 more workers of pipeline gain 3%")
    far = dataclasses.replace(contenders[0], prediction=prediction(92))
    assert next_to_measure([far, *contenders[1:]], 2) is None


def test_nothing_is_measured_if_the_prediction_is_trusted() -> None:
    assert next_to_measure([Contender(overrides=("strategy=single",), prediction=prediction(1))], 0) is None
    assert next_to_measure([Contender(overrides=("strategy=single",))], 0) is None


def test_without_predictions_all_are_measured() -> None:
    contenders = [Contender(overrides=(f"strategy={name}",)) for name in ("single", "ddp", "dp")]
    for _ in contenders:
        index = next_to_measure(contenders, 2)
        assert index is not None
        contenders[index] = dataclasses.replace(contenders[index], measured_ms=1.0 + index)
    assert next_to_measure(contenders, 2) is None
    assert best(contenders) is contenders[0]


def test_if_a_measured_contender_fails_the_next_one_is_measured() -> None:
    contenders = [
        Contender(overrides=("strategy=ddp",), prediction=prediction(1), refused="it failed"),
        Contender(overrides=("strategy=dp",), prediction=prediction(2), measured_ms=2.0),
        Contender(overrides=("strategy=single",), prediction=prediction(3)),
    ]
    assert next_to_measure(contenders, 2) == 2


def test_no_contender_is_the_best_of_none(golden: Golden) -> None:
    assert best([Contender(overrides=("strategy=single",), refused="no")]) is None
    only = [Contender(overrides=("strategy=single",), prediction=prediction(1))]
    golden.says(reason(only))


def test_a_choice_without_any_time_does_not_claim_one(golden: Golden) -> None:
    unknown = [Contender(overrides=(f"strategy={name}",)) for name in ("single", "ddp")]
    golden.says(reason(unknown))
