"""The small-GEMM rule: a model whose layers FP8 would slow down on this card stays in bf16.

A small GEMM saves less time in FP8 than its casts, and the host's work for them, cost. From which
sizes on FP8 pays is measured on a card (`fp8core.measured`) and not guessed: of a card, a recipe
or a size without figures the rule says nothing.

All Linears of a model are judged together, those of a block that will be fused in their fused
form. One by one would be wrong: where the device has enough to do, a small layer's host time is
hidden behind that of others, and a block with one layer in bf16 could not be fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fp8core.conversion.decide import Decision
from fp8core.conversion.find import as_linear, output_heads
from fp8core.measured import LayerTimes, cards, layer_times
from fp8core.measured.layer_times import LayerKind
from fp8core.spec import JobSpec
from fp8core.spec.step_graphs import graph_refusal

__all__ = ["SmallGemmRule", "SmallGemms", "drops_out", "keep_small_gemms", "small_gemm_rule"]

_Gemm = tuple[LayerKind, int, int]
"""What is computed, and its in and out features."""


@dataclass(frozen=True)
class SmallGemmRule:
    """``scaling``: the recipe's; ``tokens``: of a micro-batch, which each layer sees at once;
    ``graphed``: whether the spec lets steps that the host is the limit of be replayed as CUDA
    graphs, and layers were measured so."""

    times: LayerTimes
    scaling: str
    tokens: int
    graphed: bool = False

    def microseconds(self, gemm: _Gemm, graphed: bool) -> tuple[float, float] | None:
        """Of a layer in FP8 and in bf16; None where either is not known."""
        kind, width, out = gemm
        columns = (f"{name}_graphed" if graphed else name for name in (self.scaling, "bf16"))
        fp8, bf16 = (
            self.times.microseconds(kind, column, self.tokens, width, out) for column in columns
        )
        return None if fp8 is None or bf16 is None else (fp8, bf16)


@dataclass
class SmallGemms:
    """What the rule came to. ``kept``: the layers it keeps, with why; ``judged``: of how many
    Linears, and their ``fp8`` and ``bf16`` milliseconds of a micro-batch, where ``graphed`` without
    the host's; ``because``: why it judged none; ``resumed``: whether it was so when the job began.
    """

    kept: dict[str, str] = field(default_factory=dict)
    kept_linears: int = 0
    judged: int = 0
    fp8: float = 0.0
    bf16: float = 0.0
    card: str | None = None
    tokens: int | None = None
    graphed: bool = False
    because: str | None = None
    resumed: bool = False

    def to_json(self) -> dict[str, Any]:
        """``applied``, ``card``, ``tokens``, ``judged``, ``kept`` (counts of Linears),
        ``milliseconds`` (of all of them, ``fp8`` and ``bf16``), and ``says``: that in words."""
        return {
            "applied": self.because is None,
            "card": self.card,
            "tokens": self.tokens,
            "judged": self.judged,
            "kept": self.kept_linears,
            "milliseconds": {"fp8": round(self.fp8, 3), "bf16": round(self.bf16, 3)},
            "says": self.says,
        }

    @property
    def says(self) -> str:
        if self.resumed:
            return f"{self.kept_linears} Linear layers stay in bf16, as they did when the job began"
        if self.because is not None:
            return f"the small-GEMM rule does not apply: {self.because}"
        if not self.kept_linears:
            return self.measured
        return f"FP8 would gain nothing, and the model stays in bf16: {self.measured}"

    @property
    def measured(self) -> str:
        how = " in steps replayed as CUDA graphs" if self.graphed else ""
        return (
            f"its {self.judged} Linear layers take {self.fp8:.2f} ms in FP8 and {self.bf16:.2f} ms "
            f"in bf16, by times measured on {self.card} at {self.tokens} tokens{how}"
        )


def small_gemm_rule(spec: JobSpec, card: str | None) -> SmallGemmRule | str:
    """The rule for ``spec`` on the GPU of this name, or why it does not apply.

    ``card``: None where the job does not run on a GPU, or it is not known on which.
    """
    recipe, training = spec.recipe, spec.training
    if spec.conversion.small_gemm == "off":
        return "conversion.small_gemm is off"
    if recipe.engine != "te":
        return f"times were measured of the engine te, and this is {recipe.engine}"
    if any(getattr(recipe, "override_linear_precision", ())):
        return "no times were measured with override_linear_precision"
    if getattr(recipe, "backward_override", None) is not None:
        return "no times were measured with backward_override"
    if spec.adapter is not None:
        return "times were measured of layers that train, and adapters go beside frozen ones"
    if card is None:
        return "it is not known on which GPU the job runs"
    times = layer_times(card)
    if times is None:
        known = ", ".join(cards("layers")) or "none"
        return f"no times were measured on {card} (cards with times: {known})"
    if recipe.scaling not in times.columns:
        return f"no times of {recipe.scaling} scaling were measured on {card}"
    graphed = f"{recipe.scaling}_graphed" in times.columns and graph_refusal(spec) is None
    tokens = training.batch_size * training.sequence_length
    return SmallGemmRule(times, recipe.scaling, tokens, graphed)


def keep_small_gemms(
    model: nn.Module,
    decisions: Sequence[Decision],
    rule: SmallGemmRule | str | Mapping[str, str],
    *,
    fused: bool,
) -> SmallGemms:
    """Gives those of ``decisions`` a reason that the rule keeps.

    ``rule``: a str is why there is none; a mapping has the layers that it kept when the job began,
    and those are kept again. ``fused``: whether blocks will be fused.
    """
    if isinstance(rule, str):
        return SmallGemms(because=rule)
    wanted = [d for d in decisions if d.reason is None]
    if isinstance(rule, Mapping):
        none = None if rule else "it kept no layer when the job began"
        found = SmallGemms(dict(rule), resumed=bool(rule), because=none)
    else:
        found = _judge(model, wanted, rule, fused=fused)
    for decision in wanted:
        reason = found.kept.get(decision.layer.name)
        if reason is not None:
            decision.reason, decision.norm, decision.may_fuse = reason, None, True
            found.kept_linears += decision.layer.kind != "norm"
    return found


def _judge(
    model: nn.Module,
    wanted: Sequence[Decision],
    rule: SmallGemmRule,
    *,
    fused: bool,
) -> SmallGemms:
    # Whoever wants the head in FP8 has said so, and it is larger than anything measured.
    heads = output_heads(model)
    inner = [d for d in wanted if id(d.layer.module) not in heads]
    alone = {d.layer.name: d for d in inner if d.layer.kind != "norm"}
    found = SmallGemms(
        judged=len(alone),
        card=rule.times.card,
        tokens=rule.times.measured_tokens(rule.tokens),
    )
    if not alone:
        return SmallGemms(because="no Linear layer would be converted")
    gemms: list[_Gemm] = []
    blocks, whole = _fused_blocks(model, wanted) if fused else ([], False)
    for layers, of_block in blocks:
        gemms += of_block
        for name in layers:
            alone.pop(name, None)
    # As `fp8core.training.step_graphs` has it: whole models of fused blocks, without dropout.
    found.graphed = rule.graphed and whole and not drops_out(model)
    for decision in alone.values():
        linear = as_linear(decision.layer)
        gemms.append(("linear", linear.in_features, linear.out_features))
    for gemm in gemms:
        times = rule.microseconds(gemm, found.graphed)
        if times is None:
            _, width, out = gemm
            how = "times of replayed steps" if found.graphed else "times"
            of = f"{rule.times.card} of layers of {width} to {out}"
            return SmallGemms(because=f"no {how} were measured on {of}")
        found.fp8 += times[0] / 1000
        found.bf16 += times[1] / 1000
    if found.fp8 > found.bf16:
        reason = (
            f"conversion.small_gemm is auto, and FP8 would slow the model down: {found.measured}"
        )
        found.kept = {d.layer.name: reason for d in inner}
    return found


def drops_out(model: nn.Module) -> bool:
    """Whether it drops out activations anywhere; such steps are not replayed as CUDA graphs."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _fused_blocks(
    model: nn.Module, wanted: Sequence[Decision]
) -> tuple[list[tuple[list[str], list[_Gemm]]], bool]:
    """The layers and GEMMs of each block of which something would be fused.

    And whether that is all blocks of the model, each in both halves.
    """
    from fp8core.fusion.recognise import describe_block, find_blocks  # it imports this package

    converted = {d.layer.name for d in wanted}
    found, whole = [], True
    for name, block in find_blocks(model):
        halves = describe_block(name, block, getattr(model, "config", None))
        layers: list[str] = []
        gemms: list[_Gemm] = []
        attention, mlp = halves.attention, halves.mlp
        for half in (attention, mlp):
            if half is None or any(name not in converted for name in half.layers):
                whole = False
                continue
            layers += half.layers
            if half is attention:
                outs = sum(part.out_features for part in half.inputs)
                kind: LayerKind = "linear" if half.norm is None else "norm_linear"
                gemms.append((kind, half.inputs[0].in_features, outs))
                gemms.append(("linear", half.o.in_features, half.o.out_features))
            elif mlp is not None:
                first = mlp.inputs[0]
                if len(mlp.inputs) == 2:
                    gemms.append(("norm_mlp", first.in_features, first.out_features))
                else:  # of MLPs without a gate no times were measured
                    gemms.append(("norm_linear", first.in_features, first.out_features))
                    gemms.append(("linear", mlp.down.in_features, mlp.down.out_features))
        if layers:
            found.append((layers, gemms))
    return found, whole and bool(found)
