"""The layouts that `orchestrator plan` finds for a job, and what it predicts of them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from helpers.records.earlier_runs import config_of, plan_of
from jobs.gpt import GPT
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_job
from orchestrator.config.redact import Redactor
from orchestrator.driver.preflight.record import open_run
from orchestrator.features.plan.forecasts import answer
from orchestrator.features.plan.layouts import without_numbers
from orchestrator.features.plan.model_work import traced, with_cpus
from orchestrator.features.plan.plan_notes import speed_note
from orchestrator.features.plan.prediction.devices import CPU, parse_cluster, read_tables
from orchestrator.features.plan.prediction.forecast import Answer
from orchestrator.features.plan.prediction.work import Transformer
from orchestrator.features.plan.shown import as_json, text
from orchestrator.job import Job, Split
from orchestrator.model.stages.layers import kept_tensors
from orchestrator.planning.memory import Division, worker_memory
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Node, make_plan
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.strategies.checks.memory_plan import kept_by_rows, parameter_sizes
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.transforms.tensor import tensor_errors, tensor_outline

pytestmark = pytest.mark.slow

TABLES = read_tables()
CORE = dataclasses.replace(TABLES.devices["L40S"], bf16=0.1, memory_gb_s=10, inside="PCIe4", between="PCIe4")
CPUS = dataclasses.replace(TABLES, devices={**TABLES.devices, CPU: CORE})
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
    assert "to launch it: python -m orchestrator.launch job=gpt" in said
    assert "% in the median" in said
    assert "published runs of software and devices without a known run" in said


def test_a_reason_of_refusal_stands_once(found: Answer, golden: Golden) -> None:
    refused = [
        "strategy.shard=4: with strategy.tensor=2, 1F1B makes 8",
        "strategy.shard=2: with strategy.tensor=4, 1F1B makes 16",
    ]
    assert {without_numbers(reason) for reason in refused} == {"strategy.shard: with strategy.tensor, 1F1B makes N"}
    assert not any("strategy.shard_optimizer" in reason for reason in found.pruned)
    golden.says(answered("strategy.sequence=true").pruned)


def test_keys_of_the_command_line_stay() -> None:
    found = answered("strategy.pipeline=2", "train.activation_checkpointing=blocks", "strategy.schedule=GPipe")
    assert {forecast.mesh.pipeline for forecast in found.fitting} == {2}
    assert all(forecast.step.recompute == 1.0 for forecast in found.fitting)
    assert not any("schedule" in key or "pipeline" in key for f in found.fitting for key in f.overrides)


def test_another_strategy_has_its_own_layout() -> None:
    found = answered("strategy=fsdp")
    assert {forecast.mesh for forecast in found.fitting} == {Mesh(shard=8)}


@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(n, marks=pytest.mark.needs("asynchronous")) for n in ("parameter_server", "hogwild", "dp")),
        "auto",
    ],
)
def test_a_strategy_whose_memory_is_not_known_is_refused(strategy: str) -> None:
    found = answered(f"strategy={strategy}")
    assert not found.fitting
    assert found.pruned or "is not known" in found.refused[0].refused


def test_cpus_of_this_machine_are_measured() -> None:
    tables = with_cpus(TABLES)
    measured = tables.devices[CPU]
    assert 1e9 < measured.peak_flops_s("bf16") < 1e13
    assert 1e9 < measured.memory_bytes_s < 1e12
    assert 0.5 < measured.operator_us < 100
    tables = dataclasses.replace(tables, devices={CPU: dataclasses.replace(measured, node=2)})
    found = answer(SMALL, parse_cluster("1x2xcpu", tables), Redactor())
    assert {"train.precision=fp32", "strategy.num_workers=2"} <= {*found.assumed}
    assert {Mesh(replicate=2), Mesh(shard=2, replicas_close=True)} <= {forecast.mesh for forecast in found.fitting}
    assert "measured on the cores of this machine" in text(found, rows=3)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of ``ddp`` on two CPUs, as its driver records it; its steps took 300 ms."""
    config = config_of(tmp_path, *SMALL, "strategy=ddp", "strategy.num_workers=2")
    job = load_job(config.job, [], Redactor())
    assert job is not None
    run_dir, _ = open_run(config, job, plan_of(config), None, command="", sweep=None, redactor=Redactor())
    run_dir.update_record(state="finished", precision="fp32", summary={"step_ms_p50": 300.0})
    return run_dir


