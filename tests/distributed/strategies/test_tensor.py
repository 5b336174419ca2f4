"""Layers divided over workers: trained as by one worker alone, and saved and loaded as by any other layout."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.conformance.cases import Case, having
from helpers.conformance.exact_evaluation import assert_evaluated_exactly
from helpers.conformance.exchanged_checkpoints import assert_checkpoints_exchanged
from helpers.conformance.layouts import (
    ADAMW,
    LAYOUTS,
    SEQUENCE,
    SGD,
    TENSOR,
    assert_as_alone,
    layout,
    mesh,
    pipeline,
)
from helpers.conformance.training import make, model_of, saved_piece, snapshot
from helpers.jobs.head_norms import Adapted, HeadNorms
from helpers.jobs.matrix_optimizers import OfGPT, Preconditioned
from helpers.jobs.quick_jobs import FewToEvaluate, TinyGPT
from helpers.jobs.toys import Rows
from helpers.ranks.batches import validated
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator import export
from orchestrator.config.recorded_config import to_yaml
from orchestrator.job import Job, Split
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.protocol.core_metrics import evaluation_metrics
from orchestrator.protocol.messages import EvalPoint
from orchestrator.records import run_dir as rundir
from orchestrator.state.checkpoint import load, path_of
from orchestrator.strategies.trainer import Trainer


class RatesByShape(TinyGPT):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p], "lr": 0.2 / max(p.shape)} for p in parameters])


JOB = RatesByShape(layers=2, variant="llama", kv_heads=2, tied=True, vocabulary=257)  # of which a worker has one more
TRAIN = having(steps=6, clip_norm=0.5, grad_accumulation=2, global_batch_size=8, ema_decay=0.8)
CASE = Case(job=JOB, train=TRAIN)


@dataclass(frozen=True, kw_only=True)
class SGDGPT(TinyGPT):
    layers: int = 3

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2)


CASES = {
    "adamw": CASE,
    "sgd, norms of heads": Case(job=HeadNorms(), train=TRAIN),
    "sgd, adapters": Case(job=Adapted(adamw=False), train=TRAIN),
    "adamw, adapters": Case(job=Adapted(adamw=True), train=TRAIN),
}
IN_CI = ("mesh-tensor-2", "mesh-replicated-tensor-2x2", "mesh-sharded-tensor-2x2")
PACKED = Case(job=HeadNorms(adamw=True), train=TRAIN)


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", [*IN_CI, *in_campaign(*(name for name in TENSOR if name not in IN_CI))])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_norms_and_weights_are_those_of_one_worker(gang: Gang, layout: str, case: Case) -> None:
    assert_as_alone(gang, case, TENSOR[layout], want_grad_norm=True, norm_rtol=SGD, plain=True)


@pytest.mark.parametrize(
    ("schedule", "case"),
    [("ZBVZeroBubble", PACKED), *in_campaign(*((s, CASES["adamw"]) for s in SCHEDULES))],
)
def test_schedules_of_stages(gang: Gang, schedule: str, case: Case) -> None:
    job = replace(case.job, layers=4) if isinstance(case.job, TinyGPT) else case.job
    of = layout(replace(pipeline(schedule, 4), tensor=2), 4)
    case = replace(case, job=job, train=having(TRAIN, global_batch_size=16))
    assert_as_alone(gang, case, of, want_grad_norm=True, plain=True)


@pytest.mark.parametrize(
    "layout", ["mesh-sequence-2", *in_campaign("mesh-sharded-sequence-2x2", "mesh-replicated-sequence-2x2")]
)
@pytest.mark.parametrize(
    "case", [CASE, *in_campaign(replace(CASE, job=replace(JOB, context=15)), replace(CASE, job=SGDGPT()))]
)
def test_tokens_divided_between_layers(gang: Gang, layout: str, case: Case) -> None:
    """A worker of a group has its own tokens of a sample, also if their number is odd."""
    assert_as_alone(gang, case, SEQUENCE[layout], want_grad_norm=True, plain=True)


def initial(rank: int, case: Case) -> tuple[dict[str, torch.Tensor], int]:
    """The first values of a rank's replica, and how many elements the rank itself trains."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    return snapshot(model_of(strategy)), sum(p.numel() for p in strategy.trained.parameters)


