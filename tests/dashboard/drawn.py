"""What a chart has drawn, read from its canvas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The heights, as shares of the plot's, of the highest opaque and of the highest faint pixel in the
# colour of the chart's first line, between two shares of its width.
_HEIGHTS = """(chart, [from, to]) => {
    const canvas = chart.querySelector('canvas');
    const plot = chart.querySelector('.u-over')?.getBoundingClientRect();
    if (!canvas || !plot) return { opaque: null, faint: null };
    const frame = canvas.getBoundingClientRect();
    const ratio = canvas.width / frame.width;
    const colour = getComputedStyle(chart).getPropertyValue('--series-1').trim();
    const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    const width = Math.round((to - from) * plot.width * ratio);
    const height = Math.round(plot.height * ratio);
    const { data } = canvas.getContext('2d').getImageData(
        Math.round((plot.left - frame.left + from * plot.width) * ratio),
        Math.round((plot.top - frame.top) * ratio), width, height,
    );
    const found = { opaque: null, faint: null };
    for (let at = 0; at < data.length; at += 4) {
        const alpha = data[at + 3];
        if (alpha < 20 || wanted.some((part, i) => Math.abs(part - data[at + i]) > 24)) continue;
        found[alpha > 200 ? 'opaque' : 'faint'] ??= 1 - Math.floor(at / 4 / width) / height;
    }
    return found;
}"""


@dataclass(frozen=True)
class Drawn:
    """How high the first line of a chart goes, as a share of the plot's height; None where nothing
    is drawn. ``faint`` is what is seen through: raw values below a smoothed line."""

    opaque: float | None
    faint: float | None


def drawn(chart: Any, first: float, last: float) -> Drawn:
    """What the chart has drawn between two shares of its width."""
    return Drawn(**chart.evaluate(_HEIGHTS, [first, last]))
