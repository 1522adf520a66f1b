"""Converting a model that lies on a GPU takes no room for its weights."""

from __future__ import annotations

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


def extra_memory(engine_name: str, fuse: Any) -> tuple[int, int, int]:
    """Bytes at the peak of converting beside the model, of its largest layer, and of a block."""
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": engine_name},
        }
    )
    available = availability(spec.recipe, "cuda")
    if not available.ok:
        pytest.skip("; ".join(available.reasons))
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()
    largest = max(
        layer.weight.numel() * layer.weight.element_size() for layer in layers if layer is not head
    )
    engine = create(spec.recipe, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = convert(model, engine, Conversion(fuse=fuse))
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert len(report.converted) >= 28 * 7
    block = sum(
        p.numel() * p.element_size() for p in model.get_submodule("model.layers.0").parameters()
    )
    return extra, largest, block


@pytest.mark.parametrize("engine_name", ["te", "torchao"])
def test_a_3b_model_is_converted_within_its_largest_layer(engine_name: str) -> None:
    extra, largest, _ = extra_memory(engine_name, "none")
    assert extra < 1.1 * largest, f"{extra / largest:.2f} of the largest layer"


def test_proving_fused_blocks_takes_the_room_of_a_few_blocks() -> None:
    """Each is compared with its plain form: the gradients of one block, twice; of one weight's a
    copy in fp32; the workspaces of cuBLAS and Transformer Engine."""
    extra, _, block = extra_memory("te", "auto")
    assert extra < 4 * block, f"{extra / block:.2f} blocks"
