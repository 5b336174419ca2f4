"""Losses of divided logits are those of whole ones, which are gathered only if something else reads them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.compat.torch import FakeTensorMode
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.tensor import logits as divided
from orchestrator.model.tensor.logits import DividedLogits, Share

WORDS = 11
LABELS = torch.tensor([[3, 0, 10, -100, 7], [-100, 5, 6, 2, 2]])
FLAT = LABELS.flatten()
KNOWN = LABELS != -100
COUNTS = torch.arange(10.0, dtype=torch.float64)

OF_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: F.cross_entropy(x.flatten(0, 1), FLAT),
    "sum of shifted labels": lambda x: F.cross_entropy(
        x[:, :-1].reshape(-1, WORDS).double(), LABELS[:, 1:].flatten(), reduction="sum"
    ),
    "each row": lambda x: (F.cross_entropy(x.view(-1, x.size(-1)), FLAT, reduction="none") * COUNTS).sum(),
    "capped, smoothed": lambda x: F.cross_entropy(
        3 * (x / 3).tanh().view(-1, WORDS), FLAT, label_smoothing=0.1, ignore_index=-100
    ),
    "other ignored label": lambda x: F.cross_entropy(x.flatten(0, 1), FLAT.clamp(min=2), ignore_index=2),
    "module": lambda x: nn.CrossEntropyLoss()(x.flatten(end_dim=1), FLAT),
    "z-loss": lambda x: F.cross_entropy(x.flatten(0, 1), FLAT) + 0.1 * x.logsumexp(dim=-1).square().mean(),
    "kept axis": lambda x: torch.logsumexp(x, -1, keepdim=True).square().mean(),
    "log-likelihood": lambda x: F.nll_loss(F.log_softmax(x, dim=-1).view(-1, WORDS), FLAT),
    "picked": lambda x: (
        x.log_softmax(-1).gather(-1, LABELS.clamp(min=0)[..., None])[..., 0] * COUNTS.view(2, 5)
    ).sum(),
    "known labels": lambda x: F.cross_entropy(x[KNOWN], LABELS[KNOWN]),
    "ellipsis": lambda x: F.cross_entropy(x[..., :-1, :].flatten(0, 1), LABELS[:, 1:].flatten()),
    "last place": lambda x: F.cross_entropy(x[:, -1], LABELS[:, -1]),
    "bias": lambda x: F.cross_entropy((x + torch.arange(WORDS)).flatten(0, 1), FLAT),
    "masked words": lambda x: F.cross_entropy(
        x.masked_fill(torch.arange(WORDS) == 4, float("-inf")).flatten(0, 1), FLAT
    ),
    "words ruled out": lambda x: F.cross_entropy(x.flatten(0, 1) * 1e300, FLAT),
}
OF_THE_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": lambda x: (x.softmax(-1) * x.log_softmax(-1)).sum(),
    "weights of classes": lambda x: F.cross_entropy(x.flatten(0, 1), FLAT, weight=COUNTS.repeat(2)[:WORDS]),
    "other axis": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "fewer words": lambda x: F.cross_entropy(x[..., :8].reshape(-1, 8), FLAT.clamp(max=7)),
    "named arguments": lambda x: F.cross_entropy(torch.reshape(input=x, shape=(-1, WORDS)), FLAT),
    "one word": lambda x: x[..., 0].sum() + x[0, 0, 3],
    "other axis of numbers": lambda x: F.cross_entropy((x.flatten() + torch.arange(110)).view(10, WORDS), FLAT),
    "view that changes": lambda x: _with_changed_view(x.clone()),
}


def _with_changed_view(x: Tensor) -> Tensor:
    x.select(-1, 0).fill_(3.0)
    return F.cross_entropy(x.flatten(0, 1), FLAT)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("name", "whole_is_read"), [(n, False) for n in OF_PARTS] + [(n, True) for n in OF_THE_WHOLE])
def test_a_loss_and_its_gradient_are_those_of_the_whole(
    name: str, whole_is_read: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided, "CHUNK_ELEMENTS", 3 * WORDS // count)  # several chunks
    loss = {**OF_PARTS, **OF_THE_WHOLE}[name]
    values = torch.randn(2, 5, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = values.clone().requires_grad_()
    wanted = loss(whole)
    wanted.backward()

    def of_rank(index: int, peers: Peers) -> tuple[Tensor, Tensor | None, bool]:
        part = values.chunk(count, -1)[index].clone().requires_grad_()
        logits = DividedLogits.of(part, Share(index, count, peers, WORDS))
        assert logits.shape == values.shape
        assert logits.requires_grad
        found = loss(logits)
        found.backward()
        return found.detach(), part.grad, peers.gathered_logits

    for (found, gradient, gathered), expected in zip(
        in_lockstep(count, of_rank), whole.grad.chunk(count, -1), strict=True
    ):
        torch.testing.assert_close(found, wanted.detach())
        torch.testing.assert_close(gradient, expected)
        assert gathered is whole_is_read


Learned = Callable[[Tensor, nn.Parameter], Tensor]
LEARNED: dict[str, tuple[tuple[int, ...], Learned]] = {
    "factor": ((), lambda x, p: x * p),
    "factor first": ((), lambda x, p: p * x),
    "computed temperature": ((1,), lambda x, p: x / F.softplus(p)),
    "cap": ((), lambda x, p: (x / p).tanh() * p),
    "power": ((), lambda x, p: x.clamp(min=0.1) ** p),
    "bias of words": ((WORDS,), lambda x, p: x + p),
    "factor of tokens": ((5, 1), lambda x, p: p * x),
    "bias of tokens and words": ((5, WORDS), lambda x, p: p - x),
    "fill": ((), lambda x, p: torch.where(torch.arange(WORDS) % 3 == 0, p, x)),
    "read whole": ((WORDS,), lambda x, p: (x.softmax(-1) * p).log()),
}


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_and_meets_divided_logits_has_its_whole_gradient(name: str) -> None:
    shape, change = LEARNED[name]
    values = torch.randn(2, 5, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = torch.linspace(0.7, 1.4, max(1, torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)

    def gradient(x: Tensor) -> Tensor:
        learned = nn.Parameter(start.clone())
        F.cross_entropy(change(x, learned).reshape(-1, WORDS), FLAT).backward()
        return learned.grad

    wanted = gradient(values)

    def of_rank(index: int, peers: Peers) -> tuple[Tensor, bool]:
        part = values.chunk(2, -1)[index]
        found = gradient(DividedLogits.of(part, Share(index, 2, peers, WORDS)))
        return found, peers.gathered_logits

    for found, gathered in in_lockstep(2, of_rank):
        torch.testing.assert_close(found, wanted)
        assert gathered is (name == "read whole")


@pytest.mark.parametrize("label", [WORDS, WORDS + 1, -1, -100])
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=-7, label_smoothing=0.1),
        lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels, ignore_index=-7, reduction="sum"),
        lambda logits, labels: logits.gather(-1, labels[:, None]).sum(),
    ],
)
def test_a_label_that_is_no_word_is_an_error(loss: Callable[[Tensor, Tensor], Tensor], label: int) -> None:
    logits = DividedLogits.of(torch.randn(2, 6), Share(0, 2, Peers(), WORDS))
    with pytest.raises(IndexError, match=f"^{label} is out of bounds: the vocabulary has {WORDS} words"):
        loss(logits, torch.tensor([0, label]))


def test_a_change_in_place_is_refused() -> None:
    logits = DividedLogits.of(torch.randn(2, 6), Share(0, 2, Peers(), WORDS))
    with pytest.raises(TypeError, match="changes logits in place"):
        logits.mul_(2)


def test_hooks_see_the_gradient_that_reaches_the_part() -> None:
    part, seen = torch.randn(2, 6, requires_grad=True), []
    logits = DividedLogits.of(part * 1.0, Share(0, 2, Peers(), WORDS))
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    F.cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert seen == [(2, 6)]


def test_16_bit_logits_have_their_losses_in_32() -> None:
    part = torch.randn(2, 6, dtype=torch.bfloat16, requires_grad=True)
    loss = F.cross_entropy(DividedLogits.of(part, Share(0, 2, Peers(), WORDS)), torch.tensor([0, 1]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert part.grad.dtype == torch.bfloat16


def test_a_loss_without_memory_is_traced_as_it_is_computed() -> None:
    with FakeTensorMode():
        logits = DividedLogits.of(torch.empty(4, 6, requires_grad=True), Share(0, 2, Peers(), WORDS))
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        assert loss.shape == ()
        loss.backward()
        assert logits.softmax(-1).shape == (4, WORDS)
