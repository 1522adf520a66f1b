"""Does Octrain's te engine train like Transformer Engine itself? Losses of one model, four ways.

    python benchmarks/te_parity.py OUT [--steps 300] [--only octrain te ...] [--plot]

A Llama of about 100 million parameters learns Python's standard library (real text, bytes as
tokens) from one set of initial weights and one order of batches:

    te        a hand-written Transformer Engine loop that shares no code with this project
    te-again  the same a second time; te-fused the same with PyTorch's fused AdamW: the noise
    te-layers  the same loop over ``te.TransformerLayer``, Transformer Engine's own fused blocks
    octrain   ``python -m fp8core train`` with a te recipe: fused blocks
    octrain-plain  the same layer by layer, with ``conversion.fuse: none``
    accelerate  Accelerate with ``TERecipeKwargs``
    bf16      the hand-written loop without FP8

Needs a GPU with FP8, Transformer Engine and accelerate. Writes ``losses.csv`` to OUT after each run
and prints a table: losses, and the gap to ``te``, largest and mean, of losses smoothed over 20
steps. ``--plot`` draws ``te_parity.png`` from the losses in OUT, and trains nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

LENGTH, ROWS = 1024, 16
LEARNING_RATE, BETAS, EPSILON, CLIP = 3e-4, (0.9, 0.95), 1e-8, 1.0
RECIPE = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}
CONFIG: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 272,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def prepare(folder: Path, steps: int) -> None:
    """The text as rows of exactly LENGTH ASCII characters, and the initial weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    needed = steps * ROWS * LENGTH
    library = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(library.rglob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        text += source.encode("ascii", "ignore").decode().replace("\r", "")
        if len(text) >= needed:
            break
    rows = [text[i : i + LENGTH] for i in range(0, len(text) - LENGTH + 1, LENGTH)]
    # A fixed interleaving, so that neighbouring rows come from different files.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    repeated = [rows[order[i % len(rows)]] for i in range(steps * ROWS)]
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": row}) + "\n" for row in repeated)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder / "initial")
    print(f"{len(rows)} distinct rows of {LENGTH} bytes for {steps * ROWS} used")


def octrain(folder: Path, steps: int, fuse: str = "auto") -> list[float]:
    spec = {
        "model": {"source": "path", "path": str(folder / "initial")},
        "tokenizer": {"source": "bytes"},
        "data": {
            "source": "jsonl",
            "path": str(folder / "rows.jsonl"),
            "shuffle": False,
            "packing": False,
            "append_end_of_text": False,
        },
        "recipe": {"engine": "te", **RECIPE},
        "conversion": {"fuse": fuse, "small_gemm": "off"},
        "training": {
            "steps": steps,
            "batch_size": ROWS,
            "sequence_length": LENGTH,
            "max_grad_norm": CLIP,
            "optimizer": {
                "name": "adamw",
                "lr": LEARNING_RATE,
                "betas": BETAS,
                "eps": EPSILON,
                "weight_decay": 0.0,
            },
            "schedule": {"name": "constant"},
        },
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0},
        "telemetry": {"fp8_every_steps": 0},
        "resources": {"device": "cuda"},
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    workdir = folder / f"octrain-{fuse}"
    command = [sys.executable, "-m", "fp8core", "train", str(folder / "spec.json")]
    subprocess.run([*command, "--workdir", str(workdir)], check=True)
    losses = []
    for line in (workdir / "telemetry.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "metrics" and "train/loss" in record["values"]:
            losses.append(float(record["values"]["train/loss"]))
    return losses


def batches(folder: Path, steps: int) -> Iterator[torch.Tensor]:
    """[ROWS, LENGTH] token ids in the order of the file; the tokenizer is the one Octrain saved."""
    from transformers import AutoTokenizer

    saved = next(folder.glob("octrain-*/model"))
    tokenizer = AutoTokenizer.from_pretrained(saved)
    with (folder / "rows.jsonl").open() as file:
        for _ in range(steps):
            texts = [json.loads(next(file))["text"] for _ in range(ROWS)]
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            yield torch.tensor(ids, device="cuda")


def with_te_layers(model: nn.Module) -> nn.Module:
    """Every Linear but the head, and every RMSNorm, replaced by hand."""
    import transformer_engine.pytorch as te
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                replacement: Any = te.Linear(child.in_features, child.out_features, bias=False)
            elif isinstance(child, LlamaRMSNorm):
                replacement = te.RMSNorm(child.weight.numel(), eps=child.variance_epsilon)
            else:
                continue
            with torch.no_grad():
                replacement.weight.copy_(child.weight)
            setattr(parent, name, replacement)
    return model


class TEBlock(nn.Module):
    """A block of Llama as ``te.TransformerLayer``, called as Llama calls its own."""

    def __init__(self, block: Any, angles: torch.Tensor) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        attention, mlp = block.self_attn, block.mlp
        self.layer = te.TransformerLayer(
            CONFIG["hidden_size"],
            CONFIG["intermediate_size"],
            CONFIG["num_attention_heads"],
            num_gqa_groups=CONFIG["num_key_value_heads"],
            bias=False,
            layernorm_epsilon=block.input_layernorm.variance_epsilon,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=False,
            normalization="RMSNorm",
            activation="swiglu",
            attn_input_format="bshd",
            self_attn_mask_type="causal",
        )
        self.angles = angles
        joined, fused_mlp = self.layer.self_attention.layernorm_qkv, self.layer.layernorm_mlp
        pairs = {
            joined.layer_norm_weight: block.input_layernorm.weight,
            joined.query_weight: attention.q_proj.weight,
            joined.key_weight: attention.k_proj.weight,
            joined.value_weight: attention.v_proj.weight,
            self.layer.self_attention.proj.weight: attention.o_proj.weight,
            fused_mlp.layer_norm_weight: block.post_attention_layernorm.weight,
            fused_mlp.fc1_weight: torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            fused_mlp.fc2_weight: mlp.down_proj.weight,
        }
        with torch.no_grad():
            for target, source in pairs.items():
                target.copy_(source)

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden, rotary_pos_emb=self.angles)
        return output


def with_te_blocks(model: Any) -> nn.Module:
    """Every block replaced by Transformer Engine's own; the last norm too."""
    import transformer_engine.pytorch as te

    size = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    angles = te.RotaryPositionEmbedding(size)(max_seq_len=LENGTH).cuda()
    blocks = model.model.layers
    for place, block in enumerate(blocks):
        blocks[place] = TEBlock(block, angles)
    return with_te_layers(model)


def initial_model(folder: Path) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "initial", dtype=torch.float32).cuda()


