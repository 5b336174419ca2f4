"""Devices, the links between them, and clusters of them, from the tables in ``devices.yaml`` and files of the user."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from orchestrator.config.build import ConfigError, build
from orchestrator.config.text import did_you_mean

Precision = Literal["bf16", "fp8", "fp4"]
"""What matrix products are computed in."""

TABLE = Path(__file__).with_name("devices.yaml")
CPU = "cpu"
"""The device, and the link between its processes, that are no entries of the table: this machine."""
SMALLEST, LARGEST = 1e-6, 1e9
"""The limits of the figures in a table."""
ACHIEVED = 0.8
"""The share of a link's rate that large collectives reach, as nccl-tests reports bus bandwidths."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices. ``gb_s``: of one device in one direction, by its data sheet."""

    gb_s: float
    source: str

    def __post_init__(self) -> None:
        _check(self, "gb_s")

    @property
    def bytes_s(self) -> float:
        """The bus bandwidth of large collectives."""
        return ACHIEVED * self.gb_s * 1e9


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by its data sheet.

    Attributes:
        bf16: the dense peak rate in TFLOP/s.
        memory_gb_s: the bandwidth of its memory.
        inside: the link between the devices of a domain.
        between: the link between domains.
        node: the most devices of a node.
        domain: the devices that ``inside`` joins; None for those of a node.
        source: where the figures stand.
        fp8: the peak rate of products in 8 bits; None if it has none.
        fp4: the same in 4 bits.
        reached: the share of the peak rate that layers reach; None for that of published runs.
        operator_us: the time that an operator takes of any size, where the device waits for the host.
    """

    bf16: float
    memory_gib: float
    memory_gb_s: float
    inside: str
    between: str
    node: int
    domain: int | None
    source: str
    fp8: float | None = None
    fp4: float | None = None
    reached: float | None = None
    operator_us: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "bf16", "memory_gib", "memory_gb_s", "node", "domain", "fp8", "fp4", "reached")
        if self.reached is not None and self.reached > 1:
            raise ValueError(f"reached={self.reached}: must be at most 1")

    def peak_flops_s(self, precision: Precision) -> float:
        """Return the peak rate of matrix products, in FLOP/s; that of the next wider type if it has none."""
        fp8 = self.fp8 or self.bf16
        return {"bf16": self.bf16, "fp8": fp8, "fp4": self.fp4 or fp8}[precision] * 1e12

    @property
    def memory_bytes_s(self) -> float:
        """The bandwidth of its memory."""
        return self.memory_gb_s * 1e9


def _check(owner: Link | Device, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not SMALLEST <= value <= LARGEST:
            raise ValueError(f"{name}={value}: must be between {SMALLEST:g} and {LARGEST:g}")


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The known devices and links, by name."""

    devices: Mapping[str, Device]
    links: Mapping[str, Link]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        nodes: their number.
        per_node: the devices of a node.
        name: of the device.
        inside: the link in a domain.
        between: the link between domains.
    """

    nodes: int
    per_node: int
    name: str
    device: Device
    inside: Link
    between: Link

    @property
    def devices(self) -> int:
        """The number of all devices."""
        return self.nodes * self.per_node

    @property
    def domain(self) -> int:
        """The devices that the fast link joins: of a node, or of several whole ones in a rack."""
        return self.per_node * max(1, (self.device.domain or 0) // self.per_node)

    def of(self, workers: int) -> Cluster:
        """Return the part of it that so many workers take."""
        return replace(self, nodes=math.ceil(workers / self.per_node), per_node=min(workers, self.per_node))

    def bus_bytes_s(self, *rows: tuple[int, int]) -> float:
        """Return the bus bandwidth of groups of ranks, which all take part at once.

        Args:
            rows: by dimension of a group, how far apart neighbours are, and how many there are.
        """
        together = [self._together(apart, size) for apart, size in rows]
        if together == [size for _, size in rows]:
            return self.inside.bytes_s
        return min(self.inside.bytes_s, self.between.bytes_s * math.prod(together))

    def _together(self, apart: int, size: int) -> int:
        """Return how many of a row of ranks are in each domain at least that has some of it."""
        return min(size, max(1, math.gcd(apart * size, self.domain) // apart))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}x{self.name}"


def read_tables(own: Path | None = None) -> Tables:
    """Return the tables, with the entries of a file of the user.

    Raises:
        ConfigError: the file cannot be read, or an entry of it is incomplete.
    """
    data: dict[str, dict[str, Any]] = {"devices": {}, "links": {}}
    errors: list[str] = []
    for path in (TABLE, *([own] if own else [])):
        try:
            for section, entries in (yaml.safe_load(path.read_text()) or {}).items():
                data.setdefault(section, {}).update(entries)
        except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as e:
            raise ConfigError([f"--devices {path}: cannot be read: {e}"]) from e
    tables = build(Tables, data, "", errors)
    if tables is None:
        raise ConfigError([f"--devices {own}: {error}" for error in errors])
    return tables


def parse_cluster(text: str, tables: Tables, *, link: str | None = None) -> Cluster:
    """Return the cluster that ``NODESxGPUSxDEVICE`` names.

    Args:
        text: as typed after ``--cluster``.
        tables: the known devices and links.
        link: the link between nodes; None for the one of the device.

    Raises:
        ConfigError: the text is no cluster, or a name is unknown; with the nearest one.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})x(.+)", text)
    if match is None:
        raise ConfigError([f"--cluster {text}: expected NODESxDEVICESxNAME, as in --cluster 64x8xH100"])
    nodes, per_node, name = int(match[1]), int(match[2]), match[3]
    device = _look_up("--cluster", name, tables.devices, "devices")
    if per_node > device.node:
        raise ConfigError([f"--cluster {text}: a node has at most {device.node} of {name}; give more nodes instead"])
    return Cluster(
        nodes=nodes,
        per_node=per_node,
        name=name,
        device=device,
        inside=_look_up("devices." + name + ".inside", device.inside, tables.links, "links"),
        between=_look_up("--link", link or device.between, tables.links, "links"),
    )


def name_of_gpu(gpu_name: str, memory_gib: float, tables: Tables) -> str | None:
    """Return the name of a device in the tables; None if it is not there.

    Args:
        gpu_name: as torch or Ray calls it: ``NVIDIA H100 80GB HBM3``, ``H100``, ``NVIDIA GeForce RTX 4090``.
        memory_gib: tells those of one name apart; 0 if it is unknown.
        tables: the known devices.
    """
    words = re.split(r"[\s-]+", gpu_name)
    words += [first + second for first, second in itertools.pairwise(words)]
    if {"PCIe", "NVL"} & {*words}:  # slower than the devices of the table
        return None
    found = [name for name in tables.devices if name.partition("-")[0] in words]
    return min(found, key=lambda n: abs(tables.devices[n].memory_gib - memory_gib) * (memory_gib > 0), default=None)


def _look_up(key: str, name: str, known: Mapping[str, Any], section: str) -> Any:
    if name not in known:
        raise ConfigError(
            [
                f"{key} {name}: unknown; {did_you_mean(name, known)} Or describe it in the section {section} of a file "
                f"for --devices, as {TABLE.name} in the package does"
            ]
        )
    return known[name]
