"""Named recipes: presets that hold, an owner's versions, and specs that name them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fp8core.spec import parse_spec
from octrain_api.merge_patch import merge_patch
from octrain_api.recipes.presets import PRESETS

FRAGMENT = {
    "recipe": {"engine": "emulated", "amax_history_length": 8},
    "conversion": {"keep_first_last": True},
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_preset_is_a_valid_part_of_a_spec(preset: Any) -> None:
    rest = {"model": {"source": "path", "path": "m"}, "data": {"source": "builtin"}}
    resolved = parse_spec(rest | preset.fragment).resolved()
    for key, value in preset.fragment["recipe"].items():
        assert resolved["recipe"][key] == value
    assert preset.reasons
    assert preset.needs


async def test_presets_come_first_with_their_reasons(service: Any) -> None:
    user = await service.user()
    items = (await user.get("/recipes")).json()["items"]
    assert [item["name"] for item in items] == [preset.name for preset in PRESETS]
    assert all(item["preset"] and item["description"] and item["needs"] for item in items)
    one = (await user.get("/recipes/te-delayed")).json()
    assert one["fragment"]["recipe"]["amax_history_len"] == 16
    assert (await user.get("/recipes/te-delayed?version=2")).status_code == 404


async def test_versions_are_kept_and_never_change(service: Any) -> None:
    user = await service.user()
    first = await user.post("/recipes", json={"name": "team.std", "fragment": FRAGMENT})
    assert first.status_code == 201, first.text
    assert first.json()["version"] == 1
    # Canonical spelling, every default of the parts that were given, nothing of the others.
    assert first.json()["fragment"]["recipe"]["amax_history_len"] == 8
    assert first.json()["fragment"]["recipe"]["margin"] == 0
    assert set(first.json()["fragment"]) == {"recipe", "conversion"}
    second = await user.post(
        "/recipes", json={"name": "team.std", "fragment": {"recipe": {"engine": "amp"}}}
    )
    assert second.json()["version"] == 2
    assert (await user.get("/recipes/team.std")).json()["version"] == 2
    old = (await user.get("/recipes/team.std?version=1")).json()
    assert old["fragment"] == first.json()["fragment"]
    versions = (await user.get("/recipes/team.std/versions")).json()["items"]
    assert [item["version"] for item in versions] == [2, 1]
    stranger = await service.user()
    assert (await stranger.get("/recipes/team.std")).status_code == 404
    assert (await stranger.delete("/recipes/team.std")).status_code == 404

    assert (await user.delete("/recipes/team.std")).status_code == 204
    assert (await user.get("/recipes/team.std")).status_code == 404
    assert (await user.get("/recipes/team.std?version=1")).status_code == 200
    again = await user.post("/recipes", json={"name": "team.std", "fragment": FRAGMENT})
    assert again.json()["version"] == 3


async def test_the_list_pages_by_name(service: Any) -> None:
    user = await service.user()
    names = [f"r{n:02d}" for n in range(7)]
    for name in reversed(names):
        await user.post("/recipes", json={"name": name, "fragment": FRAGMENT})
    found: list[str] = []
    cursor = None
    for _ in range(5):
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await user.get("/recipes", params=params)).json()
        found += [item["name"] for item in page["items"] if not item["preset"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == names


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"name": "te-delayed", "fragment": FRAGMENT}, "/name"),
        ({"name": "Upper", "fragment": FRAGMENT}, "/name"),
        ({"name": "x", "fragment": {}}, "/fragment/recipe"),
        ({"name": "x", "fragment": FRAGMENT | {"data": {}}}, "/fragment/data"),
        ({"name": "x", "fragment": FRAGMENT | {"training": {"steps": 1}}}, "/fragment/training"),
        (
            {"name": "x", "fragment": {"recipe": {"engine": "te", "amax_hist_len": 1}}},
            "/fragment/recipe/amax_hist_len",
        ),
        ({"name": "x", "fragment": FRAGMENT, "more": 1}, "/more"),
    ],
)
async def test_a_recipe_that_is_none_is_refused(service: Any, body: Any, pointer: str) -> None:
    user = await service.user()
    answer = await user.post("/recipes", json=body)
    assert answer.status_code == 422
    assert pointer in [error["pointer"] for error in answer.json()["errors"]]
    assert not [i for i in (await user.get("/recipes")).json()["items"] if not i["preset"]]


async def test_a_spec_names_a_recipe_and_goes_over_it(service: Any, spec: Any) -> None:
    user = await service.user()
    await user.post("/recipes", json={"name": "std", "fragment": FRAGMENT})
    spec["recipe"] = {"name": "std", "version": 1, "margin": 2}
    spec["conversion"] = {"output_head": True}
    made = await user.post("/jobs", json=spec)
    assert made.status_code == 201, made.text
    job = made.json()
    assert job["recipe_from"] == {"name": "std", "version": 1}
    assert job["spec"]["recipe"]["amax_history_len"] == 8
    assert job["spec"]["recipe"]["margin"] == 2
    assert job["spec"]["conversion"]["keep_first_last"] is True
    assert job["spec"]["conversion"]["output_head"] is True
    plain = (await user.post("/jobs", json=spec | {"recipe": {"engine": "amp"}})).json()
    assert plain["recipe_from"] is None


@pytest.mark.parametrize(
    ("recipe", "pointer"),
    [
        ({"name": "none-such"}, "/recipe/name"),
        ({"name": 3}, "/recipe/name"),
        ({"name": "te-delayed", "version": 7}, "/recipe/version"),
        ({"name": "te-delayed", "version": True}, "/recipe/version"),
        ({"name": "te-delayed", "version": "1"}, "/recipe/version"),
        ({"name": "emulated-delayed", "margin": -1}, "/recipe/margin"),
    ],
)
async def test_a_recipe_that_cannot_be_had_is_told(
    service: Any, spec: Any, recipe: Any, pointer: str
) -> None:
    user = await service.user()
    answer = await user.post("/jobs", json=spec | {"recipe": recipe})
    assert answer.status_code == 422, answer.text
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
    assert (await user.get("/jobs")).json()["items"] == []


@pytest.mark.parametrize(
    ("target", "patch", "merged"),
    [
        # The examples of RFC 7396, appendix A.
        ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
        ('{"a":"b"}', '{"a":null}', "{}"),
        ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
        ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
        ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
        ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
        ('["a","b"]', '["c","d"]', '["c","d"]'),
        ('{"a":"b"}', '["c"]', '["c"]'),
        ('{"a":"foo"}', "null", "null"),
        ('{"a":"foo"}', '"bar"', '"bar"'),
        ('{"e":null}', '{"a":1}', '{"e":null,"a":1}'),
        ("[1,2]", '{"a":"b","c":null}', '{"a":"b"}'),
        ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
    ],
)
def test_merge_patch_does_what_its_rfc_says(target: str, patch: str, merged: str) -> None:
    before = json.loads(target)
    assert merge_patch(before, json.loads(patch)) == json.loads(merged)
    assert before == json.loads(target)
