"""Rows of different lengths: what is behind the end of a row is not computed, and what would be lost is refused."""

from __future__ import annotations

import pytest
import torch

from parallelize import (
    ModelError,
    ShapeError,
    build_mesh,
    destroy_groups,
    next_tokens,
    parallelize_model,
    record_routes,
    replay_routes,
)
from tests.support.models import tiny_model

IDS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = [9, 4, 6, 2]


@pytest.fixture(autouse=True)
def no_group_stays():
    yield
    destroy_groups()


def labels(lengths=LENGTHS):
    return torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], IDS, -100)


def placed(**options):
    return parallelize_model(tiny_model("llama", torch.float64), build_mesh("cpu", dp=1), num_microbatches=2, **options)


def test_microbatches_are_cut_to_their_longest_row():
    parallel, seen = placed(), []
    parallel.module.model.embed_tokens.register_forward_hook(
        lambda module, args, out: seen.append(tuple(out.shape[:2]))
    )
    cut = parallel.step(input_ids=IDS, labels=labels(), row_lengths=torch.tensor(LENGTHS))
    assert seen == [(2, 9), (2, 6)]
    gradients = {name: p.grad.clone() for name, p in parallel.module.named_parameters()}
    parallel.module.zero_grad()
    full = parallel.step(input_ids=IDS, labels=labels())
    assert seen[2:] == [(2, 9)] * 2
    torch.testing.assert_close(cut, full, rtol=1e-13, atol=0)
    for name, p in parallel.module.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-11, atol=1e-14)


def test_positions_and_masks_are_cut_too():
    parallel, seen = placed(), []
    attention = parallel.module.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["hidden_states"].shape), with_kwargs=True
    )
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
    parallel.evaluate(
        input_ids=IDS, labels=labels(), row_lengths=LENGTHS, attention_mask=mask, position_ids=torch.arange(9)[None]
    )
    assert [shape[1] for shape in seen] == [9, 6]


@pytest.mark.parametrize(
    "lengths",
    [[9, 4, 6], [9, 4, 6, 10], [9, 4, 6, 0], torch.tensor([9.0, 4, 6, 2]), torch.tensor([True] * 4)],
    ids=["rows", "longer", "none", "floats", "flags"],
)
def test_what_are_no_lengths(lengths):
    parallel = placed()
    with pytest.raises(ShapeError) as caught:
        parallel.step(input_ids=IDS, labels=labels(), row_lengths=lengths)
    assert caught.value.slugs == ("bad-row-lengths",)
    parallel.step(input_ids=IDS, labels=labels(), row_lengths=LENGTHS)


def test_targets_behind_the_end_are_refused():
    targets = next_tokens(IDS).masked_fill(torch.arange(9) >= torch.tensor(LENGTHS)[:, None], -100)
    with pytest.raises(ShapeError, match="row 1 has 3 tokens by row_lengths, and 1 targets") as caught:
        placed().step(input_ids=IDS, targets=targets, row_lengths=[9, 3, 6, 2])
    assert caught.value.slugs == ("bad-row-lengths",)


def test_routes_of_uneven_rows():
    """They are those of the tokens that were computed, and are replayed on the ranks that recorded them."""
    model = tiny_model("qwen3_moe", torch.float64, mlp_only_layers=[])
    parallel = parallelize_model(model, build_mesh("cpu", dp=1), num_microbatches=2)
    batch = {"input_ids": IDS, "labels": labels(), "row_lengths": LENGTHS}
    with record_routes(parallel) as routes:
        first = parallel.evaluate(**batch)
    gathered = routes.gather()
    assert gathered.shape[0] == 2 * 9 + 2 * 6 and (gathered >= 0).all()
    with replay_routes(parallel, gathered, local=True):
        assert torch.equal(parallel.evaluate(**batch), first)
    with pytest.raises((ShapeError, ModelError), match="rows of different lengths"), replay_routes(parallel, gathered):
        parallel.evaluate(**batch)
