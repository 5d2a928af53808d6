"""Head and loss in one on a GPU, whose matmuls add half-precision products to float32 gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelize import linear_cross_entropy
from tests.support.parity import worst

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
