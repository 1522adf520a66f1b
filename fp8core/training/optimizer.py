"""AdamW whose moments and master weights are kept in the formats of ``training.precision``.

The update is computed in fp32 whatever is stored. What is stored in bf16 or 8 bits is rounded
stochastically: to nearest, a second moment with beta2 = 0.999 would never move (a change of 0.1 %
is less than half the spacing of bf16 numbers, 0.4 %), and small updates of a bf16 weight would
all be lost. The random bits follow from the seed and the number of the update, so that a resumed
run draws the same ones.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fp8core.training import moments

__all__ = ["AdamW", "clip_factor", "decays", "global_norm"]

_MIX_PLACES = 0xBF58476D1CE4E5B9  # odd, and unlike the other
_NORM_BOUND = 1e-4  # sums of squares in another order; a part left out is off by far more
_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads consecutive numbers


def decays(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to.

    Not: norms, biases and whatever has fewer than two dimensions.
    """
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if not is_norm and parameter.ndim >= 2 and not name.endswith("bias"):
                names.add(name)
    return names


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    ``parameters``: the trainable ones by name, each once; ``decayed``: names under weight decay.
    ``state_dtype``: dtype of both moments; ``torch.uint8`` is 8 bits as in
    `fp8core.training.moments`. ``master_weights``: keep an fp32 copy of every weight
    that is not fp32, update that, and round it to nearest into the weight.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        decayed: set[str],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        state_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        seed: int = 0,
    ) -> None:
        named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        self._places: dict[Tensor, int] = {p: place for place, (_, p) in enumerate(named)}
        self._betas = betas
        self._eps = eps
        self._seed = seed
        self._updates = 0
        with_decay = [parameter for name, parameter in named if name in decayed]
        without = [parameter for name, parameter in named if name not in decayed]
        groups = [
            {"params": parameters_, "weight_decay": rate}
            for parameters_, rate in ((with_decay, weight_decay), (without, 0.0))
            if parameters_
        ]
        super().__init__(groups, {"lr": lr})
        for parameter in self._names:
            self.state[parameter] = {
                # The fused kernel wants the count of updates as a tensor beside each parameter.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **moments.new_moments(parameter, state_dtype),
            }
            if master_weights and parameter.dtype != torch.float32:
                self.state[parameter]["master"] = parameter.detach().float()

    def set_learning_rate(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        factor: Tensor | None = None,
        unless: Tensor | None = None,
    ) -> None:
        """One update of every parameter that has a gradient. ``closure`` is not supported.

        ``factor``: a 0-dim fp32 tensor that each gradient counts with; ``.grad`` stays as it is.
        ``unless``: a 0-dim fp32 tensor on the device of the parameters; where it is 1, weights and
        states keep every bit. Nobody waits to learn which it was.
        """
        if closure is not None:
            raise ValueError("AdamW takes no closure")
        self._updates += 1
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            plain, on_gpu = [], []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if _has_kernel(parameter):
                    on_gpu.append(parameter)
                elif self._is_plain(parameter):
                    plain.append(parameter)
                else:
                    generator = generators.get(parameter.device)
                    if generator is None:
                        generator = torch.Generator(parameter.device)
                        generator.manual_seed((self._seed + self._updates * _MIX) % 2**63)
                        generators[parameter.device] = generator
                    self._update_rounded(parameter, group, generator, factor, unless)
            # With a factor one at a time, so that only one gradient has a copy at any moment.
            for some in [plain] if factor is None else [[parameter] for parameter in plain]:
                if some:
                    gradients = [_times(parameter.grad, factor) for parameter in some]
                    states = [self.state[parameter] for parameter in some]
                    self._update(some, gradients, states, group, unless)
            if on_gpu:
                self._update_in_one_pass(on_gpu, group, factor, unless)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next update depends on, by parameter name (live tensors)."""
        tensors = {
            f"{self._names[parameter]}/{key}": value
            for parameter, state in self.state.items()
            for key, value in state.items()
        }
        tensors["updates"] = torch.tensor(self._updates, dtype=torch.int64)
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes ``state_tensors`` back. Raises ``ValueError``, changing nothing, if any differs."""
        own = self.state_tensors()
        if set(own) != set(tensors):
            odd = sorted(set(own) ^ set(tensors))
            raise ValueError(f"optimizer state has other tensors than this model: {odd[:3]}")
        for key, tensor in own.items():
            if tensor.shape != tensors[key].shape or tensor.dtype != tensors[key].dtype:
                raise ValueError(
                    f"optimizer state {key} is {tensors[key].dtype} {tuple(tensors[key].shape)}, "
                    f"not {tensor.dtype} {tuple(tensor.shape)}"
                )
        for key, tensor in own.items():
            tensor.copy_(tensors[key])
        self._updates = int(tensors["updates"])

    def _is_plain(self, parameter: nn.Parameter) -> bool:
        assert parameter.grad is not None
        state_dtype = self.state[parameter]["exp_avg"].dtype
        return state_dtype == parameter.dtype == parameter.grad.dtype == torch.float32

    def _update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        group: dict[str, Any],
        unless: Tensor | None,
    ) -> None:
        adamw(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._eps,
            maximize=False,
            found_inf=unless,
        )

    def _update_in_one_pass(
        self,
        parameters: list[nn.Parameter],
        group: dict[str, Any],
        factor: Tensor | None,
        unless: Tensor | None,
    ) -> None:
        """What ``_update_rounded`` does, in few kernels."""
        # They need Triton, which CPU builds lack.
        from fp8core.training.adamw_8bit_kernel import update_8bit
        from fp8core.training.adamw_kernel import Updated, update

        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1.0)
        if unless is not None:
            torch._foreach_add_(steps, unless, alpha=-1.0)
        options: dict[str, Any] = {
            "lr": group["lr"],
            "betas": self._betas,
            "eps": self._eps,
            "weight_decay": group["weight_decay"],
            "factor": factor,
            "unless": unless,
        }
        together = []
        for parameter in parameters:
            assert parameter.grad is not None
            state, seed = self.state[parameter], self._seed_of(self._places[parameter])
            gradient = parameter.grad.contiguous()
            if moments.in_8_bits(state):
                update_8bit(parameter, gradient, state, seed=seed, **options)
            else:
                together.append(Updated(parameter, gradient, state, seed))
        update(together, **options)

    def _seed_of(self, place: int) -> int:
        """Of the random bits of this update; ``place``: of a parameter among all."""
        return (self._seed + self._updates * _MIX + (place + 1) * _MIX_PLACES) % 2**63

    def _update_rounded(
        self,
        parameter: nn.Parameter,
        group: dict[str, Any],
        generator: torch.Generator,
        factor: Tensor | None,
        unless: Tensor | None,
    ) -> None:
        """One parameter at a time, so that only one has fp32 copies at any moment.

        What was not changed is rounded to itself: noise below a bf16 number cannot lift it.
        """
        gradient = _times(parameter.grad, factor)
        state = self.state[parameter]
        master = state.get("master")
        weight = parameter.detach().float() if master is None else master
        read = moments.read(state)
        working = {"step": state["step"], **read}
        self._update([weight], [gradient], [working], group, unless)
        if moments.in_8_bits(state):
            moments.write(state, read, generator)
        else:
            for key, value in read.items():
                _store(state[key], value, generator)
        if master is None:
            _store(parameter, weight, generator)
        else:
            parameter.copy_(master)


