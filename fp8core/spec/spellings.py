"""The other ways to write a spec, turned into the canonical one.

Accepted: the shorthand strings of `tokenizer`, `training.precision` and `training.on_divergence`,
an omitted discriminator that has a default, and all that Hugging Face Accelerate knows: the kwargs
of `TERecipeKwargs` and `AORecipeKwargs`, an `fp8_config` block, and the names `accelerate config`
and `accelerate launch` use.
"""

from __future__ import annotations

from typing import Any

from fp8core.spec.document import kind_of, quoted
from fp8core.spec.problems import Problem, pointer_of

_SHORTHAND_TOKENIZERS = ("bytes", "model")
_SHORTHAND_PRECISIONS = ("method", "throughput", "memory")
_SHORTHAND_ACTIONS = ("fail", "skip_step", "fallback_bf16")

# Accelerate's names for the fields of a recipe, besides the same with "fp8_" before them.
_ALIASES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
}
_PREFIXED = (
    "backend", "margin", "interval", "amax_history_len", "amax_compute_algo",
    "override_linear_precision", "use_autocast_during_eval", "use_mxfp8_block_scaling",
    "enable_fsdp_float8_all_gather", "pad_inner_dim", "opt_level",
)  # fmt: skip
_ALIASES |= {f"fp8_{name}": _ALIASES.get(name, name) for name in (*_PREFIXED, *_ALIASES)}
_BACKENDS = {"te": "te", "ao": "torchao"}
_ENGINES = ("te", "torchao", "emulated", "amp")
_SCALED_ENGINES = ("te", "emulated")
_WORDS_FOR_BOOLEANS = {
    "true": True, "yes": True, "y": True, "on": True, "1": True,
    "false": False, "no": False, "n": False, "off": False, "0": False,
}  # fmt: skip


