"""Fused blocks in Transformer Engine's kernels: numbers, FP8, state, and whole steps, on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.conversion import convert, restore
from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch
from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.fusion import check, fused_inputs
from fp8core.fusion.cross_entropy import fused_cross_entropy, plain_cross_entropy
from fp8core.fusion.sequences import Sequences, document_bounds
from fp8core.spec import Conversion, parse_spec
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.kernel_names import E4M3_BY_E4M3, E4M3_BY_E5M2, launched, launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
ROWS, LENGTH, LAYERS = 2, 256, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 64},
    "Mistral": {"sliding_window": 96},
    "Gemma": {"head_dim": 64, "hidden_activation": "gelu_pytorch_tanh"},
}


def make(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    import transformers

    fields = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    } | {**FAMILIES[family], **changes}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**fields)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Biases, and the weights of norms: at 0 and 1 one that was left out would not show.
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
            elif "embed" not in name:
                parameter.normal_(0.0, 0.06)
    return model.to(DEVICE, dtype).train()


def engine_for(**recipe: Any) -> TransformerEngine:
    if recipe.get("scaling", "delayed") == "delayed":
        recipe = {"amax_history_len": 4, **recipe}
    return TransformerEngine(_recipe(recipe), DEVICE)


def batch_of(index: int, *, packed: bool) -> Batch:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, 512, (ROWS, LENGTH), generator=generator)
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    if packed:
        documents[0, 100:], documents[0, 230:], documents[1, 33:] = 1, -1, 1
    bounds = document_bounds(documents)
    positions = Sequences(ROWS, LENGTH, bounds).positions(ids.device)
    count = ids.numel()
    batch = Batch(ids, ids, None, positions, documents, count, count, True, bounds)
    return batch.to(DEVICE)


def loss_of(engine: TransformerEngine, model: Any, batch: Batch, first: bool | None) -> Tensor:
    with engine.training_context(first):
        inputs = {**fused_inputs(model, batch, torch.bfloat16), "use_cache": False}
        logits = model(**inputs).logits
        return plain_cross_entropy(logits[:, :-1], batch.input_ids[:, 1:]) / batch.input_ids.numel()


def train(
    engine: TransformerEngine, model: Any, steps: int, *, accumulation: int = 1
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        for part in range(accumulation):
            first = part == 0 if accumulation > 1 else None
            loss = loss_of(engine, model, batch_of(step % 2, packed=part % 2 == 0), first)
            loss.backward()
            engine.after_backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def evaluate(engine: TransformerEngine, model: Any, batch: Batch) -> Tensor:
    with torch.no_grad(), engine.evaluation_context():
        inputs = {**fused_inputs(model, batch, torch.bfloat16), "use_cache": False}
        logits: Tensor = model(**inputs).logits
    return logits


def reasons(report: Any) -> list[str | None]:
    assert report.fusion is not None
    return [row.reason for row in report.fusion.rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_block_is_fused_and_agrees_with_the_plain_one(
    family: str, dtype: torch.dtype
) -> None:
    model, engine = make(family, dtype), engine_for()
    batches = [batch_of(0, packed=False), batch_of(0, packed=True)]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = [model(**model_inputs(b, model.config, torch.bfloat16)).logits for b in batches]
    report = convert(model, engine, Conversion())
    assert reasons(report) == [None] * LAYERS
    assert report.fusion is not None
    assert report.fusion.whole
    parts = engine.block_parts()
    for block in report.fusion.blocks:
        assert block.attention is not None
        angles = block.attention._angles
        packed = torch.tensor([0, 80, 128, 144, 256], dtype=torch.int32, device=DEVICE)
        for sequences in (Sequences(2, 128), Sequences(2, 128, packed)):
            found = check.difference(block, parts, angles, sequences, torch.bfloat16)
            print(family, dtype, {name: round(value, 4) for name, value in found.items()})
    for batch, plain in zip(batches, expected, strict=True):
        with torch.no_grad(), engine.evaluation_context():
            logits = model(**fused_inputs(model, batch, torch.bfloat16)).logits
        real = batch.document_ids >= 0
        apart = (logits[real].float() - plain[real].float()).norm() / plain[real].float().norm()
        print(family, dtype, "logits", float(apart))
        assert float(apart) < 0.03


@pytest.mark.parametrize(
    "recipe",
    [{"scaling": "delayed", "amax_history_len": 4}, {"scaling": "current"}, {"scaling": "block"}],
)
def test_fused_training_follows_the_plain_one_in_fp8(recipe: dict[str, Any]) -> None:
    found = {}
    for fuse in ("none", "auto"):
        model = make("Llama")
        engine = TransformerEngine(_recipe(recipe), DEVICE)
        report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
        if fuse == "auto":
            assert reasons(report) == [None] * LAYERS
        found[fuse] = train(engine, model, 8)
    print(recipe, found)
    assert found["auto"][7] < found["auto"][1] * 0.98
    for own, other in zip(found["auto"], found["none"], strict=True):
        assert abs(own - other) < 0.05 * other


def _recipe(fields: dict[str, Any]) -> Any:
    return parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": "te", **fields},
        }
    ).recipe


def test_the_gemms_of_a_fused_block_run_in_fp8() -> None:
    model, engine = make("Llama"), engine_for()
    convert(model, engine, Conversion())
    train(engine, model, 2)
    batch = batch_of(5, packed=False)
    kernels = launched(lambda: loss_of(engine, model, batch, None).backward())
    engine.after_backward()
    forward, backward = launches(kernels, E4M3_BY_E4M3), launches(kernels, E4M3_BY_E5M2)
    # qkv, o, gate and up, down: four GEMMs forward, eight backward.
    assert forward == 4 * LAYERS, kernels
    assert backward == 8 * LAYERS, kernels


def test_evaluation_of_fused_blocks_is_in_high_precision_unless_set() -> None:
    for in_fp8 in (False, True):
        model, engine = make("Llama"), engine_for(use_autocast_during_eval=in_fp8)
        convert(model, engine, Conversion())
        train(engine, model, 2)
        before, batch = engine.state_dict(), batch_of(5, packed=False)
        names = launched(functools.partial(evaluate, engine, model, batch))
        found = launches(names, E4M3_BY_E4M3)
        assert found == (4 * LAYERS if in_fp8 else 0)
        for key, value in engine.state_dict().items():
            assert torch.equal(value, before[key]), key


def test_interval_holds_the_scales_of_fused_blocks_while_histories_advance() -> None:
    model, engine = make("Llama"), engine_for(interval=3, amax_compute_algo="most_recent")
    convert(model, engine, Conversion())
    states = []
    for _ in range(7):
        train(engine, model, 1)
        states.append(engine.state_dict())
    for direction in ("forward", "backward"):
        names = [key for key in states[0] if key.endswith(f"/{direction}/scale")]
        assert len(names) == 4 * LAYERS
        changed, advanced = set[int](), set[int]()
        for name in names:
            # Of one tensor an amax in bf16 may come out as the one before.
            history = name.replace("scale", "amax_history")
            for step in range(1, 7):
                before, after = states[step - 1], states[step]
                if not torch.equal(after[name][0], before[name][0]):
                    changed.add(step)
                if not torch.equal(after[history][-1, 0], before[history][-1, 0]):
                    advanced.add(step)
        assert changed == {3, 6}
        assert advanced == set(range(1, 7))


def test_state_goes_out_and_comes_back_bit_for_bit() -> None:
    model, engine = make("Llama"), engine_for()
    convert(model, engine, Conversion())
    train(engine, model, 3)
    state, weights = engine.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    names = {key.rpartition("/")[0].rpartition("/")[0] for key in state if "/" in key}
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert f"model.layers.1.{name}" in names
    expected = loss_of(engine, model, batch_of(7, packed=True), None).item()

    other, fresh = make("Llama"), engine_for()
    convert(other, fresh, Conversion())
    other.load_state_dict(weights)
    fresh.load_state_dict(state)
    assert loss_of(fresh, other, batch_of(7, packed=True), None).item() == expected


def test_checkpointing_and_kept_casts_change_no_loss() -> None:
    losses = []
    for checkpointing in (False, True):
        model, engine = make("Llama"), engine_for()
        convert(model, engine, Conversion())
        if checkpointing:
            enable_gradient_checkpointing(model, engine)
        losses.append(train(engine, model, 4, accumulation=1))
    # Attention adds up gradients in no fixed order.
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.01, atol=0)
    model, engine = make("Llama"), engine_for()
    convert(model, engine, Conversion())
    kept = train(engine, model, 4, accumulation=2)
    assert kept[6] < kept[0]


def test_restored_the_model_is_the_plain_one() -> None:
    model, engine = make("Llama"), engine_for()
    keys = list(model.state_dict())
    report = convert(model, engine, Conversion())
    assert list(model.state_dict()) == keys
    train(engine, model, 2)
    restore(model, report)
    batch = batch_of(3, packed=False)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert bool(model(**model_inputs(batch, model.config)).logits.isfinite().all())


def test_health_names_every_gemm_of_a_fused_block() -> None:
    model, engine = make("Llama"), engine_for()
    convert(model, engine, Conversion())
    train(engine, model, 2)
    engine.record_health(True)
    loss_of(engine, model, batch_of(5, packed=False), None).backward()
    engine.after_backward()
    figures = engine.health()
    engine.record_health(False)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        for tensor in ("input", "weight", "grad_output"):
            amax = figures[f"fp8/model.layers.0.{name}/{tensor}/amax"]
            scale = figures[f"fp8/model.layers.0.{name}/{tensor}/scale"]
            assert 0 < amax < float("inf"), (name, tensor)
            assert 0 < scale < float("inf"), (name, tensor)


def test_the_fused_cross_entropy_agrees_and_writes_over_the_logits() -> None:
    fused = fused_cross_entropy(DEVICE)
    assert not isinstance(fused, str), fused
    hidden = torch.randn(2, 128, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(32000, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 32000, (2, 128), device=DEVICE)
    targets[:, :5] = -100
    found: list[Any] = []
    for compute in (plain_cross_entropy, fused):
        weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = compute(hidden @ weight.t(), targets) / 1000
        loss.backward()
        assert weight.grad is not None
        found.append((loss.item(), weight.grad.float(), torch.cuda.max_memory_allocated() - before))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    apart = (found[1][1] - found[0][1]).norm() / found[0][1].norm()
    assert float(apart) < 0.01
    assert found[1][2] < found[0][2] / 2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 128), (4, 4, 64), (3, 1, 16)])
def test_heads_are_split_and_rotated_in_one_kernel(
    heads: int, kv_heads: int, width: int, packed: bool
) -> None:
    from fp8core.fusion.rotary_kernel import split_rotated

    generator = torch.Generator(device="cuda").manual_seed(0)
    count, tokens = heads + 2 * kv_heads, ROWS * 33

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    angles = 9 * draw(tokens if packed else 33, width // 2)
    joined = draw(ROWS, 33, count * width).bfloat16().requires_grad_()
    found = split_rotated(joined, angles.cos(), angles.sin(), heads, kv_heads)
    along = [draw(*part.shape).bfloat16() for part in found]
    (gradient,) = torch.autograd.grad(found, joined, along)

    of_tokens = angles if packed else angles.repeat(ROWS, 1)
    turns = torch.polar(torch.ones_like(of_tokens), of_tokens).view(ROWS, 33, 1, -1)
    exact = joined.detach().float().requires_grad_()
    query, key, value = exact.view(ROWS, 33, count, width).split([heads, kv_heads, kv_heads], 2)

    def turned(part: Tensor) -> Tensor:
        first, second = part.chunk(2, dim=-1)
        product = torch.complex(first, second) * turns
        return torch.cat((product.real, product.imag), dim=-1)

    expected = turned(query), turned(key), value
    (wanted,) = torch.autograd.grad(expected, exact, [part.float() for part in along])
    for own, other in zip((*found, gradient), (*expected, wanted), strict=True):
        # Each element is rounded to bf16 once, to the nearest: cut off, errors would be twice as
        # large, and all towards 0.
        assert float((own.float() - other).norm() / other.norm()) < 2**-9
