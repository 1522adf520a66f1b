"""Fused blocks below all that is trained: frozen wholly, or but for the matrices of an MLP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.conversion import convert
from fp8core.spec import Conversion
from tests.fp8core.fusion.gpu_models import FAR, batch_for, distances, gradients_of, make
from tests.fp8core.fusion.test_te_fusion_gpu import engine_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FROZEN = ("embed", "wte", "wpe", "layers.0.", "h.0.", "layer.0.")


def frozen(model: Any, *, but_mlp: bool) -> set[str]:
    """Freezes the embeddings and the first block; the names of what is trained."""
    trained = set()
    for name, parameter in model.named_parameters():
        below = any(part in name for part in FROZEN) and "lm_head" not in name
        of_mlp = but_mlp and parameter.dim() > 1 and ("mlp" in name or "intermediate" in name)
        parameter.requires_grad_(not below or of_mlp)
        if parameter.requires_grad:
            trained.add(name)
    return trained


def gradients(family: str, recipe: dict[str, str], *, freeze: str | None) -> dict[str, Tensor]:
    """Those of a second step, behind one that made the scales of delayed scaling."""
    model, engine = make(family), engine_for(**recipe)
    expected = {name for name, _ in model.named_parameters()}
    if freeze is not None:
        expected = frozen(model, but_mlp=freeze == "all but its MLP")
    report = convert(model, engine, Conversion())
    assert report.fusion is not None
    assert [row.reason for row in report.fusion.rows] == [None, None]
    found: dict[str, Tensor] = {}
    for _ in range(2):
        model.zero_grad()
        _, found = gradients_of(engine, model, batch_for(family, packed=True))
    assert found.keys() == expected
    return found


@pytest.mark.parametrize("freeze", ["all of it", "all but its MLP"])
@pytest.mark.parametrize("scaling", ["delayed", "current", "block"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "Bert"])
def test_what_is_trained_has_the_gradients_it_has_where_all_is(
    family: str, scaling: str, freeze: str
) -> None:
    """Transformer Engine's fused MLP fails where neither its input nor an RMSNorm is trained."""
    recipe = {"scaling": scaling}
    found = gradients(family, recipe, freeze=freeze)
    whole = gradients(family, recipe, freeze=None)
    total, each = distances(found, {name: whole[name] for name in found})
    assert total < FAR
    assert max(each.values()) < 2 * FAR, max(each, key=lambda name: each[name])
