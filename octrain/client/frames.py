"""Metrics as arrays and tables. Each library is loaded when it is first needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from octrain.client.libraries import library
from octrain.client.series import Series

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

__all__ = ["Metrics", "metrics_of"]

_COLUMNS = ("job_id", "name", "attempt", "step", "value")


class Metrics(list[Series]):
    """Series of metrics: a list of them that also becomes arrays and tables."""

    def to_numpy(self) -> dict[str, np.ndarray]:
        """For each name a float64 array of shape [points, 2]: step, value; attempts joined in
        their order, and jobs too (``Series.to_numpy`` gives one apart). Needs numpy."""
        numpy = library("numpy")
        arrays: dict[str, list[Any]] = {}
        for series in self:
            arrays.setdefault(series.name, []).append(series.to_numpy())
        return {name: numpy.concatenate(parts) for name, parts in arrays.items()}

    def to_pandas(self, *, wide: bool = False) -> pd.DataFrame:
        """A frame with a row for each point: ``job_id, name, attempt, step, value``.

        ``wide`` gives one row a step and one column a metric instead (the values of the last
        attempt that has the step); of several jobs one a job and metric. Needs pandas.
        """
        pandas = library("pandas")
        frame: pd.DataFrame = pandas.DataFrame(self._columns(), columns=list(_COLUMNS))
        if not wide:
            return frame
        columns = ["job_id", "name"] if frame["job_id"].nunique() > 1 else ["name"]
        frame = frame.drop_duplicates([*columns, "step"], keep="last")
        return frame.pivot(
            index="step", columns=columns if len(columns) > 1 else "name", values="value"
        )

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with a row for each point: ``job_id``, ``name`` (strings),
        ``attempt``, ``step`` (int64) and ``value`` (float64). Needs pyarrow."""
        pa = library("pyarrow")
        kinds = (pa.string(), pa.string(), pa.int64(), pa.int64(), pa.float64())
        schema = pa.schema(list(zip(_COLUMNS, kinds, strict=True)))
        return pa.table(self._columns(), schema=schema)

    def _columns(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for series in self:
            columns["job_id"] += [series.job_id] * len(series.points)
            columns["name"] += [series.name] * len(series.points)
            columns["attempt"] += [series.attempt] * len(series.points)
            columns["step"] += series.steps
            columns["value"] += series.values
        return columns


def metrics_of(found: Iterable[Any]) -> Metrics:
    """The series of an answer."""
    return Metrics(Series.model_validate(item) for item in found)
