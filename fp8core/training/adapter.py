"""LoRA adapters beside a frozen, converted model, through ``peft``.

The model is converted first and wrapped after, so that layers keep the names of the base model in
the conversion report, in FP8 health and in the engine's state. The base computes in the recipe's
precision and is frozen; adapters are fp32 parameters under autocast. A checkpoint holds what is
trained, and a digest of the rest, which is loaded again from where it came from.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from fp8core.conversion.find import Layer, is_conv1d
from fp8core.models.adapter_targets import trained_heads
from fp8core.spec import HuggingFaceModel, JobSpec, PathModel
from fp8core.training.digest import digest, digest_of_sums
from fp8core.training.tensor_files import write_tensors

__all__ = ["Adapter", "attach"]

# peft's words; masked language modelling has none.
_TASKS = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS"}


class Adapter:
    """The adapters of one model, which holds them.

    ``base`` and ``base_places`` are digests of all that is frozen: one that earlier versions know,
    and one that sees also what only changed places.
    """

    def __init__(self, model: nn.Module, wrapped: Any, config: LoraConfig) -> None:
        self._model = model
        self._wrapped = wrapped
        self._config = config
        frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self.base, self.base_places = digest_of_sums(frozen), digest(frozen)

    def tensors(self) -> dict[str, Tensor]:
        """The live trained parameters, by name."""
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def merge(self) -> None:
        """Adds the adapters to the weights and takes them out of the model, once and for all."""
        for layer in self._model.modules():
            if isinstance(layer, LoraLinear):
                # peft keeps one answer for all layers. A converted Conv1D has its weight as a
                # Linear has, until it is put back.
                layer.fan_in_fan_out = is_conv1d(layer.base_layer)
        self._wrapped.merge_and_unload()

    def save(self, folder: Path) -> None:
        """Writes what ``PeftModel.from_pretrained`` loads over the base model.

        Raises ``StorageFull``.
        """
        state = get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        write_tensors(folder, "adapter_model", state)
        self._config.save_pretrained(str(folder))


def attach(spec: JobSpec, model: nn.Module, targets: Sequence[Layer]) -> Adapter:
    """Puts the adapters of ``spec`` into the converted ``model`` and freezes all else.

    ``targets``: what ``adapter_targets`` said of the model before it was converted. A classifier's
    head, which a base model does not have, is trained as a whole. Fresh adapters depend on
    ``training.seed`` alone and leave the process's random state as it was.
    """
    heads = trained_heads(model)
    wrapping = _config(spec, targets, heads)
    # peft looks a layer up by its class, and knows nothing of the engines' own.
    modules = [model.get_submodule(layer.name) for layer in targets]
    foreign = {type(m) for m in modules if type(m) is not nn.Linear and not is_conv1d(m)}
    wrapping._register_custom_module(dict.fromkeys(foreign, LoraLinear))
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), warnings.catch_warnings():
        # peft asks transformers by an older name whether it recomputes activations.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        torch.manual_seed(spec.training.seed)
        wrapped = get_peft_model(model, wrapping, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    saved = _config(spec, targets, heads)
    saved.inference_mode = True
    if isinstance(spec.model, HuggingFaceModel):
        saved.base_model_name_or_path, saved.revision = spec.model.id, spec.model.revision
    elif isinstance(spec.model, PathModel):
        saved.base_model_name_or_path = spec.model.path
    return Adapter(model, wrapped, saved)


def _config(spec: JobSpec, targets: Sequence[Layer], heads: list[str]) -> LoraConfig:
    adapter = spec.adapter
    assert adapter is not None
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=[layer.name for layer in targets],
        modules_to_save=heads or None,
        fan_in_fan_out=all(is_conv1d(layer.module) for layer in targets),
        task_type=_TASKS.get(spec.task),
    )
