"""What is kept of gradients tells two apart as the gradients themselves would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fp8core.fusion.gradient_sketches import sketch, sketched_gradients
from tests.peak_memory import printed_bytes

SHAPE = (1024, 512)


def apart(own: Tensor, other: Tensor) -> float:
    return float((own - other).norm() / own.norm())


def rows_exchanged(gradient: Tensor) -> Tensor:
    order = torch.arange(len(gradient))
    order[0:4], order[700:704] = order[700:704].clone(), order[0:4].clone()
    return gradient[order]


def some_rows_missing(gradient: Tensor) -> Tensor:
    other = gradient.clone()
    other[gradient.norm(dim=1).topk(4).indices] = 0
    return other


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda g: (
        g + 0.05 * g.std() * torch.randn(g.shape, generator=torch.Generator().manual_seed(9))
    ),
    "halves": lambda g: torch.cat([g[512:], g[:512]]),
    "rows": rows_exchanged,
    "missing": some_rows_missing,
    "columns": lambda g: g.flip(1),
    "size": lambda g: 1.01 * g,
    "sign": lambda g: -g,
}


@pytest.mark.parametrize("rank", [1, 512])
@pytest.mark.parametrize("change", CHANGES)
def test_two_are_as_far_apart_as_their_gradients(change: str, rank: int) -> None:
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(SHAPE[0], rank, generator=generator)
    gradient = left @ torch.randn(rank, SHAPE[1], generator=generator)
    other = CHANGES[change](gradient)
    wanted = apart(gradient, other)
    assert wanted > 0.005
    # Of one row: the deviation of a mean of 64 squares, three times over.
    assert apart(sketch(gradient), sketch(other)) == pytest.approx(wanted, rel=0.27)
    assert sketch(gradient).shape == (64, SHAPE[1])


def test_what_is_equal_stays_equal_and_what_is_small_stays_whole() -> None:
    gradient = torch.randn(SHAPE)
    assert torch.equal(sketch(gradient), sketch(gradient.clone()))
    small = torch.randn(96, 33)
    assert torch.equal(sketch(small), small)
    assert sketch(torch.randn(2000, 1000, dtype=torch.float64)).dtype == torch.float64
    assert sketch(torch.randn(2000, 1000).bfloat16()).dtype == torch.float32
    assert not torch.isfinite(sketch(torch.full(SHAPE, float("nan")))).any()


def test_gradients_are_taken_out_of_the_backward_pass() -> None:
    layer, unused = nn.Linear(600, 700), nn.Parameter(torch.ones(3))
    x = torch.randn(5, 600, requires_grad=True)
    named = {"weight": layer.weight, "bias": layer.bias, "unused": unused, "x": x}
    expected = torch.autograd.grad(layer(x).square().sum(), [layer.weight, layer.bias, x])
    with sketched_gradients(named) as kept:
        given = torch.autograd.grad(
            layer(x).square().sum(), list(named.values()), allow_unused=True
        )
    assert set(kept) == {"weight", "bias", "x"}
    for name, gradient in zip(("weight", "bias", "x"), expected, strict=True):
        assert torch.equal(kept[name], sketch(gradient))
    weight = given[0]
    assert weight is not None
    assert weight.shape == layer.weight.shape
    assert weight.untyped_storage().nbytes() == 4
    assert given[2] is None
    assert layer.weight.grad is None
    layer(x).sum().backward()  # no hook is left
    assert layer.weight.grad is not None
    assert float(layer.weight.grad.abs().sum()) > 0


def test_fusing_takes_no_more_room_than_its_largest_layer() -> None:
    """Peak resident memory while a block is laid together and proved, in a process of its own.

    The largest layer that is put in place is an MLP of 288 MiB, two thirds of which lie together.
    """
    script = """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from fp8core.fusion import fuse
        from fp8core.fusion.plain import PlainParts
        from tests.peak_memory import watched_peak
        torch.set_num_threads(1)
        narrow = {"num_attention_heads": 4, "head_dim": 64, "vocab_size": 64,
                  "num_hidden_layers": 1}
        wide = {"hidden_size": 4096, "intermediate_size": 6144, **narrow}
        small = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, **narrow))
        fuse(small, PlainParts(), {})  # whatever is loaded at the first use
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**wide))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters(): p.uniform_(-0.02, 0.02)
            model.model.rotary_emb.inv_freq.copy_(small.model.rotary_emb.inv_freq)
            model.model.rotary_emb.original_inv_freq.copy_(small.model.rotary_emb.inv_freq)
        with watched_peak() as grown:
            fusion = fuse(model, PlainParts(), {})
        assert all(len(row.fused) == 2 for row in fusion.rows), fusion.rows
        print(grown[0])
    """
    grown = printed_bytes(script)
    largest = 3 * 4096 * 6144 * 4
    assert 0 < grown < 1.1 * largest, f"{grown / largest:.2f} of it"
