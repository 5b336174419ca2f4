"""The ports of docs/ports.md: the same losses under every strategy that the pages name."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import digits_gan
import digits_job
import digits_script
import streamed_lines
from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import pipeline
from helpers.conformance.training import Steps, losses, train
from helpers.jobs import port_jobs
from helpers.ranks.gang import Gang
from helpers.ranks.job_trials import one_thread
from helpers.ranks.loops import evaluation, losses_by_step, run_loop
from helpers.records.runs import in_campaign
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state.checkpoint import load

MISSING = "the optional packages are missing: pip install -e '.[hf]'"
SHORT = having(steps=4, global_batch_size=16)
ROUNDING = 1e-5
"""For four steps of AdamW as well, whose updates do not magnify rounding so early."""


def digits(**fields: Any) -> tuple[Job, Any]:
    return digits_job.Digits(**fields), "auto"


def vit(**fields: Any) -> tuple[Job, Any]:
    pytest.importorskip("transformers", reason=MISSING)
    import vit_digits

    return vit_digits.ViT(**fields), ("vit.layers.2",)


def vit_cut_automatically() -> tuple[Job, Any]:
    return vit()[0], "auto"


def lora(**fields: Any) -> tuple[Job, Any]:
    pytest.importorskip("transformers", reason=MISSING)
    pytest.importorskip("peft", reason=MISSING)
    import gpt2_lora

    return gpt2_lora.LoRA(**fields), ("model.base_model.model.transformer.h.2",)


def lines(**fields: Any) -> tuple[Job, Any]:
    return streamed_lines.Lines(length=20, width=16, **fields), "auto"


def hugging_face_lines(**fields: Any) -> tuple[Job, Any]:
    pytest.importorskip("datasets", reason=MISSING)
    return lines(hugging_face=True, **fields)


def gan(**fields: Any) -> tuple[Job, Any]:
    return digits_gan.GAN(**fields), None


def nanogpt(folder: Path) -> Job:
    tokens = (np.arange(2000) * 7 % 61).astype(np.uint16)
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")
    return port_jobs.NanoGPT(data=str(folder), vocab_size=64, block_size=12, warmup_iters=1, batch_size=4, eval_iters=2)


def causal_lm(folder: Path) -> Job:
    pytest.importorskip("transformers", reason=MISSING)
    import run_clm_job

    save_tokenizer(folder / "tokenizer")
    (folder / "text").write_text("".join(f"{a} + {a} = {2 * a}\n" for a in range(60)))
    return run_clm_job.InScriptOrder(
        config_overrides="vocab_size=256,n_positions=32,n_embd=16,n_layer=2,n_head=2,resid_pdrop=0.0,embd_pdrop=0.0,"
        "attn_pdrop=0.0,bos_token_id=0,eos_token_id=0",
        tokenizer_name=str(folder / "tokenizer"),
        train_file=str(folder / "text"),
        validation_file=str(folder / "text"),
        block_size=16,
    )


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are bytes."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def trained(gang: Gang, job: Job, options: StrategyConfig = DDP, world_size: int = 1) -> list[Steps]:
    return gang.run(train, Case(job=job, train=SHORT, options=options), world_size=world_size)


def assert_equal_losses(gang: Gang, job: Job, split: Any) -> None:
    (alone,) = trained(gang, job)
    expected = losses([alone])
    assert len(set(expected.tolist())) == SHORT.steps, "nothing was learned, so nothing is compared"
    strategies = {"ddp": DDP} if split is None else {"ddp": DDP, "pipeline": pipeline("1F1B", 4, split)}
    for name, options in strategies.items():
        found = losses(trained(gang, job, options, world_size=2))
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def text_files(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        rows = (f"{number} {word} {'ab' * (row % 7)}" for row, word in enumerate(dir(str)))
        (folder / f"{number}.txt").write_text("\n\n".join(rows))
    return str(folder)


@pytest.mark.parametrize("port", [digits, gan, *in_campaign(vit_cut_automatically, vit, lora)])
def test_a_port_has_the_losses_of_one_worker(gang: Gang, port: Callable[..., tuple[Job, Any]]) -> None:
    assert_equal_losses(gang, *port())


@pytest.mark.parametrize("port", [nanogpt, *in_campaign(causal_lm)])
def test_the_port_of_a_language_model_has_the_losses_of_one_worker(
    gang: Gang, tmp_path: Path, port: Callable[[Path], Job]
) -> None:
    assert_equal_losses(gang, port(tmp_path), "auto")


def test_the_port_of_the_imagenet_example_has_the_losses_of_one_worker(gang: Gang) -> None:
    job = port_jobs.ImageNet(data="")
    (alone,) = trained(gang, job)
    found = trained(gang, job, replace(DDP, sync_batchnorm=True), world_size=2)
    torch.testing.assert_close(losses(found), losses([alone]), rtol=ROUNDING, atol=0)


def test_the_blocks_of_nanogpt_are_those_of_its_script_and_go_on_after_a_resume(tmp_path: Path) -> None:
    """The script draws a first batch, and two batches of each split for an evaluation before the next one."""
    job = nanogpt(tmp_path)
    torch.manual_seed(1337)
    job.model()
    count = 2000 - 12
    drawn = [torch.randint(count, (4,)) for _ in range(7)]
    expected = torch.cat([drawn[0], *drawn[5:]]).tolist()
    tokens = np.arange(2000) * 7 % 61
    stream = job.dataset("train")
    samples = iter(stream)
    for start in expected[:6]:
        assert next(samples)["idx"].tolist() == tokens[start : start + 12].tolist()
    resumed = job.dataset("train")
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert torch.equal(next(iter(resumed))["targets"], next(samples)["targets"])


@pytest.mark.parametrize("port", [lines, *in_campaign(hugging_face_lines)])
def test_a_streamed_port_has_the_losses_of_one_worker(
    gang: Gang, port: Callable[..., tuple[Job, Any]], text_files: str
) -> None:
    assert_equal_losses(gang, *port(folder=text_files))


def test_the_script_and_its_port_have_one_curve(gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with one_thread():
        digits_script.main(["--epochs", "2", "--width", "4"])
    table = list(csv.reader(Path("losses.csv").read_text().splitlines()))
    script = {kind: {int(step): float(loss) for k, step, loss in table if k == kind} for kind in ("train", "val")}
    assert list(script["train"]) == list(range(1, 51))
    settings = having(steps=50, global_batch_size=60, clip_norm=1.0, eval_every=25)
    case = Case(job=digits_job.InScriptOrder(width=4), train=settings, seed=0)
    (ran,) = gang.run(run_loop, case, tmp_path, world_size=1)
    assert losses_by_step([ran]) == pytest.approx(script["train"], rel=ROUNDING)
    val = {p.step: p.loss_sum / p.weight for p in ran.points if isinstance(p, EvalPoint)}
    assert val == pytest.approx(script["val"], rel=ROUNDING)
    in_own_order = replace(case, job=digits_job.Digits(width=4))
    (other,) = gang.run(run_loop, in_own_order, tmp_path / "own", world_size=1)
    assert abs(losses_by_step([other])[1] - script["train"][1]) > 1e-3, "the order makes no difference"


@pytest.mark.parametrize("port", [hugging_face_lines, *in_campaign(lines)])
def test_a_streamed_run_resumes_at_the_next_line(
    gang: Gang, tmp_path: Path, text_files: str, port: Callable[..., tuple[Job, Any]]
) -> None:
    job, _ = port(folder=text_files)
    settings = having(steps=14, global_batch_size=25, eval_every=7)

    def loop(world_size: int, checkpoint: Path | None, every: int) -> Any:
        case = Case(job=job, options=DDP, train=settings)
        folder = tmp_path / f"{world_size}{checkpoint is None}"
        return gang.run(run_loop, case, folder, checkpoint, every, world_size=world_size)

    whole = loop(2, None, 10)
    (checkpoint,) = (tmp_path / "2True" / "checkpoints").glob("step-*10")
    resumed = loop(1, checkpoint, 0)
    rest = {step: loss for step, loss in losses_by_step(whole).items() if step > 10}
    assert losses_by_step(resumed) == pytest.approx(rest, rel=ROUNDING)
    assert evaluation(resumed) == pytest.approx(evaluation(whole), rel=ROUNDING)
    assert not any(ran.warnings for ran in resumed), "lines were read again"
    assert "train/epoch" not in whole[0].points[0].metrics


def test_the_gan_draws_images_and_learns_from_new_noise_in_each_epoch() -> None:
    job = digits_gan.GAN()
    images = job.sample(job.model(), torch.Generator().manual_seed(0))["digits"]
    assert images.shape == (16, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    stream = job.dataset("train")
    epochs = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        epochs.append(torch.stack([noise for _, noise in stream]))
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pretrained models, as ``from_pretrained`` takes it."""
    transformers = pytest.importorskip("transformers", reason=MISSING)
    folder = tmp_path_factory.mktemp("hub")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=300,
                n_positions=64,
                n_embd=32,
                n_layer=3,
                n_head=2,
                bos_token_id=0,
                eos_token_id=0,
                embd_pdrop=0,
                attn_pdrop=0,
                resid_pdrop=0,
            )
        ).save_pretrained(folder / "gpt2")
        sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_attention_heads": 2}
        transformers.ViTForImageClassification(
            transformers.ViTConfig(**sizes, num_hidden_layers=3, intermediate_size=32, num_labels=3)
        ).save_pretrained(folder / "vit")
    save_tokenizer(folder / "gpt2")
    return folder


