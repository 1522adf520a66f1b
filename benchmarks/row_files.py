"""Files of measured rows: facts about the machine, and rows that one can read and compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """JSON: ``facts``, and ``rows`` behind them, a row a line."""
    text = json.dumps(dict(facts), indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(dict(row))}" for row in rows)
    path.write_text(f'{text},\n "rows": [\n{lines}\n ]\n}}\n')
