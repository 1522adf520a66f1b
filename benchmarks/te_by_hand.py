"""Transformer Engine by hand: a Llama, its data and training loops that share no code with Octrain.

What ``te_parity.py``, ``te_parity_seeds.py`` and ``gradient_parity.py`` compare Octrain with.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = [
    "BETAS",
    "CLIP",
    "CONFIG",
    "EPSILON",
    "LEARNING_RATE",
    "LENGTH",
    "RECIPE",
    "ROWS",
    "TEBlock",
    "batches",
    "delayed_scaling",
    "initial_model",
    "loss_by_hand",
    "prepare",
    "train_by_hand",
    "with_te_blocks",
    "with_te_layers",
]

LENGTH, ROWS = 1024, 16
LEARNING_RATE, BETAS, EPSILON, CLIP = 3e-4, (0.9, 0.95), 1e-8, 1.0
RECIPE = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}
CONFIG: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 272,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def prepare(folder: Path, steps: int, seed: int = 0) -> None:
    """The text as rows of exactly LENGTH ASCII characters, and the initial weights.

    ``seed``: of the rows' order and of the weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    needed = steps * ROWS * LENGTH
    library = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(library.rglob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        text += source.encode("ascii", "ignore").decode().replace("\r", "")
        if len(text) >= needed:
            break
    rows = [text[i : i + LENGTH] for i in range(0, len(text) - LENGTH + 1, LENGTH)]
    # A fixed interleaving, so that neighbouring rows come from different files.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    repeated = [rows[int(order[i % len(rows)])] for i in range(steps * ROWS)]
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": row}) + "\n" for row in repeated)
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder / "initial")
    print(f"{len(rows)} distinct rows of {LENGTH} bytes for {steps * ROWS} used")


def batches(folder: Path, steps: int, saved: Path) -> Iterator[torch.Tensor]:
    """[ROWS, LENGTH] token ids in the order of the file; ``saved``: the tokenizer's folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved)
    with (folder / "rows.jsonl").open() as file:
        for _ in range(steps):
            texts = [json.loads(next(file))["text"] for _ in range(ROWS)]
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            yield torch.tensor(ids, device="cuda")


def with_te_layers(model: nn.Module) -> nn.Module:
    """Every Linear but the head, and every RMSNorm, replaced by hand."""
    import transformer_engine.pytorch as te
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                replacement: Any = te.Linear(child.in_features, child.out_features, bias=False)
            elif isinstance(child, LlamaRMSNorm):
                replacement = te.RMSNorm(child.weight.numel(), eps=child.variance_epsilon)
            else:
                continue
            with torch.no_grad():
                replacement.weight.copy_(child.weight)
            setattr(parent, name, replacement)
    return model


class TEBlock(nn.Module):
    """A block of Llama as ``te.TransformerLayer``, called as Llama calls its own."""

    def __init__(self, block: Any, angles: torch.Tensor) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.layer = te.TransformerLayer(
            CONFIG["hidden_size"],
            CONFIG["intermediate_size"],
            CONFIG["num_attention_heads"],
            num_gqa_groups=CONFIG["num_key_value_heads"],
            bias=False,
            layernorm_epsilon=block.input_layernorm.variance_epsilon,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=False,
            normalization="RMSNorm",
            activation="swiglu",
            attn_input_format="bshd",
            self_attn_mask_type="causal",
        )
        self.angles = angles
        joined, fused_mlp = self.layer.self_attention.layernorm_qkv, self.layer.layernorm_mlp
        self.sources: dict[tuple[str, ...], nn.Parameter] = {
            ("input_layernorm",): joined.layer_norm_weight,
            ("self_attn.q_proj",): joined.query_weight,
            ("self_attn.k_proj",): joined.key_weight,
            ("self_attn.v_proj",): joined.value_weight,
            ("self_attn.o_proj",): self.layer.self_attention.proj.weight,
            ("post_attention_layernorm",): fused_mlp.layer_norm_weight,
            ("mlp.gate_proj", "mlp.up_proj"): fused_mlp.fc1_weight,
            ("mlp.down_proj",): fused_mlp.fc2_weight,
        }
        """The layers of Llama's block whose weights, one after another, a parameter holds."""
        with torch.no_grad():
            for names, target in self.sources.items():
                target.copy_(torch.cat([block.get_submodule(name).weight for name in names]))

    def gradients(self) -> dict[str, torch.Tensor]:
        """By the names that the parameters have in Llama's block."""
        found = {}
        for names, parameter in self.sources.items():
            assert parameter.grad is not None
            for name, part in zip(names, parameter.grad.chunk(len(names)), strict=True):
                found[f"{name}.weight"] = part
        return found

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden, rotary_pos_emb=self.angles)
        return output


def with_te_blocks(model: Any) -> nn.Module:
    """Every block replaced by Transformer Engine's own; the last norm too."""
    import transformer_engine.pytorch as te

    size = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    angles = te.RotaryPositionEmbedding(size)(max_seq_len=LENGTH).cuda()
    blocks = model.model.layers
    for place, block in enumerate(blocks):
        blocks[place] = TEBlock(block, angles)
    return with_te_layers(model)


def initial_model(folder: Path, weights: str = "initial") -> nn.Module:
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM.from_pretrained(folder / weights, dtype=torch.float32)
    return model.cuda()


def delayed_scaling() -> Any:
    from transformer_engine.common.recipe import DelayedScaling, Format

    return DelayedScaling(
        fp8_format=Format.HYBRID,
        amax_history_len=RECIPE["amax_history_len"],
        amax_compute_algo=RECIPE["amax_compute_algo"],
    )


def loss_by_hand(model: nn.Module, ids: torch.Tensor, recipe: Any) -> torch.Tensor:
    """Forward and backward under bf16 autocast; ``recipe`` None: without FP8."""
    import transformer_engine.pytorch as te

    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        te.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def train_by_hand(
    model: nn.Module, data: Iterable[torch.Tensor], *, fp8: bool = True, fused: bool = False
) -> list[float]:
    """The losses of a step for each batch. ``fused``: with PyTorch's fused AdamW."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    # What other models of this process have left behind would be updated each step.
    FP8GlobalStateManager.reset()
    recipe = delayed_scaling() if fp8 else None
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=0.0,
        fused=fused,
        foreach=not fused,
    )
    losses = []
    for ids in data:
        losses.append(loss_by_hand(model, ids, recipe))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [float(loss) for loss in torch.stack(losses).tolist()]
