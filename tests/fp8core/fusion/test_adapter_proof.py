"""The proof of fused blocks beside LoRA: it sees what is wrong, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.fusion import PlannedAdapters, fuse
from fp8core.fusion import adapters as adapters_module
from fp8core.fusion.adapters import Adapters
from fp8core.fusion.plain import PlainParts
from fp8core.spec import LoraAdapter
from tests.fp8core.fusion.berts import bert
from tests.fp8core.fusion.families import make
from tests.fp8core.fusion.loras import ALL, BERT, SETTINGS, planned, reasons


class InBf16(PlainParts):
    """As the parts of a GPU are proved."""

    def high_precision(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)


def test_all_adapters_pass_the_proof_in_bf16() -> None:
    model = make("Llama").bfloat16()
    fusion = fuse(model, InBf16(), {}, adapters=planned(model, ALL, LoraAdapter(rank=8)))
    assert reasons(fusion) == [None, None]


def _forgetting(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return output


def _shifted(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return output + (own_forward(self, output, x) - output).roll(1, dims=-1)


def _cut_off(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return own_forward(self, output, x.detach())


def _undropped(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters_module._Piece, "drops", property(lambda piece: False))
        return own_forward(self, output, x)


def _unscaled(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return output + (own_forward(self, output, x) - output) / 1.5


own_forward = Adapters.forward


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (_forgetting, "the output"),
        (_shifted, "the output"),
        (_cut_off, "the gradient of"),
        (_unscaled, "the output"),
    ],
)
@pytest.mark.parametrize("keys", [("v_proj",), ("down_proj",)])
@pytest.mark.parametrize("parts", [PlainParts, InBf16])
def test_the_proof_of_a_block_sees_what_is_wrong_with_its_adapters(
    wrong: Any,
    named: str,
    keys: tuple[str, ...],
    parts: type[PlainParts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by the wider bound of bf16, in which a GPU computes it."""
    model = make("Llama")
    if parts is InBf16:
        model.bfloat16()
    before = [name for name, _ in model.named_modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(Adapters, "forward", wrong)
    fusion = fuse(model, parts(), {}, adapters=planned(model, keys))
    half = "self_attn" if keys == ("v_proj",) else "mlp"
    other = "mlp" if half == "self_attn" else "self_attn"
    for index, row in enumerate(fusion.rows):
        assert row.fused == (f"model.layers.{index}.{other}",)
        assert str(row.reason).startswith(named), row.reason
        assert "differs by" in str(row.reason)
    # Nothing is left of the adapters that it was proved with.
    assert [name for name, _ in model.named_modules()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model.model.layers[0], "peft_config")
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dropout", [0.05, 0.5])
def test_the_proof_of_a_block_sees_that_its_adapters_drop_nothing_out(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are proved at the rate that they will have; where that is none, nothing is wrong."""
    monkeypatch.setattr(Adapters, "forward", _undropped)
    for rate in (dropout, 0.0):
        model = make("Llama")
        settings = LoraAdapter(rank=4, alpha=6.0, dropout=rate)
        fusion = fuse(model, PlainParts(), {}, adapters=planned(model, ("v_proj",), settings))
        for index, row in enumerate(fusion.rows):
            halves = {half.removeprefix(f"model.layers.{index}.") for half in row.fused}
            assert halves == ({"mlp"} if rate else {"self_attn", "mlp"})


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_the_proof_of_a_block_knows_the_rate_of_its_adapters_dropout(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[float] = set()

    def watched(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
        seen.update(float(getattr(piece.dropout, "p", 0.0)) for piece in self._pieces())
        return own_forward(self, output, x)

    monkeypatch.setattr(Adapters, "forward", watched)
    model = make("Llama")
    settings = LoraAdapter(rank=4, alpha=6.0, dropout=rate)
    fuse(model, PlainParts(), {}, adapters=planned(model, ("v_proj",), settings))
    assert seen == {rate}


@pytest.mark.parametrize(
    ("key", "keys"), [("attention.self.query", BERT), (None, ("0.output.dense", "1.output.dense"))]
)
def test_the_proof_leaves_nothing_on_layers_that_are_not_proved(
    key: str | None, keys: tuple[str, ...]
) -> None:
    """Whose names end like those of others: attention.output.dense and output.dense."""
    model = bert()
    before = [name for name, _ in model.named_modules()]
    names = frozenset(name for name in before if name.endswith(tuple(f".{key}" for key in keys)))
    kept = {} if key is None else {f"bert.encoder.layer.{i}.{key}": "for a test" for i in range(2)}
    adapters = PlannedAdapters(names, SETTINGS)
    fusion = fuse(model, PlainParts(), kept, adapters=adapters)
    assert [name for name, _ in model.named_modules()] == before
    halves = {half for row in fusion.rows for half in row.fused}
    assert {f"bert.encoder.layer.{i}.mlp" for i in range(2)} <= halves
    assert len(halves) == (4 if key is None else 2)


def test_the_proof_draws_no_random_numbers_of_the_process() -> None:
    model = make("Llama")
    adapters = planned(model, ALL, LoraAdapter(rank=4, dropout=0.5))
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    fuse(model, PlainParts(), {}, adapters=adapters)
    assert torch.equal(torch.rand(4), expected)
