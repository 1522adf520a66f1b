"""Matrices that are in bf16 while gradients are compared, and what they are afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from fp8core.fusion import check, fuse
from fp8core.fusion.joined import join, lay_together, lie_together
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.sequences import Sequences
from fp8core.fusion.stand_ins import in_dtype, read_by_gemms
from tests.fp8core.fusion.families import make
from tests.peak_memory import printed_bytes


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    gate, up = (nn.Parameter(torch.randn(6, 4)) for _ in range(2))
    lay_together([gate, up])
    return {
        "gate": gate,
        "up": up,
        "transposed": nn.Parameter(torch.randn(4, 6).t()),
        "bias": nn.Parameter(torch.randn(6)),
        "half": nn.Parameter(torch.randn(4, 4).bfloat16()),
    }


def test_matrices_alone_are_cast_and_hold_what_they_held_afterwards() -> None:
    named = parameters()
    values = {name: p.detach().clone() for name, p in named.items()}
    places = {name: p.data_ptr() for name, p in named.items()}
    with in_dtype(named.values(), torch.bfloat16):
        for name, p in named.items():
            cast = torch.float32 if name == "bias" else torch.bfloat16
            assert p.dtype == cast, name
            assert torch.equal(p, values[name].to(cast))
        assert lie_together([named["gate"], named["up"]])
        joined = join([named["gate"], named["up"]])
        assert joined.data_ptr() == named["gate"].data_ptr()
        assert torch.equal(joined, torch.cat([values["gate"], values["up"]]).bfloat16())
        assert named["transposed"].stride() == values["transposed"].stride()
    for name, p in named.items():
        assert p.data_ptr() == places[name], name
        assert p.dtype == values[name].dtype
        assert torch.equal(p, values[name])
    assert lie_together([named["gate"], named["up"]])


def test_gradients_come_in_the_dtype_and_afterwards_in_that_of_the_weights() -> None:
    weight, x = nn.Parameter(torch.randn(6, 4)), torch.randn(3, 4)

    def gradient() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(nn.functional.linear(x, weight).sum(), weight)[0]

    before = gradient()
    with in_dtype([weight], torch.bfloat16):
        within = gradient()
    after = gradient()
    assert (before.dtype, within.dtype, after.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    assert torch.equal(before, after)
    assert torch.equal(before, within.float())


def test_an_error_within_leaves_them_as_they_were() -> None:
    named = parameters()
    values = {name: p.detach().clone() for name, p in named.items()}
    with pytest.raises(RuntimeError, match=r"^planted$"), in_dtype(named.values(), torch.bfloat16):
        raise RuntimeError("planted")
    assert all(torch.equal(p, values[name]) for name, p in named.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_computed_in_fp32_or_more_is_computed_with_what_is_there(
    dtype: torch.dtype,
) -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    place = weight.data_ptr()
    with in_dtype([weight], dtype):
        assert weight.data_ptr() == place
        assert weight.dtype == torch.float32


def test_only_what_linears_alone_hold_is_read_by_gemms_alone() -> None:
    class ReadOtherwise(nn.Linear):
        pass

    layer = nn.Module()
    layer.plain, layer.turned, layer.tied = nn.Linear(4, 6), Conv1D(6, 4), nn.Linear(4, 6)
    layer.other, layer.table = ReadOtherwise(4, 6), nn.Embedding(6, 4)
    layer.normed = parametrizations.weight_norm(nn.Linear(4, 6))
    layer.own = nn.Parameter(torch.randn(6, 4))
    layer.table.weight = layer.tied.weight
    found = list(read_by_gemms(layer, layer.parameters()))
    assert [id(p) for p in found] == [id(layer.plain.weight), id(layer.turned.weight)]
    assert list(read_by_gemms(layer, [layer.own, layer.plain.bias])) == []


class Blended(nn.Module):
    """Attention of a model's own with a matrix that no GEMM reads, in fp32 as its state is."""

    def __init__(self, attention: Any, width: int) -> None:
        super().__init__()
        self.o_proj = attention.o_proj
        self.mix = nn.Parameter(torch.rand(1, width))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        states = hidden_states.float()
        return self.o_proj(torch.lerp(states, states.cumsum(1) / 10, self.mix)), None


class Autocast(PlainParts):
    def high_precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)


def test_attention_of_a_models_own_is_proved_with_its_matrices_as_they_are() -> None:
    model = make("Llama")
    for layer in model.model.layers:
        layer.self_attn = Blended(layer.self_attn, model.config.hidden_size)
    block = fuse(model, PlainParts(), {}).blocks[0]
    assert block.attention is None
    block.remove()
    found = check.difference(block, Autocast(), None, Sequences(2, 128), torch.bfloat16)
    assert "the gradient of self_attn.mix" in found
    assert 0 < max(found.values()) < check.BOUND, found


def test_proving_fp32_weights_in_bf16_takes_no_more_room_than_the_largest_layer() -> None:
    """Casts and gradients of an MLP of 288 MiB, in a process of its own."""
    script = """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from fp8core.fusion import check, fuse
        from fp8core.fusion.plain import PlainParts
        from fp8core.fusion.sequences import Sequences
        from tests.peak_memory import watched_peak
        torch.set_num_threads(1)

        class Autocast(PlainParts):
            def high_precision(self):
                return torch.autocast("cpu", torch.bfloat16)

        narrow = {"num_attention_heads": 4, "head_dim": 64, "vocab_size": 64,
                  "num_hidden_layers": 1}
        wide = {"hidden_size": 4096, "intermediate_size": 6144, **narrow}

        def proved(model):
            block = fuse(model, PlainParts(), {}).blocks[0]
            block.remove()
            angles = block.attention._angles
            with watched_peak() as grown:
                found = check.difference(
                    block, Autocast(), angles, Sequences(2, 128), torch.bfloat16
                )
            return found, grown[0]

        small = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, **narrow))
        proved(small)  # whatever is loaded at the first use
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**wide))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.uniform_(-0.02, 0.02) if p.dim() > 1 else p.fill_(1.0)
            model.model.rotary_emb.inv_freq.copy_(small.model.rotary_emb.inv_freq)
            model.model.rotary_emb.original_inv_freq.copy_(small.model.rotary_emb.inv_freq)
        found, grown = proved(model)
        assert len(found) == 11 and 0 < max(found.values()) < 0.05, found
        print(grown)
    """
    grown = printed_bytes(script)
    largest = 3 * 4096 * 6144 * 4
    assert 0 < grown < 1.1 * largest, f"{grown / largest:.2f} of it"
