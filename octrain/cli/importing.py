"""`octrain import accelerate`"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from octrain.cli import context
from octrain.cli.context import JsonOption
from octrain.cli.documents import read_document
from octrain.cli.exits import Exit

app = typer.Typer(help="Take settings of other tools over.", no_args_is_help=True)

# What Octrain sees to itself, so that leaving it out changes no training.
_OWN_BUSINESS = {
    "compute_environment": "Octrain has nodes of its own",
    "debug": "Octrain checks collectives by itself",
    "main_training_function": "Octrain brings the training loop",
    "machine_rank": "Octrain starts the processes",
    "main_process_ip": "Octrain starts the processes",
    "main_process_port": "Octrain starts the processes",
    "rdzv_backend": "Octrain starts the processes",
    "same_network": "Octrain starts the processes",
    "gpu_ids": "Octrain chooses GPUs that are free",
    "enable_cpu_affinity": "Octrain binds the processes",
}
_NOT_OFFERED = {
    "fsdp_config": "sharded training is not offered",
    "deepspeed_config": "DeepSpeed is not offered",
    "megatron_lm_config": "Megatron-LM is not offered",
    "dynamo_config": "torch.compile is not set by a job's recipe",
    "parallelism_config": "tensor and pipeline parallelism are not offered",
    "mpirun_config": "MPI is not offered",
    "ipex_config": "Intel's extension is not offered",
    "tpu_env": "TPUs are not offered",
}
_DISTRIBUTED = ("NO", "MULTI_GPU", "MULTI_CPU")
_PLAIN = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}
_MEANT_NOTHING: tuple[Any, ...] = (None, "", "no", "NO", False, {}, [])


@dataclass
class Imported:
    """Parts of a spec, and what became of each setting: where it went, or why it did not."""

    spec: dict[str, Any] = field(default_factory=dict)
    mapped: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def map(self, setting: str, value: Any, pointer: str) -> None:
        self.mapped.append({"setting": setting, "value": value, "to": pointer})

    def leave(self, setting: str, value: Any, reason: str) -> None:
        self.left_out.append({"setting": setting, "value": value, "reason": reason})

    def refuse(self, setting: str, value: Any, reason: str) -> None:
        self.refused.append({"setting": setting, "value": value, "reason": reason})


@app.command()
def accelerate(
    config: Annotated[
        str, typer.Argument(help="The file that accelerate config wrote; - for standard input.")
    ],
    save: Annotated[
        str | None, typer.Option(help="Store the recipe under this name on the server.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the parts into this YAML file.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Turn an Accelerate configuration into parts of a spec, and say what each setting became.

    The parts are YAML on standard output, the account of them is on standard error. Status 2 where
    no recipe can be made of it.
    """
    found = from_accelerate(read_document(config))
    if output is not None:
        output.write_text(_yaml(found.spec), encoding="utf-8")
    if json_output:
        context.print_json(vars(found))
    else:
        for row in found.mapped:
            print(
                f"mapped    {row['setting']} = {_shown(row['value'])} -> {row['to']}",
                file=sys.stderr,
            )
        for row in found.left_out:
            print(f"not needed  {row['setting']}: {row['reason']}", file=sys.stderr)
        for row in found.refused:
            print(
                f"refused   {row['setting']} = {_shown(row['value'])}: {row['reason']}",
                file=sys.stderr,
            )
        if output is None and found.spec:
            print(_yaml(found.spec), end="")
    if "recipe" not in found.spec:
        raise typer.Exit(Exit.USAGE)
    if save is not None:
        with context.client() as client:
            stored = client.recipes.save(
                save, {"recipe": found.spec["recipe"]}, "From an Accelerate configuration."
            )
        print(f"saved as {stored.name}, version {stored.version}", file=sys.stderr)


def from_accelerate(config: dict[str, Any]) -> Imported:
    """Parts of a spec (``recipe``, ``resources``) of what `accelerate config` writes."""
    found = Imported()
    rest = dict(config)
    _recipe(rest, found)
    _resources(rest, found)
    for name, value in rest.items():
        if name in _OWN_BUSINESS:
            found.leave(name, value, _OWN_BUSINESS[name])
        elif value in _MEANT_NOTHING:
            found.leave(name, value, "it asks for nothing")
        else:
            found.refuse(name, value, _NOT_OFFERED.get(name, "Octrain has no such setting"))
    return found


