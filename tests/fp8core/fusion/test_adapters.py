"""LoRA beside the layers of fused blocks: numbers, proof, and what may stand there."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from fp8core.data.attention import model_inputs
from fp8core.data.batch import Batch
from fp8core.engines.gemm_watch import GemmWatch
from fp8core.engines.protocol import NormDescription
from fp8core.fusion import ModelFusion, PlannedAdapters, fuse, fused_inputs, high_precision
from fp8core.fusion import adapters as adapters_module
from fp8core.fusion.adapters import Adapters
from fp8core.fusion.high_precision import HighPrecisionParts
from fp8core.fusion.parts import AttentionHalf, Kernel
from fp8core.fusion.plain import PlainParts, plain_norm
from fp8core.spec import LoraAdapter
from tests.fp8core.fusion.berts import bert, encoder_batches
from tests.fp8core.fusion.families import batches, make
from tests.fp8core.fusion.test_blocks import counted

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2 = ("c_attn", "c_proj", "c_fc")
# Its three dense layers: of attention's output, and both of the MLP.
BERT = ("query", "key", "value", "dense")
SETTINGS = LoraAdapter(rank=4, alpha=6.0)


def planned(model: Any, keys: tuple[str, ...], settings: LoraAdapter = SETTINGS) -> PlannedAdapters:
    names = {
        name
        for name, _ in model.named_modules()
        if name.rpartition(".")[2] in keys and ".transform." not in name
    }
    return PlannedAdapters(frozenset(names), settings)


def wrap(model: Any, adapters: PlannedAdapters, *, size: float = 0.2, **more: Any) -> Any:
    """As a job does, but with matrices B that are not zeros: their deviation is ``size``."""
    settings = adapters.settings
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=sorted(adapters.layers),
        fan_in_fan_out=type(model).__name__.startswith("GPT2"),
        **more,
    )
    kinds = {type(model.get_submodule(name)) for name in adapters.layers}
    foreign = {kind for kind in kinds if kind.__name__ not in ("Linear", "Conv1D")}
    config._register_custom_module(dict.fromkeys(foreign, LoraLinear))
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return wrapped


def outputs(model: Any, batch: Batch, *, fused: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits at real tokens, and the gradients of a sum over them by parameter."""
    model.zero_grad()
    inputs = (
        fused_inputs(model, batch, torch.float32) if fused else model_inputs(batch, model.config)
    )
    torch.manual_seed(1)
    logits = model(**{**inputs, "use_cache": False}).logits[batch.document_ids >= 0]
    (logits.square() * torch.linspace(0.1, 1.0, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def reasons(fusion: ModelFusion) -> list[str | None]:
    return [row.reason for row in fusion.rows]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Llama", ALL),
        ("Llama", ("q_proj", "v_proj")),
        ("Llama", ("down_proj",)),
        ("Llama", ("up_proj",)),
        ("Llama, with biases", ALL),
        ("Qwen3", ALL),
        ("Gemma", ALL),
        ("GPT2", GPT2),
        ("GPT2", ("c_attn",)),
    ],
)
def test_adapters_beside_fused_layers_compute_what_they_do_beside_plain_ones(
    family: str, keys: tuple[str, ...], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws the same numbers in the same order, so that it can be compared too."""
    model = make(family)
    adapters = planned(model, keys, LoraAdapter(rank=4, alpha=6.0, dropout=dropout))
    plain = wrap(copy.deepcopy(model), adapters)
    fusion = fuse(model, PlainParts(), {}, adapters=adapters)
    assert reasons(fusion) == [None, None]
    wrapped = wrap(model, adapters)
    calls = counted(monkeypatch)
    for kind, batch in batches().items():
        expected, expected_gradients = outputs(plain, batch, fused=False)
        logits, gradients = outputs(wrapped, batch, fused=True)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        trained = {name for name, gradient in gradients.items() if gradient is not None}
        assert len(trained) == 2 * len(adapters.layers)
        assert all(".lora_" in name for name in trained)
        for name in trained:
            own, other = gradients[name], expected_gradients[name]
            assert own is not None
            assert other is not None
            assert (own - other).norm() <= 1e-4 * other.norm(), (kind, name)
            assert other.norm() > 0, name
    assert len(calls) == 2 * len(batches())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("keys", [BERT, ("query", "value")])
def test_adapters_beside_an_encoders_layers(keys: tuple[str, ...], dropout: float) -> None:
    """Its q, k and v have no norm before them; GELU is the model's; the norm is a residual too."""
    model = bert()
    adapters = planned(model, keys, LoraAdapter(rank=4, alpha=6.0, dropout=dropout))
    plain = wrap(copy.deepcopy(model), adapters)
    fusion = fuse(model, PlainParts(), {}, adapters=adapters)
    assert reasons(fusion) == [None, None]
    wrapped = wrap(model, adapters)
    for kind, batch in encoder_batches().items():
        expected, expected_gradients = outputs(plain, batch, fused=False)
        logits, gradients = outputs(wrapped, batch, fused=True)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        for name, own in gradients.items():
            other = expected_gradients[name]
            assert (own is None) == (other is None) == (".lora_" not in name), name
            if own is not None and other is not None:
                # What is added to all keys alike changes no softmax: 0, but for rounding.
                assert (own - other).norm() <= 1e-3 * other.norm() + 1e-4, (kind, name)


def test_an_mlp_without_adapters_stays_one_kernel() -> None:
    model = make("Llama")
    fusion = fuse(model, PlainParts(), {}, adapters=planned(model, ("q_proj", "v_proj")))
    kinds = fusion.classes
    assert kinds["model.layers.0.self_attn.k_proj"] == "NormLinear"
    assert kinds["model.layers.0.self_attn.o_proj"] == "Linear"
    assert {kinds[f"model.layers.0.mlp.{key}"] for key in ALL[4:]} == {"NormMLP"}
    other = make("Llama")
    kinds = fuse(other, PlainParts(), {}, adapters=planned(other, ("down_proj",))).classes
    assert kinds["model.layers.0.mlp.up_proj"] == "NormLinear"
    assert kinds["model.layers.0.mlp.down_proj"] == "Linear"


class InBf16(PlainParts):
    """As the parts of a GPU are proved."""

    def high_precision(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)


def test_all_adapters_pass_the_proof_in_bf16() -> None:
    model = make("Llama").bfloat16()
    fusion = fuse(model, InBf16(), {}, adapters=planned(model, ALL, LoraAdapter(rank=8)))
    assert reasons(fusion) == [None, None]


def _forgetting(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return output


def _shifted(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return output + (own_forward(self, output, x) - output).roll(1, dims=-1)


def _cut_off(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return own_forward(self, output, x.detach())


def _undropped(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters_module._Piece, "drops", property(lambda piece: False))
        return own_forward(self, output, x)


def _unscaled(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
    return output + (own_forward(self, output, x) - output) / 1.5


own_forward = Adapters.forward


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (_forgetting, "the output"),
        (_shifted, "the output"),
        (_cut_off, "the gradient of"),
        (_unscaled, "the output"),
    ],
)
@pytest.mark.parametrize("keys", [("v_proj",), ("down_proj",)])
@pytest.mark.parametrize("parts", [PlainParts, InBf16])
def test_the_proof_of_a_block_sees_what_is_wrong_with_its_adapters(
    wrong: Any,
    named: str,
    keys: tuple[str, ...],
    parts: type[PlainParts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by the wider bound of bf16, in which a GPU computes it."""
    model = make("Llama")
    if parts is InBf16:
        model.bfloat16()
    before = [name for name, _ in model.named_modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(Adapters, "forward", wrong)
    fusion = fuse(model, parts(), {}, adapters=planned(model, keys))
    half = "self_attn" if keys == ("v_proj",) else "mlp"
    other = "mlp" if half == "self_attn" else "self_attn"
    for index, row in enumerate(fusion.rows):
        assert row.fused == (f"model.layers.{index}.{other}",)
        assert str(row.reason).startswith(named), row.reason
        assert "differs by" in str(row.reason)
    # Nothing is left of the adapters that it was proved with.
    assert [name for name, _ in model.named_modules()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model.model.layers[0], "peft_config")
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dropout", [0.05, 0.5])
def test_the_proof_of_a_block_sees_that_its_adapters_drop_nothing_out(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are proved at the rate that they will have; where that is none, nothing is wrong."""
    monkeypatch.setattr(Adapters, "forward", _undropped)
    for rate in (dropout, 0.0):
        model = make("Llama")
        settings = LoraAdapter(rank=4, alpha=6.0, dropout=rate)
        fusion = fuse(model, PlainParts(), {}, adapters=planned(model, ("v_proj",), settings))
        for index, row in enumerate(fusion.rows):
            halves = {half.removeprefix(f"model.layers.{index}.") for half in row.fused}
            assert halves == ({"mlp"} if rate else {"self_attn", "mlp"})


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_the_proof_of_a_block_knows_the_rate_of_its_adapters_dropout(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[float] = set()

    def watched(self: Adapters, output: Tensor, x: Tensor) -> Tensor:
        seen.update(float(getattr(piece.dropout, "p", 0.0)) for piece in self._pieces())
        return own_forward(self, output, x)

    monkeypatch.setattr(Adapters, "forward", watched)
    model = make("Llama")
    settings = LoraAdapter(rank=4, alpha=6.0, dropout=rate)
    fuse(model, PlainParts(), {}, adapters=planned(model, ("v_proj",), settings))
    assert seen == {rate}


@pytest.mark.parametrize(
    ("key", "keys"), [("attention.self.query", BERT), (None, ("0.output.dense", "1.output.dense"))]
)
def test_the_proof_leaves_nothing_on_layers_that_are_not_proved(
    key: str | None, keys: tuple[str, ...]
) -> None:
    """Whose names end like those of others: attention.output.dense and output.dense."""
    model = bert()
    before = [name for name, _ in model.named_modules()]
    names = frozenset(name for name in before if name.endswith(tuple(f".{key}" for key in keys)))
    kept = {} if key is None else {f"bert.encoder.layer.{i}.{key}": "for a test" for i in range(2)}
    adapters = PlannedAdapters(names, SETTINGS)
    fusion = fuse(model, PlainParts(), kept, adapters=adapters)
    assert [name for name, _ in model.named_modules()] == before
    halves = {half for row in fusion.rows for half in row.fused}
    assert {f"bert.encoder.layer.{i}.mlp" for i in range(2)} <= halves
    assert len(halves) == (4 if key is None else 2)


def test_the_proof_draws_no_random_numbers_of_the_process() -> None:
    model = make("Llama")
    adapters = planned(model, ALL, LoraAdapter(rank=4, dropout=0.5))
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    fuse(model, PlainParts(), {}, adapters=adapters)
    assert torch.equal(torch.rand(4), expected)


class Called(nn.Module):
    """A kernel as a module, as those of the engines are."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self._kernel = kernel

    def forward(self, x: Tensor) -> Any:
        return self._kernel(x)


class ModuleParts(PlainParts):
    def norm_linear_and_norm(self, *arguments: Any) -> Any:
        return Called(super().norm_linear_and_norm(*arguments))

    def linear(self, *arguments: Any) -> Any:
        return Called(super().linear(*arguments))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_frozen_base_has_no_gemm_for_its_weights(dropout: float) -> None:
    """And each matrix of an adapter has its own two or three, in the adapter's name."""
    # No layer, nor any that are one GEMM together, has as many features as there are tokens.
    model = make("Llama", num_key_value_heads=4)
    adapters = planned(model, ALL, LoraAdapter(rank=4, dropout=dropout))
    fusion = fuse(model, ModuleParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters)
    batch = batches()["padded"]
    found = {name: pair for block in fusion.blocks for name, pair in block.modules.items()}
    with GemmWatch(
        {name: module for name, (module, _) in found.items()},
        torch.Size((1, batch.input_ids.numel())),
        {name: gemms for name, (_, gemms) in found.items()},
    ) as watch:
        outputs(wrapped, batch, fused=True)
    matrices = {f"{n}.lora_{letter}.default" for n in adapters.layers for letter in "AB"}
    assert set(watch.seen) == adapters.layers | matrices
    for name in watch.seen:
        # The embedding is frozen: nothing behind the first three layers needs a gradient.
        first = "layers.0.self_attn" in name and "o_proj" not in name and "lora_B" not in name
        wanted = {"fprop"} if first else {"fprop", "dgrad"}
        if name in matrices:
            wanted |= {"wgrad"}
        counts = {gemm: formats.total() for gemm, formats in watch.seen[name].items()}
        assert counts == dict.fromkeys(wanted, 1), name


def test_what_is_merged_or_disabled_adds_nothing_twice() -> None:
    model = make("Llama")
    adapters = planned(model, ALL)
    fuse(model, PlainParts(), {}, adapters=adapters)
    batch = batches()["packed"]
    bare, _ = outputs(model, batch, fused=True)
    wrapped = wrap(model, adapters)
    whole, _ = outputs(wrapped, batch, fused=True)
    assert (whole - bare).norm() > 0.1 * bare.norm()
    with wrapped.disable_adapter(), torch.no_grad():
        inputs = {**fused_inputs(wrapped, batch, torch.float32), "use_cache": False}
        logits = wrapped(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, bare, rtol=1e-4, atol=1e-5)
    wrapped.merge_adapter()
    with torch.no_grad():
        logits = wrapped(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-4)
    with wrapped.disable_adapter(), torch.no_grad():
        logits = wrapped(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, bare, rtol=1e-3, atol=1e-4)
    wrapped.merge_adapter()
    merged = wrapped.unload()
    with torch.no_grad():
        logits = merged(**inputs).logits[batch.document_ids >= 0]
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-4)


def test_rank_stabilised_scaling_is_the_modules_own() -> None:
    model = make("Llama")
    adapters = planned(model, ALL)
    plain = wrap(copy.deepcopy(model), adapters, use_rslora=True)
    fuse(model, PlainParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters, use_rslora=True)
    batch = batches()["padded"]
    expected, _ = outputs(plain, batch, fused=False)
    logits, _ = outputs(wrapped, batch, fused=True)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("active", [["default"], ["second"], ["default", "second"]])
def test_of_several_adapters_those_that_are_active_are_computed(active: list[str]) -> None:
    """Each with its own rank and scaling, and beside layers of its own."""
    model = make("Llama")
    adapters = planned(model, ALL)
    plain = copy.deepcopy(model)
    fuse(model, PlainParts(), {}, adapters=adapters)
    found = []
    for each, fused in ((plain, False), (model, True)):
        wrapped = wrap(each, adapters)
        second = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "up_proj"])
        wrapped.add_adapter("second", second)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if ".second." in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        wrapped.base_model.set_adapter(active)
        found.append(outputs(wrapped, batches()["packed"], fused=fused))
    (expected, expected_gradients), (logits, gradients) = found
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    trained = {name for name, gradient in gradients.items() if gradient is not None}
    count = {"default": 2 * 2 * 7, "second": 2 * 2 * 3}
    assert len(trained) == sum(count[key] for key in active)
    for name in trained:
        torch.testing.assert_close(
            gradients[name], expected_gradients[name], rtol=1e-3, atol=1e-3, msg=name
        )


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_that_is_more_than_lora_is_not_computed_wrongly(more: dict[str, Any]) -> None:
    model = make("Llama, with biases")
    adapters = planned(model, ("q_proj",))
    fuse(model, PlainParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters, **more)
    with pytest.raises(TypeError, match=r"beside .*q_proj computes more than LoRA does"):
        outputs(wrapped, batches()["padded"], fused=True)


def test_adapters_by_row_are_not_passed_by_in_silence() -> None:
    """``peft`` hands their names to the layers by hooks."""
    model = make("Llama")
    adapters = planned(model, ("q_proj",))
    fuse(model, PlainParts(), {}, adapters=adapters)
    wrapped = wrap(model, adapters).eval()
    inputs = fused_inputs(wrapped, batches()["padded"], torch.float32)
    with torch.no_grad():
        wrapped(**inputs)
    with torch.no_grad(), pytest.raises(TypeError, match=r"hooks on .*q_proj, as of an"):
        wrapped(**inputs, adapter_names=["__base__", "default"])


@pytest.mark.parametrize("key", ["k_proj", "down_proj"])
def test_an_adapter_that_a_block_was_not_told_of_is_not_passed_by_in_silence(key: str) -> None:
    model = make("Llama")
    fuse(model, PlainParts(), {}, adapters=planned(model, ("q_proj",)))
    wrapped = wrap(model, planned(model, ("q_proj", key)))
    with pytest.raises(TypeError, match=rf"{key} was replaced by a Linear after its block"):
        outputs(wrapped, batches()["padded"], fused=True)


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("Llama", "input_layernorm"),
        ("Llama", "post_attention_layernorm"),
        ("Llama", "self_attn"),
        ("Llama", "mlp"),
        ("Llama", "act_fn"),
        ("Qwen3", "self_attn"),
        ("GPT2", "ln_2"),
        ("GPT2", "attn"),
        ("Bert", "attention"),
        ("Bert", "attention.self"),
        ("Bert", "attention.output"),
        ("Bert", "attention.output.LayerNorm"),
        ("Bert", "intermediate"),
        ("Bert", "layer.0.output"),
    ],
)
def test_a_module_that_is_trained_as_a_whole_is_not_passed_by_in_silence(
    family: str, module: str
) -> None:
    """``peft`` trains a copy of it, which the fused half does not hold."""
    model = bert() if family == "Bert" else make(family)
    adapters = planned(model, ("q_proj", "c_attn", "query"))
    fusion = fuse(model, PlainParts(), {}, adapters=adapters)
    assert reasons(fusion) == [None, None]
    # Of a module within it the layer that has an adapter is trained as a whole with it.
    wrapped = wrap(model, planned(model, ("lm_head", "decoder")), modules_to_save=[module])
    batch = encoder_batches()["padded"] if family == "Bert" else batches()["padded"]
    with pytest.raises(TypeError, match=rf"{module} was replaced by a ModulesToSaveWrapper"):
        outputs(wrapped, batch, fused=True)


class OwnHeadNorms(PlainParts):
    """As the parts without FP8 have them: by kernels of their own, while a norm is the model's."""

    def __init__(self) -> None:
        self.by_kernels = 0

    def head_norm(self, half: AttentionHalf, name: str) -> Kernel:
        def normalised(heads: Tensor, norm: NormDescription, dtype: torch.dtype) -> Tensor:
            self.by_kernels += 1
            return plain_norm(heads, norm).to(dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(high_precision, "raise_unless_taken", lambda norm: None)
            kernel = HighPrecisionParts(torch.float32).head_norm(half, name)

        def computed(heads: Tensor) -> Tensor:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(high_precision, "normalise", normalised)
                return kernel(heads)

        return computed


@pytest.mark.parametrize("parts", [PlainParts, OwnHeadNorms])
def test_norms_of_heads_that_are_trained_as_a_whole_are_those_that_compute(
    parts: type[PlainParts],
) -> None:
    """Of the layers of a fused half they alone are called, or looked at, where they stand."""
    model = make("Qwen3")
    adapters = planned(model, ("v_proj",))
    plain = wrap(copy.deepcopy(model), adapters, modules_to_save=["q_norm", "k_norm"])
    made = parts()
    assert reasons(fuse(model, made, {}, adapters=adapters)) == [None, None]
    wrapped = wrap(model, adapters, modules_to_save=["q_norm", "k_norm"])
    by_kernels = made.by_kernels if isinstance(made, OwnHeadNorms) else None
    assert by_kernels is None or by_kernels > 0
    for each in (plain, wrapped):
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                if "_norm.modules_to_save" in name:
                    parameter.mul_(1.5)
    batch = batches()["packed"]
    expected, expected_gradients = outputs(plain, batch, fused=False)
    logits, gradients = outputs(wrapped, batch, fused=True)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    saved = {name for name in gradients if "_norm.modules_to_save" in name}
    assert len(saved) == 4
    for name in saved:
        own, other = gradients[name], expected_gradients[name]
        assert own is not None, name
        assert other is not None, name
        assert (own - other).norm() <= 1e-4 * other.norm(), name
    if isinstance(made, OwnHeadNorms):
        assert made.by_kernels == by_kernels


def test_a_fused_block_is_not_copied() -> None:
    """Some parts hold weights that a copy would share with the original."""
    model = make("Llama")
    fusion = fuse(model, PlainParts(), {})
    with pytest.raises(TypeError, match=r"model\.layers\.0 is fused, and a copy of it would"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"layers\.1 is fused"):
        wrap(model, planned(model, ("q_proj",)), modules_to_save=["layers.1"])
    fusion.remove_all()
    assert type(copy.deepcopy(model).model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_layer_that_is_replaced_by_something_else_is_not_passed_by_either() -> None:
    model = make("Llama")
    fuse(model, PlainParts(), {}, adapters=planned(model, ("q_proj",)))
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Linear(64, 64, bias=False)
    with pytest.raises(
        TypeError, match=r"q_proj was replaced by a torch\..*Linear, which is not LoRA's"
    ):
        outputs(model, batches()["padded"], fused=True)


def test_what_has_parameters_as_loras_and_computes_otherwise_is_not_passed_by() -> None:
    """Beside a Parameter, not a layer: what it adds goes into the weight."""
    model = make("Llama")
    adapters = planned(model, ("q_proj",))
    fuse(model, PlainParts(), {}, adapters=adapters)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"])
    wrapped = peft.get_peft_model(model, config)
    with pytest.raises(TypeError, match=r"q_proj was replaced by a peft.*ParamWrapper, which is"):
        outputs(wrapped, batches()["padded"], fused=True)
