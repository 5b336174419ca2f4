"""Embeddings and output layers divided by rows compute the same, and are divided only if nothing else reads them."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.model.partial_init import build_fake
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.tensor.vocabulary import DirectUses, divide_rows, vocabularies

WORDS, WIDTH = 11, 6


class Scaled(nn.Embedding):
    """As that of Gemma."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(3.0).to(self.weight.dtype)


class Centred(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) - self.weight.mean(dim=0)


class Language(nn.Module):
    """``direct``: the output layer is no module, but reads the weight of the embedding."""

    def __init__(
        self,
        *,
        tied: bool = False,
        bias: bool = False,
        padding: int | None = None,
        direct: bool = False,
        kind: type[nn.Embedding] = nn.Embedding,
    ):
        super().__init__()
        self.embed = kind(WORDS, WIDTH, padding_idx=padding)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.direct = direct
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.inner(self.embed(words)).tanh()
        return F.linear(x, self.embed.weight) if self.direct else self.head(x)


@pytest.mark.parametrize(("count", "divided_logits"), [(2, False), (3, True)])
@pytest.mark.parametrize(
    "model",
    [
        Language(),
        Language(tied=True),
        Language(bias=True, padding=7),
        Language(tied=True, bias=True, padding=0),
        Language(tied=True, kind=Scaled),
    ],
    ids=["plain", "tied", "bias and padding", "tied with padding", "scaled"],
)
def test_outputs_and_gradients_of_the_parts_are_those_of_the_whole(
    model: Language, count: int, divided_logits: bool
) -> None:
    words = torch.arange(WORDS).repeat(2, 1)
    names = list(vocabularies(model, [], count))
    assert names == ["embed", "head"]
    model.zero_grad()
    whole = model(words)
    F.cross_entropy(whole.flatten(0, 1), words.flatten()).backward()

    def of_rank(index: int, peers: Peers) -> tuple[Tensor, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        divide_rows(own, names, index=index, count=count, peers=peers, divided_logits=divided_logits)
        own.zero_grad()
        out = own(words)
        F.cross_entropy(out.flatten(0, 1), words.flatten()).backward()
        out = torch.cat([out.detach()])  # which reads all words
        return out, {name: p.grad for name, p in own.named_parameters() if p.grad is not None}

    for index, (out, gradients) in enumerate(in_lockstep(count, of_rank)):
        torch.testing.assert_close(out, whole.detach())
        for name, parameter in model.named_parameters():
            expected = parameter.grad
            divided = name.split(".")[0] in names
            part = expected.chunk(count)[index] if divided else expected
            torch.testing.assert_close(gradients[name], part)


def test_too_few_rows_and_modules_of_other_kinds_stay_whole() -> None:
    assert vocabularies(Language(), [], 7) == {}
    sparse = nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WORDS))
    assert vocabularies(sparse, [], 2) == {}
    assert vocabularies(Language(tied=True, kind=Centred), [], 2) == {}, "its vectors depend on all rows"
    model = Language(tied=True)
    assert vocabularies(model, [model.head], 2) == {}, "a module that is divided and one that is not have one weight"


@pytest.mark.parametrize("direct", [False, True])
def test_a_weight_that_is_read_outside_of_its_module_is_found(direct: bool) -> None:
    whole = build_fake(lambda: Language(direct=direct), torch.device("cpu"))
    modules = vocabularies(whole.model, [], 2)
    uses = DirectUses(modules.values())
    with whole.mode, uses.watched():
        whole.model(whole.fake_like(torch.arange(4)[None]))
    assert uses.found == ({modules["embed"]} if direct else set())


@pytest.mark.parametrize("word", [-1, WORDS, WORDS + 1])
@pytest.mark.parametrize("count", [2, 4])
def test_a_word_that_no_part_has_is_an_error(count: int, word: int) -> None:
    def of_rank(index: int, peers: Peers) -> Tensor:
        model = Language()
        divide_rows(model, ["embed", "head"], index=index, count=count, peers=peers, divided_logits=True)
        return model(torch.tensor([[0, word]]))

    with pytest.raises(IndexError, match=f"^{word} is out of bounds"):
        in_lockstep(count, of_rank)
