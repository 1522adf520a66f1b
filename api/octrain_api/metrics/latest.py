"""The newest values that a job's own row carries: what lists of jobs show."""

from collections.abc import Mapping, Sequence
from typing import Any

from octrain_api.metrics.blocks import Block
from octrain_api.numbers import encode

# Every reader and every writer of the job takes them along, so they are few. A job may have
# thousands of series of single layers: those are read by `/jobs/{id}/metrics/latest`.
MAX_NAMES = 200
LAYERS = "fp8/"


def headline(latest: Mapping[str, Any], blocks: Sequence[Block]) -> dict[str, Any]:
    """`latest` with the newest values of the blocks: of names outside `fp8/`, the first 200."""
    found = dict(latest)
    for block in blocks:
        for column, name in enumerate(block.names):
            if name not in found and (name.startswith(LAYERS) or len(found) >= MAX_NAMES):
                continue
            values = block.values[column]
            if block.present is not None:
                values = values[block.present[column]]
            found[name] = encode(float(values[-1]))
    return found
