"""``job=hf``: models of Hugging Face, whole and with adapters, and what is wrong with their data."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.conformance.cases import Case, having
from helpers.conformance.training import close_strategies, make
from helpers.files.golden import Golden
from helpers.models.small_hf import BERT, COMMON, LORA, byte_tokenizer, llama
from helpers.ranks.batches import validated
from helpers.ranks.job_trials import errors, trained
from jobs.chats import leaves_out_text
from jobs.examples import Padded
from jobs.hf import HuggingFace
from jobs.tokens import IGNORED
from orchestrator.protocol.messages import EvalPoint

pytestmark = pytest.mark.slow  # the import of transformers

SUMS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model of each kind, with its tokenizer, and data for them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    made, tokenizer = tmp_path_factory.mktemp("hf"), byte_tokenizer()
    models = {
        "llama": llama(),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**BERT, **COMMON)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **COMMON)),
    }
    for name, model in models.items():
        model.save_pretrained(made / name)
        tokenizer.save_pretrained(made / name)
    data = {
        "sums": SUMS,
        "labelled": [{"text": e["prompt"], "label": int(len(e["completion"]) > 1)} for e in SUMS],
        "chat": [{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}] * 20,
    }
    for name, examples in data.items():
        (made / f"{name}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples))
    (made / "lines.txt").write_text("one two\n\n three four\n" * 20)
    return made


def fields(folder: Path, model: str = "llama", data: str = "sums.jsonl", **others: Any) -> dict[str, Any]:
    return {"model_name_or_path": str(folder / model), "train_file": str(folder / data), "block_size": 16, **others}


@pytest.mark.parametrize(
    ("model", "data", "others"),
    [
        ("llama", "sums.jsonl", {}),
        ("llama", "sums.jsonl", LORA),
        ("llama", "chat.jsonl", {"peft": "lora", "peft_options": {"use_dora": True, "target_modules": "all-linear"}}),
        ("llama", "sums.jsonl", {"peft": "prompt_tuning", "peft_options": {"num_virtual_tokens": 4}}),
        ("llama", "lines.txt", {}),
        ("llama", "sums.jsonl", {"packing": True, **LORA}),
        ("bert", "lines.txt", {"task": "masked"}),
        ("bert", "labelled.jsonl", {"task": "classification"}),
        ("t5", "sums.jsonl", {"task": "seq2seq"}),
    ],
    ids=["causal", "lora", "dora-chat", "prompts", "lines", "packed", "masked", "classification", "seq2seq"],
)
def test_every_task_learns(folder: Path, model: str, data: str, others: dict[str, Any]) -> None:
    job = HuggingFace(**fields(folder, model, data, learning_rate=1e-2, max_new_tokens=3, **others))
    job.check()
    with torch.device("meta"):
        assert {p.device.type for p in job.model().parameters()} == {"meta"}, "checks build it without memory"
    fitted, losses = trained(job, steps=15, batch=16)
    assert losses[-1] < losses[0]
    if job.peft == "lora":
        assert {n.split(".")[-3] for n, p in fitted.named_parameters() if p.requires_grad} <= {
            "lora_A", "lora_B", "lora_magnitude_vector"
        }  # fmt: skip
    text = job.sample(fitted.eval(), torch.Generator())
    assert (text is None) == (job.task in ("masked", "classification"))


def test_the_loss_counts_answers_and_no_padding(folder: Path) -> None:
    job = HuggingFace(**fields(folder))
    train: Any = job.dataset("train")
    examples = [train[0], train[len(train) - 1]]
    assert examples[0]["labels"].tolist() == [IGNORED] * 4 + examples[0]["input_ids"].tolist()[4:]
    assert examples[0]["labels"].tolist()[-1] == 0, "the end is learned"
    model = job.model().eval()
    losses = []
    for length in (16, None, 11):
        batch = Padded(token=1, length=length)(examples)
        losses.append(job.loss(model(batch), batch))
        assert int(job.weight(batch)) == 2 + 3
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])
    chat: Any = HuggingFace(**fields(folder, data="chat.jsonl")).dataset("train")
    assert job.tokenizer().decode(chat[0]["labels"][chat[0]["labels"] != IGNORED]) == "2"


WORDS = "<end> [UNK] <system> <user> <assistant> <think> </think> <bos> be brief what is two plus the four sure why"
USER, REPLY = "<user> {{ m.content }} ", "<assistant> {{ m.content.split('</think>')[-1] }} <end> "
TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}" + USER + "{% elif KEPT %}" + REPLY + "{% endif %}{% endfor %}"
)
PLAIN = TURNS.replace("KEPT", "m.role == 'assistant'")
LATEST = TURNS.replace("KEPT", "loop.last or add_generation_prompt")
"""Leaves out answers before the last one, but not in a prompt."""
REASONED = PLAIN.replace(
    "m.content.split('</think>')[-1]", "m.content if loop.last else m.content.split('</think>')[-1]"
)
"""As Qwen3's: leaves out the thoughts before earlier answers."""
CALLED = PLAIN.replace(
    "{{ m.content.split",
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor %}{{ (m.content or '').split",
)
PROMPT = "{% if add_generation_prompt %}<assistant> {% endif %}"
REASONS = "{% if add_generation_prompt %}<assistant> <think> {% endif %}"
"""As DeepSeek-R1's: the prompt opens a chain of thoughts, and the conversation has none."""
ASK, ANSWER = ({"role": role, "content": text} for role, text in (("user", "what is two"), ("assistant", "the four")))


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer of words, which ends every text that may have special tokens."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    numbers = {word: i for i, word in enumerate(WORDS.split())}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    single = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <end>", special_tokens=[("<bos>", numbers["<bos>"]), ("<end>", numbers["<end>"])]
    )
    made.post_processor = single
    made.enable_truncation(max_length=3)
    made.enable_padding(pad_id=1, pad_token="[UNK]", length=9)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="[UNK]")


