"""Fused blocks that compute GEMM by GEMM, beside either override: the numbers, on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from fp8core.data.attention import model_inputs
from fp8core.fusion import fuse, fused_inputs
from tests.fp8core.fusion.berts import bert, encoder_batches
from tests.fp8core.fusion.families import FAMILIES, batches, make
from tests.fp8core.fusion.loras import ALL, GPT2, planned, wrap
from tests.fp8core.fusion.loras import outputs as adapted
from tests.fp8core.fusion.parts_by_gemm import Chosen, InSteps, norms_of_a_cpu
from tests.fp8core.fusion.test_bert import assert_alike
from tests.fp8core.fusion.test_bert import outputs as encoded
from tests.fp8core.fusion.test_blocks import outputs

__all__ = ["norms_of_a_cpu"]  # a fixture


@pytest.mark.parametrize("kind", [Chosen, InSteps])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_blocks_compute_what_the_plain_ones_do(
    kind: type[Chosen | InSteps], family: str
) -> None:
    model = make(family)
    plain = {
        kind: outputs(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in batches().items()
    }
    keys = list(model.state_dict())
    parts = kind()
    fusion = fuse(model, parts, {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert fusion.whole
    assert list(model.state_dict()) == keys
    for kind, batch in batches().items():
        real = batch.document_ids >= 0
        found = outputs(model, fused_inputs(model, batch, torch.float32), real)
        assert_alike(found, plain[kind])


@pytest.mark.parametrize("kind", [Chosen, InSteps])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_encoders_compute_what_the_plain_ones_do(
    kind: type[Chosen | InSteps], activation: str
) -> None:
    """No norm is before their q, k and v, and what the one behind attention gives is used twice."""
    model = bert(hidden_act=activation)
    plain = {
        kind: encoded(model, model_inputs(batch, model.config), batch.document_ids >= 0)
        for kind, batch in encoder_batches().items()
    }
    parts = kind()
    fusion = fuse(model, parts, {})
    assert [row.reason for row in fusion.rows] == [None, None]
    assert len(parts.made) == 2 * 4
    for kind, batch in encoder_batches().items():
        inputs = fused_inputs(model, batch, torch.float32)
        assert_alike(encoded(model, inputs, batch.document_ids >= 0), plain[kind])


@pytest.mark.parametrize("kind", [Chosen, InSteps])
@pytest.mark.parametrize(("family", "keys"), [("Llama", ALL), ("GPT2", GPT2)])
def test_adapters_stand_beside_the_gemms(
    kind: type[Chosen | InSteps], family: str, keys: tuple[str, ...]
) -> None:
    model = make(family)
    adapters = planned(model, keys)
    plain = wrap(copy.deepcopy(model), adapters)
    parts = kind()
    fusion = fuse(model, parts, {}, adapters=adapters)
    assert [row.reason for row in fusion.rows] == [None, None]
    assert len(parts.made) == 2 * 4
    wrapped = wrap(model, adapters)
    for batch in batches().values():
        logits, gradients = adapted(wrapped, batch, fused=True)
        expected, expected_gradients = adapted(plain, batch, fused=False)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            other = expected_gradients[name]
            assert (gradient is None) == (other is None), name
            if gradient is not None and other is not None:
                assert (gradient - other).norm() <= 1e-4 * other.norm(), name
