"""The layouts that `orchestrator plan` finds for a job, and what it predicts of them."""

from __future__ import annotations

import dataclasses

import pytest

from jobs.gpt import GPT
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.display.forecasts import as_json, text
from orchestrator.driver.layouts import answer
from orchestrator.model.kept import kept_tensors
from orchestrator.planning.memory import Division, worker_memory
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Node, make_plan
from orchestrator.prediction.devices import parse_cluster, read_tables
from orchestrator.prediction.forecast import Answer
from orchestrator.prediction.work import Transformer
from orchestrator.strategies import registry
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.memory_plan import kept_by_rows, parameter_sizes
from orchestrator.strategies.model_work import traced
from orchestrator.strategies.transforms.tensor import tensor_errors, tensor_outline

pytestmark = pytest.mark.slow

TABLES = read_tables()
SMALL = ("job=gpt", "job.variant=llama", "job.context=64", "train.global_batch_size=64")


def answered(*words: str, cluster: str = "2x4xH100", **asked: float) -> Answer:
    return answer([*SMALL, *words], parse_cluster(cluster, TABLES), Redactor(), **asked)


@pytest.fixture(scope="module")
def found() -> Answer:
    return answered(tokens=1e9, price=2.5)


def test_the_layouts_are_products_of_the_mesh_and_the_product_accepts_each(found: Answer) -> None:
    meshes = {forecast.mesh for forecast in found.fitting}
    assert {Mesh(replicate=8), Mesh(shard=8, replicas_close=True), Mesh(replicate=2, shard=4)} <= meshes
    assert any(mesh.pipeline == 4 for mesh in meshes)
    assert any(mesh.tensor == 2 and mesh.shard == 4 for mesh in meshes)
    nodes = tuple(Node(node_id=str(i), name=str(i), cpus=8, gpus=4) for i in range(2))
    for forecast in found.fitting[:20]:
        errors: list[str] = []
        config, _ = compose([*found.command, *forecast.overrides], errors, registry.config_class)
        assert config is not None, errors
        plan = make_plan(config, registry.load("mesh"), nodes, oversubscribe_cpus=False)
        assert plan.mesh == forecast.mesh
        assert plan.rows_of_pass == forecast.step.rows


def test_the_fastest_comes_first_with_all_figures(found: Answer) -> None:
    seconds = [forecast.seconds for forecast in found.fitting]
    assert seconds == sorted(seconds)
    record = as_json(found)["layouts"][0]
    assert record["step_s"] == pytest.approx(sum(record["step_s_by_kind"].values()))
    assert record["memory_gib"]["total"] == pytest.approx(
        sum(size for kind, size in record["memory_gib"].items() if kind != "total")
    )
    assert record["money"] == pytest.approx(record["days"] * 24 * 8 * 2.5)
    assert record["tokens_s"] == pytest.approx(64 * 64 / record["step_s"])


def test_the_text_names_the_launch_and_the_spread(found: Answer) -> None:
    said = text(found, rows=3)
    assert "to launch it: orchestrator launch job=gpt" in said
    assert "strategy.context: this dimension comes with a later version" in said
    assert "% in the mean" in said
    assert "published runs of this size" in said


def test_keys_of_the_command_line_stay() -> None:
    found = answered("strategy.pipeline=2", "train.activation_checkpointing=blocks", "strategy.schedule=GPipe")
    assert {forecast.mesh.pipeline for forecast in found.fitting} == {2}
    assert all(forecast.step.recompute == 1.0 for forecast in found.fitting)
    assert not any("schedule" in key or "pipeline" in key for f in found.fitting for key in f.overrides)


def test_another_strategy_has_its_own_layout() -> None:
    found = answered("strategy=fsdp")
    assert {forecast.mesh for forecast in found.fitting} == {Mesh(shard=8)}


@pytest.mark.parametrize("strategy", ["parameter_server", "hogwild", "dp", "auto"])
def test_a_strategy_whose_memory_is_not_known_is_refused(strategy: str) -> None:
    found = answered(f"strategy={strategy}")
    assert not found.fitting
    assert found.pruned or "is not known" in found.refused[0].refused


