"""What is wrong with a spec, told to a person and to a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# A document with more faults than this is not worth reading to its end.
MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a spec.

    `pointer` is an RFC 6901 JSON pointer into the document as it was submitted ("" is the whole of
    it), `message` a sentence for a person, `code` a stable word for a program, `suggestion` the
    key or value that was probably meant.
    """

    pointer: str
    message: str
    code: str
    suggestion: str | None = None

    def __str__(self) -> str:
        return f"{self.pointer or '(spec)'}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class SpecInvalid(ValueError):
    """A spec was refused; `problems` holds every reason found, in the order of the document."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: list[Problem] = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def pointer_of(path: Sequence[str | int]) -> str:
    """RFC 6901 JSON pointer of a path of keys and indices."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
