"""How far the tokens of a model see, by the masks that the model itself makes for its blocks.

The proof of a block makes its reference's mask of the window that was read from the block: were it
misread, both ways would be wrong alike. So the model is asked. It is called with one row and no
mask, and only the first and the last line of each mask are made; its blocks compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.data.attention import POSITIONS_AFTER_PADDING
from fp8core.fusion.block_inputs import named_inputs
from fp8core.fusion.modes import in_evaluation
from fp8core.fusion.parts import AttentionHalf

__all__ = ["Sight", "misread", "row_length", "sights"]

_NAME = "octrain_sight"
_LENGTH, _SHORT = 4096, 128


@dataclass(frozen=True)
class Sight:
    """Of ``length`` tokens in a row, how many the first sees and how many the last."""

    length: int
    first: int
    last: int


def row_length(config: Any, length: int | None) -> int:
    """``length``, or less where a model of ``config`` has no positions for so long a row.

    A token without a position is no error that could be caught on a GPU. None: as far as positions
    reach, but no further than 4096, and not far where they are not told.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return _SHORT if length is None else length
    if getattr(config, "model_type", "") in POSITIONS_AFTER_PADDING:
        positions -= (getattr(config, "pad_token_id", None) or 0) + 1
    return max(1, min(_LENGTH if length is None else length, positions))


def misread(half: AttentionHalf, sight: Sight | None) -> str | None:
    """Why ``half`` does not say what the model's mask does; None where it does, or has none."""
    if sight is None:
        return None
    first = 1 if half.causal else sight.length
    last = sight.length if half.window is None else min(half.window, sight.length)
    if (sight.first, sight.last) == (first, last):
        return None
    return (
        f"{half.name}: of {sight.length} tokens the first and the last seem to see {first} and "
        f"{last}, and by the model's own mask they see {sight.first} and {sight.last}"
    )


def sights(model: Any, layers: Sequence[nn.Module], length: int) -> dict[int, Sight]:
    """By the id of each of ``layers``, blocks of ``model``; without those that get no mask.

    ``length``: of the row, as long as any that the model is to be given. Embeddings of so many
    tokens are made, and no activations. A model on the meta device will do.
    """
    config = getattr(model, "config", None)
    if config is None or not layers:
        return {}
    found: dict[int, Sight] = {}
    device = next(model.parameters()).device
    ids = torch.arange(length, device=device)[None] % 2  # every vocabulary has them
    whole = torch.ones(1, length, dtype=torch.bool, device=device)
    own = getattr(config, "_attn_implementation", None)
    try:
        _register()
        config._attn_implementation = _NAME
        with in_evaluation(model), torch.no_grad(), _looking(layers, found):
            model(input_ids=ids, attention_mask=whole, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    # By `_Seen`; or some of the model cannot be run so, in its own way, and those are not known.
    except Exception:
        pass
    finally:
        config._attn_implementation = own
    return found


class _Seen(Exception):
    """All layers have been called: nothing is wanted of what follows."""


@contextmanager
def _looking(layers: Sequence[nn.Module], found: dict[int, Sight]) -> Iterator[None]:
    """Inside, ``layers`` look at their masks, and give back what comes in."""
    called: set[int] = set()

    def look(layer: nn.Module) -> Any:
        def forward(hidden_states: Tensor, *positional: Any, **options: Any) -> Tensor:
            given = named_inputs(type(layer).forward, positional, options)
            sight = _of(given.get("attention_mask"))
            if sight is not None:
                found[id(layer)] = sight
            called.add(id(layer))
            if len(called) == len(layers):
                raise _Seen
            return hidden_states

        return forward

    before = {layer: layer.__dict__.get("forward") for layer in layers}
    for layer in layers:
        layer.__dict__["forward"] = look(layer)
    try:
        yield
    finally:
        for layer, forward in before.items():
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


def _of(mask: Any) -> Sight | None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape[:3] != (1, 1, 2):
        return None
    first, last = (int(line.sum()) for line in mask[0, 0])
    return Sight(mask.shape[-1], first, last)


def _register() -> None:
    """With transformers, as the name of an implementation of attention."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def two_lines(*, q_length: int, q_offset: Any = 0, **options: Any) -> Tensor:
        # On the CPU, as there are no values on the meta device; and of the row as a whole.
        options |= {"device": "cpu", "attention_mask": None}
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        lines = [
            sdpa_mask(q_length=1, q_offset=q_offset + place, **options)
            for place in (0, q_length - 1)
        ]
        return torch.cat(lines, dim=2)

    AttentionInterface.register(_NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(_NAME, two_lines)
