"""A bound on the work of a chat template: it is a program that came with somebody's tokenizer.

Jinja's sandbox keeps a template from files and from ``range`` of more than 100,000, but not from
such loops within one another, and not from doubling a text forty times. So the compiled template
counts: each round of a loop, each call of a macro, and what a filter, an operator or a method of a
text is given or makes. The count is the same on every machine; beside it stands a limit on the
processor time of the thread, for work that is slow in itself. Neither needs signals or a second
thread: a template is rendered by whichever thread encodes.

What counts is put into the template's syntax tree before it is compiled, so that it costs nothing
where there is nothing to count. Only within ``rendering`` anything is refused.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.filters import do_format
from jinja2.visitor import NodeTransformer

__all__ = [
    "MOST_SECONDS",
    "MOST_WORK",
    "TemplateWorkExceeded",
    "counting_template",
    "limited",
    "rendering",
]

MOST_WORK = 1_000_000
"""Rounds of loops and the like in one rendering. A chat of 1000 messages takes some thousand."""
MOST_SECONDS = 10.0
"""Of the thread's processor time, for all renderings of one chat, and some more for each."""

_SECONDS_EACH = 0.02

# Characters or elements of a single value.
_MOST_SIZE = 1 << 26
# So many characters are as much work as one round of a loop.
_PER_ROUND = 256
# Shorter texts are put together uncounted: the round of the loop that does it counts.
_SMALL = 1 << 14
# Of a number's bits: none that a template needs has more.
_MOST_BITS = 4096
_MOST_WIDTH = 1_000_000
_WIDE = re.compile(r"\d{7}|\*")
_CLOCK_EVERY = 1024
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_TICK, _SEEN, _JOINED = "octrain_tick", "octrain_seen", "octrain_joined"


class TemplateWorkExceeded(Exception):
    """The template has done more than any template needs."""


class _Work(threading.local):
    """What the rendering of this thread may still do; None: as much as it likes."""

    left: int | None = None
    until: float = math.inf
    line: int | None = None


_work = _Work()


@contextmanager
def limited(count: int) -> Iterator[None]:
    """Within it this thread's renderings, ``count`` of them, have ``MOST_SECONDS`` together, and
    20 ms more each."""
    seconds = MOST_SECONDS + count * _SECONDS_EACH
    until, _work.until = _work.until, time.thread_time() + seconds
    try:
        yield
    finally:
        _work.until = until


@contextmanager
def rendering() -> Iterator[None]:
    """One rendering, which may do ``MOST_WORK``. Within it ``TemplateWorkExceeded`` is raised."""
    before = _work.left, _work.line
    _work.left, _work.line = MOST_WORK, None
    try:
        yield
    finally:
        _work.left, _work.line = before


def counting_template(source: str) -> str:
    """What transformers is to be given for ``source``, so that its rendering counts.

    It is the text of an empty template, the same for the same source. What transformers keeps of
    that, in an environment with all that its templates may use, gets the program of the source:
    compiled by transformers itself the source would do its work with constants then, uncounted.
    Raises what Jinja raises for a source that is no template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # (Transformers looks for the tag before it looks for answers, and warns without it.)
    text = f"{{# {hashlib.sha256(source.encode()).hexdigest()} {{% generation %}} #}}"
    template: Any = _compile_jinja_template(text)
    if getattr(template, "octrain_counts", False):
        return text
    if _compile_jinja_template(text) is not template:
        raise RuntimeError("this version of transformers keeps no templates; use another one")
    environment: Any = template.environment
    environment.filters |= {_TICK: _tick, _SEEN: _seen, _JOINED: _joined}
    environment.concat = _concatenated
    environment.intercepted_binops = frozenset({"+", "*", "**", "%"})
    environment.call_binop = _binary(environment.call_binop)
    environment.call = _call(environment.call)
    for name in ("center", "indent", "batch", "slice", "format", "tojson"):
        environment.filters[name] = _narrow(environment.filters[name])
    environment.filters["replace"] = _replacing(environment.filters["replace"])
    environment.filters["join"] = _joining(environment.filters["join"])
    with rendering():  # constants are worked out now
        counting = environment.from_string(_Counting().visit(environment.parse(source)))
    template.root_render_func = counting.root_render_func
    template.blocks = counting.blocks
    template.octrain_counts = True
    return text


class _Counting(NodeTransformer):
    """Puts calls of what counts into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            # A loop that passes over everything has rounds too.
            node.test = nodes.And(_ticked(node.lineno), node.test, lineno=node.lineno)
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        return self._ticking(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is not None:
            node.node = _filtered(node.node, _SEEN)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = _filtered(operand.expr, _SEEN)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    @staticmethod
    def _ticking(node: Any) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(_ticked(node.lineno), lineno=node.lineno))
        return node


