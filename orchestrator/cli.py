"""The command ``orchestrator <verb> ...``. Without a verb it launches: ``orchestrator strategy=ddp``.

A verb is a module with a ``main(argv) -> exit code``, which also runs as ``python -m orchestrator.<verb>``: one in this
package, or one in ``features/<name>/verbs``, which is there as long as its feature is. Only the module of the chosen
verb is imported, so that ``orchestrator --help`` needs neither torch nor Hydra.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType

from orchestrator.config.synonyms import instead
from orchestrator.config.text import did_you_mean
from orchestrator.display.terminal import lasting_output
from orchestrator.launch import COMPLETION_OPTIONS, HELP_OPTIONS
from orchestrator.verb_options import BAD_INPUT, INTERRUPTED


@dataclass(frozen=True)
class Verb:
    """A verb of the command ``orchestrator``.

    Attributes:
        summary: its line in ``orchestrator --help``.
        words: what follows it: the name of a ``run``, ``keys`` as of a launch, or something else (None).
    """

    module: str
    summary: str
    words: str | None = None


_VERBS = {
    "launch": Verb("orchestrator.launch", "train a job; the default verb: `orchestrator strategy=ddp`", "keys"),
    "new": Verb("orchestrator.new", "begin a project: a job, its configuration, its test and a README"),
    "torchrun": Verb("orchestrator.torchrun", "run a script of your own, with torchrun's options, as strategy=script"),
    "plan": Verb("orchestrator.plan", "predict layouts, speed and cost of a job on a cluster that is not here", "keys"),
    "batch-size": Verb(
        "orchestrator.batch_size", "find the largest batch that fits, by doubling it in real runs", "keys"
    ),
    "submit": Verb("orchestrator.submit", "send a launch to a Ray cluster as a job, and follow it", "keys"),
    "stop": Verb("orchestrator.stop", "stop a run, whose driver may be on another host", "run"),
    "queue": Verb("orchestrator.queue", "list the runs that share a cluster, cancel them, or change their priority"),
    "logs": Verb("orchestrator.logs", "show what the ranks of a run have written", "run"),
    "runs": Verb("orchestrator.runs", "list the newest runs, here or on a cluster: state, speed, loss, age"),
    "show": Verb("orchestrator.show", "tell what a run was, how it went, and what may follow", "run"),
    "evaluate": Verb("orchestrator.evaluate", "evaluate a checkpoint of a run, without training", "run"),
    "export": Verb("orchestrator.export", "write the model of a run as files for other programs", "run"),
    "tokenize": Verb("orchestrator.tokenize", "make a file of tokens from texts, for job=gpt"),
    "doctor": Verb("orchestrator.doctor", "check this machine and its cluster, with a remedy for each fault"),
    "schema": Verb("orchestrator.schema", "print the JSON Schema of configuration files, for an editor"),
    "compare": Verb("orchestrator.compare", "show runs side by side, as a table, a picture and a page", "run"),
    "sync": Verb("orchestrator.sync", "upload the missing points of a run to MLflow", "run"),
}
VERBS: Mapping[str, Verb] = {name: verb for name, verb in _VERBS.items() if importlib.util.find_spec(verb.module)}
DEFAULT_VERB = "launch"
_TRAINING_WORDS = ("train", "fit", "run", "start")
"""What other launchers call it."""
_LAUNCHERS = ("python", "accelerate", "deepspeed", "lightning")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``orchestrator`` with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with lasting_output():
        return _main(words)


def _main(words: list[str]) -> int:
    try:
        if "COMP_LINE" in os.environ and not set(COMPLETION_OPTIONS).isdisjoint(words):
            return _complete(words)
        if words and set(words) <= set(HELP_OPTIONS):
            print(help_text())
            return 0
        verb, arguments = DEFAULT_VERB, words
        if words and _may_be_verb(words[0]):
            verb, *arguments = words
        if verb not in VERBS:
            hint = _instead(verb, arguments) or f"{_key(verb)} (configuration keys are written key=value)"
            print(f"orchestrator {verb}: unknown verb; {hint}", file=sys.stderr)
            return BAD_INPUT
        return int(_module(verb).main(arguments))
    except KeyboardInterrupt:  # while the module was imported, which takes seconds for some
        return INTERRUPTED


def help_text() -> str:
    """The text of ``orchestrator --help``: the verbs, and where to find the configuration keys."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return f"""\
Train PyTorch jobs on a Ray cluster, and work with the resulting runs.

Usage: orchestrator <verb> [arguments]

Verbs
{verbs}

  orchestrator launch --help       all configuration keys with their values
  orchestrator <verb> --help       the arguments of a verb

Each verb also runs as `python -m orchestrator.<verb>`."""


def _instead(verb: str, arguments: Sequence[str]) -> str | None:
    """Return what to type in place of a word of other launchers, or of a file; None if it is neither."""
    words = (verb, *(arguments if verb in (*_TRAINING_WORDS, *_LAUNCHERS) else ()))
    file = next((word for word in words if word.endswith(".py")), None)
    if file is not None and "torchrun" in VERBS:
        return f"to run a script, `orchestrator torchrun {file}`; for a job in it, job=<module>.<class>"
    return "to train a job, `orchestrator launch job=<name>`" if verb in _TRAINING_WORDS else None


def _key(verb: str) -> str:
    """Return the verb, or the key, that is meant by a word that is none."""
    key = None if get_close_matches(verb, VERBS) else instead(verb)
    return key or did_you_mean(verb, VERBS)


def _module(verb: str) -> ModuleType:
    return importlib.import_module(VERBS[verb].module)


def _may_be_verb(word: str) -> bool:
    return not word.startswith("-") and "=" not in word


def _complete(words: Sequence[str]) -> int:
    """Answer a shell that completes the command line in ``COMP_LINE``: verbs as the first word, then what follows."""
    line = os.environ["COMP_LINE"]
    program, *typed = line.split() or [""]
    complete_words, prefix = (typed, "") if line.endswith(" ") or not typed else (typed[:-1], typed[-1])
    if not complete_words:
        answer = io.StringIO()
        with contextlib.redirect_stdout(answer):
            code = int(_module(DEFAULT_VERB).main(words))
        print("\n".join(sorted({*answer.getvalue().split(), *(verb for verb in VERBS if verb.startswith(prefix))})))
        return code
    if _may_be_verb(complete_words[0]):
        verb, *arguments = complete_words
        follows = VERBS[verb].words if verb in VERBS else None
        if follows == "run":
            from orchestrator.completion import of_run

            print("\n".join(sorted(of_run(arguments, prefix))))
        if follows != "keys":
            return 0  # without an answer, the shell completes file names
        os.environ["COMP_LINE"] = " ".join([program, *line.split(maxsplit=2)[2:]])
    return int(_module(DEFAULT_VERB).main(words))


if __name__ == "__main__":
    sys.exit(main())
