"""``strategy.tensor=2`` relative to a hand-written ``parallelize_module`` under torchrun: the blocks of Llama.

python benchmarks/tensor.py
"""

from __future__ import annotations

from harness.arms import Workload, ours, torchrun
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report

ROUNDS = 5
NEVER = 100_000
FIELDS = {
    "variant": "llama",
    "layers": 4,
    "width": 256,
    "hidden": 704,
    "heads": 8,
    "kv_heads": 4,
    "context": 128,
    "sample_tokens": 0,
}


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    workload = Workload(job="jobs.gpt.GPT", fields=FIELDS, global_batch_size=8, steps=50, log_every=NEVER)
    arms = {
        "ours": ours(workload, overrides=["strategy.tensor=2"]),
        "ours, own tokens": ours(workload, overrides=["strategy.tensor=2", "strategy.sequence=true"]),
        "torchrun": torchrun(workload, script="torchrun_tensor.py"),
    }
    rounds = interleave(arms, rounds=1 if arguments.quick else ROUNDS)
    about = "a hand-written `parallelize_module` under torchrun: llama, 2 workers"
    claims = [
        Claim(
            name=f"samples/s, strategy.tensor=2 / {about}",
            ratios=ratios(rounds, "ours", "torchrun", "samples_per_s"),
            at_least=1.0,
        ),
        Claim(
            name=f"samples/s, strategy.tensor=2 strategy.sequence=true / {about}",
            ratios=ratios(rounds, "ours, own tokens", "torchrun", "samples_per_s"),
        ),
    ]
    report(
        "tensor", claims, ceiling=None, rounds={"llama": rounds}, notes=rates_table(rounds), keep=not arguments.quick
    )


if __name__ == "__main__":
    main()
