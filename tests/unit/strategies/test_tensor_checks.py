"""What the plan says of layers that are divided, and why a model or pairs by hand are refused."""

from typing import Any

import pytest
from torch import Tensor

from helpers.conformance.cases import having
from helpers.files.golden import Golden
from helpers.jobs.block_jobs import BlockDigits
from helpers.jobs.quick_jobs import TinyGPT
from helpers.jobs.toys import Toy
from orchestrator.job import Job
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.transforms.tensor import tensor_errors, tensor_outline

pytestmark = pytest.mark.slow

MLP, ATTENTION = "mlp.gate + mlp.up -> mlp.down", "attention.q + attention.k + attention.v -> attention.mix"


def llama(**fields: Any) -> TinyGPT:
    return TinyGPT(**{"layers": 2, "variant": "llama", "heads": 4, "kv_heads": 2, "hidden": 40} | fields)


def said(job: Job, size: int, pairs: Any = "auto") -> tuple[list[str], tuple[str, ...]]:
    return tensor_errors(Outline(job, having()), job.dataset("train"), size, pairs)


def test_the_plan_says_what_is_divided_and_what_is_not() -> None:
    assert said(llama(), 2) == (
        [],
        (
            "strategy.tensor=2 divides, as proven on a block of each kind, 2 x Block: 99% of the parameters "
            f"({MLP}, {ATTENTION}); and the rows of embed.token, head, whose outputs stay divided in the loss",
        ),
    )
    errors, (divided,) = said(llama(heads=2, kv_heads=1), 2)
    assert errors == []
    assert "attention.q -> attention.mix (attention.k + attention.v on each worker)" in divided
    errors, (divided, whole) = said(llama(hidden=160, heads=2, kv_heads=2), 4)
    assert errors == []
    assert divided.endswith(f"({MLP}); and the rows of embed.token, head, whose outputs stay divided in the loss")
    assert whole.startswith(f"strategy.tensor=4 leaves whole {ATTENTION}: attention.q has 2 heads, no")


class Confident(TinyGPT):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) - 0.1 * output.softmax(dim=-1).square().mean()


def test_a_loss_that_reads_all_outputs_gets_them(golden: Golden) -> None:
    errors, (note,) = said(Confident(layers=2, variant="llama", heads=4, kv_heads=2, hidden=40), 2)
    assert errors == []
    golden.says(note)


@pytest.mark.parametrize(
    ("job", "size"),
    [(llama(hidden=42), 4), (llama(), 3), (Toy(), 2), (BlockDigits(hidden=24, dropout=0.0, normed=False), 2)],
    ids=["heads", "three", "no blocks", "no pairs"],
)
def test_a_model_that_cannot_be_divided_is_refused_with_what_to_set(job: Job, size: int, golden: Golden) -> None:
    (error,), notes = said(job, size)
    assert notes == ()
    golden.says(error)


@pytest.mark.parametrize("pair", ["mlp.up mlp.down", "mlp.u -> mlp.down", "mlp.up -> mlp.down"])
def test_pairs_by_hand_are_proven_too(pair: str, golden: Golden) -> None:
    (error,), _ = said(llama(), 2, (pair,))
    golden.says(error)
    assert said(llama(), 2, (MLP, ATTENTION))[0] == []


def test_tokens_are_divided_if_only_divided_layers_mix_them(golden: Golden) -> None:
    def said(job: Job) -> tuple[list[str], tuple[str, ...]]:
        return tensor_errors(Outline(job, having()), job.dataset("train"), 2, sequence=True)

    errors, (_, note) = said(llama())
    assert errors == []
    golden.says(note)
    errors, notes = said(llama(dropout=0.1))
    assert notes == ()
    golden.says(errors)


def test_a_worker_has_less_of_the_model() -> None:
    job = llama()
    outline = Outline(job, having())
    tensor_errors(outline, job.dataset("train"), 2, "auto")
    own = tensor_outline(outline, 2)
    whole, part = (sum(p.numel() for p in of.whole.model.parameters()) for of in (outline, own))
    assert 0.5 * whole < part < 0.52 * whole
