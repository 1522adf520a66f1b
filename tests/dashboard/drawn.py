"""What a chart has drawn, read from its canvas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Begins both scripts: the pixels of a part of the plot, and whether one has a colour of the page.
_READ = """
    const canvas = chart.querySelector('canvas');
    const plot = chart.querySelector('.u-over')?.getBoundingClientRect();
    if (!canvas || !plot) return null;
    const frame = canvas.getBoundingClientRect();
    const ratio = canvas.width / frame.width;
    const context = canvas.getContext('2d');
    const read = (left, right, top, bottom) => context.getImageData(
        Math.round((plot.left - frame.left + left) * ratio),
        Math.round((plot.top - frame.top + top) * ratio),
        Math.round((right - left) * ratio), Math.round((bottom - top) * ratio),
    );
    const like = (name) => {
        const colour = getComputedStyle(chart).getPropertyValue(name).trim();
        const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
        return ({ data }, at) => !wanted.some((part, i) => Math.abs(part - data[at + i]) > 24);
    };
"""

_HEIGHTS = (
    "(chart, [from, to, name]) => {"
    + _READ
    + """
    const picture = read(from * plot.width, to * plot.width, 0, plot.height);
    const { data, width, height } = picture;
    const is = like(name);
    const found = { opaque: null, faint: null, foot: null };
    const columns = new Set();
    for (let at = 0; at < data.length; at += 4) {
        const alpha = data[at + 3];
        if (alpha < 20 || !is(picture, at)) continue;
        const share = 1 - Math.floor(at / 4 / width) / height;
        if (alpha > 200) {
            found.opaque ??= share;
            columns.add((at / 4) % width);
        } else {
            found.faint ??= share;
            found.foot = share;
        }
    }
    return { ...found, filled: columns.size / width };
}"""
)

# Signs reach a little beyond the plot. Of one, the middle of its columns counts.
_MARKS = (
    "(chart) => {"
    + _READ
    + """
    const beyond = 6;
    const places = (name, top, bottom, least) => {
        const picture = read(-beyond, plot.width + beyond, top, bottom);
        const { data, width, height } = picture;
        const is = like(name);
        const groups = [];
        for (let x = 0; x < width; x += 1) {
            let count = 0;
            for (let y = 0; y < height; y += 1) {
                const at = 4 * (y * width + x);
                if (data[at + 3] > 200 && is(picture, at)) count += 1;
            }
            if (count < least * height) continue;
            if (groups.length > 0 && groups.at(-1).at(-1) === x - 1) groups.at(-1).push(x);
            else groups.push([x]);
        }
        return groups.map((group) => {
            const middle = (group[0] + group.at(-1) + 1) / 2 / ratio - beyond;
            return middle / plot.width;
        });
    };
    return {
        checkpoints: places('--info', plot.height - 5, plot.height, 0.2),
        alarms: places('--bad', 1, 8, 0.2),
        attempts: places('--line-strong', 0.3 * plot.height, 0.9 * plot.height, 0.3),
    };
}"""
)


@dataclass(frozen=True)
class Drawn:
    """How high a line of a chart goes, as a share of the plot's height; None where there is none.

    ``faint`` and ``foot`` are the highest and the lowest of what is seen through: raw values below
    a smoothed line, the band of the least and greatest. ``filled`` is the share of columns that
    the line passes: half of them when it is dashed.
    """

    opaque: float | None
    faint: float | None
    foot: float | None
    filled: float


@dataclass(frozen=True)
class Marks:
    """Where a chart has signs, as shares of the plot's width."""

    checkpoints: list[float]
    alarms: list[float]
    attempts: list[float]


def drawn(chart: Any, first: float, last: float, line: int = 1) -> Drawn:
    """What the chart has drawn of a line between two shares of its width."""
    found = chart.evaluate(_HEIGHTS, [first, last, f"--series-{line}"])
    return Drawn(**found) if found else Drawn(None, None, None, 0.0)


def marks(chart: Any) -> Marks:
    """The signs of checkpoints, alarms and attempts on the chart."""
    found = chart.evaluate(_MARKS)
    return Marks(**found) if found else Marks([], [], [])
