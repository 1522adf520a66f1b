"""The two sides of `accelerate_faults`: one model made ready for FP8 training by each of them.

A probe sees a `Side` and the `Prepared` it gives, and cannot tell which of the two it has. What
each side does is what its users do: ``Accelerator.prepare`` with its recipe kwargs here,
``convert`` with an engine there, both with an optimizer that was made before.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

# Octrain's side imports what it uses where it uses it; the peer's runs without.
if TYPE_CHECKING:
    from fp8core.spec import JobSpec
    from fp8core.spec.recipe import Recipe

Backend = Literal["te", "torchao"]
Loss = Callable[[nn.Module], Tensor]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def can_run(backend: Backend) -> bool:
    """Whether this machine has what Accelerate's ``backend`` needs."""
    if backend == "torchao":
        return importlib.util.find_spec("torchao") is not None
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


@dataclass
class Prepared:
    """A model ready to train in FP8. ``classes``: its modules' classes before, by name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    classes: dict[str, type[nn.Module]]
    backward: Callable[[Loss], Tensor]
    """Forward and backward of one micro-batch; gives the loss."""
    scale: Callable[[str], float]
    """The scale of a layer's input with delayed scaling, after the last micro-batch."""
    recompute: Callable[[], None]
    """Switches gradient checkpointing of a transformers model on."""
    give_back: Callable[[], tuple[nn.Module, dict[str, Any]]]
    """The model without FP8, as this side gives it back, and what it says about that."""
    save: Callable[[Path], None]
    """Writes the weights as safetensors into a folder."""

    def changed_classes(self) -> list[str]:
        """Names of the modules that are of another class than before."""
        now = {name: type(module) for name, module in self.model.named_modules()}
        return [name for name, kind in self.classes.items() if now.get(name) is not kind]

    def train(self, loss: Loss) -> Tensor:
        self.optimizer.zero_grad()
        value = self.backward(loss)
        self.optimizer.step()
        return value


class Side(Protocol):
    name: str

    def prepare(self, model: nn.Module, backend: Backend, **options: Any) -> Prepared:
        """``options``: the recipe's fields, and ``optimizer`` (else AdamW over what is trained)."""
        ...

    def documented_algorithm(self) -> str:
        """The ``amax_compute_algo`` that is said to be the default."""
        ...

    def sharded(self, model: nn.Module) -> Prepared:
        """The model as prepared for sharded data-parallel training (FSDP2) with te."""
        ...

    def deepspeed(self, model: nn.Module, **recipe: Any) -> Prepared:
        """The model as prepared for DeepSpeed with a te recipe."""
        ...


def classes_of(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules()}


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


class OctrainSide:
    """fp8core's conversion and engines; on a CPU the emulated engine in the place of te."""

    name = "octrain"

    def prepare(
        self,
        model: nn.Module,
        backend: Backend,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        output_head: bool = False,
        **recipe: Any,
    ) -> Prepared:
        from fp8core.conversion import convert, restore
        from fp8core.engines import create
        from fp8core.spec import Conversion
        from fp8core.training.activation_checkpointing import enable_gradient_checkpointing

        here = "emulated" if backend == "te" and not can_run("te") else backend
        engine = create(self._recipe({"engine": here, **recipe}), device())
        classes = classes_of(model)
        optimizer = optimizer or optimizer_for(model)
        # Accelerate keeps the first and the last Linear with torchao, and converts heads with te.
        # Fused blocks are fed by the trainer; a probe calls the model as any program does.
        conversion = Conversion(
            output_head=output_head, keep_first_last=backend == "torchao", fuse="none"
        )
        report = convert(model, engine, conversion)
        model = report.model
        engine.prepare(model)

        def backward(loss: Loss) -> Tensor:
            with engine.training_context():
                value = loss(model)
            value.backward()
            engine.after_backward()
            return value.detach()

        def scale(name: str) -> float:
            state = {key.replace("/", "."): value for key, value in engine.state_dict().items()}
            return float(state[f"{name}.forward.scale"][0])

        def save(folder: Path) -> None:
            from safetensors.torch import save_file

            save_file(model.state_dict(), folder / "model.safetensors")

        return Prepared(
            model,
            optimizer,
            classes,
            backward,
            scale,
            recompute=lambda: enable_gradient_checkpointing(model, engine),
            give_back=lambda: (restore(model, report), {}),
            save=save,
        )

    def documented_algorithm(self) -> str:
        from fp8core.spec.recipe import TEDelayed

        return TEDelayed().amax_compute_algo

    def sharded(self, model: nn.Module) -> Prepared:
        return self._refused({"resources": {"fsdp_version": 2}, "recipe": {}})

    def deepspeed(self, model: nn.Module, **recipe: Any) -> Prepared:
        return self._refused({"resources": {"deepspeed_config": {}}, "recipe": recipe})

    def _recipe(self, recipe: dict[str, Any]) -> Recipe:
        return self._spec({"recipe": recipe}).recipe

    def _refused(self, parts: dict[str, Any]) -> Prepared:
        self._spec(parts)
        raise AssertionError("this side took a setting that it does not have")

    def _spec(self, parts: dict[str, Any]) -> JobSpec:
        from fp8core.spec import parse_spec

        model = {"source": "config", "config": {"model_type": "llama"}}
        return parse_spec({"model": model, "data": {"source": "builtin"}, **parts})


