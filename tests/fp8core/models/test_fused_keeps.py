"""What a plan has fused blocks keep for their backward pass, counted by hand."""

from __future__ import annotations

import pytest

from fp8core.models import plan


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


BACKWARD = {"engine": "te", "scaling": "block"}


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_what_fused_blocks_with_their_backward_gemms_in_bf16_keep(
    make_spec, llama_config, backward
):
    """As they are, or as they were cast, are the inputs kept, and no columns of the weights."""
    recipe = {**BACKWARD, "backward_override": backward}
    training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
    made = plan(make_spec(llama_config, recipe=recipe, training=training))
    assert (made.fusion["fused"], made.fusion["not_because"]) == (2, {})
    # As in FP8, see above. What goes into the GEMM of o is attention's output, kept in any case.
    cast = 1 if backward == "dequantized" else 2
    attention = 2 * 64 + 2 * (64 + 32 + 32 + 64) + 4 * (1 + 4) + cast * 64
    attention += 64 if backward == "dequantized" else 0
    mlp = 2 * 64 + 4 + cast * 64 + 2 * 2 * 160 + cast * 160
    around = 128 * (2 * 64 + 2 * 64 + 2 * 272 + 8) + 2 * 64 * 272
    assert made.memory["activations"] == 2 * 128 * (attention + mlp) + around
    assert made.memory["compute_weight_copies"] == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_what_such_blocks_keep_beside_adapters(make_spec, llama_config, backward):
    """LayerNormLinear keeps for dgrads alone what its norm gave, and adapters read the same."""
    kept = {}
    for target in ("q_proj", "o_proj", "up_proj", "down_proj"):
        recipe = {**BACKWARD, "backward_override": backward}
        training = {"batch_size": 2, "sequence_length": 64, "precision": "throughput"}
        adapter = {"rank": 4, "target_modules": [f"*.{target}"]}
        made = plan(make_spec(llama_config, recipe=recipe, training=training, adapter=adapter))
        assert (made.fusion["fused"], made.fusion["not_because"]) == (2, {})
        kept[target] = made.memory["activations"]
    of_norm = 0 if backward == "high_precision" else 3 * 64
    assert kept["q_proj"] - kept["o_proj"] == 2 * 128 * of_norm
    assert kept["down_proj"] - kept["up_proj"] == 2 * 128 * (2 * 160 - of_norm)


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
