"""Plans against counts made by hand and against the real thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from fp8core import engines
from fp8core.conversion import convert, decide
from fp8core.conversion.shape_rules import shape_rules
from fp8core.data.attention import model_inputs
from fp8core.errors import SpecRefused
from fp8core.models import load, plan
from fp8core.models.adapter_targets import adapter_targets
from fp8core.models.dry_run import _batch, dry_run
from fp8core.models.memory import estimate_memory, linear_widths
from fp8core.spec import parse_spec
from fp8core.training.adapter import attach


def test_parameters_tokens_and_flops_by_hand(make_spec, llama_config):
    spec = make_spec(
        llama_config,
        training={"batch_size": 2, "sequence_length": 64, "gradient_accumulation": 3},
    )
    made = plan(spec)
    attention = 64 * 64 * 2 + 64 * 32 * 2
    gemm_weights = 2 * (attention + 3 * 64 * 160) + 64 * 272
    total = gemm_weights + 272 * 64 + (2 * 2 + 1) * 64
    assert made.parameters == {"total": total, "trainable": total, "embedding": 272 * 64}
    assert made.tokens_per_step == 2 * 64 * 3
    assert made.flops.gemm == 6 * gemm_weights * made.tokens_per_step
    assert made.flops.attention == 12 * 2 * 4 * 16 * 64 * made.tokens_per_step
    assert made.flops.total == made.flops.gemm + made.flops.attention
    assert made.flops.fp8_share == pytest.approx(1 - 64 * 272 / gemm_weights)
    json.dumps(made.to_json())


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({}, None),
        ({"training": {"cuda_graphs": "off"}}, "training.cuda_graphs is off"),
        ({"conversion": {"fuse": "none"}}, "not all blocks are fused in both halves"),
        ({"training": {"gradient_accumulation": 2}}, "more than 1"),
    ],
)
def test_graphs_are_told_of_and_in_no_total(make_spec, llama_config, fields, refusal):
    te = {"recipe": {"engine": "te"}}
    made = plan(make_spec(llama_config, **te, **fields))
    graphs = made.cuda_graphs
    if refusal is None:
        assert graphs["refusal"] is None
        # The condition of the trainer: `fp8core.training.step_graphs`.
        assert graphs["bytes_needed"] == 2 * made.memory["total"]
        assert str(graphs["says"]).startswith("not counted; captured where the GPU has ")
        off = plan(make_spec(llama_config, **te, training={"cuda_graphs": "off"}))
        assert off.memory == made.memory
    else:
        assert refusal in str(graphs["refusal"])
        assert graphs["bytes_needed"] is None
        assert graphs["says"] == f"none: {graphs['refusal']}"


@pytest.mark.parametrize(
    ("dropout", "refusal"), [(0.0, None), (0.1, "the model drops out activations")]
)
def test_graphs_are_none_where_the_embeddings_drop_out(make_spec, dropout, refusal):
    """Blocks without dropout are fused all the same."""
    rates = {"embd_pdrop": dropout, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    made = plan(make_spec(gpt2 | rates, recipe={"engine": "te"}))
    assert made.fusion["fused"] == 2
    assert made.cuda_graphs["refusal"] == refusal


def test_a_plan_without_a_gpu_has_no_graphs(make_spec, llama_config):
    recipe = {"engine": "amp", "dtype": "bf16"}
    made = plan(make_spec(llama_config, recipe=recipe, resources={"device": "cpu"}))
    assert made.cuda_graphs["refusal"] == "there are graphs on CUDA devices only"


def test_a_tied_head_counts_once_as_parameters_and_fully_as_work(make_spec, llama_config):
    untied = plan(make_spec(llama_config))
    tied = plan(make_spec({**llama_config, "tie_word_embeddings": True}))
    assert untied.parameters["total"] - tied.parameters["total"] == 64 * 272
    assert untied.flops == tied.flops


def test_memory_rows_follow_the_formats(make_spec, llama_config):
    method = plan(make_spec(llama_config))
    size = method.parameters["total"]
    assert method.memory["weights"] == 4 * size
    assert method.memory["master_weights"] == 0
    assert method.memory["gradients"] == 4 * size
    assert method.memory["optimizer_states"] == 8 * size
    assert method.checkpoint_bytes == 12 * size
    # Gradients and activations are not whole at the same time.
    rows = sum(v for k, v in method.memory.items() if k != "total")
    assert 0.5 * rows < method.memory["total"] < rows
    precision = {"preset": "throughput", "master_weights": "fp32"}
    fast = plan(make_spec(llama_config, training={"precision": precision}))
    assert fast.memory["weights"] == 2 * size
    assert fast.memory["master_weights"] == 4 * size
    assert fast.memory["gradients"] == 2 * size
    assert fast.memory["optimizer_states"] == 4 * size
    assert fast.checkpoint_bytes == 10 * size
    checkpointed = plan(make_spec(llama_config, training={"gradient_checkpointing": True}))
    assert checkpointed.memory["activations"] < method.memory["activations"]
    half = {"gradient_checkpointing": True, "recomputed_blocks": 1}
    halved = plan(make_spec(llama_config, training=half)).memory["activations"]
    middle = (checkpointed.memory["activations"] + method.memory["activations"]) / 2
    assert halved == pytest.approx(middle, rel=0.01)


def test_states_of_8_bits_are_counted_with_their_exponents(make_spec, llama_config):
    made = plan(make_spec(llama_config, training={"precision": "memory"}))
    norms = 64 * 5
    matrices = made.parameters["total"] - norms
    # A block for each 256 elements of a matrix; the smallest here has 64 x 32.
    assert made.memory["optimizer_states"] == 2 * (matrices + matrices // 256 + 4 * norms)
    adapted = plan(make_spec(llama_config, adapter={}, training={"precision": "memory"}))
    trained = adapted.parameters["trainable"]
    assert 2 * trained < adapted.memory["optimizer_states"] < 2.05 * trained
    assert adapted.memory["gradients"] == 2 * trained


MEASURED = {
    # Peak GiB of a step of the Llama-3.2-3B shape, 2 x 4096 tokens, on an H200, without a mask.
    "bf16 throughout": ({"engine": "amp"}, "throughput", {"fuse": "none"}, 58.0),
    "bf16 throughout, fused": ({"engine": "amp"}, "throughput", {}, 40.2),
    "fp32 under bf16 autocast": ({"engine": "amp"}, "method", {"fuse": "none"}, 88.6),
    "te delayed, bf16 stored, head in FP8": ({}, "throughput", {"output_head": True}, 43.4),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_near_what_an_h200_used(make_spec, name):
    recipe, precision, conversion, measured = MEASURED[name]
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "head_dim": 128,
        "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": precision}
    made = plan(make_spec(config, training=training, recipe=recipe, conversion=conversion))
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.02)
    assert made.memory["total"] == max(made.memory_moments.values())


MEASURED_8B = {
    # The same of the Llama-3-8B shape, whose head is not its embedding, in FP8 too.
    "bf16 throughout": ("throughput", {}, 87.5),
    "8-bit states": ("memory", {"recomputed_blocks": 4}, 68.3),
    "8-bit states, stored in fp32": (
        {"preset": "memory", "weights": "fp32"}, {"recomputed_blocks": 4}, 83.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED_8B)
def test_the_estimate_of_an_8b_model_is_near_what_an_h200_used(make_spec, name):
    precision, recompute, measured = MEASURED_8B[name]
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": precision, **recompute}
    training["gradient_checkpointing"] = bool(recompute)
    made = plan(make_spec(config, training=training, recipe={}, conversion={"output_head": True}))
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.01)


MEASURED_1B = {
    # The same of the Llama-3.2-1B shape, the head in bf16 (docs/recipes.md).
    "all GEMMs in FP8": ({}, "auto", 18.7),
    "wgrad in bf16": ({"override_linear_precision": [False, False, True]}, "auto", 20.6),
    "wgrad in bf16, not fused": (
        {"override_linear_precision": [False, False, True]}, "none", 31.9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED_1B)
def test_the_estimate_of_chosen_gemms_is_near_what_an_h200_used(make_spec, name):
    recipe, fuse, measured = MEASURED_1B[name]
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    training = {"batch_size": 2, "sequence_length": 4096, "precision": "throughput"}
    recipe = {"engine": "te", **recipe}
    conversion = {"fuse": fuse, "small_gemm": "off"}
    made = plan(make_spec(config, training=training, recipe=recipe, conversion=conversion))
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.01)


MEASURED_RUNS = {
    # Peak GiB of whole runs of the trainer on an H200, 2 x 2048 tokens, stored in fp32.
    "bf16, layer by layer": {"125M": 5.28, "1B": 30.01, "3B": 65.24},
    "bf16": {"125M": 3.38, "1B": 22.88, "3B": 54.77},
    "te": {"125M": 3.08, "1B": 20.96, "3B": 50.91},
}


@pytest.mark.parametrize("shape", ["125M", "1B", "3B"])
@pytest.mark.parametrize("recipe", MEASURED_RUNS)
def test_the_estimate_is_near_what_runs_of_three_sizes_used(recipe, shape, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from plan_memory import spec_of

    made = plan(parse_spec(spec_of(shape, recipe, 2, 2048)))
    measured = MEASURED_RUNS[recipe][shape]
    assert made.memory["total"] / 2**30 == pytest.approx(measured, rel=0.03)


def test_what_fused_blocks_keep_by_hand(make_spec, llama_config):
    kept = {}
    for scaling in ("delayed", "block"):
        recipe = {"engine": "te", "scaling": scaling}
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        made = plan(make_spec(llama_config, recipe=recipe, training=training))
        assert made.fusion == {
            "blocks": 2, "fused": 2, "fused_in_part": 0, "loss": True, "not_because": {},
        }  # fmt: skip
        kept[scaling] = made.memory["activations"]
    # Bytes a token of a block. Inputs of the halves, q, k, v and attention's output in bf16; fp32
    # reciprocal deviations and softmax statistics; the inputs of the q, k, v and o GEMMs in FP8.
    attention = 2 * 64 + 2 * (64 + 32 + 32 + 64) + 4 * (1 + 4) + 64 + 64
    # The normalised input twice in FP8; gate and up in bf16; their product in FP8.
    mlp = 2 * 64 + 4 + 2 * 64 + 2 * 2 * 160 + 160
    # The last norm's input and, in bf16, the head's; then logits and the head's gradient. Token
    # ids, which the embedding keeps, and the rotation, which fused blocks compute themselves.
    around = 128 * (2 * 64 + 2 * 64 + 2 * 272 + 8) + 2 * 64 * 272
    expected = 2 * 128 * (attention + mlp) + around
    assert kept["delayed"] == expected
    assert kept["block"] == kept["delayed"] + 2 * 128 * 160


@pytest.mark.parametrize("recipe", [{"engine": "te"}, {"engine": "amp"}])
def test_what_fused_blocks_keep_beside_adapters(make_spec, llama_config, recipe):
    """Of a frozen base what its dgrads need; and the inputs of the adapters."""
    kept = {}
    for target in ("q_proj", "o_proj", "up_proj", "down_proj"):
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        adapter = {"rank": 4, "target_modules": [f"*.{target}"]}
        made = plan(make_spec(llama_config, recipe=recipe, training=training, adapter=adapter))
        assert (made.fusion["fused"], made.fusion["not_because"]) == (2, {})
        kept[target] = made.memory["activations"]
    # Attention's output is kept anyway. Bytes a token of the other three, 64 or 160 wide in bf16;
    # LayerNormLinear keeps what goes into it in FP8 too.
    of_norm = 64 * (3 if recipe["engine"] == "te" else 2)
    assert kept["q_proj"] - kept["o_proj"] == 2 * 128 * of_norm
    assert kept["down_proj"] - kept["up_proj"] == 2 * 128 * (2 * 160 - of_norm)
    # Where none stands before the first MLP, nothing of the first attention is kept, nor are the
    # casts of its weights.
    first = 128 * (2 * 64 + 2 * (64 + 32 + 32 + 64) + 4 * (1 + 4))
    first += 2 * 64 * (64 + 32) if recipe["engine"] == "te" else 0
    assert kept["o_proj"] - kept["up_proj"] == first - 2 * 128 * of_norm


@pytest.mark.parametrize(
    ("recipe", "training", "lasts"),
    [
        ({}, {}, True),
        ({"scaling": "current"}, {}, True),
        ({"interval": 2}, {}, False),
        ({"override_linear_precision": [False, False, True]}, {}, False),
        ({}, {"gradient_checkpointing": True}, False),
    ],
)
def test_casts_last_where_the_next_micro_batch_uses_them(
    make_spec, llama_config, recipe, training, lasts
):
    held = []
    for accumulation in (1, 2):
        training |= {"gradient_accumulation": accumulation, "precision": "throughput"}
        made = plan(make_spec(llama_config, recipe={"engine": "te", **recipe}, training=training))
        held.append(made.memory_moments["optimizer"])
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    # In both orders.
    assert held[1] - held[0] == (2 * weights if lasts else 0)


@pytest.mark.parametrize("fuse", ["auto", "none"])
def test_a_dgrad_in_bf16_keeps_no_cast_of_the_weights(make_spec, llama_config, fuse):
    made = []
    for override in ([False, True, False], [True, False, False]):
        recipe = {"engine": "te", "override_linear_precision": override}
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        spec = make_spec(llama_config, recipe=recipe, training=training, conversion={"fuse": fuse})
        made.append(plan(spec).memory)
    without, with_casts = made
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    assert without["compute_weight_copies"] == 0
    assert with_casts["compute_weight_copies"] == 2 * weights
    assert without["activations"] == with_casts["activations"]


@pytest.mark.parametrize("override", [[False, True, False], [False, False, True]])
def test_what_blocks_of_chosen_gemms_keep_beside_adapters(make_spec, llama_config, override):
    """What a wgrad in bf16 would read, frozen or not, is what the adapters are given."""
    kept = {}
    for target in ("q_proj", "o_proj", "up_proj", "down_proj"):
        recipe = {"engine": "te", "override_linear_precision": override}
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        adapter = {"rank": 4, "target_modules": [f"*.{target}"]}
        made = plan(make_spec(llama_config, recipe=recipe, training=training, adapter=adapter))
        assert (made.fusion["fused"], made.fusion["not_because"]) == (2, {})
        kept[target] = made.memory["activations"]
    more = 0 if override[2] else 2
    assert kept["q_proj"] - kept["o_proj"] == 2 * 128 * more * 64
    assert kept["down_proj"] - kept["up_proj"] == 2 * 128 * more * (160 - 64)


def test_the_plan_says_what_is_not_fused_and_why(make_spec, llama_config):
    te = {"engine": "te"}
    none = plan(make_spec(llama_config, recipe=te, conversion={"fuse": "none"})).fusion
    assert none["fused"] == 0
    assert none["not_because"] == {"conversion.fuse is none": 1}
    partly = plan(make_spec(llama_config, recipe=te, conversion={"skip": ["*.0.*k_proj"]})).fusion
    assert (partly["fused"], partly["fused_in_part"]) == (1, 1)
    (reason,) = partly["not_because"]
    assert reason.startswith("self_attn.k_proj is kept: ")
    adapted = plan(make_spec(llama_config, recipe=te, adapter={"target_modules": ["*.q_proj"]}))
    assert (adapted.fusion["fused"], adapted.fusion["not_because"]) == (2, {})
    for fields in (
        {"override_linear_precision": [True, True, True]},
        {"scaling": "block", "backward_override": "dequantized"},
    ):
        made = plan(make_spec(llama_config, recipe={**te, **fields})).fusion
        assert made["fused"] == 0
        (reason,) = made["not_because"]
        assert next(field for field in fields if field != "scaling") in reason
    chosen = {**te, "override_linear_precision": [False, False, True]}
    made = plan(make_spec(llama_config, recipe=chosen)).fusion
    assert (made["fused"], made["not_because"]) == (2, {})


def test_what_a_fused_block_of_chosen_gemms_keeps(make_spec, llama_config):
    """The input of a GEMM whose wgrad is in bf16 is kept in that, and in FP8 else."""
    kept = {}
    for override in ([False, True, False], [False, True, True]):
        recipe = {"engine": "te", "override_linear_precision": override}
        training = {"precision": "throughput", "batch_size": 1, "sequence_length": 128}
        made = plan(make_spec(llama_config, recipe=recipe, training=training))
        assert made.fusion["fused"] == 2
        kept[override[2]] = made.memory["activations"]
    # A token of a block: what goes into q, k, v, into gate and up, and into down takes a byte more;
    # what goes into o is attention's output, which is kept in bf16 in any case.
    more = 64 + 64 + 160 - 64
    assert kept[True] - kept[False] == 2 * 128 * more


def test_bf16_is_fused_on_a_gpu_and_the_loss_whatever_becomes_of_the_blocks(
    make_spec, llama_config
):
    def fusion(**recipe):
        return plan(make_spec(llama_config, recipe=recipe)).fusion

    assert fusion(engine="amp")["fused"] == 2
    fp16 = fusion(engine="amp", dtype="fp16")
    assert (fp16["fused"], fp16["loss"]) == (0, False)
    assert fp16["not_because"] == {"blocks are fused without FP8 in bf16 only, and this is fp16": 1}
    torchao = fusion(engine="torchao")
    assert (torchao["fused"], torchao["loss"]) == (0, True)
    on_cpu = plan(make_spec(llama_config, recipe={"engine": "amp"}, resources={"device": "cpu"}))
    assert (on_cpu.fusion["fused"], on_cpu.fusion["loss"]) == (0, False)


def test_what_a_block_fused_in_bf16_keeps(make_spec, llama_config):
    kept = {}
    for fuse in ("auto", "none"):
        training = {"precision": "throughput", "batch_size": 1, "sequence_length": 128}
        spec = make_spec(
            llama_config, recipe={"engine": "amp"}, training=training, conversion={"fuse": fuse}
        )
        kept[fuse] = plan(spec).memory["activations"]
    # Bytes a token of a block: inputs of the halves, the inputs of the q, k, v and of the gate and
    # up GEMMs, q, k, v, attention's output, gate and up and their product in bf16; fp32 reciprocal
    # deviations and softmax statistics.
    attention = 2 * 64 + 2 * 64 + 2 * (64 + 32 + 32 + 64) + 4 * (1 + 4)
    mlp = 2 * 64 + 2 * 64 + 4 + 2 * 2 * 160 + 2 * 160
    # Around: as where blocks are fused in FP8, but for the last norm, which is the model's own and
    # keeps its input in fp32 and the deviations too.
    around = 128 * (2 * 64 + 4 * 64 + 4 + 2 * 64 + 2 * 272 + 8) + 2 * 64 * 272
    assert kept["auto"] == 2 * 128 * (attention + mlp) + around
    assert kept["auto"] < 0.8 * kept["none"]


@pytest.mark.parametrize("engine", ["te", "amp"])
def test_fused_norms_of_heads_keep_their_inputs(make_spec, llama_config, engine):
    kept = {}
    for kind in ("llama", "qwen3"):
        config = {**llama_config, "model_type": kind, "head_dim": 16}
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        made = plan(make_spec(config, recipe={"engine": engine}, training=training))
        assert made.fusion["fused"] == 2
        kept[kind] = made.memory["activations"]
    # q and k before their norms, 4 and 2 heads of 16 in bf16, of two blocks.
    assert kept["qwen3"] - kept["llama"] == 2 * 128 * 2 * (64 + 32)


BERT = {
    "model_type": "bert", "vocab_size": 272, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "activation"),
    [("te", "gelu"), ("te", "gelu_pytorch_tanh"), ("amp", "gelu"), ("amp", "gelu_pytorch_tanh")],
)
def test_what_a_fused_block_of_an_encoder_keeps_by_hand(make_spec, engine, activation):
    """No norm is before its q, k and v, whose GEMM keeps its input in the GEMM's format alone."""
    kept = []
    for layers in (1, 2):
        config = {**BERT, "hidden_act": activation, "num_hidden_layers": layers}
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        made = plan(
            make_spec(config, recipe={"engine": engine}, training=training, task="masked_lm")
        )
        assert made.fusion["fused"] == layers
        kept.append(made.memory["activations"])
    # Bytes a token: q, k, v and attention's output in bf16, and four heads' statistics in fp32; the
    # inputs of the GEMMs of q, k and v and of o in FP8. In bf16 the latter is attention's output.
    attention = 2 * 4 * 64 + 4 * 4 + (64 + 64 if engine == "te" else 2 * 64)
    if engine == "te":
        # The sum in bf16, its norm's deviation, both inputs in FP8 and what goes into GELU; one
        # module for both GEMMs keeps the first both ways round. The last norm's input in bf16.
        mlp = 2 * 64 + 4 + 2 * 160 + 64 + 160 + 2 * 64
        mlp += 64 if activation == "gelu_pytorch_tanh" else 0
    else:
        # The sum in fp32, as the last norm before gave it; the last norm is the model's own.
        mlp = 4 * 64 + 4 + 2 * 160 + 2 * (64 + 160) + 4 * 64 + 8
    assert kept[1] - kept[0] == 128 * (attention + mlp)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ({"engine": "te"}, 2),
        ({"engine": "amp"}, 2),
        ({"engine": "te", "override_linear_precision": [False, True, False]}, 2),
        # Its wgrad would read the same, and keeps it by itself.
        ({"engine": "te", "override_linear_precision": [False, False, True]}, 0),
    ],
)
def test_a_fused_encoder_keeps_the_inputs_of_its_adapters(make_spec, recipe, more):
    kept = {}
    for target in ("query", "attention.output.dense"):
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        adapter = {"rank": 4, "target_modules": [f"*.{target}"]}
        made = plan(
            make_spec(
                BERT, recipe=recipe, training=training, adapter=adapter, task="masked_lm",
            )
        )  # fmt: skip
        assert made.fusion["fused"] == 2
        kept[target] = made.memory["activations"]
    # The input of q, k and v; attention's output is kept anyway.
    assert kept["query"] - kept["attention.output.dense"] == 2 * 128 * more * 64


