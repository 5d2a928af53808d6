"""Losses on a GPU, whose kernels are this package's own, and whose matmuls add half-precision products to float32
gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelize import cross_entropy, linear_cross_entropy, token_log_probs
from parallelize.ops.vocabulary import cross_entropy as cross_entropy_module
from parallelize.ops.vocabulary import kernel_choice, softmax
from tests.support.parity import worst

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.processes,  # Triton starts its assembler
]


@pytest.mark.parametrize("chunk", [128, 300])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
def test_gradients_are_those_of_float64(dtype, limit, chunk):
    """To a rounding of the logits' gradients to the dtype, and one of the sums."""
    torch.manual_seed(0)
    hidden = torch.randn(1000, 256, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(5003, 256, device="cuda") / 16).to(dtype).requires_grad_()
    targets = torch.randint(5003, (1000,), device="cuda")
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum", chunk=chunk)
    loss.backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*wide), targets, reduction="sum")
    expected.backward()
    actual = {"hidden": hidden.grad.double(), "weight": weight.grad.double()}
    assert worst(actual, {"hidden": wide[0].grad, "weight": wide[1].grad})[0] <= limit
    assert abs(float(loss) - float(expected)) <= limit * float(expected)


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "by token": {"reduction": "none"},
    "class weights": {"class_weight": True},
    "smoothing, class weights": {"label_smoothing": 0.1, "class_weight": True},
}


def loss_and_gradients(dtype, chunk, options, double):
    """Of 300 tokens, some of which are ignored, over 5,003 classes; by the same numbers in float64."""
    generator = torch.Generator("cuda").manual_seed(0)
    new = lambda *shape: torch.randn(shape, device="cuda", generator=generator).to(dtype)  # noqa: E731
    inputs = [new(300, 64), new(5003, 64) / 4, new(5003)]
    inputs = [(x.double() if double else x).requires_grad_() for x in inputs]
    targets = torch.randint(5003, (300,), device="cuda", generator=generator)
    targets[::7] = -100
    options = dict(options)
    if options.pop("class_weight", False):
        options["class_weight"] = torch.rand(5003, device="cuda", generator=generator) + 0.5
    hidden, weight, bias = inputs
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk=chunk, **options)
    upstream = torch.linspace(0.5, 1.5, loss.numel(), device="cuda").view(loss.shape).to(loss.dtype)
    grads = torch.autograd.grad(loss, inputs, upstream)
    names = ("loss", "hidden", "weight", "bias")
    return {name: value.detach().double() for name, value in zip(names, (loss, *grads), strict=True)}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 8e-3), (torch.float32, 1e-5)])
def test_every_option_is_that_of_float64(dtype, limit, options):
    actual = loss_and_gradients(dtype, 128, OPTIONS[options], False)
    assert worst(actual, loss_and_gradients(dtype, 128, OPTIONS[options], True))[0] <= limit


def without_kernels(monkeypatch):
    for module in (softmax, cross_entropy_module):
        monkeypatch.setattr(module, "kernels_for", lambda z: None)


@pytest.mark.parametrize("width", [1, 31, 4096, 4097, 70001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_width(monkeypatch, width, dtype):
    """Also where a row has logits of minus infinity, and is no row of a contiguous tensor."""
    z = torch.randn(9, width + 3, device="cuda").to(dtype)
    z[2, : width // 2] = -torch.inf
    targets = torch.randint(width // 2, width, (9,), device="cuda")
    assert kernel_choice.kernels_for(z[:, :width]) is not None and z[:, :width].stride(0) == width + 3
    results = []
    for _ in range(2):
        logits = z.clone()[:, :width].requires_grad_()
        loss = cross_entropy(logits, targets, z_loss=1e-3, reduction="sum")
        log_probs = token_log_probs(logits, targets)
        grads = torch.autograd.grad(loss, logits) + torch.autograd.grad(log_probs.sum(), logits)
        results.append([loss, log_probs, *grads])
        without_kernels(monkeypatch)
    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= limit * expected.abs().max().clamp_(min=1e-3)


def test_memory_is_that_of_the_logits():
    """A chunk's gradient takes the place of its logits, and no float32 copy is made of either."""
    hidden = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64000, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(64000, (1024,), device="cuda")

    def run():
        linear_cross_entropy(hidden.requires_grad_(), weight, targets, chunk=1024).backward()

    run()
    hidden.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * 1024 * 64000 * 2
