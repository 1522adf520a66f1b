"""``nn.MultiheadAttention`` whose projections are layers, against torch's own in float64."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fp8core import engines
from fp8core.conversion import convert, restore, restore_layers
from fp8core.conversion.attention import ProjectedAttention
from fp8core.spec import Conversion, parse_spec

BATCH, TARGETS, SOURCES, SIZE, HEADS = 2, 6, 5, 32, 4
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "batch first": {"batch_first": True},
    "other key and value sizes": {"kdim": 48, "vdim": 16},
    "other value size, batch first": {"vdim": 16, "batch_first": True},
    "learned key and value": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "bias": False},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 48, "batch_first": True},
}


def both(engine, conversion, **kind):
    """torch's attention, random throughout, and a converted copy in float64."""
    attention = nn.MultiheadAttention(SIZE, HEADS, **kind).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    holder = nn.ModuleDict({"attention": copy.deepcopy(attention)})
    report = convert(holder, engine, conversion())
    return attention, holder, report


def inputs(attention, *, batched=True):
    def one(tokens, size):
        shape = [tokens, size]
        if batched:
            shape.insert(0 if attention.batch_first else 1, BATCH)
        return torch.randn(shape, dtype=torch.float64)

    return one(TARGETS, SIZE), one(SOURCES, attention.kdim), one(SOURCES, attention.vdim)


