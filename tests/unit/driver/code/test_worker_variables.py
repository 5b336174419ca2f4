"""Environment variables of the workers, and the network interfaces that gloo and NCCL take from them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

import psutil
import pytest

from helpers.conformance.cases import CLUSTER, assignment
from helpers.files.golden import Golden
from helpers.machines.plans import config_of
from orchestrator.config.build import ConfigError
from orchestrator.config.recorded_config import to_dict
from orchestrator.config.redact import Redactor
from orchestrator.driver.code.worker_code import worker_variables
from orchestrator.protocol.messages import Variables
from orchestrator.user_code.breakpoints import REFUSAL, VARIABLE
from orchestrator.worker.process import network
from orchestrator.worker.process.network import nccl_variables

OWN = {
    "HOME": "/home/me",
    "NCCL_DEBUG": "INFO",
    "FI_PROVIDER": "efa",
    "OFI_NCCL_PROTOCOL": "RDMA",
    "UCX_TLS": "rc",
    "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
    "GLOO_SOCKET_IFNAME": "eth7",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "HF_TOKEN": "hf-Tt00Uu11",
    "TORCHELASTIC_RUN_ID": "7",
    "WANDB_MODE": "off",
}


def test_variables_of_the_libraries_are_forwarded_and_others_if_they_are_named() -> None:
    found = worker_variables({"WANDB_MODE": None, "NCCL_IB_DISABLE": "1"}, OWN)
    assert found == Variables(
        values={VARIABLE: REFUSAL, "WANDB_MODE": "off", "NCCL_IB_DISABLE": "1"},
        defaults={
            "NCCL_DEBUG": "INFO",
            "FI_PROVIDER": "efa",
            "OFI_NCCL_PROTOCOL": "RDMA",
            "UCX_TLS": "rc",
            "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "HF_TOKEN": "hf-Tt00Uu11",
        },
    )


def test_an_interface_of_the_driver_is_forwarded_only_if_it_is_named() -> None:
    assert worker_variables({network.GLOO: None}, OWN).values[network.GLOO] == "eth7"


@pytest.mark.parametrize(
    ("named", "own", "expected"),
    [({}, {}, REFUSAL), ({}, {VARIABLE: "0"}, "0"), ({VARIABLE: "debugpy.breakpoint"}, {}, "debugpy.breakpoint")],
)
def test_a_breakpoint_does_what_the_user_says_and_never_what_ray_says(
    named: dict[str, str | None], own: dict[str, str], expected: str
) -> None:
    assert worker_variables(named, own).values[VARIABLE] == expected


def test_a_variable_that_nobody_has_set_is_an_error(golden: Golden) -> None:
    with golden.raises(ConfigError) as raised:
        worker_variables({"MISSING": None, "OTHER": None, "WANDB_MODE": None}, OWN)
    assert len(raised.value.errors) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CUDA_VISIBLE_DEVICES", "Ray sets this variable"),
        ("RAY_ADDRESS", "Ray sets this variable"),
        ("a b", "expected the name of an environment variable"),
        ("", "expected the name of an environment variable"),
    ],
)
def test_names_that_cannot_be_set_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CLUSTER, env={name: "1"})


def test_the_values_are_typed_as_keys_and_masked_by_name() -> None:
    overrides = ["cluster.env.NCCL_DEBUG=INFO", "cluster.env.MY_TOKEN=hf-Tt00Uu11", "cluster.env.WANDB_MODE=null"]
    config = config_of(*overrides)
    assert config.cluster.env == {"NCCL_DEBUG": "INFO", "MY_TOKEN": "hf-Tt00Uu11", "WANDB_MODE": None}
    redactor = Redactor()
    redactor.learn(to_dict(config))
    assert redactor.text("the token is hf-Tt00Uu11") == "the token is ***"


def test_failures_of_nccl_are_left_to_us_unless_the_user_decides_otherwise() -> None:
    """The watchdog of torch would end the process, or sleep for a minute while its group cannot be released."""
    found = nccl_variables({}, recovers=True)
    assert set(found.items()) >= {
        ("TORCH_DIST_USE_NCCL2", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "0"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"),
        ("NCCL_NVLS_ENABLE", "0"),
    }
    assert int(found["TORCH_FR_BUFFER_SIZE"]) > 0
    assert found.keys() - nccl_variables({}, recovers=False).keys() == {"NCCL_NVLS_ENABLE"}
    chosen = dict.fromkeys([*found, "TORCH_NCCL_TRACE_BUFFER_SIZE"], "1")
    assert nccl_variables(chosen, recovers=True) == {}
    del chosen["TORCH_FR_BUFFER_SIZE"]
    assert nccl_variables(chosen, recovers=True) == {}, "the older name says it too"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, str]]:
    """The environment of a process in which no interface has been chosen."""
    for name in (network.GLOO, network.NCCL):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    network._chosen.clear()
    yield os.environ
    network._chosen.clear()


def test_the_interface_is_the_one_with_the_address() -> None:
    assert network.interface_of("127.0.0.1") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET":
                assert network.interface_of(address.address) == name
    with pytest.raises(LookupError, match=r"192\.0\.2\.1"):
        network.interface_of("192.0.2.1")


def own_addresses() -> dict[str, str]:
    """The interface of each IPv4 address of this machine."""
    return {
        a.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for a in addresses
        if a.family.name == "AF_INET"
    }


def test_gloo_and_nccl_use_the_interface_of_each_generation(environment: Mapping[str, str]) -> None:
    for ip, name in own_addresses().items():
        network.choose(ip, nccl=ip)
        assert (environment[network.GLOO], environment[network.NCCL]) == (name, f"={name}")


def test_without_nccl_its_variable_is_left_alone(environment: Mapping[str, str]) -> None:
    network.choose("127.0.0.1", nccl=None)
    assert environment[network.GLOO] == "lo"
    assert network.NCCL not in environment


def test_nccl_gets_no_loopback_interface_that_a_later_generation_could_not_leave(
    environment: Mapping[str, str],
) -> None:
    """NCCL keeps the first interface, so a generation on one node must not give it one that other nodes lack."""
    outside = {ip: name for ip, name in own_addresses().items() if not ip.startswith("127.")}
    if not outside:
        pytest.skip("this machine has no interface besides loopback")
    ip, name = next(iter(outside.items()))
    for backend, expected in (("gloo", None), ("nccl", f"={name}")):
        orders = assignment(rank=0, world_size=2, generation=1, store_port=0, run_dir="", backend=backend)  # type: ignore[arg-type]
        network.choose_for(orders, node_ip=ip)
        assert (environment.get(network.GLOO), environment.get(network.NCCL)) == ("lo", expected)
    network.choose_for(replace(orders, store_host=ip), node_ip=ip)
    assert environment[network.GLOO] == name


@pytest.mark.parametrize("chosen", [network.GLOO, network.NCCL])
def test_an_interface_that_the_user_has_chosen_stays(
    environment: Mapping[str, str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(chosen, "mine")
    for _ in range(2):
        network.choose("127.0.0.1", nccl="127.0.0.1")
    assert environment[chosen] == "mine"
    (other,) = {network.GLOO, network.NCCL} - {chosen}
    assert environment[other].endswith("lo")
    monkeypatch.setenv(other, "mine too")
    network.choose("192.0.2.1", nccl="192.0.2.1")
    assert environment[other] == "mine too", "the address does not matter"
