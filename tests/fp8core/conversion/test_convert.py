"""What conversion keeps, on small models in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8core.conversion import convert, restore
from fp8core.errors import SpecRefused
from tests.peak_memory import printed_bytes


def rows_by_name(report):
    return {row.name: row for row in report.rows}


def test_goes_on_after_a_layer_that_it_must_keep(engine, conversion):
    model = nn.Sequential(nn.Linear(10, 32), nn.Linear(32, 32), nn.LayerNorm(32))
    report = convert(model, engine, conversion())
    assert report.to_json() == [
        {
            "name": "0",
            "from": "Linear",
            "to": None,
            "group": None,
            "reason": "in_features 10 is not a multiple of 16",
        },
        {"name": "1", "from": "Linear", "to": "PlainLinear", "group": None, "reason": None},
        {"name": "2", "from": "LayerNorm", "to": "PlainNorm", "group": None, "reason": None},
    ]
    assert [type(m).__name__ for m in model] == ["Linear", "PlainLinear", "PlainNorm"]


def test_gives_the_same_outputs_and_gradients(engine, conversion):
    model = nn.Sequential(
        nn.Linear(32, 48),
        nn.LayerNorm(48),
        nn.GELU(),
        nn.Linear(48, 16, bias=False),
        nn.RMSNorm(16, 1e-6),
    )
    reference = copy.deepcopy(model)
    convert(model, engine, conversion())
    x = torch.randn(16, 32)
    for m in (model, reference):
        m(x).pow(3).sum().backward()
    torch.testing.assert_close(model(x), reference(x))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_tied_weights_stay_tied_and_in_the_optimizer(engine, conversion):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.body = nn.Linear(32, 32)
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.body(self.embedding(ids)))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = convert(model, engine, conversion(output_head=True))
    assert rows_by_name(report)["head"].to == "PlainLinear"
    assert model.head.weight is model.embedding.weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.arange(64)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_output_head_stays_unless_it_is_asked_for(engine, conversion):
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    report = convert(model, engine, conversion())
    assert "conversion.output_head is false" in rows_by_name(report)["head"].reason
    assert type(model["head"]) is nn.Linear


def test_keeps_requires_grad_mode_dtype_and_parameter_identity(engine, conversion):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32).to(torch.bfloat16), nn.LayerNorm(32))
    model[0].weight.requires_grad_(False)
    model[0].eval()
    before = dict(model.named_parameters())
    convert(model, engine, conversion())
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    assert [m.training for m in model] == [False, True, True]
    assert model[1].weight.dtype is torch.bfloat16


def test_keeps_a_missing_bias_missing(engine, conversion):
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.LayerNorm(32, bias=False))
    size = sum(p.numel() for p in model.parameters())
    report = convert(model, engine, conversion())
    assert len(report.converted) == 2
    assert model[0].bias is None
    assert model[1].bias is None
    assert sum(p.numel() for p in model.parameters()) == size


def test_norms_of_every_make(engine, conversion):
    model = nn.Sequential(
        nn.LayerNorm([4, 32]),
        nn.LayerNorm(32, elementwise_affine=False),
        nn.GroupNorm(2, 32),
        nn.RMSNorm(32),
    )
    reference = copy.deepcopy(model[0])
    report = convert(model, engine, conversion())
    by_name = rows_by_name(report)
    assert by_name["0"].to == "PlainNorm"
    assert by_name["1"].reason == "it has no weight"
    assert "other dimensions" in by_name["2"].reason
    assert "eps is None" in by_name["3"].reason
    x = torch.randn(3, 4, 32)
    torch.testing.assert_close(model[0](x), reference(x))


def test_hooks_of_every_kind_still_run_and_can_be_removed(engine, conversion):
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer)
    calls: list[str] = []

    def note(name):
        return lambda *args, **kwargs: calls.append(name)

    removable = layer.register_forward_hook(note("forward"))
    layer.register_forward_hook(note("forward_kwargs"), with_kwargs=True)
    layer.register_forward_hook(note("always"), always_call=True)
    layer.register_forward_pre_hook(note("pre"))
    layer.register_full_backward_pre_hook(note("backward_pre"))
    layer.register_full_backward_hook(note("backward"))
    layer.register_state_dict_pre_hook(note("state_pre"))
    layer.register_state_dict_post_hook(note("state_post"))
    seen = []
    layer.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    layer.register_load_state_dict_post_hook(note("load_post"))

    report = convert(model, engine, conversion())
    x = torch.randn(16, 32, requires_grad=True)
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    expected = [
        "pre", "forward", "forward_kwargs", "always", "backward_pre", "backward",
        "state_pre", "state_post", "load_post",
    ]  # fmt: skip
    assert calls == expected
    assert seen == [model[0]]
    assert model[0].own_hook_calls == 1

    removable.remove()
    added = model[0].register_forward_hook(note("added"))
    restore(model, report)
    assert model[0] is layer
    calls.clear()
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == ["pre", "forward_kwargs", "always", "added", *expected[4:]]
    assert seen[1:] == [layer]
    added.remove()
    assert "own_hook_calls" not in layer.__dict__


def test_keeps_extra_buffers_and_attributes(engine, conversion):
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].register_buffer("mask", torch.ones(32))
    model[0].register_buffer("scratch", torch.ones(1), persistent=False)
    model[0].tag = "mine"
    keys = list(model.state_dict())
    report = convert(model, engine, conversion())
    assert list(model.state_dict()) == keys
    assert torch.equal(model[0].mask, torch.ones(32))
    assert model[0].tag == "mine"
    model[0].mask = torch.zeros(32)
    restore(model, report)
    assert torch.equal(model[0].mask, torch.zeros(32))
    assert list(model.state_dict()) == keys


def test_a_shared_module_is_replaced_once_and_stays_shared(engine, conversion):
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict(
        {"a": shared, "b": nn.Sequential(nn.ReLU(), shared), "c": nn.Linear(32, 32), "d": shared}
    )
    report = convert(model, engine, conversion())
    assert [row.name for row in report.rows] == ["a", "c"]
    assert type(model["a"]).__name__ == "PlainLinear"
    assert model["a"] is model["b"][1]
    assert model["a"] is model["d"]
    assert list(model) == ["a", "b", "c", "d"]
    restore(model, report)
    assert model["a"] is shared
    assert model["b"][1] is shared
    assert model["d"] is shared


def test_a_model_that_is_itself_a_linear(engine, conversion):
    model = nn.Linear(32, 32)
    weight = model.weight
    report = convert(model, engine, conversion())
    assert type(report.model).__name__ == "PlainLinear"
    assert report.model.weight is weight
    assert report.to_json()[0]["name"] == ""
    assert restore(report.model, report) is model
    assert model.weight is weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "forward", lambda x: x), "forward was replaced"),
        (
            lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
            "further parameters: scale",
        ),
        (lambda m: m.add_module("inner", nn.ReLU()), "modules of its own: inner"),
        (nn.utils.parametrizations.weight_norm, "ParametrizedLinear is a subclass"),
        (nn.utils.spectral_norm, "not a Parameter of its own"),
    ],
)  # fmt: skip
def test_keeps_a_linear_that_does_more_than_a_linear(engine, conversion, change, reason):
    layer = nn.Linear(32, 32)
    change(layer)
    model = nn.Sequential(layer, nn.Linear(32, 32))
    report = convert(model, engine, conversion())
    assert reason in report.rows[0].reason
    assert model[0] is layer
    assert report.rows[-1].reason is None


def test_keeps_what_is_held_outside_the_module_tree(engine, conversion):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    model[1].source = [model[0]]
    report = convert(model, engine, conversion())
    assert "outside the module tree" in report.rows[0].reason


def test_skip_and_only_patterns(engine, conversion):
    def build():
        return nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for _ in range(3)]
                )
            }
        )

    report = convert(build(), engine, conversion(skip=["layers.0.*", "*.1"]))
    assert [row.name for row in report.converted] == ["layers.1.0", "layers.2.0"]
    assert rows_by_name(report)["layers.0.0"].reason == "conversion.skip names it: layers.0.*"
    report = convert(build(), engine, conversion(only=["layers.[12].0"]))
    assert [row.name for row in report.converted] == ["layers.1.0", "layers.2.0"]
    report = convert(build(), engine, conversion(keep_first_last=True))
    assert [r.name for r in report.kept] == ["layers.0.0", "layers.2.0"]
    assert "first Linear" in report.kept[0].reason
    assert "last Linear" in report.kept[1].reason
    report = convert(build(), engine, conversion(linear=False))
    assert [row.name for row in report.converted] == [f"layers.{i}.1" for i in range(3)]
    report = convert(build(), engine, conversion(layer_norm=False))
    assert [row.name for row in report.converted] == [f"layers.{i}.0" for i in range(3)]


def test_a_pattern_that_matches_nothing_is_refused_and_nothing_changes(engine, conversion):
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(SpecRefused) as caught:
        convert(model, engine, conversion(skip=["0", "lm_haed"]))
    assert caught.value.pointer == "/conversion/skip/1"
    assert type(model[0]) is nn.Linear
    blocks = nn.ModuleDict({"block": nn.Sequential(nn.Linear(32, 32))})
    with pytest.raises(SpecRefused, match=r"'block\.\*' would match"):
        convert(blocks, engine, conversion(only=["block"]))


def test_an_engine_that_fails_half_way_leaves_the_model_as_it_was(make_engine, conversion):
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    modules, parameters = list(model), list(model.parameters())
    with pytest.raises(ArithmeticError):
        convert(model, make_engine(fails_at="2"), conversion())
    assert list(model) == modules
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_restore_after_training_gives_the_trained_weights_in_the_original_modules(
    engine, conversion
):
    model = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32, 1e-6), nn.Linear(32, 32, bias=False))
    originals, keys = list(model), list(model.state_dict())
    report = convert(model, engine, conversion())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(16, 32)).square().sum().backward()
    optimizer.step()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    trained = {k: v.clone() for k, v in model.state_dict().items()}
    model.eval()
    restore(model, report)
    assert list(model) == originals
    assert not any(m.training for m in model)
    assert list(model.state_dict()) == keys
    for key, value in model.state_dict().items():
        assert torch.equal(value, trained[key])
    report = convert(model, engine, conversion())
    with pytest.raises(ValueError, match="not in this model"):
        restore(nn.Sequential(nn.Linear(2, 2)), report)


def test_restore_finds_a_converted_layer_that_was_wrapped_since(engine, conversion):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

    model = nn.Sequential(nn.Linear(32, 32))
    original = model[0]
    report = convert(model, engine, conversion())
    model[0] = Adapter(model[0])
    restore(model, report)
    assert model[0].base_layer is original


def test_a_meta_model_cannot_be_converted(engine, conversion):
    with pytest.raises(ValueError, match="meta"):
        convert(nn.Sequential(nn.Linear(32, 32, device="meta")), engine, conversion())


def test_conversion_takes_no_memory_for_weights():
    """Peak resident memory while converting 16 layers of 12 MiB, in a process of its own."""
    script = """
        import torch
        from torch import nn
        from tests.peak_memory import watched_peak
        from fp8core import engines
        from fp8core.conversion import convert
        from fp8core.spec import Conversion, parse_spec
        torch.set_num_threads(1)
        spec = parse_spec({"model": {"source": "config", "config": {"model_type": "llama"}},
                           "data": {"source": "builtin"}, "recipe": {"engine": "emulated"}})
        engine = engines.create(spec.recipe, torch.device("cpu"))
        from transformers.pytorch_utils import Conv1D
        shapes = [(1024, 3072), (3072, 1024)]
        model = nn.Sequential(
            *[nn.Linear(*shapes[i % 2]) for i in range(8)],
            *[Conv1D(*shapes[i % 2]) for i in range(4)],
            *[nn.MultiheadAttention(1024, 8) for _ in range(4)],
        )
        with torch.no_grad():
            for p in model.parameters(): p.fill_(1.0)
        with watched_peak() as grown:
            report = convert(model, engine, Conversion())
        assert len(report.converted) == 8 + 4 + 4 * 4, report.to_json()
        print(grown[0])
    """
    assert printed_bytes(script) < 1.1 * 1024 * 3072 * 4