@pytest.mark.parametrize(
    "layout",
    ["mesh-tensor-in-stages-2x2", *in_campaign(*(name for name in TENSOR if name != "mesh-tensor-in-stages-2x2"))],
)
def test_initial_values_are_those_of_the_whole_model_and_divided(gang: Gang, layout: str) -> None:
    ((alone, number),) = gang.run(initial, CASE, world_size=1)
    of = TENSOR[layout]
    names = set()
    for found, own in gang.run(initial, of.of(CASE), world_size=of.world_size):
        assert all(torch.equal(tensor, alone[name]) for name, tensor in found.items())
        assert own < 0.8 * number
        names |= {*found}
    assert names == {*alone}


@pytest.mark.parametrize("layout", ["mesh-replicated-tensor-2x2", *in_campaign("mesh-sharded-tensor-2x2")])
def test_each_sample_is_evaluated_once(gang: Gang, layout: str) -> None:
    job = FewToEvaluate(layers=2, variant="llama", kv_heads=2, tied=True)
    assert_evaluated_exactly(gang, Case(job=job, train=having(steps=3, global_batch_size=8)), layout)


@pytest.mark.parametrize(
    ("layout", "other", "case"),
    [
        ("mesh-tensor-2", "single", PACKED),
        *in_campaign(
            ("mesh-sharded-tensor-2x2", "1F1B-2", CASE),
            ("mesh-replicated-tensor-2x2", "fsdp-3", CASE),
            ("mesh-sharded-tensor-2x2", "1F1B-2", PACKED),
            ("mesh-tensor-in-stages-2x2", "ddp-2", PACKED),
            ("mesh-zero1-tensor-2x2", "sharded-ddp-3", PACKED),
        ),
    ],
)
def test_checkpoints_go_to_and_from_other_layouts(
    gang: Gang, layout: str, other: str, case: Case, tmp_path: Path
) -> None:
    assert_checkpoints_exchanged(gang, TENSOR[layout], LAYOUTS[other], case, tmp_path)


def evaluated(rank: int, case: Case, checkpoint: Path) -> EvalPoint:
    strategy, state = make(case, rank), load(checkpoint)
    if len(strategy.saved.writers) > 1:
        strategy.restore(state, source=None)
    else:
        strategy.restore(state if rank == 0 else None, source=0)
    return validated(strategy, rank, strategy.job.dataset("val"))


@pytest.mark.campaign
def test_a_run_is_exported_and_evaluated_as_that_of_one_worker(gang: Gang, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"layers": 2, "variant": "llama", "kv_heads": 2, "tied": True}
    case = Case(job=TinyGPT(**fields), train=having(steps=2, global_batch_size=8))
    both = {"tensor": TENSOR["mesh-tensor-2"], "single": LAYOUTS["single"]}
    exported: dict[str, dict[str, Tensor]] = {}
    metrics: list[dict[str, float]] = []
    for name, of in both.items():
        run = rundir.create(tmp_path, name)
        run.update_record(name=name, uid="r", state="finished")
        run.config_file.write_text(to_yaml({"job": {"_target_": f"{TinyGPT.__module__}.TinyGPT", **fields}}))
        gang.run(saved_piece, of.of(case), 2, run.checkpoints, world_size=of.world_size)
        assert export.main([str(run.path), "--to", str(tmp_path / "exported" / name)]) == 0
        exported[name] = load_file(tmp_path / "exported" / name / "model.safetensors")
        by = both["single" if name == "tensor" else "tensor"]
        points = gang.run(evaluated, by.of(case), path_of(run.checkpoints, 2), world_size=by.world_size)
        metrics.append(evaluation_metrics(points))
    torch.testing.assert_close(exported["tensor"], exported["single"], rtol=1e-4, atol=1e-5)
    assert metrics[1] == pytest.approx(metrics[0], rel=SGD)


