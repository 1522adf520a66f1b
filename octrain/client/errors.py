"""What the client raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octrain.client.models import JobData, Problem


class OctrainError(Exception):
    """The server refused a request; the members are those of its problem document (RFC 9457).

    ``status`` is the HTTP status, ``type`` a stable name such as ``/problems/spec-invalid``,
    ``problems`` what is wrong where. 0 and "" stand where no server answered.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int = 0,
        title: str = "",
        type: str = "",
        problems: Sequence[Problem] = (),
    ) -> None:
        lines = [detail, *(f"  {problem}" for problem in problems)]
        super().__init__("\n".join(lines))
        self.status = status
        self.title = title
        self.type = type
        self.detail = detail
        self.problems = tuple(problems)

    @property
    def pointers(self) -> tuple[str, ...]:
        """The JSON pointers into the request of all that is wrong."""
        return tuple(problem.pointer for problem in self.problems)


class ServerUnreachable(OctrainError):
    """No server answers at the URL, or it went away in the middle of an answer."""


class WaitTimeout(OctrainError):
    """The job had not ended when the time given to ``wait`` was over. It goes on."""


class JobFailed(OctrainError):
    """``wait(check=True)`` saw a job end other than ``succeeded``; ``job`` is its last state."""

    def __init__(self, job: JobData) -> None:
        super().__init__(f"Job {job.id} {job.status} ({job.reason}): {job.detail or 'no detail'}")
        self.job = job
