"""Samples divided over workers by tokens: trained as by one worker alone, and saved and loaded by any layout."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.conformance.cases import Case, having
from helpers.conformance.exact_evaluation import assert_evaluated_exactly
from helpers.conformance.exchanged_checkpoints import assert_checkpoints_exchanged
from helpers.conformance.layouts import (
    ADAMW,
    CONTEXT,
    LAYOUTS,
    SGD,
    Layout,
    assert_as_alone,
    layout,
    mesh,
    pipeline,
)
from helpers.conformance.training import losses, make, model_of, snapshot, train
from helpers.jobs.matrix_optimizers import OfGPT, Preconditioned
from helpers.jobs.quick_jobs import FewToEvaluate, TinyGPT
from helpers.jobs.toys import Rows
from helpers.models.token_tricks import Tricky
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.job import Job, Split
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.protocol.metrics import Metric
from orchestrator.strategies.trainer import Trainer

JOB = TinyGPT(layers=2, variant="llama", kv_heads=2, tied=True)
TRAIN = having(steps=6, clip_norm=0.5, grad_accumulation=2, global_batch_size=8, ema_decay=0.8)
CASE = Case(job=JOB, train=TRAIN)


@dataclass(frozen=True, kw_only=True)
class Answers(TinyGPT):
    """Trains by SGD on the ends of some samples, of which a worker, or a micro-batch, may have many labels or none."""

    layers: int = 4
    lr: float = 0.2

    def dataset(self, split: Split) -> Rows:
        windows: Any = super().dataset(split)
        rows = [(tokens, labels.clone()) for tokens, labels in (windows[i] for i in range(64))]
        for i, (_, labels) in enumerate(rows):
            labels[: i * 7 % (len(labels) + 1)] = -100
        return Rows(rows)

    def weight(self, target: torch.Tensor) -> torch.Tensor:
        return (target >= 0).sum()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)


CASES = {
    "llama": CASE,
    "gpt2": Case(job=TinyGPT(layers=2), train=TRAIN),
    "documents": Case(job=replace(JOB, end_token=32), train=TRAIN),
}
IN_CI = ("mesh-context-2", "context-in-stages-2x2", "mesh-sharded-context-2x2", "mesh-zero1-context-2")


def assert_norms_too(gang: Gang, case: Case, of: Layout, *, rtol: float = SGD) -> None:
    assert_as_alone(gang, case, of, want_grad_norm=True, rtol=rtol, norm_rtol=rtol, plain=True)


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", [*IN_CI, *in_campaign(*(name for name in CONTEXT if name not in IN_CI))])
@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_weights_are_those_of_one_worker(gang: Gang, name: str, layout: str) -> None:
    assert_norms_too(gang, CASES[name], CONTEXT[layout])


WHOLE = ("written out", "hidden states", "shape of the words", "squeeze and excite")
"""Tricks for which each worker computes all tokens somewhere."""


@pytest.mark.parametrize(
    ("trick", "layout"),
    [
        ("written out", "mesh-context-2"),
        *in_campaign(*((t, n) for t in WHOLE for n in IN_CI if (t, n) != ("written out", "mesh-context-2"))),
    ],
)
def test_what_needs_all_tokens_gets_them(gang: Gang, trick: str, layout: str) -> None:
    case = Case(job=Tricky(trick=trick), train=having(steps=3, global_batch_size=8, clip_norm=0.5))
    assert_norms_too(gang, case, CONTEXT[layout])


@pytest.mark.campaign
@pytest.mark.parametrize("trick", ["written out", "hidden states"])
def test_what_needs_all_tokens_is_computed_again(gang: Gang, trick: str) -> None:
    changes = having(steps=3, global_batch_size=8, activation_checkpointing="blocks")
    case = Case(job=Tricky(trick=trick), train=changes)
    assert_as_alone(gang, case, CONTEXT["mesh-sharded-context-2x2"], rtol=SGD, want_grad_norm=True)


@pytest.mark.parametrize(
    ("schedule", "job"),
    [(s, job) for s in SCHEDULES for job in (Answers(), replace(JOB, layers=4))],
)
@pytest.mark.campaign
def test_schedules_of_stages(gang: Gang, schedule: str, job: Job) -> None:
    of = layout(replace(pipeline(schedule, 4), context=2), 4)
    assert_norms_too(gang, Case(job=job, train=having(TRAIN, global_batch_size=16)), of)


def answers(folder: Path, kind: str) -> Job:
    """A model of ``transformers`` that learns the answers alone, so that a worker may have many labels, or none."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    from helpers.jobs.preference_jobs import Preferences
    from helpers.models.small_hf import byte_tokenizer

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 48, "vocab_size": 256}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    lines = [{"prompt": "a" * (1 + i % 9), "completion": "bc" * (1 + i % 5)} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Preferences(
        sgd=True,
        model_name_or_path=str(folder / "model"),
        train_file=str(folder / "rows.jsonl"),
        validation_split_percentage=0,
        block_size=16,
        lr_scheduler_type="constant",
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", "mesh-context-2"), *in_campaign(*((k, n) for k in ("qwen3", "gemma3_text") for n in CONTEXT))],
)
def test_unevenly_divided_labels_of_models_of_transformers(gang: Gang, kind: str, layout: str, tmp_path: Path) -> None:
    case = Case(job=answers(tmp_path, kind), train=having(steps=4, clip_norm=0.5, global_batch_size=8))
    assert_norms_too(gang, case, CONTEXT[layout], rtol=ADAMW)


@pytest.mark.parametrize("layout", ["context-in-stages-2x2", *in_campaign("mesh-sharded-context-2x2")])
def test_each_sample_is_evaluated_once(gang: Gang, layout: str) -> None:
    job = FewToEvaluate(layers=2, variant="llama", kv_heads=2, tied=True)
    assert_evaluated_exactly(gang, Case(job=job, train=having(steps=3, global_batch_size=8)), layout)


@pytest.mark.campaign  # context divides no tensor: a checkpoint is that of replicas
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("mesh-context-2", "single"),
        ("mesh-sharded-context-2x2", "single"),
        ("context-in-stages-2x2", "fsdp-3"),
        ("mesh-context-2", "fsdp-3"),
        ("mesh-context-2", "1F1B-2"),
        ("mesh-context-in-stages-2x2", "ddp-2"),
    ],
)
def test_checkpoints_go_to_and_from_other_layouts(gang: Gang, layout: str, other: str, tmp_path: Path) -> None:
    assert_checkpoints_exchanged(gang, CONTEXT[layout], LAYOUTS[other], CASE, tmp_path)


