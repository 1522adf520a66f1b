"""Small real architectures: what is found, and that evaluation in high precision stays the same."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
from torch import nn

from fp8core import engines
from fp8core.conversion import convert, restore
from fp8core.spec import Conversion, EmulatedCurrent, EmulatedDelayed

DECODER = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
ENCODER = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
T5 = {
    "vocab_size": 272, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
VIT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
GPT2 = {"vocab_size": 272, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
MIXTRAL = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}


ARCHITECTURES = {
    # name: (configuration, layers converted, layers kept)
    "Llama": (DECODER, 2 * 7 + 5, 1),
    "Mistral": (DECODER, 2 * 7 + 5, 1),
    "Qwen3": (DECODER, 2 * 7 + 9, 1),
    "Gemma": (DECODER, 2 * 7 + 5, 1),
    "Gemma3Text": (DECODER, 2 * 7 + 13, 1),
    "Mixtral": (MIXTRAL, 2 * 4 + 5, 1 + 2 * 2),  # its experts are stacked and stay
    "GPT2": (GPT2, 2 * (4 + 2) + 1, 1),
    "Bert": (ENCODER, 2 * 6 + 1 + 6, 1),
    "T5": (T5, 2 * 6 + 2 * 10 + 12, 1),
    "ViT": (VIT, 2 * 6 + 5, 1),
}
HEADS = {
    "GPT2": "GPT2LMHeadModel",
    "Bert": "BertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
    "ViT": "ViTForImageClassification",
    "Gemma3Text": "Gemma3ForCausalLM",
}


def _model(name):
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name][0])
    torch.manual_seed(0)
    model = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms of all ones would hide a wrong one
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_small_architectures(name):
    _, converted, kept = ARCHITECTURES[name]
    model = _model(name)
    reference = copy.deepcopy(model)
    keys, order = list(model.state_dict()), [n for n, _ in model.named_modules()]
    tied = _ties(model)

    engine = engines.create(EmulatedDelayed(engine="emulated"), torch.device("cpu"))
    report = convert(model, engine, Conversion())
    assert len(report.converted) == converted, report.to_json()
    assert len(report.kept) == kept, [row.to_json() for row in report.kept]
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == order
    assert _ties(model) == tied

    inputs = _inputs(model)
    with torch.no_grad():
        ours, theirs = model(**inputs).logits, reference(**inputs).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    restore(model, report)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, theirs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_everything_that_hangs_on_a_layer_stays(name):
    """On every module: a mode of its own, hooks and buffers; every second parameter is frozen."""
    model = _model(name).to(torch.bfloat16).train()
    calls = []
    for number, (module_name, module) in enumerate(model.named_modules()):
        module.training = number % 3 != 0
        module.register_forward_pre_hook(lambda m, args, n=module_name: calls.append(f"before {n}"))
        module.register_forward_hook(lambda m, args, out, n=module_name: calls.append(n))
        if not next(module.children(), None):
            module.register_buffer("kept", torch.full((2,), float(number)))
            module.register_buffer("scratch", torch.ones(1), persistent=False)
            module.tag = number
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    inputs = _inputs(model)
    inputs = {key: v.bfloat16() if v.is_floating_point() else v for key, v in inputs.items()}

    def everything():
        calls.clear()
        with torch.no_grad():
            model(**inputs)
        parameters = model.named_parameters(remove_duplicate=False)
        return {
            "parameters": [
                (n, id(p), p.requires_grad, p.dtype, p.device, p.shape) for n, p in parameters
            ],
            "buffers": [(n, id(b)) for n, b in model.named_buffers()],
            "keys": list(model.state_dict()),
            "modes": [(n, m.training) for n, m in model.named_modules()],
            "tags": [getattr(m, "tag", None) for m in model.modules()],
            "calls": list(calls),
        }

    before = everything()
    originals = dict(model.named_modules())
    engine = engines.create(EmulatedDelayed(engine="emulated"), torch.device("cpu"))
    report = convert(model, engine, Conversion())
    assert len(report.converted) == ARCHITECTURES[name][1]
    assert {part: found for part, found in everything().items() if found != before[part]} == {}
    restore(model, report)
    assert {part: found for part, found in everything().items() if found != before[part]} == {}
    assert all(module is originals[name] for name, module in model.named_modules())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_small_architectures_train_in_fp8_as_they_do_without(name):
    """Without dropout, so that both compute the same; every parameter gets nearly its gradient."""
    reference = _model(name)
    model, inputs = copy.deepcopy(reference), _inputs(reference)
    engine = engines.create(
        EmulatedCurrent(engine="emulated", scaling="current"), torch.device("cpu")
    )
    convert(model, engine, Conversion())
    with engine.training_context():
        logits = model(**inputs).logits
    direction = torch.randn_like(logits)
    logits.backward(direction)
    engine.after_backward()
    expected = reference(**inputs).logits
    expected.backward(direction)
    # E4M3 has three mantissa bits, E5M2 two; what is wrong somewhere is off by its own size.
    assert 1e-3 < _apart([logits], [expected]) < 0.2
    found, wanted = (dict(each.named_parameters()) for each in (model, reference))
    assert found.keys() == wanted.keys()
    reached = [name for name, parameter in wanted.items() if parameter.grad is not None]
    assert [name for name, parameter in found.items() if parameter.grad is not None] == reached
    assert all(found[name].grad.any() for name in reached)
    assert _apart(*([each[name].grad for name in reached] for each in (found, wanted))) < 0.5


def _apart(ours, theirs):
    ours, theirs = (torch.cat([part.flatten() for part in parts]) for parts in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_a_transformer_encoder_of_torch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, dropout=0.0, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
    x, reference = torch.randn(2, 16, 64), copy.deepcopy(model)
    keys = list(model.state_dict())
    engine = engines.create(EmulatedDelayed(engine="emulated"), torch.device("cpu"))
    report = convert(model, engine, Conversion())
    assert len(report.converted) == 2 * (4 + 2 + 2) + 1, report.to_json()
    assert report.kept == []
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)
    with engine.training_context():
        trained = model(x)
    trained.backward(torch.randn_like(trained))
    engine.after_backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    error = (trained - reference(x)).norm() / reference(x).norm()
    assert 0.001 < error < 0.1  # in FP8, and near


def _ties(model):
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def _inputs(model):
    accepted = inspect.signature(model.forward).parameters
    if "pixel_values" in accepted:
        return {"pixel_values": torch.randn(1, 3, 32, 32)}
    ids = torch.arange(32).reshape(2, 16)
    inputs = {"input_ids": ids}
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = ids
    return inputs
