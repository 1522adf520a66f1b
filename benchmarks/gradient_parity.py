"""Do fused blocks compute other gradients than Transformer Engine's own? Errors and biases.

    python benchmarks/gradient_parity.py OUT [--batches 8] [--steps 100]

The model and the text of ``te_parity.py``. From one set of weights the same batches go through
every way, without a step of an optimizer: once to fill the histories of delayed scaling, then once
more to be measured. That is done with the initial weights, and with those after ``--steps`` steps
of the loop by hand.

    reference  Hugging Face's model in fp32, without TF32
    bf16       the same under bf16 autocast
    te         Transformer Engine by hand, layer by layer
    te-layers  ``te.TransformerLayer`` by hand
    octrain    the trainer's own forward and backward, fused blocks
    octrain-loss  the same with PyTorch's cross-entropy instead of the fused one
    octrain-plain  the same layer by layer

By groups of parameters it prints, for the gradients g of a way and r of the reference:

    error  |g - r| / |r|, mean over the batches
    bias   <g, r> / <r, r> - 1, mean over the batches and its standard error: a part of the gradient
           that is missing, counted twice or scaled wrongly shows here, rounding hardly does

and the same of octrain to te-layers; by how much the scales of these two differ; and what the first
pass of all gives, where every scale is 1. Then clipping and AdamW: Octrain's kernel and PyTorch's
from the same gradients, both compared with fp64. ``gradient_parity.json`` in OUT has all figures.
Needs a GPU with FP8 and Transformer Engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gradient_figures import (
    Gradients,
    compare,
    compare_optimizers,
    compare_scales,
    mean_and_error,
    show,
)
from te_by_hand import (
    CONFIG,
    RECIPE,
    TEBlock,
    delayed_scaling,
    initial_model,
    loss_by_hand,
    prepare,
    train_by_hand,
    with_te_blocks,
    with_te_layers,
)
from te_parity import octrain_spec
from torch import Tensor, nn

from fp8core import engines
from fp8core.data.batch import Batch
from fp8core.fusion.cross_entropy import plain_cross_entropy
from fp8core.spec import JobSpec, parse_spec
from fp8core.training.assemble import assemble
from fp8core.training.build import Places, build_data_and_model
from fp8core.training.learner import Learner

DEVICE = torch.device("cuda")
SCALES = {  # of te.TransformerLayer's modules, by the names that Octrain gives the same GEMMs
    "self_attn.qkv_proj": ("self_attention.layernorm_qkv", 0),
    "self_attn.o_proj": ("self_attention.proj", 0),
    "mlp.gate_up_proj": ("layernorm_mlp", 0),
    "mlp.down_proj": ("layernorm_mlp", 1),
}


@dataclass
class Way:
    """``compute``: forward and backward of one batch; the loss. The gradients lie in ``.grad``."""

    model: nn.Module
    compute: Callable[[Batch], Tensor]
    scales: Callable[[], dict[str, Tensor]] = dict
    """After the passes, of GEMMs that are named as Octrain names them."""


@dataclass
class Found:
    """What one way gave: the first pass of all, and those measured, by batch."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    first: Gradients = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)


# The ways


def in_fp32(folder: Path, weights: str) -> Way:
    model = initial_model(folder, weights).train()

    def compute(batch: Batch) -> Tensor:
        ids = batch.input_ids.to(DEVICE)
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Way(model, compute)


def by_hand(folder: Path, weights: str, convert: Callable[[Any], nn.Module] | None) -> Way:
    recipe = None if convert is None else delayed_scaling()
    model = initial_model(folder, weights)
    if convert is not None:
        model = convert(model)
    model.train()
    return Way(
        model,
        lambda batch: loss_by_hand(model, batch.input_ids.to(DEVICE), recipe),
        lambda: scales_of_blocks(model),
    )