@pytest.mark.parametrize("kind", KINDS)
def test_gives_what_torch_gives_for_every_combination_of_arguments(engine, conversion, kind):
    theirs, holder, report = both(engine, conversion, **KINDS[kind])
    assert [row.reason for row in report.rows] == [None] * 4
    assert isinstance(holder["attention"], ProjectedAttention)
    compared = 0
    for batched, training in ((True, True), (False, False)):
        ours = holder["attention"].train(training)
        theirs.train(training)
        x = inputs(theirs, batched=batched)
        rows = (BATCH,) if batched else ()
        heads = BATCH * HEADS if batched else HEADS
        padding = torch.zeros(*rows, SOURCES, dtype=torch.bool)
        padding[..., -1] = True
        forbidden = torch.rand(TARGETS, SOURCES) < 0.4
        forbidden[:, 0] = False
        by_head = torch.randn(heads, TARGETS, SOURCES, dtype=torch.float64)
        paddings = (None, padding, torch.randn(*rows, SOURCES, dtype=torch.float64))
        for pad, mask, (need, average) in itertools.product(
            paddings, (None, forbidden, by_head), ((True, True), (True, False), (False, True))
        ):
            if None not in (pad, mask) and pad.dtype != mask.dtype:
                continue  # torch deprecates it
            given = {
                "key_padding_mask": pad,
                "attn_mask": mask,
                "need_weights": need,
                "average_attn_weights": average,
            }
            output, weights = ours(*x, **given)
            expected, expected_weights = theirs(*x, **given)
            torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
            assert (weights is None) == (expected_weights is None) == (not need)
            if need:
                torch.testing.assert_close(weights, expected_weights, rtol=1e-10, atol=1e-12)
            compared += 1
    assert compared == 2 * 7 * 3


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("with_padding", [True, False])
@pytest.mark.parametrize("kind", ["plain", "batch first", "all"])
def test_causal_attention(engine, conversion, kind, with_padding, need_weights):
    theirs, holder, _ = both(engine, conversion, **KINDS[kind])
    query, key, value = inputs(theirs)
    dim = 1 if theirs.batch_first else 0
    key, value = (torch.cat([x, x.narrow(dim, 0, 1)], dim) for x in (key, value))
    mask = nn.Transformer.generate_square_subsequent_mask(TARGETS, dtype=torch.float64)
    padding = torch.zeros(BATCH, TARGETS, dtype=torch.float64)
    padding[1, -2:] = -torch.inf
    given = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    if with_padding:
        given["key_padding_mask"] = padding
    ours = holder["attention"](query, key, value, **given)
    for got, expected in zip(ours, theirs(query, key, value, **given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_models_own_parameters(engine, conversion, kind):
    theirs, holder, report = both(engine, conversion, **KINDS[kind])
    keys = [f"attention.{key}" for key in theirs.state_dict()]
    assert list(holder.state_dict()) == keys
    assert [n for n, _ in holder.named_parameters()] == [
        f"attention.{n}" for n, _ in theirs.named_parameters()
    ]
    x = inputs(theirs)
    for attention in (theirs, holder["attention"]):
        attention(*x)[0].pow(3).sum().backward()
    for ours, expected in zip(holder.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-9, atol=1e-9)
    restore(holder, report)
    assert type(holder["attention"]) is nn.MultiheadAttention
    assert list(holder.state_dict()) == keys
    assert torch.equal(holder["attention"](*x)[0], theirs(*x)[0])


def test_dropout_drops_the_same_attention(engine, conversion):
    theirs, holder, _ = both(engine, conversion, dropout=0.5)
    x = inputs(theirs)
    results = []
    for attention in (theirs, holder["attention"]):
        torch.manual_seed(1)
        results.append(attention(*x))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    holder.eval()
    assert torch.equal(holder["attention"](*x)[0], holder["attention"](*x)[0])


def test_what_does_not_fit_is_refused(engine, conversion):
    theirs, holder, _ = both(engine, conversion)
    ours, (query, key, value) = holder["attention"], inputs(theirs)
    with pytest.raises(RuntimeError, match="attn_mask"):
        ours(query, key, value, is_causal=True)
    with pytest.raises(ValueError, match="2-D or all 3-D"):
        ours(query[0], key, value)
    with pytest.raises(ValueError, match="same sequences"):
        ours(query, key, value[1:])
    with pytest.raises(ValueError, match="query has 2 sequences"):
        ours(query, key[:, :1], value[:, :1])
    with pytest.raises(ValueError, match="key_padding_mask is"):
        ours(query, key, value, key_padding_mask=torch.zeros(SOURCES, dtype=torch.bool))
    with pytest.raises(ValueError, match="attn_mask is"):
        ours(query, key, value, attn_mask=torch.zeros(SOURCES, TARGETS, dtype=torch.bool))
    with pytest.raises(TypeError, match="boolean or floating"):
        ours(query, key, value, attn_mask=torch.zeros(TARGETS, SOURCES, dtype=torch.int64))
    nested = torch.nested.nested_tensor([query[:, 0], query[:3, 1]])
    with pytest.raises(TypeError, match="nested"):
        ours(nested, nested, nested)


def test_frozen_and_tied_weights_stay_so(engine, conversion):
    model = nn.ModuleDict({name: nn.MultiheadAttention(SIZE, HEADS) for name in "ab"})
    model["a"].in_proj_weight.requires_grad_(False)
    model["b"].out_proj.weight = model["a"].out_proj.weight
    convert(model, engine, conversion())
    assert model["a"].out_proj.weight is model["b"].out_proj.weight
    x = torch.randn(TARGETS, BATCH, SIZE)
    model["b"](*[model["a"](x, x, x)[0]] * 3)[0].sum().backward()
    assert model["a"].in_proj_weight.grad is None
    assert model["a"].in_proj_bias.grad is not None
    assert model["b"].in_proj_weight.grad is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "forward", lambda *x: x), "forward of its nn.MultiheadAttention"),
        (lambda m: setattr(m.out_proj, "forward", lambda x: x), "was replaced"),
        (lambda m: m.register_parameter("gate", nn.Parameter(torch.ones(1))), "gate"),
        (lambda m: m.add_module("inner", nn.ReLU()), "further modules: inner"),
        (lambda m: setattr(m, "out_proj", nn.Linear(SIZE, SIZE)), "its output projection"),
        (lambda m: nn.utils.spectral_norm(m, "in_proj_weight"), "computed by a hook"),
        (
            lambda m: setattr(m, "__class__", type("Mine", (nn.MultiheadAttention,), {})),
            "Mine is a subclass",
        ),
    ],
)
def test_keeps_attention_that_does_more(engine, conversion, change, reason):
    attention = nn.MultiheadAttention(SIZE, HEADS)
    change(attention)
    model = nn.ModuleDict({"attention": attention})
    report = convert(model, engine, conversion())
    kept = {row.name: row.reason for row in report.rows if row.name.startswith("attention.")}
    assert list(kept)[:3] == [f"attention.{part}_proj" for part in "qkv"]
    assert all(reason in kept[f"attention.{part}_proj"] for part in "qkv")
    assert model["attention"] is attention


