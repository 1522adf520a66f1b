"""Records what Transformer Engine's delayed scaling does on a GPU, for replay on a CPU.

    python tests/golden/record_te.py tests/golden

A hand-written Transformer Engine loop that shares no code with this project: a small MLP (fp32
parameters under bf16 autocast) and an attention block (bf16 parameters), 20 steps each under every
combination of history 1, 4, 16; max, most_recent; margin 0, 2; HYBRID, E4M3. Step 7 feeds zeros,
step 11 one inf, step 15 one outlier of 1000 times the rest.

``te_scales.safetensors`` holds, for every setting, model, layer and direction, the amaxes staged
for each update ``[steps, columns]``, and after it the scales ``[steps, columns]`` and the last amax
history ``[length, columns]``. ``te_tensors.safetensors`` holds,
for three settings, every tensor a layer read and wrote at each step. ``te_meta.json`` says with
what they were recorded.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformer_engine
import transformer_engine.pytorch as te
from safetensors.torch import save_file
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

STEPS, TOKENS, WIDTH = 20, 32, 32
ZERO_STEP, INF_STEP, OUTLIER_STEP = 7, 11, 15
FULL = {
    ("mlp", 4, "max", 0, "HYBRID"),
    ("mlp", 1, "most_recent", 0, "E4M3"),
    ("attention", 4, "max", 2, "HYBRID"),
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = te.Linear(WIDTH, WIDTH, params_dtype=torch.float32)
        self.down = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value", "output"):
            setattr(
                self,
                name,
                te.Linear(WIDTH, WIDTH, bias=name != "output", params_dtype=torch.bfloat16),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            # A clone each, so that every layer's own grad_input is seen and not their sum.
            getattr(self, name)(x.clone()).view(2, TOKENS // 2, 2, WIDTH // 2).transpose(1, 2)
            for name in ("query", "key", "value")
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(TOKENS, WIDTH))


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(step)
    x = torch.randn(TOKENS, WIDTH, device="cuda", generator=generator) * (1 + step % 3)
    if step == ZERO_STEP:
        x.zero_()
    if step == INF_STEP:
        x[3, 5] = float("inf")
    if step == OUTLIER_STEP:
        x[3, 5] = 1000 * x.abs().max()
    return x.to(dtype).requires_grad_()


def record(kind: str, history: int, algorithm: str, margin: int, fmt: str) -> tuple[dict, dict]:
    FP8GlobalStateManager.reset()
    torch.manual_seed(1)
    model = (MLP if kind == "mlp" else Attention)().cuda()
    layers = dict(model.named_children())
    recipe = DelayedScaling(
        margin=margin,
        fp8_format=getattr(Format, fmt),
        amax_history_len=history,
        amax_compute_algo=algorithm,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    full = (kind, history, algorithm, margin, fmt) in FULL
    seen: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    logs: dict[str, list[torch.Tensor]] = {}

    def watch(name: str) -> None:
        def hook(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            seen[f"{name}/input"] = inputs[0].detach().clone()
            seen[f"{name}/weight"] = module.weight.detach().clone()
            if module.bias is not None and module.bias.numel():
                seen[f"{name}/bias"] = module.bias.detach().clone()
            seen[f"{name}/output"] = output.detach().clone()
            output.register_hook(
                lambda g: seen.__setitem__(f"{name}/grad_output", g.detach().clone())
            )
            if inputs[0].requires_grad:
                inputs[0].register_hook(
                    lambda g: seen.__setitem__(f"{name}/grad_input", g.detach().clone())
                )

        layers[name].register_forward_hook(hook)

    if full:
        for name in layers:
            watch(name)

    update = FP8GlobalStateManager.reduce_and_update_fp8_tensors

    def logged_update(forward: bool = True) -> None:
        direction = "fwd" if forward else "bwd"
        for name, layer in layers.items():
            staged = layer.fp8_meta[f"scaling_{direction}"].amax_history[0]
            logs.setdefault(f"{name}/{direction}/amax", []).append(staged.cpu().clone())
        update(forward=forward)

    FP8GlobalStateManager.reduce_and_update_fp8_tensors = logged_update
    for step in range(STEPS):
        seen.clear()
        optimizer.zero_grad(set_to_none=True)
        x = batch(step, torch.float32 if kind == "mlp" else torch.bfloat16)
        with (
            torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind == "mlp"),
            te.autocast(enabled=True, recipe=recipe),
        ):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        for name, layer in layers.items():
            for direction in ("fwd", "bwd"):
                state = layer.fp8_meta[f"scaling_{direction}"]
                logs.setdefault(f"{name}/{direction}/scale", []).append(state.scale.cpu().clone())
            if full:
                seen[f"{name}/grad_weight"] = layer.weight.grad.detach().clone()
        if full:
            tensors.update(
                {f"{step}/{key}": value.cpu().contiguous() for key, value in seen.items()}
            )
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if all(bool(torch.isfinite(g).all()) for g in gradients):
            optimizer.step()
    FP8GlobalStateManager.reduce_and_update_fp8_tensors = update
    stacked = {key: torch.stack(values) for key, values in logs.items()}
    for name, layer in layers.items():
        for direction in ("fwd", "bwd"):
            history_now = layer.fp8_meta[f"scaling_{direction}"].amax_history
            stacked[f"{name}/{direction}/history"] = history_now.cpu().clone()
    return stacked, tensors


def main(folder: Path) -> None:
    scales: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    settings: list[dict[str, Any]] = []
    for kind, history, algorithm, margin, fmt in itertools.product(
        ("mlp", "attention"), (1, 4, 16), ("max", "most_recent"), (0, 2), ("HYBRID", "E4M3")
    ):
        key = f"{kind}-{history}-{algorithm}-{margin}-{fmt}"
        logs, full = record(kind, history, algorithm, margin, fmt)
        settings.append(
            {
                "key": key,
                "model": kind,
                "amax_history_len": history,
                "amax_compute_algo": algorithm,
                "margin": margin,
                "fp8_format": fmt,
                "tensors": bool(full),
            }
        )
        scales.update({f"{key}/{name}": value for name, value in logs.items()})
        tensors.update({f"{key}/{name}": value for name, value in full.items()})
    save_file(scales, folder / "te_scales.safetensors")
    save_file(tensors, folder / "te_tensors.safetensors")
    meta = {
        "transformer_engine": transformer_engine.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "steps": STEPS,
        "zero_step": ZERO_STEP,
        "inf_step": INF_STEP,
        "outlier_step": OUTLIER_STEP,
        "columns": {"fwd": ["input", "weight", "output"], "bwd": ["grad_output", "grad_input"]},
        "settings": settings,
    }
    (folder / "te_meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    for name in ("te_scales.safetensors", "te_tensors.safetensors"):
        print(name, (folder / name).stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
