"""What ``job=hf`` writes for ``orchestrator export``, and how other programs load it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from jobs.hugging_face import AUTO_CLASSES, Logits, load_tokenizer, place, quiet
from jobs.preferences import LogRatios

if TYPE_CHECKING:
    from jobs.hf import HuggingFace


def write(job: HuggingFace, weights: Mapping[str, Tensor], directory: Path, format: str) -> None:
    """Write the whole model, with adapters merged into its weights, or the adapters alone; and the tokenizer.

    Raises:
        ValueError: the model has nothing of the kind.
    """
    if format == "adapter" and job.peft is None:
        raise ValueError("--format=adapter: the run trained the whole model; use --format=hf")
    if format == "adapter" and job.model_name_or_path is None:
        raise ValueError(
            "--format=adapter: the model began with random weights, which nothing else has; use --format=hf"
        )
    wrapper = job.model()
    wrapper.load_state_dict(weights)
    model: Any = wrapper.model
    if format == "hf" and job.peft is not None:
        model = _merged(model, str(job.peft))
    with quiet():
        model.save_pretrained(directory)
    job.tokenizer().save_pretrained(directory)


def load(job: HuggingFace, directory: Path, format: str) -> nn.Module | None:
    """Return the model in a directory; None if its reference had random weights.

    Raises:
        ValueError: the tokenizer beside it is another one than that of the job.
    """
    import transformers

    auto = getattr(transformers, AUTO_CLASSES[job.task])
    _compare_tokenizers(job.tokenizer(), load_tokenizer(str(directory)))

    def base() -> Any:
        return auto.from_pretrained(place(job.model_name_or_path), dtype="float32", **job.label_options)

    with quiet():
        if format == "adapter":
            import peft

            model = peft.PeftModel.from_pretrained(base(), directory)
        else:
            model = auto.from_pretrained(directory)
        if job.task != "dpo":
            return Logits(model, job.task)
        if job.model_name_or_path is None:
            return None
        made = LogRatios(base(), has_adapters=False)
    made.model = model
    return made


def _merged(model: Any, method: str) -> Any:
    if not hasattr(model.base_model, "merge_and_unload"):
        raise ValueError(
            f"--format=hf: job.peft={method}: cannot be merged into the weights of the model; use --format=adapter"
        )
    base = model.get_base_model()
    is_tied = getattr(base.config, "tie_word_embeddings", False)
    _untie_adapted(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*tie_word_embeddings.*")  # peft says how to do what is done here
        made = model.merge_and_unload()
    first, last = made.get_input_embeddings(), made.get_output_embeddings()
    if is_tied and last is not None and first.weight.shape == last.weight.shape:
        made.config.tie_word_embeddings = bool((first.weight == last.weight).all())
        made.tie_weights()
    return made


def _untie_adapted(model: nn.Module) -> None:
    """Give each layer with an adapter a weight of its own: of one that is tied, the others would change with it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    shared = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if isinstance(weight, nn.Parameter) and shared[id(weight)] > 1:
            base.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)


def _compare_tokenizers(ours: Any, theirs: Any) -> None:
    text = "One, two;  THREE 4\n"
    for name in ("eos_token_id", "pad_token_id", "bos_token_id", "chat_template"):
        if getattr(ours, name, None) != getattr(theirs, name, None):
            raise ValueError(f"the tokenizer has {name}={getattr(theirs, name, None)!r}, and that of the job another")
    if ours(text)["input_ids"] != theirs(text)["input_ids"]:
        raise ValueError(f"the tokenizer makes other tokens of {text!r} than that of the job")
