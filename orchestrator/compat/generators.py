"""The random generators of a process, in Python, NumPy and torch.

NumPy's is seeded only in a process that has imported NumPy; torch's bridge to arrays has done so in most.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

PHILOX_STEP = 4
"""CUDA's generators go on by multiples of it."""


def seed_generators(seed: int) -> None:
    """Seed all of them with a number below 2**63; CUDA's generators only if CUDA is initialized."""
    seed_on_cpu(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_on_cpu(seed: int) -> None:
    """Seed the generators that draw on the CPU with a number below 2**63."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Draw from generators on the CPU that are seeded with a number below 2**63, and restore the others at the end.

    Much faster than :func:`kept_generators`, because NumPy's generator is put aside instead of copied. Only the second
    number of a pair that ``numpy.random.normal`` has drawn is forgotten.
    """
    states = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    kept = None if numpy is None else numpy.random.get_bit_generator()
    try:
        if numpy is not None:
            numpy.random.set_bit_generator(numpy.random.MT19937(0))
        seed_on_cpu(seed)
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_bit_generator(kept)


def derived_seed(seed: int, first: int, second: int = 0) -> int:
    """Return a seed below 2**63 that belongs to ``seed`` and to two numbers."""
    return (seed * 0x9E3779B97F4A7C15 + first * 0xBF58476D1CE4E5B9 + second * 0x94D049BB133111EB) & ((1 << 63) - 1)


@contextlib.contextmanager
def own_stream(device: torch.device, index: int) -> Iterator[None]:
    """Draw other numbers on ``device`` than ranks with another ``index``. torch's generators of all go on alike.

    The numbers follow from the state of the generator, so that they are drawn again where that is restored.
    """
    if device.type == "cpu":
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(derived_seed(seed, index))
        try:
            yield
        finally:
            torch.set_rng_state(state)
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()  # on the host, which does not wait for the device
    generator.manual_seed(derived_seed(seed, offset, index + 1))
    try:
        yield
    finally:
        generator.manual_seed(seed)
        generator.set_offset(offset + PHILOX_STEP)


@contextlib.contextmanager
def kept_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of all generators at the end of the context; among CUDA's, only the one of ``device``."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if device is not None and on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
