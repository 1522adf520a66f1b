"""Attention in FP8 (`fp8_dpa`) on a GPU: its kernels, numbers, state, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.conversion import convert, restore
from fp8core.engines.transformer_engine import TransformerEngine, availability
from fp8core.errors import SpecRefused
from fp8core.fusion import fused_inputs
from fp8core.spec import Conversion
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.fusion.test_te_fusion_gpu import (
    DEVICE,
    LAYERS,
    _recipe,
    batch_of,
    engine_for,
    loss_of,
    make,
)
from tests.fp8core.kernel_names import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

CORES = [f"model.layers.{layer}.self_attn.core_attention" for layer in range(LAYERS)]


def converted(family: str = "Llama", **recipe: Any) -> tuple[Any, TransformerEngine, Any]:
    # Heads of 128: the only ones that every cuDNN with FP8 attention has on Hopper.
    model, engine = make(family, head_dim=128), engine_for(fp8_dpa=True, **recipe)
    return model, engine, convert(model, engine, Conversion())


def train_whole_rows(engine: TransformerEngine, model: Any, steps: int) -> list[float]:
    """Rows of one document each: the only ones that FP8 attention sees."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(engine, model, batch_of(step % 2, packed=False), None)
        loss.backward()
        engine.after_backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def kernels_of(engine: TransformerEngine, model: Any, *, packed: bool) -> list[str]:
    """Those of a micro-batch with ``sdpa`` or ``flash`` in their names, forward and backward."""
    batch = batch_of(5, packed=packed)
    names = launched(lambda: loss_of(engine, model, batch, None).backward())
    engine.after_backward()
    return [name for name in names if "sdpa" in name or "flash" in name or "fmha" in name]


def test_whole_rows_take_the_fp8_kernels_and_documents_do_not() -> None:
    model, engine, report = converted()
    assert report.fusion is not None
    assert report.fusion.fp8_attention == dict.fromkeys(CORES)
    train_whole_rows(engine, model, 2)
    whole, packed = (kernels_of(engine, model, packed=packed) for packed in (False, True))
    print(whole, packed)
    assert any("f8" in name or "e4m3" in name for name in whole)
    assert not any("f8" in name or "e4m3" in name for name in packed)
    assert any("flash" in name for name in packed)


def test_the_report_names_each_attention() -> None:
    _, _, report = converted()
    rows = {row["name"]: row for row in report.to_json()}
    for name in CORES:
        assert rows[name]["to"] == "FP8DotProductAttention"
        assert rows[name]["reason"] is None


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_losses_follow_those_of_attention_in_bf16(family: str) -> None:
    found = {}
    for fp8_dpa in (False, True):
        model, engine = make(family, head_dim=128), engine_for(fp8_dpa=fp8_dpa)
        convert(model, engine, Conversion())
        found[fp8_dpa] = train_whole_rows(engine, model, 8)
    print(family, found)
    assert found[True][7] < found[True][1] * 0.98
    assert found[True] != found[False]
    for own, other in zip(found[True], found[False], strict=True):
        assert abs(own - other) < 0.05 * other


def test_scales_of_all_six_tensors_go_out_and_come_back_bit_for_bit() -> None:
    model, engine, _ = converted()
    train_whole_rows(engine, model, 3)
    state = engine.state_dict()
    for name in CORES:
        for direction, columns in (("forward", (2, 3, 8)), ("backward", (0, 3, 5))):
            scale = state[f"{name}/{direction}/scale"]
            assert all(float(scale[column]) not in (0.0, 1.0) for column in columns), scale
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    batch = batch_of(7, packed=False)
    expected = loss_of(engine, model, batch, None)

    other, fresh, _ = converted()
    other.load_state_dict(weights)
    fresh.load_state_dict(state)
    found = loss_of(fresh, other, batch, None)
    assert found.item() == expected.item()
    # Staged by this pass, and rotated into the histories when its context ended.
    for key, value in engine.state_dict().items():
        if "core_attention/forward" in key:
            assert torch.equal(value, fresh.state_dict()[key]), key


