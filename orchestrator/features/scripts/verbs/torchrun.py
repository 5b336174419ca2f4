"""Run a script as torchrun does: ``orchestrator torchrun --nproc-per-node 8 train.py --lr 0.1``.

The options of torchrun become overrides of ``strategy=script``; further ones may stand before the script, as in
``orchestrator torchrun --nproc-per-node 8 cluster=auto train.py``. Exit codes are those of ``launch``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from orchestrator.config.synonyms import instead
from orchestrator.config.text import did_you_mean
from orchestrator.display.plain_text import refuse
from orchestrator.verb_options import INTERRUPTED

_MEANINGLESS = (
    *("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank", "--master-addr"),
    *("--master-port", "--local-addr", "--monitor-interval", "--start-method", "--role", "--log-dir", "--redirects"),
    *("--tee", "--log-line-prefix-template", "--local-ranks-filter", "--event-log-handler", "--logs-specs"),
    *("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--signals-to-handle", "--shutdown-timeout"),
    *("--numa-binding", "--run-path"),
)
"""Options of torchrun that are accepted, because Ray places the ranks and each rank has a log of its own."""
_FLAGS = ("--standalone", "--run-path")
_SHORT = {"--redirects": "-r", "--tee": "-t"}
_OF_OTHERS = {
    "--nproc-per-node": "num_processes num_gpus gpus devices nproc num_workers",
    "--nnodes": "num_machines num_nodes nodes",
    "leave it out, because --nproc-per-node says how many ranks there are": "multi_gpu use_distributed multi_node",
    "the script chooses its precision itself": "mixed_precision fp16 bf16 amp",
    "give --nnodes, or cluster=auto for all nodes of a Ray cluster": "hostfile include machine_rank main_process_ip",
}
"""Options of other launchers, by what to use."""
_OF_THE_LOOP = ("use train.", "use data.", "use checkpoint.", "a field of the job")
"""Remedies for what a script does itself."""
_NEEDS_NO_QUOTES = re.compile(r"-[\w./:@%+-]+( [\w./:@%+-]+)*", re.ASCII)
"""Arguments that an override may have as they are."""
_OVERRIDE = re.compile(r"\+*[A-Za-z_][\w.]*=")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    try:
        overrides, ignored = torchrun_overrides(list(sys.argv[1:] if argv is None else argv))
    except ValueError as e:
        return refuse("torchrun", e)
    except KeyboardInterrupt:
        return INTERRUPTED
    from orchestrator import launch

    if ignored:
        print(f"note: {', '.join(ignored)}: without effect, because Ray places the ranks and each has its log")
    return launch.main(overrides)


def torchrun_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides for the arguments of torchrun, and the options that have no effect.

    Raises:
        ValueError: an option has a value that torchrun would not take, or there is no script.
    """
    parser, options, overrides = _parser(), argparse.Namespace(), list[str]()
    rest = list(arguments)
    while rest:
        _, unknown = parser.parse_known_args(rest, options)
        if unknown:
            raise ValueError(_unknown(unknown[0], parser))
        rest = options.words
        if not (rest and _OVERRIDE.match(rest[0])):
            break
        overrides.append(rest.pop(0))
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest:
        raise ValueError("which script? As in `orchestrator torchrun --nproc-per-node 8 train.py`")
    from orchestrator.config.overrides import quote_text

    workers = _num_workers(options.nnodes, options.nproc_per_node)
    several_nodes = int(options.nnodes.partition(":")[0]) > 1
    kind = "module" if options.module else "program" if options.no_python else "file"
    script, *args = rest
    joined = shlex.join(args)
    meant = {
        "strategy": "script",
        "cluster": "auto" if several_nodes else None,  # all of these ranks on one machine may exhaust its memory
        "strategy.num_workers": workers,
        "recovery.max_failures": options.max_restarts,
        "job.kind": kind,
        "job.script": quote_text(script),
        "job.args": (joined if re.fullmatch(_NEEDS_NO_QUOTES, joined) else quote_text(joined)) if args else None,
    }
    given = {override.partition("=")[0] for override in overrides}
    words = [f"{key}={value}" for key, value in meant.items() if value is not None and key not in given]
    ignored = [name for name in _MEANINGLESS if getattr(options, name[2:].replace("-", "_")) is not None]
    return [*words, *overrides], ignored


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _unknown(option: str, parser: argparse.ArgumentParser) -> str:
    """Return what to use in place of an option that torchrun does not have."""
    name, equals, value = option.partition("=")
    asked = name.lstrip("-").replace("-", "_").lower()
    given = f"={value}" if equals else ""
    if (ours := next((ours for ours, theirs in _OF_OTHERS.items() if asked in theirs.split()), None)) is not None:
        remedy = f"use {ours}{given}" if ours.startswith("-") else ours
    else:
        known = [known[2:] for known in parser._option_string_actions if known.startswith("--") and "_" not in known]
        remedy = did_you_mean(asked.replace("_", "-"), known, prefix="--")
        if not remedy.startswith("did"):
            key = instead(asked)
            remedy = "options of torchrun stand before the script, those of the script after it"
            if key is not None and not key.startswith(_OF_THE_LOOP):
                remedy = f"{key}; {remedy}"
    return f"{name}: no option of torchrun; {remedy}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="orchestrator torchrun",
        usage="%(prog)s [options] [key=value ...] script [argument ...]",
        description="Run a script that runs under torchrun, with torchrun's options, as strategy=script.",
        epilog=f"Accepted without effect, because Ray places the ranks: {', '.join(_MEANINGLESS)}.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.set_defaults(**{name[2:].replace("-", "_"): None for name in (*_MEANINGLESS, "--max-restarts")})
    parser.set_defaults(nnodes="1", nproc_per_node="1", module=False, no_python=False)
    _add(parser, "--nproc-per-node", help="ranks per node: a number, gpu, cpu or auto; with --nnodes, all ranks")
    _add(parser, "--nnodes", help="number of nodes, or MIN:MAX for an elastic run; above 1 with cluster=auto")
    _add(parser, "--max-restarts", type=int, help="restarts after failures: recovery.max_failures")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module")
    _add(parser, "--no-python", action="store_true", help="the script is a program of another kind")
    for name in _MEANINGLESS:
        flag = {"action": "store_const", "const": True} if name in _FLAGS else {}
        _add(parser, name, help=argparse.SUPPRESS, **flag)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="script", help="the script, and its arguments")
    return parser


