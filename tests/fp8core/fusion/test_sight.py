"""Windows, causality and rotations are those of the model, for rows as long as a job has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.conversion import convert
from fp8core.fusion import fuse, recognise
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.recognise import find_blocks
from fp8core.fusion.sight import Sight, row_length, sights
from fp8core.spec import Conversion
from tests.fp8core.fusion.berts import bert
from tests.fp8core.fusion.families import make
from tests.fp8core.fusion.test_conversion import FusingEngine


def model_of(family: str) -> Any:
    return bert(family) if family in ("Bert", "Roberta") else make(family)


def fused(model: Any, length: int | None = None) -> tuple[list[set[str]], list[str]]:
    """The halves that are, and why not the others, by block."""
    rows = fuse(model, PlainParts(), {}, length=length).rows
    halves = [{half.rpartition(".")[2] for half in row.fused} for row in rows]
    return halves, [row.reason or "" for row in rows]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("family", "seen"),
    [
        ("Llama", [(1, 100), (1, 100)]),
        ("Mistral", [(1, 24), (1, 24)]),
        ("Qwen2, sliding and full", [(1, 100), (1, 20)]),
        ("GPT2", [(1, 100), (1, 100)]),
        ("Bert", [(100, 100), (100, 100)]),
        ("Roberta", [(100, 100), (100, 100)]),
    ],
)
def test_what_tokens_see_is_asked_of_the_model(
    family: str, seen: list[tuple[int, int]], device: str
) -> None:
    model = model_of(family)
    if device == "meta":
        with torch.device("meta"):
            model = type(model)._from_config(model.config)
    layers = [layer for _, layer in find_blocks(model)]
    modes = [module.training for module in model.modules()]
    found = sights(model, layers, 100)
    assert [found[id(layer)] for layer in layers] == [Sight(100, *pair) for pair in seen]
    assert [module.training for module in model.modules()] == modes
    assert not any("forward" in layer.__dict__ for layer in layers)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("Llama", 24),
        ("Llama", 200),
        ("Mistral", 25),
        ("Mistral", 23),
        ("Mistral", None),
        ("Qwen2, sliding and full", None),
        ("Qwen2, sliding and full", 20),
    ],
)
def test_a_window_that_is_misread_is_found_before_use(
    family: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof's own mask has the window that was read, and would agree with it."""
    monkeypatch.setattr(recognise, "_window", lambda attention, config: window)
    halves, reasons = fused(make(family))
    wrong = [True, True]
    if family.startswith("Qwen2"):
        wrong = [window is not None, window is None]  # its second layer alone has one, of 20
    for found, reason, is_wrong in zip(halves, reasons, wrong, strict=True):
        assert found == ({"mlp"} if is_wrong else {"self_attn", "mlp"})
        assert ("by the model's own mask they see" in reason) == is_wrong


def test_a_window_is_asked_for_as_far_as_rows_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "_window", lambda attention, config: 200)
    halves, reasons = fused(make("Llama"), length=128)
    assert halves == [{"self_attn", "mlp"}] * 2, "in such rows it hides nothing"
    assert reasons == ["", ""]


def test_a_token_that_seems_to_look_back_alone_and_does_not_is_found() -> None:
    model = bert()
    for layer in model.bert.encoder.layer:
        layer.attention.self.is_causal = True
    halves, reasons = fused(model)
    assert halves == [{"mlp"}] * 2
    assert all("seem to see 1 and 256" in reason for reason in reasons)


def turning_back(model: Any, behind: int) -> None:
    """Rotates what comes behind that position as what is there."""
    own = model.model.rotary_emb.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = own(x, position_ids.clamp(max=behind))
        return found

    model.model.rotary_emb.forward = forward


@pytest.mark.parametrize(
    ("length", "right"), [(128, True), (5001, True), (5002, False), (8192, False), (None, True)]
)
def test_rotations_are_compared_as_far_as_rows_reach(length: int | None, right: bool) -> None:
    model = make("Llama", max_position_embeddings=8192)
    turning_back(model, 5000)
    halves, reasons = fused(model, length)
    assert halves == [{"self_attn", "mlp"} if right else {"mlp"}] * 2
    assert all(("not cos and sin of position" in reason) != right for reason in reasons)


def test_a_conversion_is_proved_for_the_rows_it_is_told_of() -> None:
    for length, right in ((128, True), (8192, False)):
        model = make("Llama", max_position_embeddings=8192)
        turning_back(model, 5000)
        report = convert(model, FusingEngine(), Conversion(), length=length)
        assert report.fusion is not None
        assert report.fusion.whole == right


def test_rows_are_no_longer_than_the_models_positions() -> None:
    """An embedding that is read behind its end is no error that a GPU could be asked about."""
    assert row_length(make("GPT2").config, None) == 256
    assert row_length(make("GPT2").config, 64) == 64
    assert row_length(bert("Roberta").config, 1024) == 255
    assert row_length(make("Llama", max_position_embeddings=8192).config, None) == 4096
    assert row_length(None, 8192) == 8192
    assert row_length(None, None) == 128


def test_a_model_that_cannot_be_asked_is_proved_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama")
    own = model.forward

    def forward(*arguments: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            raise TypeError("this model takes no such mask")
        return own(*arguments, attention_mask=attention_mask, **options)

    model.forward = forward
    assert sights(model, [layer for _, layer in find_blocks(model)], 64) == {}
    halves, _ = fused(model)
    assert halves == [{"self_attn", "mlp"}] * 2