@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("recipe", [{"engine": "amp", "dtype": "fp32"}, {"engine": "amp"}])
def test_the_dry_run_counts_what_a_real_forward_pass_keeps(
    make_spec, llama_config, recipe, experts
):
    training = {"batch_size": 2, "sequence_length": 64}
    if experts:
        mixture = {"num_local_experts": experts, "num_experts_per_tok": 2, "sliding_window": None}
        llama_config = {**llama_config, "model_type": "mixtral", **mixture}
    spec = make_spec(llama_config, recipe=recipe, training=training)
    model = load(spec, device="cpu", dtype=torch.float32).model.train()
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor
        return tensor

    inputs = model_inputs(_batch(spec), model.config)
    if recipe.get("dtype") != "fp32":
        # As on a GPU in bf16: causal attention that makes no mask.
        inputs = {"input_ids": inputs["input_ids"]}
    with (
        engines.create(spec.recipe, "cpu").training_context(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(**inputs, use_cache=False)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    with torch.device("meta"):
        meta = type(model)._from_config(model.config, dtype=torch.float32)
    run = dry_run(meta, [], list(meta.model.layers), spec)
    assert run.total == pytest.approx(real, rel=0.02)
    assert len(run.blocks) == 2
    assert run.logits == 2 * 64 * 272


def test_the_dry_run_takes_the_linear_layers_of_gpt2(make_spec):
    sizes = {"vocab_size": 272, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    spec = make_spec({"model_type": "gpt2", **sizes}, recipe={"engine": "te"})
    with torch.device("meta"):
        meta = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    decisions = decide(meta, shape_rules(spec.recipe), spec.conversion)
    converted = [d for d in decisions if d.reason is None and d.norm is None]
    assert {type(d.layer.module).__name__ for d in converted} == {"Conv1D"}
    run = dry_run(meta, decisions, list(meta.transformer.h), spec)
    tokens = spec.training.batch_size * 64
    assert run.logits == tokens * 272
    # The inputs of four GEMMs and their weights both ways round, in FP8, and much more.
    assert run.blocks[0] > tokens * (3 * 64 + 256) + 2 * 12 * 64 * 64


def test_adapters_need_gradients_and_states_of_their_own_only(make_spec, llama_config):
    whole = plan(make_spec(llama_config))
    adapted = plan(make_spec(llama_config, adapter={"rank": 4}))
    # Two blocks of q, k, v, o, gate, up, down: 64 features, 32 of keys and values, 160 inside.
    trained = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    assert adapted.parameters["trainable"] == trained
    assert adapted.parameters["total"] == whole.parameters["total"] + trained
    assert adapted.memory["gradients"] == 4 * trained
    assert adapted.memory["optimizer_states"] == 8 * trained
    assert adapted.memory["weights"] == whole.memory["weights"] + 4 * trained
    assert adapted.memory["activations"] > 0
    assert adapted.checkpoint_bytes == 12 * trained


def test_heads_that_are_trained_beside_adapters_are_counted(make_spec, minilm_folder):
    """A classifier's head and pooler, of which a copy is trained as a whole."""
    spec = make_spec(minilm_folder, task="sequence_classification", adapter={"rank": 4})
    made = plan(spec)
    model = load(spec, device="cpu", dtype=torch.float32, class_labels=["no", "yes"]).model
    targets = adapter_targets(model, spec.adapter)
    attach(spec, model, targets)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained > sum(4 * sum(linear_widths(layer.module)) for layer in targets)
    assert made.parameters["trainable"] == trained
    assert made.parameters["total"] == sum(p.numel() for p in model.parameters())
    assert made.memory["gradients"] == 4 * trained
    assert made.memory["optimizer_states"] == 8 * trained
    assert made.memory["weights"] == 4 * made.parameters["total"]
    assert made.checkpoint_bytes == 12 * trained


def test_plan_and_conversion_agree(make_spec, minilm_folder, llama_config):
    for spec in (
        make_spec(llama_config, conversion={"keep_first_last": True, "skip": ["*.k_proj"]}),
        make_spec(minilm_folder, task="masked_lm"),
    ):
        made = plan(spec)
        model = load(spec, device="cpu", dtype=torch.float32).model
        report = convert(model, engines.create(spec.recipe, "cpu"), spec.conversion)
        rows = [{k: row[k] for k in ("name", "from", "reason")} for row in report.to_json()]
        assert made.conversion["rows"] == rows
        assert made.conversion["converted"] == len(report.converted)
        assert made.parameters["total"] == sum(p.numel() for p in model.parameters())


def test_engines_that_cannot_run_here_are_planned_by_their_shape_rules(make_spec, llama_config):
    odd = {**llama_config, "intermediate_size": 168}
    te = plan(make_spec(odd, recipe={}))
    assert te.conversion["kept_because"]["out_features 168 is not a multiple of 16"] == 4
    assert te.conversion["kept_because"]["in_features 168 is not a multiple of 16"] == 2
    torchao = plan(make_spec(llama_config, recipe={"engine": "torchao"}))
    assert (
        torchao.conversion["kept_because"][
            "torchao has no norms; torch.compile fuses the model's own"
        ]
        == 5
    )
    amp = plan(make_spec(llama_config, recipe={"engine": "amp"}))
    assert amp.conversion["converted"] == 0
    assert amp.flops.fp8_share == 0.0
    override = {"override_linear_precision": [False, False, True]}
    partly = plan(make_spec(llama_config, recipe=override)).flops.fp8_share
    whole = plan(make_spec(llama_config, recipe={})).flops.fp8_share
    assert partly == pytest.approx(whole * 2 / 3)
    all_three = plan(make_spec(llama_config, recipe={"override_linear_precision": [True] * 3}))
    reason = "override_linear_precision keeps all three GEMMs in high precision"
    assert all_three.conversion["kept_because"][reason] == 2 * 7
    assert all_three.flops.fp8_share == 0.0
    block = {"engine": "te", "scaling": "block", "backward_override": "high_precision"}
    assert plan(make_spec(llama_config, recipe=block)).flops.fp8_share == pytest.approx(whole / 3)


@pytest.mark.parametrize("separate", [False, True])
def test_input_projections_of_torchs_attention_have_copies_too(make_spec, llama_config, separate):
    widths = {"kdim": 32, "vdim": 32} if separate else {}
    copies = {}
    for engine in ("te", "amp"):
        with torch.device("meta"):
            attention = torch.nn.MultiheadAttention(64, 4, **widths)
            model = torch.nn.Sequential(attention, torch.nn.Linear(64, 64))
        spec = make_spec(llama_config, recipe={"engine": engine})
        decisions = decide(model, shape_rules(spec.recipe), spec.conversion)
        estimate = estimate_memory(model, decisions, spec, tokens=128)
        copies[engine] = estimate.rows["compute_weight_copies"]
    weights = 64 * (64 + 32 + 32 if separate else 3 * 64) + 2 * 64 * 64
    # FP8 in the order that dgrad reads; autocast's bf16.
    assert copies == {"te": weights, "amp": 2 * weights}


def test_experts_count_as_far_as_tokens_are_sent_to_them(make_spec):
    config = {
        "model_type": "mixtral", "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    made = plan(make_spec(config))
    gemm = 4 * 64 * 64 + 2 * 3 * 64 * 96 + 64 * 272
    assert made.flops.gemm == 6 * gemm * made.tokens_per_step


def test_the_vocabulary_comes_from_the_tokenizer(make_spec, llama_config, make_tokenizer):
    del llama_config["vocab_size"]
    assert plan(make_spec(llama_config)).parameters["embedding"] == 272 * 64
    trained = make_spec(llama_config, tokenizer={"source": "train", "vocab_size": 4096})
    assert plan(trained).parameters["embedding"] == 4096 * 64
    foreign = make_spec(llama_config, tokenizer={"source": "path", "path": "t"})
    with pytest.raises(SpecRefused, match="give it") as caught:
        plan(foreign)
    assert caught.value.pointer == "/model/config/vocab_size"
    assert plan(foreign, tokenizer=make_tokenizer(500)).parameters["embedding"] == 512 * 64


def test_refusals(make_spec, llama_config):
    with pytest.raises(SpecRefused, match="'lm_haed' matches no"):
        plan(make_spec(llama_config, conversion={"skip": ["lm_haed"]}))
