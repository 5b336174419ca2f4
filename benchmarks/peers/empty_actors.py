"""Ray actors that import torch and do nothing else: the least that the start of as many workers takes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import ray


@ray.remote(num_cpus=1)
class Empty:
    """A process that has imported torch."""

    def __init__(self) -> None:
        import torch  # noqa: F401

    def ready(self) -> None:
        """Answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--address", required=True, help="address of the Ray to use")
    parser.add_argument("--result", required=True, help="file for the time at which all have answered")
    arguments = parser.parse_args()
    ray.init(address=arguments.address)
    actors = [Empty.remote() for _ in range(arguments.workers)]
    ray.get([actor.ready.remote() for actor in actors])
    Path(arguments.result).write_text(json.dumps({"answered_at": time.time()}))


if __name__ == "__main__":
    main()
