"""Models from every source: right weights, and a refusal with a reason for everything else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers

from fp8core.errors import ModelUnavailable, SpecRefused
from fp8core.models import load, locate


def load_cpu(spec, **fields):
    return load(spec, device="cpu", dtype=fields.pop("dtype", torch.float32), **fields)


IDS = torch.arange(48).reshape(2, 24)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_a_checkpoint_folder_gives_equal_logits(save_llama, make_spec, tied, shard):
    model, folder = save_llama(tie_word_embeddings=tied, shard=shard)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "50KB")
    loaded = load_cpu(make_spec(folder))
    assert loaded.folder == folder
    assert (loaded.fresh, loaded.ignored) == ((), ())
    assert torch.equal(loaded.model(IDS).logits, model(IDS).logits)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    assert loaded.config._attn_implementation == "sdpa"
    assert all(p.requires_grad for p in loaded.model.parameters())


def test_dtype_is_the_callers(save_llama, make_spec):
    model, folder = save_llama()
    loaded = load_cpu(make_spec(folder), dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    expected = model.lm_head.weight.to(torch.bfloat16)
    assert torch.equal(loaded.model.lm_head.weight, expected)


def test_prefixes_differ_between_base_model_and_head(tmp_path, make_spec):
    """GPT-2 checkpoints of the hub have the base model's keys, without ``transformer.``."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=272, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    base = transformers.GPT2Model(config).eval()
    base.save_pretrained(tmp_path / "gpt2")
    loaded = load_cpu(make_spec(tmp_path / "gpt2"))
    hidden = base(IDS).last_hidden_state
    assert torch.equal(loaded.model.transformer(IDS).last_hidden_state, hidden)
    assert torch.equal(loaded.model(IDS).logits, hidden @ base.wte.weight.T)


def test_a_new_classification_head_depends_on_the_seed_alone(minilm_folder, make_spec):
    labels = ["a", "b", "c"]

    def head(seed):
        spec = make_spec(minilm_folder, task="sequence_classification", training={"seed": seed})
        loaded = load_cpu(spec, class_labels=labels)
        assert loaded.fresh == ("classifier.bias", "classifier.weight")
        assert loaded.config.id2label == dict(enumerate(labels))
        return loaded.model.classifier.weight

    first = head(0)
    state = torch.random.get_rng_state()
    torch.rand(1)
    assert torch.equal(head(0), first)
    torch.random.set_rng_state(state)
    head(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(head(1), first)
    assert first.shape == (3, 384)


def test_a_classifier_of_other_classes_gets_a_new_head(tmp_path, make_spec, llama_config):
    config = transformers.LlamaConfig(**{**llama_config, "num_labels": 5, "pad_token_id": 0})
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "five")
    spec = make_spec(tmp_path / "five", task="sequence_classification")
    loaded = load_cpu(spec, class_labels=["x", "y"])
    assert loaded.fresh == ("score.weight",)
    assert loaded.model(IDS).logits.shape == (2, 2)
    assert load_cpu(spec, class_labels=list("abcde")).fresh == ()


