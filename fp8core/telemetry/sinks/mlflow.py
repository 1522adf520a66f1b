"""An MLflow tracking server, through its REST API (2.0): no package of MLflow's is needed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from fp8core.telemetry.numbers import decode_number, encode_number
from fp8core.telemetry.sinks.requirements import mlflow_server
from fp8core.telemetry.sinks.sink import SinkRefused

__all__ = ["MlflowSink"]

# What the server takes in one call, and as the text of one parameter (older ones take no more).
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 500
_STATUS = {"succeeded": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "lost": "KILLED"}
_TIMEOUT_SECONDS = 20.0


class MlflowSink:
    """One run in the experiment that the spec names; later runs of a workdir go on with it."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        spec: Mapping[str, Any],
        state: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self._http = _client(settings, environment)
        run = state.get("run")
        if run is not None:
            self._run = str(run)
            self._post("runs/update", run_id=self._run, status="RUNNING")
            return
        self._run = self._begin(self._experiment(settings["experiment"]), spec.get("name"))
        parameters = [
            {"key": key[:250], "value": str(value)[:_LONGEST_PARAMETER]}
            for key, value in _flat(spec)
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            part = parameters[start : start + _MOST_PARAMETERS]
            self._post("runs/log-batch", run_id=self._run, params=part)

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        metrics = [
            {
                "key": name,
                "value": encode_number(decode_number(value)),
                "timestamp": int(record["time"] * 1000),
                "step": record["step"],
            }
            for record in records
            if record["type"] == "metrics"
            for name, value in record["values"].items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            part = metrics[start : start + _MOST_METRICS]
            self._post("runs/log-batch", run_id=self._run, metrics=part)

    def state(self) -> dict[str, Any]:
        return {"run": self._run}

    def close(self, outcome: str) -> None:
        now = int(time.time() * 1000)
        self._post("runs/update", run_id=self._run, status=_STATUS[outcome], end_time=now)
        self._http.close()

    def _experiment(self, name: str) -> str:
        found = self._http.get("experiments/get-by-name", params={"experiment_name": name})
        if found.status_code == 404:
            try:
                return str(self._post("experiments/create", name=name)["experiment_id"])
            except SinkRefused:
                # Another job may have made it in between.
                found = self._http.get("experiments/get-by-name", params={"experiment_name": name})
        return str(_answer(found)["experiment"]["experiment_id"])

    def _begin(self, experiment: str, name: str | None) -> str:
        answer = self._post(
            "runs/create",
            experiment_id=experiment,
            start_time=int(time.time() * 1000),
            **({"run_name": name} if name else {}),
            tags=[{"key": "mlflow.source.name", "value": "octrain"}],
        )
        return str(answer["run"]["info"]["run_id"])

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        return _answer(self._http.post(path, json=body))


def _client(settings: Mapping[str, Any], environment: Mapping[str, str]) -> httpx.Client:
    server = mlflow_server(settings["tracking_uri"], environment)
    headers: dict[str, str] = {}
    password: tuple[str, str] | None = None
    # Only the operator's own server gets the operator's secrets, never one that a spec names.
    if environment.get("MLFLOW_TRACKING_URI"):
        if token := environment.get("MLFLOW_TRACKING_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        elif user := environment.get("MLFLOW_TRACKING_USERNAME"):
            password = (user, environment.get("MLFLOW_TRACKING_PASSWORD", ""))
    return httpx.Client(
        base_url=f"{server}/api/2.0/mlflow/",
        headers=headers,
        auth=password,
        timeout=_TIMEOUT_SECONDS,
        trust_env=False,
    )


def _answer(response: httpx.Response) -> dict[str, Any]:
    """The answer's JSON. Raises ``SinkRefused`` where trying again cannot help."""
    if response.is_success:
        answer: dict[str, Any] = response.json()
        return answer
    text = f"{response.request.url.path}: HTTP {response.status_code}: {response.text[:500]}"
    if response.status_code < 500 and response.status_code not in (408, 425, 429):
        raise SinkRefused(text)
    raise ConnectionError(text)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The spec's fields as ``training.optimizer.lr``; lists as they are."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, value
