"""What a forward pass keeps for the backward pass, by running it on tensors without storage.

The model's own code runs under autocast on PyTorch's fake tensors, and every storage that autograd
saves is counted once. Where a GPU does otherwise than what runs here, a stand-in saves what the GPU
would: converted layers what their engine saves, fused blocks what `fused_keeps` says, experts
the tokens sent to them, attention what its fused kernels save (operands, output, logarithms of the
sums, and a mask as a bias in the operands' dtype), LayerNorm its input in fp32, as CUDA's autocast
has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fp8core.conversion import Decision
from fp8core.conversion.find import is_conv1d
from fp8core.conversion.replace import put_in_place
from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch, round_up
from fp8core.fusion.documents import is_plainly_causal
from fp8core.models.fused_keeps import fused_forward
from fp8core.models.planned_fusion import NOTHING_FUSED, PlannedFusion
from fp8core.models.weight_copies import (
    copy_beside_cast,
    shared_weights,
    stores_base,
    weight_copies,
)
from fp8core.spec import JobSpec
from fp8core.spec.recipe import high_precision_gemms, token_multiple

__all__ = ["KeptBytes", "dry_run"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class KeptBytes:
    """Bytes kept at the end of a forward pass of one micro-batch, the loss apart.

    ``total``: activations, and the casts of weights that the backward pass reads. ``blocks``: those
    of each block of the stack, in order; ``block_inputs``: what all blocks are given. ``logits``:
    elements of the model's output.
    """

    total: int
    blocks: tuple[int, ...]
    block_inputs: int
    logits: int


def dry_run(
    model: Any,
    decisions: Sequence[Decision],
    blocks: Sequence[nn.Module],
    spec: JobSpec,
    adapted: AbstractSet[int] = frozenset(),
    fusion: PlannedFusion = NOTHING_FUSED,
) -> KeptBytes:
    """Runs ``model``, which lies on the meta device and is of no use afterwards.

    ``blocks``: the repeated layers; ``adapted``: ids of the linear modules that get an adapter, in
    a model that is frozen; ``fusion``: the blocks that would be fused. Raises whatever the model's
    code raises on tensors without values, as where shapes depend on them.
    """
    compute = _DTYPES[getattr(spec.recipe, "dtype", "bf16")]
    with_adapter = [module for module in model.modules() if id(module) in adapted]
    for block in fusion.blocks:
        block.layer.forward = fused_forward(block, spec, compute, plain=fusion.plain)
    shared = shared_weights(model)
    for decision in decisions:
        module = decision.layer.module
        if decision.reason is None and decision.layer.kind != "projection":  # runs as it is
            planned = _planned(decision, spec, compute, shared)
            put_in_place(model, module, planned)
            with_adapter = [planned if each is module else each for each in with_adapter]
    model.train()
    model.config.use_cache = False
    counter = _Counter()
    with FakeTensorMode():
        counter.leave_out(_make_fake(model))
        for module in with_adapter:
            module.register_forward_hook(_AdapterPath(compute))
        inputs = _inputs(model, spec, compute, fusion)
        with _autocast(compute), _LikeAGpu(), counter.watching(blocks):
            logits = model(**inputs).logits
        return KeptBytes(
            total=counter.total,
            blocks=tuple(counter.by_block),
            block_inputs=counter.block_inputs,
            logits=logits.numel(),
        )


def _planned(
    decision: Decision, spec: JobSpec, compute: torch.dtype, shared: AbstractSet[int]
) -> nn.Module:
    module = decision.layer.module
    if decision.norm is not None:
        return _PlannedNorm(module, compute)
    stored = stores_base(spec) and id(module._parameters.get("weight")) not in shared
    return _PlannedLinear(module, spec, compute, weight_copies(spec, stored=stored))


def _make_fake(model: nn.Module) -> list[Tensor]:
    """Gives every parameter and buffer of the meta model a fake stand-in; returns them."""
    made: dict[int, nn.Parameter] = {}
    buffers = []
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
                module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)
                buffers.append(module._buffers[key])
    return [*made.values(), *(buffer for buffer in buffers if buffer is not None)]


def _inputs(
    model: Any, spec: JobSpec, compute: torch.dtype, fusion: PlannedFusion
) -> dict[str, Any]:
    """What the model is called with: without masks of [T, T] where a GPU goes by documents."""
    batch = _batch(spec)
    fused = fusion.whole and fusion.causal == batch.causal
    if fused or (batch.causal and _goes_by_documents(model, spec, compute)):
        model.config._attn_implementation = _without_masks()
        return {"input_ids": batch.input_ids}
    return model_inputs(batch, model.config, compute)


def _without_masks() -> str:
    """The name of transformers' own attention for a model that makes no mask."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    name = "octrain_planned"
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, lambda *args, **options: None)
    return name


def _goes_by_documents(model: Any, spec: JobSpec, compute: torch.dtype) -> bool:
    """Not in fp32, which the kernels do not take; nor are masks left out of compiled blocks."""
    if compute == torch.float32 or spec.recipe.engine == "torchao" or not spec.data.packing:
        return False
    return model.config._attn_implementation == "sdpa" and is_plainly_causal(model)


