"""The names of a block's children, and the way from its input to its output through them.

Blocks with the norm before each half are Llama's and GPT-2's; with the norm behind each residual
sum, BERT's. Either half may be computed by something else than the block's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["BlockLayout", "PassedBy", "PostNorm", "PreNorm", "through"]


@dataclass(frozen=True)
class PassedBy:
    """The modules of a block that are not called where one of its halves is fused, by their paths.

    ``whole``: with all that they hold; ``alone``: without their children.
    """

    whole: tuple[str, ...]
    alone: tuple[str, ...] = ()

    def paths(self, block: nn.Module) -> Iterator[str]:
        """Of each of them in ``block``."""
        yield from self.alone
        for path in self.whole:
            for inner, _ in block.get_submodule(path).named_modules(prefix=path):
                yield inner


@dataclass(frozen=True)
class _Layout:
    """``family``: whose blocks are built so, for messages. ``attention``: the path of the module
    that attends. ``rotated``: whether it rotates q and k by their positions."""

    family: str
    children: frozenset[str]
    attention: str
    rotated: bool


@dataclass(frozen=True)
class PreNorm(_Layout):
    """``x + attention(attention_norm(x))``, then ``x + mlp(mlp_norm(x))``."""

    attention_norm: str
    mlp_norm: str
    mlp: str

    @property
    def without_attention(self) -> PassedBy:
        """What is passed by where the half of attention is fused."""
        return PassedBy((self.attention_norm, self.attention))

    @property
    def without_mlp(self) -> PassedBy:
        """And where that of the MLP is."""
        return PassedBy((self.mlp_norm, self.mlp))


@dataclass(frozen=True)
class PostNorm(_Layout):
    """``after(attention(x), x)``, then ``down(up(x), x)``.

    ``after`` and ``down`` are modules of three: ``norm(dropout(dense(y)) + x)``. ``within``: the
    module that holds ``attention`` and ``after``.
    """

    within: str
    after: str
    up: str
    down: str
    dense: str
    dropout: str
    norm: str

    @property
    def without_attention(self) -> PassedBy:
        """What is passed by where the half of attention is fused."""
        return PassedBy((self.attention, f"{self.after}.{self.dense}"), self._opened)

    @property
    def without_mlp(self) -> PassedBy:
        """And where that of the MLP is."""
        whole = (f"{self.after}.{self.norm}", self.up, f"{self.down}.{self.dense}")
        return PassedBy(whole, self._opened)

    @property
    def _opened(self) -> tuple[str, ...]:
        """The modules that hold layers of both halves: none is called where a half is fused."""
        return self.within, self.after, self.down


BlockLayout = PreNorm | PostNorm

Half = Callable[[Tensor], Tensor]
NormedHalf = Callable[[Tensor], tuple[Tensor, Tensor]]


def through(
    layer: nn.Module,
    layout: BlockLayout,
    hidden: Tensor,
    attention: Half | None,
    mlp: Callable[[Tensor], Any] | None,
    options: dict[str, Any],
) -> Tensor:
    """The block's output. ``options``: for its own attention module.

    ``attention`` and ``mlp`` stand in for the block's own modules, with their norms where the norm
    is before them. Of a `PostNorm` block ``attention`` computes what follows up to the dense layer
    behind it, and ``mlp`` takes the residual sum before the norm: its own output before dropout,
    and the normalised sum.
    """
    if isinstance(layout, PostNorm):
        return _post_norm(layer, layout, hidden, attention, mlp, options)
    own = layer.get_submodule
    if attention is not None:
        hidden = hidden + attention(hidden)
    else:
        normalised = own(layout.attention_norm)(hidden)
        hidden = hidden + _attended(own(layout.attention), normalised, options)
    if mlp is not None:
        added: Tensor = mlp(hidden)
        return hidden + added
    output: Tensor = hidden + own(layout.mlp)(own(layout.mlp_norm)(hidden))
    return output


def _post_norm(
    layer: nn.Module,
    layout: PostNorm,
    hidden: Tensor,
    attention: Half | None,
    mlp: NormedHalf | None,
    options: dict[str, Any],
) -> Tensor:
    own = layer.get_submodule
    after, down = (own(path).get_submodule for path in (layout.after, layout.down))
    if attention is not None:
        attended = attention(hidden)
    else:
        attended = after(layout.dense)(_attended(own(layout.attention), hidden, options))
    total = after(layout.dropout)(attended) + hidden
    if mlp is not None:
        added, normalised = mlp(total)
    else:
        normalised = after(layout.norm)(total)
        added = down(layout.dense)(own(layout.up)(normalised))
    output: Tensor = down(layout.norm)(down(layout.dropout)(added) + normalised)
    return output


def _attended(attention: nn.Module, x: Tensor, options: dict[str, Any]) -> Tensor:
    found: Any = attention(hidden_states=x, **options)
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output
