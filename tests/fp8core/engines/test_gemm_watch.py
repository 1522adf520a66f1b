"""The GEMM watch on modules that compute several layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8core.engines.gemm_watch import GemmWatch


class Gated(nn.Module):
    """Gate and up in one GEMM, then down, which is in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(40, 8))
        self.down = nn.Parameter(torch.randn(8, 20, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.both).chunk(2, dim=-1)
        return F.linear((gate * up).bfloat16(), self.down)


def test_a_fused_modules_gemms_are_those_of_its_layers() -> None:
    module = Gated()
    together = {"mlp": (("mlp.gate", "mlp.up"), ("mlp.down",))}
    x = torch.randn(3, 16, 8, requires_grad=True)
    with GemmWatch({"mlp": module}, torch.Size([3, 16]), together) as watch:
        for _ in range(2):
            module(x).float().sum().backward()
    assert set(watch.seen) == {"mlp.gate", "mlp.up", "mlp.down"}
    for name, kind in (("mlp.gate", "fp32"), ("mlp.up", "fp32"), ("mlp.down", "bf16")):
        assert watch.seen[name] == {gemm: {(kind, kind): 2} for gemm in ("fprop", "dgrad", "wgrad")}


def test_of_a_module_that_gives_two_tensors_the_first_is_its_own() -> None:
    class Both(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(input), input

    module = Both(8, 40)
    x = torch.randn(3, 16, 8, requires_grad=True)
    with GemmWatch({"both": module}, torch.Size([3, 16])) as watch:
        output, given = module(x)
        (output.sum() + given.sum()).backward()
    pair = ("fp32", "fp32")
    assert watch.seen["both"] == {gemm: {pair: 1} for gemm in ("fprop", "dgrad", "wgrad")}
