"""The JSON schema of a spec."""

from __future__ import annotations

from typing import Any

from fp8core.spec.job import JobSpec


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a spec in canonical spelling."""
    return JobSpec.model_json_schema()
