"""GPT-2's Conv1D and torch's multi-head attention on a GPU: in FP8, near fp32, restored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core import engines
from fp8core.conversion import convert, restore
from fp8core.engines.gemm_watch import GemmWatch
from fp8core.spec import Conversion, parse_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
ALL_FP8 = {"fprop", "dgrad", "wgrad"}
RECIPES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "te delayed": ({"engine": "te", "scaling": "delayed", "amax_history_len": 4}, ALL_FP8),
    "te current": ({"engine": "te", "scaling": "current"}, ALL_FP8),
    "te block": ({"engine": "te", "scaling": "block"}, ALL_FP8),
    "te override": (
        {"engine": "te", "scaling": "delayed", "override_linear_precision": [False, True, False]},
        {"fprop", "wgrad"},
    ),
    "torchao tensorwise": ({"engine": "torchao", "scaling": "tensorwise"}, ALL_FP8),
    "torchao rowwise": ({"engine": "torchao", "scaling": "rowwise"}, ALL_FP8),
}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


def engine_for(fields: dict[str, Any]) -> Any:
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "gpt2"}},
            "data": {"source": "builtin"},
            "recipe": fields,
        }
    )
    found = engines.availability(spec.recipe, DEVICE)
    if not found.ok:
        pytest.skip("; ".join(found.reasons))
    return engines.create(spec.recipe, DEVICE)


class Gpt2(nn.Module):
    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=512, n_positions=128, n_embd=256, n_layer=2, n_head=4, resid_pdrop=0.0,
            attn_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.lm = GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm(inputs_embeds=x, use_cache=False).logits
        return logits


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(256, 512)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(x))
        return y


@pytest.fixture(params=[Gpt2, Encoder])
def model(request):
    torch.manual_seed(0)
    return request.param().to(DEVICE)


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), labels.flatten())


def test_gradients_are_near_those_of_fp32_and_gemms_run_in_fp8(model, recipe):
    fields, in_fp8 = recipe
    reference = copy.deepcopy(model)
    keys = [(key, value.shape) for key, value in model.state_dict().items()]
    engine = engine_for(fields)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = convert(model, engine, Conversion(fuse="none"))
    largest = max(p.nbytes for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.1 * largest
    assert [(key, value.shape) for key, value in model.state_dict().items()] == keys
    names = [row.name for row in report.converted if "Norm" not in row.from_]
    assert len(names) >= 8

    x = torch.randn(3, 32, 256, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, 512, (3, 32), device=DEVICE)
    layers = {name: model.get_submodule(name) for name in names}
    with GemmWatch(layers, x.shape[:2]) as watch:
        with engine.training_context():
            loss = loss_of(model, x, labels)
        loss.backward()
        engine.after_backward()
    for name in names:
        seen = watch.seen[name]
        fp8 = {
            gemm
            for gemm, pairs in seen.items()
            if all(formats.startswith("fp8") for pair in pairs for formats in pair)
        }
        assert set(seen) == ALL_FP8, name
        assert fp8 == in_fp8, name

    expected = loss_of(reference, x, labels)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 0.02 * expected.item()
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        if theirs.grad is None or theirs.grad.norm() < 1e-5:  # keys' biases cancel in softmax
            continue
        assert ours.grad is not None, name
        assert ours.grad.shape == theirs.grad.shape
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.4, name

    model.zero_grad()
    restore(model, report)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))


def test_training_with_accumulation_keeps_near_fp32(model, recipe):
    fields, _ = recipe
    reference = copy.deepcopy(model)
    engine = engine_for(fields)
    report = convert(model, engine, Conversion(fuse="none"))
    engine.prepare(model)
    x = torch.randn(4, 32, 256, device=DEVICE)
    labels = torch.randint(0, 512, (4, 32), device=DEVICE)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    losses: list[tuple[float, float]] = []
    health: dict[str, float] = {}
    for step in range(12):
        if step == 4:
            engine.record_health(True)
        ours = theirs = 0.0
        for number in range(2):
            part = x[2 * number :][:2], labels[2 * number :][:2]
            with engine.training_context(number == 0):
                loss = loss_of(model, *part) / 2
            loss.backward()
            engine.after_backward()
            expected = loss_of(reference, *part) / 2
            expected.backward()
            ours, theirs = ours + loss.item(), theirs + expected.item()
        if step == 4:
            health = engine.health()
            engine.record_health(False)
        losses.append((ours, theirs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1][0] < 0.8 * losses[0][0]
    assert all(abs(ours - theirs) < 0.06 * theirs for ours, theirs in losses), losses
    unused = {"lm.transformer.wte.weight"} if hasattr(model, "lm") else set()
    frozen = {n for n, p in model.named_parameters() if torch.equal(p, start[n])}
    assert frozen <= unused
    for row in report.converted:
        if "Norm" not in row.from_:
            assert health[f"fp8/{row.name}/weight/amax"] > 0
