"""What attention in FP8 does to the loss: the same training with attention in bf16 and in FP8.

    python benchmarks/attention_losses.py [--steps 100] [--seeds 0,1] [--length 1024] [--batch 8]

A Llama of 12 blocks, 768 wide, six heads of 128 (0.1 billion parameters with its vocabulary of
128256) on real text, every row of one document, delayed scaling, weights in bf16. Of each seed
there are three runs from the same weights on the same batches: attention in bf16, once more (what
two runs differ by that differ in nothing), and attention in FP8. Prints mean losses by tenths of
the run, and the gaps to the first: their mean and their root mean square behind the first tenth.
"""

from __future__ import annotations

import argparse
import gc
from statistics import fmean

import torch
from peers.octrain_rows import octrain
from peers.work import Work, real_text

RUNS = {"bf16": False, "bf16 again": False, "FP8": True}


def losses_of(work: Work, seed: int, *, fp8_attention: bool) -> list[float]:
    step = octrain(work, fp8_attention=fp8_attention, training={"seed": seed})
    found = [step(number) for number in range(1, work.tokens.shape[0] + 1)]
    losses = torch.stack(found).tolist()
    del step, found
    gc.collect()
    torch.cuda.empty_cache()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    chosen = parser.parse_args()
    tokens = real_text(chosen.steps, chosen.batch, chosen.length)
    work = Work("attention", chosen.batch, chosen.length, tokens, "bf16")
    tenth = max(1, chosen.steps // 10)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {chosen.steps} steps")
    for seed in map(int, chosen.seeds.split(",")):
        found = {name: losses_of(work, seed, fp8_attention=fp8) for name, fp8 in RUNS.items()}
        for name, losses in found.items():
            tenths = [fmean(losses[i : i + tenth]) for i in range(0, chosen.steps, tenth)]
            gaps = [own / first - 1 for own, first in zip(losses, found["bf16"], strict=True)]
            later = gaps[tenth:]
            apart = fmean(gap * gap for gap in later) ** 0.5
            print(
                f"seed {seed}, attention in {name}: {' '.join(f'{mean:.3f}' for mean in tenths)}; "
                f"gap {fmean(later):+.3%}, root mean square {apart:.3%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
