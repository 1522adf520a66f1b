"""The rows of `train_peers`: the same training steps, by Octrain and by others.

Each function builds a model of a shape, and gives a function that enqueues one step and returns its
loss without waiting for the device. Everything else is the same: tokens, learning rate, clipping.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peers.work import LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Step, Work
from torch import Tensor

__all__ = ["ROWS", "import_libraries"]


def import_libraries(row: str, device: torch.device) -> None:
    """Imports what the row will import: Transformer Engine for rows on te alone, and so on."""
    modules = ["transformers.models.llama.modeling_llama"]
    if row == "accelerate":
        modules += ["accelerate", "transformer_engine.pytorch"]
    elif row in ("torchao", "torchao_blocks", "compiled", "compiled_blocks"):
        modules += ["torch._dynamo", "torch._inductor", *(["torchao.float8"] * ("ao" in row))]
    elif row not in ("bf16", "floor"):
        modules += ["peers.octrain_rows"]
        if "torchao" in row:
            modules += ["fp8core.engines.torchao_engine", "torch._inductor"]
        elif "bf16" not in row and device.type == "cuda":
            modules += ["fp8core.engines.transformer_engine", "transformer_engine.pytorch"]
    for module in modules:
        importlib.import_module(module)


def transformers_bf16(work: Work) -> Step:
    """transformers' model and loss as they are, SDPA, fused AdamW of PyTorch."""
    model = _transformers_model(work)
    return _step_by_hand(model, _fused_adamw(model), work)


def _step_by_hand(model: Any, optimizer: torch.optim.Optimizer, work: Work) -> Step:
    parameters = list(model.parameters())

    def step(number: int) -> Tensor:
        ids = _on_device(work.tokens[number - 1], work.device)
        with torch.autocast(work.device.type, torch.bfloat16, enabled=work.precision == "fp32"):
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def compiled(work: Work, *, fp8: bool, by_blocks: bool) -> Step:
    """transformers' model through torch.compile, its Linears torchao's where ``fp8``.

    ``by_blocks``: each block by itself, which takes a fraction of the time to compile.
    """
    model = _transformers_model(work)
    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name("tensorwise"),
            module_filter_fn=lambda module, name: "lm_head" not in name,
        )
    optimizer = _fused_adamw(model)
    if by_blocks:
        for block in model.model.layers:
            block.compile()
    else:
        model.compile()
    return _step_by_hand(model, optimizer, work)


def accelerate_te(work: Work) -> Step:
    """Accelerate's own way to Transformer Engine: ``mixed_precision="fp8"``."""
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs

    recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model = _transformers_model(work)
    model, optimizer = accelerator.prepare(model, _fused_adamw(model))

    def step(number: int) -> Tensor:
        ids = _on_device(work.tokens[number - 1], work.device)
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _transformers_model(work: Work) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    fields = {key: value for key, value in work.config().items() if key != "model_type"}
    torch.manual_seed(0)
    with work.device:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**fields), dtype=work.dtype, attn_implementation="sdpa"
        )
    return model.to(work.device).train()


def _fused_adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )


def _on_device(ids: Tensor, device: torch.device) -> Tensor:
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


def ours(**changes: Any) -> Callable[[Work], Step]:
    """A row of Octrain's. Rows of others have nothing of Octrain in their process."""

    def build(work: Work) -> Step:
        from peers.octrain_rows import octrain

        return octrain(work, **changes)

    return build


def ours_in_8_bits(recompute: int | bool, **precision: str) -> Callable[[Work], Step]:
    """States in 8 bits, blocks fused, the head in FP8; ``recompute``: how many blocks, or all."""

    def build(work: Work) -> Step:
        training: dict[str, Any] = {
            "precision": {"preset": "memory", **precision},
            "gradient_checkpointing": bool(recompute),
        }
        if recompute and recompute is not True:
            training["recomputed_blocks"] = min(recompute, work.dimensions.layers)
        return ours(fuse="auto", output_head=True, training=training)(work)

    return build


BF16 = {"engine": "amp", "dtype": "bf16"}
WGRAD_IN_BF16 = {"engine": "te", "override_linear_precision": [False, False, True]}

ROWS: dict[str, Callable[[Work], Step]] = {
    "fused": ours(fuse="auto"),
    "fused_head": ours(fuse="auto", output_head=True),
    "fused_fp8_attention": ours(fuse="auto", output_head=True, fp8_attention=True),
    "fused_packed": ours(fuse="auto", packed=True),
    "fused_current": ours(fuse="auto", recipe={"engine": "te", "scaling": "current"}),
    "fused_block": ours(fuse="auto", recipe={"engine": "te", "scaling": "block"}),
    "fused_override": ours(fuse="auto", recipe=WGRAD_IN_BF16),
    "memory": ours_in_8_bits(False),
    "memory_recompute": ours_in_8_bits(True),
    # With these numbers of blocks the 8B shape takes less than 70 GiB in bf16, and less than 85 in
    # fp32 and with masters.
    "memory_some": ours_in_8_bits(4),
    "memory_fp32": ours_in_8_bits(4, weights="fp32"),
    "memory_masters": ours_in_8_bits(18, master_weights="fp32"),
    "default": ours(small_gemm="auto"),
    "plain": ours(fuse="none"),
    "plain_packed": ours(fuse="none", packed=True),
    "plain_override": ours(fuse="none", recipe=WGRAD_IN_BF16),
    "octrain_bf16": ours(recipe=BF16),
    "octrain_bf16_packed": ours(recipe=BF16, packed=True),
    "octrain_bf16_plain": ours(recipe=BF16, fuse="none"),
    "octrain_torchao": ours(recipe={"engine": "torchao"}),
    "octrain_torchao_packed": ours(recipe={"engine": "torchao"}, packed=True),
    "bf16": transformers_bf16,
    "compiled": partial(compiled, fp8=False, by_blocks=False),
    "compiled_blocks": partial(compiled, fp8=False, by_blocks=True),
    "torchao": partial(compiled, fp8=True, by_blocks=False),
    "torchao_blocks": partial(compiled, fp8=True, by_blocks=True),
    "accelerate": accelerate_te,
}
"""By the names of `row_names`; the floor is no training."""
