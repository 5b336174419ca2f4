"""FLOPs are counted as torch counts them, the count changes nothing, and a share of an unknown peak is not guessed."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from orchestrator.model.repeated_blocks import Block, Selection, with_blocks
from orchestrator.strategies.measure.flop_counter import ComputePrecision, FlopCounter
from orchestrator.worker.measure.flops import FlopMeter, peak_flops_per_s, step_flops

CPU = torch.device("cpu")
H100, T4 = "NVIDIA H100 80GB HBM3", "Tesla T4"


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten())

    def example(self) -> Tensor:
        return torch.randn(2, 3, 12, 12)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent, self.last = nn.Linear(6, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.first(inputs))
        return self.last(hidden @ hidden.mT @ hidden)

    def example(self) -> Tensor:
        return torch.randn(2, 5, 6)


@pytest.fixture(params=[Convolutions, Products])
def model(request: pytest.FixtureRequest) -> Convolutions | Products:
    torch.manual_seed(0)
    return request.param()


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_count_is_that_of_torch_and_changes_no_gradient(model: Convolutions | Products) -> None:
    inputs = model.example()
    plain = gradients(model, inputs)
    with FlopCounterMode(display=False) as expected:
        gradients(model, inputs)
    with FlopCounter() as counter:
        counted = gradients(model, inputs)
    assert counter.error is None
    assert sum(counter.flops.values()) == expected.get_total_flops() > 0
    torch.testing.assert_close(counted, plain, rtol=0, atol=0)


def test_attention_on_a_cpu_counts_as_its_two_products() -> None:
    query, key, value = (torch.randn(2, 4, 16, 8) for _ in range(3))
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(query, key, value)
    assert counter.flops == {"fp32": 2 * 2 * (2 * 4) * 16 * 16 * 8}


def test_operations_are_kept_apart_by_precision() -> None:
    linear, half, exact = nn.Linear(4, 4), nn.Linear(4, 4).to(torch.float16), nn.Linear(4, 4).double()
    with FlopCounter() as counter:
        linear(torch.ones(2, 4))
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.ones(2, 4))
        half(torch.ones(2, 4, dtype=torch.float16))
        exact(torch.ones(2, 4, dtype=torch.float64))
    assert counter.flops == {"fp32": 64, "bf16": 64, "fp16": 64, None: 64}


@pytest.fixture
def tf32_in_convolutions_only() -> Iterator[None]:
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = products.fp32_precision, convolutions.fp32_precision
    products.fp32_precision, convolutions.fp32_precision = "ieee", "tf32"
    yield
    products.fp32_precision, convolutions.fp32_precision = before


@pytest.mark.usefixtures("tf32_in_convolutions_only")
def test_float32_is_tf32_where_torch_may_use_it() -> None:
    with FlopCounter() as counter:
        F.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 1))
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.flops == {"tf32": 8, "fp32": 16}


def test_a_formula_that_fails_does_not_fail_the_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise AssertionError("strange shapes")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, fails)
    meter = FlopMeter(CPU, at_step=2)
    with meter.counting(2):
        product = torch.ones(2, 3) @ torch.ones(3, 4)
    assert product.eq(3).all()
    assert meter.step is None
    assert "strange shapes" in capfd.readouterr().err


def test_compiled_code_counts_as_what_it_was_compiled_from(model: Convolutions | Products) -> None:
    inputs, plain = model.example(), copy.deepcopy(model)
    with FlopCounter() as expected:
        plain_gradients = [gradients(plain, inputs) for _ in range(2)]
    state = torch.get_rng_state()
    with FlopCounter() as counter:
        for expected_gradients in plain_gradients:
            model.zero_grad()
            with counter.running_compiled(type(model).forward, model, (inputs,), {}):
                out = model(inputs)  # which stands for compiled code that shows all that it does
            out.square().sum().backward()
            counted = [p.grad for p in model.parameters()]
            torch.testing.assert_close(counted, expected_gradients, rtol=0, atol=0)
    assert counter.error is None
    assert counter.flops == expected.flops
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_evaluation_of_compiled_code_has_no_backward_pass() -> None:
    linear = nn.Linear(4, 4)
    inputs = (torch.ones(2, 4),)
    with torch.no_grad(), FlopCounter() as counter, counter.running_compiled(nn.Linear.forward, linear, inputs, {}):
        linear(*inputs)
    assert counter.flops == {"fp32": 64}


def test_code_that_asks_for_values_is_not_counted() -> None:
    def scaled(module: nn.Linear, inputs: Tensor) -> Tensor:
        return module(inputs) / float(inputs.sum())

    with FlopCounter() as counter, counter.running_compiled(scaled, nn.Linear(2, 2), (torch.ones(1, 2),), {}):
        pass
    assert counter.error is not None


@pytest.mark.parametrize("recomputes", ["blocks", "selective"])
def test_what_is_computed_again_counts_once(recomputes: Selection) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), *(Products() for _ in range(2)))

    counts = []
    for model in (build(), with_blocks(build, recomputes=recomputes)()):
        with FlopCounter() as counter:
            gradients(model, torch.randn(2, 5, 6))
        counts.append(counter.flops)
    assert counts[0] == counts[1]


def run_as_compiled(module: nn.Module, inputs: Tensor) -> Tensor:
    """Stand for compiled code that shows all that it does."""
    with FlopCounter.active.running_compiled(Products.forward, module, (inputs,), {}):
        return Products.forward(module, inputs)


def test_compiled_blocks_that_are_computed_again_count_once() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), *(Products() for _ in range(2)), nn.Linear(6, 6))

    plain, recomputed, inputs = build(), with_blocks(build, recomputes="blocks")(), torch.randn(2, 5, 6)
    for block in recomputed.modules():
        if isinstance(block, Block):
            block.__block_compiled__ = run_as_compiled
    with FlopCounter() as expected:
        plain_gradients = gradients(plain, inputs)
    with FlopCounter() as counter:
        torch.testing.assert_close(gradients(recomputed, inputs), plain_gradients, rtol=0, atol=0)
    assert counter.error is None
    assert counter.flops == expected.flops


@pytest.mark.slow
def test_code_that_the_job_compiles_is_compiled_as_without_a_counter_and_makes_the_count_unknown() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    product = torch.compile(lambda a, b: a @ b, backend=backend)
    meter = FlopMeter(CPU, at_step=2)
    try:
        with meter.counting(2):
            product(torch.ones(2, 3), torch.ones(3, 4))
        assert len(graphs) == 1
        assert meter.step is None
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def test_one_step_is_counted() -> None:
    meter = FlopMeter(CPU, at_step=2)
    for step, size in ((1, 3), (2, 2), (3, 3)):
        with meter.counting(step):
            torch.ones(size, size) @ torch.ones(size, size)
    assert meter.step == step_flops({"fp32": 16}, device_name=None)


def test_a_failing_step_raises_its_own_error() -> None:
    meter = FlopMeter(CPU, at_step=2)
    with pytest.raises(ZeroDivisionError), meter.counting(2):
        raise ZeroDivisionError
    assert meter.step is None


def test_the_time_at_the_peak_is_the_sum_over_the_precisions() -> None:
    step = step_flops({"bf16": 989.5e9, "fp32": 67e9}, device_name=H100)
    assert (step.flops, step.at_peak_ms) == (pytest.approx(1056.5e9), pytest.approx(2.0))


@pytest.mark.parametrize(
    ("device_name", "precision"),
    [(None, "fp32"), ("NVIDIA X999", "fp32"), (T4, "bf16"), (H100, None)],
    ids=["cpu", "unknown device", "unsupported", "float64"],
)
def test_an_unknown_peak_is_not_guessed(device_name: str | None, precision: ComputePrecision | None) -> None:
    assert step_flops({precision: 1e9, "fp16": 1e9}, device_name=device_name).at_peak_ms is None


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "tf32", 15.7),
        ("NVIDIA L4", "fp32", 30.3),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA B300 SXM6 AC", "tf32", 1125),
        ("NVIDIA H800", "bf16", 989.5),
        ("NVIDIA H800 PCIe", "fp16", 756.5),
        ("NVIDIA H20", "tf32", 74),
        ("NVIDIA H20-3e", "bf16", 148),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312),
        ("NVIDIA A800 80GB PCIe", "tf32", 156),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA A30", "fp32", 10.3),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA RTX 6000 Ada Generation", "tf32", 182.1),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", 438.9),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X VF", "fp32", 163.4),
        ("NVIDIA H20Z", "bf16", None),
        ("NVIDIA GeForce RTX 5090 D", "bf16", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition MIG 1g.24gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GH200 480GB MIG 1g.12gb", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ],
)
def test_peaks_by_exact_name(name: str, precision: ComputePrecision, tflops: float | None) -> None:
    assert peak_flops_per_s(name, precision) == (None if tflops is None else pytest.approx(tflops * 1e12))
