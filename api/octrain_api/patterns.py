"""Regular expressions that the OpenAPI document tells of texts which a check of ours reads."""

from collections.abc import Iterable


def comma_separated(names: Iterable[str]) -> str:
    """One of these names, or several joined by commas."""
    one = "|".join(names)
    return f"^({one})(,({one}))*$"
