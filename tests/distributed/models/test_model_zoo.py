"""Other people's models under every strategy: as on one worker, or refused with a reason, and never silently different.

``benchmarks/models.py`` makes the same comparison with all models, and writes its counts to docs/models.md.
"""

import importlib.util
from typing import Any

import pytest

from helpers.models.by_hand import PACKAGE as BY_HAND
from helpers.models.catalogue import MODELS
from helpers.models.zoo import ZOO
from helpers.models.zoo_cells import STRATEGIES, Outcome, cell
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.config.files import choices

SHORT = [("t5", "pipeline"), ("lora_llama", "ddp")]
"""An encoder and a decoder with a shared table; a decoder with adapters."""
CAUSES = {
    "llama_with_cache": ("changes an object that it is called with (DynamicCache)", "use_cache=False"),
    "clip": ("parameters that take no part in the loss: ", "logit_scale", "freeze them (requires_grad=False)"),
    "dit": ("outside of the module that is gathered with it", "strategy.reshard_after_forward=false"),
}
"""Words of the reason why a model is refused, with the remedy."""
REFUSED = {
    ("llama_with_cache", "model_parallel"),
    ("llama_with_cache", "pipeline"),
    ("llama_with_cache", "ddp_pipeline"),
    ("llama_with_cache", "fsdp_pipeline"),
    ("clip", "ddp"),
    ("clip", "ddp_pipeline"),
    ("dit", "fsdp"),
    ("dit", "hsdp"),
}
KINDS: list[tuple[str, str, Outcome, str]] = [
    ("block experts, skipped", "fsdp", "equal", ""),
    ("block clamps its weights", "fsdp", "refused", "is a copy there, gathered from all workers"),
    ("momentum teacher", "parameter_server sync", "equal", ""),
    ("block reads its weights", "fsdp", "equal", ""),
    ("gradient penalty", "fsdp", "refused", "strategy.reshard_after_forward=false"),
    ("memory shared", "pipeline", "refused", "share memory"),
    ("contrastive loss", "fsdp", "by nature", "trains otherwise on parts of a batch"),
    ("class weights", "ddp", "by nature", "let Job.loss return a mean, and Job.weight"),
    ("block clamps its weights", "pipeline", "refused", "that the backward pass of an earlier micro-batch still needs"),
    ("blocks tied", "mesh", "equal", ""),
]
"""Models by hand for the kinds of idioms that a strategy could break, the outcome, and words that are said."""
RARER_KINDS: list[tuple[str, str, Outcome, str]] = [
    ("wide layer clamps its weights", "ddp, optimizer sharded", "equal", ""),
    ("call overridden", "pipeline, zero bubble", "equal", ""),
    ("norms in float32", "fsdp", "equal", ""),
    ("root: TorchScript layer", "dp", "equal", ""),
    ("block clamps its weights", "dp", "refused", "once for each device"),
    ("block clamps its weights", "parameter_server sync", "refused", "which the servers own"),
    ("momentum teacher", "dp", "refused", "once for each device"),
    ("momentum teacher", "ddp", "equal", ""),
    ("reads a weight ahead", "mesh", "equal", ""),
    ("frozen BatchNorm", "ddp, optimizer sharded", "equal", ""),
    ("hook that normalizes", "pipeline", "refused", "the gradient hook"),
    ("block parameter lists", "pipeline, zero bubble", "equal", ""),
    ("waits for a number", "fsdp", "equal", ""),
    ("root: batch changed in place", "dp", "equal", ""),
]
ASYNCHRONOUS = {"hogwild", "locked_sgd", "parameter_server async"}


def needs_package(name: str) -> None:
    package = MODELS[name].package
    if package != BY_HAND and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing: pip install {package}")


def assert_as_expected(gang: Gang, name: str, strategy: str, *, split: Any = None) -> None:
    found = cell(gang, name, strategy, split=split)
    if (name, strategy) in REFUSED:
        assert found.outcome == "refused", found.detail
        assert [words for words in CAUSES[name] if words not in found.detail] == []
    else:
        expected = "asynchronous" if strategy in ASYNCHRONOUS else "equal"
        assert found.outcome == expected, found.detail


def test_every_strategy_is_in_the_table() -> None:
    assert {options.name for options, _ in STRATEGIES.values()} == {*choices("strategy")} - {"auto", "script"}


@pytest.mark.parametrize(("name", "strategy"), [*SHORT, *in_campaign(("t5", "fsdp"), ("lora_llama", "model_parallel"))])
def test_a_model_under_every_strategy(gang: Gang, name: str, strategy: str) -> None:
    needs_package(name)
    assert_as_expected(gang, name, strategy)


@pytest.mark.parametrize(("name", "strategy", "outcome", "words"), [*KINDS, *in_campaign(*RARER_KINDS)])
def test_an_idiom(gang: Gang, name: str, strategy: str, outcome: Outcome, words: str) -> None:
    found = cell(gang, f"hand/{name}", strategy, adamw=True)
    assert (found.outcome, words in found.detail) == (outcome, True), found.detail


@pytest.mark.parametrize("name", ["llama_with_cache", *in_campaign("clip")])
def test_a_model_that_is_refused(gang: Gang, name: str) -> None:
    needs_package(name)
    for strategy in ("ddp", "dp", "pipeline"):
        assert_as_expected(gang, name, strategy)


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ZOO)
def test_the_whole_table(gang: Gang, name: str, strategy: str) -> None:
    needs_package(name)
    assert_as_expected(gang, name, strategy)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ZOO)
def test_every_model_is_cut_automatically(gang: Gang, name: str) -> None:
    """The batch of the UNet has exactly two keys."""
    needs_package(name)
    assert_as_expected(gang, name, "model_parallel", split="auto")
