"""How deep a JSON text is nested and how many values it holds, found without parsing it.

A parser builds every value before it can be counted, and may end on its recursion limit; here a
text of megabytes costs a few passes of compiled code over its bytes.
"""

import re

# A string with its escapes. An unterminated one matches to the end: the parser will refuse it.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKETS = b"[]{}"
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))


def too_complex(text: bytes, *, max_depth: int, max_values: int) -> str | None:
    """Why the JSON text is more than allowed; None when it is not, or is no JSON at all.

    `max_depth` counts nested arrays and objects, `max_values` members of objects and items of
    arrays, all together.
    """
    openings = text.count(b"[") + text.count(b"{")
    commas = text.count(b",")
    # Strings can only make these counts too large, so what passes here needs no closer look.
    if openings <= max_depth and commas + openings <= max_values:
        return None
    bare = _STRING.sub(b"", text)
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") > max_values:
        return f"it holds more than {max_values} values"
    # Of pairs that do not match the parser complains; here both kinds are one.
    brackets = bare.translate(_SQUARE, _NOT_BRACKETS)
    # Each round takes the innermost pairs away.
    for _ in range(max_depth):
        if not brackets:
            return None
        brackets = brackets.replace(b"[]", b"")
    if b"[" in brackets:
        return f"it is nested more than {max_depth} levels deep"
    return None