def test_a_run_of_ours_says_which_shares_of_the_peak_rate_are_reached(run: RunDir) -> None:
    words = ("strategy=ddp", "strategy.num_workers=2", "train.precision=fp32")
    found = answer([*SMALL, *words], parse_cluster("1x2xcpu", CPUS), Redactor(), measured=run)
    best = next(f for f in found.fitting if f.step.passes == 1 and not f.step.recompute)
    assert best.seconds == pytest.approx(0.3, rel=1e-3)
    assert 0 < found.question.stack.products < 1
    share = f"products {found.question.stack.products:.0%}"
    assert f"by the steps of {run.location}: {share}" in text(found, rows=1)


@pytest.mark.parametrize(
    ("cluster", "precision", "recorded", "reason"),
    [
        ("1x2xH100", "fp32", {}, "ran on cpu, and --cluster names H100"),
        ("1x2xcpu", "bf16", {}, "computed in fp32; plan with train.precision=fp32"),
        ("1x2xcpu", "fp32", {"summary": {}}, "no median of step times"),
        ("1x2xcpu", "fp32", {"summary": {"step_ms_p50": 0.1}}, "took 0.1 ms, and at the peak rate of cpu they take"),
    ],
)
def test_a_run_that_says_nothing_of_these_devices_is_refused(
    run: RunDir, cluster: str, precision: str, recorded: dict[str, Any], reason: str
) -> None:
    run.update_record(**recorded)
    with pytest.raises(ConfigError, match=reason):
        answer([*SMALL, f"train.precision={precision}"], parse_cluster(cluster, CPUS), Redactor(), measured=run)


def noted(gpu_name: str, *words: str, gpus: int = 4) -> str | None:
    errors: list[str] = []
    config, spec = compose([*SMALL, "strategy=fsdp", "train.precision=bf16", *words], errors, registry.config_class)
    job = load_job(spec, errors, Redactor()) if spec else None
    assert config is not None, errors
    assert job is not None, errors
    nodes = tuple(Node(node_id=str(i), name=str(i), cpus=16, gpus=gpus, gpu_name=gpu_name) for i in range(2))
    return speed_note(config, job, make_plan(config, registry.load("fsdp"), nodes, oversubscribe_cpus=False), nodes)


def test_the_plan_of_a_launch_shows_the_prediction_of_its_layout() -> None:
    said, best = noted("NVIDIA H100 80GB HBM3"), answered("strategy=fsdp", "train.grad_accumulation=1").fitting[0]
    assert said is not None
    assert said.startswith(f"predicted for 2x4xH100: {best.seconds:.3g} s a step")
    assert "`orchestrator plan --cluster 2x4xH100` with these keys" in said
    assert noted("NVIDIA Z100") is None
    beyond = noted("NVIDIA H100 80GB HBM3", gpus=16)
    assert beyond is not None
    assert "a node has at most 8 of H100" in beyond
    assert noted("NVIDIA H100 80GB HBM3", "cluster.device=cpu") is None


def test_the_speed_of_a_model_that_cannot_be_traced_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "loss", lambda self, output, target: output.sum().item() * target.float().sum())
    said = noted("NVIDIA H100 80GB HBM3")
    assert said is not None
    assert said.startswith("its speed cannot be predicted: the model cannot be traced")


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


@pytest.mark.parametrize("vocabulary", [300, 301], ids=["as many rows", "one more"])
def test_the_state_of_divided_layers_is_that_of_the_launch(vocabulary: int) -> None:
    words = (
        "strategy.tensor=2",
        "strategy.shard=2",
        "strategy.shard_optimizer=false",
        "strategy.pipeline=1",
        "job.layers=4",
        f"job.vocabulary={vocabulary}",
    )
    predicted = answered(*words, cluster="1x4xH100").fitting[0]
    assert predicted.memory is not None
    assert predicted.step.divides_ends
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
    assert work.layer.operators > 20
    assert work.layer.products == by_hand.layer.products
    assert work.layer.attention == by_hand.layer.attention
    assert work.ends.products == by_hand.ends.products
    norms = (2 * 6 + 1) * 256
    assert work.parameters == by_hand.parameters + norms
    assert work.layer.moved_bytes == pytest.approx(by_hand.layer.moved_bytes, rel=0.3)