def _add(parser: argparse.ArgumentParser, name: str, **options: object) -> None:
    """Add an option as torchrun has it: with dashes or underscores."""
    names = dict.fromkeys([name, f"--{name[2:].replace('-', '_')}", *filter(None, [_SHORT.get(name)])])
    parser.add_argument(*names, **options)  # type: ignore[arg-type]


def _num_workers(nnodes: str, nproc: str) -> str:
    """Return ``strategy.num_workers`` for so many nodes with so many ranks each."""
    nodes = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    if nodes is None or int(nodes[1]) < 1:
        raise ValueError(f"--nnodes={nnodes}: expected a number of nodes, or MIN:MAX")
    if nproc in ("gpu", "auto"):
        if nnodes != "1":
            raise ValueError(f"--nproc-per-node={nproc}: give a number, because --nnodes={nnodes} is multiplied by it")
        return "auto"
    if nproc == "cpu":
        nproc = str(len(os.sched_getaffinity(0)))
    if not nproc.isdecimal() or int(nproc) < 1:
        raise ValueError(f"--nproc-per-node={nproc}: expected a number, gpu, cpu or auto")
    least, most = (int(number) * int(nproc) for number in (nodes[1], nodes[2] or nodes[1]))
    return str(least) if least == most else f"[{least},{most}]"


if __name__ == "__main__":
    sys.exit(main())