def initial(rank: int, case: Case) -> tuple[dict[str, torch.Tensor], int, dict[str, Metric]]:
    """The first values of a rank's replica, how many elements the rank itself trains, and its metrics of a step."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    return snapshot(model_of(strategy)), sum(p.numel() for p in strategy.trained.parameters), {**strategy.metrics()}


def test_initial_values_are_those_of_the_whole_model_in_shards(gang: Gang) -> None:
    ((alone, number, _),) = gang.run(initial, CASE, world_size=1)
    of = CONTEXT["mesh-sharded-context-2x2"]
    for found, own, metrics in gang.run(initial, of.of(CASE), world_size=of.world_size):
        assert all(torch.equal(tensor, alone[name]) for name, tensor in found.items())
        assert own < 0.3 * number
        assert "perf/context_ms" in metrics


@pytest.mark.campaign
@pytest.mark.parametrize("shard_optimizer", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 2, "context": 2, "tensor": 2},
        {"replicate": 2, "context": 4},
        {"pipeline": 2, "context": 2, "tensor": 2},
        {"pipeline": 2, "context": 2, "shard": 2},
        {"pipeline": 2, "context": 2, "replicate": 2},
    ],
    ids=str,
)
def test_products_of_three_dimensions(gang: Gang, sizes: dict[str, int], shard_optimizer: bool) -> None:
    case = Case(job=JOB, train=having(TRAIN, global_batch_size=16))
    assert_as_alone(gang, case, mesh(Mesh(**sizes), shard_optimizer=shard_optimizer), want_grad_norm=True)


@pytest.mark.campaign
def test_an_optimizer_gets_whole_tensors(gang: Gang) -> None:
    case = Case(job=OfGPT(layers=3, kind=Preconditioned), train=having(steps=6, clip_norm=0.5, global_batch_size=16))
    assert_as_alone(gang, case, CONTEXT["mesh-sharded-context-2x2"], rtol=ADAMW, want_grad_norm=True)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_compiled_blocks_with_a_module_that_computes_all_tokens(gang: Gang) -> None:
    """It cuts a block into several pieces, each of which the compiler is called for."""
    case = CONTEXT["mesh-context-2"].of(Case(job=Tricky(trick="written out"), train=having(steps=3)))
    compiled = replace(case, train=replace(case.train, compile="blocks"))
    expected = losses(gang.run(train, case, world_size=2))
    torch.testing.assert_close(losses(gang.run(train, compiled, world_size=2, timeout_s=600)), expected)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": "blocks"},
        {"activation_checkpointing": "selective"},
        {"precision": "bf16"},
        {"compile": "blocks"},
        {"compile": "blocks", "activation_checkpointing": "blocks"},
    ],
    ids=str,
)
def test_ways_to_train(gang: Gang, changes: dict[str, Any]) -> None:
    case = Case(job=JOB, train=having(steps=6, clip_norm=0.5, global_batch_size=8, **changes))
    rtol = 2e-3 if "precision" in changes else SGD
    assert_as_alone(gang, case, CONTEXT["mesh-sharded-context-2x2"], rtol=rtol, want_grad_norm=True)
