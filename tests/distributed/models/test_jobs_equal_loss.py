"""The jobs that ship, under the rule of equal loss."""

import json
from dataclasses import replace

import pytest
import torch

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.equal_loss import assert_equal_losses
from helpers.conformance.layouts import ADAMW, LAYOUTS, SGD, TENSOR, assert_as_alone, passes_constants, pipeline
from helpers.conformance.training import losses, metrics_of, train
from helpers.jobs.preference_jobs import preferences
from helpers.records.runs import in_campaign
from jobs.gpt import GPT
from jobs.hf import HuggingFace
from jobs.names import Names
from jobs.resnet50 import ResNet50
from jobs.sparse import MatrixCompletion, SparseLogistic
from jobs.toy import Toy
from orchestrator import batches_by_length


@pytest.mark.parametrize(
    "options",
    [DDP, *in_campaign(pipeline("1F1B", 2, ("layer3",)), pipeline("GPipe", 2))],
    ids=["ddp", "pipeline-layer3", "pipeline"],
)
def test_resnet50_on_two_workers_is_one_worker_with_two_micro_batches(gang, options):
    """BatchNorm's statistics are those of the images that pass together."""
    job = ResNet50(width=4, blocks=(1, 1, 1, 1), num_classes=10, num_images=40, lr=0.02)
    whole = having(steps=10, global_batch_size=20)
    halves = having(whole, grad_accumulation=2)
    (alone,) = gang.run(train, Case(job=job, train=halves), world_size=1)
    ranks = gang.run(train, Case(job=job, train=whole, options=options), world_size=2)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
    trained = [name for name, _ in job.model().named_parameters()]
    assert set(trained) <= set().union(*(rank.model for rank in ranks))
    for rank in ranks:
        for name in set(trained) & set(rank.model):
            torch.testing.assert_close(rank.model[name], alone.model[name], rtol=1e-3, atol=1e-4)
    (undivided,) = gang.run(train, Case(job=job, train=whole), world_size=1)
    assert (losses([undivided]) - losses([alone])).abs().max() > 1e-3, "the statistics make no difference"


@pytest.mark.parametrize("grad_accumulation", [1, 2])
def test_toy(gang, grad_accumulation):
    case = Case(job=Toy(), train=having(global_batch_size=30, grad_accumulation=grad_accumulation))
    assert_equal_losses(gang, case, (2, 4), rtol=SGD)


LOGISTIC = SparseLogistic(features=500, words=20, samples=400)
MATRIX = MatrixCompletion(size=40, rank=3, observed=600, lr=0.1)


@pytest.mark.in_turn
@pytest.mark.parametrize("grad_accumulation", [1, 3])
@pytest.mark.parametrize(
    "job",
    [
        LOGISTIC,
        MATRIX,
        *in_campaign(replace(LOGISTIC, algorithm="sgd", lr=0.02), replace(LOGISTIC, sparse=False)),
    ],
    ids=["logistic-adagrad", "matrix", "logistic-sgd", "logistic-dense"],
)
def test_sparse_gradients(gang, job, grad_accumulation):
    train = having(global_batch_size=101, grad_accumulation=grad_accumulation)
    assert_equal_losses(gang, Case(job=job, train=train), (2, 4), rtol=SGD)


def test_powersgd_averages_sparse_gradients_in_full(gang):
    assert_equal_losses(gang, Case(job=LOGISTIC, options=replace(DDP, comm_hook="powersgd")), (2,), rtol=SGD)


@pytest.mark.parametrize("job", [LOGISTIC, MATRIX], ids=["logistic", "matrix"])
def test_sparse_gradients_are_clipped_by_the_norm_that_dense_ones_have(gang, job):
    for world_size in (1, 2):
        norms, found = [], []
        for one in (job, replace(job, sparse=False)):
            case = Case(job=one, train=having(grad_accumulation=2, clip_norm=0.1))
            ranks = gang.run(train, case, world_size=world_size)
            norms.append([rank.norms for rank in ranks])
            found.append(losses(ranks))
        torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=SGD, atol=0)
        torch.testing.assert_close(found[0], found[1], rtol=SGD, atol=0)
        assert min(map(min, norms[0])) > 0.1, "nothing was clipped"


