"""What `quality` has found, as tables of Markdown and as a plot; and how rows name their seeds."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

__all__ = ["of_seed", "plot", "seed_of", "seeds_table", "table", "unseeded"]

BASE = "bf16"
LAST = 20
"""Steps over which losses of training are averaged."""
_SEED = re.compile(r"_seed(\d*)$")


def seed_of(row: str) -> int:
    """0 for NAME, 1 for NAME_seed, N for NAME_seedN."""
    found = _SEED.search(row)
    return 0 if found is None else int(found[1] or 1)


def unseeded(row: str) -> str:
    return _SEED.sub("", row)


def of_seed(row: str, seed: int) -> str:
    """The name of the row with another seed."""
    if seed == 0:
        return unseeded(row)
    return f"{unseeded(row)}_seed{seed if seed > 1 else ''}"


def table(rows: list[dict[str, Any]]) -> str:
    """Of the rows of one seed: with another, other text is held out."""
    base = next((found for found in rows if unseeded(found["row"]) == BASE), rows[0])
    with_floor = any(found.get("of_floor") is not None for found in rows)
    target = max(found["held_out"][-1][1] for found in rows)
    lines = [
        f"{base['shape']}: {base['parameters']:,} parameters, {base['steps']} steps, "
        f"{base['device']}, torch {base['torch']}",
        "",
        f"| row | loss on held-out text | to {base['row']} | mean gap in training | ms a step | "
        f"{'of the floor | ' * with_floor}tokens/s | steps to {target:.4f} | seconds |",
        f"|---|---|---|---|---|{'---|' * with_floor}---|---|---|",
    ]
    for found in rows:
        last = found["held_out"][-1][1]
        needed, speed = steps_to(target, found["held_out"]), found.get("milliseconds")
        share = found.get("of_floor")
        cells = [
            found["row"],
            f"{last:.4f}",
            f"{held_out_gap(found, base):+.4f}",
            f"{training_gap(found, base):+.4f}",
            "" if speed is None else f"{speed:.1f}",
            *(["" if share is None else f"{share:.0%}"] if with_floor else []),
            "" if speed is None else f"{found['tokens_per_second']:,.0f}",
            "not reached" if needed is None else f"{needed:.0f}",
            "" if needed is None or speed is None else f"{needed * speed / 1000:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seeds_table(rows: list[dict[str, Any]]) -> str:
    """How far each row is, seed by seed, from what it is to be compared with: ``bf16``, or the row
    that it is once more."""
    by_name = {found["row"]: found for found in rows}
    lines = [
        "| row | seeds | loss on held-out text | beside | gap on held-out text | mean | "
        "mean gap in training |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in dict.fromkeys(unseeded(found["row"]) for found in rows):
        own = [found for found in rows if unseeded(found["row"]) == row]
        again = row.removesuffix("_again")
        beside = again if again != row else BASE
        pairs = [
            (found, by_name[other])
            for found in own
            if row != BASE and (other := of_seed(beside, seed_of(found["row"]))) in by_name
        ]
        held_out = [held_out_gap(found, other) for found, other in pairs]
        training = [training_gap(found, other) for found, other in pairs]
        cells = [
            row,
            ", ".join(str(seed_of(found["row"])) for found in own),
            ", ".join(f"{found['held_out'][-1][1]:.4f}" for found in own),
            beside if pairs else "",
            ", ".join(f"{gap:+.4f}" for gap in held_out),
            f"{fmean(held_out):+.4f}" if pairs else "",
            ", ".join(f"{gap:+.4f}" for gap in training),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Held-out losses by step, and by seconds where speeds are known; repeats in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    shown = 0
    for found in rows:
        steps, losses = zip(*found["held_out"], strict=True)
        if seed_of(found["row"]) or found["row"].endswith("_again"):
            by_step.plot(steps, losses, color="0.7", linewidth=0.8, zorder=1)
            continue
        look = {"label": found["row"], "linewidth": 1.1, "color": f"C{shown}"}
        shown += 1
        by_step.plot(steps, losses, **look)
        if "milliseconds" in found:
            by_time.plot([step * found["milliseconds"] / 1000 for step in steps], losses, **look)
    by_step.set(xlabel="step", ylabel="loss on held-out text", yscale="log")
    by_time.set(xlabel="seconds of training", yscale="log")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    by_step.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def held_out_gap(found: dict[str, Any], base: dict[str, Any]) -> float:
    """On held-out text, at the end."""
    return float(found["held_out"][-1][1] - base["held_out"][-1][1])


def training_gap(found: dict[str, Any], base: dict[str, Any]) -> float:
    """Of the smoothed losses of training behind the first tenth, the mean."""
    settled = len(base["losses"]) // 10
    own, curve = smoothed(found["losses"])[settled:], smoothed(base["losses"])[settled:]
    return fmean(a - b for a, b in zip(own, curve, strict=True))


def smoothed(losses: list[float]) -> list[float]:
    """Means of up to the last ``LAST`` losses."""
    return [fmean(losses[max(0, end - LAST) : end]) for end in range(1, len(losses) + 1)]


def steps_to(loss: float, held_out: list[tuple[int, float]]) -> float | None:
    """Steps until the loss on held-out text is first ``loss`` or less, between evaluations by a
    straight line."""
    before: tuple[int, float] | None = None
    for step, value in held_out:
        if value <= loss:
            if before is None:
                return step
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (step - before[0])
        before = (step, value)
    return None