def _times(gradient: Tensor | None, factor: Tensor | None) -> Tensor:
    """In fp32; the gradient itself where that is what it is."""
    assert gradient is not None
    values = gradient.float()
    return values if factor is None else values * factor


def _has_kernel(parameter: Tensor) -> bool:
    return parameter.is_cuda and parameter.is_contiguous() and _triton_is_here()


@functools.cache
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, in fp32, as a tensor without dimensions."""
    if not gradients:
        return torch.zeros(())
    if len({g.device for g in gradients}) == 1 and all(map(_has_kernel, gradients)):
        kernel = _norm_kernel(gradients[0].device)
        if kernel is not None:
            return kernel(gradients)
    return _plain_norm(gradients)


def _plain_norm(gradients: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@functools.cache
def _norm_kernel(device: torch.device) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """The norm in one launch; None, with a warning, where it is not PyTorch's.

    A norm that is wrong would clip every step wrongly without any other sign.
    """
    from fp8core.training.gradient_norm_kernel import gradient_norm

    generator = torch.Generator(device=device).manual_seed(0)
    tensors = [  # of about the same norm each, so that none may be left out
        (torch.randn(shape, generator=generator, device=device) / math.prod(shape) ** 0.5).to(dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in ((300, 1024), (64,), (77, 131), (1,))
    ]
    # With those of odd extents and without: the kernel reads the latter in another way.
    for some in (tensors, [tensor for tensor in tensors if tensor.numel() % 16 == 0]):
        try:
            apart = abs(float(gradient_norm(some)) / float(_plain_norm(some)) - 1)
        # It is compiled here for the first time, by whatever compiler there is.
        except Exception as error:
            warnings.warn(f"the norm of gradients by a kernel fails: {error}", stacklevel=2)
            return None
        if not apart < _NORM_BOUND:
            warnings.warn(f"the norm of gradients by a kernel differs by {apart:.2g}", stacklevel=2)
            return None
    return gradient_norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of global ``norm`` are multiplied by for one of at most ``max_norm``.

    Without dimensions, like ``norm``; never waits for the device. Not finite where the norm is not:
    the caller must not step then.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _store(target: Tensor, value: Tensor, generator: torch.Generator) -> None:
    """Copies fp32 ``value`` into ``target``, rounding stochastically where that is bf16."""
    if target.data_ptr() == value.data_ptr():
        return
    if target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    # bf16 is the upper half of fp32: adding a random lower half and cutting it off rounds up with
    # the probability that nearness asks for. Infinities and NaN keep all their bits.
    noise = torch.randint(
        0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    bits = torch.where(value.isfinite(), value.view(torch.int32) + noise, value.view(torch.int32))
    target.copy_((bits & -65536).view(torch.float32))
