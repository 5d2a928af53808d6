"""What is named full is of the full model on every mesh: values, gradients, layouts, exports and norms."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from parallelize import (
    build_mesh,
    export_weights,
    full_gradients,
    full_parameter,
    full_state_dict,
    next_tokens,
    parallelize_model,
    save_pretrained,
    shard_info,
)
from parallelize.state.records import record_of
from parallelize.state.stored_slices import stored_parameters
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

LLAMA = ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1})
PACKED = ("phi3", {})
EXPERTS = ("qwen3_moe", {})
MESHES = {
    "pp": (LLAMA, {"pp": 2}, {"num_microbatches": 2}),
    "tp": (LLAMA, {"tp": 2}, {}),
    "cp": (LLAMA, {"cp": 2}, {}),
    "dp, ZeRO 2": (LLAMA, {"dp": 2}, {"zero": 2}),
    "pp x tp": (PACKED, {"pp": 2, "tp": 2}, {"num_microbatches": 2}),
    "dp x tp, ZeRO 3": (PACKED, {"dp": 2, "tp": 2}, {"zero": 3}),
    "pp x dp x tp, ZeRO 1": (LLAMA, {"pp": 2, "dp": 2, "tp": 2}, {"zero": 1, "num_microbatches": 2}),
    "pp x dp, ep, ZeRO 3": (EXPERTS, {"pp": 2, "dp": 2}, {"zero": 3, "ep": 2, "num_microbatches": 2}),
    **{
        f"dp_replicate x dp, ZeRO {zero}": (LLAMA, {"dp_replicate": 2, "dp": 2}, {"zero": zero})
        for zero in (0, 1, 2, 3)
    },
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(family, changes) -> (model, ids, gradients of a step, what `transformers` saves)."""
    known = {}

    def of(family, changes):
        if family not in known:
            model = tiny_model(family, torch.float64, **changes)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            ids = torch.randint(1, 67, (8, 10), generator=torch.Generator().manual_seed(3))
            logits = model(input_ids=ids, use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), next_tokens(ids).flatten()).backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            known[family] = model, ids, gradients, load_file(folder / "model.safetensors")
        return known[family]

    return of


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("mesh", MESHES)
def test_everything_full_is_of_the_full_model(references, tmp_path, mesh):
    (family, changes), axes, options = MESHES[mesh]
    model, ids, gradients, saved = references(family, changes)
    want = {name: value.detach() for name, value in model.state_dict().items()}
    norm = torch.stack([grad.norm() for grad in gradients.values()]).norm()
    num_ranks = torch.Size(axes.values()).numel()

    def body(rank):
        base = deepcopy(model)
        base.zero_grad()
        parallel = parallelize_model(base, build_mesh("cpu", **axes), **options)
        check_weights(rank, parallel, want)
        save_pretrained(parallel, tmp_path / "hub")
        check_slices(rank, parallel.module, model, options)
        rows = ids.chunk(4 if "dp_replicate" in axes else axes.get("dp", 1))
        batch = rows[data_rank(rank, axes)]
        parallel.step(input_ids=batch, targets=next_tokens(batch))
        assert worst(full_gradients(parallel.module), gradients)[0] < 1e-12
        first = min(gradients)
        assert worst({"": full_parameter(parallel.module, first)}, {"": want[first]})[0] == 0
        return float(parallel.clip_grad_norm_(0.5 * float(norm)))

    norms = run_ranks(num_ranks, body)
    assert worst(load_file(tmp_path / "hub" / "model.safetensors"), saved)[0] == 0
    assert all(abs(each / float(norm) - 1) < 1e-12 for each in norms)


def data_rank(rank, axes):
    """The index of a rank over the data axes."""
    index = 0
    for axis, size in reversed(axes.items()):
        rank, coordinate = divmod(rank, size)
        if axis in ("dp", "dp_replicate"):
            index += coordinate * (axes["dp"] if axis == "dp_replicate" else 1)
    return index


def check_weights(rank, parallel, want):
    """Full weights by every way that gives them: names and order are the unsharded model's."""
    module = parallel.module
    full = full_state_dict(module)
    assert (list(full) == list(want)) == (rank == 0) and bool(full) == (rank == 0)
    everywhere = full_state_dict(module, every_rank=True)
    assert list(everywhere) == list(want) and worst(everywhere, want)[0] == 0
    tied = "lm_head.weight"
    assert (everywhere[tied] is everywhere["model.embed_tokens.weight"]) == (
        want[tied].data_ptr() == want["model.embed_tokens.weight"].data_ptr()
    )
    for name in (min(want), max(want), tied):
        assert torch.equal(full_parameter(module, name), want[name]), name
    exported = {n: t.clone() for bucket in export_weights(parallel, names="model") for n, t in bucket.tensors.items()}
    assert set(exported) <= set(want) and all(torch.equal(want[name], value) for name, value in exported.items())


def check_slices(rank, module, model, options):
    """`shard_info` names every parameter of the model, and what this rank stores is where it says."""
    infos = shard_info(module)
    assert infos.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert all(tuple(model.get_parameter(name).shape) == info.full_shape for name, info in infos.items())
    over_rows = options.get("zero") == 3 and record_of(module) is not None  # which shards once more what `infos` says
    for stored in stored_parameters(module):
        info, full = infos[stored.fqn], model.get_parameter(stored.fqn)
        assert rank in info.ranks, stored.fqn
        for pair in () if over_rows else info.slices(rank):
            assert torch.equal(stored.local[pair.local], full[pair.full]), stored.fqn
        listed, own = (sum(full[pair.full].numel() for pair in pairs) for pairs in (info.slices(rank), stored.slices))
        assert listed == own or (over_rows and listed > own), stored.fqn
    absent = [name for name in infos if not any(name in stored.names for stored in stored_parameters(module))]
    assert all(rank not in infos[name].ranks for name in absent)
