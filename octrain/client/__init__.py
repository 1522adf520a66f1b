"""The Python client: submit jobs, follow them, fetch what they made.

client = octrain.Client("https://octrain.example", "oct_…")
job = client.jobs.create({"model": {...}, "data": {...}, "recipe": {...}})
job.wait()
job.download("model", "my-model")
"""

from __future__ import annotations

from octrain.client.connection import Connection, find_connection
from octrain.client.errors import JobFailed, OctrainError, ServerUnreachable, WaitTimeout
from octrain.client.jobs import Client, Job, Jobs
from octrain.client.logs import LogFilter
from octrain.client.models import (
    Artifact,
    ArtifactFile,
    Attempt,
    JobData,
    LogLine,
    Node,
    Problem,
    Progress,
    Series,
    StreamEvent,
)

__all__ = [
    "Artifact",
    "ArtifactFile",
    "Attempt",
    "Client",
    "Connection",
    "Job",
    "JobData",
    "JobFailed",
    "Jobs",
    "LogFilter",
    "LogLine",
    "Node",
    "OctrainError",
    "Problem",
    "Progress",
    "Series",
    "ServerUnreachable",
    "StreamEvent",
    "WaitTimeout",
    "find_connection",
]
