"""The torchao engine on a GPU: FP8 kernels in compiled blocks, high precision in evaluation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp8core.conversion import convert
from fp8core.engines import availability, create
from fp8core.spec import Conversion
from fp8core.spec.recipe import AmpRecipe, TorchaoRecipe
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.kernel_names import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LAYERS, LINEARS_PER_LAYER = 3, 7
# cuBLAS names an FP8 operand with a q; the rowwise kernels are CUTLASS's, named by their types.
FP8_GEMM = re.compile(r"nvjet_sm\d+_q|e4m3|e5m2")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def build(recipe: Any, *, checkpointing: bool = False, compiled: bool = True) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    available = availability(recipe, DEVICE)
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).to(DEVICE).train()
    engine = create(recipe, DEVICE)
    convert(model, engine, Conversion())
    if checkpointing:
        enable_gradient_checkpointing(model, engine)
    if compiled:
        engine.prepare(model)
    return engine, model


def tokens(index: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(index)
    return torch.randint(0, 256, (2, 64), device=DEVICE, generator=generator)


def train(engine: Any, model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        with engine.training_context():
            ids = tokens(step % 4)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        engine.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fp8_gemms(run: Callable[[], Any]) -> int:
    return sum(FP8_GEMM.search(name) is not None for name in launched(run))


def evaluation_loss(engine: Any, model: Any) -> float:
    model.eval()
    with torch.no_grad(), engine.evaluation_context():
        loss: torch.Tensor = model(input_ids=tokens(9), labels=tokens(9), use_cache=False).loss
    model.train()
    return loss.item()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_blocks_train_with_fp8_gemms(scaling: str) -> None:
    engine, model = build(TorchaoRecipe(engine="torchao", scaling=scaling))
    keys = list(model.state_dict())
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    losses = train(engine, model, 12)
    assert losses[-1] < losses[0] - 0.2
    assert list(model.state_dict()) == keys
    per_linear = 2 if scaling == "rowwise_with_gw_hp" else 3
    found = fp8_gemms(lambda: train(engine, model, 1))
    assert found == LAYERS * LINEARS_PER_LAYER * per_linear
    assert fp8_gemms(lambda: evaluation_loss(engine, model)) > -1  # compiles it
    assert fp8_gemms(lambda: evaluation_loss(engine, model)) == 0
    # The blocks are alike and share their code: one graph to train, one to evaluate.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_losses_stay_near_bf16_and_near_eager(scaling: str) -> None:
    recipe = TorchaoRecipe(engine="torchao", scaling=scaling)
    compiled = train(*build(recipe), 10)
    torch._dynamo.reset()
    eager = train(*build(recipe, compiled=False), 10)
    bf16 = train(*build(AmpRecipe(engine="amp")), 10)
    assert compiled == pytest.approx(eager, abs=0.05)
    assert compiled == pytest.approx(bf16, abs=0.1)
    assert compiled != bf16


@pytest.mark.parametrize("scaling", SCALINGS)
def test_checkpointing_recomputes_in_fp8(scaling: str) -> None:
    recipe = TorchaoRecipe(engine="torchao", scaling=scaling)
    plain = train(*build(recipe), 5)
    torch._dynamo.reset()
    engine, model = build(recipe, checkpointing=True)
    assert train(engine, model, 5) == pytest.approx(plain, abs=0.05)
    per_linear = 2 if scaling == "rowwise_with_gw_hp" else 3
    found = fp8_gemms(lambda: train(engine, model, 1))
    # A compiled recomputation leaves out what no gradient needs: the last GEMM of a block.
    recomputed = found - LAYERS * LINEARS_PER_LAYER * per_linear
    assert LAYERS * (LINEARS_PER_LAYER - 1) <= recomputed <= LAYERS * LINEARS_PER_LAYER


def test_health_comes_out_of_compiled_blocks() -> None:
    engine, model = build(TorchaoRecipe(engine="torchao"))
    train(engine, model, 2)
    engine.record_health(True)
    train(engine, model, 1)
    figures = engine.health()
    engine.record_health(False)
    assert len(figures) == LAYERS * LINEARS_PER_LAYER * 3 * 4
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        for tensor, largest in (("input", 448.0), ("weight", 448.0), ("grad_output", 57344.0)):
            prefix = f"fp8/{name}/{tensor}"
            amax = figures[f"{prefix}/amax"]
            assert amax > 0
            assert figures[f"{prefix}/scale"] == pytest.approx(largest / amax, rel=1e-5)
            assert figures[f"{prefix}/saturated"] == 0.0
            assert 0.0 <= figures[f"{prefix}/underflow"] < 0.5


def test_a_recorded_step_launches_few_kernels_more_than_a_plain_one() -> None:
    """Those that add up the counts of rows, and two that count all weights."""
    engine, model = build(TorchaoRecipe(engine="torchao"))

    def kernels(recorded: bool) -> Counter[str]:
        def step() -> None:
            engine.record_health(recorded)
            train(engine, model, 1)
            engine.health()

        step()  # compiles
        return Counter(launched(step))

    with_figures, plain = kernels(True), kernels(False)
    more = with_figures.total() - plain.total()
    print(more, "kernels more:", dict(with_figures - plain), "fewer:", dict(plain - with_figures))
    assert 0 < more < 3 * LAYERS * LINEARS_PER_LAYER
