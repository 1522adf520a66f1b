"""Pictures of every page of the dashboard, light and dark, wide and narrow, for the documentation:

    .venv/bin/python -m tests.dashboard.screenshots [--out docs/images] [--url URL --key KEY]

Without a URL it starts a stack of its own and trains a few small jobs on it. The pictures are
reduced to a palette, which keeps all of them together below 3 MB.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from octrain.client import Client
from octrain.demo import spec
from octrain.local.processes import become_subreaper
from octrain.local.stack import LocalStack
from tests.dashboard.browser import REPOSITORY, SIZES, chromium, launched, settled, sign_in

COLOURS = 256
# Of these, those of most pixels, which stay as they are.
EXACT = 64
SCHEMES = ("light", "dark")
FP8 = {"engine": "emulated", "fp8_format": "HYBRID", "amax_history_len": 16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images")
    parser.add_argument("--url", help="of a running service")
    parser.add_argument("--key", default="", help="an administrator's key for it")
    parser.add_argument("--only", default="", help="pages whose name holds this")
    options = parser.parse_args()
    path = chromium()
    if path is None:
        print("There is no Chromium on this machine.", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with service(options.url, options.key) as (url, key), Client(url, key) as client:
        jobs = prepare(client)
        with launched(path) as browser:
            for scheme in SCHEMES:
                for size in SIZES:
                    take(browser, url, key, jobs, scheme, size, options.out, options.only)
    total = sum(picture.stat().st_size for picture in options.out.glob("*.png"))
    print(f"{total / 1e6:.1f} MB in {options.out}")
    return 0


@contextmanager
def service(url: str | None, key: str) -> Iterator[tuple[str, str]]:
    """The service at this address, or one that ends with the block."""
    if url is not None:
        yield url, key
        return
    become_subreaper()
    with (
        tempfile.TemporaryDirectory(prefix="octrain-pictures-") as folder,
        LocalStack(Path(folder), environment={"OCTRAIN_WORKER_CPU_SLOTS": "2"}) as stack,
    ):
        stack.wait_for_nodes()
        yield stack.url, stack.api_key


def prepare(client: Client) -> dict[str, str]:
    """Jobs worth looking at: an FP8 run and its baseline, one that failed, some that wait."""
    known = {job.data.name or "": job.id for job in client.jobs.list()}
    fp8 = spec("llama-fp8", FP8, 60)
    fp8["training"]["parity"] = {"steps": 10}
    fp8["telemetry"] = {"fp8_every_steps": 1}
    fast = spec("llama-too-fast", {"engine": "amp", "dtype": "fp32"}, 60)
    fast["training"]["optimizer"] = {"name": "adamw", "lr": 1000.0}
    specs = [
        fp8,
        spec("llama-bf16", {"engine": "amp", "dtype": "bf16"}, 60),
        fast,
        spec("llama-long", FP8, 100_000),
        *(spec(f"sweep-{number}", FP8, 50) for number in range(4)),
    ]
    for one in specs:
        name = one["name"]
        if name in known:
            continue
        job = client.jobs.create(one)
        known[name] = job.id
        if name in ("llama-fp8", "llama-bf16", "llama-too-fast"):
            job.wait()
        while name == "llama-long" and job.refresh().data.progress.step < 20 and not job.is_final:
            time.sleep(0.2)
    return known


def pages(jobs: dict[str, str]) -> dict[str, str]:
    """The pages by the names of their pictures."""
    job = f"/jobs/{jobs['llama-fp8']}"
    return {
        "jobs": "/jobs",
        "job-charts": job,
        "job-fp8": f"{job}?tab=fp8",
        "job-layers": f"{job}?tab=fp8",
        "job-timeline": f"{job}?tab=timeline",
        "job-logs": f"{job}?tab=logs",
        "job-files": f"{job}?tab=files",
        "job-spec": f"{job}?tab=spec",
        "compare": f"/compare?jobs={jobs['llama-fp8']},{jobs['llama-bf16']}",
        "new-job": "/jobs/new",
        "nodes": "/nodes",
        "usage": "/usage",
        "webhooks": "/webhooks",
        "keys": "/keys",
    }


def take(
    browser: Any,
    url: str,
    key: str,
    jobs: dict[str, str],
    scheme: str,
    size: str,
    out: Path,
    only: str,
) -> None:
    """Every page in one window."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(f"{url}/dashboard/jobs")
    page.get_by_label("API key").wait_for()
    if only in "sign-in":
        save(page, out / f"sign-in-{scheme}-{size}.png")
    sign_in(page, url, key)
    for name, path in pages(jobs).items():
        if only not in name:
            continue
        page.goto(f"{url}/dashboard{path}")
        settled(page)
        if name == "new-job":
            page.get_by_text("The service would take this job.").wait_for()
            # The last line of the plan, which a node works out.
            page.get_by_text("Tokens a step", exact=True).wait_for()
        if name == "jobs" and size == "wide":
            page.locator(".sparkline").first.wait_for()
        if name == "job-fp8":
            # The figure that says most of a job in good health, with the heatmap in the window.
            page.get_by_role("button", name="Scale", exact=True).click()
            heatmap = page.locator(".heat-cells")
            heatmap.wait_for()
            heatmap.evaluate("(part) => part.scrollIntoView({ block: 'center' })")
        if name == "job-layers":
            layers = page.get_by_role("region", name="Layers", exact=True)
            layers.locator("tbody tr").first.wait_for()
            page.get_by_role("heading", name="Layers", exact=True).evaluate(
                "(part) => scrollTo(0, part.getBoundingClientRect().top + scrollY - 90)"
            )
        # Charts are drawn after their data has come.
        page.evaluate("() => new Promise((done) => setTimeout(done, 700))")
        save(page, out / f"{name}-{scheme}-{size}.png")
    context.close()


def save(page: Any, path: Path) -> None:
    """The window as a small PNG."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    reduced(picture).save(path, optimize=True)
    print(f"{path.stat().st_size:8}  {path.name}")


def reduced(picture: Image.Image) -> Image.Image:
    """The picture in few colours: those of surfaces and texts as they are, and of the others, each
    counted once, such as leave none far from its own: a red bar stays red, a ramp smooth."""
    pixels = np.asarray(picture).reshape(-1, 3)
    colours, place, count = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(-count, kind="stable")
    palette = colours[order[:EXACT]]
    others = colours[order[EXACT:]]
    if len(others) > COLOURS - EXACT:
        small = Image.fromarray(others[None]).quantize(
            colors=COLOURS - EXACT, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        found = small.getpalette() or []
        others = np.array(found, dtype=np.uint8).reshape(-1, 3)[: COLOURS - EXACT]
    palette = np.concatenate([palette, others]).astype(np.int32)
    nearest = np.concatenate(
        [
            ((part[:, None].astype(np.int32) - palette) ** 2).sum(axis=2).argmin(axis=1)
            for part in np.array_split(colours, len(colours) // 1000 + 1)
        ]
    )
    shape = (picture.height, picture.width)
    result = Image.fromarray(nearest[place.reshape(-1)].astype(np.uint8).reshape(shape))
    result.putpalette(palette.astype(np.uint8).tobytes())
    return result


if __name__ == "__main__":
    sys.exit(main())
