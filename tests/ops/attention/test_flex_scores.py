"""`flex_attention` by explicit scores has the numbers of PyTorch's, and gradients, where a planned model lives."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention

from parallelize import ShapeError
from parallelize.ops.attention.flex_attention import flex_served
from parallelize.ops.attention.flex_masks import Numbers, closed_over, of_sequences, reading, renumbered_mask
from parallelize.ops.attention.flex_model import computed_share, modeled_attention
from parallelize.ops.attention.flex_scores import over_scores
from tests.support.flex_models import causal_documents, dense, mask_of

DOCUMENTS = torch.stack([torch.arange(17) // 5, torch.arange(17) // 17])


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 6, 17, 4), (2, 3, 17, 4), (2, 3, 17, 5)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def biased(slopes):
    def change(score, b, h, i, j):
        return 3 * torch.tanh(score / 3) + slopes[h] * (j - i)

    return change


def test_the_numbers_are_those_of_pytorch(qkv):
    slopes, mask = torch.linspace(0.1, 0.6, 6, dtype=torch.float64), mask_of(DOCUMENTS)
    options = {"score_mod": biased(slopes), "block_mask": mask, "enable_gqa": True, "scale": 0.3}
    aux = AuxRequest(lse=True)
    expected, expected_aux = flex_attention(*qkv, **options, return_aux=aux)
    with flex_served():
        out, found = flex_attention(*qkv, **options, return_aux=aux)
        assert flex_attention(*qkv, **options, return_aux=AuxRequest())[1].lse is None
        assert flex_attention(*qkv, **options, return_lse=True)[1].equal(found.lse)
        highest = flex_attention(*qkv, **options, return_aux=AuxRequest(max_scores=True))[1].max_scores
    assert (highest <= found.lse).all() and (highest > found.lse - 4).all()
    for actual, stock in ((out, expected), (found.lse, expected_aux.lse)):
        torch.testing.assert_close(actual, stock, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_all_that_is_read(qkv, compiled):
    """In eager mode, and in one graph, where PyTorch refuses gradients on a CPU."""
    slopes = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*qkv, slopes)]
    mask, weight = mask_of(DOCUMENTS), torch.randn(2, 6, 17, 5, dtype=torch.float64)
    expected = torch.autograd.grad((dense(*qkv, biased(slopes), mask) * weight).sum(), leaves)
    with flex_served():
        function = torch.compile(flex_attention, backend="eager", fullgraph=True) if compiled else flex_attention
        out = function(*qkv, score_mod=biased(slopes), block_mask=mask, enable_gqa=True)
        actual = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_score", [False, True])
def test_a_row_that_attends_to_no_key(qkv, by_score):
    """It gives zeros, and no gradient that is not a number; also where a score of -inf says so."""
    mask = create_block_mask(lambda b, h, i, j: i > j, None, None, 17, 17, "cpu")
    hidden = torch.zeros(17, 17).masked_fill(torch.ones(17, 17).triu().bool(), -torch.inf)
    masked = {"score_mod": lambda s, b, h, i, j: s + hidden[i, j]} if by_score else {"block_mask": mask}
    q, k, v = (x.requires_grad_() for x in qkv)
    with flex_served():
        out, aux = flex_attention(q, k, v, **masked, enable_gqa=True, return_aux=AuxRequest(lse=True))
        out.sum().backward()
    assert not out[:, :, 0].any() and torch.isneginf(aux.lse[:, :, 0]).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v)) and not q.grad[:, :, 0].any()


def test_shapes_that_do_not_fit_are_refused(qkv):
    with flex_served():
        with pytest.raises(ShapeError, match="flex-shapes"):
            flex_attention(*qkv)
        with pytest.raises(ShapeError, match="flex-shapes"):
            flex_attention(*qkv, block_mask=mask_of(DOCUMENTS[:, :9]), enable_gqa=True)


def test_numbers_of_heads_and_queries():
    numbers = Numbers(4, ((3, 5), (9, 12), (20, 21)))
    mask = renumbered_mask(lambda b, h, i, j: i * 100 + h, numbers)
    indices = [torch.arange(size) for size in (1, 2, 6, 1)]
    found = over_scores(mask, with_scores=False)(*indices)[0, :, :, 0]
    assert found.tolist() == [[row * 100 + head for row in (3, 4, 9, 10, 11, 20)] for head in (4, 5)]


def test_a_mask_of_some_sequences():
    mask = mask_of(DOCUMENTS)
    part = of_sequences(mask, 1, 2)
    assert part.shape == (1, 1, 17, 17)
    assert part.to_dense().equal(mask.to_dense()[1:])
    indices = [torch.arange(size) for size in (1, 1, 17, 17)]
    assert over_scores(part.mask_mod, with_scores=False)(*indices).all(-1)[0, 0].tolist() == [False] * 16 + [True]


def test_functions_read_other_tensors():
    """Those that they close over themselves, and in functions of theirs."""
    other = DOCUMENTS.flip(0).contiguous()
    both = and_masks(causal_documents(DOCUMENTS), lambda b, h, i, j: i - j < 4)
    changed = reading(both, lambda x: other if x is DOCUMENTS else x)
    assert any(value is DOCUMENTS for value, _ in closed_over(both))
    assert not any(value is DOCUMENTS for value, _ in closed_over(changed))
    indices = torch.tensor(0), torch.tensor(0), torch.tensor(6), torch.tensor(4)
    assert not both(*indices) and changed(*indices)
    assert reading(both, lambda x: x) is both


def test_the_modeled_kernel_computes_the_blocks_that_are_not_empty(qkv):
    mask = mask_of(torch.arange(16).view(1, -1) // 4)
    assert computed_share(mask) == 0.25 and computed_share(None) == 1
    assert computed_share(mask_of(DOCUMENTS.to("meta"))) == 0.5
    q, k, v = (x.to("meta").requires_grad_() for x in qkv)
    slopes = torch.ones(6, device="meta", requires_grad=True)
    out = modeled_attention(q, k, v, biased(slopes), mask).out
    assert out.shape == (2, 6, 17, 5)
    out.sum().backward()
    assert k.grad.shape == k.shape and slopes.grad.shape == slopes.shape
