"""The small architectures on Transformer Engine's own layers: the same layers, near fp32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fp8core import engines
from fp8core.conversion import convert
from fp8core.spec import Conversion
from fp8core.spec.recipe import TECurrent, TEDelayed
from tests.fp8core.conversion import test_architectures as small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
RECIPES: dict[str, Any] = {
    "delayed": TEDelayed(amax_history_len=4),
    "current": TECurrent(scaling="current"),
}


def engine_for(recipe: str) -> Any:
    found = engines.availability(RECIPES[recipe], DEVICE)
    if not found.ok:
        pytest.skip("; ".join(found.reasons))
    return engines.create(RECIPES[recipe], DEVICE)


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    inputs = small._inputs(model)
    if "pixel_values" in inputs:  # 17 tokens an image: as many images as make it a multiple of 16
        inputs["pixel_values"] = torch.randn(16, *inputs["pixel_values"].shape[1:])
    return {key: value.to(DEVICE) for key, value in inputs.items()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", small.ARCHITECTURES)
def test_small_architectures_train_near_fp32(name: str, recipe: str) -> None:
    _, converted, kept = small.ARCHITECTURES[name]
    reference = small._model(name).to(DEVICE)
    model, inputs = copy.deepcopy(reference), inputs_for(reference)
    keys, ties = list(model.state_dict()), small._ties(model)
    engine = engine_for(recipe)
    report = convert(model, engine, Conversion(fuse="none"))
    assert (len(report.converted), len(report.kept)) == (converted, kept), report.to_json()
    assert (list(model.state_dict()), small._ties(model)) == (keys, ties)

    direction = torch.randn_like(reference(**inputs).logits)
    for _ in range(2):  # delayed scaling has no scales in the first pass
        model.zero_grad()
        with engine.training_context():
            logits = model(**inputs).logits
        logits.backward(direction.to(logits.dtype))
        engine.after_backward()
    expected = reference(**inputs).logits
    expected.backward(direction)
    # E4M3 has three mantissa bits, E5M2 two; what is wrong somewhere is off by its own size.
    assert 1e-3 < small._apart([logits.float()], [expected]) < 0.2
    found, wanted = (dict(each.named_parameters()) for each in (model, reference))
    reached = [key for key, parameter in wanted.items() if parameter.grad is not None]
    assert [key for key, parameter in found.items() if parameter.grad is not None] == reached
    assert all(found[key].grad.any() for key in reached)
    assert small._apart(*([each[key].grad for key in reached] for each in (found, wanted))) < 0.5
