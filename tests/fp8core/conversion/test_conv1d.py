"""GPT-2, whose ``Conv1D`` keeps its weight [in, out]: converted, trained, saved, adapted."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from fp8core import engines
from fp8core.conversion import convert, restore, restore_layers
from fp8core.conversion.find import find_layers
from fp8core.models import export
from fp8core.models.adapter_targets import adapter_targets
from fp8core.spec import Conversion, LoraAdapter, parse_spec
from fp8core.training.adapter import attach
from fp8core.training.optimizer import AdamW, decays

IDS = torch.arange(32).reshape(2, 16)
CONV1D = [
    f"transformer.h.{block}.{name}"
    for block in (0, 1)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
]


def spec_for(engine: str = "emulated", **fields):
    return parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "gpt2"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": engine},
            **fields,
        }
    )


def engine_for(engine: str = "emulated"):
    return engines.create(spec_for(engine).recipe, torch.device("cpu"))


@pytest.fixture
def gpt2():
    config = transformers.GPT2Config(
        vocab_size=272, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
        attn_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zero would hide one that is lost
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def loss_of(model):
    logits = model(IDS, use_cache=False).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())


def layouts(model):
    return {key: (value.shape, value.stride()) for key, value in model.state_dict().items()}


@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_conv1d(engine, conversion, bias):
    model = nn.Sequential(Conv1D(48, 32), nn.GELU(), Conv1D(16, 48)).double()
    if not bias:
        model[2].register_parameter("bias", None)
    else:
        nn.init.normal_(model[0].bias)
    model[0].weight.requires_grad_(bias)
    reference, before = copy.deepcopy(model), dict(model.named_parameters())
    kept = layouts(model)
    report = convert(model, engine, conversion())
    assert [row.to for row in report.rows] == ["PlainLinear"] * 2
    assert layouts(model) == kept
    assert all(p is before[name] for name, p in model.named_parameters())
    x = torch.randn(2, 8, 32, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ours = model(x)
    if bias:
        theirs = reference(y)
    else:  # Conv1D itself cannot do without
        theirs = reference[1](reference[0](y)) @ reference[2].weight
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for output in (ours, theirs):
        output.pow(3).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-10)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert a.grad.is_contiguous()
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


def test_tied_weights_stay_tied(engine, conversion):
    model = nn.ModuleDict({"a": Conv1D(32, 32), "b": Conv1D(32, 32), "table": nn.Embedding(32, 32)})
    model["b"].weight = model["a"].weight
    model["table"].weight = model["a"].weight
    convert(model, engine, conversion())
    assert type(model["b"]).__name__ == "PlainLinear"
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p.dim() == 2]
    assert names == ["a.weight", "b.weight", "table.weight"]
    assert len([p for p in model.parameters() if p.dim() == 2]) == 1
    model["b"](model["a"](model["table"](torch.arange(16)))).sum().backward()
    assert model["table"].weight.grad.count_nonzero() == 32 * 32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "forward", lambda x: x), "forward was replaced"),
        (lambda m: m.register_parameter("gate", nn.Parameter(torch.ones(1))), "gate"),
        (lambda m: nn.utils.spectral_norm(m), "computed by a hook"),
    ],
)
def test_keeps_a_conv1d_that_does_more(engine, conversion, change, reason):
    layer = Conv1D(32, 32)
    change(layer)
    report = convert(nn.Sequential(layer), engine, conversion())
    assert reason in report.rows[0].reason


@pytest.mark.parametrize("engine_name", ["emulated", "torchao"])
def test_gpt2_trains_in_fp8_near_fp32_with_every_parameter(gpt2, engine_name):
    reference = copy.deepcopy(gpt2)
    kept = layouts(gpt2)
    engine = engine_for(engine_name)
    report = convert(gpt2, engine, Conversion())
    assert [row.name for row in report.converted if row.from_ == "Conv1D"] == CONV1D
    before = {name: p.detach().clone() for name, p in gpt2.named_parameters()}
    optimizers = [
        AdamW(m.named_parameters(), decayed=decays(m), lr=3e-3, betas=(0.9, 0.95), eps=1e-8,
              weight_decay=0.1)
        for m in (gpt2, reference)
    ]  # fmt: skip
    losses = []
    for step in range(6):
        if step == 2:
            engine.record_health(True)
        with engine.training_context():
            ours = loss_of(gpt2)
        ours.backward()
        engine.after_backward()
        if step == 2:
            health = engine.health()
            engine.record_health(False)
        theirs = loss_of(reference)
        theirs.backward()
        losses.append((ours.item(), theirs.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            assert not [n for n, p in gpt2.named_parameters() if torch.equal(p, before[n])]
    assert losses[-1][0] < 0.9 * losses[0][0]
    assert any(ours != theirs for ours, theirs in losses)
    assert all(abs(ours - theirs) < 0.05 * theirs for ours, theirs in losses), losses
    assert all(health[f"fp8/{name}/weight/amax"] > 0 for name in CONV1D)
    assert layouts(gpt2) == kept
    ours, theirs = (optimizer.state_tensors() for optimizer in optimizers)
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_a_trained_gpt2_is_exported_as_it_came_and_layers_can_be_put_back(gpt2, tmp_path):
    engine = engine_for()
    report = convert(gpt2, engine, Conversion())
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    with engine.training_context():
        loss = loss_of(gpt2)
    loss.backward()
    engine.after_backward()
    optimizer.step()
    gpt2.eval()
    export(gpt2, report, None, tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert layouts(plain) == layouts(gpt2)
    with torch.no_grad():
        expected = plain(IDS).logits
        torch.testing.assert_close(gpt2(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        restore_layers(report, {CONV1D[0]: "it went bad"})
        assert type(gpt2.get_submodule(CONV1D[0])) is Conv1D
        torch.testing.assert_close(gpt2(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        restore(gpt2, report)
        assert all(type(gpt2.get_submodule(name)) is Conv1D for name in CONV1D)
        assert torch.equal(gpt2(IDS).logits, expected)


def test_lora_beside_converted_and_kept_conv1d_merges_into_gpt2s_own_layout(gpt2):
    adapter = {"target_modules": ["*.attn.*", "*.mlp.*"]}
    spec = spec_for(adapter=adapter)
    assert isinstance(spec.adapter, LoraAdapter)
    engine = engine_for()
    targets = adapter_targets(gpt2, spec.adapter)
    report = convert(gpt2, engine, Conversion(skip=["*.mlp.c_fc"]))
    attached = attach(spec, gpt2, targets)
    before = {n: p.detach().clone() for n, p in gpt2.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD(attached.tensors().values(), lr=0.5)
    for _ in range(3):
        with engine.training_context():
            loss = loss_of(gpt2)
        loss.backward()
        engine.after_backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(p, before[n]) for n, p in gpt2.named_parameters() if n in before)
    gpt2.eval()
    with torch.no_grad():
        adapted = gpt2(IDS).logits
        attached.merge()
        torch.testing.assert_close(gpt2(IDS).logits, adapted, rtol=1e-4, atol=1e-4)
        restore(gpt2, report)
        torch.testing.assert_close(gpt2(IDS).logits, adapted, rtol=1e-4, atol=1e-4)
    changed = [n for n, p in gpt2.named_parameters() if not torch.equal(p, before.get(
        n.replace("weight", "base_layer.weight"), p))]  # fmt: skip
    assert changed == [f"{name}.weight" for name in CONV1D]


def test_no_adapter_goes_where_torchs_attention_would_pass_it_by():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "other": nn.Linear(32, 32)})
    targets = adapter_targets(model, LoraAdapter(target_modules="linear"))
    assert [layer.name for layer in targets] == ["other"]


def test_stacked_experts_have_rows_that_say_why_they_stay(engine, conversion):
    class SomeExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))
            self.down_proj = nn.Parameter(torch.randn(4, 32, 32))
            self.offset = nn.Parameter(torch.randn(4, 32))

    model = nn.ModuleDict({"experts": SomeExperts(), "conv": nn.Conv1d(16, 16, 3)})
    assert [layer.kind for layer in find_layers(model)] == ["experts", "experts"]
    report = convert(model, engine, conversion())
    assert [(row.name, row.from_, row.to) for row in report.rows] == [
        ("experts.gate_up_proj", "SomeExperts", None),
        ("experts.down_proj", "SomeExperts", None),
    ]
    assert all("4 experts in one Parameter" in row.reason for row in report.rows)
    report = convert(model, engine, conversion(skip=["experts.*"]))
    assert all("conversion.skip" in row.reason for row in report.rows)