def _ticked(line: int) -> nodes.Filter:
    return _filtered(nodes.Const(line, lineno=line), _TICK)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    """A filter, since compiled templates call those directly, without the sandbox between."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# With the context, or they would be applied to constants when the template is compiled.
@pass_context
def _tick(context: Any, line: int) -> bool:
    _work.line = line
    _charge(1)
    return True


@pass_context
def _seen(context: Any, value: Any) -> Any:
    """What a filter is given: it may look at all of it."""
    if isinstance(value, str):
        _charge(len(value) // _PER_ROUND)
    elif isinstance(value, Sized):
        _charge(len(value))
    return value


@pass_context
def _joined(context: Any, parts: list[Any]) -> str:
    return _concatenated([str(part) for part in parts])


def _concatenated(parts: Any) -> str:
    parts = list(parts)
    _size(sum(map(len, parts)))
    return "".join(parts)


def _charge(work: int) -> None:
    left = _work.left
    if left is None:
        return
    _work.left = left - work
    if left < work:
        raise TemplateWorkExceeded(f"it does more than {MOST_WORK:,} rounds of loops{_where()}")
    if left // _CLOCK_EVERY != (left - work) // _CLOCK_EVERY and time.thread_time() > _work.until:
        raise TemplateWorkExceeded(f"it takes more than {MOST_SECONDS:.0f} s{_where()}")


def _size(size: int) -> None:
    """Something of this size is about to be made."""
    if _work.left is None:
        return
    if size > _MOST_SIZE:
        raise TemplateWorkExceeded(f"it makes a value of {size:,} characters or parts{_where()}")
    _charge(size // _PER_ROUND)


def _width(value: Any) -> None:
    if _work.left is not None and isinstance(value, int) and abs(value) > _MOST_WIDTH:
        raise TemplateWorkExceeded(f"it asks for a width of {value:,}{_where()}")


def _where() -> str:
    return "" if _work.line is None else f", the last of them in its line {_work.line}"


def _binary(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call_binop(context: Any, operator: str, left: Any, right: Any) -> Any:
        # By far the most: short texts that are put together.
        if operator == "+" and type(left) is str and type(right) is str:
            size = len(left) + len(right)
            if size > _SMALL:
                _size(size)
            return left + right
        if _work.left is not None:
            _check_operands(operator, left, right)
        return plain(context, operator, left, right)

    return call_binop


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), 1)
        if operator == "**":
            bits *= max(right, 1)
        elif operator == "*":
            bits += right.bit_length()
        if bits > _MOST_BITS:
            raise TemplateWorkExceeded(f"it makes a number of {bits:,} bits{_where()}")
    elif operator == "*":
        for sized, count in ((left, right), (right, left)):
            if isinstance(sized, Sized) and isinstance(count, int):
                _size(len(sized) * max(count, 0))
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_pattern(left)


def _check_pattern(pattern: str) -> None:
    if _WIDE.search(pattern):
        raise TemplateWorkExceeded(f"it fills up to a width without bound{_where()}")


def _call(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = function
        if type(method) is not BuiltinMethodType:  # the sandbox wraps ``format`` of a text
            method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and (args or len(owner) > _SMALL) and _work.left is not None:
            _check_method(owner, getattr(method, "__name__", ""), args)
        return plain(context, function, *args, **kwargs)

    return call


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    _charge(len(text) // _PER_ROUND)
    if name in _PADDING:
        for value in args:
            _width(value)
    elif name in ("format", "format_map"):
        _check_pattern(text)
    elif name == "replace" and len(args) > 1 and all(isinstance(one, str) for one in args[:2]):
        _size_of_replaced(text, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], Sized):
        _size(len(text) * len(args[0]))


def _size_of_replaced(text: str, old: str, new: str) -> None:
    if len(new) > len(old):
        _size(len(text) + text.count(old) * (len(new) - len(old)))


def _narrow(plain: Callable[..., Any]) -> Callable[..., Any]:
    # With what Jinja has written on it: what else it is to be given.
    @wraps(plain)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        if _work.left is not None:
            for one in (*args[1:], *kwargs.values()):
                _width(one)
            if plain is do_format:
                _check_pattern(str(args[0]))
        return plain(*args, **kwargs)

    return narrow


def _replacing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @pass_eval_context
    def replace(context: Any, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
        _size_of_replaced(str(text), str(old), str(new))
        return plain(context, text, old, new, count)

    return replace


def _joining(plain: Callable[..., Any]) -> Callable[..., Any]:
    @pass_eval_context
    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        if isinstance(value, Sized):
            _size(len(value) * max(len(str(d)), 1))
        return plain(context, value, d, attribute)

    return join
