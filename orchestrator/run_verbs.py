"""What the verbs on runs have in common: they act on the runs here, or on the runs of a cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator import features
from orchestrator.config.build import ConfigError
from orchestrator.display.plain_text import refuse, writable
from orchestrator.display.terminal import lasting_output
from orchestrator.driver.process.uploads import tracking
from orchestrator.records.run_search import RunSearch
from orchestrator.storage.remote import is_url
from orchestrator.verb_options import CONNECTION_LOST, INTERRUPTED


def run_verb(
    verb: str,
    parser: argparse.ArgumentParser,
    act: Callable[[argparse.Namespace, RunSearch], int],
    argv: Sequence[str] | None,
) -> int:
    """Run a verb on the runs here or, as ``--address`` says, on the runs of a cluster; returns the exit code.

    Args:
        parser: of its arguments, with the options of :func:`orchestrator.verb_options.add_run_search`.
        act: does the work and returns the exit code; a :class:`ValueError` or an :class:`OSError` is reported.
        argv: the arguments; None for the command line of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with lasting_output():
        return _run_verb(verb, parser, act, words)


def _run_verb(
    verb: str, parser: argparse.ArgumentParser, act: Callable[[argparse.Namespace, RunSearch], int], words: list[str]
) -> int:
    options = parser.parse_args(words)
    try:
        options.address = address = _address(options)
        if address and is_url(address):
            return run_on_cluster(verb, words, address)
        known = _outputs_of(address) if address and options.output_dir is None else ()
        search = RunSearch.of(options.output_dir, known)
        _resume_uploads(search)
        return act(options, search)
    except (OSError, ValueError) as e:
        return refuse(verb, e)
    except KeyboardInterrupt:
        return INTERRUPTED


def _address(options: argparse.Namespace) -> str | None:
    """The address of the cluster; None or empty for the runs here."""
    if options.address is not None:
        return str(options.address)
    given = vars(options)
    named = [given.get("run"), *given.get("runs", ())]
    has_source = given["output_dir"] is not None or given.get("mlflow") is not None
    is_here = has_source or any(Path(run).exists() for run in named if run)
    return None if is_here else os.environ.get("RAY_API_SERVER_ADDRESS")


def _resume_uploads(search: RunSearch) -> None:
    """Go on in the background with the uploads to MLflow that did not end."""
    for output in search.outputs:
        tracking().resume(output)


def _outputs_of(address: str) -> list[str]:
    """The output directories of the runs on the cluster of which this machine is a node, as far as it can read them."""
    from orchestrator.driver.reporting import known_outputs, readable

    directories, notes = readable(known_outputs(address))
    for note in notes:
        print(writable(f"note: {note}", sys.stderr), file=sys.stderr)
    return directories


def run_on_cluster(verb: str, words: Sequence[str], address: str) -> int:
    """Run a verb as a job on the cluster with this dashboard; ``words``, its arguments, may have ``--address``.

    Returns:
        The exit code.

    Raises:
        ConfigError: there is no cluster, or it refuses the job; or the feature that sends jobs is missing.
    """
    elsewhere = next(features.modules("elsewhere"), None)
    if elsewhere is None:
        raise ConfigError([f"--address={address}: no job can be sent there; type the verb on a node of the cluster"])
    only_address = argparse.ArgumentParser(add_help=False)
    only_address.add_argument("--address")
    _, others = only_address.parse_known_args(words)
    try:
        return int(elsewhere.run_as_job(verb, others, address))
    except ConnectionError as e:
        return refuse(verb, f"the connection to {address} was lost ({e})", code=CONNECTION_LOST)
