"""Check this machine or a cluster: ``orchestrator doctor cluster=auto``.

Exit codes: 0 everything is in order; 1 warnings; 2 a fault, with which a run would fail, or wrong arguments; 4 the
connection to the cluster was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.display.plain_text import writable
from orchestrator.features.doctor.findings import as_json, exit_code, finding_text, verdict_text
from orchestrator.run_verbs import run_on_cluster
from orchestrator.storage.remote import is_url
from orchestrator.verb_outcome import outcome

_DESCRIPTION = """\
Check what a run needs: versions, Ray and its token, GPUs, the network with a real all-reduce, clocks, disk space, a
shared output_dir, the tracking server, shared memory and file limits. The overrides are the same as for the run.
"""
_ADDRESS_HELP = (
    "the cluster: http://HEAD:8265, Ray's dashboard, whose own installation is then checked, or on one of its nodes "
    "host:port of Ray or auto (default: RAY_API_SERVER_ADDRESS, unless the overrides name a cluster; without any, this "
    "machine is checked)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator doctor", description=_DESCRIPTION)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `orchestrator launch`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--address", help=_ADDRESS_HELP)
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_intermixed_args(words)
    names_cluster = any(word.startswith(("cluster=", "cluster.address=")) for word in options.overrides)
    address = options.address
    if address is None and not names_cluster:
        address = os.environ.get("RAY_API_SERVER_ADDRESS")
    redactor = Redactor.of_process()

    def body() -> int:
        if address and is_url(address):
            return run_on_cluster("doctor", words, address)
        overrides = [f"cluster.address={address}", *options.overrides] if address else options.overrides
        return _examine(overrides, redactor, as_lines=not options.json)

    return outcome("doctor", body, redactor)


def _examine(overrides: Sequence[str], redactor: Redactor, *, as_lines: bool) -> int:
    from orchestrator.config.compose import compose
    from orchestrator.strategies import registry

    errors: list[str] = []
    config, _ = compose(overrides, errors, registry.config_class)
    if config is None or errors:
        raise ConfigError(errors)
    redactor.learn(config)
    from orchestrator.features.doctor.checks import examine  # --help and errors must not wait seconds for torch and Ray

    findings = []
    for finding in examine(config):
        findings.append(finding)
        if as_lines:
            print(writable(finding_text(finding), sys.stdout), flush=True)
    if as_lines:
        print(verdict_text(findings))
    else:
        print(json.dumps(as_json(findings), indent=2))
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
