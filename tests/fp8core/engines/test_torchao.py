"""The torchao engine on a CPU, where it emulates its GEMMs, and its compilation per block."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8core.conversion import convert, restore
from fp8core.engines import NormDescription, create
from fp8core.engines.blocks import find_blocks
from fp8core.engines.torchao_engine import TorchaoEngine, availability
from fp8core.errors import EngineUnsupported
from fp8core.spec import Conversion
from fp8core.spec.recipe import TorchaoRecipe
from tests.fp8core.engines.torchao_on_cpu import CPU, Make, engine, nothing_compiled

__all__ = ["engine", "nothing_compiled"]  # fixtures

SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks in a list, one Linear before and one that is not converted after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def data() -> torch.Tensor:
    return torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))


def step(engine: TorchaoEngine, net: nn.Module) -> torch.Tensor:
    with engine.training_context():
        loss = net(data()).float().square().mean()
    loss.backward()
    engine.after_backward()
    return loss.detach()


def rounded(tensor: torch.Tensor, dtype: torch.dtype, dim: int | None, power: bool) -> torch.Tensor:
    """``tensor`` cast to FP8 and back, scaled by its amax along ``dim`` (None: as a whole)."""
    values = tensor.detach().double()
    amax = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / amax).float()
    if power:
        scale = 2.0 ** scale.double().log2().floor()
    return (values.float() * scale.float()).to(dtype).double() / scale.double()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_three_gemms_round_as_the_recipe_says(engine: Make, scaling: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 48, bias=False)
    layer = engine(scaling=scaling).convert_linear(linear, "l")
    input = torch.randn(16, 32).bfloat16().float().requires_grad_()
    gradient = torch.randn(16, 48).bfloat16().float()
    made = engine(scaling=scaling)
    layer = made.convert_linear(linear, "l")
    with made.training_context(), torch.autocast("cpu", enabled=False):
        output = layer(input)
    output.backward(gradient)
    assert input.grad is not None
    assert linear.weight.grad is not None
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rows, whole = scaling != "tensorwise", scaling == "tensorwise"

    def cast(tensor: torch.Tensor, dim: int, gradients: bool = False) -> torch.Tensor:
        dtype = e5m2 if gradients and whole else e4m3
        return rounded(tensor, dtype, None if whole else dim, rows)

    # Each operand is scaled along the dimension that its GEMM sums over.
    wanted = cast(input, 1) @ cast(linear.weight, 1).T
    assert torch.allclose(output.double(), wanted, rtol=1e-5, atol=1e-5)
    weight = (
        rounded(linear.weight, e4m3, None, True)
        if scaling == "rowwise_with_gw_hp"
        else cast(linear.weight, 0)
    )
    wanted = cast(gradient, 1, gradients=True) @ weight
    assert torch.allclose(input.grad.double(), wanted, rtol=1e-5, atol=1e-5)
    if scaling == "rowwise_with_gw_hp":
        wanted = gradient.double().T @ input.detach().double()
    else:
        wanted = cast(gradient, 0, gradients=True).T @ cast(input, 0)
    assert torch.allclose(linear.weight.grad.double(), wanted, rtol=1e-5, atol=1e-5)


def test_layers_leave_in_the_autocast_dtype_on_a_cpu_too(engine: Make) -> None:
    made = engine()
    layer = made.convert_linear(nn.Linear(16, 16), "l")
    with made.training_context():
        assert layer(torch.randn(16, 16)).dtype == torch.bfloat16


def test_evaluation_runs_in_high_precision(engine: Make) -> None:
    net, made = model(), engine()
    plain = model()
    convert(net, made, Conversion())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = plain(data())
    with torch.no_grad(), made.evaluation_context():
        assert torch.equal(net(data()), wanted)
    with torch.no_grad(), made.training_context():
        assert not torch.equal(net(data()), wanted)
    # An evaluation between a forward pass and its backward pass leaves the recomputation in FP8.
    with made.training_context():
        pass
    with torch.no_grad(), made.evaluation_context():
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(net(data()), wanted)
        made.after_backward()
        assert torch.equal(net(data()), wanted)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradient_checkpointing_recomputes_in_fp8(engine: Make, scaling: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        net, made = model(), engine(scaling=scaling)
        convert(net, made, Conversion())
        if checkpointing:
            for block in net.layers:
                run = block.forward
                block.forward = lambda x, run=run: torch.utils.checkpoint.checkpoint(
                    run, x, use_reentrant=False
                )
        step(made, net)
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_conversion_goes_there_and_back(engine: Make) -> None:
    net, made = model(), engine()
    calls: list[str] = []
    net.layers[0].up.register_forward_hook(lambda *_: calls.append("up"))
    net.layers[1].up.weight.requires_grad_(False)
    net.eval()
    before, keys = dict(net.named_parameters()), list(net.state_dict())
    report = convert(net, made, Conversion())
    assert {row.to for row in report.converted} == {"OctrainFloat8Linear"}
    assert [row.name for row in report.kept] == ["layers.0.norm", "layers.1.norm", "last"]
    assert list(net.state_dict()) == keys
    assert all(parameter is before[name] for name, parameter in net.named_parameters())
    assert not any(module.training for module in net.modules())
    net.train()
    step(made, net)
    assert calls == ["up"]
    assert net.layers[1].up.weight.grad is None
    restore(net, report)
    assert type(net.layers[0].up) is nn.Linear
    assert all(parameter is before[name] for name, parameter in net.named_parameters())


def test_what_is_refused(engine: Make) -> None:
    made = engine()
    refusal = made.linear_refusal(nn.Linear(16, 24))
    assert refusal is not None
    assert "out_features 24 is not a multiple of 16" in refusal
    norm = NormDescription("rms_norm", (16,), 1e-6, nn.Parameter(torch.ones(16)), None)
    assert made.norm_refusal(norm)
    made.convert_linear(nn.Linear(16, 16), "l")
    with pytest.raises(ValueError, match="already has a module named 'l'"):
        made.convert_linear(nn.Linear(16, 16), "l")
    with made.training_context(), pytest.raises(RuntimeError, match="do not nest"):
        made.evaluation_context().__enter__()
    with pytest.raises(ValueError, match="another model or recipe"):
        made.load_state_dict({"l.scale": torch.ones(1)})


# Compilation


def test_blocks_are_found_by_the_models_structure() -> None:
    net = model()
    linears = {id(m) for m in net.modules() if isinstance(m, nn.Linear) and m is not net.last}
    assert find_blocks(net, linears) == [net.first, net.layers[0], net.layers[1]]
    assert find_blocks(net, {id(net.layers[1].up)}) == [net.layers[1]]
    assert find_blocks(net, set()) == []
    nested = nn.ModuleDict({"stack": nn.ModuleList([nn.Module()])})
    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
    nested["stack"][0].experts = experts
    assert find_blocks(nested, {id(expert) for expert in experts}) == [nested["stack"][0]]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2)
    parts = {id(layer.linear1) for layer in encoder.layers}
    assert find_blocks(encoder, parts) == list(encoder.layers)


def test_a_cpu_does_not_compile(engine: Make) -> None:
    net, made = model(), engine()
    convert(net, made, Conversion())
    made.prepare(net)
    assert all(module._compiled_call_impl is None for module in net.modules())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_blocks_compute_the_same_and_are_compiled_once(engine: Make, scaling: str) -> None:
    results = []
    for backend in (None, "aot_eager"):
        net, made = model(), engine(backend, scaling=scaling)
        keys = list(net.state_dict())
        convert(net, made, Conversion())
        made.prepare(net)
        assert list(net.state_dict()) == keys
        loss = step(made, net)
        net.eval()
        with torch.no_grad(), made.evaluation_context():
            evaluated = net(data())
        results.append((loss, evaluated, net.layers[1].up.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch._dynamo.utils.counters["graph_break"]
    # `first` and the block, each for training and for evaluation: blocks share their code.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


# Availability


def test_availability_names_the_gpu_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = availability(TorchaoRecipe(engine="torchao"), CPU)
    assert found.ok
    assert found.version is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    cuda = torch.device("cuda")
    assert availability(TorchaoRecipe(engine="torchao"), cuda).ok
    for scaling in SCALINGS[1:]:
        refused = availability(TorchaoRecipe(engine="torchao", scaling=scaling), cuda)
        assert refused.reasons == (
            f"torchao {scaling} needs a GPU of compute capability 9.0 or later; this one has 8.9",
        )
    with pytest.raises(EngineUnsupported, match=r"capability 9\.0"):
        create(TorchaoRecipe(engine="torchao", scaling="rowwise"), cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not availability(TorchaoRecipe(engine="torchao"), cuda).ok


def test_importing_the_engines_imports_no_package_of_theirs_and_using_torchao_is_silent(
    tmp_path: Path,
) -> None:
    (tmp_path / "transformer_engine.py").write_text("raise SystemExit('was imported')")
    code = (
        "import logging, sys, torch; import fp8core.engines as engines;"
        "assert 'torchao' not in sys.modules;"
        "from fp8core.spec.recipe import TEDelayed, TorchaoRecipe;"
        "assert not engines.availability(TEDelayed(), 'cpu').ok;"
        "engines.create(TorchaoRecipe(engine='torchao'), 'cpu');"
        "assert 'torchao' in sys.modules;"
        "assert logging.getLogger('torchao').level == logging.NOTSET"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