class Plain(Toy):
    """Layers that do not repeat, and data that is computed from a large tensor."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))

    def dataset(self, split: Split) -> TensorDataset:
        inputs = torch.ones(4096, 16) / 2
        return TensorDataset(inputs, inputs[:, :4] * 2)


def test_a_model_without_blocks_has_equal_layers_and_its_data_does_not_count() -> None:
    work = traced(Outline(Plain(), outline().train), fused_attention=False).work
    products = 2 * (16 * 32 + 32 * 64 + 64 * 4)
    assert work.layers == 3
    assert work.layer.products == pytest.approx(products / 3)
    assert 3 * work.layer.moved_bytes < 10_000
    assert (work.ends.products, work.ends.parameters, work.tensors) == (0, products / 2 + 32 + 64 + 4, 6)


class Experts(nn.Module):
    """Four experts of 16 x 32, of which each token goes to two."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.topk(self.router(x).flatten(0, 1), 2).indices.flatten()
        rows = x.flatten(0, 1).repeat_interleave(2, 0)[each.argsort()]
        ends = torch.arange(len(each) // 4, len(each) + 1, len(each) // 4, dtype=torch.int32)
        return F.grouped_mm(rows, self.up, offs=ends).view(*x.shape, 4).sum(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertJob(Job):
    def model(self) -> nn.Module:
        return nn.Sequential(Experts(), Experts(), nn.Linear(16, 16))

    def dataset(self, split: Split) -> TensorDataset:
        return TensorDataset(torch.zeros(64, 8, 16), torch.zeros(64, 8, 16))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def optimizer(self, parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]

    @property
    def tokens_per_sample(self) -> int:
        return 8


@pytest.mark.skipif(torch.__version__.startswith("2.14."), reason="its grouped_mm refuses fake tensors in float32")
def test_the_experts_that_run_are_counted_and_the_speed_is_a_range() -> None:
    words = [f"job={__name__}.ExpertJob", "train.global_batch_size=64"]
    found = answer(words, parse_cluster("1x2xH100", TABLES), Redactor())
    work, one = found.question.work, 16 * 32
    assert work.layer.experts == 4 * one
    assert work.layer.used == 2 * one
    assert work.layer.products == 8 * 2 * (2 * one + 16 * 4)
    assert work.parameters - work.active_parameters == 2 * 2 * one
    assert work.layer.routed == 2
    assert found.fitting[0].time is not None
    assert found.fitting[0].time.expert > found.question.stack.dispatch_s
    assert re.search(r"speed 3\d% to 12\d% of that in nine of ten .*tokens/s for the fastest", text(found, rows=1))
    assert as_json(found)["spread"]["case"] == "all new"


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


class Widening(nn.Module):
    """From one width to another, with statistics of the batch."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, to), nn.BatchNorm1d(to)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


def test_blocks_of_several_shapes_count_each_as_it_is() -> None:
    """BatchNorm refuses one sample, and a block that widens cannot be left out."""
    widths = [(10, 32), (32, 32), (32, 32), (32, 32), (32, 64), (64, 64), (64, 64)]

    def build() -> nn.Module:
        return nn.Sequential(nn.Sequential(*(Widening(*width) for width in widths)), nn.Linear(64, 4))

    planned = Outline(Toy(build=build), outline().train)
    found, whole = traced(planned, fused_attention=False), kept_by_rows(planned, fused_attention=False)
    products = 2 * sum(width * to for width, to in widths)
    assert found.work.layers == len(widths)
    assert found.work.layers * found.work.layer.products == pytest.approx(products)
    assert found.work.ends.products == 2 * 64 * 4
    assert found.work.parameters == sum(p.numel() for p in build().parameters())
    assert found.kept("none").a_sample == pytest.approx(whole.a_sample)


def test_a_job_without_tokens_is_asked_for_its_samples() -> None:
    found = answer(["job=digits"], parse_cluster("6x8xH100", TABLES), Redactor())
    assert "train.global_batch_size=48" in found.assumed, "the default, 64, in whole samples for each device"
    printed = text(found, rows=1)
    assert "tokens" not in printed
    assert "no published run is like this model" in printed


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
