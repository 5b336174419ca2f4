"""``job=gpt``: its model, its data, its schedule, and weights from and to Hugging Face."""

import functools
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from helpers.files.golden import Golden
from helpers.ranks.allocations import Allocations
from helpers.ranks.batches import read_by_all_ranks
from helpers.ranks.job_trials import errors, trained
from jobs import gpt
from jobs.gpt import GPT
from jobs.pretrained import save
from jobs.tokens import IGNORED
from jobs.transformer import SIZES, transformer

TINY = {"layers": 2, "width": 32, "heads": 2, "context": 16}
LLAMA = {**TINY, "variant": "llama", "heads": 4, "kv_heads": 2, "tied": True}
both = pytest.mark.parametrize("fields", [TINY, LLAMA], ids=["gpt2", "llama"])


@both
def test_learns(fields: dict[str, Any]) -> None:
    _, losses = trained(GPT(**fields), steps=30, batch=32)
    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
    assert losses[-1] < losses[0] - 1.5


@both
def test_sees_no_later_byte(fields: dict[str, Any]) -> None:
    job = GPT(**fields)
    torch.manual_seed(0)
    model = job.model().eval()
    text = torch.randint(256, (2, job.context))
    changed = text.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-4)


def test_can_be_cut_between_any_two_blocks() -> None:
    model = GPT(**TINY).model()
    assert isinstance(model, nn.Sequential)
    assert [name for name, _ in model.named_children()] == ["embed", "block0", "block1", "norm", "head"]
    text = torch.randint(256, (2, 16))
    for cut in range(1, len(model)):
        assert model[cut:](model[:cut](text)).equal(model(text))


@both
def test_documents_in_a_sample_do_not_see_each_other(fields: dict[str, Any]) -> None:
    job = GPT(**fields, end_token=0)
    torch.manual_seed(0)
    model: Any = job.model().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    documents = [torch.randint(1, 256, (2, length)) for length in (5, 2, 6)]
    end = torch.zeros(2, 1, dtype=torch.long)
    packed = model(torch.cat([documents[0], end, documents[1], end, documents[2]], dim=1))
    alone = [model(documents[0]), *(model(torch.cat([end, d], dim=1)) for d in documents[1:])]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)
    for cut in range(1, len(model)):
        torch.testing.assert_close(model[cut:](model[:cut](documents[0])), alone[0], rtol=0, atol=0)
    joined: Any = GPT(**fields).model().eval()
    joined.load_state_dict(model.state_dict())
    tokens = torch.cat([documents[0], end, documents[1]], dim=1)
    assert not torch.allclose(joined(tokens)[:, 6:], model(tokens)[:, 6:], atol=0.1)


@both
def test_padded_documents_have_the_predictions_of_packed_ones(tmp_path: Path, fields: dict[str, Any]) -> None:
    text = np.random.default_rng(0).integers(1, 256, 640)
    text[[3, 10, 11, 19, 30, 36, 300]] = 0
    np.save(tmp_path / "a.npy", text.astype(np.uint16))
    paths = {"path": str(tmp_path / "a.npy"), "val_path": str(tmp_path / "a.npy"), "end_token": 0, "vocabulary": 256}
    job = GPT(**{**fields, "context": 32}, **paths, documents="padded")  # type: ignore[arg-type]
    packed = replace(job, documents="packed")
    job.check()
    padded: Any = job.dataset("train")
    samples = [padded[i] for i in range(len(padded))]
    learned = torch.cat([target[target != IGNORED] for _, target in samples])
    assert learned.tolist() == text.tolist(), "each token is predicted once, in order"
    assert all((inputs[0] == 0) == first for (inputs, _), first in zip(samples, [True] * 7 + [False], strict=False))
    torch.manual_seed(0)
    model, other = packed.model().eval(), job.model().eval()
    other.load_state_dict(model.state_dict())
    window = torch.from_numpy(np.concatenate([[0], text[:31]]))[None]
    inputs, target = (torch.stack(parts) for parts in zip(*samples[:5], strict=True))
    with torch.no_grad():
        together, apart = model(window)[0], other(inputs)
    torch.testing.assert_close(apart[target != IGNORED], together[: int((target != IGNORED).sum())])
    assert int(job.weight(target)) == 31  # type: ignore[arg-type]
    _, losses = trained(job, steps=10, batch=8)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("documents", ["packed", "padded"])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_documents_continue_at_the_next_sample_with_other_workers(tmp_path: Path, documents: Any, dp_size: int) -> None:
    tokens = np.arange(1, 24 * 16 + 2)
    tokens[[3, 10, 11, 30, 36, 200, 300]] = 0
    path = str(tmp_path / "a.npy")
    np.save(path, tokens.astype(np.uint16))
    job = GPT(**TINY, path=path, val_path=path, end_token=0, vocabulary=400, documents=documents)
    samples: Any = job.dataset("train")
    numbers = {tuple(samples[i][1].tolist()): i for i in range(len(samples))}
    read = functools.partial(
        read_by_all_ranks,
        lambda: replace(job).dataset("train"),
        collate=lambda items: [numbers[tuple(target.tolist())] for _, target in items],
        global_batch_size=6,
    )
    whole, done = read(data_parallel_size=2, steps=6), 3
    rest = read(data_parallel_size=dp_size, samples_consumed=done * 6, steps=6 - done)
    assert rest == whole[done:]
    epoch = [number for step in [*whole[:done], *rest] for number in step][: len(samples)]
    assert sorted(epoch) == list(range(len(samples)))