def scales_of_blocks(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for place, block in enumerate(block for block in model.modules() if isinstance(block, TEBlock)):
        for name, (module, gemm) in SCALES.items():
            meta = block.layer.get_submodule(module).fp8_meta
            for direction, columns in (("fwd", 3), ("bwd", 2)):
                scale = meta[f"scaling_{direction}"].scale
                key = f"model.layers.{place}.{name}/{direction}"
                found[key] = scale[columns * gemm : columns * (gemm + 1)].clone()
    return found


def by_octrain(folder: Path, weights: str, fuse: str = "auto", *, plain_loss: bool = False) -> Way:
    engine, learner = octrain_learner(folder, weights, fuse)
    if plain_loss:
        learner.task.cross_entropy = plain_cross_entropy

    def scales() -> dict[str, Tensor]:
        return {
            key.removesuffix("/scale").replace("/forward", "/fwd").replace("/backward", "/bwd"): s
            for key, s in engine.state_dict().items()
            if key.endswith("/scale")
        }

    return Way(learner.model, lambda batch: learner.gradients(1, [batch]).detach(), scales)


def octrain_learner(folder: Path, weights: str, fuse: str) -> tuple[engines.Engine, Learner]:
    spec = spec_of(folder, weights, fuse)
    engine = engines.create(spec.recipe, DEVICE)
    built = build_data_and_model(spec, Places(base=folder), device=DEVICE, dtype=torch.float32)
    assembled = assemble(spec, engine, built.loaded)
    fusion = assembled.conversion.fusion
    if fuse == "auto" and (fusion is None or not fusion.whole):
        raise SystemExit(f"blocks are not fused: {fusion and fusion.rows}")
    assembled.learner.model.train()
    return engine, assembled.learner


def spec_of(folder: Path, weights: str, fuse: str) -> JobSpec:
    fields = octrain_spec(folder, 1, fuse)
    fields["model"]["path"] = str(folder / weights)
    return parse_spec(fields)


WAYS: dict[str, Callable[[Path, str], Way]] = {
    "reference": in_fp32,
    "bf16": lambda folder, weights: by_hand(folder, weights, None),
    "te": lambda folder, weights: by_hand(folder, weights, with_te_layers),
    "te-layers": lambda folder, weights: by_hand(folder, weights, with_te_blocks),
    "octrain": by_octrain,
    "octrain-loss": lambda folder, weights: by_octrain(folder, weights, plain_loss=True),
    "octrain-plain": lambda folder, weights: by_octrain(folder, weights, "none"),
}


# Measuring


def measure(way: Way, batches: Sequence[Batch], passes: int) -> Found:
    """The last of ``passes`` over the batches, and the first batch of the first."""
    found = Found()
    for number in range(passes):
        for batch in batches:
            loss = way.compute(batch)
            if number == passes - 1:
                found.losses.append(float(loss))
                found.gradients.append(take_gradients(way.model))
            elif not found.first:
                found.first = take_gradients(way.model)
            way.model.zero_grad(set_to_none=True)
    found.first = found.first or found.gradients[0]
    found.scales = way.scales()
    return found


def take_gradients(model: nn.Module) -> Gradients:
    """Of all parameters, under the names that Hugging Face's model gives them."""
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, TEBlock)}
    found: Gradients = {}
    for name, block in blocks.items():
        found |= {f"{name}.{own}": gradient for own, gradient in block.gradients().items()}
    for name, parameter in model.named_parameters():
        if not any(name.startswith(f"{block}.") for block in blocks):
            assert parameter.grad is not None, name
            found[name] = parameter.grad
    return {name: gradient.float().clone() for name, gradient in found.items()}


def one_set_of_weights(folder: Path, weights: str, batches: Sequence[Batch]) -> dict[str, Any]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    found: dict[str, Found] = {}
    for name, make in WAYS.items():
        started = time.perf_counter()
        FP8GlobalStateManager.reset()
        way = make(folder, weights)
        found[name] = measure(way, batches, 1 if name in ("reference", "bf16") else 2)
        del way
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{weights}, {name}: {time.perf_counter() - started:.1f} s", flush=True)
    reference = found.pop("reference")
    to_reference = {n: compare(f.gradients, reference.gradients) for n, f in found.items()}
    show(f"{weights} weights, to fp32", to_reference)
    octrain, blocks = found["octrain"], found["te-layers"]
    between = {
        "octrain": compare(octrain.gradients, blocks.gradients),
        "octrain-loss": compare(found["octrain-loss"].gradients, blocks.gradients),
        "te": compare(found["te"].gradients, blocks.gradients),
    }
    show(f"{weights} weights, to te-layers", between)
    first = {n: compare([f.first], [reference.first]) for n, f in found.items()}
    show(f"{weights} weights, first pass, to fp32", first)
    first_between = {"octrain": compare([octrain.first], [blocks.first])}
    show(f"{weights} weights, first pass, to te-layers", first_between)
    losses = {}
    for name, own in found.items():
        apart = [mine - its for mine, its in zip(own.losses, reference.losses, strict=True)]
        losses[name] = mean_and_error(apart)
        print(f"loss of {name} - of reference: {losses[name][0]:.6f} ± {losses[name][1]:.6f}")
    scales = compare_scales(octrain.scales, blocks.scales)
    print("scales, octrain / te-layers - 1, largest:", {n: round(v, 4) for n, v in scales.items()})
    initial = {n: p.detach() for n, p in initial_model(folder, weights).named_parameters()}
    return {
        "loss": sum(reference.losses) / len(batches),
        "losses_apart": losses,
        "to_reference": to_reference,
        "to_te_layers": between,
        "first_pass_to_reference": first,
        "first_pass_to_te_layers": first_between,
        "scales_apart": scales,
        "optimizer": compare_optimizers(initial, reference.gradients),
    }


# The whole


def train_some(folder: Path, batches: Iterable[Batch]) -> None:
    """Saves the weights after a step by hand with each of ``batches``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = with_te_layers(initial_model(folder))
    losses = train_by_hand(model, (batch.input_ids.to(DEVICE) for batch in batches))
    print(f"trained {len(losses)} steps by hand, to a loss of {losses[-1]:.4f}")
    state = {n: t for n, t in model.state_dict().items() if not n.endswith("_extra_state")}
    plain = LlamaForCausalLM(LlamaConfig(**CONFIG))
    plain.load_state_dict(state)
    plain.save_pretrained(folder / "trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="before the second comparison")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        prepare(work, arguments.steps + arguments.batches)
        spec = spec_of(work, "initial", "none")
        places = Places(base=work)
        train = build_data_and_model(spec, places, device=DEVICE, dtype=torch.float32).data.train
        learned = [next(train) for _ in range(arguments.steps)]
        measured = [next(train) for _ in range(arguments.batches)]
        facts = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        print(facts, RECIPE)
        figures: dict[str, Any] = {"device": facts, "batches": arguments.batches}
        for weights in ("initial", "trained"):
            if weights == "trained":
                train_some(work, learned)
            figures[weights] = one_set_of_weights(work, weights, measured)
            (folder / "gradient_parity.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