def _recipe(rest: dict[str, Any], found: Imported) -> None:
    precision = rest.pop("mixed_precision", "no")
    if precision in (None, False):  # YAML 1.1 reads a bare no as false
        precision = "no"
    settings = {name: rest.pop(name) for name in list(rest) if name.startswith("fp8_")}
    if precision != "fp8":
        dtype = _PLAIN.get(str(precision))
        if dtype is None:
            found.refuse("mixed_precision", precision, "must be fp8, bf16, fp16 or no")
            return
        found.spec["recipe"] = {"engine": "amp", "dtype": dtype}
        found.map("mixed_precision", precision, "/recipe")
        for name, value in settings.items():
            if value in _MEANT_NOTHING:
                found.leave(name, value, "it asks for nothing")
            else:
                found.refuse(name, value, f"mixed_precision is {precision}, so FP8 is off")
        return
    found.map("mixed_precision", "fp8", "/recipe")
    _fp8_recipe(settings, found)


def _fp8_recipe(settings: dict[str, Any], found: Imported) -> None:
    """Hand the settings to the spec; what it refuses is taken out, until the rest is a recipe."""
    from fp8core.spec import SpecInvalid, parse_spec
    from fp8core.spec.spellings import Canonical

    stand_ins = {
        "model": {"source": "path", "path": "model"},
        "data": {"source": "jsonl", "path": "data"},
    }
    recipe: dict[str, Any] = json.loads(json.dumps(settings))
    for _ in range(len(json.dumps(settings))):
        try:
            parse_spec({**stand_ins, "recipe": recipe})
            break
        except SpecInvalid as error:
            mine = [p for p in error.problems if p.pointer.startswith("/recipe/")]
            refused = [p for p in mine if _take_out(recipe, p.pointer, p.message, found)]
            if not refused:
                for problem in error.problems:
                    found.refuse(problem.pointer.removeprefix("/recipe/"), None, problem.message)
                return
            if any(row["setting"].endswith("backend") for row in found.refused):
                return  # another engine than the one that was meant is no translation
    canonical = Canonical({**stand_ins, "recipe": recipe})
    found.spec["recipe"] = canonical.document["recipe"]
    origins = {origin: pointer for pointer, origin in canonical.origins.items()}
    for name, value in recipe.items():
        inner = value.items() if name == "fp8_config" and isinstance(value, dict) else ()
        for key, item in inner or ((None, value),):
            if name == "fp8_config" and key is None:
                continue
            path = f"{name}/{key}" if key is not None else name
            plain = f"/recipe/{key or name}"
            found.map(path, item, origins.get(f"/recipe/{path}", plain))


def _take_out(recipe: dict[str, Any], pointer: str, reason: str, found: Imported) -> bool:
    """Remove what stands at the pointer; whether something did."""
    parts = pointer.split("/")[2:]
    place: Any = recipe
    if parts[0] == "fp8_config" and len(parts) > 1 and isinstance(recipe.get("fp8_config"), dict):
        place, parts = recipe["fp8_config"], parts[1:]
        name = f"fp8_config/{parts[0]}"
    else:
        name = parts[0]
    if parts[0] not in place:
        return False
    found.refuse(name, place.pop(parts[0]), reason)
    return True


def _resources(rest: dict[str, Any], found: Imported) -> None:
    if "distributed_type" in rest:
        kind = rest.pop("distributed_type")
        if str(kind) in _DISTRIBUTED or kind in _MEANT_NOTHING:
            found.leave("distributed_type", kind, "it follows from the number of GPUs")
        else:
            found.refuse("distributed_type", kind, f"only {', '.join(_DISTRIBUTED)} are offered")
    machines = 1
    if "num_machines" in rest:
        machines = rest.pop("num_machines")
        if machines in (0, 1, None):
            found.leave("num_machines", machines, "a job runs on one node")
        else:
            found.refuse("num_machines", machines, "a job runs on one node")
    cpu = "use_cpu" in rest and rest["use_cpu"] is True
    resources: dict[str, Any] = {}
    if cpu:
        resources["device"] = "cpu"
        found.map("use_cpu", rest.pop("use_cpu"), "/resources/device")
    if "num_processes" in rest:
        processes = rest.pop("num_processes")
        if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
            found.refuse("num_processes", processes, "must be a number from 1 on")
        elif cpu and processes > 1:
            found.refuse("num_processes", processes, "a job on CPUs has one process")
        elif cpu:
            found.leave("num_processes", processes, "a job on CPUs has one process")
        elif machines in (0, 1, None):
            resources["gpus"] = processes
            found.map("num_processes", processes, "/resources/gpus")
        else:
            found.refuse("num_processes", processes, "it counts the processes of several machines")
    if resources:
        found.spec["resources"] = resources


def _yaml(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