class Canonical:
    """A document in canonical spelling.

    `origins` leads from pointers into it to those of the document as submitted, where they differ;
    `problems` holds what could not be translated, with pointers into the submitted document.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = dict(document)
        self.origins: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._shorthands()
        if isinstance(self.document.get("recipe"), dict):
            recipe = _Recipe(self.document["recipe"])
            self.document["recipe"] = recipe.fields
            self.problems += recipe.problems
            for field, path in recipe.origins.items():
                self.origins[pointer_of(("recipe", field))] = pointer_of(("recipe", *path))

    def origin(self, pointer: str) -> str:
        """The pointer, in the submitted document, of what stands at `pointer` in this one."""
        for canonical, submitted in self.origins.items():
            if pointer == canonical or pointer.startswith(canonical + "/"):
                return submitted + pointer[len(canonical) :]
        return pointer

    def _shorthands(self) -> None:
        tokenizer = self.document.get("tokenizer")
        if isinstance(tokenizer, str) and tokenizer in _SHORTHAND_TOKENIZERS:
            self.document["tokenizer"] = {"source": tokenizer}
        training = self.document.get("training")
        if not isinstance(training, dict):
            return
        training = self.document["training"] = dict(training)
        precision, schedule = training.get("precision"), training.get("schedule")
        if isinstance(precision, str) and precision in _SHORTHAND_PRECISIONS:
            training["precision"] = {"preset": precision}
        action = training.get("on_divergence")
        if isinstance(action, str) and action in _SHORTHAND_ACTIONS:
            training["on_divergence"] = {"action": action}
            self.origins["/training/on_divergence/action"] = "/training/on_divergence"
        if isinstance(schedule, dict):
            training["schedule"] = {"name": "cosine", **schedule}


class _Recipe:
    """A recipe on its way to canonical spelling; `origins` maps fields to the path they came by."""

    def __init__(self, submitted: dict[str, Any]) -> None:
        self.fields: dict[str, Any] = {}
        self.origins: dict[str, tuple[str, ...]] = {}
        self.problems: list[Problem] = []
        self._collect(submitted, ())
        self._values()
        self._engine()
        self._mxfp8()
        self._torchao()
        if self.fields["engine"] in _SCALED_ENGINES:
            self.fields.setdefault("scaling", "delayed")

    def _refuse(self, field: str, message: str, code: str, suggestion: str | None = None) -> None:
        """Notes a problem of `field` and takes the field out, so that it is reported only once."""
        path = self.origins.pop(field, (field,))
        self.problems.append(Problem(pointer_of(("recipe", *path)), message, code, suggestion))
        self.fields.pop(field, None)

    def _collect(self, submitted: dict[str, Any], block: tuple[str, ...]) -> None:
        for key, value in submitted.items():
            if key == "fp8_config" and not block and isinstance(value, dict):
                self._collect(value, (key,))
                continue
            if key == "fp8_config" and not block:
                message = f"must be an object, not {kind_of(value)}"
                self.problems.append(Problem("/recipe/fp8_config", message, "wrong_type"))
                continue
            field, path = _ALIASES.get(key, key), (*block, key)
            if field in self.fields:
                other = "/".join(self.origins.get(field, (field,)))
                message = f"is the same setting as {quoted(other)}; keep one of the two"
                self.problems.append(Problem(pointer_of(("recipe", *path)), message, "conflict"))
                continue
            self.fields[field] = value
            if path != (field,):
                self.origins[field] = path

    def _values(self) -> None:
        """Accelerate compares names without regard to case; `launch` writes tuples as text."""
        for field, canonical in (("fp8_format", str.upper), ("amax_compute_algo", str.lower)):
            if isinstance(value := self.fields.get(field), str):
                self.fields[field] = canonical(value)
        override = self.fields.get("override_linear_precision")
        if isinstance(override, str):
            words = [word.strip().lower() for word in override.strip("()[] ").split(",")]
            if all(word in _WORDS_FOR_BOOLEANS for word in words):
                values = [_WORDS_FOR_BOOLEANS[word] for word in words]
                self.fields["override_linear_precision"] = values
        precision = self.fields.get("mixed_precision")
        if precision == "fp8":
            del self.fields["mixed_precision"]
        elif "mixed_precision" in self.fields:
            self._refuse(
                "mixed_precision",
                f'only "fp8" can be meant beside an FP8 recipe, not {kind_of(precision)}; for '
                'training without FP8 write {"engine": "amp", "dtype": "bf16"}',
                "unsupported",
            )

    def _engine(self) -> None:
        fields = self.fields
        if isinstance(engine := fields.get("engine"), str) and engine.lower() in _ENGINES:
            fields["engine"] = engine.lower()
        if "backend" in fields:
            self._backend(fields["backend"])
        for field in ("opt_level", "optimization_level"):
            if field in fields:
                self._refuse(
                    field, "is a setting of MS-AMP, which is no longer maintained and not offered",
                    "unsupported",
                )  # fmt: skip
        fields.setdefault("engine", "te")

    def _backend(self, backend: Any) -> None:
        name = backend.lower() if isinstance(backend, str) else None
        path = self.origins.get("backend", ("backend",))
        engine_known = "engine" in self.fields
        if name == "msamp":
            message = "MS-AMP is no longer maintained and not offered; choose TE or AO"
            self._refuse("backend", message, "unsupported")
        elif name not in _BACKENDS:
            message = f'must be "TE" or "AO", not {kind_of(backend)}'
            self._refuse("backend", message, "not_one_of")
        elif engine_known and self.fields["engine"] != _BACKENDS[name]:
            message = f"contradicts the engine {quoted(str(self.fields['engine']))}; keep one"
            self._refuse("backend", message, "conflict")
        else:
            del self.fields["backend"]
            self.origins.pop("backend", None)
            if not engine_known:
                self.origins["engine"] = path
            self.fields["engine"] = _BACKENDS[name]
        if "engine" not in self.fields:
            # Which fields are right cannot be told; null is refused at the same pointer, and only
            # one problem is reported for each.
            self.fields["engine"], self.origins["engine"] = None, path

    def _mxfp8(self) -> None:
        field = "use_mxfp8_block_scaling"
        if field not in self.fields:
            return
        wanted, scaling = self.fields[field], self.fields.get("scaling")
        if not isinstance(wanted, bool):
            self._refuse(field, f"must be true or false, not {kind_of(wanted)}", "wrong_type")
        elif self.fields["engine"] != "te":
            self._refuse(field, "belongs to Transformer Engine (engine te)", "unsupported")
        elif scaling is not None and wanted != (scaling == "mxfp8"):
            self._refuse(field, f"contradicts the scaling {quoted(str(scaling))}", "conflict")
        else:
            del self.fields[field]
            path = self.origins.pop(field, (field,))
            if wanted:
                self.fields["scaling"] = "mxfp8"
                self.origins["scaling"] = path
                self._drop_neutral()

    def _drop_neutral(self) -> None:
        """Accelerate hands MXFP8 only what differs from its defaults; these ask for nothing."""
        for field, neutral in (
            ("margin", 0),
            ("interval", 1),
            ("override_linear_precision", [False, False, False]),
        ):
            value = self.fields.get(field)
            if value == neutral and type(value) is type(neutral):
                del self.fields[field]

    def _torchao(self) -> None:
        if self.fields["engine"] != "torchao":
            return
        for field in ("config", "module_filter_func"):
            if field in self.fields and self.fields[field] is None:
                del self.fields[field]
        if self.fields.get("enable_fsdp_float8_all_gather") is False:
            del self.fields["enable_fsdp_float8_all_gather"]
