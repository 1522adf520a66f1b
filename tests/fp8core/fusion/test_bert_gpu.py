"""Blocks of BERT fused on a GPU, in FP8 by Transformer Engine and in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core import engines
from fp8core.conversion import convert
from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch
from fp8core.engines.gemm_watch import GemmWatch
from fp8core.fusion import fused_inputs
from fp8core.fusion.cross_entropy import plain_cross_entropy
from fp8core.fusion.sequences import Sequences
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


def make(
    dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, activation: str = "gelu"
) -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=1024,
        hidden_act=activation,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embeddings" not in name:
                parameter.normal_(0.0, 0.06)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return model.to(DEVICE, dtype).train()


def engine_for(recipe: str) -> Any:
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "bert"}},
            "data": {"source": "builtin"},
            "recipe": RECIPES[recipe],
        }
    )
    available = engines.availability(spec.recipe, DEVICE)
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    return engines.create(spec.recipe, DEVICE)


def batches() -> list[Batch]:
    """Whole rows, packed documents with padding, and one padded row."""
    whole, packed = (replace(batch_of(index, packed=index == 1), causal=False) for index in (0, 1))
    real = torch.ones_like(whole.input_ids, dtype=torch.bool)
    real[1, 180:] = False
    documents = torch.where(real, 0, -1).int()
    padded = replace(whole, attention_mask=real, document_ids=documents, document_bounds=None)
    return [whole, packed, padded]


def targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Every fifth token is masked, and is what is to be told."""
    chosen = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    chosen[:, ::5] = True
    chosen &= batch.document_ids >= 0
    return batch.input_ids.masked_fill(chosen, 0), batch.input_ids.masked_fill(~chosen, -100)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_every_block_is_fused_and_agrees_with_the_plain_one(
    recipe: str, dtype: torch.dtype, activation: str
) -> None:
    """Also with the dropouts that BERT has by default."""
    model, engine = make(dtype, dropout=0.1, activation=activation), engine_for(recipe)
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = [
            model(**model_inputs(b, model.config, torch.bfloat16)).logits for b in batches()
        ]
    model.train()
    report = convert(model, engine, Conversion())
    assert report.fusion is not None
    assert [row.reason for row in report.fusion.rows] == [None] * LAYERS
    assert report.fusion.whole
    together = report.fusion.classes["bert.encoder.layer.1.output.dense"]
    assert together.endswith("MLP") == (activation == "gelu_new")
    model.eval()
    for batch, plain in zip(batches(), expected, strict=True):
        with torch.no_grad(), engine.evaluation_context():
            logits = model(**fused_inputs(model, batch, torch.bfloat16)).logits
        real = batch.document_ids >= 0
        apart = (logits[real].float() - plain[real].float()).norm() / plain[real].float().norm()
        assert float(apart) < 0.03


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_training_follows_the_plain_one_with_and_without_recomputation(recipe: str) -> None:
    found: dict[str, list[float]] = {}
    for name, fuse in (("plain", "none"), ("fused", "auto"), ("recomputed", "auto")):
        activation = "gelu_new" if recipe == "current" else "gelu"
        model, engine = make(activation=activation), engine_for(recipe)
        report = convert(model, engine, Conversion.model_validate({"fuse": fuse}))
        assert (report.fusion is not None) == (fuse == "auto")
        if report.fusion is not None:
            assert [row.reason for row in report.fusion.rows] == [None] * LAYERS
        if name == "recomputed":
            enable_gradient_checkpointing(model, engine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found[name] = []
        for step in range(9):
            batch = batches()[step % 3]
            ids, labels = targets(batch)
            inputs = fused_inputs(model, replace(batch, input_ids=ids), torch.bfloat16)
            with engine.training_context():
                logits = model(**inputs).logits
                loss = plain_cross_entropy(logits, labels) / (labels >= 0).sum()
            loss.backward()
            engine.after_backward()
            found[name].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert found["fused"][6] < found["fused"][0] * 0.98
    for name in ("fused", "recomputed"):
        assert found[name] == pytest.approx(found["plain"], rel=0.01 if recipe == "bf16" else 0.05)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_attention_drops_its_weights_as_the_model_says(recipe: str) -> None:
    """Equal scores and a unit matrix for v: what comes out are the weights themselves."""
    dropped, tokens = 0.25, 64
    model, engine = make(dropout=dropped), engine_for(recipe)
    report = convert(model, engine, Conversion())
    assert report.fusion is not None
    attention = report.fusion.blocks[0].attention
    assert attention is not None
    rows, heads = 4, 4
    zeros = torch.zeros(rows, tokens, heads, 64, dtype=torch.bfloat16, device=DEVICE)
    unit = torch.eye(tokens, dtype=torch.bfloat16, device=DEVICE)[None, :, None, :]
    unit = unit.expand(rows, -1, heads, -1).contiguous().requires_grad_()
    along = torch.randn(rows, tokens, heads * 64, dtype=torch.float32, device=DEVICE)
    bounds = torch.tensor([0, 64, 96, 128, 192, 256], dtype=torch.int32, device=DEVICE)
    for sequences in (Sequences(rows, tokens), Sequences(rows, tokens, bounds)):
        weights = attention.attend(zeros, zeros, unit, sequences)
        (gradient,) = torch.autograd.grad((weights.float() * along).sum(), unit)
        found = weights.detach().float().view(rows, tokens, heads, tokens)
        seen = sequences.mask(torch.device(DEVICE), causal=False)[:, 0, :, None, :]
        seen = seen.expand(found.shape)
        assert not found[~seen].any(), "of other documents nothing is seen"
        kept = found != 0
        share = 1 - float(kept[seen].float().mean())
        assert share == pytest.approx(dropped, abs=0.01)
        even = (1 / seen.sum(-1, keepdim=True) / (1 - dropped)).expand(found.shape)
        torch.testing.assert_close(found[kept], even[kept], rtol=0.02, atol=0.0)
        # The backward pass drops the same ones.
        expected = torch.einsum("rqhk,rqhd->rkhd", found, along.view(rows, tokens, heads, 64))
        apart = (gradient.float() - expected).norm() / expected.norm()
        assert float(apart) < 0.02
        again = attention.attend(zeros, zeros, unit, sequences).detach()
        assert not torch.equal(again.float().view(found.shape) != 0, kept)
        model.eval()
        whole = attention.attend(zeros, zeros, unit, sequences).detach().float()
        assert bool((whole.view(found.shape)[seen] > 0).all())
        model.train()


def test_health_names_the_layers_of_a_fused_block() -> None:
    for activation in ("gelu", "gelu_new"):
        model, engine = make(activation=activation), engine_for("delayed")
        convert(model, engine, Conversion())
        batch = batches()[2]
        for step in range(3):
            engine.record_health(step == 2)
            with engine.training_context():
                logits = model(**fused_inputs(model, batch, torch.bfloat16)).logits
                loss = logits.float().square().mean()
            loss.backward()
            engine.after_backward()
        figures = engine.health()
        layers = ("attention.self.qkv_proj", "attention.output.dense")
        for layer in (*layers, "intermediate.dense", "output.dense"):
            for tensor in ("input", "weight", "grad_output"):
                amax = figures[f"fp8/bert.encoder.layer.1.{layer}/{tensor}/amax"]
                assert 0 < amax < float("inf"), (activation, layer, tensor)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_all_three_gemms_of_each_layer_of_a_block_run_in_fp8(activation: str) -> None:
    model, engine = make(activation=activation), engine_for("delayed")
    report = convert(model, engine, Conversion())
    assert report.fusion is not None
    block = report.fusion.blocks[1]
    modules = {name: module for name, (module, _) in block.modules.items()}
    together = {name: layers for name, (_, layers) in block.modules.items()}
    batch = batches()[0]
    with GemmWatch(modules, batch.input_ids.shape, together) as watch:
        with engine.training_context():
            logits = model(**fused_inputs(model, batch, torch.bfloat16)).logits
        logits.float().square().mean().backward()
        engine.after_backward()
    layers = {f"attention.self.{part}" for part in ("query", "key", "value")}
    layers |= {"attention.output.dense", "intermediate.dense", "output.dense"}
    assert set(watch.seen) == {f"bert.encoder.layer.1.{layer}" for layer in layers}
    for layer, seen in watch.seen.items():
        assert {gemm: set(formats) for gemm, formats in seen.items()} == {
            "fprop": {("fp8_e4m3", "fp8_e4m3")},
            "dgrad": {("fp8_e5m2", "fp8_e4m3")},
            "wgrad": {("fp8_e5m2", "fp8_e4m3")},
        }, layer
