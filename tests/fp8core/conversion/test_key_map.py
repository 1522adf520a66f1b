from __future__ import annotations

import pytest
import torch

from fp8core.conversion import Join, KeyMap, Piece

QKV = Join("attn.qkv.weight", (Piece("q.weight", 4), Piece("k.weight", 2), Piece("v.weight", 2)))


def test_many_to_one_and_back():
    key_map = KeyMap([QKV, Join("norm.scale", (Piece("input_norm.weight", 3),))])
    original = {
        "embed": torch.randn(2, 3),
        "q.weight": torch.randn(4, 3),
        "k.weight": torch.randn(2, 3),
        "v.weight": torch.randn(2, 3),
        "input_norm.weight": torch.randn(3),
    }
    converted = key_map.to_converted(original)
    assert set(converted) == {"embed", "attn.qkv.weight", "norm.scale"}
    assert converted["attn.qkv.weight"].shape == (8, 3)
    assert torch.equal(converted["attn.qkv.weight"][4:6], original["k.weight"])
    back = key_map.to_original(converted)
    assert set(back) == set(original)
    assert all(torch.equal(back[key], original[key]) for key in original)
    assert back["q.weight"].data_ptr() == converted["attn.qkv.weight"].data_ptr()
    assert key_map.original_names("attn.qkv.weight") == ("q.weight", "k.weight", "v.weight")
    assert key_map.original_names("embed") == ("embed",)


def test_joins_along_another_dimension():
    key_map = KeyMap([Join("w", (Piece("a", 1), Piece("b", 2)), dim=1)])
    back = key_map.to_original({"w": torch.arange(6).reshape(2, 3)})
    assert back["b"].tolist() == [[1, 2], [4, 5]]


def test_an_engines_extra_state_is_no_part_of_a_model():
    state = {"a.weight": torch.ones(1), "a._extra_state": torch.ones(1)}
    assert set(KeyMap().to_original(state)) == {"a.weight"}


def test_incomplete_and_misshapen_states_are_refused():
    key_map = KeyMap([QKV])
    with pytest.raises(ValueError, match=r"v\.weight missing"):
        key_map.to_converted({"q.weight": torch.ones(4, 3), "k.weight": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="8"):
        key_map.to_original({"attn.qkv.weight": torch.ones(7, 3)})
    with pytest.raises(ValueError, match="2 expected"):
        key_map.to_converted(
            {
                "q.weight": torch.ones(4, 3),
                "k.weight": torch.ones(3, 3),
                "v.weight": torch.ones(2, 3),
            }
        )
    with pytest.raises(ValueError, match="more than one join"):
        KeyMap([QKV, Join("other", (Piece("q.weight", 4),))])
    with pytest.raises(ValueError, match="at least one row"):
        Join("w", ())
