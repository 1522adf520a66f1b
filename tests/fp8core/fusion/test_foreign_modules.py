"""Modules that a fused block was not made for: computed or refused, never passed by in silence."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from fp8core.engines.protocol import NormDescription
from fp8core.fusion import fuse, fused_inputs, high_precision
from fp8core.fusion.high_precision import HighPrecisionParts
from fp8core.fusion.parts import AttentionHalf, Kernel
from fp8core.fusion.plain import PlainParts, plain_norm
from tests.fp8core.fusion.berts import bert, encoder_batches
from tests.fp8core.fusion.families import batches, make
from tests.fp8core.fusion.loras import outputs, planned, reasons, wrap


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_that_is_more_than_lora_is_not_computed_wrongly(more: dict[str, Any]) -> None:
    model = make("Llama, with biases")
    adapters = planned(model, ("q_proj",))
    fuse(model, PlainParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters, **more)
    with pytest.raises(TypeError, match=r"beside .*q_proj computes more than LoRA does"):
        outputs(wrapped, batches()["padded"], fused=True)


def test_adapters_by_row_are_not_passed_by_in_silence() -> None:
    """``peft`` hands their names to the layers by hooks."""
    model = make("Llama")
    adapters = planned(model, ("q_proj",))
    fuse(model, PlainParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters).eval()
    inputs = fused_inputs(wrapped, batches()["padded"], torch.float32)
    with torch.no_grad():
        wrapped(**inputs)
    with torch.no_grad(), pytest.raises(TypeError, match=r"hooks on .*q_proj, as of an"):
        wrapped(**inputs, adapter_names=["__base__", "default"])


@pytest.mark.parametrize("key", ["k_proj", "down_proj"])
def test_an_adapter_that_a_block_was_not_told_of_is_not_passed_by_in_silence(key: str) -> None:
    model = make("Llama")
    fuse(model, PlainParts(), {}, adapters=planned(model, ("q_proj",)))
    wrapped = wrap(model, planned(model, ("q_proj", key)))
    with pytest.raises(TypeError, match=rf"{key} was replaced by a Linear after its block"):
        outputs(wrapped, batches()["padded"], fused=True)


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("Llama", "input_layernorm"),
        ("Llama", "post_attention_layernorm"),
        ("Llama", "self_attn"),
        ("Llama", "mlp"),
        ("Llama", "act_fn"),
        ("Qwen3", "self_attn"),
        ("GPT2", "ln_2"),
        ("GPT2", "attn"),
        ("Bert", "attention"),
        ("Bert", "attention.self"),
        ("Bert", "attention.output"),
        ("Bert", "attention.output.LayerNorm"),
        ("Bert", "intermediate"),
        ("Bert", "layer.0.output"),
    ],
)
def test_a_module_that_is_trained_as_a_whole_is_not_passed_by_in_silence(
    family: str, module: str
) -> None:
    """``peft`` trains a copy of it, which the fused half does not hold."""
    model = bert() if family == "Bert" else make(family)
    adapters = planned(model, ("q_proj", "c_attn", "query"))
    fusion = fuse(model, PlainParts(), {}, adapters=adapters)
    assert reasons(fusion) == [None, None]
    # Of a module within it the layer that has an adapter is trained as a whole with it.
    wrapped = wrap(model, planned(model, ("lm_head", "decoder")), modules_to_save=[module])
    batch = encoder_batches()["padded"] if family == "Bert" else batches()["padded"]
    with pytest.raises(TypeError, match=rf"{module} was replaced by a ModulesToSaveWrapper"):
        outputs(wrapped, batch, fused=True)


class OwnHeadNorms(PlainParts):
    """As the parts without FP8 have them: by kernels of their own, while a norm is the model's."""

    def __init__(self) -> None:
        self.by_kernels = 0

    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        def normalised(heads: Tensor, norm: NormDescription, dtype: torch.dtype) -> Tensor:
            self.by_kernels += 1
            return plain_norm(heads, norm).to(dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(high_precision, "raise_unless_taken", lambda norm: None)
            kernel = HighPrecisionParts(torch.float32).head_norm(half, name)

        def computed(heads: Tensor) -> Tensor:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(high_precision, "normalise", normalised)
                return kernel(heads)

        return computed


@pytest.mark.parametrize("parts", [PlainParts, OwnHeadNorms])
def test_norms_of_heads_that_are_trained_as_a_whole_are_those_that_compute(
    parts: type[PlainParts],
) -> None:
    """Of the layers of a fused half they alone are called, or looked at, where they stand."""
    model = make("Qwen3")
    adapters = planned(model, ("v_proj",))
    plain = wrap(copy.deepcopy(model), adapters, modules_to_save=["q_norm", "k_norm"])
    made = parts()
    assert reasons(fuse(model, made, {}, adapters=adapters)) == [None, None]
    wrapped = wrap(model, adapters, modules_to_save=["q_norm", "k_norm"])
    by_kernels = made.by_kernels if isinstance(made, OwnHeadNorms) else None
    assert by_kernels is None or by_kernels > 0
    for each in (plain, wrapped):
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                if "_norm.modules_to_save" in name:
                    parameter.mul_(1.5)
    batch = batches()["packed"]
    expected, expected_gradients = outputs(plain, batch, fused=False)
    logits, gradients = outputs(wrapped, batch, fused=True)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    saved = {name for name in gradients if "_norm.modules_to_save" in name}
    assert len(saved) == 4
    for name in saved:
        own, other = gradients[name], expected_gradients[name]
        assert own is not None, name
        assert other is not None, name
        assert (own - other).norm() <= 1e-4 * other.norm(), name
    if isinstance(made, OwnHeadNorms):
        assert made.by_kernels == by_kernels


def test_a_fused_block_is_not_copied() -> None:
    """Some parts hold weights that a copy would share with the original."""
    model = make("Llama")
    fusion = fuse(model, PlainParts(), {})
    with pytest.raises(TypeError, match=r"model\.layers\.0 is fused, and a copy of it would"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"layers\.1 is fused"):
        wrap(model, planned(model, ("q_proj",)), modules_to_save=["layers.1"])
    fusion.remove_all()
    assert type(copy.deepcopy(model).model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_layer_that_is_replaced_by_something_else_is_not_passed_by_either() -> None:
    model = make("Llama")
    fuse(model, PlainParts(), {}, adapters=planned(model, ("q_proj",)))
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Linear(64, 64, bias=False)
    with pytest.raises(
        TypeError, match=r"q_proj was replaced by a torch\..*Linear, which is not LoRA's"
    ):
        outputs(model, batches()["padded"], fused=True)


def test_what_has_parameters_as_loras_and_computes_otherwise_is_not_passed_by() -> None:
    """Beside a Parameter, not a layer: what it adds goes into the weight."""
    model = make("Llama")
    adapters = planned(model, ("q_proj",))
    fuse(model, PlainParts(), {}, adapters=adapters)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"])
    wrapped = peft.get_peft_model(model, config)
    with pytest.raises(TypeError, match=r"q_proj was replaced by a peft.*ParamWrapper, which is"):
        outputs(wrapped, batches()["padded"], fused=True)