def encoded(words: Any, example: dict[str, Any], template: str | None = None, **fields: Any) -> tuple[str, str]:
    """The tokens of an example, and those of them that are learned."""
    words.chat_template = template
    made = HuggingFace(block_size=64, **fields).encoder(words)(example)
    return words.decode(made["input_ids"]), words.decode(made["labels"][made["labels"] != IGNORED])


@pytest.mark.parametrize(
    ("template", "messages", "learned"),
    [
        (PLAIN + PROMPT, [ASK, ANSWER], "the four <end>"),
        (PLAIN + REASONS, [ASK, ANSWER], "the four <end>"),
        (PLAIN + REASONS, [ASK, {**ANSWER, "content": "<think> why"}], "why <end>"),
        (PLAIN + REASONS, [ASK, {**ANSWER, "content": "<think> why </think> sure"}], "sure <end>"),
        (PLAIN + PROMPT, [ASK, ANSWER, ASK, ANSWER | {"content": "sure"}], "sure <end>"),
        (LATEST + PROMPT, [ASK, ANSWER, ASK, ANSWER | {"content": "sure"}], "sure <end>"),
        (PLAIN + PROMPT, [ASK, ANSWER | {"tool_calls": None}], "the four <end>"),
        ("<bos> " + PLAIN + PROMPT, [ASK, ANSWER], "the four <end>"),
    ],
    ids=["prefix", "reasons", "alike", "reasoned", "turns", "latest", "null", "bos"],
)
def test_a_chat_learns_all_of_the_answer_and_nothing_else(
    words: Any, template: str, messages: list[dict[str, Any]], learned: str
) -> None:
    whole, found = encoded(words, {"messages": messages}, template)
    assert found == learned
    assert whole.count("<bos>") == template.count("<bos>"), "the template alone writes special tokens"


MARKED = PLAIN.replace(
    "{{ m.content.split('</think>')[-1] }} <end> ", "{% generation %}{{ m.content }} {% endgeneration %}<end> "
)
LAST_ENDS = PLAIN.replace("<end>", "{{ '<end>' if loop.last else '[UNK]' }}")
SURE = ANSWER | {"content": "<think> why </think> sure"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "plus", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("template", "messages", "learned"),
    [
        (PLAIN + PROMPT, [ASK, ANSWER], "the four <end>"),
        (PLAIN + PROMPT, [ASK, ANSWER, ASK, SURE], "the four <end> sure <end>"),
        (PLAIN + REASONS, [ASK, SURE, ASK, ANSWER], "sure <end> the four <end>"),
        (PLAIN + PROMPT, [ANSWER, ANSWER, ASK], "the four <end> the four <end>"),
        (LATEST + PROMPT, [ASK, ANSWER, ASK, SURE], "sure <end>"),
        (MARKED + PROMPT, [ASK, ANSWER, ASK, ANSWER, ASK], "the four the four"),
        (REASONED + PROMPT, [ASK, SURE, ASK, SURE], "sure <end> <think> why </think> sure <end>"),
        (CALLED + PROMPT, [ASK, CALLS, ASK, ANSWER], "plus <end> the four <end>"),
    ],
    ids=["one", "turns", "reasons", "ends with a question", "latest", "marked", "reasoned", "calls"],
)
def test_all_answers_of_a_chat_are_learned(
    words: Any, template: str, messages: list[dict[str, Any]], learned: str
) -> None:
    whole, found = encoded(words, {"messages": messages}, template, assistant_only_loss=True)
    assert found == learned
    if messages[-1]["role"] == "assistant" and template is not MARKED:
        last_whole, last = encoded(words, {"messages": messages}, template)
        assert last_whole == whole
        assert found.endswith(last), "the last answer is what is learned without the field"