def test_what_does_not_fit_says_what_it_needs() -> None:
    found = answered("job.layers=4", "job.width=16384", "job.hidden=65536", cluster="1x4xA10G")
    assert not found.fitting
    assert found.refused[0].refused.startswith("needs ")
    assert "none of them fits" in text(found, rows=3)


def test_a_model_that_cannot_be_traced_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "loss", lambda self, output, target: output.sum().item() * target.float().sum())
    with pytest.raises(ConfigError, match=r"cannot be traced.*_local_scalar_dense"):
        answered()


def outline(**changes: object) -> Outline:
    errors: list[str] = []
    config, _ = compose(["job=gpt", "strategy=mesh", "train.precision=bf16"], errors, registry.config_class)
    assert config is not None
    job = GPT(variant="llama", context=128, layers=6, width=256, heads=4, kv_heads=2, hidden=512, vocabulary=300)
    return Outline(job, dataclasses.replace(config.train, **changes))


@pytest.mark.parametrize("vocabulary", [300, 301], ids=["rows of both ends", "whole ends"])
def test_the_state_of_divided_layers_is_that_of_the_launch(vocabulary: int) -> None:
    words = (
        "strategy.tensor=2",
        "strategy.shard=2",
        "strategy.pipeline=1",
        "job.layers=4",
        f"job.vocabulary={vocabulary}",
    )
    predicted = answered(*words, cluster="1x4xH100").fitting[0]
    assert predicted.memory is not None
    assert predicted.step.divides_ends == (vocabulary == 300)
    job = GPT(variant="llama", context=64, layers=4, vocabulary=vocabulary)
    whole = Outline(job, outline().train)
    assert tensor_errors(whole, job.dataset("train"), 2, "auto")[0] == []
    model = tensor_outline(whole, 2).model
    config, _ = compose(["job=gpt", "strategy=mesh"], [], registry.config_class)
    assert config is not None
    assert model is not None
    launched = worker_memory(parameter_sizes(config, job, model), Division.of(Mesh(shard=2, tensor=2)))
    assert predicted.memory.state == pytest.approx(launched.state, rel=0.001)


def test_the_trace_counts_what_the_architecture_says() -> None:
    by_hand = Transformer(
        layers=6, hidden=256, inner=512, heads=4, kv_heads=2, head=64, vocabulary=300, gated=True
    ).work(128)
    work = traced(outline(), fused_attention=True).work
    assert (work.layers, work.tokens) == (6, 128)
    assert work.layer.products == by_hand.layer.products
    assert work.layer.attention == by_hand.layer.attention
    assert work.ends.products == by_hand.ends.products
    norms = (2 * 6 + 1) * 256
    assert work.parameters == by_hand.parameters + norms
    assert work.layer.moved_bytes == pytest.approx(by_hand.layer.moved_bytes, rel=0.3)


def test_two_blocks_tell_what_all_of_them_keep() -> None:
    found, whole = traced(outline(), fused_attention=True), kept_by_rows(outline(), fused_attention=True)
    kept, divided = found.kept("none"), found.kept("none", tensor=2)
    assert kept.a_sample == pytest.approx(whole.a_sample)
    assert kept.casts == whole.casts
    assert kept.a_sample / 2 < divided.a_sample < kept.a_sample
    again = kept_by_rows(outline(activation_checkpointing="blocks"), fused_attention=True)
    assert (
        again.a_sample < found.kept("blocks").a_sample < whole.a_sample
    )  # and what one block keeps while it runs again


def test_a_real_step_keeps_and_allocates_what_is_predicted() -> None:
    planned, rows = outline(), 8
    job, precision = planned.job, planned.precision
    predicted = traced(planned, fused_attention=False).kept("none")
    model = job.model()
    inputs, target = example_batch(job, job.dataset("train"), rows)
    with kept_tensors(model) as kept, precision.autocast():
        loss = job.loss(job.forward(model, inputs), target)
    assert predicted.always + rows * predicted.a_sample == pytest.approx(kept.activations, rel=0.05)
    assert predicted.casts == pytest.approx(kept.casts, rel=0.05)

    optimizer = job.optimizer(model.parameters())
    loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *states]
    config, _ = compose(["job=gpt", "strategy=mesh"], [], registry.config_class)
    assert config is not None
    memory = worker_memory(parameter_sizes(config, job, model), Division())
    assert memory.state == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.01)
