"""``job=hf`` beside ``transformers`` and ``trl`` with the same texts: tokens, labels, padding, ends of answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models.small_hf import BERT, COMMON, byte_tokenizer, llama
from jobs.hf import HuggingFace
from jobs.tokens import IGNORED

pytestmark = pytest.mark.slow  # the import of transformers

LONG = "one two three four five six"
SMALL_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def tokenizer_of(**options: Any) -> Any:
    """Bytes between ``<mask>`` and ``<end>``, as BERT writes ``[CLS]`` and ``[SEP]``."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    made = byte_tokenizer()
    made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<mask> $A <end>", pair="<mask> $A <end> $B:1 <end>:1", special_tokens=[("<mask>", 2), ("<end>", 0)]
    )
    named = {"eos_token": "<end>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **named, **options)


def saved(folder: Path, model: Any, tokenizer: Any, rows: list[dict[str, Any]], **fields: Any) -> HuggingFace:
    """A job with a model of random weights, which are larger than initial ones, so that what differs shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where: dict[str, Any] = {"model_name_or_path": str(folder / "model"), "train_file": str(folder / "data.jsonl")}
    return HuggingFace(**{"block_size": 32, "validation_split_percentage": 0, **where, **fields})


def bert(transformers: Any, kind: str = "BertForSequenceClassification") -> Any:
    return getattr(transformers, kind)(transformers.BertConfig(**BERT, **COMMON, max_position_embeddings=64))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("task", ["classification", "masked", "seq2seq"])
def test_what_is_cut_is_cut_as_the_tokenizer_does_it(transformers: Any, tmp_path: Path, task: Any, side: str) -> None:
    tokenizer = tokenizer_of(truncation_side=side)
    row = {"text": LONG, "label": 1, "prompt": LONG, "completion": LONG}
    job = saved(tmp_path, bert(transformers), tokenizer, [row], task=task, block_size=9, mlm_probability=1e-9)
    example = job.dataset("train")[0]  # type: ignore[index]
    expected = tokenizer(LONG, truncation=True, max_length=9)["input_ids"]
    assert example["input_ids"].tolist() == expected
    assert expected[-1] == 0, "the end stays"
    if task == "seq2seq":
        assert example["labels"].tolist() == expected


def test_pairs_of_texts_are_classified_with_their_segments(transformers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    pairs = [("one", "two three"), (LONG, "seven"), ("one", LONG * 3)]
    rows = [{"text": a, "text_pair": b, "label": 0} for a, b in pairs]
    job = saved(tmp_path, bert(transformers), tokenizer, rows, task="classification")
    job.check()
    train: Any = job.dataset("train")
    model: Any = job.model().eval()
    with torch.no_grad():
        found = model(job.collate([train[i] for i in range(3)]))
        for number, (a, b) in enumerate(pairs):
            one = tokenizer(a, b, truncation=True, max_length=32, return_tensors="pt")
            assert one["token_type_ids"].max() == 1
            torch.testing.assert_close(found[number], model.model(**one).logits[0], rtol=1e-4, atol=1e-5)


def classifier(transformers: Any, kind: str, pad: int | None) -> Any:
    common = {**COMMON, "pad_token_id": pad}
    if kind == "gpt2":
        return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**SMALL_GPT, **common))
    if kind == "bert":
        return bert(transformers)
    if kind == "roberta":
        config = transformers.RobertaConfig(**BERT, **common, max_position_embeddings=34)
        return transformers.RobertaForSequenceClassification(config)
    if kind == "xlnet":
        sizes = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32, "vocab_size": 300, "pad_token_id": pad}
        return transformers.XLNetForSequenceClassification(transformers.XLNetConfig(**sizes))
    config = transformers.LlamaConfig(**BERT, num_key_value_heads=1, max_position_embeddings=64, **common)
    return transformers.LlamaForSequenceClassification(config)


@pytest.mark.parametrize(
    ("kind", "of_model", "of_tokenizer"),
    [
        ("llama", 1, "<pad>"), ("llama", 1, None), ("llama", 1, "<mask>"), ("llama", None, "<pad>"),
        ("llama", -1, "<pad>"), ("gpt2", None, None), ("gpt2", None, "<pad>"), ("bert", 1, "<pad>"),
        ("roberta", 1, "<pad>"), ("xlnet", 1, "<pad>"),
    ],
)  # fmt: skip
def test_a_class_does_not_depend_on_padding(
    transformers: Any, tmp_path: Path, kind: str, of_model: int | None, of_tokenizer: str | None
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = of_tokenizer
    rows = [{"text": text, "label": 1} for text in ("one", LONG, "two " * 20)]
    model = classifier(transformers, kind, None if of_model == -1 else of_model)
    model.config.pad_token_id = of_model
    job = saved(tmp_path, model, tokenizer, rows, task="classification")
    job.check()
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    fitted, train = job.model().eval(), job.dataset("train")
    for whole in (True, False):
        batch = saved(tmp_path, model, tokenizer, rows, task="classification", pad_to_max_length=whole).collate(
            [train[i] for i in range(3)]  # type: ignore[index]
        )
        with torch.no_grad():
            found = fitted(batch)
            for number in range(3):
                alone = plain(input_ids=train[number]["input_ids"][None]).logits[0]  # type: ignore[index]
                torch.testing.assert_close(found[number], alone, rtol=1e-4, atol=1e-5)


def test_positions_that_begin_after_the_padding_are_counted(transformers: Any, tmp_path: Path) -> None:
    rows = [{"text": "one", "label": 1}]
    job = saved(tmp_path, classifier(transformers, "roberta", 1), byte_tokenizer(), rows, task="classification")
    job.check()
    longer = HuggingFace(**{**vars(job), "block_size": 33})
    with pytest.raises(ValueError, match="block_size=33: the model has positions for 32 tokens"):
        longer.check()


@pytest.mark.parametrize("label", [0.5, "one", -1, 2])
def test_a_label_that_is_no_class_is_refused(transformers: Any, tmp_path: Path, label: Any) -> None:
    rows = [{"text": "one", "label": label}]
    job = saved(tmp_path, bert(transformers), byte_tokenizer(), rows, task="classification")
    with pytest.raises(ValueError, match="line 1: "):
        job.check()


@pytest.mark.parametrize("ends", [None, 7, [0, 7], [7, 8]])
@pytest.mark.parametrize("peft", [None, "lora"])
def test_answers_end_where_the_model_ends_them_and_where_the_tokenizer_does(
    transformers: Any, tmp_path: Path, ends: Any, peft: str | None
) -> None:
    model = llama()
    model.generation_config.eos_token_id = ends
    rows = [{"prompt": "1+1=", "completion": "2"}]
    options: dict[str, Any] = {} if peft is None else {"peft": peft, "peft_options": {"target_modules": ["q_proj"]}}
    job = saved(tmp_path, model, byte_tokenizer(), rows, max_new_tokens=6, **options)
    made: Any = job.model().eval()
    listed = [] if ends is None else [ends] if isinstance(ends, int) else ends
    for end in {*listed, 0}:
        plain = made.model.get_base_model() if peft else made.model
        head = plain.lm_head.forward
        plain.lm_head.forward = lambda hidden, end=end, head=head: torch.nn.functional.one_hot(
            torch.full(hidden.shape[:-1], end), 300
        ).float()
        _, answer = job._answer(made, job.dataset("train")[0])  # type: ignore[index]
        plain.lm_head.forward = head
        assert answer.tolist() == [end]
    job.export(made.state_dict(), tmp_path / "new", "hf")
    written = json.loads((tmp_path / "new" / "generation_config.json").read_text())["eos_token_id"]
    assert set(written if isinstance(written, list) else [written]) == {*listed, 0}


def test_a_chat_whose_end_the_model_does_not_know_is_warned_of(transformers: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<mask>{% endfor %}"
    rows = [{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}]
    job = saved(tmp_path, llama(), tokenizer, rows)
    with pytest.warns(UserWarning, match="answers end with '<mask>', at which the model does not stop: add 2 to eos_"):
        job.check()


TEXTS = [("1+1=", "2"), ("one plus two is", " three"), ("ab", "c d"), ("", "alone"), ("a ", " b")]


@pytest.mark.parametrize("kind", ["bytes", "merges", "metaspace"])
def test_completions_have_the_tokens_and_labels_of_trl(tmp_path: Path, kind: str) -> None:
    tokenizers, datasets = pytest.importorskip("tokenizers"), pytest.importorskip("datasets")
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    tokenizer = byte_tokenizer()
    if kind != "bytes":
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<pad>"))
        pre, decoder = tokenizers.pre_tokenizers, tokenizers.decoders
        made.pre_tokenizer = pre.Metaspace() if kind == "metaspace" else pre.ByteLevel(add_prefix_space=False)
        made.decoder = decoder.Metaspace() if kind == "metaspace" else decoder.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<end>", "<pad>"])
        made.train_from_iterator([a + b for a, b in TEXTS] * 5, trainer)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")
    rows = [{"prompt": a, "completion": b} for a, b in TEXTS if a]
    texts = [{"text": LONG}]
    for given in (rows, texts):
        trainer = trl.SFTTrainer(
            llama(),
            args=trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=64),
            train_dataset=datasets.Dataset.from_list(given),
            processing_class=tokenizer,
        )
        theirs = trainer.get_train_dataloader().collate_fn
        encode = HuggingFace(block_size=64).encoder(tokenizer)
        for number, row in enumerate(given):
            expected = theirs([trainer.train_dataset[number]])
            ours = encode(row)
            assert ours["input_ids"].tolist() == expected["input_ids"][0].tolist()
            assert ours["labels"].tolist() == expected["labels"][0].tolist()


def test_masked_words_are_those_that_the_collator_of_transformers_may_mask(transformers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of()
    job = saved(tmp_path, bert(transformers, "BertForMaskedLM"), tokenizer, [{"text": LONG}] * 20, task="masked",
                mlm_probability=1.0)  # fmt: skip
    example = job.dataset("train")[0]  # type: ignore[index]
    whole = tokenizer(LONG)
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
    expected = collator([whole])["labels"][0]
    assert example["labels"].tolist() == expected.tolist()
    assert example["labels"].tolist()[0] == example["labels"].tolist()[-1] == IGNORED
