"""Takes the built dashboard into the wheel and the source distribution, where there is one."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IN_PACKAGE = "octrain_api/dashboard/dist"


class DashboardHook(BuildHookInterface[Any]):
    """`dashboard/dist` is ignored by git, so the build would not see it by itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files; an editable install reads them in the checkout."""
        dist = Path(self.root) / "dashboard" / "dist"
        if version == "editable" or not (dist / "index.html").is_file():
            return
        target = _IN_PACKAGE if self.target_name == "wheel" else "dashboard/dist"
        for path in sorted(dist.rglob("*")):
            inner = path.relative_to(dist)
            # The build's own records.
            if path.is_file() and not any(part.startswith(".") for part in inner.parts):
                build_data["force_include"][str(path)] = f"{target}/{inner.as_posix()}"
