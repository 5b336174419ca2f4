"""What a run is called on its cluster."""

from __future__ import annotations

ID_LENGTH = 6


def run_label(name: str, uid: str) -> str:
    """Return what a run is called on its cluster: its name, which other runs may have too, and its short id."""
    return f"{name}-{uid[:ID_LENGTH]}"
