"""Weights of GPT-2 and of the Llama family in the directories of Hugging Face: ``config.json`` and safetensors files.

Files are mapped into memory, so a worker that builds some stages of a model reads their weights only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from jobs.transformer import Architecture, RopeScaling, transformer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_BLOCK = {
    "gpt2": {
        "norm1": "ln_1", "norm2": "ln_2", "attention.q": "attn.c_attn", "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn", "attention.mix": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    "llama": {
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj", "attention.mix": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    },
}  # fmt: skip
_ENDS = {
    "gpt2": {"embed.token": "wte", "embed.position": "wpe", "norm": "ln_f"},
    "llama": {"embed.token": "embed_tokens", "norm": "norm"},
}
_PREFIX = {"gpt2": "transformer.", "llama": "model."}
_LAYERS = {"gpt2": "h", "llama": "layers"}
_BESIDE = ("*token*", "generation_config.json", "chat_template*", "vocab.*", "merges.txt", "*.model")
"""The files of a tokenizer, and how answers are generated."""
FILE_BYTES = 5 << 30
"""The largest size of a file of weights in a new directory."""
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a tensor of ours lies in theirs: rows ``[start, stop)`` of ``name``, which may be stored transposed."""

    name: str
    start: int | None = None
    stop: int | None = None
    transposed: bool = False

    def of(self, theirs: Tensor) -> Tensor:
        return (theirs.T if self.transposed else theirs)[self.start : self.stop]