@pytest.mark.parametrize(("port", "name"), [(vit, "vit"), *in_campaign((lora, "gpt2"))])
def test_pretrained_weights_are_those_of_the_folder(
    gang: Gang, hub: Path, port: Callable[..., tuple[Job, Any]], name: str
) -> None:
    transformers = pytest.importorskip("transformers", reason=MISSING)
    job, split = port(pretrained=str(hub / name))
    pretrained = {"gpt2": "GPT2LMHeadModel", "vit": "ViTForImageClassification"}[name]
    expected = getattr(transformers, pretrained).from_pretrained(hub / name).state_dict()
    modes = {module.training for module in job.model().modules()}
    assert len(modes) == 1, "a part of the model would be trained in eval mode"
    built = {
        key.replace(".base_layer", "").removeprefix("model.base_model.model."): value
        for key, value in job.model().state_dict().items()
    }
    assert expected.keys() <= built.keys()
    new = {key for key, value in expected.items() if not torch.equal(value, built[key])}
    assert new == ({"classifier.weight", "classifier.bias"} if name == "vit" else set())
    assert_equal_losses(gang, job, split)


@pytest.mark.campaign  # ``test_model_zoo.py`` trains adapters
def test_adapters_are_saved_from_a_checkpoint(gang: Gang, hub: Path, tmp_path: Path) -> None:
    job, split = lora(pretrained=str(hub / "gpt2"))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case = Case(job=job, options=pipeline("1F1B", 4, split), train=replace(SHORT, eval_every=0))
    gang.run(run_loop, case, tmp_path, world_size=2)
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    model: Any = job.model()
    model.load_state_dict(dict(load(checkpoint).model))
    model.model.save_pretrained(tmp_path / "adapters")
    base: nn.Module = AutoModelForCausalLM.from_pretrained(hub / "gpt2")
    tokens = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        after, expected = adapted(tokens).logits, model.eval().model(tokens).logits
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)