class AccelerateSide:
    """Accelerate as it is installed."""

    name = "accelerate"

    def prepare(
        self,
        model: nn.Module,
        backend: Backend,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        output_head: bool = False,
        **recipe: Any,
    ) -> Prepared:
        # Which layers it converts cannot be said with te: heads are always among them.
        from accelerate import Accelerator
        from accelerate.utils import AORecipeKwargs, TERecipeKwargs

        _forget_the_last_accelerator()
        handler = TERecipeKwargs(**recipe) if backend == "te" else AORecipeKwargs(**recipe)
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[handler])
        classes = classes_of(model)
        optimizer = optimizer or optimizer_for(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        return self._prepared(accelerator, model, optimizer, classes)

    def documented_algorithm(self) -> str:
        from accelerate.utils import TERecipeKwargs

        return str(TERecipeKwargs().amax_compute_algo)

    def sharded(self, model: nn.Module) -> Prepared:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import TERecipeKwargs

        _be_the_only_rank()
        _forget_the_last_accelerator()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator = Accelerator(
            mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()], fsdp_plugin=plugin
        )
        if not accelerator.is_fsdp2:
            raise RuntimeError(f"Accelerate chose {accelerator.distributed_type}, not FSDP2")
        classes = classes_of(model)
        model, optimizer = accelerator.prepare(model, optimizer_for(model))
        return self._prepared(accelerator, model, optimizer, classes)

    def deepspeed(self, model: nn.Module, **recipe: Any) -> Prepared:
        """DeepSpeed itself is not needed: of ``_prepare_deepspeed``, what it does about FP8.

        That is a call of ``apply_fp8_autowrap`` with some handler of the accelerator. Which one is
        read from the method's own code as installed, and the call is made.
        """
        import ast
        import inspect
        import textwrap

        from accelerate import Accelerator
        from accelerate.utils import TERecipeKwargs
        from accelerate.utils.transformer_engine import apply_fp8_autowrap

        _forget_the_last_accelerator()
        handler = TERecipeKwargs(**recipe)
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[handler])
        source = textwrap.dedent(inspect.getsource(Accelerator._prepare_deepspeed))
        calls = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "apply_fp8_autowrap"
        ]
        attributes = [
            node.attr
            for call in calls
            for node in ast.walk(call.args[1])
            if isinstance(node, ast.Attribute)
        ]
        if not attributes:
            raise LookupError("_prepare_deepspeed no longer calls apply_fp8_autowrap")
        handlers = [getattr(accelerator, name) for name in attributes]
        chosen = next((found for found in handlers if found is not None), None)
        classes, optimizer = classes_of(model), optimizer_for(model)
        model, optimizer = accelerator._prepare_te(model, optimizer)
        model = apply_fp8_autowrap(model, chosen)
        return self._prepared(accelerator, model, optimizer, classes)

    def _prepared(
        self,
        accelerator: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        classes: dict[str, type[nn.Module]],
    ) -> Prepared:
        def backward(loss: Loss) -> Tensor:
            value = loss(model)
            accelerator.backward(value)
            return value.detach()

        def scale(name: str) -> float:
            layer: Any = model.get_submodule(name)
            return float(layer.fp8_meta["scaling_fwd"].scale[0])

        def recompute() -> None:
            enable: Any = model.gradient_checkpointing_enable
            enable()

        def give_back() -> tuple[nn.Module, dict[str, Any]]:
            from accelerate.utils.transformer_engine import convert_model

            plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            said: dict[str, Any] = {}
            try:
                with torch.no_grad():
                    convert_model(plain, to_transformer_engine=False)
            except Exception as error:
                said["converting back"] = f"{type(error).__name__}: {error}"
            return plain, said

        return Prepared(
            model,
            optimizer,
            classes,
            backward,
            scale,
            recompute,
            give_back,
            save=lambda folder: accelerator.save_model(model, str(folder)),
        )


def _forget_the_last_accelerator() -> None:
    """What Accelerate and Transformer Engine keep for the whole process is made anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if can_run("te"):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


def _be_the_only_rank() -> None:
    """What a launcher does for the only rank of a distributed run; for the rest of the process."""
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed: Any = torch.distributed
    store = distributed.HashStore()  # of this process, which has nobody to meet
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
