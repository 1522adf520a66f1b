"""Norms are recognised by what they compute, not by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8core.conversion.norms import describe_norm, is_norm


def hf(module: str, name: str):
    return getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)


@pytest.mark.parametrize(
    ("module", "name", "kind", "zero_centered"),
    [
        ("llama.modeling_llama", "LlamaRMSNorm", "rms_norm", False),
        ("mistral.modeling_mistral", "MistralRMSNorm", "rms_norm", False),
        ("qwen3.modeling_qwen3", "Qwen3RMSNorm", "rms_norm", False),
        ("gemma.modeling_gemma", "GemmaRMSNorm", "rms_norm", True),
        ("gemma3.modeling_gemma3", "Gemma3RMSNorm", "rms_norm", True),
        ("t5.modeling_t5", "T5LayerNorm", "rms_norm", False),
        ("cohere.modeling_cohere", "CohereLayerNorm", "layer_norm", False),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_transformers_norms(module, name, kind, zero_centered, device):
    with torch.device(device):
        norm = hf(module, name)(48)
    assert is_norm(norm)
    described = describe_norm(norm)
    assert not isinstance(described, str), described
    assert (described.kind, described.zero_centered) == (kind, zero_centered)
    assert described.normalized_shape == (48,)
    assert described.weight is norm.weight


def test_torch_norms():
    layer_norm = nn.LayerNorm((4, 16), eps=1e-3)
    described = describe_norm(layer_norm)
    assert (described.kind, described.normalized_shape, described.eps) == (
        "layer_norm",
        (4, 16),
        1e-3,
    )
    assert described.bias is layer_norm.bias
    assert describe_norm(nn.RMSNorm(16, eps=1e-6)).kind == "rms_norm"
    assert describe_norm(nn.LayerNorm(16, bias=False)).bias is None
    plain = describe_norm(nn.LayerNorm(16, elementwise_affine=False))
    assert plain.weight is None


class _Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6


class EpsOutsideRMSNorm(_Base):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class HalfRMSNorm(_Base):
    def forward(self, x):
        return 0.5 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class SlightlyLargerRMSNorm(_Base):
    def forward(self, x):
        return 1.001 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class MisreadEpsRMSNorm(_Base):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class UnbiasedLayerNorm(_Base):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class BrokenRMSNorm(_Base):
    def forward(self, x):
        raise ValueError("needs a GPU")


class GatedRMSNorm(_Base):
    def forward(self, x, gate=None):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (EpsOutsideRMSNorm, "neither LayerNorm nor RMSNorm"),
        (HalfRMSNorm, "neither LayerNorm nor RMSNorm"),
        (SlightlyLargerRMSNorm, "neither LayerNorm nor RMSNorm"),
        (MisreadEpsRMSNorm, "neither LayerNorm nor RMSNorm"),
        (UnbiasedLayerNorm, "neither LayerNorm nor RMSNorm"),
        (BrokenRMSNorm, "ValueError: needs a GPU"),
        (GatedRMSNorm, "more than one tensor"),
    ],
)
def test_lookalikes_are_kept_with_a_reason(norm, reason):
    assert is_norm(norm())
    assert reason in describe_norm(norm())


def test_a_check_runs_no_hook_and_leaves_the_module_alone():
    norm = nn.LayerNorm(16)
    calls = []
    norm.register_forward_hook(lambda *a: calls.append(1))
    weight, before = norm.weight, norm.weight.detach().clone()
    describe_norm(norm)
    assert not calls
    assert norm.weight is weight
    assert torch.equal(norm.weight, before)


def test_modules_that_are_no_norms():
    assert not is_norm(nn.Linear(4, 4))
    assert not is_norm(nn.Embedding(4, 4))
    assert is_norm(nn.BatchNorm1d(4))
