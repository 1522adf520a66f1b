"""What the client that waits can do, the one for asyncio can, with the same parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import octrain
from octrain.client import AsyncJob, AsyncJobs, Job, Jobs
from octrain.client.administration import AsyncKeys
from octrain.client.clients import AsyncDatasets, Keys, Recipes, Webhooks
from octrain.client.datasets import Datasets
from octrain.client.library import AsyncRecipes, AsyncWebhooks

# A notebook asks a job that waits by itself; the other has to be awaited before it is shown.
ONLY_ASYNCHRONOUS = {"load_curve"}
ATTRIBUTES = {"data"}  # of the objects of the one, a property of the other's class


def public(one: object) -> set[str]:
    return {name for name in dir(one) if not name.startswith("_")}


def parameters(method: Any) -> list[inspect.Parameter]:
    return [one for one in inspect.signature(method).parameters.values() if one.name != "self"]


def same(waiting: object, asynchronous: object) -> None:
    names = public(waiting) - ATTRIBUTES
    assert names == public(asynchronous) - ATTRIBUTES - ONLY_ASYNCHRONOUS
    for name in names:
        one, other = getattr(waiting, name), getattr(asynchronous, name)
        if callable(one):
            assert parameters(one) == parameters(other), name
            kinds = {parameter.kind for parameter in parameters(one)}
            assert inspect.Parameter.VAR_KEYWORD not in kinds or name in ("list", "select"), name


@pytest.mark.parametrize(
    ("waiting", "asynchronous"),
    [
        (Job, AsyncJob),
        (Jobs, AsyncJobs),
        (Datasets, AsyncDatasets),
        (Recipes, AsyncRecipes),
        (Webhooks, AsyncWebhooks),
        (Keys, AsyncKeys),
    ],
)
def test_both_have_the_same_methods(waiting: type, asynchronous: type) -> None:
    same(waiting, asynchronous)


async def test_both_clients_have_the_same_members() -> None:
    async with octrain.AsyncClient("http://127.0.0.1:1", "k") as asynchronous:
        with octrain.Client("http://127.0.0.1:1", "k") as client:
            same(client, asynchronous)
