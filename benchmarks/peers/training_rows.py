"""The rows of `train_peers`: the same training steps, by Octrain and by others.

Each function builds a model of a shape, and gives a function that enqueues one step and returns its
loss without waiting for the device. Everything else is the same: tokens, learning rate, clipping.
"""

from __future__ import annotations

import importlib
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("cuda")
LEARNING_RATE, MAX_NORM, WEIGHT_DECAY = 3e-4, 1.0, 0.1
VOCABULARY = 128256

SHAPES: dict[str, dict[str, Any]] = {
    "60m": {"hidden": 512, "mlp": 1536, "layers": 8, "heads": 8, "kv_heads": 8, "tied": True},
    "125m": {"hidden": 768, "mlp": 2048, "layers": 12, "heads": 12, "kv_heads": 12, "tied": True},
    "350m": {"hidden": 1024, "mlp": 2816, "layers": 24, "heads": 16, "kv_heads": 16, "tied": True},
    "1b": {"hidden": 2048, "mlp": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "tied": True},
    "3b": {"hidden": 3072, "mlp": 8192, "layers": 28, "heads": 24, "kv_heads": 8, "tied": True},
    "8b": {"hidden": 4096, "mlp": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "tied": False},
}

Step = Callable[[int], Tensor]
"""Step number (from 1) to its loss, fp32, 0-dim, on the device."""


@dataclass(frozen=True)
class Work:
    """What every row computes: ``tokens`` [steps, rows, length] int64 of real text, on the host."""

    shape: str
    rows: int
    length: int
    tokens: Tensor
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def config(self) -> dict[str, Any]:
        """A Llama configuration of transformers."""
        shape = SHAPES[self.shape]
        return {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": shape["hidden"],
            "intermediate_size": shape["mlp"],
            "num_hidden_layers": shape["layers"],
            "num_attention_heads": shape["heads"],
            "num_key_value_heads": shape["kv_heads"],
            "tie_word_embeddings": shape["tied"],
            "max_position_embeddings": max(8192, self.length),
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "rms_norm_eps": 1e-5,
        }


def real_text(steps: int, rows: int, length: int) -> Tensor:
    """Bytes of the sources of Python's standard library as tokens [steps, rows, length]."""
    wanted = steps * rows * length
    text = bytearray()
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= wanted:
            break
    while len(text) < wanted:
        text += text[: wanted - len(text)]
    values = torch.frombuffer(text[:wanted], dtype=torch.uint8).long()
    return values.view(steps, rows, length)


def import_libraries(row: str) -> None:
    """Imports what the row will import: Transformer Engine for rows on te alone, and so on."""
    modules = ["transformers.models.llama.modeling_llama"]
    if row == "accelerate":
        modules += ["accelerate", "transformer_engine.pytorch"]
    elif row in ("torchao", "torchao_blocks", "compiled", "compiled_blocks"):
        modules += ["torch._dynamo", "torch._inductor", *(["torchao.float8"] * ("ao" in row))]
    elif row not in ("bf16", "floor"):
        modules += ["fp8core.engines", "fp8core.models", "fp8core.training.assemble"]
        if "torchao" in row:
            modules += ["fp8core.engines.torchao_engine", "torch._inductor"]
        elif "bf16" not in row:
            modules += ["fp8core.engines.transformer_engine", "transformer_engine.pytorch"]
    for module in modules:
        importlib.import_module(module)


def spec_of(work: Work, **changes: Any) -> dict[str, Any]:
    """The spec of a job that does ``work``; ``changes`` are to it, by its parts."""
    fp8_attention = changes.pop("fp8_attention", False)
    training = changes.pop("training", {})
    te = {
        "engine": "te",
        "fp8_format": "HYBRID",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "fp8_dpa": fp8_attention,
    }
    return {
        "model": {"source": "config", "config": work.config()},
        "data": {"source": "builtin"},
        "recipe": changes.pop("recipe", te),
        # What FP8 does to small models is measured here, and not kept from them.
        "conversion": {"small_gemm": "off", **changes},
        "training": {
            "steps": work.tokens.shape[0],
            "batch_size": work.rows,
            "sequence_length": work.length,
            "optimizer": {
                "name": "adamw",
                "lr": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
            },
            "schedule": {"name": "constant", "warmup_steps": 0},
            "max_grad_norm": MAX_NORM,
            "precision": "throughput" if work.precision == "bf16" else "method",
            **training,
        },
        "resources": {"device": DEVICE.type},
    }


