"""``job=hf job.task=dpo``: losses, norms and rewards of the published formula and of ``trl``; damaged pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.files.golden import Golden
from helpers.jobs.preference_jobs import PAIRS, Preferences, chat_of, preferences
from helpers.models.small_hf import byte_tokenizer
from helpers.ranks.job_trials import errors, one_thread

pytestmark = pytest.mark.slow  # the import of transformers
STEPS, BATCH = 5, 8


@pytest.fixture(autouse=True)
def packages() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")


@one_thread()
def trained_steps(job: Preferences) -> list[dict[str, float]]:
    """The loss, the gradient norm and the rewards of each step, with the pairs in the order of the file."""
    torch.manual_seed(0)
    model: Any = job.model()
    train: Any = job.dataset("train")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = job.optimizer(parameters), []
    for step in range(STEPS):
        batch = job.collate([train[i] for i in range(step * BATCH, (step + 1) * BATCH)])
        ratios = model(batch)
        loss = job.loss(ratios, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        rewards = {name: float(value) / BATCH for name, value in job.train_metrics(ratios.detach(), batch).items()}
        found.append({"loss": float(loss), "grad_norm": float(norm), **rewards})
    return found


def assert_steps(found: list[dict[str, float]], expected: list[dict[str, Any]]) -> None:
    assert found[-1]["loss"] < found[0]["loss"] == pytest.approx(0.6931472), "nothing was learned"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(float(theirs["loss"]), abs=1e-6)
        for name in ours.keys() & theirs.keys():
            assert ours[name] == pytest.approx(float(theirs[name]), rel=1e-4, abs=2e-6), name


def of_the_paper(job: Preferences) -> list[dict[str, float]]:
    """Train by equation 7 of arXiv:2305.18290, pair by pair and without padding, on a whole model and its copy."""
    import transformers

    policy, reference = (transformers.AutoModelForCausalLM.from_pretrained(job.model_name_or_path) for _ in range(2))
    optimizer, found, tokenizer = job.optimizer(policy.parameters()), [], byte_tokenizer()

    def log_probability(model: Any, prompt: str, answer: str) -> Tensor:
        tokens = torch.tensor([tokenizer(f"{prompt}{answer}<end>")["input_ids"]])
        scores = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
        return scores[len(tokenizer(prompt)["input_ids"]) - 1 :].sum()

    for step in range(STEPS):
        losses = []
        for pair in PAIRS[step * BATCH : (step + 1) * BATCH]:
            chosen, rejected = (
                log_probability(policy, pair["prompt"], pair[name])
                - log_probability(reference, pair["prompt"], pair[name]).detach()
                for name in ("chosen", "rejected")
            )
            losses.append(-torch.log(torch.sigmoid(job.beta * chosen - job.beta * rejected)))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
        optimizer.step()
        found.append({"loss": float(loss), "grad_norm": float(norm)})
    return found


def of_trl(job: Preferences, chats: bool, folder: Path) -> list[dict[str, Any]]:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import peft
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model_name_or_path)
    if job.peft is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **job.peft_options))
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    trainer = trl.DPOTrainer(
        model,
        args=trl.DPOConfig(
            output_dir=str(folder / "trl"), beta=job.beta, max_steps=STEPS, per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential", logging_steps=1, max_grad_norm=1e9, use_cpu=True, bf16=False,
            report_to=[], save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list([chat_of(pair) if chats else pair for pair in PAIRS]),
        processing_class=byte_tokenizer(),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )  # fmt: skip
    with one_thread():
        trainer.train()
    return [logged for logged in trainer.state.log_history if "loss" in logged]


@pytest.mark.parametrize("sgd", [True, False], ids=["sgd", "adamw"])
def test_the_loss_is_that_of_the_paper(tmp_path: Path, sgd: bool) -> None:
    job = preferences(tmp_path, sgd=sgd)
    assert_steps(trained_steps(job), of_the_paper(job))


@pytest.mark.parametrize(
    ("chats", "adapters", "sgd"),
    [(False, False, True), (True, False, False), (True, True, True), (False, True, False)],
    ids=["texts-whole-sgd", "chats-whole-adamw", "chats-lora-sgd", "texts-lora-adamw"],
)
def test_the_losses_and_rewards_are_those_of_trl(tmp_path: Path, chats: bool, adapters: bool, sgd: bool) -> None:
    job = preferences(tmp_path, chats=chats, adapters=adapters, sgd=sgd)
    assert_steps(trained_steps(job), of_trl(job, chats, tmp_path))


def test_the_reference_stays_as_it_was_and_dropout_changes_nothing(tmp_path: Path) -> None:
    job = preferences(tmp_path)
    config = tmp_path / "llama" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.5}))
    model: Any = job.model()
    batch = job.collate([job.dataset("train")[0]])  # type: ignore[index]
    assert float(job.loss(model(batch), batch)) == pytest.approx(0.6931472, abs=1e-6)
    assert {name.partition(".")[0] for name, p in model.named_parameters() if not p.requires_grad} == {"reference"}
    exported = tmp_path / "new"
    job.export(model.state_dict(), exported, "hf")
    assert Preferences(**{**vars(job), "model_name_or_path": str(exported)}).model()(batch).abs().max() == 0


def test_padding_of_any_token_and_length_changes_nothing(tmp_path: Path) -> None:
    job = preferences(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "unpadded")
    model: Any = job.model()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1.1)
    outputs = []
    for others in ({}, {"tokenizer_name": str(tmp_path / "unpadded")}, {"pad_to_max_length": False}):
        other = Preferences(**{**vars(job), **others})
        other.check()
        batch = other.collate([other.dataset("train")[i] for i in (0, 63)])  # type: ignore[index]
        assert other.weight(batch) == 2
        outputs.append(model(batch))
    assert outputs[0].abs().min() > 1e-3
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def test_the_model_answers_prompts_that_were_held_out(tmp_path: Path) -> None:
    job = Preferences(**{**vars(preferences(tmp_path)), "validation_split_percentage": 50, "max_new_tokens": 2})
    text = job.sample(job.model().eval(), torch.Generator())
    assert [line for line in text.split("\n") if "=" in line][:2] == ["4+0=", "4+1="]


def test_says_what_is_wrong_with_pairs_before_training(tmp_path: Path, golden: Golden) -> None:
    job = preferences(tmp_path)
    chat = chat_of(PAIRS[0])
    say = [{"role": "assistant", "content": "7"}]
    for pair in (
        {"prompt": "1", "chosen": "2"},
        {"chosen": "2", "rejected": "3"},
        {"prompt": "1", "chosen": "", "rejected": "3"},
        {**chat, "rejected": []},
        {"prompt": "1", "chosen": say, "rejected": say},
        {**chat, "rejected": [{"role": "user", "content": "2"}, *say]},
        {"prompt": "1" * 16, "chosen": "2", "rejected": "3"},
    ):
        Path(str(job.train_file)).write_text(json.dumps(pair))
        fields = {name: value for name, value in vars(job).items() if name != "sgd"}
        golden.says([json.dumps(pair), *errors("jobs.hf.HuggingFace", **fields)])
    golden.says(errors("jobs.hf.HuggingFace", **{**fields, "beta": 0.0}))
    with golden.raises(ValueError):
        preferences(tmp_path, adapters=True).stages(torch.nn.Module())
