"""How much longer a training step takes under ``emulated`` FP8 than in plain fp32, on a CPU.

Two copies of one Llama are trained in turns in one process, on the same random tokens: one with
engine ``amp`` fp32, one with engine ``emulated`` (HYBRID, delayed scaling) and its Linear and
RMSNorm layers converted. A step is forward, backward, clipping and AdamW. Prints the median of
each and their ratio; the aim is a ratio of at most 3.

    python benchmarks/emulated_step.py [--hidden 256] [--layers 4] [--threads 2] [--profile]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fp8core.engines import Engine, NormDescription, create
from fp8core.spec.recipe import AmpRecipe, EmulatedCurrent, EmulatedDelayed


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(arguments.hidden // 64, 1),
        vocab_size=arguments.vocabulary,
        max_position_embeddings=arguments.length,
        tie_word_embeddings=True,
    )
    recipes: dict[str, AmpRecipe | EmulatedDelayed | EmulatedCurrent] = {
        "amp fp32": AmpRecipe(engine="amp", dtype="fp32"),
        "amp bf16": AmpRecipe(engine="amp", dtype="bf16"),
        "emulated delayed": EmulatedDelayed(engine="emulated"),
        "emulated current": EmulatedCurrent(engine="emulated", scaling="current"),
    }
    runs = {}
    for name, recipe in recipes.items():
        torch.manual_seed(0)
        runs[name] = _Run(LlamaForCausalLM(config), create(recipe, "cpu"))
    torch.manual_seed(1)
    tokens = torch.randint(0, arguments.vocabulary, (arguments.batch, arguments.length))

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(arguments.steps + arguments.warm_up):
        for name, run in runs.items():
            started = time.perf_counter()
            run.step(tokens)
            if step >= arguments.warm_up:
                seconds[name].append(time.perf_counter() - started)
    if arguments.profile:
        with torch.profiler.profile() as profile:
            runs["emulated delayed"].step(tokens)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))

    parameters = sum(p.numel() for p in runs["amp fp32"].model.parameters())
    print(
        f"Llama, {parameters / 1e6:.1f} M parameters, hidden {arguments.hidden}, "
        f"{arguments.layers} layers, {arguments.batch} x {arguments.length} tokens, "
        f"vocabulary {arguments.vocabulary}, {arguments.threads} threads, "
        f"median of {arguments.steps} steps"
    )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["amp fp32"]
        print(f"{name:<18}{median * 1e3:9.1f} ms{ratio:8.2f} x fp32   loss {runs[name].loss:.4f}")


class _Run:
    """One model under one engine."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.model = model.train()
        self.loss = float("nan")
        self._engine = engine
        if engine.name == "emulated":
            _convert(model, engine)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(self, tokens: torch.Tensor) -> None:
        with self._engine.training_context():
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._engine.after_backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()


def _convert(model: nn.Module, engine: Engine) -> None:
    for name, module in list(model.named_modules()):
        replacement: nn.Module | None = None
        if isinstance(module, nn.Linear) and name != "lm_head":
            replacement = engine.convert_linear(module, name)
        elif isinstance(module, LlamaRMSNorm):
            shape = tuple(module.weight.shape)
            norm = NormDescription("rms_norm", shape, module.variance_epsilon, module.weight, None)
            replacement = engine.convert_norm(norm, name)
        if replacement is not None:
            model.set_submodule(name, replacement)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (
        ("hidden", 256),
        ("layers", 4),
        ("batch", 4),
        ("length", 512),
        ("vocabulary", 4096),
        ("threads", 2),
        ("steps", 7),
        ("warm-up", 2),
    ):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