class NamesByLength(Names):
    def batch_sampler(self, dataset, batch_size, generator):
        return batches_by_length([len(name) for name in dataset.names], batch_size, generator)


@pytest.mark.parametrize(
    ("job", "grad_accumulation", "world_sizes"),
    [(NamesByLength(width=8), 2, (3,)), *in_campaign((Names(width=8), 1, (2, 4)))],
)
def test_names_of_unequal_length(gang, job, grad_accumulation, world_sizes):
    train = having(global_batch_size=25, grad_accumulation=grad_accumulation)
    ranks = assert_equal_losses(gang, Case(job=job, train=train), world_sizes, rtol=ADAMW)
    assert all(len(set(at_step)) > 1 for at_step in zip(*(r.weights for r in ranks), strict=True))


@pytest.mark.campaign  # ``test_model_zoo.py`` trains adapters, and ``test_preferences`` in parts
def test_adapters_of_a_small_llama_train_alike_in_parts_and_are_exported(gang, tmp_path):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    pytest.importorskip("peft")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["1+1=2"], vocab_size=257, special_tokens=["<end>"], show_progress=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    base = GPT(
        variant="llama", layers=2, width=16, heads=2, context=16, vocabulary=300, end_token=0,
        tokenizer=str(tmp_path / "tokenizer.json"),
    )  # fmt: skip
    base.export(base.model().state_dict(), tmp_path / "llama", "hf")
    sums = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(10) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(example) + "\n" for example in sums))
    job = HuggingFace(
        model_name_or_path=str(tmp_path / "llama"), train_file=str(tmp_path / "sums.jsonl"), block_size=8,
        peft="lora", peft_options={"r": 2, "target_modules": "all-linear"}, learning_rate=1e-2,
    )  # fmt: skip
    job.check()
    case = Case(job=job, train=having(global_batch_size=9))
    (alone,) = gang.run(train, case, world_size=1)
    expected = losses([alone])
    assert expected[-1] < expected[0]
    for layout in (LAYOUTS["fsdp-2"], TENSOR["mesh-tensor-2"]):
        ranks = gang.run(train, layout.of(case), world_size=2)
        torch.testing.assert_close(losses(ranks), expected, rtol=ADAMW, atol=0)
    torch.manual_seed(0)
    model = job.model()
    job.export(model.state_dict() | alone.model, tmp_path / "new", "hf")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    batch = job.collate([job.dataset("train")[0]])
    model.load_state_dict(model.state_dict() | alone.model)
    with torch.no_grad():
        logits = merged(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        torch.testing.assert_close(logits, model.eval()(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2", *in_campaign("hsdp-2x2")])
@pytest.mark.parametrize(
    ("adapters", "sgd"),
    [(True, False), (False, False), *in_campaign((True, True), (False, True))],
    ids=["lora-adamw", "whole-adamw", "lora-sgd", "whole-sgd"],
)
def test_preferences_are_learned_alike_in_every_layout(gang, tmp_path, adapters, sgd, layout):
    """The reference is a copy that is divided as the model is, or the model without its adapters."""
    pytest.importorskip("peft")
    job = preferences(tmp_path, adapters=adapters, sgd=sgd)
    case = Case(job=job, train=having(steps=5, global_batch_size=12))
    (ranks,) = assert_as_alone(gang, case, layout, rtol=SGD, want_grad_norm=True).values()
    rewards = metrics_of(ranks)
    assert rewards[-1]["rewards/margins"] > rewards[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)


@pytest.mark.campaign
@passes_constants
def test_preferences_are_learned_alike_in_stages(gang, tmp_path):
    test_preferences_are_learned_alike_in_every_layout(gang, tmp_path, adapters=False, sgd=False, layout="1F1B-2")
