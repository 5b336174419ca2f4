"""What makes a node unfit for the workers of a driver on another node."""

import os
from pathlib import Path

from helpers.records.runs import PYTHONPATH


def other_torch(folder: Path) -> dict[str, str]:
    """The environment of a Ray that finds the metadata of another torch first, which are made in ``folder``."""
    metadata = folder / "torch-1.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), PYTHONPATH])}
