"""What every engine must do. A recipe added to RECIPES is held to it wherever its engine runs.

Transformer Engine's are marked ``gpu``, as it runs nowhere else.

A small model with tied embeddings, a frozen layer, a bias-less layer and norms takes a few steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8core.engines import Engine, NormDescription, all_availability, availability, create
from fp8core.errors import EngineUnsupported
from fp8core.spec.recipe import (
    TEMXFP8,
    AmpRecipe,
    EmulatedCurrent,
    EmulatedDelayed,
    TEBlock,
    TECurrent,
    TEDelayed,
    TorchaoRecipe,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECIPES: dict[str, Any] = {
    "te delayed": TEDelayed(amax_history_len=4),
    "te current": TECurrent(scaling="current"),
    "te block": TEBlock(scaling="block"),
    "te override": TEDelayed(amax_history_len=4, override_linear_precision=(False, False, True)),
    "torchao tensorwise": TorchaoRecipe(engine="torchao"),
    "torchao rowwise": TorchaoRecipe(engine="torchao", scaling="rowwise"),
    "torchao rowwise_with_gw_hp": TorchaoRecipe(engine="torchao", scaling="rowwise_with_gw_hp"),
    "emulated delayed": EmulatedDelayed(engine="emulated", amax_history_len=4),
    "emulated current": EmulatedCurrent(engine="emulated", scaling="current"),
    "emulated override": EmulatedDelayed(
        engine="emulated", override_linear_precision=(False, False, True)
    ),
    "amp bf16": AmpRecipe(engine="amp", dtype="bf16"),
    "amp fp16": AmpRecipe(engine="amp", dtype="fp16", initial_loss_scale=16.0),
    "amp fp32": AmpRecipe(engine="amp", dtype="fp32"),
}


class Model(nn.Module):
    """Token classifier whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.frozen = nn.Linear(64, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.head(self.down(self.frozen(self.up(hidden).relu())))


def convert(model: nn.Module, engine: Engine) -> int:
    converted = 0
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and engine.linear_refusal(module) is None:
            model.set_submodule(name, engine.convert_linear(module, name))
            converted += 1
        elif isinstance(module, nn.LayerNorm):
            shape = tuple(module.normalized_shape)
            norm = NormDescription("layer_norm", shape, module.eps, module.weight, module.bias)
            if engine.norm_refusal(norm) is None:
                model.set_submodule(name, engine.convert_norm(norm, name))
                converted += 1
    engine.prepare(model)
    return converted


def step(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    tokens = torch.arange(64, device=DEVICE).view(4, 16)
    with engine.training_context():
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    scaler = engine.gradient_scaler
    (loss if scaler is None else scaler.scale(loss)).backward()
    engine.after_backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.gpu] if recipe.engine == "te" else [])
        for name, recipe in RECIPES.items()
    ]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    recipe = RECIPES[request.param]
    available = availability(recipe, DEVICE)
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    return create(recipe, DEVICE)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().to(DEVICE)


def test_it_is_an_engine(engine: Engine) -> None:
    assert isinstance(engine, Engine)
    assert engine.token_multiple == 16
    assert engine.device.type == DEVICE.type


def test_one_step_changes_every_trainable_parameter_and_no_other(
    engine: Engine, model: Model
) -> None:
    keys, shared = list(model.state_dict()), model.embedding.weight
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    # Made before: an engine that put other Parameters in their place would train none of them.
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    convert(model, engine)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.embedding.weight
    assert model.head.weight is shared
    step(engine, model, optimizer)
    for name, parameter in after.items():
        trainable = not name.startswith("frozen")
        assert parameter.requires_grad == trainable, name
        assert torch.equal(parameter, before[name]) != trainable, name


@pytest.mark.parametrize("trained", ["vectors", "matrices"])
def test_one_step_changes_biases_beside_frozen_weights_and_weights_beside_frozen_biases(
    engine: Engine, model: Model, trained: str
) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_((parameter.dim() == 1) == (trained == "vectors"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    convert(model, engine)
    step(engine, model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def test_the_loss_falls(engine: Engine, model: Model) -> None:
    convert(model, engine)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = [step(engine, model, optimizer) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def test_evaluation_leaves_the_state_alone(engine: Engine, model: Model) -> None:
    convert(model, engine)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    step(engine, model, optimizer)
    before = engine.state_dict()
    with torch.no_grad(), engine.evaluation_context():
        model(torch.arange(64, device=DEVICE).view(4, 16))
    after = engine.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_loaded_state_goes_on_as_the_saved_one(engine: Engine, model: Model) -> None:
    convert(model, engine)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    step(engine, model, optimizer)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = [step(engine, model, optimizer) for _ in range(2)]
    engine.load_state_dict(state)
    model.load_state_dict(weights)
    second = [step(engine, model, optimizer) for _ in range(2)]
    if DEVICE.type == "cpu":
        assert first == second
    else:
        assert first == pytest.approx(second, rel=1e-3)


def test_health_and_metrics_are_plain_numbers(engine: Engine, model: Model) -> None:
    convert(model, engine)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    engine.record_health(True)
    step(engine, model, optimizer)
    for name, value in (engine.health() | engine.metrics()).items():
        assert type(value) is float, name
        assert name.split("/")[0] in ("fp8", "amp")
    if engine.name != "amp":
        assert "fp8/up/input/amax" in engine.health()


def test_unavailable_engines_say_why() -> None:
    every = all_availability("cpu")
    assert set(every) == {"te", "torchao", "emulated", "amp"}
    assert every["emulated"].ok
    assert every["amp"].ok
    for recipe in (TEDelayed(), TEMXFP8(scaling="mxfp8"), TorchaoRecipe(engine="torchao")):
        available = availability(recipe, "cpu")
        if available.ok:
            continue
        assert all(available.reasons)
        with pytest.raises(EngineUnsupported) as refused:
            create(recipe, "cpu")
        assert available.reasons[0] in refused.value.message
        assert refused.value.pointer == "/recipe"
    assert not every["te"].ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformer Engine may be in use here")
@pytest.mark.parametrize("error", ["RuntimeError", "OSError", "ImportError"])
def test_a_broken_transformer_engine_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Its bare meta package raises RuntimeError when imported, a missing library OSError."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('no shared object')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    available = availability(TEDelayed(), "cuda")
    assert not available.ok
    assert available.reasons == ("Transformer Engine does not import: no shared object",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformer Engine may be in use here")
@pytest.mark.parametrize("version", ["1.13.0", "2.3.0", "2.19.1+cu13"])
def test_an_old_transformer_engine_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """It has other names for the same things, and other fields in its recipes."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    available = availability(TEDelayed(), "cuda")
    monkeypatch.delitem(sys.modules, "transformer_engine")
    needed = f"Transformer Engine {version} is too old; 2.20 or later is needed"
    assert (available.ok, available.reasons, available.version) == (False, (needed,), version)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_a_reason() -> None:
    for recipe in (RECIPES["amp fp32"], RECIPES["emulated delayed"]):
        assert availability(recipe, "cuda").reasons == ("no CUDA device is usable here",)
