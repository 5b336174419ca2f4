"""Tables of devices and links, and clusters of them."""

import re
from pathlib import Path

import pytest

from orchestrator.config.build import ConfigError
from orchestrator.features.plan.prediction.devices import name_of_gpu, parse_cluster, read_tables
from orchestrator.worker.measure.flops import peak_flops_per_s

TABLES = read_tables()


@pytest.mark.parametrize(
    ("name", "of_torch"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("H200", "NVIDIA H200"),
        ("B200", "NVIDIA B200"),
        ("GB200", "NVIDIA GB200"),
        ("L40S", "NVIDIA L40S"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("MI300X", "AMD Instinct MI300X"),
    ],
)
def test_peaks_are_those_of_the_metrics(name: str, of_torch: str) -> None:
    assert TABLES.devices[name].peak_flops_s("bf16") == peak_flops_per_s(of_torch, "bf16")


def test_every_device_names_known_links_and_every_entry_a_source() -> None:
    for device in TABLES.devices.values():
        assert {device.inside, device.between} <= TABLES.links.keys()
        assert device.peak_flops_s("bf16") <= device.peak_flops_s("fp8") <= device.peak_flops_s("fp4")
    assert all(entry.source for entry in (*TABLES.devices.values(), *TABLES.links.values()))


def test_the_bandwidth_of_a_group_is_that_of_its_slowest_link() -> None:
    cluster = parse_cluster("4x8xH100", TABLES)
    inside, between = cluster.inside.bytes_s, cluster.between.bytes_s
    assert cluster.bus_bytes_s((1, 8)) == inside
    assert cluster.bus_bytes_s((1, 32)) == 8 * between  # all 8 ports of a node carry a part
    assert cluster.bus_bytes_s((8, 4)) == between
    assert cluster.bus_bytes_s((1, 4), (16, 2)) == 4 * between, "4 neighbours here, and as many on another node"
    assert cluster.bus_bytes_s((1, 5)) == between, "the second group has 3 ranks on a node and 2 on the next"
    assert cluster.of(5).bus_bytes_s((1, 5)) == inside
    rack = parse_cluster("18x4xGB200", TABLES)
    assert rack.bus_bytes_s((1, 72)) == rack.inside.bytes_s
    assert parse_cluster("4x64xGB200", TABLES).domain == 64, "whole nodes"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("64x8", "expected NODESxDEVICESxNAME"),
        ("0x8xH100", "expected NODESxDEVICESxNAME"),
        ("64x8xH10", r"H10: unknown; did you mean H100\? Or describe it in the section devices"),
        ("1x64xH100", "a node has at most 8 of H100; give more nodes"),
    ],
)
def test_what_is_no_cluster_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_cluster(text, TABLES)


def test_an_unknown_link_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=re.escape("--link NDX: unknown; did you mean NDR?")):
        parse_cluster("2x8xH100", TABLES, link="NDX")


def test_a_file_adds_devices_and_links(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "devices:\n"
        "  X1: {bf16: 100, memory_gib: 32, memory_gb_s: 1000, inside: PCIe5, between: Own, node: 4, domain: null, "
        "source: mine}\n"
        "links:\n"
        "  Own: {gb_s: 10, source: mine}\n"
    )
    cluster = parse_cluster("2x4xX1", read_tables(path))
    assert cluster.between.bytes_s == 8e9
    path.write_text("devices:\n  X1: {bf16: fast}\n")
    with pytest.raises(ConfigError, match=r"own.yaml: devices\.X1\.bf16"):
        read_tables(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tables(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("gpu_name", "memory_gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "H100"),
        ("H100", 0, "H100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40G"),
        ("A100", 79, "A100"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX4090"),
        ("GeForce-RTX-4090", 0, "RTX4090"),
        ("AMD-Instinct-MI300X-OAM", 192, "MI300X"),
        ("NVIDIA GH200 480GB", 95, None),
        ("NVIDIA H100 PCIe", 79, None),
        ("NVIDIA RTX PRO 6000", 95, None),
        ("", 0, None),
    ],
)
def test_a_gpu_is_found_by_the_name_that_torch_or_ray_gives_it(
    gpu_name: str, memory_gib: float, name: str | None
) -> None:
    assert name_of_gpu(gpu_name, memory_gib, TABLES) == name