def hand_loop(
    folder: Path, steps: int, *, fp8: bool = True, fused: bool = False, blocks: bool = False
) -> list[float]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    model = initial_model(folder)
    if fp8:
        model = with_te_blocks(model) if blocks else with_te_layers(model)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=0.0,
        fused=fused,
        foreach=not fused,
    )
    losses = []
    for ids in batches(folder, steps):
        with (
            torch.autocast("cuda", dtype=torch.bfloat16),
            te.autocast(enabled=fp8, recipe=recipe),
        ):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def accelerated(folder: Path, steps: int) -> list[float]:
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs

    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**RECIPE)])
    model = initial_model(folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    losses = []
    for ids in batches(folder, steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().float())
    return torch.stack(losses).tolist()


def smoothed(losses: list[float], window: int = 20) -> torch.Tensor:
    values = torch.tensor(losses)
    return values.unfold(0, window, 1).mean(-1)


def write(runs: dict[str, list[float]], folder: Path) -> None:
    with (folder / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *runs])
        for step, losses in enumerate(zip(*runs.values(), strict=True), start=1):
            writer.writerow([step, *(f"{loss:.6f}" for loss in losses)])


def read(folder: Path) -> dict[str, list[float]]:
    with (folder / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


def report(runs: dict[str, list[float]], to: str) -> None:
    """``to``: the run that the others' gaps are to."""
    steps = len(runs[to])
    marks = [step for step in (1, 10, 50, 100, 200, 300, 500, 1000) if step <= steps]
    print("run         " + "".join(f"{mark:>9}" for mark in marks) + "   max gap  mean gap")
    reference = smoothed(runs[to])
    for name, losses in runs.items():
        gap = (smoothed(losses) - reference).abs()
        print(
            f"{name:12}"
            + "".join(f"{losses[mark - 1]:9.4f}" for mark in marks)
            + f"{gap.max().item():10.5f}{gap.mean().item():10.5f}",
            flush=True,
        )


def plot(runs: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, gaps) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    reference = smoothed(runs["te" if "te" in runs else "te-layers"])
    for number, (name, losses) in enumerate(runs.items()):
        look = {"label": name, "linewidth": 1, "color": f"C{number}"}
        curves.plot(smoothed(losses), **look)
        if name != "te":
            gaps.plot(smoothed(losses) - reference, **look)
    curves.set(xlabel="step", ylabel="loss, mean of 20 steps", yscale="log")
    gaps.set(xlabel="step", ylabel="gap to the hand-written te loop")
    for axes in (curves, gaps):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", help="some of the runs, an octrain one among them")
    parser.add_argument("--plot", action="store_true", help="draw what an earlier run left in OUT")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    if arguments.plot:
        runs = read(folder)
        for reference in ("te", "te-layers"):
            report(runs, reference)
        plot(runs, folder / "te_parity.png")
        return
    steps: int = arguments.steps
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        # Of longer runs the first steps are the same.
        prepare(work, max(steps, 300))
        train_all(work, steps, folder, arguments.only)


def train_all(work: Path, steps: int, folder: Path, only: list[str] | None) -> None:
    """Octrain first: the others take its tokenizer."""
    ways: dict[str, Callable[[], list[float]]] = {
        "octrain-plain": lambda: octrain(work, steps, "none"),
        "octrain": lambda: octrain(work, steps),
        "te-layers": lambda: hand_loop(work, steps, blocks=True),
        "te": lambda: hand_loop(work, steps),
        "te-again": lambda: hand_loop(work, steps),
        "bf16": lambda: hand_loop(work, steps, fp8=False),
        "accelerate": lambda: accelerated(work, steps),
        "te-fused": lambda: hand_loop(work, steps, fused=True),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS} x {LENGTH} tokens")
    runs: dict[str, list[float]] = {}
    for name, way in ways.items():
        if only and name not in only:
            continue
        started = time.perf_counter()
        runs[name] = way()
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        write(runs, folder)
        torch.cuda.empty_cache()
    for reference in runs:
        if reference in ("te", "te-layers"):
            report(runs, reference)
    plot(runs, folder / "te_parity.png")


if __name__ == "__main__":
    main()