def test_scales_stand_still_while_evaluating() -> None:
    model, engine, _ = converted(use_autocast_during_eval=True)
    train_whole_rows(engine, model, 2)
    before = engine.state_dict()
    with torch.no_grad(), engine.evaluation_context():
        model(**fused_inputs(model, batch_of(9, packed=False), torch.bfloat16))
    for key, value in engine.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_recomputed_blocks_attend_with_the_scales_of_their_first_run() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, engine, _ = converted()
        if checkpointing:
            enable_gradient_checkpointing(model, engine)
        for index in range(3):
            model.zero_grad()
            loss_of(engine, model, batch_of(index, packed=False), None).backward()
            engine.after_backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
        state = engine.state_dict()
        print({k: v.tolist() for k, v in state.items() if k.startswith(f"{CORES[0]}/forward/sc")})
    # Attention adds up gradients in no fixed order.
    apart = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert float(apart) < 0.01


def test_with_an_interval_scales_change_when_due_alone() -> None:
    model, engine, _ = converted(interval=2, amax_compute_algo="most_recent")
    seen = []
    for index in range(4):
        loss_of(engine, model, batch_of(index, packed=False), None).backward()
        engine.after_backward()
        seen.append(engine.state_dict()[f"{CORES[0]}/forward/scale"])
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3])


def test_health_tells_of_all_six_tensors() -> None:
    model, engine, _ = converted()
    train_whole_rows(engine, model, 2)
    engine.record_health(True)
    loss_of(engine, model, batch_of(5, packed=False), None).backward()
    engine.after_backward()
    figures = engine.health()
    engine.record_health(False)
    for core in CORES:
        for tensor in ("qkv", "output", "probabilities"):
            for kind in (tensor, "grad_" + tensor):
                assert 0 < figures[f"fp8/{core}/{kind}/amax"] < float("inf"), kind
                assert 0 < figures[f"fp8/{core}/{kind}/scale"] < float("inf"), kind


def test_a_model_none_of_whose_attention_can_is_refused() -> None:
    with pytest.raises(SpecRefused, match="no attention of this model can compute in FP8") as found:
        converted("Mistral")  # sliding windows
    print(found.value)
    assert found.value.pointer == "/recipe/fp8_dpa"


def test_current_scaling_is_refused_on_hopper() -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("later GPUs have it")
    found = availability(_recipe({"scaling": "current", "fp8_dpa": True}), DEVICE)
    assert not found.ok
    assert "from compute capability 10.0 on" in found.reasons[0]


def test_restored_the_model_attends_as_before() -> None:
    model, engine, report = converted()
    train_whole_rows(engine, model, 1)
    restore(model, report)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_q_k_and_v_are_cast_with_their_rotation_as_transformer_engine_casts_them() -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    from fp8core.fusion.rotary_fp8_kernel import split_rotated_in_fp8
    from fp8core.fusion.rotary_kernel import split_rotated

    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    def quantizer(kind: Any, scale: float) -> Any:
        scales = torch.full((1,), scale, device=DEVICE), torch.zeros(1, device=DEVICE)
        return Float8Quantizer(*scales, kind, rowwise=True, columnwise=False)

    heads, kv_heads, width = 6, 2, 128
    angles = 9 * draw(96, width // 2)
    joined = draw(2, 96, (heads + 2 * kv_heads) * width).bfloat16().requires_grad_()
    turns = angles.cos(), angles.sin()
    cast = quantizer(tex.DType.kFloat8E4M3, 150.0)  # beyond 448 some saturate
    found = split_rotated_in_fp8(joined, *turns, heads, kv_heads, cast)
    plain = split_rotated(joined, *turns, heads, kv_heads)
    for own, part in zip(found, plain, strict=True):
        expected = quantizer(tex.DType.kFloat8E4M3, 150.0)(part.detach().contiguous())
        assert torch.equal(own._data, expected._data)
        assert torch.equal(own._scale_inv, expected._scale_inv)
    assert float(cast.amax) == max(float(part.abs().max()) for part in plain)

    backward = quantizer(tex.DType.kFloat8E5M2, 3000.0)
    along = [backward(draw(*part.shape).bfloat16()) for part in plain]
    (own,) = torch.autograd.grad(found, joined, along)
    (other,) = torch.autograd.grad(plain, joined, [part.dequantize() for part in along])
    assert torch.equal(own, other)
