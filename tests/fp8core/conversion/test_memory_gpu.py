"""Converting a model that lies on a GPU takes no room for its weights."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fp8core.conversion import convert
from fp8core.engines import availability, create
from fp8core.spec import Conversion, parse_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The shape of Llama-3.2-3B: 6.0 GiB in bf16.
SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
SMALL = {
    **SHAPE,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def extra_memory(engine_name: str, fuse: Any, precision: str = "bf16") -> tuple[int, int, int]:
    """Bytes at the peak of converting beside the model, of its largest layer, and of a block's MLP.

    Workspaces of cuBLAS and Transformer Engine stay for the training, and are there before.
    """
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": engine_name},
            "training": {"precision": {"weights": precision}},
        }
    )
    available = availability(spec.recipe, "cuda")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), dtype=dtype)
        if fuse != "none":
            small = LlamaForCausalLM._from_config(LlamaConfig(**SMALL), dtype=dtype)
            convert(small, create(spec.recipe, "cuda"), Conversion(fuse=fuse, small_gemm="off"))
            del small
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()
    largest = max(
        layer.weight.numel() * layer.weight.element_size() for layer in layers if layer is not head
    )
    engine = create(spec.recipe, "cuda")
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = convert(model, engine, Conversion(fuse=fuse))
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert len(report.converted) >= 28 * 7
    mlp = model.get_submodule("model.layers.0.mlp")
    return extra, largest, sum(p.numel() * p.element_size() for p in mlp.parameters())


@pytest.mark.parametrize("engine_name", ["te", "torchao"])
def test_a_3b_model_is_converted_within_its_largest_layer(engine_name: str) -> None:
    extra, largest, _ = extra_memory(engine_name, "none")
    assert extra < 1.1 * largest, f"{extra / largest:.2f} of the largest layer"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_fusing_a_3b_model_takes_no_more_than_the_largest_layer_put_in_place(
    precision: str,
) -> None:
    """That is a block's MLP in one module; two thirds of its weights are laid together."""
    extra, _, mlp = extra_memory("te", "auto", precision)
    print(f"{precision}: {extra / 2**20:.0f} MiB, {extra / mlp:.2f} of the largest layer")
    assert extra < 1.1 * mlp, f"{extra / mlp:.2f} of the largest layer"
