"""Properties of every spec and of every document, tried on random ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8core.spec import JobSpec, Problem, SpecInvalid, json_schema, parse_spec
from fp8core.spec.annotations import places_of_fields

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
CODES = {
    "unknown_key", "missing", "wrong_type", "out_of_range", "not_one_of", "too_long", "too_short",
    "bad_format", "not_finite", "conflict", "unsupported", "malformed", "duplicate_key",
    "too_large", "too_deep",
}  # fmt: skip

names = st.text("abcXYZ012_.-", min_size=1, max_size=12).map(lambda text: "n" + text)
paths = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)
counts = st.integers(1, 2**31 - 1)
booleans = st.booleans()
json_values = st.recursive(
    st.none()
    | booleans
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


def part(required: Mapping[str, Any] | None = None, **optional: Any) -> st.SearchStrategy[Any]:
    """Objects with the required values (constants or strategies) and some of the optional ones."""
    fixed = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in (required or {}).items()
    }
    return st.fixed_dictionaries(fixed, optional=optional)


models = st.one_of(
    part({"source": "huggingface", "id": names}, revision=st.none() | names),
    part({"source": "path", "path": paths}),
    part({"source": "config", "config": part({"model_type": names}, extra=json_values)}),
    part(
        {"source": "job", "job": "job_01ABC"},
        checkpoint=st.sampled_from(["model", "best", "last"]) | st.integers(0, 1000),
    ),
)
tokenizers = st.one_of(
    st.just("bytes"),
    part({"source": "bytes"}),
    part({"source": "huggingface", "id": names}),
    part({"source": "path", "path": paths}),
    part({"source": "train"}, vocab_size=st.integers(260, 100_000)),
)
common_data: dict[str, Any] = {
    "shuffle": booleans,
    "shuffle_seed": st.integers(0, 2**32 - 1),
    "epochs": counts,
}
text_data = st.one_of(
    part({"source": "text", "path": paths}, document_separator=st.none() | paths, **common_data),
    part({"source": "builtin"}, packing=booleans, append_end_of_text=booleans, **common_data),
    part(
        {"source": "huggingface", "id": names},
        split=st.sampled_from(["train", "test"]),
        columns=part(text=paths),
        **common_data,
    ),
)
chat_data = part(
    {"source": "jsonl", "path": paths, "format": "chat"},
    columns=part(messages=paths),
    **common_data,
)
labelled_data = part(
    {"source": "parquet", "path": paths, "format": "labelled"},
    labels=st.lists(paths, min_size=2, max_size=4, unique=True),
    columns=part(text=paths, label=paths),
    **common_data,
)
overrides = st.lists(booleans, min_size=3, max_size=3)
delayed: dict[str, Any] = {
    "margin": st.integers(0, 64),
    "interval": counts,
    "fp8_format": st.sampled_from(["HYBRID", "E4M3", "hybrid"]),
    "amax_history_len": st.integers(1, 1_000_000),
    "amax_compute_algo": st.sampled_from(["max", "most_recent"]),
    "override_linear_precision": overrides,
    "use_autocast_during_eval": booleans,
}
current: dict[str, Any] = {
    "fp8_format": st.sampled_from(["HYBRID", "E4M3"]),
    "use_power_2_scales": booleans,
    "override_linear_precision": overrides,
}
recipes = st.one_of(
    part(**delayed),
    part({"engine": "te"}, **delayed),
    part({"engine": "emulated", "scaling": "delayed"}, **delayed),
    part({"engine": "emulated", "scaling": "current"}, **current),
    part({"scaling": "current"}, **current),
    part({"scaling": "block"}, w_block_scaling_dim=st.sampled_from([1, 2])),
    part({"scaling": "mxfp8"}, backward_override=st.sampled_from([None, "dequantized"])),
    part({"scaling": "nvfp4"}, disable_rht=booleans),
    part(
        {"engine": "torchao"},
        scaling=st.sampled_from(["tensorwise", "rowwise", "rowwise_with_gw_hp"]),
    ),
    part({"engine": "amp", "dtype": "bf16"}),
    part({"backend": "TE", "amax_history_length": counts.filter(lambda n: n < 1000)}),
)
schedules = st.one_of(
    part({"name": "constant"}, warmup_steps=st.integers(0, 50)),
    part({"name": "linear"}, warmup_steps=st.integers(0, 50), final_lr_ratio=st.floats(0, 1)),
    part(final_lr_ratio=st.floats(0, 1)),
    part({"name": "warmup_stable_decay", "decay_steps": st.integers(1, 50)}),
)
trainings = part(
    {"steps": st.integers(100, 10**6)},
    batch_size=st.integers(1, 1000),
    sequence_length=st.integers(2, 10_000),
    optimizer=part(
        lr=st.floats(1e-30, 1000), betas=st.lists(st.floats(0, 0.9999), min_size=2, max_size=2)
    ),
    schedule=schedules,
    max_grad_norm=st.none() | st.floats(1e-3, 1e3) | st.integers(1, 9),
    precision=st.sampled_from(
        ["throughput", "method", {"weights": "bf16", "master_weights": "fp32"}, {}]
    ),
    early_stopping=st.none() | part({"patience": counts}, min_delta=st.floats(0, 1)),
)
tasks_and_data = st.one_of(
    st.fixed_dictionaries({"data": text_data | chat_data}),
    st.fixed_dictionaries({"task": st.just("masked_lm"), "data": text_data}),
    st.fixed_dictionaries({"task": st.just("sequence_classification"), "data": labelled_data}),
)
specs = st.builds(
    lambda sections, data: {**sections, **data},
    part(
        {"model": models, "recipe": recipes},
        tokenizer=tokenizers,
        training=trainings,
        name=st.none() | paths,
        labels=st.dictionaries(names, paths, max_size=3),
        priority=st.integers(-100, 100),
        evaluation=part(every_steps=counts, fraction=st.floats(0.01, 0.5)),
        conversion=part(skip=st.lists(paths, max_size=3), output_head=booleans),
        resources=part(gpus=st.integers(1, 1024)),
        checkpoint=part(keep_last=st.integers(1, 10)),
    ),
    tasks_and_data,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs)
def test_resolved_means_the_same_spec(document: dict[str, Any]) -> None:
    spec = parse_spec(document)
    resolved = spec.resolved()
    text = json.dumps(resolved, allow_nan=False)
    assert parse_spec(resolved) == spec
    assert parse_spec(text) == spec
    assert parse_spec(text.encode()).resolved() == resolved
    assert JobSpec.model_validate(resolved) == spec
    VALIDATOR.validate(resolved)


# Documents near the real ones: real keys and values, put together at random.
words = st.sampled_from(
    [
        *sorted(places_of_fields()),
        *("te", "amp", "torchao", "emulated", "delayed", "block", "jsonl", "path", "config", "job"),
        *("builtin", "train", "fp8_config", "backend", "AO", "TE", "opt_level", "cosine"),
        *("amax_history_length", "use_mxfp8_block_scaling", "throughput", "labelled", "chat"),
        *("E5M2", "hybrid", "xyzzy", "", "[key]", "a/b~c"),
    ]
)
near_values = st.recursive(
    st.none() | booleans | st.integers(-3, 3) | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=6),
    max_leaves=30,
)
near_specs = st.dictionaries(
    st.sampled_from(sorted(JobSpec.model_fields)),
    near_values | st.dictionaries(words, near_values, max_size=6),
)


@st.composite
def spoiled_specs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid spec in which some values have been replaced."""
    document: dict[str, Any] = json.loads(json.dumps(parse_spec(draw(specs)).resolved()))
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = document
        while True:
            key = draw(st.sampled_from(sorted(holder)))
            if not (isinstance(holder[key], dict) and holder[key] and draw(booleans)):
                break
            holder = holder[key]
        holder[key] = draw(near_values)
    return document


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(near_specs | spoiled_specs())
def test_a_document_is_a_spec_or_is_refused_in_our_own_words(document: dict[str, Any]) -> None:
    outcome = _parsed(document)
    if isinstance(outcome, JobSpec):
        assert parse_spec(outcome.resolved()) == outcome
        return
    assert outcome
    for problem in outcome:
        assert problem.code in CODES, problem
        assert "Input should" not in problem.message
        assert "validation error" not in problem.message
        assert problem.pointer == "" or problem.pointer.startswith("/")
        assert _leads_somewhere(document, problem.pointer), problem


def _parsed(document: Any) -> JobSpec | list[Problem]:
    try:
        return parse_spec(document)
    except SpecInvalid as refusal:
        return refusal.problems


def _leads_somewhere(document: Any, pointer: str) -> bool:
    """Whether a pointer names a value of the document, or a key one level below a value of it."""
    *parents, _ = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")]
    for key in parents[1:]:
        if isinstance(document, list):
            document = document[int(key)]
        elif isinstance(document, dict) and key in document:
            document = document[key]
        else:
            return False
    return True


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(json.dumps).map(str.encode))
def test_any_bytes_are_refused_cleanly(document: bytes) -> None:
    assert isinstance(_parsed(document), list)
