"""Recipes over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from octrain_api.auth import Reader, Writer
from octrain_api.dependencies import SessionDep
from octrain_api.idempotency.once import OnceDep
from octrain_api.recipes.schemas import (
    RecipeList,
    RecipeObject,
    RecipeRequest,
    RecipeVersions,
)
from octrain_api.recipes.service import RecipeService

router = APIRouter(prefix="/recipes", tags=["recipes"])

Name = Annotated[str, Path(max_length=64, pattern=r"^[^\x00]+$")]


@router.get("")
async def list_recipes(
    session: SessionDep,
    principal: Reader,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[str | None, Query(max_length=64, pattern=r"^[^\x00]*$")] = None,
) -> RecipeList:
    """The service's presets with their reasons, then your own recipes by name."""
    items, next_cursor = await RecipeService(session, principal).page(limit, cursor)
    return RecipeList(items=items, next_cursor=next_cursor)


@router.post("", status_code=201)
async def save_recipe(
    body: RecipeRequest, response: Response, session: SessionDep, principal: Writer, once: OnceDep
) -> RecipeObject:
    """Store a recipe. A name that you used before gets its next version; old ones stay."""
    service = RecipeService(session, principal)
    version = await once.earlier()
    if version is not None:
        once.mark(response)
        return await service.get(body.name, int(version))
    made = await service.save(body)
    await once.made(str(made.version))
    return made


@router.get("/{name}")
async def get_recipe(
    name: Name,
    session: SessionDep,
    principal: Reader,
    version: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
) -> RecipeObject:
    """One recipe in its newest version, or in the one asked for."""
    return await RecipeService(session, principal).get(name, version)


@router.get("/{name}/versions")
async def list_recipe_versions(
    name: Name, session: SessionDep, principal: Reader
) -> RecipeVersions:
    """Every version of a recipe, newest first."""
    return RecipeVersions(items=await RecipeService(session, principal).versions(name))


@router.delete("/{name}", status_code=204)
async def withdraw_recipe(name: Name, session: SessionDep, principal: Writer) -> None:
    """List the recipe no more. Its versions can still be named, so that old specs stay valid."""
    await RecipeService(session, principal).withdraw(name)
