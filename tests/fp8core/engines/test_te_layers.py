"""The te engine's FP8 state and figures, over modules that hold it as Transformer Engine's do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fp8core.engines import te_layers
from fp8core.engines.te_figures import Figures
from fp8core.engines.te_layers import ConvertedLayers
from fp8core.engines.te_state import DirectionState, OwnDelayedState, ScaleInterval
from fp8core.engines.weight_casts import WeightCasts
from fp8core.spec.recipe import TEDelayed

CPU = torch.device("cpu")


class Holding(nn.Module):
    """Has buffers for as many GEMMs as it is told, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_metadata(self, num_gemms: int) -> None:
        for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[key] = DirectionState(
                torch.arange(1.0, 1 + num_gemms * columns),
                torch.arange(4.0 * num_gemms * columns).reshape(4, -1),
            )


@pytest.fixture(autouse=True)
def _without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's state is begun by Transformer Engine, which need not be here; there is none."""

    def begin(modules: dict[str, Any]) -> None:
        assert modules == {}

    monkeypatch.setattr(te_layers, "begin_attention", begin)


def own_state() -> OwnDelayedState:
    return OwnDelayedState(4, 0, "max", None, None, CPU)


def layers_of(*, overridden: bool = False, delayed: bool = True) -> ConvertedLayers:
    layers = ConvertedLayers(own_state() if delayed else None, overridden=overridden)
    layers.linears["a"] = Holding()
    layers.take_fused("b", Holding(), (".up", ".down"))
    return layers


def test_states_are_made_saved_and_put_back() -> None:
    layers, interval = layers_of(), ScaleInterval(2)
    state = layers.state_dict(interval, nullcontext)
    names = {key.split("/")[0] for key in state if not key.startswith("updates")}
    assert names == {"a", "b.up", "b.down"}
    assert state["b.down/forward/scale"].tolist() == [4.0, 5.0, 6.0]
    assert state["b.down/backward/amax_history"][0].tolist() == [2.0, 3.0]
    assert state["updates/forward"].item() == 0

    other, counted = layers_of(), ScaleInterval(2)
    changed = {key: value + 1 for key, value in state.items()}
    other.load_state_dict(changed, counted, nullcontext)
    assert other.fused["b"].fp8_meta["scaling_fwd"].scale.tolist() == [2, 3, 4, 5, 6, 7]
    assert counted.updates == {"forward": 1, "backward": 1}
    # The next update is not due: what was put back is held.
    other.fused["b"].fp8_meta["scaling_fwd"].scale.zero_()
    counted.after_update("forward", other.scales("forward"))
    assert other.fused["b"].fp8_meta["scaling_fwd"].scale.tolist() == [2, 3, 4, 5, 6, 7]


def test_state_of_other_layers_is_refused() -> None:
    state = layers_of().state_dict(ScaleInterval(1), nullcontext)
    layers = layers_of()
    layers.forget(["b"])
    with pytest.raises(ValueError, match=r"b\."):
        layers.load_state_dict(state, ScaleInterval(1), nullcontext)


def test_layers_of_our_own_have_their_state_with_us() -> None:
    layers = layers_of(overridden=True)
    assert layers.own is not None
    layers.own.add("a")
    assert [name for name, _ in layers.states("forward")] == ["a"]
    assert "scaling_fwd" not in layers.linears["a"].fp8_meta
    assert set(layers.state_dict(ScaleInterval(1), nullcontext)) == {
        "a/forward/scale",
        "a/forward/amax_history",
        "a/backward/scale",
        "a/backward/amax_history",
        "updates/forward",
        "updates/backward",
    }


def test_scales_that_are_made_at_the_cast_are_no_state() -> None:
    layers = layers_of(delayed=False)
    assert set(layers.state_dict(ScaleInterval(1), nullcontext)) == {
        "updates/forward",
        "updates/backward",
    }
    assert Figures(TEDelayed(), layers, WeightCasts(), CPU)._scales() == {}


def test_the_scales_and_amaxes_that_figures_go_by() -> None:
    layers = layers_of()
    layers.state_dict(ScaleInterval(1), nullcontext)
    figures = Figures(TEDelayed(), layers, WeightCasts(), CPU)
    found = {key: float(scale) for key, scale in figures._scales().items()}
    assert found == {
        ("a", "input"): 1.0,
        ("a", "weight"): 2.0,
        ("a", "grad_output"): 1.0,
        ("b.up", "input"): 1.0,
        ("b.up", "weight"): 2.0,
        ("b.up", "grad_output"): 1.0,
        ("b.down", "input"): 4.0,
        ("b.down", "weight"): 5.0,
        ("b.down", "grad_output"): 3.0,
    }
    # Between the two GEMMs, of the newest step: what the second is given, and the first gets back.
    hidden = {key: float(amax) for key, amax in figures._hidden_amaxes().items()}
    assert hidden == {("b.down", "input"): 18.0 + 3.0, ("b.up", "grad_output"): 12.0}
    assert figures.read_later()() == {}, "nothing is recorded"
