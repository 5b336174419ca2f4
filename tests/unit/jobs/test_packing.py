"""``job.packing``: several examples in one sample have the losses and gradients that they have one by one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.models.small_hf import COMMON, byte_tokenizer, llama
from jobs.hf import HuggingFace
from jobs.packing import best_fit, refusal, smaller
from jobs.tokens import IGNORED

pytestmark = pytest.mark.slow  # the import of transformers
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("room", [5, 16, 99])
def test_each_example_is_in_one_sample_that_has_room(room: int) -> None:
    draw = random.Random(room)
    sizes = [draw.randint(1, room) for _ in range(300)]
    packs = best_fit(sizes, room)
    assert sorted(number for pack in packs for number in pack) == list(range(300))
    assert all(sum(sizes[number] for number in pack) <= room for pack in packs)
    assert len(packs) <= 1.1 * sum(sizes) / room + 1
    assert best_fit([], room) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packing")
    llama().save_pretrained(made / "model")
    byte_tokenizer().save_pretrained(made / "model")
    turns = [[f"{a}+{b}", str(a + b), "so " * (a % 3) + "?", f"yes {b}"] for a in range(5) for b in range(7)]
    roles = ("user", "assistant") * 2
    chats = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, t, strict=True)]} for t in turns]
    (made / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    texts = [{"text": "ab " * (a + b)} for a in range(1, 6) for b in range(7)]
    (made / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return made


def sums(job: HuggingFace, model: nn.Module, split: str) -> tuple[torch.Tensor, int, list[torch.Tensor], int]:
    """The summed loss of a split, its weight, the gradients, and the number of samples."""
    model.zero_grad()
    dataset: Any = job.dataset(split)
    loss, weight = torch.zeros(()), 0
    for first in range(0, len(dataset), 3):
        batch = job.collate([dataset[i] for i in range(first, min(first + 3, len(dataset)))])
        own = int(job.weight(batch))
        part = job.loss(model(batch), batch) * own
        part.backward()
        loss, weight = loss + part.detach(), weight + own
    return loss, weight, [p.grad.clone() for p in model.parameters() if p.grad is not None], len(dataset)


@pytest.mark.parametrize("data", ["chats", "texts"])
@pytest.mark.parametrize("padded", [True, False])
def test_losses_and_gradients_are_those_of_separate_examples(folder: Path, data: str, padded: bool) -> None:
    fields: dict[str, Any] = {"model_name_or_path": str(folder / "model"), "train_file": str(folder / f"{data}.jsonl")}
    fields |= {"block_size": 48, "assistant_only_loss": True, "pad_to_max_length": padded}
    fields |= {"validation_split_percentage": 30}
    alone, packed = (HuggingFace(**fields, packing=packing) for packing in (False, True))
    packed.check()
    model = alone.model().eval()
    for split in ("train", "val"):
        loss, weight, gradients, samples = sums(alone, model, split)
        loss_packed, weight_packed, gradients_packed, samples_packed = sums(packed, model, split)
        assert (weight_packed, samples_packed < samples) == (weight, True)
        torch.testing.assert_close(loss_packed, loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradients_packed, gradients, rtol=1e-4, atol=1e-5)
    train: Any = packed.dataset("train")
    assert all(len(train[i]["labels"]) <= 48 and train[i]["labels"][0] == IGNORED for i in range(len(train)))
    assert "\n" in (packed.sample(model, torch.Generator()) or ""), "answers are those of single examples"


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, None),
        ("MistralConfig", {**SMALL, "intermediate_size": 64, "sliding_window": 4}, None),
        ("MixtralConfig", {**SMALL, "intermediate_size": 64, "num_local_experts": 2}, None),
        ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "it lets an example see those before it"),
        ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1}, "it lets an example see those before it"),
        ("XLNetConfig", {"d_model": 32, "n_layer": 1, "n_head": 4}, "packed examples cannot be tried: "),
    ],
)
def test_a_model_that_mixes_examples_is_refused(name: str, options: dict[str, Any], refused: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**COMMON, **options)
    assert (refusal(config, 0) or "None").startswith(str(refused))


def test_a_large_model_is_tried_smaller() -> None:
    transformers = pytest.importorskip("transformers")
    kinds = ["sliding_attention", "full_attention"] * 6
    options = {**SMALL, "num_hidden_layers": 12, "intermediate_size": 2**16, "layer_types": kinds, "vocab_size": 2**17}
    config = transformers.Qwen3Config(**options, head_dim=8, sliding_window=4, use_sliding_window=True)
    made = smaller(config)
    assert (made.num_hidden_layers, made.layer_types, made.vocab_size) == (4, kinds[:4], 256)
    assert config.num_hidden_layers == 12
    assert refusal(config, 10**9) is None
