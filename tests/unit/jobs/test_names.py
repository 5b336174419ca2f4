"""Names of unequal length: padding changes nothing, and the model learns to spell."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.files.golden import Golden
from helpers.ranks.job_trials import accuracy, errors, one_thread, trained
from jobs.names import Names, Speller, pad

TOWNS = [b"Ulm", b"Rome", b"Reykjav\xc3\xadk", b"Aix-en-Provence", b"New York"]


def small(**fields: Any) -> Names:
    return Names(**{"width": 16, **fields})


def batch(names: list[bytes], path: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    path.write_bytes(b"\n".join(names))
    dataset: Any = small(path=str(path)).dataset("train")
    assert len(dataset) == len(names), "too few for a validation set"
    return pad([dataset[i] for i in range(len(dataset))])


def test_the_names_are_those_that_python_defines() -> None:
    names = Names().names()
    assert names == sorted(set(names))
    assert {b"dataclass", b"deepcopy", b"TemporaryDirectory"} <= set(names)
    assert len(names) > 3000
    assert all(name.decode().isidentifier() for name in names)


def test_the_split_is_whole_and_fixed() -> None:
    def names(seed: int) -> list[list[bytes]]:
        torch.manual_seed(seed)
        return [Names().dataset(split).names for split in ("train", "val")]  # type: ignore[attr-defined]

    train, val = names(0)
    assert names(1) == [train, val]
    assert sorted(train + val) == Names().names()
    assert len(val) == len(Names().names()) // 10


def test_names_of_a_file_are_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "towns"
    file.write_bytes(b"  Ulm \r\n\nRome\nUlm\n\nNew York")
    assert small(path=str(file)).names() == [b"New York", b"Rome", b"Ulm"]


def test_a_name_begins_and_ends_with_a_newline_and_its_target_is_one_byte_ahead(tmp_path: Path) -> None:
    (inputs, lengths), targets = batch(TOWNS, tmp_path / "towns")
    longest = max(map(len, TOWNS)) + 1
    assert inputs.shape == targets.shape == (5, longest)
    found = set()
    for text, length, target in zip(inputs, lengths, targets, strict=True):
        name = bytes(target[: length - 1].tolist())
        found.add(name)
        assert bytes(text[:length].tolist()) == b"\n" + name
        assert target[length - 1] == ord("\n")
        assert (target[length:] == -100).all()
        assert (text[length:] == ord("\n")).all()
    assert found == set(TOWNS)


@one_thread()
def test_padding_changes_nothing(tmp_path: Path) -> None:
    job = small()
    torch.manual_seed(0)
    model = job.model()
    (inputs, lengths), targets = batch(TOWNS, tmp_path / "towns")
    output = model((inputs, lengths))
    summed, right, counted = torch.zeros(()), torch.zeros(()), 0
    for row, length in enumerate(lengths.tolist()):
        text, target = inputs[row : row + 1, :length], targets[row : row + 1, :length]
        alone = model((text, lengths[row : row + 1]))
        torch.testing.assert_close(output[row : row + 1, :length], alone, rtol=1e-5, atol=1e-6)
        summed += job.loss(alone, target) * length
        right += job.metrics(alone, target)["accuracy"]
        counted += length
    assert int(job.weight(targets)) == counted == sum(len(name) + 1 for name in TOWNS)
    torch.testing.assert_close(job.loss(output, targets), summed / counted)
    assert job.metrics(output, targets)["accuracy"] == right


def test_padding_is_not_computed(tmp_path: Path) -> None:
    model = small().model()
    steps = []
    assert isinstance(model, Speller)
    model.lstm.register_forward_pre_hook(lambda module, inputs: steps.append(len(inputs[0].data)))
    (inputs, lengths), _ = batch(TOWNS, tmp_path / "towns")
    model((inputs, lengths))
    assert steps == [int(lengths.sum())]


@pytest.mark.slow
def test_it_learns_to_spell() -> None:
    job = small(width=32)
    model, losses = trained(job, steps=60, batch=64)
    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.2)
    assert losses[-1] < losses[0] - 2
    assert accuracy(job, model) > 0.15


@one_thread()
def test_made_up_names_are_drawn_from_the_generator() -> None:
    job = small(sample_names=6, sample_bytes=12)
    torch.manual_seed(0)
    model = job.model()
    texts = [job.sample(model, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.count("\n") == 5 for text in texts)


def test_a_low_temperature_spells_what_is_most_likely() -> None:
    class Alphabet(nn.Module):
        """After a newline a is likely, b after a, and so on to e; then the name ends."""

        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(()))

        def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            texts, lengths = batch
            assert lengths.tolist() == [texts.shape[1]] * len(texts)
            following = torch.where(texts == ord("\n"), ord("a"), torch.where(texts < ord("e"), texts + 1, ord("\n")))
            return nn.functional.one_hot(following, 256).float() + self.nothing

    cold, hot = (small(sample_names=3, temperature=t) for t in (0.01, 100.0))
    assert cold.sample(Alphabet(), torch.Generator().manual_seed(0)) == "abcde\nabcde\nabcde"
    assert "abcde" not in hot.sample(Alphabet(), torch.Generator().manual_seed(0))


def test_a_name_that_does_not_end_is_cut() -> None:
    class Endless(Speller):
        def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return nn.functional.one_hot(torch.full_like(batch[0], ord("z")), 256) * 1e4

    job = small(sample_names=2, sample_bytes=7)
    assert job.sample(Endless(width=4, layers=1), torch.Generator()) == "zzzzzzz\nzzzzzzz"


def test_a_file_with_too_few_names_is_refused(tmp_path: Path, golden: Golden) -> None:
    file = tmp_path / "names"
    file.write_bytes(b"\n".join(b"%d" % i for i in range(9)) + b"\n3\n")
    [error] = errors("jobs.names.Names", path=str(file))
    golden.says(error)
    file.write_bytes(b"\n".join(b"%d" % i for i in range(10)))
    assert errors("jobs.names.Names", path=str(file)) == []
    assert len(small(path=str(file)).dataset("val")) == 1  # type: ignore[arg-type]
