"""What is allowed in a spec, and probably not what was meant."""

from collections.abc import Iterable, Mapping
from typing import Any

from octrain_api.plans.schemas import Warning

# What a CUDA context and the allocator's slack take of a GPU beside the plan.
_SPARE_BYTES = 1 << 30
_LITTLE_FP8 = 0.5


def of_spec(spec: Mapping[str, Any]) -> Iterable[Warning]:
    """What the spec alone tells."""
    steps = spec["training"]["steps"]
    every = spec["checkpoint"]["every_steps"]
    if every == 0 or every >= steps:
        yield Warning(
            code="no_checkpoint",
            message="nothing is saved before the end: a failure begins the training anew",
            pointer="/checkpoint/every_steps",
        )
    if spec["evaluation"]["fraction"] == 0:
        yield Warning(
            code="no_evaluation",
            message="no text is held out: over-fitting will not be seen",
            pointer="/evaluation/fraction",
        )
    warm_up = spec["training"]["schedule"].get("warmup_steps", 0)
    if warm_up >= steps:
        yield Warning(
            code="all_warm_up",
            message=f"the learning rate rises for {warm_up} steps, and there are {steps}",
            pointer="/training/schedule/warmup_steps",
        )
    if spec["recipe"]["engine"] == "emulated":
        yield Warning(
            code="emulated",
            message="the engine `emulated` shows what FP8 does to the numbers; it is no faster",
            pointer="/recipe/engine",
        )


def of_plan(
    spec: Mapping[str, Any], plan: Mapping[str, Any], gpu_memory: Iterable[int]
) -> Iterable[Warning]:
    """What the plan tells; `gpu_memory` has the bytes of each GPU that could take the job."""
    conversion = plan["conversion"]
    if spec["recipe"]["engine"] != "amp" and not conversion["converted"]:
        because = "; ".join(conversion["kept_because"])
        yield Warning(
            code="nothing_converts",
            message=f"no layer would run in FP8: {because}",
            pointer="/conversion",
        )
    elif spec["recipe"]["engine"] != "amp" and plan["flops"]["fp8_share"] < _LITTLE_FP8:
        yield Warning(
            code="little_fp8",
            message=f"only {plan['flops']['fp8_share']:.0%} of the GEMMs' work is in FP8",
            pointer="/conversion",
        )
    small = plan.get("small_gemm") or {}
    if small.get("kept"):
        yield Warning(code="small_gemm", message=small["says"], pointer="/conversion/small_gemm")
    slower = [quoted["says"] for quoted in plan.get("measured") or () if quoted["speed_up"] < 1]
    if slower and conversion["converted"]:
        yield Warning(code="slower_in_fp8", message="; ".join(slower), pointer="/recipe")
    fusion = plan.get("fusion")
    if fusion and spec["conversion"]["fuse"] == "auto" and spec["recipe"]["engine"] == "te":
        whole, blocks = fusion["fused"], fusion["blocks"]
        if whole < blocks:
            because = "; ".join(fusion["not_because"])
            yield Warning(
                code="not_fused",
                message=f"{whole} of {blocks} blocks would be fused: {because}",
                pointer="/conversion/fuse",
            )
    largest = max(gpu_memory, default=None)
    total = plan["memory"]["total"]
    if largest is not None and total + _SPARE_BYTES > largest:
        yield Warning(
            code="memory",
            message=f"about {_gib(total)} are needed, and the largest GPU that could take it has "
            f"{_gib(largest)}: expect out_of_memory",
            pointer="/training/batch_size",
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
