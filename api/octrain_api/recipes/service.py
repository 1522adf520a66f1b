"""Named recipes: kept in versions, and put in their places in a job's spec."""

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from fp8core.spec import SpecInvalid, parse_spec
from octrain_api.auth import Principal
from octrain_api.merge_patch import merge_patch
from octrain_api.models import RecipeVersion
from octrain_api.problems import Problem, ProblemError, not_found
from octrain_api.recipes.presets import BY_NAME, PRESETS, Preset
from octrain_api.recipes.repository import RecipeRepository
from octrain_api.recipes.schemas import RecipeObject, RecipeRequest

# What a fragment is completed with to be judged as a whole spec.
_STAND_IN: dict[str, Any] = {
    "model": {"source": "path", "path": "model"},
    "data": {"source": "builtin"},
}
_PARTS = ("recipe", "conversion", "adapter", "training")


class RecipeService:
    """One owner's recipes beside the presets of the service."""

    def __init__(self, session: AsyncSession, principal: Principal) -> None:
        self._owner = principal.owner
        self._recipes = RecipeRepository(session)

    async def save(self, request: RecipeRequest) -> RecipeObject:
        """Store a new recipe, or the next version of the owner's recipe of that name."""
        if request.name in BY_NAME:
            message = f"{request.name!r} is a preset of the service; choose another name"
            raise _invalid([ProblemError(pointer="/name", message=message, code="taken")])
        row = await self._recipes.append(
            RecipeVersion(
                owner=self._owner,
                name=request.name,
                description=request.description,
                fragment=_checked(request.fragment),
            )
        )
        return _of_row(row)

    async def get(self, name: str, version: int | None) -> RecipeObject:
        """One recipe; 404 when there is none, or no such version."""
        preset = BY_NAME.get(name)
        if preset is not None and version in (None, 1):
            return _of_preset(preset)
        row = await self._recipes.get(self._owner, name, version)
        if row is None:
            raise not_found("recipe", name if version is None else f"{name} version {version}")
        return _of_row(row)

    async def page(self, limit: int, after: str | None) -> tuple[list[RecipeObject], str | None]:
        """The presets on the first page, then the owner's by name; where the next page begins."""
        rows = await self._recipes.newest(self._owner, limit + 1, after or "")
        items = [_of_row(row) for row in rows[:limit]]
        if after is None:
            items = [_of_preset(preset) for preset in PRESETS] + items
        return items, items[-1].name if len(rows) > limit else None

    async def versions(self, name: str) -> list[RecipeObject]:
        """Every version, newest first."""
        if name in BY_NAME:
            return [_of_preset(BY_NAME[name])]
        rows = await self._recipes.versions(self._owner, name)
        if not rows:
            raise not_found("recipe", name)
        return [_of_row(row) for row in rows]

    async def withdraw(self, name: str) -> None:
        """No longer list it; jobs made from it keep what it was."""
        if name in BY_NAME or not await self._recipes.withdraw(self._owner, name):
            raise not_found("recipe of yours", name)

    async def expand(self, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """A spec whose `recipe` names a stored one, with that one's parts in their places.

        `{"name": ..., "version": ...}` is replaced; other keys of `recipe`, and all of the spec's
        own parts, go over the stored ones (RFC 7396). Also what it was made from, or None. Specs
        that name no recipe come back as they are. 422 when there is no such recipe.
        """
        given = body.get("recipe")
        if not isinstance(given, dict) or "name" not in given:
            return body, None
        name, version = given["name"], given.get("version")
        if not isinstance(name, str):
            raise _at("/recipe/name", "must be the name of a recipe", "wrong_type")
        if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
            raise _at("/recipe/version", "must be a whole number", "wrong_type")
        try:
            found = await self.get(name, version)
        except Problem as error:
            pointer = "/recipe/name" if version is None else "/recipe/version"
            raise _at(pointer, f"{error.detail} GET /recipes lists them.", "not_found") from error
        own = {**body, "recipe": {k: v for k, v in given.items() if k not in ("name", "version")}}
        return merge_patch(found.fragment, own), {"name": name, "version": found.version}


def _checked(fragment: dict[str, Any]) -> dict[str, Any]:
    """The fragment in canonical spelling with every default, or 422 with pointers into it."""
    errors = [
        ProblemError(
            pointer=f"/fragment/{key}",
            message=f"a recipe holds {', '.join(_PARTS)}; of training only precision",
            code="unknown_key",
        )
        for key in fragment
        if key not in _PARTS
    ]
    training = fragment.get("training")
    if isinstance(training, dict) and set(training) - {"precision"}:
        message = "of training, a recipe holds precision only"
        errors.append(
            ProblemError(pointer="/fragment/training", message=message, code="unknown_key")
        )
    if "recipe" not in fragment:
        errors.append(
            ProblemError(pointer="/fragment/recipe", message="is missing", code="missing")
        )
    if errors:
        raise _invalid(errors)
    try:
        resolved = parse_spec(_STAND_IN | fragment).resolved()
    except SpecInvalid as error:
        raise _invalid(
            [
                ProblemError(
                    pointer=f"/fragment{p.pointer}",
                    message=p.message,
                    code=p.code,
                    suggestion=p.suggestion,
                )
                for p in error.problems
            ]
        ) from error
    kept = {key: resolved[key] for key in fragment if key != "training"}
    if "training" in fragment:
        kept["training"] = {"precision": resolved["training"]["precision"]}
    return kept


def _at(pointer: str, message: str, code: str) -> Problem:
    return _invalid(
        [ProblemError(pointer=pointer, message=message, code=code)],
        "spec-invalid",
        "The job's spec is not valid",
    )


def _invalid(
    errors: list[ProblemError],
    slug: str = "request-invalid",
    title: str = "Request not valid",
) -> Problem:
    detail = errors[0].message if len(errors) == 1 else f"{len(errors)} things are wrong."
    return Problem(422, slug, title, detail, errors=errors)


def _of_preset(preset: Preset) -> RecipeObject:
    return RecipeObject(
        name=preset.name,
        version=1,
        preset=True,
        owner=None,
        title=preset.title,
        description=" ".join(preset.reasons),
        needs=preset.needs,
        fragment=preset.fragment,
        created_at=None,
    )


def _of_row(row: RecipeVersion) -> RecipeObject:
    return RecipeObject(
        name=row.name,
        version=row.version,
        preset=False,
        owner=row.owner,
        title=None,
        description=row.description,
        needs=None,
        fragment=row.fragment,
        created_at=row.created_at,
    )