def test_each_projection_is_converted_by_itself_and_can_be_put_back(engine, conversion):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(SIZE, HEADS, vdim=17)})
    reference = copy.deepcopy(model)
    report = convert(model, engine, conversion(skip=["attention.out_proj"]))
    reasons = {row.name: row.reason for row in report.rows}
    assert "not a multiple of 16" in reasons["attention.v_proj"]
    assert "conversion.skip" in reasons["attention.out_proj"]
    assert list(report.converted_layers()) == ["attention.q_proj", "attention.k_proj"]
    x = [torch.randn(6, 2, SIZE), torch.randn(6, 2, SIZE), torch.randn(6, 2, 17)]
    torch.testing.assert_close(model["attention"](*x), reference["attention"](*x))
    restore_layers(report, {"attention.q_proj": "it went bad"})
    assert list(report.converted_layers()) == ["attention.k_proj"]
    assert not hasattr(model["attention"].q_proj, "own_hook_calls")
    torch.testing.assert_close(model["attention"](*x), reference["attention"](*x))
    restore(model, report)
    assert torch.equal(model["attention"](*x)[0], reference["attention"](*x)[0])


def test_an_engine_that_fails_at_a_projection_leaves_attention_as_it_was(make_engine, conversion):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(SIZE, HEADS)})
    attention, parameters = model["attention"], list(model.parameters())
    with pytest.raises(ArithmeticError):
        convert(model, make_engine(fails_at="attention.k_proj"), conversion())
    assert model["attention"] is attention
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_evaluation_of_an_encoder_goes_through_the_layers_and_never_nests(engine, conversion):
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    reference = copy.deepcopy(model)
    report = convert(model, engine, conversion())
    assert not report.kept
    x, padding = torch.randn(2, 6, SIZE), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        ours = model(x, src_key_padding_mask=padding)
        assert model.layers[1].self_attn.q_proj.own_hook_calls == 1
        theirs = reference(x, src_key_padding_mask=padding)
        torch.testing.assert_close(ours[~padding], theirs[~padding])
        restore(model, report)
        assert model.use_nested_tensor
        assert torch.equal(model(x, src_key_padding_mask=padding), theirs)


def test_decoder_layers_attend_to_another_sequence(engine, conversion):
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(SIZE, HEADS, 64, dropout=0.0), 2)
    reference = copy.deepcopy(model)
    report = convert(model, engine, conversion())
    assert len(report.converted) == 2 * (4 + 4 + 2 + 3)
    target, memory = torch.randn(6, 2, SIZE), torch.randn(9, 2, SIZE)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    torch.testing.assert_close(
        model(target, memory, tgt_mask=mask, tgt_is_causal=True),
        reference(target, memory, tgt_mask=mask, tgt_is_causal=True),
    )


@pytest.mark.parametrize("engine_name", ["emulated", "torchao"])
def test_an_encoder_trains_in_fp8_near_fp32(engine_name):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = nn.Sequential(body, nn.Linear(32, 32))
    reference = copy.deepcopy(model)
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "gpt2"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": engine_name},
        }
    )
    engine = engines.create(spec.recipe, torch.device("cpu"))
    report = convert(model, engine, Conversion())
    linears = [row.name for row in report.converted if "Norm" not in row.from_]
    assert len(linears) == 7
    x, labels = torch.randn(2, 16, 32), torch.randint(0, 32, (32,))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, reference)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for step in range(8):
        with engine.training_context():
            ours = nn.functional.cross_entropy(model(x).float().flatten(0, 1), labels)
        ours.backward()
        engine.after_backward()
        theirs = nn.functional.cross_entropy(reference(x).flatten(0, 1), labels)
        theirs.backward()
        losses.append((ours.item(), theirs.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            assert not [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert losses[-1][0] < 0.9 * losses[0][0]
    assert any(ours != theirs for ours, theirs in losses)
    assert all(abs(ours - theirs) < 0.05 * theirs for ours, theirs in losses), losses