def assembled(work: Work, **changes: Any) -> Any:
    """The product's own `Learner` for ``work``; ``changes`` are to its spec."""
    return _built(work, **changes)[1].learner


def _built(work: Work, **changes: Any) -> tuple[Any, Any]:
    """The spec, and what `assemble` makes of it."""
    from fp8core import engines
    from fp8core.models import load
    from fp8core.spec import parse_spec
    from fp8core.training.assemble import assemble
    from fp8core.training.precision import dtype_of

    spec = parse_spec(spec_of(work, **changes))
    engine = engines.create(spec.recipe, DEVICE)
    loaded = load(spec, device=DEVICE, dtype=dtype_of(spec.training.precision.weights))
    made = assemble(spec, engine, loaded)
    _say_what_is_fused(made.conversion)
    made.learner.model.train()
    return spec, made


def batch_of(ids: Tensor, cuts: Sequence[int] = ()) -> Any:
    """A `Batch` of ``ids`` [rows, length]; ``cuts``: where each row's further documents begin."""
    from fp8core.data.batch import IGNORED, Batch
    from fp8core.fusion.sequences import document_bounds

    labels = ids.clone()
    documents = torch.zeros(ids.shape, dtype=torch.int32)
    for number, cut in enumerate(cuts, start=1):
        documents[:, cut:] = number
    bounds = document_bounds(documents)
    starts = bounds[:-1].long()
    labels.view(-1)[starts] = IGNORED
    owner = torch.bucketize(torch.arange(ids.numel()), bounds.long(), right=True) - 1
    positions = (torch.arange(ids.numel()) - starts[owner]).view(ids.shape)
    count = int((labels != IGNORED).sum())
    return Batch(ids, labels, None, positions, documents, ids.numel(), count, True, bounds)


class _Told:
    """Prints the events of a run."""

    def event(self, kind: str, message: str, data: Any = None) -> None:
        print(message)


def octrain(work: Work, **changes: Any) -> Step:
    """The product's own loop body: `assemble`, `Learner`, figures a step late, CUDA graphs."""
    from fp8core.training.late_metrics import LateMetrics
    from fp8core.training.step_graphs import StepGraphs, graph_refusal

    # Sixteen documents of unequal length in each row.
    squares = torch.linspace(0.0, 1.0, 17)[1:-1].square() * work.length
    cuts = squares.int().tolist() if changes.pop("packed", False) else []
    spec, made = _built(work, **changes)
    learner, late, told = made.learner, LateMetrics(late=True), _Told()
    refusal = graph_refusal(spec, learner, made.conversion)
    graphs = StepGraphs(refusal, learner, told, lambda: late.waited_for_host)

    def step(number: int) -> Tensor:
        batches = [batch_of(work.tokens[number - 1], cuts)]
        totals = learner.totals(number, batches)
        loss = graphs.gradients(
            number, batches, totals, with_health=False, before=lambda micro_batch: None
        )
        norm = learner.gradient_norm()
        figures = {"train/loss": loss, "train/grad_norm": norm}
        late.push(number, figures, {"train/lr": learner.learning_rate(number)})
        bad = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
        learner.update(number, norm, unless=bad)
        return loss.clone()  # a graph writes the next one over it

    return step


def _say_what_is_fused(conversion: Any) -> None:
    for row in conversion.others:
        print(f"{row.name}: {row.to or row.from_}{f' ({row.reason})' if row.reason else ''}")
    if conversion.fusion is None:
        print("fusion: not asked for")
        return
    rows = conversion.fusion.rows
    fused = sum(row.reason is None for row in rows)
    print(f"fusion: {fused} of {len(rows)} wholly")
    reasons = {f"{row.kind}: {row.reason}" for row in rows if row.reason is not None}
    attention = Counter(conversion.fusion.fp8_attention.values())
    for reason, count in attention.items():
        print(f"attention of {count} blocks: {reason or 'in FP8'}")
    for reason in sorted(reasons)[:8]:
        print(f"  not: {reason}")


def transformers_bf16(work: Work) -> Step:
    """transformers' model and loss as they are, SDPA, fused AdamW of PyTorch."""
    model = _transformers_model(work)
    return _step_by_hand(model, _fused_adamw(model), work)


def _step_by_hand(model: Any, optimizer: torch.optim.Optimizer, work: Work) -> Step:
    parameters = list(model.parameters())

    def step(number: int) -> Tensor:
        ids = _on_device(work.tokens[number - 1])
        with torch.autocast("cuda", torch.bfloat16, enabled=work.precision == "fp32"):
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
        ids = _on_device(work.tokens[number - 1])
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
    with DEVICE:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**fields), dtype=work.dtype, attn_implementation="sdpa"
        )
    return model.to(DEVICE).train()


