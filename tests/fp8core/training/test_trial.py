"""Models that cannot run, or cannot keep packed documents apart, are refused before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.data.tokenizer_build import byte_tokenizer
from fp8core.data.tokenizers import Tokenizer
from fp8core.errors import ModelUnavailable, SpecRefused
from fp8core.models import LoadedModel, ModelSource, load
from fp8core.spec import JobSpec, parse_spec
from fp8core.training.trial import try_out

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SMALL}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}


def build(
    config: dict[str, Any], *, packing: bool = True, task: str = "causal_lm", **training: Any
) -> tuple[LoadedModel, JobSpec]:
    spec = parse_spec(
        {
            "model": {"source": "config", "config": config},
            "data": {"source": "builtin", "packing": packing},
            "recipe": {"engine": "amp"},
            "task": task,
            "training": {"sequence_length": 32, **training},
        }
    )
    tokenizer = Tokenizer(byte_tokenizer(encoder=task != "causal_lm"))
    return load(spec, device="cpu", dtype=torch.float32, tokenizer=tokenizer), spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("length", [2, 3, 32])
def test_a_sound_model_passes_and_is_left_as_it_was(
    dtype: torch.dtype, packing: bool, length: int
) -> None:
    loaded, spec = build(
        {**LLAMA, "attention_dropout": 0.5}, packing=packing, sequence_length=length
    )
    loaded.model.register_buffer("seen", torch.zeros(1))

    def count(model: torch.nn.Module, inputs: Any) -> None:
        model.seen.add_(1.0)  # type: ignore[operator]

    loaded.model.register_forward_pre_hook(count)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    random = torch.get_rng_state()
    try_out(loaded, spec, dtype)
    assert torch.equal(torch.get_rng_state(), random)
    assert not loaded.model.training
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "jamba", "num_key_value_heads": 2, **SMALL},  # attention and state space
        {"model_type": "recurrent_gemma", **SMALL},  # linear recurrence
    ],
    ids=lambda config: config["model_type"],
)
def test_a_state_that_runs_on_over_packed_documents_is_noticed(config: dict[str, Any]) -> None:
    loaded, spec = build(config)
    with pytest.raises(SpecRefused, match="does not keep packed documents apart") as refused:
        try_out(loaded, spec, torch.float32)
    assert refused.value.pointer == "/data/packing"
    try_out(*build(config, packing=False), torch.float32)


@pytest.mark.parametrize("kind", ["convbert", "fnet"])  # convolutions; a Fourier transform
def test_encoders_that_mix_neighbours_are_noticed(kind: str) -> None:
    loaded, spec = build({"model_type": kind, **SMALL}, task="masked_lm")
    with pytest.raises(SpecRefused, match="does not keep packed documents apart"):
        try_out(loaded, spec, torch.float32)


def test_a_model_that_takes_no_packed_mask_says_so() -> None:
    loaded, spec = build(MAMBA)
    with pytest.raises(SpecRefused, match="takes no packed documents") as refused:
        try_out(loaded, spec, torch.float32)
    assert refused.value.pointer == "/data/packing"
    try_out(*build(MAMBA, packing=False), torch.float32)


@pytest.mark.parametrize(
    "wrong", [{"head_dim": 16, "num_key_value_heads": 3}, {"attention_dropout": 5}]
)
def test_what_only_a_forward_pass_finds_wrong(wrong: dict[str, Any]) -> None:
    loaded, spec = build({**LLAMA, **wrong})
    with pytest.raises(SpecRefused, match="fails in its forward pass") as refused:
        try_out(loaded, spec, torch.float32)
    assert refused.value.pointer == "/model/config"


def test_weights_that_give_no_numbers_are_the_checkpoints_fault(tmp_path: Any) -> None:
    loaded, spec = build(LLAMA)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[1] = torch.nan  # type: ignore[operator]
    source = ModelSource(tmp_path, loaded.source.config, "a checkpoint")
    of_a_checkpoint = LoadedModel(loaded.model, loaded.config, source, (), ())
    with pytest.raises(ModelUnavailable, match="not finite"):
        try_out(of_a_checkpoint, spec, torch.float32)
