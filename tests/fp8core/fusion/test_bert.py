"""Blocks that normalise behind their sums, fused: numbers, names, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fp8core.conversion import convert, restore, restore_layers
from fp8core.data.attention import model_inputs
from fp8core.fusion import fuse, fused_inputs
from fp8core.fusion.joined import lie_together
from fp8core.fusion.parts import Attend, AttentionHalf, Kernel
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.sequences import Sequences
from fp8core.models import export
from fp8core.spec import Conversion
from tests.fp8core.fusion.berts import ENCODERS, bert, encoder_batches
from tests.fp8core.fusion.test_blocks import counted
from tests.fp8core.fusion.test_conversion import FusingEngine, rows_of

ATTENTION, MLP = "attention.self", "mlp"


def outputs(model: Any, inputs: dict[str, Any], real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at real tokens, and the gradients of a sum over them by parameter."""
    model.zero_grad()
    torch.manual_seed(5)
    logits = model(**inputs).logits[real]
    (logits.square() * torch.linspace(0.1, 1.0, logits.shape[-1])).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


def assert_alike(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        apart, size = (gradient - expected[1][name]).norm(), expected[1][name].norm()
        if name.endswith("self.key.bias"):
            # A bias of k moves all scores of a token alike: what is left is rounding.
            size = expected[1][name.replace("key", "query")].norm()
        assert apart <= 1e-4 * size, name


def halves(row: Any, name: str) -> set[str]:
    return {half.removeprefix(f"{name}.") for half in row.fused}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", list(ENCODERS))
def test_a_fused_encoder_computes_what_the_plain_one_does(
    family: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training mode, with all its dropouts: of the same random numbers the same is dropped."""
    model = bert(family, dropout=dropout)
    plain = {
        kind: outputs(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in encoder_batches().items()
    }
    fusion = fuse(model, PlainParts(), {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert fusion.whole
    assert not fusion.causal
    calls = counted(monkeypatch)
    for kind, batch in encoder_batches().items():
        inputs = fused_inputs(model, batch, torch.float32)
        assert inputs["attention_mask"].shape == (1, 1, 1, 1), "no mask of [T, T] is made"
        assert_alike(outputs(model, inputs, batch.document_ids >= 0), plain[kind])
    assert len(calls) == 4


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_gelu_is_the_models_own(activation: str) -> None:
    model, batch = bert(hidden_act=activation), encoder_batches()["packed"]
    real = batch.document_ids >= 0
    expected = outputs(model, model_inputs(batch, model.config), real)
    report = convert(model, FusingEngine(), Conversion())
    rows = rows_of(report)
    block = "bert.encoder.layer.1"
    together = ("NormLinear", "Linear") if activation == "gelu" else ("NormMLP", "NormMLP")
    assert (
        rows[f"{block}.intermediate.dense"]["to"],
        rows[f"{block}.output.dense"]["to"],
    ) == together
    assert_alike(outputs(model, fused_inputs(model, batch, torch.float32), real), expected)


def test_a_decoder_of_such_blocks_looks_back_alone() -> None:
    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        is_decoder=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertLMHeadModel(config).train()
    from tests.fp8core.fusion.families import batches

    for batch in batches().values():
        real = batch.document_ids >= 0
        expected = outputs(model, {**model_inputs(batch, config), "use_cache": False}, real)
        fusion = fuse(model, PlainParts(), {})
        assert [row.reason for row in fusion.rows] == [None, None]
        assert fusion.causal
        assert_alike(outputs(model, fused_inputs(model, batch, torch.float32), real), expected)
        fusion.remove_all()


def test_padding_is_a_sequence_of_its_own_where_tokens_look_ahead() -> None:
    padded = encoder_batches()["padded"]
    found = Sequences.of(padded, causal=False)
    assert found is not None
    assert found.bounds is not None
    assert found.bounds.tolist() == [0, 50, 64, 128]
    mask = found.mask(torch.device("cpu"), causal=False)[:, 0]
    assert bool(mask[0, 3, 40])
    assert not mask[0, 3, 50:].any()
    assert bool(mask[1].all())
    assert Sequences.of(encoder_batches()["packed"]) is None, "its documents are looked at ahead"


@pytest.mark.parametrize(
    ("kept", "fused"),
    [
        ("attention.self.key", {MLP}),
        ("attention.output.dense", {MLP}),
        ("attention.output.LayerNorm", {ATTENTION}),
        ("output.dense", {ATTENTION}),
        ("output.LayerNorm", {ATTENTION, MLP}),
    ],
)
def test_a_half_is_fused_where_the_other_holds_what_is_kept(kept: str, fused: set[str]) -> None:
    model = bert(dropout=0.1)
    block = "bert.encoder.layer.0"
    expected = {
        kind: outputs(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in encoder_batches().items()
    }
    fusion = fuse(model, PlainParts(), {f"{block}.{kept}": "for a test"})
    assert halves(fusion.rows[0], block) == fused
    assert fusion.rows[1].reason is None
    for kind, batch in encoder_batches().items():
        real = batch.document_ids >= 0
        inputs = fused_inputs(model, batch, torch.float32)
        assert_alike(outputs(model, inputs, real), expected[kind])


def test_names_stay_through_fusion_falling_back_restoring_and_export(tmp_path: Path) -> None:
    model, batch = bert(), encoder_batches()["padded"]
    real = batch.document_ids >= 0
    plain = model_inputs(batch, model.config)
    expected = outputs(model, plain, real)
    before = dict(model.named_parameters(remove_duplicate=False))
    keys, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    report = convert(model, FusingEngine(), Conversion())
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == modules
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    attention = model.get_submodule("bert.encoder.layer.0.attention.self")
    for kind in ("weight", "bias"):
        assert lie_together(
            [attention.get_parameter(f"{n}.{kind}") for n in ("query", "key", "value")]
        )
    rows = rows_of(report)
    block = "bert.encoder.layer.1"
    assert rows[block]["to"] == "FusedBertLayer"
    assert rows[f"{block}.attention.self.key"]["to"] == "Linear"
    assert rows[f"{block}.attention.self.key"]["group"] == f"{block}.attention.self"
    assert rows[f"{block}.attention.output.LayerNorm"]["group"] == f"{block}.mlp"
    assert rows[f"{block}.output.LayerNorm"]["to"] == "PlainNorm", "the last norm is a layer"
    assert rows[f"{block}.output.LayerNorm"]["group"] is None
    fused = fused_inputs(model, batch, torch.float32)
    assert_alike(outputs(model, fused, real), expected)
    export(model, report, None, tmp_path / "model")
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model").train()
    torch.testing.assert_close(outputs(loaded, plain, real)[0], expected[0])
    restore_layers(report, {f"{block}.intermediate.dense": "for a test"})
    assert "it was fused in" in str(rows_of(report)[f"{block}.output.dense"]["reason"])
    assert_alike(outputs(model, fused_inputs(model, batch, torch.float32), real), expected)
    restore(model, report)
    assert type(model.bert.encoder.layer[0]).__name__ == "BertLayer"
    assert torch.equal(outputs(model, plain, real)[0], expected[0])


def test_weights_loaded_in_their_own_names_reach_the_fused_form() -> None:
    model, other = bert(), bert()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    batch = encoder_batches()["packed"]
    real = batch.document_ids >= 0
    expected = outputs(other, model_inputs(batch, other.config), real)
    fuse(model, PlainParts(), {})
    model.load_state_dict(other.state_dict())
    assert_alike(outputs(model, fused_inputs(model, batch, torch.float32), real), expected)


def test_gradient_checkpointing_recomputes_the_fused_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = bert(dropout=0.1), encoder_batches()["packed"]
    real = batch.document_ids >= 0
    fuse(model, PlainParts(), {})
    inputs = fused_inputs(model, batch, torch.float32)
    expected = outputs(model, inputs, real)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = counted(monkeypatch)
    logits, gradients = outputs(model, inputs, real)
    assert len(calls) == 4  # two blocks, twice
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(gradients[name], grad) for name, grad in expected[1].items())


def test_a_mask_of_the_callers_own_goes_the_models_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = bert(), encoder_batches()["padded"]
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    expected = model(**inputs).logits.detach()
    fuse(model, PlainParts(), {})
    calls = counted(monkeypatch)
    with pytest.warns(UserWarning, match="without FP8"):
        assert torch.equal(model(**inputs).logits, expected)
    assert not calls
    whole = model(batch.input_ids).logits
    assert len(calls) == 2, "rows without a mask are whole"
    torch.testing.assert_close(whole[1], expected[1], rtol=1e-3, atol=1e-4)


# What is refused


@pytest.mark.parametrize(
    ("changes", "fused", "reason"),
    [
        ({"hidden_act": "relu"}, {ATTENTION}, "has an activation that is not GELU"),
        (
            {"is_decoder": True, "add_cross_attention": True},
            set(),
            "not those of a BERT block: crossattention",
        ),
    ],
)
def test_what_of_bert_is_not_fused(changes: dict[str, Any], fused: set[str], reason: str) -> None:
    row = fuse(bert(**changes), PlainParts(), {}).rows[1]
    assert halves(row, "bert.encoder.layer.1") == fused
    assert reason in str(row.reason)


def attention_of_its_own(layer: Any) -> None:
    own = layer.attention.self.forward
    layer.attention.self.forward = lambda *a, **k: (own(*a, **k)[0] * 1.01, None)


def relative_positions(layer: Any) -> None:
    layer.attention.self.distance_embedding = nn.Embedding(8, 16)


def other_residual(layer: Any) -> None:
    """Looks like BERT's, and adds half of the residual."""
    output = layer.attention.output
    output.forward = lambda hidden_states, input_tensor: output.LayerNorm(
        output.dropout(output.dense(hidden_states)) + 0.5 * input_tensor
    )


def hook_on_the_middle(layer: Any) -> None:
    layer.attention.output.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "fused", "reason"),
    [
        (attention_of_its_own, {MLP}, "of its fused form differs by"),
        (relative_positions, {MLP}, "has other parts than q, k, v and a dropout: distance"),
        (other_residual, set(), "of its fused form differs by"),
        (hook_on_the_middle, set(), "attention.output has hooks"),
    ],
)
def test_what_computes_something_else_is_refused(change: Any, fused: set[str], reason: str) -> None:
    model = bert()
    for layer in model.bert.encoder.layer:
        change(layer)
    for index, row in enumerate(fuse(model, PlainParts(), {}).rows):
        assert halves(row, f"bert.encoder.layer.{index}") == fused
        assert reason in str(row.reason)


