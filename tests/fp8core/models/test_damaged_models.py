"""Model folders that are damaged, lie about themselves or are no models: refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fp8core.errors import ModelUnavailable, SpecRefused
from fp8core.models import load


def load_cpu(spec, **fields):
    return load(spec, device="cpu", dtype=torch.float32, **fields)


def _header(change):
    def damage(file: Path) -> None:
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return damage


def _entry(header):
    return header["lm_head.weight"]


def _beyond_the_end(header):
    _entry(header)["data_offsets"][1] += 4096


def _wrong_shape(header):
    _entry(header)["shape"][0] *= 2


def _overlap(header):
    _entry(header)["data_offsets"] = header["model.norm.weight"]["data_offsets"]


def _other_dtype(header):
    _entry(header)["dtype"] = "F16"


def _integers(header):
    _entry(header)["dtype"] = "I32"


def _transposed(header):
    _entry(header)["shape"].reverse()


def _renamed(header):
    header["lm_head.wight"] = header.pop("lm_head.weight")


def _huge_header(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes((2**62).to_bytes(8, "little") + content[8:])


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_header(_beyond_the_end), "model.safetensors"),
        (_header(_wrong_shape), "model.safetensors"),
        (_header(_overlap), "model.safetensors"),
        (_header(_other_dtype), "model.safetensors"),
        (_header(_integers), "lm_head.weight is stored as I32"),
        (_header(_transposed), "lm_head.weight has shape [64, 272]"),
        (_header(_renamed), "lacks weights: lm_head.weight"),
        (_huge_header, "model.safetensors"),
        (_truncate, "model.safetensors"),
        (_empty, "model.safetensors"),
    ],
)
def test_files_that_lie_are_refused_by_name(save_llama, make_spec, damage, words):
    _, folder = save_llama()
    damage(folder / "model.safetensors")
    with pytest.raises(ModelUnavailable) as caught:
        load_cpu(make_spec(folder))
    assert words in caught.value.message
    assert caught.value.pointer == "/model"


def test_missing_shards_and_lying_indexes(save_llama, make_spec):
    _, folder = save_llama(shard="50KB")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shard = good["weight_map"]["lm_head.weight"]
    other = next(name for name in good["weight_map"].values() if name != shard)

    def refused(weight_map):
        index.write_text(json.dumps({**good, "weight_map": weight_map}))
        with pytest.raises(ModelUnavailable) as caught:
            load_cpu(make_spec(folder))
        return caught.value.message

    assert "does not" in refused({**good["weight_map"], "lm_head.weight": other})
    outside = refused({**good["weight_map"], "lm_head.weight": f"../{shard}"})
    assert "of the same folder" in outside
    assert "no weight_map" in refused({})
    index.write_text("{")
    with pytest.raises(ModelUnavailable, match="is not JSON"):
        load_cpu(make_spec(folder))
    index.write_text(json.dumps(good))
    (folder / shard).unlink()
    with pytest.raises(ModelUnavailable, match=shard):
        load_cpu(make_spec(folder))


def test_pickled_weights_are_refused_unread(save_llama, make_spec):
    model, folder = save_llama()
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match=r"pytorch_model\.bin.*pickled"):
        load_cpu(make_spec(folder))


def test_folders_that_are_no_models(tmp_path, make_spec):
    for name, words in (("empty", "no config.json"), ("adapter", "adapts is needed")):
        (tmp_path / name).mkdir()
        if name == "adapter":
            (tmp_path / name / "adapter_config.json").write_text("{}")
        with pytest.raises(ModelUnavailable, match=words):
            load_cpu(make_spec(tmp_path / name))
    with pytest.raises(ModelUnavailable, match="no such file"):
        load_cpu(make_spec(tmp_path / "absent"))


def test_foreign_code_in_a_folder_is_never_run(save_llama, make_spec):
    _, folder = save_llama()
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecRefused, match="auto_map"):
        load_cpu(make_spec(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 10**9, "not between 0 and 10000"),
        ("num_hidden_layers", -1, "num_hidden_layers is -1"),
        ("num_attention_heads", 0, "not valid"),
        ("num_labels", 10**10, "not between 0 and 1000000"),
        ("block_sizes", [4, 10**9], "block_sizes is 1000000000"),
    ],
)
def test_sizes_that_only_the_folder_tells_are_refused(save_llama, make_spec, key, value, words):
    _, folder = save_llama()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises((ModelUnavailable, SpecRefused), match=words):
        load_cpu(make_spec(folder))


def test_links_out_of_the_roots_are_refused(save_llama, make_spec, tmp_path):
    _, folder = save_llama("inside/llama")
    outside = tmp_path / "outside.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    (folder / "model.safetensors").symlink_to(outside)
    assert load_cpu(make_spec(folder)).fresh == ()
    with pytest.raises(ModelUnavailable, match="outside the allowed roots"):
        load_cpu(make_spec(folder), roots=[tmp_path / "inside"])
