"""Identifiers: a kind prefix and 26 characters that sort by time of creation."""

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(kind: str) -> str:
    """`<kind>_<26 characters>` in the ULID layout: 48 bits of Unix milliseconds, 80 random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    characters = [_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{kind}_{''.join(characters)}"