@pytest.mark.parametrize("biased", [True, False])
def test_blocks_that_are_given_more_than_a_fused_one_reads_are_left(biased: bool) -> None:
    """Biases of the scores by places, which come from outside of the block."""
    config = transformers.LayoutLMv3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        coordinate_size=11,
        shape_size=10,
        pad_token_id=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        visual_embed=False,
        has_relative_attention_bias=biased,
        has_spatial_attention_bias=biased,
        attn_implementation="sdpa",
    )
    model = transformers.LayoutLMv3ForSequenceClassification(config).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    batch = encoder_batches()["padded"]
    expected = model(**model_inputs(batch, config)).logits.detach()
    fusion = fuse(model, PlainParts(), {})
    for index, row in enumerate(fusion.rows):
        name = f"layoutlmv3.encoder.layer.{index}"
        assert halves(row, name) == (set() if biased else {ATTENTION, MLP})
        assert ("is called with position_bias" in str(row.reason)) == biased
    found = model(**fused_inputs(model, batch, torch.float32)).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


class Backwards(PlainParts):
    """Attends to what came before alone."""

    def attention(self, half: AttentionHalf) -> Attend:
        own = super().attention(half)

        def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
            object.__setattr__(half, "causal", True)
            return own(query, key, value, sequences)

        return attend


