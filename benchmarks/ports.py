"""Three well-known training scripts beside their ports: the loss of every step, on generated data.

python benchmarks/ports.py SCRIPTS [--only nanogpt,imagenet,run_clm]

SCRIPTS is a directory with nanoGPT/ (model.py, train.py, configurator.py), imagenet/main.py and run_clm.py. Writes the
tables of docs/ports.md, unless it was asked for some of them only. Needs torchvision, evaluate, and the extras ``test``
and ``hf``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "docs/examples")]  # for tests/helpers, and for the ports

from harness.pages import with_part  # noqa: E402

from helpers.conformance.cases import DDP, SINGLE, Case, having  # noqa: E402
from helpers.conformance.layouts import pipeline  # noqa: E402
from helpers.ranks.gang import Gang  # noqa: E402
from helpers.ranks.loops import losses_by_step, run_loop  # noqa: E402
from orchestrator.config.schema import StrategyConfig  # noqa: E402
from orchestrator.job import Job  # noqa: E402

PAGE = ROOT / "docs" / "ports.md"
Losses = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Port:
    """A script, and the job that stands for it; ``train``, ``seed`` and ``strategies`` are those of the runs."""

    script: Callable[[Path, Path], Losses]
    job: Callable[[Path], Job]
    steps: int
    batch: int
    clip_norm: float | None
    seed: int
    strategies: Mapping[str, StrategyConfig]


def nanogpt(scripts: Path, folder: Path) -> Losses:
    random = np.random.default_rng(0)
    data = folder / "data" / "generated"
    data.mkdir(parents=True)
    for split, length in (("train", 20_000), ("val", 2_000)):
        noise = random.integers(0, 3, length)
        ((np.arange(length) * 7 + noise) % 61).astype(np.uint16).tofile(data / f"{split}.bin")
    sizes = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--dataset=generated"]
    batches = ["--batch_size=8", "--gradient_accumulation_steps=1", "--eval_iters=1", "--eval_interval=1000"]
    steps = ["--max_iters=39", "--lr_decay_iters=40", "--warmup_iters=5", "--learning_rate=3e-3", "--min_lr=3e-4"]
    machine = ["--device=cpu", "--dtype=float32", "--compile=False"]
    (folder / "configurator.py").symlink_to(scripts / "nanoGPT" / "configurator.py")
    text = _output([str(scripts / "nanoGPT" / "train.py"), *sizes, *batches, *steps, *machine], folder)
    return {int(step) + 1: float(loss) for step, loss in re.findall(r"^iter (\d+): loss ([\d.]+)", text, re.MULTILINE)}


def nanogpt_job(folder: Path) -> Job:
    from nanogpt_job import InScriptOrder

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "eval_blocks": 8}
    rates = {"learning_rate": 3e-3, "min_lr": 3e-4, "warmup_iters": 5}
    return InScriptOrder(data=str(folder / "data/generated"), batch_size=8, eval_iters=1, **sizes, **rates)


def imagenet(scripts: Path, folder: Path) -> Losses:
    from PIL import Image

    random = np.random.default_rng(0)
    for split, images in (("train", 8), ("val", 4)):
        for kind in range(4):
            (folder / split / str(kind)).mkdir(parents=True)
            for number in range(images):
                pixels = random.integers(0, 64, (48, 48, 3)) + 48 * kind
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / str(kind) / f"{number}.png")
    options = ["--epochs=3", "--batch-size=8", "--lr=0.001", "--workers=0", "--print-freq=1", "--seed=0", "--no-accel"]
    text = _output([str(scripts / "imagenet" / "main.py"), *options, str(folder)], folder)
    losses = re.findall(r"^Epoch: .*\tLoss (\S+) \(", text, re.MULTILINE)
    return {step: float(loss) for step, loss in enumerate(losses, start=1)}


def imagenet_job(folder: Path) -> Job:
    from imagenet_job import InScriptOrder

    return InScriptOrder(data=str(folder), lr=0.001)


def run_clm(scripts: Path, folder: Path) -> Losses:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "tokenizer")
    sums = [f"{a} + {b} = {a + b}\n" for a in range(25) for b in range(25)]
    (folder / "train.txt").write_text("".join(sums)[: 160 * 33])
    (folder / "val.txt").write_text("".join(sums)[-330:])
    options = {
        "model_type": "gpt2",
        "config_overrides": CLM_SIZES,
        "tokenizer_name": folder / "tokenizer",
        "train_file": folder / "train.txt",
        "validation_file": folder / "val.txt",
        "block_size": 33,
        "output_dir": folder / "out",
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "seed": 42,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    _output([str(scripts / "run_clm.py"), "--do_train", *words], folder)
    log = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    return {line["step"]: float(line["loss"]) for line in log if "loss" in line}


CLM_SIZES = (
    "vocab_size=256,n_positions=64,n_embd=32,n_layer=2,n_head=2,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0,"
    "bos_token_id=0,eos_token_id=0"
)


def run_clm_job(folder: Path) -> Job:
    from run_clm_job import InScriptOrder

    return InScriptOrder(
        config_overrides=CLM_SIZES,
        tokenizer_name=str(folder / "tokenizer"),
        train_file=str(folder / "train.txt"),
        validation_file=str(folder / "val.txt"),
        block_size=33,
        learning_rate=1e-3,
    )


_STAGED = {"single": SINGLE, "ddp": DDP, "pipeline": pipeline("1F1B", 4, "auto")}
PORTS = {
    "nanogpt": Port(script=nanogpt, job=nanogpt_job, steps=40, batch=8, clip_norm=1.0, seed=1337, strategies=_STAGED),
    "imagenet": Port(
        script=imagenet,
        job=imagenet_job,
        steps=12,
        batch=8,
        clip_norm=None,
        seed=0,
        strategies={"single": SINGLE, "ddp": replace(DDP, sync_batchnorm=True)},
    ),
    "run_clm": Port(script=run_clm, job=run_clm_job, steps=40, batch=8, clip_norm=1.0, seed=42, strategies=_STAGED),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", type=Path, help="where the scripts are")
    parser.add_argument("--only", default=",".join(PORTS), help="names of ports")
    options = parser.parse_args()
    scripts, names = options.scripts.resolve(), options.only.split(",")
    sys.path.insert(0, str(scripts / "nanoGPT"))  # the port imports its model.py
    gang = Gang()
    try:
        tables = {}
        for name in names:
            tables[name] = table(compared(gang, PORTS[name], scripts))
            print(f"{name}\n{tables[name]}\n", flush=True)
    finally:
        gang.close()
    if names == list(PORTS):
        write(tables)
    return 0


def compared(gang: Gang, port: Port, scripts: Path) -> dict[str, Losses]:
    """Run the script and its port under each strategy, and return their losses."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        found = {"the script": port.script(scripts, folder)}
        assert len(found["the script"]) == port.steps, found
        settings = having(steps=port.steps, global_batch_size=port.batch, clip_norm=port.clip_norm)
        for name, options in port.strategies.items():
            case = Case(job=port.job(folder), train=settings, options=options, seed=port.seed)
            size = 1 if options is SINGLE else 2
            ranks = gang.run(
                run_loop, case, size, str(folder / f"runs/{name}"), None, 0, world_size=size, timeout_s=300
            )
            found[f"`strategy={name}`"] = losses_by_step(ranks)
    return found


def table(losses: Mapping[str, Losses]) -> str:
    """Return the losses at some steps, and the largest difference from the script, as Markdown."""
    script = losses["the script"]
    shown = [1, len(script) // 2, len(script)]
    rows: list[Sequence[str]] = [["", *(f"step {step}" for step in shown), "largest difference"], ["---"] * 5]
    for name, found in losses.items():
        apart = max(abs(found[step] - script[step]) for step in script)
        rows.append([name, *(f"{found[step]:.5f}" for step in shown), "" if found is script else f"{apart:.0e}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(tables: Mapping[str, str]) -> None:
    """Replace the tables and the versions in the documentation."""
    packages = ("torch", "torchvision", "transformers")
    parts = tables | {"versions": f"Versions: {', '.join(f'{package} {version(package)}' for package in packages)}."}
    page = PAGE.read_text()
    for name, text in parts.items():
        page = with_part(page, "ports", name, text)
    PAGE.write_text(page)


def _output(words: Sequence[str], folder: Path) -> str:
    """Run a script with one thread, in a folder, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
