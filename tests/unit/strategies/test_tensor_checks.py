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
INSTEAD = "use strategy.shard={} in place of it"


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
    ("job", "size", "error"),
    [
        (
            llama(hidden=42),
            4,
            f"strategy.tensor=4: 0% of the parameters of the blocks could be divided ({MLP}: 42 is no multiple of 4; "
            f"{ATTENTION}: attention.k has 2 heads, no multiple of 4); set it to 2, or {INSTEAD.format(4)}",
        ),
        (
            llama(),
            3,
            f"strategy.tensor=3: 0% of the parameters of the blocks could be divided ({MLP}: 40 is no multiple of 3; "
            f"{ATTENTION}: 16 is no multiple of 3); set it to 2, or {INSTEAD.format(3)}",
        ),
        (
            Toy(),
            2,
            "strategy.tensor=2: the model has no nn.ModuleList or nn.Sequential with several blocks of one class; "
            f"{INSTEAD.format(2)}",
        ),
        (
            BlockDigits(hidden=24, dropout=0.0, normed=False),
            2,
            "strategy.tensor=2: 0% of the parameters of the blocks could be divided (the rest has no linear layers "
            f"that feed other ones alone); {INSTEAD.format(2)}",
        ),
    ],
    ids=["heads", "three", "no blocks", "no pairs"],
)
def test_a_model_that_cannot_be_divided_is_refused_with_what_to_set(job: Job, size: int, error: str) -> None:
    assert said(job, size) == ([error], ())


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        (("mlp.up mlp.down",), "'mlp.up mlp.down' is no pair; write it as in 'q + k + v -> out'"),
        (("mlp.u -> mlp.down",), "no block has the linear layers mlp.u -> mlp.down"),
        (
            ("mlp.up -> mlp.down",),
            "mlp.up -> mlp.down: with a part of the features, it raises RuntimeError: The size of tensor a (40) must "
            "match the size of tensor b (20) at non-singleton dimension 2; leave it out, or set it to auto",
        ),
    ],
)
def test_pairs_by_hand_are_proven_too(pairs: tuple[str, ...], error: str) -> None:
    assert said(llama(), 2, pairs) == ([f"strategy.tensor_pairs: {error}"], ())
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