class Across(PlainParts):
    """Attends to all documents and the padding."""

    def attention(self, half: AttentionHalf) -> Attend:
        own = super().attention(half)
        return lambda q, k, v, sequences: own(q, k, v, Sequences(sequences.rows, sequences.length))


class Exchanged(PlainParts):
    """q and k the wrong way round."""

    def linears(self, linears: Any, name: str) -> Kernel:
        first, second, *rest = linears
        return super().linears([second, first, *rest], name)


class Unnormalised(PlainParts):
    """The residual of its MLP is not the normalised sum."""

    def norm_linear_and_norm(self, norm: Any, linears: Any, name: str) -> Any:
        own = super().norm_linear_and_norm(norm, linears, name)
        return lambda x: (own(x)[0], x)


class OtherDraws(PlainParts):
    """Drops out attention's weights by random numbers of its own, as kernels do."""

    def attention(self, half: AttentionHalf) -> Attend:
        own = super().attention(half)

        def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
            torch.rand(7)
            return own(query, key, value, sequences)

        return attend


def test_which_weights_of_attention_are_dropped_out_is_not_compared() -> None:
    model = bert(dropout=0.3)
    fusion = fuse(model, OtherDraws(), {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert all(layer.attention.self.dropout.p == 0.3 for layer in model.bert.encoder.layer)


@pytest.mark.parametrize(
    ("parts", "fused"),
    [(Backwards(), {MLP}), (Across(), {MLP}), (Exchanged(), {MLP}), (Unnormalised(), {ATTENTION})],
)
def test_kernels_that_compute_something_else_are_found_out(
    parts: PlainParts, fused: set[str]
) -> None:
    for index, row in enumerate(fuse(bert(dropout=0.1), parts, {}).rows):
        assert halves(row, f"bert.encoder.layer.{index}") == fused
        assert "of its fused form differs by" in str(row.reason)