def test_a_template_that_ends_only_the_last_answer_needs_markers(words: Any, golden: Golden) -> None:
    with golden.raises(ValueError):
        encoded(words, {"messages": [ASK, ANSWER, ASK, ANSWER]}, LAST_ENDS + PROMPT, assistant_only_loss=True)
    with golden.raises(ValueError):
        encoded(words, {"messages": [ASK]}, PLAIN + PROMPT, assistant_only_loss=True)


def test_a_text_that_the_template_leaves_out_is_noticed(words: Any) -> None:
    words.chat_template = PLAIN + PROMPT
    reasoned = {**ANSWER, "content": "<think> why </think> sure"}
    assert not leaves_out_text(words, {"messages": [ASK, ANSWER]})
    assert leaves_out_text(words, {"messages": [ASK, reasoned]})
    assert leaves_out_text(words, {"messages": [{"role": "system", "content": "be brief"}, ASK, ANSWER]})


def test_the_end_is_there_once_and_only_at_the_end(words: Any) -> None:
    """Also with a tokenizer that ends every text, cuts it and fills it up."""
    prompt = {"prompt": "what is two plus two", "completion": " the four"}
    assert encoded(words, prompt) == ("<bos> what is two plus two the four <end>", "the four <end>")
    assert encoded(words, {**prompt, "completion": " the four <end>"})[1] == "the four <end>"
    text = "<bos> what is two plus two plus two plus two <end>"
    assert encoded(words, {"text": "what is two plus two plus two plus two"}) == (text, text)


def test_tools_are_written_and_a_question_is_no_answer(words: Any) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + PLAIN
    tools = [{"type": "function", "function": {"name": "why", "description": "", "parameters": {}}}]
    assert encoded(words, {"messages": [ASK, ANSWER], "tools": tools}, template)[0].startswith("why <user> what")
    for messages, role in (([ASK, ANSWER, ASK], "'user'"), ([], "missing")):
        with pytest.raises(ValueError, match=f"its role is {role}; end with the assistant's"):
            encoded(words, {"messages": messages}, template)


def test_tables_have_the_examples_of_lines(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([*({"text": None, **e} for e in SUMS), {"text": "1"}])
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "sums.parquet")
    expected: Any = HuggingFace(**fields(folder)).dataset("train")
    for name in ("saved", "sums.parquet"):
        job = HuggingFace(**{**fields(folder), "train_file": str(tmp_path / name)})
        job.check()
        train: Any = job.dataset("train")
        assert len(train) == len(expected) + 1
        for index in (0, 7):
            assert {k: v.tolist() for k, v in train[index].items()} == {
                k: v.tolist() for k, v in expected[index].items()
            }
    datasets.DatasetDict(train=saved).save_to_disk(tmp_path / "several")
    (error,) = errors("jobs.hf.HuggingFace", **{**fields(folder), "train_file": str(tmp_path / "several")})
    assert f"has several datasets; name one of {tmp_path / 'several' / 'train'}" in error