def _batch(spec: JobSpec) -> Batch:
    length = round_up(spec.training.sequence_length, token_multiple(spec.recipe))
    shape = (spec.training.batch_size, length)
    zeros = torch.zeros(shape, dtype=torch.int64)
    packed = spec.data.packing
    return Batch(
        input_ids=zeros,
        labels=zeros,
        attention_mask=None if packed else torch.ones(shape, dtype=torch.bool),
        position_ids=zeros,
        document_ids=zeros.int(),
        token_count=zeros.numel(),
        target_count=zeros.numel(),
        causal=spec.task == "causal_lm",
    )


def _autocast(compute: torch.dtype) -> AbstractContextManager[Any]:
    if compute == torch.float32:
        return nullcontext()
    return torch.autocast("cpu", dtype=compute)


class _Counter:
    """Counts the storages that autograd saves, each once."""

    def __init__(self) -> None:
        self.total = 0
        self.by_block: list[int] = []
        self.block_inputs = 0
        # By the address of the storage. The tensors are held, so that it is not given out again.
        self._known: dict[int, Tensor] = {}
        self._block: int | None = None

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """What is there all the time: parameters and buffers."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = tensor

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        self.by_block = [0] * len(blocks)
        handles: list[Any] = []
        for number, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._entering(number)))
            handles.append(block.register_forward_hook(self._leaving))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return tensor
        self._known[storage._cdata] = tensor
        self.total += storage.nbytes()
        if self._block is not None:
            self.by_block[self._block] += storage.nbytes()
        return tensor

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._block = number
            self.block_inputs += sum(value.nbytes for value in args if isinstance(value, Tensor))

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._block = None


class _LikeAGpu(TorchFunctionMode):
    """What differs between CUDA's autocast and kernels and those that run here."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is torch._grouped_mm:  # of torch.nn.functional.grouped_mm
            return _GroupedMatmul.apply(*args[:2])
        if func is torch.nn.functional.layer_norm and torch.is_autocast_enabled("cpu"):
            return func(args[0].float(), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    operands = [tensor.to(dtype) for tensor in (query, key, value)]
    bias = None
    if attn_mask is not None:
        # Each call makes its own bias of a bool mask, and keeps it.
        bias = (
            attn_mask if attn_mask.is_floating_point() else torch.empty_like(attn_mask, dtype=dtype)
        )
    output: Tensor = _Attention.apply(*operands, bias)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        shape = (*query.shape[:-1], value.shape[-1])
        # As the fused kernels lay it out: [batch, tokens, heads, size].
        batch, heads, tokens, size = shape
        output = query.new_empty(batch, tokens, heads, size).transpose(1, 2)
        sums = query.new_empty(shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums, bias)
        return output


class _GroupedMatmul(torch.autograd.Function):
    """Rows of tokens by the experts they are sent to. Fake tensors have it for bf16 alone."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty(*tokens.shape[:-1], weights.shape[-1])


class _PlannedLinear(nn.Module):
    """Saves what the recipe's engine saves of one Linear, ``copies`` of its weight included."""

    def __init__(self, linear: nn.Module, spec: JobSpec, compute: torch.dtype, copies: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)  # type: ignore[arg-type]
        self._compute = compute
        # A Conv1D's weight lies the other way round.
        self.features_at = 1 if is_conv1d(linear) else 0
        engine = spec.recipe.engine
        _, dgrad_high, wgrad_high = high_precision_gemms(spec.recipe)
        backward = getattr(spec.recipe, "backward_override", None)
        # Bytes an element. torchao casts anew in backward and keeps what came. What is dequantized
        # is what the casts of the forward pass left.
        whole_input = wgrad_high and backward != "dequantized"
        self.input_bytes = 2 if whole_input or engine == "torchao" else 1
        self.weight_bytes = 0 if dgrad_high and backward is None else copies
        self.weight_bytes += copy_beside_cast(spec, transposed=is_conv1d(linear))

    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input.to(self._compute), self.weight, self)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, plan: _PlannedLinear) -> Tensor:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        kept: list[Tensor] = []
        if needs_weight and plan.input_bytes == 1:
            kept.append(torch.empty_like(input, dtype=torch.uint8))
        elif needs_weight:
            kept.append(input)
        if needs_input and plan.weight_bytes:
            kept.append(input.new_empty(*weight.shape, plan.weight_bytes, dtype=torch.uint8))
        ctx.save_for_backward(*kept)
        return input.new_empty(*input.shape[:-1], weight.shape[plan.features_at])


class _PlannedNorm(nn.Module):
    """Saves its input in the compute dtype, and gives its output in that dtype."""

    def __init__(self, norm: nn.Module, compute: torch.dtype) -> None:
        super().__init__()
        self.weight = norm.weight
        self._compute = compute

    def forward(self, input: Tensor) -> Tensor:
        return _Norm.apply(input.to(self._compute), self.weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return torch.empty_like(input)


class _AdapterPath:
    """What an adapter keeps beside its layer: the layer's input in the compute dtype."""

    def __init__(self, compute: torch.dtype) -> None:
        self._compute = compute
        self._weight = nn.Parameter(torch.empty(1))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return _Adapted.apply(output, args[0].to(self._compute), self._weight)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return torch.empty_like(output)
