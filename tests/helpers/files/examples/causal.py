"""Methods of a job with a causal language model."""

from __future__ import annotations

from dataclasses import dataclass

from helpers.models.catalogue import Whole


@dataclass(frozen=True, kw_only=True)
class Example(Whole):
    name: str = "gpt2"

    # the example