def test_tokens_fill_each_block(folder: Path, tmp_path: Path, golden: Golden) -> None:
    tokens = np.arange(3, 203).astype(np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    job = HuggingFace(**{**fields(folder), "train_file": str(tmp_path / "a.npy")})
    job.check()
    train: Any = job.dataset("train")
    assert len(train) == 200 // 16
    assert job.tokens_per_sample == 16
    assert HuggingFace(**fields(folder)).tokens_per_sample is None, "padding would count"
    assert train[1]["labels"].tolist() == train[1]["input_ids"].tolist() == tokens[16:32].tolist()
    tokens[7] = 299
    np.save(tmp_path / "b.npy", tokens)
    (error,) = errors("jobs.hf.HuggingFace", **{**fields(folder), "train_file": str(tmp_path / "b.npy")})
    golden.says(error)


def test_damaged_lines_are_counted_and_left_out(folder: Path, tmp_path: Path) -> None:
    lines = ['{"prompt": "1+1=", "completion": "2"}', '{"prompt"', "[1]", "", '{"body": "one"}', '{"text": "3"}']
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    where = {**fields(folder), "train_file": str(tmp_path / "lines.jsonl")}
    (error,) = errors("jobs.hf.HuggingFace", **where)
    assert f"{tmp_path}/lines.jsonl: line 2: " in error
    assert error.endswith("; job.damaged=skip leaves out 3 such examples")
    job = HuggingFace(**where, damaged="skip", validation_split_percentage=0)
    with pytest.warns(UserWarning, match="3 damaged examples are left out: .*line 2; .*line 3; .*line 5"):
        job.check()
    train: Any = job.dataset("train")
    assert [int(e["input_ids"][0]) for e in train] == [job.tokenizer()(t)["input_ids"][0] for t in "13"]


def test_a_damaged_line_that_comes_late_and_examples_that_are_cut_are_told_of_before_training(
    folder: Path, tmp_path: Path
) -> None:
    whole = "".join(json.dumps({"text": "1" * length}) + "\n" for length in [15, 16] * 150)
    (tmp_path / "lines.jsonl").write_text(whole)
    where = {**fields(folder), "train_file": str(tmp_path / "lines.jsonl")}
    with pytest.warns(
        UserWarning, match="50 of the first 100 examples have more than job.block_size=16 tokens, .* cut"
    ):
        assert errors("jobs.hf.HuggingFace", **where) == []
    (tmp_path / "lines.jsonl").write_text(whole + '{"text"')
    (error,) = errors("jobs.hf.HuggingFace", **where)
    assert f"{tmp_path}/lines.jsonl: line 301: " in error


def test_a_file_is_looked_through_once(folder: Path) -> None:
    job = HuggingFace(**fields(folder))
    first, second = job.examples("train_file"), job.examples("train_file")
    assert first.rows is second.rows  # type: ignore[union-attr]


def test_a_tokenizer_may_have_no_end(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with_end, without = (
        HuggingFace(**fields(folder, tokenizer_name=str(place))).dataset("train")
        for place in (folder / "llama", tmp_path)
    )
    assert [*without[0]["labels"], 0] == [*with_end[0]["labels"]]


def test_an_export_has_the_adapters_or_the_merged_model(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import peft
    import transformers

    job = HuggingFace(**fields(folder, learning_rate=1e-2, **LORA))
    fitted, _ = trained(job, steps=5, batch=16)
    batch = job.collate([job.dataset("val")[0]])  # type: ignore[index]
    with torch.no_grad():
        expected = fitted.eval()(batch)
    for format in ("hf", "adapter"):
        job.export(fitted.state_dict(), tmp_path / format, format)
    assert capfd.readouterr().err == "", "the bars of transformers would be on the console"
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        for model in (merged, adapted):
            found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "<end>"


DAMAGED = {
    "damaged.jsonl": '{"text": "one"}\n{"text"\n',
    "other.jsonl": '{"body": "one"}\n',
    "deep.jsonl": '{"text": "one"}\n' + "[" * 200_000 + "\n",
    "half.jsonl": '{"text": "one \\ud83d\\ude00"}\n{"text": "one \\ud83d"}\n',
    "empty.txt": "",
    "nothing.jsonl": '{"text": ""}\n',
    "long.jsonl": json.dumps({"prompt": "1" * 20, "completion": "2"}),
}
GENERATED = {"predict_with_generate": True}


def test_says_what_is_wrong_before_training(folder: Path, tmp_path: Path, golden: Golden) -> None:
    for name, text in DAMAGED.items():
        (tmp_path / name).write_text(text)
    config = json.loads((folder / "llama" / "config.json").read_text())
    labels = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    for name, changes in (("bare", {}), ("small", {"vocab_size": 200}), ("three", labels)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    bare, small, three = (str(tmp_path / name) for name in ("bare", "small", "three"))

    def error(others: dict[str, Any]) -> str:
        (found,) = errors("jobs.hf.HuggingFace", **{**fields(folder), **others})
        return found

    for others in (
        {"model_name_or_path": None},
        {"model_name_or_path": None, "config_name": bare},
        {"model_name_or_path": None, "config_name": small, "tokenizer_name": str(folder / "llama")},
        {"train_file": None},
        {"train_file": "no/such/file"},
        *({"train_file": str(tmp_path / name)} for name in DAMAGED if name != "deep.jsonl"),
        {"config_name": bare},
        *({"learning_rate": 0.0}, {"weight_decay": -1.0}, {"block_size": 65}, {"peft": "lorra"}),
        {"task": "classification", "model_name_or_path": three, "num_labels": 4},
        {"task": "classification", "model_name_or_path": str(folder / "bert")},
        *({"packing": True, "task": "dpo"}, {"assistant_only_loss": True, "task": "dpo"}),
        {"packing": True, "peft": "prompt_tuning", "peft_options": {"num_virtual_tokens": 4}},
        {"packing": True, "train_file": "tokens.npy"},
        *({"peft": "lora", "peft_options": {"target_modules": names}} for names in (["q_proj", "v_prj"], "q_prj")),
        {"peft": "lora", "peft_options": {"target_modules": "all-linear", "modules_to_save": ["lm_haed"]}},
        *({"compute_metrics": name} for name in ("no_such.f1", "math.f1", "f1", "math.pi")),
        {"compute_metrics": "math.floor", "task": "dpo"},
        GENERATED,
        GENERATED | {"compute_metrics": "math.floor", "max_new_tokens": 0},
        {"max_predict_samples": 0},
    ):
        golden.says(error(others), FOLDER=folder)
    for others, of_a_library in (
        ({"model_name_or_path": str(tmp_path)}, f"job.model_name_or_path={tmp_path}: Unrecognized"),
        ({"model_name_or_path": "~/no/model"}, "job.model_name_or_path=~/no/model: no such directory, and not found"),
        ({"task": "seq2seq"}, f"job.model_name_or_path={folder / 'llama'}: Unrecognized configuration class"),
        ({"train_file": str(tmp_path / "deep.jsonl")}, "deep.jsonl: line 2: is no JSON (maximum recursion depth"),
        ({"lr_scheduler_type": "linaer"}, "job.lr_scheduler_type=linaer: linaer is not a valid SchedulerType"),
        ({"peft": "lora", "peft_options": {"target_modules": "all-linear", "r": 0}}, "job.peft_options={'target_modul"),
        ({"peft": "lora", "peft_options": {"rr": 4}}, "job.peft_options={'rr': 4}: "),
    ):
        assert of_a_library in error(others)


given: list[Any] = []
"""What :func:`remember` has been given."""


def remember(prediction: Any) -> dict[str, float]:
    given.append(prediction)
    return {"accuracy": 0.5}


def remembered(job: HuggingFace) -> tuple[EvalPoint, Any]:
    """An evaluation by one worker, and what the function of the metrics is given."""
    given.clear()
    strategy = make(Case(job=job, train=having(global_batch_size=3)), 0)
    try:
        return validated(strategy, 0, job.dataset("val")), given[0]
    finally:
        close_strategies()


@pytest.mark.parametrize(
    ("model", "data", "task"),
    [("bert", "labelled.jsonl", "classification"), ("llama", "sums.jsonl", "causal"), ("t5", "sums.jsonl", "seq2seq")],
)
def test_a_function_of_metrics_is_given_what_trainer_gives_it(
    folder: Path, tmp_path: Path, model: str, data: str, task: Any
) -> None:
    import transformers

    called = f"{__name__}.remember"
    others = {"validation_split_percentage": 15, "pad_to_max_length": False, "compute_metrics": called}
    job = HuggingFace(**fields(folder, model, data, task=task, **others))
    torch.manual_seed(3)  # as a strategy seeds the head of a classification
    plain: Any = job.model()
    point, ours = remembered(job)
    assert point.values == {"accuracy": 0.5}
    assert not point.sums, "the accuracy of the job would have the same name"
    trainer = transformers.Trainer(
        model=plain.model,
        args=transformers.TrainingArguments(
            str(tmp_path), per_device_eval_batch_size=3, report_to=[], use_cpu=True, disable_tqdm=True
        ),
        eval_dataset=job.dataset("val"),
        data_collator=job.collate,
        compute_metrics=remember,
        preprocess_logits_for_metrics=lambda logits, labels: (
            logits if task == "classification" else (logits[0] if task == "seq2seq" else logits).argmax(dim=-1)
        ),
    )
    trainer.evaluate()
    theirs = given[1]
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
    np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("model", "task"), [("llama", "causal"), ("t5", "seq2seq")])
def test_answers_are_given_to_the_function_of_metrics(folder: Path, model: str, task: Any) -> None:
    job = HuggingFace(
        **fields(folder, model, task=task, max_new_tokens=4, validation_split_percentage=20),
        compute_metrics=f"{__name__}.remember",
        predict_with_generate=True,
        max_predict_samples=5,
    )
    point, found = remembered(job)
    assert point.values == {"accuracy": 0.5}
    assert len(found.predictions) == len(found.label_ids) == 5
    tokenizer, fitted = job.tokenizer(), job.model().eval()

    def texts(rows: Any) -> list[str]:
        return [tokenizer.decode(row[row != IGNORED], skip_special_tokens=True) for row in rows]

    assert texts(found.label_ids) == [e["completion"] for e in SUMS[52:57]]
    shown = job.sample(fitted, torch.Generator())
    assert texts(found.predictions)[:3] == [text.partition("\n-> ")[2] for text in shown.split("\n\n")]
    shares = [list(job.predictions(fitted, "val", part, 2)) for part in range(2)]
    assert [len(share) for share in shares] == [3, 2]
    assert torch.equal(shares[1][0][1]["labels"][0], torch.from_numpy(found.label_ids[1][found.label_ids[1] >= 0]))


def test_other_data_is_evaluated_without_the_data_of_the_training(folder: Path, golden: Golden) -> None:
    recorded = fields(folder, data="gone.jsonl", validation_file=str(folder / "sums.jsonl"))
    other = HuggingFace.fields_to_evaluate([str(folder / "lines.txt")])
    assert "gone.jsonl: cannot be read" in errors("jobs.hf.HuggingFace", **recorded)[0]
    assert not errors("jobs.hf.HuggingFace", **{**recorded, **other})
    assert len(HuggingFace(**{**recorded, **other}).dataset("val")) == 40  # type: ignore[arg-type]
    with golden.raises(ValueError):
        HuggingFace.fields_to_evaluate(["a.txt", "b.txt"])


def test_weights_of_another_model_are_refused_before_training(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "llama", tmp_path / "model")
    where = fields(tmp_path, "model") | {"train_file": str(folder / "sums.jsonl")}
    config, weights = (tmp_path / "model" / name for name in ("config.json", "model.safetensors"))
    known, whole = json.loads(config.read_text()), weights.read_bytes()
    key = f"job.model_name_or_path={tmp_path / 'model'}"
    for change, data, reason in (
        (
            {"intermediate_size": 33},
            whole,
            "model.layers.0.mlp.down_proj.weight is of shape [32, 32], not [32, 33], and 5",
        ),
        ({"num_hidden_layers": 3}, whole, "model.layers.2.input_layernorm.weight is missing, and 8 more"),
        ({"model_type": "gpt2"}, whole, "transformer.h.0.attn.c_attn.bias is missing, and "),
        ({}, whole[:-1], "Error while deserializing header: incomplete metadata"),
        ({}, None, "Error no file named model.safetensors"),
    ):
        config.write_text(json.dumps(known | change))
        if data is None:
            weights.unlink()
        else:
            weights.write_bytes(data)
        (error,) = errors("jobs.hf.HuggingFace", **where)
        assert error.startswith(f"{key}: {reason}"), error
    assert capfd.readouterr().err == "", "the reports of transformers would be on the console"
    labelled = fields(folder, "bert", "labelled.jsonl", task="classification")
    with pytest.warns(
        UserWarning, match=r"4 weights are not in the files and begin at random: bert.pooler.dense.bias, "
    ):
        assert errors("jobs.hf.HuggingFace", **labelled) == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, where, command in (
        ("peft", fields(folder, **LORA), "peft is not installed: pip install peft"),
        (
            "transformers",
            fields(folder),
            "transformers is not installed: pip install transformers peft datasets",
        ),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        (error,) = errors("jobs.hf.HuggingFace", **where)
        assert error.endswith(command)
