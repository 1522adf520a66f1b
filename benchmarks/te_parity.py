"""Does Octrain's te engine train like Transformer Engine itself? Losses of one model, four ways.

    python benchmarks/te_parity.py OUT [--steps 300] [--plot]

A Llama of about 100 million parameters learns Python's standard library (real text, bytes as
tokens) from one set of initial weights and one order of batches:

    te        a hand-written Transformer Engine loop that shares no code with this project
    te-again  the same a second time; te-fused the same with PyTorch's fused AdamW: the noise
    octrain   ``python -m fp8core train`` with a te recipe
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


def octrain(folder: Path, steps: int) -> list[float]:
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
        "conversion": {"small_gemm": "off"},
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
    workdir = folder / "octrain"
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

    tokenizer = AutoTokenizer.from_pretrained(folder / "octrain" / "model")
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


def initial_model(folder: Path) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "initial", dtype=torch.float32).cuda()


def hand_loop(folder: Path, steps: int, *, fp8: bool = True, fused: bool = False) -> list[float]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    model = initial_model(folder)
    if fp8:
        model = with_te_layers(model)
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


def report(runs: dict[str, list[float]]) -> None:
    steps = len(runs["te"])
    marks = [step for step in (1, 10, 50, 100, 200, 300, 500, 1000) if step <= steps]
    print("run         " + "".join(f"{mark:>9}" for mark in marks) + "   max gap  mean gap")
    reference = smoothed(runs["te"])
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
    reference = smoothed(runs["te"])
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
    parser.add_argument("--plot", action="store_true", help="draw what an earlier run left in OUT")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    if arguments.plot:
        runs = read(folder)
        report(runs)
        plot(runs, folder / "te_parity.png")
        return
    steps: int = arguments.steps
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        prepare(work, steps)
        train_all(work, steps, folder)


def train_all(work: Path, steps: int, folder: Path) -> None:
    ways: dict[str, Callable[[], list[float]]] = {
        "octrain": lambda: octrain(work, steps),
        "te": lambda: hand_loop(work, steps),
        "te-again": lambda: hand_loop(work, steps),
        "bf16": lambda: hand_loop(work, steps, fp8=False),
        "accelerate": lambda: accelerated(work, steps),
        "te-fused": lambda: hand_loop(work, steps, fused=True),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS} x {LENGTH} tokens")
    runs: dict[str, list[float]] = {}
    for name, way in ways.items():
        started = time.perf_counter()
        runs[name] = way()
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        write(runs, folder)
        torch.cuda.empty_cache()
    report(runs)
    plot(runs, folder / "te_parity.png")


if __name__ == "__main__":
    main()
