"""What ``job=hf`` exports: loaded as other programs do, each kind computes what was trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models.small_hf import BERT, COMMON, byte_tokenizer, llama
from jobs.hf import HuggingFace
from orchestrator import export
from orchestrator.config.recorded_config import to_yaml
from orchestrator.features.export.comparison import _run, difference, example_inputs, run_trained
from orchestrator.records import run_dir as rundir
from orchestrator.state.checkpoint import save
from orchestrator.state.model_state import own_tensors
from orchestrator.state.train_state import capture

pytestmark = pytest.mark.slow  # the import of transformers

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 1}


def lora(*targets: str, method: str = "lora", **options: Any) -> dict[str, Any]:
    return {"peft": method, "peft_options": {"target_modules": list(targets) or "all-linear", **options}}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("llama", {}),
    "tied": ("tied", {}),
    "layers": ("llama", lora()),
    "head of tied": ("tied", lora("lm_head")),
    "words of tied": ("tied", lora("embed_tokens")),
    "both of tied": ("tied", lora("lm_head", "embed_tokens")),
    "kept tied": ("tied", lora("embed_tokens", ensure_weight_tying=True)),
    "saved head": ("tied", lora(modules_to_save=["lm_head"])),
    "saved words": ("tied", lora(modules_to_save=["embed_tokens"])),
    "some words": ("tied", lora(trainable_token_indices=[3, 4])),
    "dora of tied": ("tied", lora("lm_head", use_dora=True)),
    "loha of tied": ("tied", lora("lm_head", method="loha")),
    "biases": ("gpt2", lora(bias="all")),
    "head of gpt2": ("gpt2", lora("lm_head", "c_attn")),
    "scaled words": ("gemma", lora("embed_tokens")),
    "head of t5": ("t5", {"task": "seq2seq", **lora("lm_head")}),
    "masked": ("bert", {"task": "masked", **lora("decoder")}),
    "classes": ("classes", {"task": "classification", **lora()}),
    "classes of words": ("gpt2", {"task": "classification"}),
    "pairs": ("llama", {"task": "dpo"}),
    "pairs, head of tied": ("tied", {"task": "dpo", **lora("lm_head")}),
    "prompts": ("llama", {"peft": "prompt_tuning", "peft_options": {"num_virtual_tokens": 4}}),
    "words of t5": ("t5", {"task": "seq2seq", **lora("shared")}),
    "random": ("random", lora()),
}
WHOLE = "the run trained the whole model; use --format=hf"
REFUSED = {
    ("prompts", "hf"): "job.peft=prompt_tuning: cannot be merged into the weights of the model; use --format=adapter",
    ("random", "adapter"): "the model began with random weights, which nothing else has; use --format=hf",
    **{(kind, "adapter"): WHOLE for kind in ("whole", "tied", "classes of words", "pairs")},
}
OTHER_MODEL = ("words of t5", "hf")
"""A configuration of T5 cannot say that its words and those of its decoder differ."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    made = tmp_path_factory.mktemp("hf")
    sizes = {**BERT, **COMMON, "max_position_embeddings": 64}
    models = {
        "llama": llama(),
        "tied": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=True)
        ),
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **COMMON)
        ),
        "gemma": transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes, num_key_value_heads=1, head_dim=16)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **COMMON)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        "classes": transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)),
    }
    for name, model in models.items():
        model.save_pretrained(made / name)
        byte_tokenizer().save_pretrained(made / name)
    names = ("text", "prompt", "completion", "chosen")
    rows = [{**dict.fromkeys(names, f"{i} plus 1"), "rejected": "2", "label": i % 2} for i in range(40)]
    (made / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def job_of(folder: Path, kind: str) -> HuggingFace:
    model, options = KINDS[kind]
    where: dict[str, Any] = {"model_name_or_path": str(folder / model)}
    if model == "random":
        where = {"config_name": str(folder / "llama")}
    return HuggingFace(**where, train_file=str(folder / "data.jsonl"), block_size=16, **options)


def trained(job: HuggingFace) -> torch.nn.Module:
    """The model with weights that are far from those that it began with."""
    torch.manual_seed(0)
    model = job.model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.in_turn
@pytest.mark.parametrize("format", ["hf", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_computes_what_was_trained(folder: Path, tmp_path: Path, kind: str, format: str) -> None:
    job = job_of(folder, kind)
    weights = {name: tensor.detach().clone() for name, tensor in own_tensors(trained(job)).items()}
    if text := REFUSED.get((kind, format)):
        with pytest.raises(ValueError, match=text):
            job.export(weights, tmp_path / "new", format)
        return
    job.export(weights, tmp_path / "new", format)
    inputs, _ = example_inputs(job)
    loaded = job.exported(tmp_path / "new", format)
    assert loaded is not None
    error = difference(_run(job, loaded, inputs)[0], run_trained(job, weights, inputs)[0])
    assert error > 0.1 if (kind, format) == OTHER_MODEL else error < 1e-4


@pytest.mark.campaign
@pytest.mark.parametrize("format", ["hf", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_of_each_kind_is_loaded_and_compared(
    folder: Path, tmp_path: Path, kind: str, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(folder, kind)
    run = rundir.create(tmp_path, "a")
    run.update_record(name="a", uid="first", state="finished")
    fields = {name: value for name, value in vars(job).items() if value is not None}
    run.config_file.write_text(to_yaml({"job": {"_target_": "jobs.hf.HuggingFace", **fields}}))
    model = trained(job)
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    save(run.checkpoints, capture(model, optimizer, None, step=7, samples_consumed=30), run_uid="first")
    code = export.main([str(run.path), "--format", format, "--to", str(tmp_path / "new")])
    assert (code == 0) == ((kind, format) not in {*REFUSED, OTHER_MODEL})
    assert (tmp_path / "new").exists() == (code == 0)
    output = capsys.readouterr()
    if code == 0:
        assert "loaded again, its output is that of the trained model, for samples of 'val'" in output.out
    if (kind, format) == OTHER_MODEL:
        assert "wrote another model than the trained one: its output differs" in output.err
        assert output.err.rstrip().endswith("; try --format=adapter")
