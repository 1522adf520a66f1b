"""What a user is told whose wish a job's status does not allow: what can be done instead."""

from octrain_api.jobs.transitions import FINAL, Status, TransitionRefused
from octrain_api.models import Job
from octrain_api.problems import Problem, conflict


def wrong_status(job: Job, error: TransitionRefused) -> Problem:
    """409 for a transition that the table or a guard of it has refused."""
    detail = (
        f"The job is {job.status}; it cannot become {error.to.value} now. {_way_on(job, error)}"
    )
    return conflict("wrong-status", detail, job_status=job.status)


def _way_on(job: Job, error: TransitionRefused) -> str:
    status = Status(job.status)
    if status in FINAL:
        return "It has ended: clone it to run it again."
    if status is Status.CANCELLING:
        return "It is about to end: clone it to run it again."
    if status is Status.PAUSING and job.reason is None:
        return "It is saving: ask again once it is paused."
    if status is Status.PAUSING:
        return "It is saving, and goes back to the queue by itself."
    if status is Status.DRAFT:
        return "It is a draft, which nothing runs: start it, or delete it."
    return f"{error.why.capitalize()}: ask again in a moment."
