"""The exit codes that several verbs return, options that they have, and types of options, for ``argparse``.

The exit codes of a run are in ``policy/run_state.py``.
"""

from __future__ import annotations

import argparse
import math

FAILED = 1
"""Training failed, or there is an error in the orchestrator or in the code of the job."""
BAD_INPUT = 2
"""Wrong arguments or a wrong configuration."""
CONNECTION_LOST = 4
"""A cluster does not answer any more."""
INTERRUPTED = 130
"""Ctrl-C."""


def add_run(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Add the argument that names a run, and the options that say where the runs are.

    ``default``: the run if none is given; None if one has to be given.
    """
    parser.add_argument(
        "run",
        nargs=None if default is None else "?",
        default=default,
        help="the name of a run (the newest of this name), the directory of one, its URL, <date>/<time>-<name>, "
        "<time>-<name>, the id of its submitted job, or `last`" + ("" if default is None else f" (default: {default})"),
    )
    add_run_search(parser)


def add_run_search(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where runs are looked for, here or on a cluster."""
    parser.add_argument(
        "--output-dir",
        help="directory or URL with the runs (default: outputs, and ~/orchestrator/outputs of submitted jobs; with "
        "--address also the others in which runs of the cluster are)",
    )
    parser.add_argument(
        "--address",
        help="the cluster whose runs are meant: http://HEAD:8265, Ray's dashboard, or on one of its nodes "
        "host:port of Ray or auto (default: RAY_API_SERVER_ADDRESS, unless --output-dir or the path of a run is given)",
    )


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options of Hydra that choose the files of the configuration; :func:`file_words` reads them."""
    parser.add_argument(
        "--config-dir", "-cd", metavar="DIR", help="directory with files of yours (default: conf, if there is one)"
    )
    parser.add_argument(
        "--config-name", "-cn", metavar="NAME", help="the file that composition begins with (default: config)"
    )


def file_words(options: argparse.Namespace) -> list[str]:
    """Return the given options of :func:`add_files` as the words that precede overrides."""
    given = (("--config-dir", options.config_dir), ("--config-name", options.config_name))
    return [f"{option}={value}" for option, value in given if value is not None]


def positive(text: str) -> int:
    """Return the whole number ``text``, which is at least 1.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """Return the finite number ``text``, which is above zero.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    value = finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def finite(text: str) -> float:
    """Return the number ``text``, which is finite.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a number")
    return value
