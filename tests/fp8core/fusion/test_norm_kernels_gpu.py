"""Norms of fused blocks by cuDNN's kernels, beside Transformer Engine's own, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.conversion import convert
from fp8core.engines import te_norms
from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.spec import Conversion, parse_spec
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.kernel_names import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
WIDE, TUNED = 1536, 1024
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"amax_history_len": 4},
    "current": {"scaling": "current"},
    "block": {"scaling": "block"},
}


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    """The choice is the process's, which other tests share."""
    yield
    if torch.cuda.is_available():
        te_norms.use_cudnn(forward=False, backward=False)


def made(width: int, dtype: torch.dtype, recipe: str) -> tuple[Any, TransformerEngine]:
    """A Llama of two blocks, all of them fused."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 256,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config).to(DEVICE, dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # at 1 one that was left out would not show
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    spec = {
        "model": {"source": "config", "config": {"model_type": "llama"}},
        "data": {"source": "builtin"},
        "recipe": {"engine": "te", **RECIPES[recipe]},
    }
    engine = TransformerEngine(parse_spec(spec).recipe, DEVICE)
    report = convert(model, engine, Conversion())
    assert report.fusion is not None
    assert [row.reason for row in report.fusion.rows] == [None] * 2
    return model, engine


def loss_of(model: Any, engine: TransformerEngine, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 512, (2, 128), generator=generator).to(DEVICE)
    with engine.training_context():
        logits = model(input_ids=ids, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model: Any, engine: TransformerEngine, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for number in range(steps):
        loss = loss_of(model, engine, number)
        loss.backward()
        engine.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def norm_kernels(model: Any, engine: TransformerEngine) -> list[str]:
    """The names of Transformer Engine's own kernels of norms in one step."""
    return [name for name in launched(lambda: train(model, engine, 1)) if "rmsnorm" in name]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_width_without_a_kernel_of_its_own_goes_by_cudnn(recipe: str) -> None:
    assert norm_kernels(*made(TUNED, torch.bfloat16, recipe))
    assert not norm_kernels(*made(WIDE, torch.bfloat16, recipe))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_both_kernels_train_alike(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same amaxes in the first pass, from which the scales come, and the same losses."""
    found = []
    for by_cudnn in (False, True):
        monkeypatch.setattr(te_norms, "cudnn_is_faster", lambda *args, by=by_cudnn: by)
        model, engine = made(WIDE, dtype, recipe)
        loss_of(model, engine, 0)
        found.append((engine.state_dict(), train(model, engine, 5)))
        te_norms.use_cudnn(forward=False, backward=False)
    (own, own_losses), (other, other_losses) = found
    assert own.keys() == other.keys()
    for key, value in own.items():
        # Of what is rounded to bf16 in between, the largest value may be rounded another way.
        torch.testing.assert_close(other[key], value, rtol=2e-2, atol=0, msg=key)
    first = "model.layers.0.self_attn.qkv_proj/forward/amax_history"
    if recipe == "delayed":
        assert float(own[first].max()) > 0
    assert other_losses == pytest.approx(own_losses, rel=5e-3)


def test_recomputation_changes_neither_losses_nor_amaxes() -> None:
    """cuDNN writes amaxes and does not raise them: the second pass must not leave others."""
    found = []
    for recomputed in (False, True):
        model, engine = made(WIDE, torch.bfloat16, "delayed")
        if recomputed:
            enable_gradient_checkpointing(model, engine)
        losses = train(model, engine, 4)
        found.append((losses, engine.state_dict()))
    (own_losses, own), (other_losses, other) = found
    assert other_losses == pytest.approx(own_losses, rel=1e-2)
    assert own.keys() == other.keys()
    names = [name for name in own if name.endswith("/forward/amax_history")]
    assert names
    for name in names:
        assert float(own[name].max()) > 0
        # Attention adds up gradients in no fixed order, and weights follow it.
        torch.testing.assert_close(other[name], own[name], rtol=5e-2, atol=0, msg=name)


def test_state_goes_out_and_comes_back_bit_for_bit() -> None:
    model, engine = made(WIDE, torch.bfloat16, "delayed")
    train(model, engine, 3)
    state, weights = engine.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    expected = loss_of(model, engine, 7).item()
    other, fresh = made(WIDE, torch.bfloat16, "delayed")
    other.load_state_dict(weights)
    fresh.load_state_dict(state)
    assert loss_of(other, fresh, 7).item() == expected
