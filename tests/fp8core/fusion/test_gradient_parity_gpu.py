"""Fused blocks beside ``te.TransformerLayer`` by hand: the same gradients in FP8, without a bias.

The short form of ``benchmarks/gradient_parity.py``, through the trainer's own forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
LENGTH, ROWS, BATCHES = 256, 8, 6
BIAS = 0.01
"""What two ways to round differ by in the direction of the gradient; ten times what was measured
of the large model."""
ERROR = 0.1
"""Rounding that differs before a cast to FP8 moves some elements by an FP8 step. Another choice of
scales or casts is 12 to 16 % away."""


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, list[Any]]]:
    """The benchmark with a small model, a folder with its initial weights, and some batches."""
    pytest.importorskip("transformer_engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gradient_parity
        import te_by_hand
        import te_parity

        for field, value in SMALL.items():
            patch.setitem(te_by_hand.CONFIG, field, value)
        for module in (te_by_hand, te_parity):
            patch.setattr(module, "LENGTH", LENGTH)
            patch.setattr(module, "ROWS", ROWS)
        folder = tmp_path_factory.mktemp("parity")
        te_by_hand.prepare(folder, BATCHES)
        spec = gradient_parity.spec_of(folder, "initial", "none")
        data = gradient_parity.build_data_and_model(
            spec, gradient_parity.Places(base=folder), device=torch.device("cpu"), dtype=torch.float
        ).data.train
        yield gradient_parity, folder, [next(data) for _ in range(BATCHES)]


def test_gradients_are_those_of_transformer_layer(setting: tuple[Any, Path, list[Any]]) -> None:
    benchmark, _, _ = setting
    own, theirs = measured(setting, "octrain"), measured(setting, "te-layers")
    figures = benchmark.compare(own.gradients, theirs.gradients)
    benchmark.show("to te.TransformerLayer", {"octrain": figures})
    scales = benchmark.compare_scales(own.scales, theirs.scales)
    print(scales)
    for group, figure in figures.items():
        assert abs(figure["bias"]) < BIAS, (group, figure)
        assert figure["error"] < ERROR, (group, figure)
    # Amaxes of tensors that agree but for rounding; those of the weights are the same numbers.
    assert len(scales) == 12
    assert all(apart < 0.25 for apart in scales.values()), scales
    assert all(apart == 0 for name, apart in scales.items() if name.endswith("/weight")), scales
    for mine, its in zip(own.losses, theirs.losses, strict=True):
        assert mine == pytest.approx(its, rel=2e-3)


def test_two_per_cent_too_much_would_show(setting: tuple[Any, Path, list[Any]]) -> None:
    benchmark, folder, batches = setting
    way = benchmark.by_octrain(folder, "initial")
    compute = way.compute

    def too_much(batch: Any) -> Any:
        loss = compute(batch)
        for parameter in way.model.parameters():
            parameter.grad *= 1.02
        return loss

    way.compute = too_much
    wrong = benchmark.measure(way, batches, 2)
    theirs = measured(setting, "te-layers")
    figures = benchmark.compare(wrong.gradients, theirs.gradients)
    assert all(figure["bias"] > BIAS for figure in figures.values()), figures


def measured(setting: tuple[Any, Path, list[Any]], name: str) -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    benchmark, folder, batches = setting
    FP8GlobalStateManager.reset()
    return benchmark.measure(benchmark.WAYS[name](folder, "initial"), batches, 2)
