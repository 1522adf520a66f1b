"""Tensors, rules and what they must count: shared by the CPU's test and the GPU's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.engines.cast_figures import CastRule, ScaleFrom

FORMATS = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Case:
    """One tensor, how it is cast, and the scale it is given."""

    label: str
    tensor: Tensor
    rule: CastRule
    scale: Tensor | None


DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def cases(
    device: str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES, formats: Sequence[str] = FORMATS
) -> Iterator[Case]:
    """Shapes whole and broken, values of many sizes with zeros, every source of scales."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((256, 384), (1, 16), (130, 200), (3, 5, 144), (7,), (300, 1)):
        wide = torch.randn(shape, generator=generator).exp2() * torch.randn(
            shape, generator=generator
        )
        spread = wide * torch.exp2(torch.randint(-20, 12, shape, generator=generator).float())
        spread[spread.abs() < 1e-6] = 0.0
        for dtype in dtypes:
            tensor = spread.to(dtype).to(device)
            for fp8_format in formats:
                for source in ScaleFrom:
                    for power in (False, True):
                        rule = CastRule.of(fp8_format, source, power_of_two=power)
                        given = torch.tensor(0.75, device=device)
                        scale = given if source is ScaleFrom.GIVEN else None
                        label = f"{shape} {dtype} {fp8_format} {source.name} {power}"
                        yield Case(label, tensor, rule, scale)


def cases_of_many(device: str = "cpu") -> Iterator[tuple[CastRule, dict[str, Tensor]]]:
    """Tensors by name, to be cast by one rule: of two formats, whose elements can be read 16 bytes
    at a time or cannot, that lie in order or do not, with what is no number, zeros, and nothing."""
    for aligned in (True, False):
        tensors = {"empty": torch.empty(0, 16, device=device)}
        for case in cases(device, DTYPES[:2], FORMATS[:1]):
            once = case.rule.scale_from is ScaleFrom.TENSOR and not case.rule.power_of_two
            if once and (not aligned or case.tensor.shape[-1] % 16 == 0):
                tensors[case.label] = case.tensor
        for dtype in DTYPES[:2]:
            infinite = torch.ones(150, 48, dtype=dtype, device=device)
            infinite[140, 3] = -torch.inf
            tensors |= {f"infinite {dtype}": infinite, f"zeros {dtype}": torch.zeros_like(infinite)}
            tensors[f"transposed {dtype}"] = tensors[f"(256, 384) {dtype} e4m3 TENSOR False"].t()
        tensors["nan"] = torch.tensor([[1.0, torch.nan] * 8], device=device)
        if not aligned:
            tensors["scalar"] = torch.tensor(-3.0, device=device)
        for source in ScaleFrom:
            if source is not ScaleFrom.GIVEN:
                for power, smallest in ((False, 0.0), (True, 1e-12)):
                    rule = CastRule.of("e4m3", source, power_of_two=power)
                    yield dataclasses.replace(rule, smallest_amax=smallest), tensors


def by_hand(case: Case) -> tuple[float, float, int, int]:
    """Amax, scale, saturated, underflow: block by block in float64, from the definitions."""
    columns = case.tensor.shape[-1]
    values = case.tensor.detach().cpu().float().reshape(-1, columns)
    blocks = {
        ScaleFrom.ROW_BLOCKS: (1, 128),
        ScaleFrom.TILES: (128, 128),
        ScaleFrom.ROWS: (1, columns),
    }
    height, width = blocks.get(case.rule.scale_from, values.shape)
    least, saturated, underflow = float("inf"), 0, 0
    for top in range(0, values.shape[0], height):
        for left in range(0, columns, width):
            block = values[top : top + height, left : left + width].abs()
            scale = case.scale.cpu() if case.scale is not None else made(block.max(), case.rule)
            least = min(least, float(scale))
            scaled = block * scale
            # A scale made from the block leaves nothing beyond the format, but for a rounding.
            saturated += int((scaled > case.rule.largest).sum()) if case.scale is not None else 0
            underflow += int(((block > 0) & (scaled <= case.rule.vanishing)).sum())
    return float(values.abs().max()), least, saturated, underflow


def made(amax: Tensor, rule: CastRule) -> Tensor:
    if amax == 0:
        return torch.tensor(1.0)
    scale = torch.tensor(rule.largest) / amax
    if rule.power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale.double()))).float()
    return scale
