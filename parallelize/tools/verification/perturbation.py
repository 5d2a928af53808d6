"""Weights whose every term is seen: values that hide no permutation, and none that rounding would hide."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn


@torch.no_grad()
def perturb(model: nn.Module, seed: int, gain: float = 1.0) -> None:
    """Move 1-D parameters away from ones and zeros, and scale matrices up so that no term is negligible.

    Norm weights of one and biases of zero hide permutations and missing terms; weights of 0.02 in a small model make
    them smaller than rounding. A matrix that begins smaller than its siblings of the same shape stays so: attention
    whose scale is in the initial queries (T5) has logits so large without it that its softmax has one element, whose
    gradients are of rounding. None stays smaller than a twentieth of them: its term would be negligible.

    gain: what the deviations of matrices are multiplied by; below 1, larger ones become smaller too, and batch norms,
    which divide by
        the deviation of a few values, get an epsilon of the rest.
    """
    for module in model.modules() if gain < 1 else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = max(module.eps, 1 - gain)
    ratios = _ratios_to_siblings(model)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():  # codes of a quantized weight
            continue
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim < 2 or parameter.numel() == 1:  # a gate that begins as [[0]] would hide all that it scales
            parameter.add_(0.3 * noise.to(parameter.device))
            continue
        target_std = gain * min(1.0, 1.2 * parameter.shape[-1] ** -0.5) * ratios.get(name, 1.0)
        std = float(parameter.std())
        if 0 < std < target_std or (gain < 1 and std > target_std):
            parameter.mul_(target_std / std)
        elif std == 0:
            parameter.add_(target_std * noise.to(parameter.device))
    _fill_padding(model, generator)


def _fill_padding(model: nn.Module, generator: torch.Generator) -> None:
    """Rows of padding begin as zeros, at which a norm has no gradient, and the forward of a token that is drawn would
    be hidden."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.weight.is_floating_point():
            row = module.weight[module.padding_idx]
            if not row.any():
                noise = torch.randn(row.shape, generator=generator).to(row.dtype)
                row.add_(float(module.weight.std()) * noise.to(row.device))


def _ratios_to_siblings(model: nn.Module) -> dict[str, float]:
    """The standard deviation of linears' weights relative to the largest among siblings of the same shape, where it is
    smaller."""
    groups: dict[tuple[str, torch.Size], dict[str, float]] = defaultdict(dict)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.numel() > 1:
            groups[name.rpartition(".")[0], module.weight.shape][f"{name}.weight"] = float(module.weight.std())
    ratios: dict[str, float] = {}
    for group in groups.values():
        largest = max(group.values())
        ratios |= {
            name: max(std / largest, _SMALLEST_RATIO)
            for name, std in group.items()
            if 0 < std < _CLEARLY_SMALLER * largest
        }
    return ratios


_CLEARLY_SMALLER = 0.6  # the deviations of small matrices of the same initialization differ by less
_SMALLEST_RATIO = 0.05


def let_inputs_require_gradients(model: nn.Module) -> None:
    """Turn off what fails where inputs require gradients: models of sound set that flag on what they make of their
    input.

    They do so for recomputation, which passes no gradient on where no input requires one.
    """
    for module in model.modules():
        if vars(module).get("_requires_grad") is True:
            setattr(module, "_requires_grad", False)  # noqa: B010 - mypy: not every module has it
