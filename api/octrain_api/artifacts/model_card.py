"""The model card that goes with an exported model: what it is, and the recipe that made it."""

import json
from typing import Any

from octrain_api.models import Job

_SHOWN = ("eval/loss", "eval/bits_per_byte", "eval/accuracy", "eval/f1", "train/loss")


def model_card(job: Job, *, loads_with: str, conversion: dict[str, Any] | None) -> str:
    """Markdown with the front matter that model hubs read."""
    spec = job.spec
    recipe = spec["recipe"]
    title = job.name or job.id
    front = [
        "---",
        "library_name: transformers",
        f"tags: [fp8, octrain, {recipe['engine']}]",
    ]
    if spec["model"]["source"] == "huggingface":
        front.append(f"base_model: {json.dumps(spec['model']['id'])}")
    front.append("---")
    lines = [
        *front,
        "",
        f"# {_plain(title)}",
        "",
        f"Trained by Octrain job `{job.id}`: {_how(spec)}. A plain Hugging Face checkpoint in high "
        "precision; nothing of Octrain is needed to load it:",
        "",
        "```python",
        f"from transformers import AutoTokenizer, {loads_with}",
        "",
        f'model = {loads_with}.from_pretrained("PATH")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
        "```",
        "",
        "## Figures",
        "",
        *_figures(job),
        "",
        "## Recipe",
        "",
        "```json",
        json.dumps(recipe, indent=2, ensure_ascii=False),
        "```",
    ]
    if job.recipe_from is not None:
        lines += ["", f"From `{job.recipe_from['name']}`, version {job.recipe_from['version']}."]
    if conversion is not None:
        lines += [
            "",
            f"{conversion['converted']} of {conversion['layers']} layers ran on the engine; the "
            "rest was kept in high precision.",
        ]
    lines += [
        "",
        "## Whole spec",
        "",
        "```json",
        json.dumps(spec, indent=2, ensure_ascii=False),
        "```",
        "",
    ]
    return "\n".join(lines)


def _how(spec: dict[str, Any]) -> str:
    recipe = spec["recipe"]
    how = f"engine `{recipe['engine']}`"
    if "scaling" in recipe:
        how += f", {recipe['scaling']} scaling"
    if "fp8_format" in recipe:
        how += f", {recipe['fp8_format']}"
    if "dtype" in recipe:
        how += f", {recipe['dtype']}"
    return f"{spec['task']}, {how}"


def _figures(job: Job) -> list[str]:
    latest = job.latest_metrics
    rows = [f"| {name} | {latest[name]} |" for name in _SHOWN if name in latest]
    return [
        "| figure | last value |",
        "|---|---|",
        *rows,
        f"| steps | {job.step} |",
        f"| tokens | {job.tokens} |",
    ]


def _plain(text: str) -> str:
    """A name as one line without markup."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split()).replace("`", "'")