def test_random_weights_from_a_configuration(make_spec, llama_config, make_tokenizer):
    def build(seed, **changes):
        spec = make_spec({**llama_config, **changes}, training={"seed": seed})
        return load_cpu(spec, tokenizer=make_tokenizer()).model

    first, again, other = build(3), build(3), build(4)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert all((p == 1).all() for n, p in first.named_parameters() if n.endswith("norm.weight"))
    tied = build(3, tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.isfinite(tied(IDS).logits).all()


@pytest.mark.parametrize(
    ("kind", "task"), [("openai-gpt", "causal_lm"), ("fnet", "masked_lm"), ("llama", "causal_lm")]
)
def test_no_weight_is_left_to_what_lay_in_memory(make_spec, make_tokenizer, kind, task):
    """Some architectures forget a bias or more when they make random weights."""
    config = {"model_type": kind, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 272}
    config["num_attention_heads"] = 2
    spec = make_spec(config, task=task)
    states = []
    for _ in range(2):
        rubbish = [torch.full((size,), 1e30) for size in (32, 96, 272, 1024, 3072, 4096)]
        del rubbish  # their memory is what the allocator hands out next
        loaded = load(spec, device="cpu", dtype=torch.float32, tokenizer=make_tokenizer())
        states.append(loaded.model.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
        assert float(value.abs().max()) < 10, key


def test_a_configuration_without_vocabulary_takes_the_tokenizers(
    make_spec, llama_config, make_tokenizer
):
    del llama_config["vocab_size"]
    model = load_cpu(make_spec(llama_config), tokenizer=make_tokenizer(1001, 7, 8)).model
    assert model.config.vocab_size == 1008
    assert model.lm_head.out_features == 1008
    assert (model.config.eos_token_id, model.config.pad_token_id) == (7, 8)
    assert model.config.bos_token_id is None


@pytest.mark.parametrize(
    ("changes", "fields", "pointer", "words"),
    [
        ({"vocab_size": 256}, {}, "/model/config/vocab_size", "tokenizer's has 272"),
        ({"hiden_size": 64}, {}, "/model/config/hiden_size", "did you mean 'hidden_size'"),
        ({"hidden_size": "x"}, {}, "/model/config", "not valid"),
        ({"hidden_size": 62}, {}, "/model/config", "not a multiple"),
        ({"model_type": "lama"}, {}, "/model/config/model_type", "did you mean"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "/model/config", "quantized"),
        ({"model_type": "vit"}, {}, "/task", "no vit model for causal_lm"),
        ({"rope_parameters": {"rope_type": "nope"}}, {}, "/model/config", "KeyError 'nope'"),
        ({"hidden_act": "nope"}, {}, "/model/config", "KeyError 'nope'"),
        ({"pad_token_id": 10**9}, {}, "/model/config", "Padding_idx must be within"),
        ({"text_config": {}}, {}, "/model/config", "'dict' object has no attribute"),
        (
            {"max_position_embeddings": 100},
            {"data": {"source": "builtin", "packing": False}, "training": {"sequence_length": 100}},
            "/training/sequence_length",
            "padded to 112",
        ),
        ({"model_type": "bert"}, {}, "/task", "attends to later tokens"),
        ({}, {"task": "masked_lm"}, "/task", "no llama model for masked_lm"),
    ],
)  # fmt: skip
def test_refused_configurations(
    make_spec, llama_config, make_tokenizer, changes, fields, pointer, words
):
    spec = make_spec({**llama_config, **changes}, **fields)
    with pytest.raises(SpecRefused) as caught:
        load_cpu(spec, tokenizer=make_tokenizer())
    assert caught.value.pointer == pointer
    assert words in caught.value.message


def test_a_folder_with_a_decoder_that_is_to_learn_masked_tokens(
    make_spec, make_tokenizer, tmp_path
):
    config = {
        "model_type": "bert", "vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    spec = make_spec({**config, "is_decoder": True})
    load_cpu(spec, tokenizer=make_tokenizer()).model.save_pretrained(tmp_path)
    with pytest.raises(SpecRefused, match="attends to earlier tokens alone") as caught:
        load_cpu(
            make_spec({"source": "path", "path": str(tmp_path)}, task="masked_lm"),
            tokenizer=make_tokenizer(),
        )
    assert caught.value.pointer == "/task"


def test_positions_of_roberta_start_after_padding(make_spec, make_tokenizer):
    config = {
        "model_type": "roberta", "vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 66,
        "pad_token_id": 1,
    }  # fmt: skip
    spec = make_spec(config, task="masked_lm")
    model = load_cpu(spec, tokenizer=make_tokenizer(pad_id=1)).model
    assert model(torch.full((1, 64), 5)).logits.shape == (1, 64, 272)
    with pytest.raises(SpecRefused, match="65 tokens are more than the 64 positions"):
        load_cpu(make_spec(config, task="masked_lm", training={"sequence_length": 65}))


def test_the_result_of_another_job(save_llama, make_spec):
    model, folder = save_llama()
    spec = make_spec({"source": "job", "job": "job_1"})
    assert torch.equal(load_cpu(spec, job_folder=folder).model(IDS).logits, model(IDS).logits)
    with pytest.raises(ModelUnavailable, match="job_1"):
        load_cpu(spec)


@pytest.fixture
def hub_cache(save_llama, tmp_path):
    """A hub cache as huggingface_hub lays it out, with one revision."""
    model, folder = save_llama()
    torch.save({}, folder / "pytorch_model.bin")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--acme--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    shutil.move(folder, repo / "snapshots" / commit)
    return model, tmp_path / "hub"


def test_a_hub_model_from_the_local_cache(hub_cache, tmp_path):
    """In a process of its own: huggingface_hub reads its environment once."""
    model, cache = hub_cache
    torch.save(model(IDS).logits, tmp_path / "logits.pt")
    script = f"""
        import torch
        from fp8core.errors import ModelUnavailable
        from fp8core.models import load, locate
        from fp8core.spec import parse_spec
        def spec(**model):
            return parse_spec({{"model": {{"source": "huggingface", **model}}, "training":
                {{"sequence_length": 64}}, "data": {{"source": "builtin"}}, "recipe": {{}}}})
        loaded = load(spec(id="acme/tiny"), device="cpu", dtype=torch.float32)
        logits = loaded.model(torch.arange(48).reshape(2, 24)).logits
        assert torch.equal(logits, torch.load({str(tmp_path / "logits.pt")!r}))
        for model in ({{"id": "acme/absent"}}, {{"id": "acme/tiny", "revision": "v2"}}):
            try:
                locate(spec(**model))
            except ModelUnavailable as error:
                assert error.pointer == "/model/id" and model["id"] in error.message
                assert "not in this machine's hub cache" in error.message, error.message
            else:
                raise AssertionError(model)
        print("done")
    """
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_loading_and_converting_take_the_memory_of_one_copy(save_llama, tmp_path, dtype):
    """Peak memory while loading and converting, in a process of its own, page cache of the file
    included.

    A small model comes first, so that the code which does it is in memory before it is measured.
    """
    _, small = save_llama(folder="small")
    model, folder = save_llama(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=2000, shard="50MB"
    )
    size = sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize
    script = f"""
        import torch
        from transformers.models.llama import modeling_llama
        from fp8core.conversion import convert
        from fp8core.engines import create
        from fp8core.models import load
        from fp8core.spec import parse_spec
        torch.set_num_threads(1)
        def spec(folder):
            return parse_spec({{"model": {{"source": "path", "path": folder}}, "training":
                {{"sequence_length": 64}}, "data": {{"source": "builtin"}},
                "recipe": {{"engine": "emulated"}}}})
        def prepared(folder):
            wanted = spec(folder)
            model = load(wanted, device="cpu", dtype=torch.{dtype}).model
            report = convert(model, create(wanted.recipe, "cpu"), wanted.conversion)
            assert len(report.converted) >= 14
            return model
        def peak():
            status = open("/proc/self/status").read()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        prepared({str(small)!r})
        before = peak()
        model = prepared({str(folder)!r})
        print(peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # One copy, and one tensor in the dtype of the file.
    assert int(done.stdout) < 1.3 * size


def test_locate_reads_no_weights(save_llama, make_spec):
    _, folder = save_llama()
    (folder / "model.safetensors").write_bytes(b"")
    source = locate(make_spec(folder))
    assert source.folder == folder
    assert source.config["hidden_size"] == 64