def architecture_of(directory: Path, *, dropout: float) -> Architecture:
    """Read the architecture of the model in a directory that has ``config.json``, to be trained with ``dropout``.

    Raises:
        OSError: there is no ``config.json``.
        ValueError: the model is of another family, or has parts that :mod:`jobs.transformer` lacks.
    """
    config = json.loads((directory / CONFIG).read_text())
    kind = config.get("model_type")
    if kind == "gpt2":
        _refuse_others(
            config, activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False
        )
        width = config["n_embd"]
        return Architecture(
            variant="gpt2",
            vocabulary=config["vocab_size"],
            context=config["n_positions"],
            layers=config["n_layer"],
            width=width,
            heads=config["n_head"],
            kv_heads=config["n_head"],
            hidden=config.get("n_inner") or 4 * width,
            tied=config.get("tie_word_embeddings", True),
            bias=True,
            dropout=dropout,
            norm_eps=config["layer_norm_epsilon"],
        )
    if kind == "llama":
        _refuse_others(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
        width, heads = config["hidden_size"], config["num_attention_heads"]
        if config.get("head_dim") not in (None, width // heads):
            raise ValueError(f"{CONFIG}: head_dim={config['head_dim']}: must be hidden_size / num_attention_heads")
        # transformers 5 keeps both in rope_parameters
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return Architecture(
            variant="llama",
            vocabulary=config["vocab_size"],
            context=config["max_position_embeddings"],
            layers=config["num_hidden_layers"],
            width=width,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            hidden=config["intermediate_size"],
            tied=config.get("tie_word_embeddings", False),
            bias=False,
            dropout=dropout,
            norm_eps=config["rms_norm_eps"],
            rope_base=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
            rope_scaling=_rope_scaling(rope),
        )
    raise ValueError(f"{CONFIG}: model_type={kind}: only gpt2 and llama can be read")


def load(model: nn.Module, a: Architecture, directory: Path) -> None:
    """Copy the weights of a directory into a model of architecture ``a``, after :func:`check_weights`."""
    files = _Files(directory)
    with torch.no_grad():
        for name, place in _places(a):
            model.get_parameter(name).copy_(place.of(files.tensor(place.name, a)))


def check_weights(a: Architecture, directory: Path) -> None:
    """Check that a directory has all weights of architecture ``a``, in their shapes, without reading them.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is missing or damaged; or a weight is missing, or of another shape: the first of them, and
            how many there are.
    """
    files = _Files(directory)
    with torch.device("meta"):
        wanted = dict(transformer(a).named_parameters())
    faults = []
    for name, place in _places(a):
        entry = files.entry(place.name, a)
        if entry is None:
            faults.append(f"{place.name} is missing")
        elif entry["dtype"] not in _DTYPES:
            raise ValueError(f"{place.name} is of {entry['dtype']}, and only {', '.join(_DTYPES)} can be read")
        else:
            got = place.of(torch.empty(entry["shape"], device="meta")).shape
            if got != wanted[name].shape:
                faults.append(f"{place.name} gives {name} the shape {list(got)}, not {list(wanted[name].shape)}")
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(f"{faults[0]}{more}; the weights are of another model than {CONFIG}")


def save(
    weights: Mapping[str, Tensor],
    a: Architecture,
    directory: Path,
    *,
    origin: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write weights as a new directory that ``from_pretrained`` of ``transformers`` loads.

    No more of them are in memory than one file has.

    Args:
        weights: the tensors of a model of architecture ``a`` by name, as in the ``model.safetensors`` of a checkpoint.
        a: the architecture.
        directory: must not exist.
        origin: the directory of the model that was trained further, if there is one; its tokenizer goes along.
        file_bytes: the largest size of a file, unless one tensor is larger.

    Raises:
        FileExistsError: ``directory`` exists.
        ValueError: ``transformers`` has no such model, or a weight is missing.
    """
    if a.variant == "gpt2" and a.kv_heads != a.heads:
        raise ValueError(
            f"job.kv_heads={a.kv_heads}: a GPT-2 of Hugging Face has as many key-value heads as heads, here "
            f"job.heads={a.heads}; train it with job.kv_heads={a.heads} or job.variant=llama"
        )
    directory.mkdir(parents=True)
    _write_files(_in_their_layout(weights, a), directory, file_bytes)
    config = _config_of(a)
    if origin is not None:
        before = json.loads((origin / CONFIG).read_text())
        config |= {key: value for key, value in before.items() if key.endswith("_token_id")}
        for file in [file for pattern in _BESIDE for file in origin.glob(pattern)]:
            shutil.copy(file, directory)
    (directory / CONFIG).write_text(json.dumps(config, indent=2))


def load_theirs(directory: Path) -> nn.Module:
    """Load what :func:`save` has written with ``transformers``, as a module from tokens to logits."""
    from transformers import AutoModelForCausalLM

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(directory)

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.model(tokens).logits
            return logits

    return Theirs()


def _in_their_layout(weights: Mapping[str, Tensor], a: Architecture) -> Iterator[tuple[str, Tensor]]:
    parts: dict[str, list[tuple[str, bool]]] = {}
    for name, place in _places(a):
        parts.setdefault(place.name, []).append((name, place.transposed))

    def part(name: str, transposed: bool) -> Tensor:
        if not a.bias and name.endswith(".bias") and ".norm" not in f".{name}":  # theirs has biases in any case
            return torch.zeros(len(weights[name.removesuffix("bias") + "weight"]))
        if name not in weights:
            raise ValueError(f"the checkpoint has no {name}; it is of another model than the recorded job")
        return weights[name].T if transposed else weights[name]

    for theirs, ours in parts.items():
        # Only the rows of q, k and v are joined; in GPT-2's layout they are columns.
        yield theirs, torch.cat([part(*each) for each in ours], dim=-1)


def _write_files(tensors: Iterable[tuple[str, Tensor]], directory: Path, file_bytes: int) -> None:
    """Write tensors to one file, or to several and their index, each as soon as it is full."""
    names: list[list[str]] = []
    size = total = 0
    held: dict[str, Tensor] = {}

    def write() -> None:
        save_file(held, directory / str(len(names)), metadata={"format": "pt"})
        names.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > file_bytes:
            write()
            size = 0
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    if len(names) == 1:
        (directory / "0").rename(directory / WEIGHTS)
        return
    files = [f"model-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
    for number, file in enumerate(files):
        (directory / str(number)).rename(directory / file)
    of_name = {name: file for file, each in zip(files, names, strict=True) for name in each}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": of_name}, indent=2))


def save_tokenizer(file: Path, directory: Path, *, end_token: int | None) -> None:
    """Put a ``tokenizer.json`` into a directory so that ``AutoTokenizer`` loads it as it is."""
    text = file.read_text()
    (directory / "tokenizer.json").write_text(text)
    names = {token["id"]: token["content"] for token in json.loads(text)["added_tokens"]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names.get(end_token)}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


class _Files:
    """The tensors of a directory of safetensors files."""

    def __init__(self, directory: Path):
        index = directory / INDEX
        names = [WEIGHTS]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for name in names:
            path = directory / name
            _check_whole(path)
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            self._entries |= {key: (path, 8 + size, entry) for key, entry in header.items() if key != "__metadata__"}

    def entry(self, name: str, a: Architecture) -> dict[str, Any] | None:
        found = self._find(name, a)
        return None if found is None else found[2]

    def tensor(self, name: str, a: Architecture) -> Tensor:
        found = self._find(name, a)
        assert found is not None
        path, start, entry = found
        kind = _DTYPES[entry["dtype"]]
        # Copy on write, because torch warns of arrays that cannot be written. Nothing writes.
        array = np.memmap(path, kind, "c", start + entry["data_offsets"][0], tuple(entry["shape"]))
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if entry["dtype"] == "BF16" else tensor

    def _find(self, name: str, a: Architecture) -> tuple[Path, int, dict[str, Any]] | None:
        """A bare GPT-2 or Llama is stored without the prefix of the model that has a head."""
        return self._entries.get(name) or self._entries.get(name.removeprefix(_PREFIX[a.variant]))


def _check_whole(path: Path) -> None:
    try:
        with safe_open(path, framework="np"):
            pass
    except FileNotFoundError:
        raise ValueError(f"has no {path.name}; save the model with safetensors") from None
    except SafetensorError as e:
        raise ValueError(f"{path.name} is cut short, or no safetensors file ({e})") from e


def _places(a: Architecture) -> Iterator[tuple[str, _Place]]:
    """Yield where each parameter of a model of architecture ``a`` lies; tied weights once."""
    prefix = _PREFIX[a.variant]
    kinds = ("weight", "bias") if a.variant == "gpt2" else ("weight",)
    for ours, theirs in _ENDS[a.variant].items():
        for kind in kinds if ours == "norm" else ("weight",):
            yield f"{ours}.{kind}", _Place(name=f"{prefix}{theirs}.{kind}")
    for i in range(a.layers):
        for ours, theirs in _BLOCK[a.variant].items():
            for kind in kinds:
                rows = ("attention.q", "attention.k", "attention.v").index(ours) if theirs == "attn.c_attn" else None
                yield (
                    f"block{i}.{ours}.{kind}",
                    _Place(
                        name=f"{prefix}{_LAYERS[a.variant]}.{i}.{theirs}.{kind}",
                        start=None if rows is None else rows * a.width,
                        stop=None if rows is None else (rows + 1) * a.width,
                        transposed=a.variant == "gpt2" and kind == "weight" and not ours.startswith("norm"),
                    ),
                )
    if not a.tied:
        yield "head.weight", _Place(name="lm_head.weight")


def _refuse_others(config: Mapping[str, Any], **known: Any) -> None:
    for key, value in known.items():
        if config.get(key, value) != value:
            raise ValueError(f"{CONFIG}: {key}={config[key]}: only {value} can be read")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(factor=rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            factor=rope["factor"],
            original_context=rope["original_max_position_embeddings"],
            low=rope["low_freq_factor"],
            high=rope["high_freq_factor"],
        )
    raise ValueError(f"{CONFIG}: rope_type={kind}: only default, linear and llama3 can be read")


def _config_of(a: Architecture) -> dict[str, Any]:
    common: dict[str, Any] = {"vocab_size": a.vocabulary, "tie_word_embeddings": a.tied}
    common |= {"bos_token_id": a.end_token, "eos_token_id": a.end_token}
    if a.variant == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": a.context,
            "n_embd": a.width,
            "n_layer": a.layers,
            "n_head": a.heads,
            "n_inner": a.hidden,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": a.norm_eps,
        }
    rope: dict[str, Any] = {"rope_theta": a.rope_base, "rope_type": "default"}
    if (scaling := a.rope_scaling) is not None:
        rope |= {"rope_type": "linear", "factor": scaling.factor}
        if scaling.original_context is not None:
            rope |= {
                "rope_type": "llama3",
                "original_max_position_embeddings": scaling.original_context,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
            }
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": a.context,
        "hidden_size": a.width,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "intermediate_size": a.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": a.norm_eps,
        "rope_parameters": rope,
        "rope_theta": a.rope_base,
    }