@pytest.mark.parametrize(
    "layout", ["mesh-sharded-tensor-2x2", *in_campaign("mesh-replicated-tensor-2x2", "mesh-tensor-in-stages-2x2")]
)
def test_an_optimizer_gets_whole_tensors(gang: Gang, layout: str) -> None:
    """Of a matrix, a worker has a part of the rows or columns, or of these the rows of a shard."""
    case = Case(job=OfGPT(layers=3, kind=Preconditioned), train=having(steps=6, clip_norm=0.5, global_batch_size=16))
    assert_as_alone(gang, case, TENSOR[layout], rtol=ADAMW, want_grad_norm=True, plain=True)


@pytest.mark.campaign
@pytest.mark.parametrize("shard_optimizer", [False, True])
@pytest.mark.parametrize("sizes", [{"pipeline": 2, "shard": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_products_of_three_dimensions(gang: Gang, sizes: dict[str, int], shard_optimizer: bool) -> None:
    case = Case(job=JOB, train=having(TRAIN, global_batch_size=16))
    of = mesh(Mesh(**sizes, tensor=2), shard_optimizer=shard_optimizer)
    assert_as_alone(gang, case, of, want_grad_norm=True)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("layout", "train", "fields"),
    [
        ("mesh-tensor-2", {"activation_checkpointing": "blocks"}, {"dropout": 0.1}),
        ("mesh-tensor-in-stages-2x2", {"activation_checkpointing": "blocks"}, {}),
        ("mesh-sharded-tensor-2x2", {"activation_checkpointing": "selective"}, {}),
        ("mesh-replicated-tensor-2x2", {"compile": "blocks"}, {}),
        ("mesh-sharded-tensor-2x2", {"compile": "blocks"}, {}),
        ("mesh-sharded-tensor-2x2", {"ema_decay": 0.8, "precision": "bf16"}, {}),
        ("mesh-sequence-2", {"activation_checkpointing": "blocks"}, {}),
        ("mesh-sequence-2", {"compile": "blocks"}, {}),
        ("mesh-sharded-sequence-2x2", {"activation_checkpointing": "selective"}, {}),
    ],
    ids=str,
)
def test_ways_to_train(gang: Gang, layout: str, train: dict[str, Any], fields: dict[str, Any]) -> None:
    case = Case(job=replace(JOB, **fields), train=having(steps=6, clip_norm=0.5, global_batch_size=8, **train))
    rtol = 2e-3 if "precision" in train else SGD
    assert_as_alone(gang, case, {**TENSOR, **SEQUENCE}[layout], rtol=rtol, want_grad_norm=True)


@dataclass(frozen=True, kw_only=True)
class OfTransformers(Job):
    """A small model of ``transformers`` with random weights, which computes its loss itself."""

    kind: str

    def model(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"head_dim": 16, "intermediate_size": 96, "vocab_size": 128, "pad_token_id": 0}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        default = AutoConfig.for_model(self.kind)
        known = {name: size for name, size in sizes.items() if hasattr(default, name)}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(self.kind, **known)).float()

    def dataset(self, split: Split) -> Rows:
        rows = [(torch.arange(24) * (1 + i % 5) + i) % 120 for i in range(64)]
        return Rows([{"input_ids": row, "labels": row} for row in rows])

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs, use_cache=False)

    def loss(self, output: Any, target: Any) -> Tensor:
        return output.loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox", "gpt2", "phi3"])
@pytest.mark.parametrize("layout", ["mesh-tensor-2", "mesh-sharded-tensor-2x2"])
def test_models_of_transformers(gang: Gang, layout: str, kind: str) -> None:
    pytest.importorskip("transformers")
    case = Case(job=OfTransformers(kind=kind), train=having(steps=5, clip_norm=0.5, global_batch_size=8))
    assert_as_alone(gang, case, TENSOR[layout], want_grad_norm=True)