def test_windows_cover_the_text_one_byte_ahead(tmp_path: Path) -> None:
    text = bytes(range(250)) * 8
    (tmp_path / "text").write_bytes(text)
    job = GPT(**TINY, path=str(tmp_path / "text"))
    train: Any = job.dataset("train")
    inputs = [i for k in range(len(train)) for i in train[k][0].tolist()]
    targets = [i for k in range(len(train)) for i in train[k][1].tolist()]
    assert inputs == list(text[: len(inputs)])
    assert targets == list(text[1 : len(inputs) + 1])
    assert 1800 - len(inputs) <= job.context
    assert job.dataset("val")[0][0].tolist() == list(text[1800:1816])


def test_reads_the_help_texts_of_python() -> None:
    from pydoc_data.topics import topics

    train: Any = GPT().dataset("train")
    assert bytes(train[0][0][:50].tolist()) == topics[min(topics)][:50].encode()
    assert len(train) * 64 > 300_000


def test_counts_accuracy_per_sample() -> None:
    job = GPT(**TINY)
    target = torch.randint(256, (3, job.context))
    output = nn.functional.one_hot(target, 256).float()
    output[0, : job.context // 2] = output[0, : job.context // 2].roll(1, dims=-1)
    assert float(job.metrics(output, target)["accuracy"]) == pytest.approx(2.5)


def test_the_cosine_warms_up_decays_and_survives_json() -> None:
    job = GPT(**TINY, warmup_steps=4)
    optimizer = job.optimizer(job.model().parameters())
    scheduler = job.scheduler(optimizer, 50)
    rates = []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates.index(max(rates)) == 4
    assert max(rates) == pytest.approx(job.lr)
    assert rates[:4] == sorted(rates[:4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(job.lr / 10)

    other = job.scheduler(job.optimizer(job.model().parameters()), 50)
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert other.get_last_lr() == scheduler.get_last_lr()


def test_the_text_is_drawn_from_the_generator() -> None:
    job = GPT(**TINY, dropout=0.5, sample_tokens=40)
    torch.manual_seed(0)
    model = job.model().eval()
    texts = [job.sample(model, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(t.encode(errors="replace")) >= 40 for t in texts)


def test_no_text_is_drawn_without_a_codec() -> None:
    assert GPT(**TINY).draws_samples
    assert not GPT(**TINY, sample_tokens=0).draws_samples
    assert not GPT(**{**TINY, "vocabulary": 300}).draws_samples, "whole models would be gathered for nothing"


def test_writes_from_its_last_context_bytes() -> None:
    job = GPT(**TINY, sample_tokens=20)
    model = job.model()
    lengths = []

    def look(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        lengths.append(inputs[0].shape[1])

    model.register_forward_hook(look)
    job.sample(model, torch.Generator().manual_seed(0))
    assert lengths == [*range(1, 17), 16, 16, 16, 16]


def test_refuses_a_text_that_is_too_short(tmp_path: Path) -> None:
    job = {"context": 16, "path": str(tmp_path / "text")}
    (tmp_path / "text").write_bytes(b"x" * 169)
    [error] = errors("jobs.gpt.GPT", **job)
    assert "job.path=" in error
    assert "170" in error
    (tmp_path / "text").write_bytes(b"x" * 170)
    assert errors("jobs.gpt.GPT", **job) == []
    assert len(GPT(**job).dataset("val")) == 1  # type: ignore[arg-type]


PUBLISHED = {
    **{"124m": 124_439_808, "350m": 354_823_168, "1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248},
    **{"70b": 70_553_706_496, "405b": 405_853_388_800},
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_have_the_published_numbers_of_parameters(size: Any) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in transformer(SIZES[size]).parameters()) == PUBLISHED[size]


def test_a_size_is_changed_field_by_field(tmp_path: Path) -> None:
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    path = str(tmp_path / "tokens.bin")
    a = GPT(size="1b", path=path, layers=2, width=256, heads=8, tied=False).architecture()
    assert (a.layers, a.width, a.hidden, a.heads, a.kv_heads, a.tied) == (2, 256, 1024, 8, 2, False)
    assert a.vocabulary == 128_256
    a = GPT(size="124m", variant="llama").architecture()
    assert (a.hidden, a.bias, a.vocabulary) == (2048, False, 256), "as many weights with a gate; a text has 256 tokens"


def test_only_matrices_decay() -> None:
    model = GPT(**TINY, size="124m").model()
    matrices, others = GPT(**TINY).optimizer(model.parameters()).param_groups
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_wsd_stays_and_then_falls() -> None:
    job = GPT(**TINY, warmup_steps=0, schedule="wsd")
    factor = job.scheduler(job.optimizer(job.model().parameters()), 100).lr_lambdas[0]
    assert [round(factor(step), 3) for step in (0, 80, 90, 100)] == [1, 1, 0.55, 0.1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_in_chunks_is_the_loss(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    target = torch.randint(50, (3, 7))
    target[0, 2:] = IGNORED
    results = []
    for elements in (10**9, 500):
        monkeypatch.setattr(gpt, "LOSS_ELEMENTS", elements)
        logits = torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        loss = GPT().loss(logits, target)
        (loss * 3).backward()
        results.append((loss.detach().float(), logits.grad))
    with torch.no_grad():
        results.append((GPT().loss(logits, target).float(), logits.grad))
    for loss, gradient in results[1:]:
        rtol, atol = (2e-2, 1e-3) if dtype is torch.bfloat16 else (1e-5, 1e-7)
        torch.testing.assert_close(loss, results[0][0], rtol=rtol, atol=0)
        torch.testing.assert_close(gradient, results[0][1], rtol=rtol, atol=atol)


def test_files_of_tokens_are_drawn_in_proportion(tmp_path: Path) -> None:
    np.arange(1700, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.arange(340, dtype=np.uint32))
    paths = (str(tmp_path / "a.bin"), str(tmp_path / "b.npy"))
    job = GPT(**TINY, vocabulary=5000, path=paths, path_weights=(1.0, 3.0))
    job.check()
    train: Any = job.dataset("train")
    assert len(train) == 95 + 19
    assert train[95][0].tolist() == list(range(16)), "the first window of the second file"
    weights = job.sample_weights("train")
    assert float(weights[95:].sum() / weights.sum()) == pytest.approx(0.75)
    assert job.dataset("val")[0][0][0] == 1530
    held_out = GPT(**TINY, vocabulary=5000, path=paths, val_path=paths[1])
    assert [len(held_out.dataset(split)) for split in ("train", "val")] == [106 + 21, 21]  # type: ignore[arg-type]


def test_tokens_that_the_model_does_not_know_are_named(tmp_path: Path, golden: Golden) -> None:
    np.array([0] * 100 + [300] + [0] * 100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    train: Any = GPT(**TINY, path=str(tmp_path / "tokens.bin"), vocabulary=300).dataset("train")
    train[0]
    with golden.raises(ValueError):
        train[6]


def test_tokens_that_the_model_does_not_know_are_refused_before_training(tmp_path: Path, golden: Golden) -> None:
    path = str(tmp_path / "tokens.bin")
    np.array([0] * 300 + [300], dtype=np.uint16).tofile(path)
    (error,) = errors("jobs.gpt.GPT", path=path, vocabulary=300, context=16)
    golden.says(error)
    assert errors("jobs.gpt.GPT", path=path, vocabulary=301, context=16) == []


def npy(array: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("odd.bin", b"123", "3 bytes are no whole number of uint16 tokens"),
        ("empty.bin", b"", "has 0 tokens"),
        ("floats.npy", npy(np.zeros(500)), "holds float64"),
        ("cut.npy", npy(np.zeros(500, np.uint16))[:-1], "is no whole .npy file: it is cut short, or damaged;"),
        ("empty.npy", b"", "is no whole .npy file: it is cut short, or damaged;"),
        ("text.npy", b"a text", "is no whole .npy file: it is cut short, or damaged;"),
        ("wide.bin", np.arange(200_000, dtype=np.uint32).tobytes(), "holds uint32 and not uint16 (job.dtype), "),
    ],
)
def test_a_damaged_file_of_tokens_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    [error] = errors("jobs.gpt.GPT", path=str(tmp_path / name))
    assert error.startswith(f"job.path={tmp_path / name}: {reason}")


ROPE = {"rope_theta": 5e5, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def hugging_face_model(kind: str) -> nn.Module:
    """A small model with random weights, which would be hidden by a mistake in any part of it if they were smaller."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 97, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=32, n_embd=48, n_layer=3, n_head=4, **common)
        return transformers.GPT2LMHeadModel(config)
    rope = {"llama": {"rope_type": "default", "rope_theta": 1e4},
            "llama 3.1": {"rope_type": "llama3", "factor": 8.0, **ROPE},
            "llama, linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}[kind]  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80,
        max_position_embeddings=64, rope_parameters=rope, tie_word_embeddings=kind == "llama 3.1", **common,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama 3.1", "llama, linear"])
def test_weights_of_hugging_face_give_its_logits_and_go_back(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    made: Any = hugging_face_model(kind).to(dtype)
    made.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    theirs = type(made).from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    np.arange(900, dtype=np.uint16).__mod__(97).tofile(tmp_path / "tokens.bin")
    job = GPT(weights=str(tmp_path / "theirs"), path=str(tmp_path / "tokens.bin"), context=16)
    job.check()
    ours = job.model().eval()
    tokens = torch.randint(97, (2, 30))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)
        job.export(ours.state_dict(), tmp_path / "back", "hf")
        with Allocations() as used:
            save(ours.state_dict(), job.architecture(), tmp_path / "files", file_bytes=30_000)
        assert used.peak_bytes <= 80_000, "a file, and the tensor that was too large for it"
        for name in ("back", "files"):
            back = type(theirs).from_pretrained(tmp_path / name).eval()
            torch.testing.assert_close(back(tokens).logits, expected, rtol=0, atol=0)
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert (back.config.bos_token_id, back.config.eos_token_id) == (0, 0), "as in theirs"


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    hugging_face_model("llama").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    np.arange(900, dtype=np.uint16).__mod__(97).tofile(tmp_path / "tokens.bin")
    fields = {"weights": str(tmp_path / "model"), "path": str(tmp_path / "tokens.bin"), "context": 16}
    assert errors("jobs.gpt.GPT", **fields) == []
    key = f"job.weights={tmp_path / 'model'}"
    assert errors("jobs.gpt.GPT", **fields, layers=4) == [f"job.layers=4: the model of {key} has 3; leave it out"]
    (error,) = errors("jobs.gpt.GPT", **{**fields, "path": None})
    assert "its tokens are not bytes" in error
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for change, reason in (
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing, and 8 more"),
        ({"intermediate_size": 81}, "gives block0.mlp.gate.weight the shape [80, 48], not [81, 48], and 8 more"),
        ({"model_type": "bert"}, "model_type=bert: only gpt2 and llama can be read"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu: only silu can be read"),
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | change))
        (error,) = errors("jobs.gpt.GPT", **fields)
        assert error.startswith(f"{key}: "), error
        assert reason in error, error


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros(900, np.uint16))
    job = GPT(**TINY, vocabulary=97, path=str(tmp_path / "tokens.npy"))
    save(job.model().state_dict(), job.architecture(), tmp_path / "model")
    fields = {"weights": str(tmp_path / "model"), "path": job.path, "context": 16}
    assert errors("jobs.gpt.GPT", **fields) == []
    weights, config = (tmp_path / "model" / name for name in ("model.safetensors", "config.json"))
    whole, known = weights.read_bytes(), json.loads(config.read_text())
    damaged = "model.safetensors is cut short, or no safetensors file"
    without_width = {key: value for key, value in known.items() if key != "n_embd"}
    for data, settings, reason in (
        (whole[:-1], known, damaged),
        (whole[:100], known, damaged),
        (b"", known, damaged),
        (b"version https://git-lfs.github.com/spec/v1", known, damaged),
        (whole.replace(b'"F32"', b'"I32"'), known, "transformer.wte.weight is of I32, and only F64, F32, F16, BF16"),
        (None, known, "has no model.safetensors; "),
        (whole, without_width, "config.json: has no n_embd; "),
        (whole, known | {"scale_attn_by_inverse_layer_idx": True}, "only False can be read; "),
    ):
        if data is None:
            weights.unlink()
        else:
            weights.write_bytes(data)
        config.write_text(json.dumps(settings))
        (error,) = errors("jobs.gpt.GPT", **fields)
        assert error.startswith(f"job.weights={tmp_path / 'model'}: "), error
        assert reason in error, error


def test_what_is_beside_the_weights_goes_along(tmp_path: Path) -> None:
    """Tokenizers may be in several files, and a chat template in one of its own."""
    job = GPT(variant="llama", layers=1, width=8, heads=2, context=8, vocabulary=16)
    job.export(job.model().state_dict(), tmp_path / "first", "hf")
    names = {"vocab.json", "merges.txt", "spiece.model", "chat_template.jinja", "generation_config.json"}
    for name in names | {"special_tokens_map.json", "optimizer.pt"}:
        (tmp_path / "first" / name).write_text("{}")
    (tmp_path / "a.npy").touch()
    further = replace(job, weights=str(tmp_path / "first"), path=str(tmp_path / "a.npy"))
    further.export(job.model().state_dict(), tmp_path / "second", "hf")
    written = {file.name for file in (tmp_path / "second").iterdir()}
    assert written == names | {"special_tokens_map.json", "config.json", "model.safetensors"}
