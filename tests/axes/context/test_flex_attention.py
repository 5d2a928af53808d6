"""Models that call `flex_attention` on meshes equal dense attention in one process: loss and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from parallelize import ModelError, build_mesh, parallelize_model, parallelize_module
from parallelize.ops.attention.flex_masks import LocalMask, Numbers, local_mask
from parallelize.plan.plan_file import parse_plan
from tests.support import context
from tests.support.flex_models import (
    LENGTH,
    PLAN,
    Decoder,
    FlexAttention,
    alone,
    batch,
    causal_documents,
    decoder,
    mask_of,
    on_mesh,
    worst_on,
)
from tests.support.parity import worst
from tests.support.threads import run_ranks

LIMIT = 1e-12
MESHES = [
    ({"tp": 2}, {}),
    ({"tp": 3}, {"sequence_parallel": True, "loss_parallel": True}),
    ({"cp": 2}, {}),
    ({"cp": 2}, {"ulysses": 2, "recompute": "full"}),
    ({"cp": 4}, {"ulysses": 2}),
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ({"cp": 2, "tp": 2}, {"ulysses": 2}),
    ({"dp": 2, "cp": 2}, {"zero": 1}),
    ({"pp": 2, "cp": 2}, {"num_microbatches": 2}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"num_microbatches": 2, "zero": 1}),
]


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("sizes", "options"), MESHES)
def test_documents_and_slopes(sizes, options, inside):
    """Packed documents by a block mask that is passed, or that the forward makes, and slopes that a score reads."""
    error, name = worst_on(decoder(), sizes, inside=inside, **options)
    assert error <= LIMIT, name


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_on_sequences_and_data(zero):
    error, name = worst_on(decoder(), {"dp": 2, "cp": 2}, inside=True, zero=zero)
    assert error <= LIMIT, name


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 3}])
@pytest.mark.parametrize("kind", [{"slopes": False, "sinks": True}, {"slopes": False, "cap": 2.0}])
def test_sinks_and_soft_caps(sizes, kind):
    """Sinks correct the output by its log-sums, whose gradients go on."""
    ulysses = 2 if sizes == {"cp": 2} else 1
    error, name = worst_on(decoder(**kind), sizes, ulysses=ulysses)
    assert error <= LIMIT, name


def window_of_each_head(documents):
    """Heads that see different numbers of tokens: a block mask with blocks for each head."""
    windows = torch.arange(2, 14)

    def visible(b, h, i, j):
        return (i >= j) & (i - j < windows[h])

    return create_block_mask(visible, None, len(windows), LENGTH, LENGTH, "cpu", BLOCK_SIZE=4)


@pytest.mark.parametrize(("sizes", "options"), [({"tp": 2}, {}), ({"cp": 2}, {"ulysses": 2}), ({"cp": 2, "tp": 3}, {})])
def test_windows_of_each_head(sizes, options):
    error, name = worst_on(decoder(slopes=False), sizes, make_mask=window_of_each_head, **options)
    assert error <= LIMIT, name


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2, "tp": 2}])
def test_slopes_of_which_a_rank_stores_its_heads(sizes):
    plan = PLAN.replace("replicate(gradient=partial)", "shard(0, unit=heads*1)")
    error, name = worst_on(decoder(), sizes, plan=plan)
    assert error <= LIMIT, name


@pytest.mark.parametrize("attention", ["attention", "attention.inner_attention"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_that_calls_it_for_another(attention, compiled, monkeypatch):
    """As that of torchtitan, whose function is compiled; the plan names it, or the module around it."""
    if compiled:
        monkeypatch.setattr(FlexAttention, "function", staticmethod(torch.compile(flex_attention, backend="eager")))
    plan = PLAN.replace("attention: {layers.*.attention:", f"attention: {{layers.*.{attention}:")
    error, name = worst_on(decoder(wrapped=True), {"cp": 2, "tp": 2}, plan=plan)
    assert error <= LIMIT, name


def test_exchange_of_heads_inside_tp():
    """The style `ulysses`: each rank has the projections of its tokens."""
    rules = PLAN.replace("sizes: {heads: 12, kv_heads: 6}\n", "").split("    attention: gather(x)\n")
    after = rules[1].split("    attention.wo: rowwise(heads)\n")[1]
    plan = f"{rules[0]}    attention: ulysses\n    attention.{{wq,wk,wv,wo}}: sequence\n{after}"
    error, name = worst_on(decoder(), {"tp": 3}, plan=plan, sequence_parallel=True)
    assert error <= LIMIT, name


def test_a_mask_of_blocks_alone():
    """Without a function the blocks are the mask, as in PyTorch's kernel."""

    def blocks_of(documents):
        made = create_block_mask(causal_documents(documents), len(documents), None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=4)
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        parts = [getattr(made, name) for name in names]
        return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=4, seq_lengths=(LENGTH, LENGTH))

    def dense_blocks(documents):
        blocks = blocks_of(documents).to_dense().bool()
        mask = blocks_of(documents)
        mask.mask_mod = lambda b, h, i, j: blocks[b, 0, i // 4, j // 4]
        return mask

    model = decoder()
    reference = alone(model, dense_blocks)
    for result in run_ranks(2, lambda rank: on_mesh(model, {"cp": 2}, make_mask=blocks_of)):
        assert worst(result, reference)[0] <= LIMIT


def test_rows_of_blocks_are_those_of_a_mask_that_is_computed():
    """A rank whose chunks are whole blocks takes rows of the model's block mask."""
    documents = (torch.arange(32) // 9).expand(2, -1)
    mask, runs = mask_of(documents), ((4, 12), (24, 32))
    local = local_mask(mask, Numbers(0, runs), 16, 6)
    built = local.built(torch.device("cpu"))
    computed = create_block_mask(local.mask_mod, 2, None, 16, 32, "cpu", BLOCK_SIZE=4)
    assert built.to_dense().equal(computed.to_dense()) and built.shape == computed.shape
    assert built is local.built(torch.device("cpu"))
    unaligned = local_mask(mask, Numbers(0, ((3, 11), (24, 32))), 16, 6)
    assert isinstance(unaligned, LocalMask)
    rows = [row for start, stop in ((3, 11), (24, 32)) for row in range(start, stop)]
    whole = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(rows).view(-1, 1), torch.arange(32))
    made = create_mask(unaligned.built(torch.device("cpu")).mask_mod, 1, 1, 16, 32, "cpu")
    assert made[0, 0].equal(whole)


# -- refusals ----------------------------------------------------------------------------------------------------------


class _DerivedDocuments(Decoder):
    def forward(self, input_ids, block_mask=None, documents=None, positions=None):
        return super().forward(input_ids, mask_of(documents.cumsum(1)))


class _StoredDocuments(Decoder):
    def forward(self, input_ids, block_mask=None, documents=None, positions=None):
        self.documents = documents

        def visible(b, h, i, j):
            return self.documents[b, i] == self.documents[b, j]

        rows, length = documents.shape
        return super().forward(input_ids, create_block_mask(visible, rows, None, length, length, "cpu"))


def refused(slug, sizes, plan=PLAN, model=None, **inputs):
    model = model or decoder()

    def body(rank):
        net = parallelize_model(copy.deepcopy(model), build_mesh("cpu", **sizes), parse_plan(plan)).module
        with pytest.raises(ModelError, match=slug):
            net(batch()["input_ids"], **inputs)

    run_ranks(torch.tensor([*sizes.values()]).prod().item(), body)


@pytest.mark.parametrize("kind", [_DerivedDocuments, _StoredDocuments])
def test_a_mask_of_local_tokens_is_refused(kind):
    model = decoder()
    model.__class__ = kind
    refused("local-mask", {"cp": 2}, model=model, documents=batch()["documents"])


def test_a_mask_of_other_tokens_is_refused():
    refused("wrong-rows", {"cp": 2}, block_mask=mask_of(batch()["documents"][:, :9]))


def test_attention_in_a_module_that_is_not_named_is_refused():
    plan = PLAN.replace("attention: {layers.*.attention:", "attention: {layers.0.attention:")
    refused("unplanned-attention", {"cp": 2}, plan=plan, block_mask=mask_of(batch()["documents"]))


def test_heads_of_a_mask_that_fit_no_rank_are_refused():
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, 4, LENGTH, LENGTH, "cpu")
    refused("flex-heads", {"tp": 2}, block_mask=mask)


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes"), [("gemma2", {"tp": 2}), ("mistral", {"pp": 2}), ("llama", {"dp": 2}), ("llama", {"cp": 2})]
)
def test_models_of_transformers(name, sizes, monkeypatch):
    """Packed documents with `attn_implementation="flex_attention"`; over cp by the ring, as with any other."""
    from transformers import masking_utils
    from transformers.integrations import flex_attention as stock

    def without_compiler(query, key, value, training=False, **options):  # ranks are threads
        return flex_attention(query, key, value, **options)

    def made_without_compiler(*args, _compile=False, **options):
        return create_block_mask(*args, **options)

    monkeypatch.setattr(stock, "compile_friendly_flex_attention", without_compiler)
    monkeypatch.setattr(masking_utils, "create_block_mask", made_without_compiler)
    model, (ids, targets) = context.family(name), context.batch_of(LENGTH)
    positions = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(2, -1)
    expected = context.alone(model, ids, targets, position_ids=positions)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flex_attention"
    options = {"num_microbatches": 2} if "pp" in sizes else {}
    inputs = {"position_ids": positions}
    for result in run_ranks(2, lambda rank: context.on_mesh(model, sizes, ids, targets, inputs, **options)):
        error, where = context.error_of(result, expected)
        assert error <= LIMIT, where


def test_numbers_of_local_sizes_are_warned_of(caplog):
    """A size that a function closes over is that of a rank's tensor: its numbers are of all heads and tokens."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.proj = (torch.nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
            heads = q.shape[1]

            def last(score, b, h, i, j):
                return torch.where(h == heads - 1, score * 2, score)

            return self.proj(flex_attention(q, k, v, score_mod=last).transpose(1, 2).flatten(2))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x):
            return self.attention(x)

    plan = {"attention": "gather(x)", "attention.{q,k,v}": "colwise", "attention.proj": "rowwise"}
    nets = [Net() for _ in range(2)]

    def body(rank):
        return parallelize_module(nets[rank], build_mesh("cpu", tp=2), plan)(torch.randn(1, 6, 16))

    run_ranks(2, body)
    assert "reads the number 2, as many heads as this rank has of 4" in caplog.text
