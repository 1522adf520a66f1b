"""Blocks of GPT-2 fused on a GPU, in FP8 by Transformer Engine and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import engines
from fp8core.conversion import convert
from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch
from fp8core.fusion import fused_inputs
from fp8core.fusion.cross_entropy import plain_cross_entropy
from fp8core.fusion.sequences import document_bounds
from fp8core.spec import Conversion, parse_spec
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.fusion.test_te_fusion_gpu import DEVICE, LAYERS, batch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"engine": "amp"},
    "delayed": {"engine": "te", "amax_history_len": 4},
    "current": {"engine": "te", "scaling": "current"},
}


def make(dtype: torch.dtype = torch.bfloat16, width: int = 256) -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=512,
        n_embd=width,
        n_layer=LAYERS,
        n_head=4,
        n_positions=1024,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "wte" not in name and "wpe" not in name:
                parameter.normal_(0.0, 0.06)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return model.to(DEVICE, dtype).train()


def engine_for(recipe: str) -> Any:
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "gpt2"}},
            "data": {"source": "builtin"},
            "recipe": RECIPES[recipe],
        }
    )
    available = engines.availability(spec.recipe, DEVICE)
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    return engines.create(spec.recipe, DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_every_block_is_fused_and_agrees_with_the_plain_one(
    recipe: str, dtype: torch.dtype
) -> None:
    model, engine = make(dtype), engine_for(recipe)
    batches = [batch_of(0, packed=False), batch_of(0, packed=True)]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = [model(**model_inputs(b, model.config, torch.bfloat16)).logits for b in batches]
    report = convert(model, engine, Conversion())
    assert report.fusion is not None
    assert [row.reason for row in report.fusion.rows] == [None] * LAYERS
    assert report.fusion.whole
    for batch, plain in zip(batches, expected, strict=True):
        with torch.no_grad(), engine.evaluation_context():
            logits = model(**fused_inputs(model, batch, torch.bfloat16)).logits
        real = batch.document_ids >= 0
        apart = (logits[real].float() - plain[real].float()).norm() / plain[real].float().norm()
        assert float(apart) < 0.03


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_training_follows_the_plain_one_with_and_without_recomputation(recipe: str) -> None:
    found: dict[str, list[float]] = {}
    for name, fuse in (("plain", "none"), ("fused", "auto"), ("recomputed", "auto")):
        model, engine = make(torch.float32), engine_for(recipe)
        report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
        assert (report.fusion is not None) == (fuse == "auto")
        if name == "recomputed":
            enable_gradient_checkpointing(model, engine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found[name] = []
        for _ in range(8):
            losses = []
            for number in range(2):  # the second micro-batch takes the casts of the first
                batch = batch_of(number, packed=number == 0)
                inputs = {**fused_inputs(model, batch, torch.bfloat16), "use_cache": False}
                with engine.training_context(number == 0):
                    logits = model(**inputs).logits[:, :-1]
                    loss = plain_cross_entropy(logits, batch.input_ids[:, 1:])
                    loss = loss / batch.input_ids.numel() / 2
                loss.backward()
                engine.after_backward()
                losses.append(loss.item())
            found[name].append(sum(losses))
            optimizer.step()
            optimizer.zero_grad()
    assert found["fused"][7] < found["fused"][0] * 0.98
    for name in ("fused", "recomputed"):
        assert found[name] == pytest.approx(found["plain"], rel=0.01 if recipe == "bf16" else 0.05)


@pytest.mark.parametrize("fuse", ["none", "auto"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_of_transposed_weights_their_casts_alone_wait_for_the_backward_pass(
    recipe: str, fuse: str
) -> None:
    model, engine = make(torch.float32, width=1024), engine_for(recipe)
    report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
    assert (report.fusion is not None and report.fusion.whole) == (fuse == "auto")
    ids = torch.arange(1, 33)[None]
    documents = torch.zeros_like(ids, dtype=torch.int32)
    positions = torch.arange(32)[None]
    batch = Batch(ids, ids, None, positions, documents, 32, 32, True, document_bounds(documents))
    inputs = {**fused_inputs(model, batch.to(DEVICE), torch.bfloat16), "use_cache": False}
    held = 0
    for _ in range(2):  # the first pass makes workspaces that stay
        before = torch.cuda.memory_allocated()
        with engine.training_context():
            loss = model(**inputs).logits.sum()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        engine.after_backward()
        model.zero_grad()
        del loss  # and with it what the modules keep of this pass
    weights = sum(p.numel() for n, p in model.named_parameters() if ".h." in n and p.dim() == 2)
    # A byte for each weight's cast, and little else with so few tokens; a copy would be four more.
    assert weights < held < 2 * weights


def test_health_names_the_layers_of_a_fused_block() -> None:
    model, engine = make(), engine_for("delayed")
    convert(model, engine, Conversion())
    batch = batch_of(0, packed=False)
    for step in range(3):
        engine.record_health(step == 2)
        with engine.training_context():
            logits = model(**fused_inputs(model, batch, torch.bfloat16)).logits
            loss = plain_cross_entropy(logits[:, :-1], batch.input_ids[:, 1:])
        loss.backward()
        engine.after_backward()
    figures = engine.health()
    for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        for tensor in ("input", "weight", "grad_output"):
            amax = figures[f"fp8/transformer.h.1.{layer}/{tensor}/amax"]
            assert 0 < amax < float("inf"), (layer, tensor)
