"""Find the largest batch that fits: ``orchestrator batch-size job=gpt strategy=ddp``.

Real runs of a few steps, each with twice the global batch of the one before, from ``train.global_batch_size`` on, until
memory runs out. On CPUs, the search also ends when larger batches are no faster, or may not fit into the memory of the
host. Nothing of these runs is recorded or uploaded.

Exit codes: 0 done; 1 no batch fits, or a run failed for another reason; 2 wrong arguments; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from orchestrator.config.overrides import last_of_each
from orchestrator.config.redact import Redactor
from orchestrator.display.plain_text import say_note
from orchestrator.driver.preflight.early_checks import refuse_early
from orchestrator.verb_options import add_files, file_words, positive
from orchestrator.verb_outcome import outcome

KEY = "train.global_batch_size"
STEPS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="orchestrator batch-size",
        description="Find the largest batch that fits, by runs of a few steps, each with twice the batch of the one "
        f"before. They begin with {KEY}.",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for `orchestrator launch`")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"steps of each run (default: {STEPS})")
    parser.add_argument("--largest", type=positive, metavar="SAMPLES", help="the largest global batch to try")
    add_files(parser)
    options = parser.parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    redactor = Redactor.of_process()
    return outcome("batch-size", lambda: _search(options, redactor), redactor)


def _search(options: argparse.Namespace, redactor: Redactor) -> int:
    words = last_of_each([*file_words(options), *options.words], say_note)
    refuse_early([words], redactor, starts_here=True)
    # Imported here because this takes seconds.
    from orchestrator.features.batch_size.search import search

    return search(words, redactor, steps=options.steps, largest=options.largest)


if __name__ == "__main__":
    sys.exit(main())
