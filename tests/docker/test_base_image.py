"""The image that the GPU node is built on, as far as it can be judged without it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


def test_its_torch_is_one_that_the_node_takes() -> None:
    """Else pip would have to replace it, which the constraint forbids, and the build would fail."""
    text = (REPOSITORY / "docker" / "worker.Dockerfile").read_text()
    (release,) = re.findall(r"^FROM nvcr\.io/nvidia/pytorch:([\d.]+)-py3 AS gpu$", text, re.M)
    told = re.search(rf"^# {re.escape(release)} brings torch (\S+) and Transformer", text, re.M)
    assert told is not None, f"what torch has {release}?"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, project["optional-dependencies"]["train"])
    (torch,) = (requirement for requirement in wanted if requirement.name == "torch")
    assert torch.specifier.contains(told[1], prereleases=True)