def _fused_adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )


def _on_device(ids: Tensor) -> Tensor:
    return ids.pin_memory().to(DEVICE, non_blocking=True)


def memory(work: Work, recompute: int | bool, **precision: str) -> Step:
    """States in 8 bits, blocks fused, the head in FP8; ``recompute``: how many blocks, or all."""
    training: dict[str, Any] = {
        "precision": {"preset": "memory", **precision},
        "gradient_checkpointing": bool(recompute),
    }
    if recompute and recompute is not True:
        training["recomputed_blocks"] = recompute
    return octrain(work, fuse="auto", output_head=True, training=training)


ROWS: dict[str, tuple[str, Callable[[Work], Step]]] = {
    "fused": ("Octrain te, fused", lambda work: octrain(work, fuse="auto")),
    "fused_head": (
        "Octrain te, fused, head in FP8",
        lambda work: octrain(work, fuse="auto", output_head=True),
    ),
    "fused_fp8_attention": (
        "Octrain te, fused, head and attention in FP8",
        lambda work: octrain(work, fuse="auto", output_head=True, fp8_attention=True),
    ),
    "fused_packed": (
        "Octrain te, fused, 16 documents a row",
        lambda work: octrain(work, fuse="auto", packed=True),
    ),
    "fused_current": (
        "Octrain te, fused, current scaling",
        lambda work: octrain(work, fuse="auto", recipe={"engine": "te", "scaling": "current"}),
    ),
    "memory": (
        "Octrain te, fused, head in FP8, 8-bit states",
        lambda work: memory(work, False),
    ),
    "memory_recompute": (
        "Octrain te, 8-bit states, all blocks recomputed",
        lambda work: memory(work, True),
    ),
    # With these numbers of blocks the 8B shape takes less than 70 GiB in bf16, and less than 85 in
    # fp32 and with masters.
    "memory_some": (
        "Octrain te, 8-bit states, 4 blocks recomputed",
        lambda work: memory(work, 4),
    ),
    "memory_fp32": (
        "Octrain te, 8-bit states, stored in fp32, 4 blocks recomputed",
        lambda work: memory(work, 4, weights="fp32"),
    ),
    "memory_masters": (
        "Octrain te, 8-bit states, fp32 masters, 18 blocks recomputed",
        lambda work: memory(work, 18, master_weights="fp32"),
    ),
    "default": (
        "Octrain te, as jobs are by default",
        lambda work: octrain(work, small_gemm="auto"),
    ),
    "plain": ("Octrain te, layer by layer", lambda work: octrain(work, fuse="none")),
    "plain_packed": (
        "Octrain te, layer by layer, 16 documents a row",
        lambda work: octrain(work, fuse="none", packed=True),
    ),
    "octrain_bf16": (
        "Octrain amp, bf16, fused",
        lambda work: octrain(work, recipe={"engine": "amp", "dtype": "bf16"}),
    ),
    "octrain_bf16_packed": (
        "Octrain amp, bf16, fused, 16 documents a row",
        lambda work: octrain(work, recipe={"engine": "amp", "dtype": "bf16"}, packed=True),
    ),
    "octrain_bf16_plain": (
        "Octrain amp, bf16, layer by layer",
        lambda work: octrain(work, recipe={"engine": "amp", "dtype": "bf16"}, fuse="none"),
    ),
    "octrain_torchao": (
        "Octrain torchao, tensorwise",
        lambda work: octrain(work, recipe={"engine": "torchao"}),
    ),
    "octrain_torchao_packed": (
        "Octrain torchao, tensorwise, 16 documents a row",
        lambda work: octrain(work, recipe={"engine": "torchao"}, packed=True),
    ),
    "bf16": ("transformers bf16, SDPA", transformers_bf16),
    "compiled": (
        "transformers bf16, torch.compile",
        lambda work: compiled(work, fp8=False, by_blocks=False),
    ),
    "compiled_blocks": (
        "transformers bf16, torch.compile of each block",
        lambda work: compiled(work, fp8=False, by_blocks=True),
    ),
    "torchao": (
        "torchao tensorwise, torch.compile",
        lambda work: compiled(work, fp8=True, by_blocks=False),
    ),
    "torchao_blocks": (
        "torchao tensorwise, torch.compile of each block",
        lambda work: compiled(work, fp8=True, by_blocks=True),
    ),
    "accelerate": ("Accelerate fp8, Transformer Engine", accelerate_te),
}
