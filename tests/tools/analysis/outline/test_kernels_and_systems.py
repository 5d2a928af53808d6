"""What sets of kernels and systems change in an outline: work, launches, messages, memory, and what is hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelize.base.mesh import MeshSpec
from parallelize.tools.analysis.cost.machine import Placement, load_machine
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.cost.timing import stage_time
from parallelize.tools.analysis.measure import measure
from parallelize.tools.analysis.outline.decoder import Decoder
from parallelize.tools.analysis.outline.outlined import OutlinedSubject
from parallelize.tools.analysis.outline.parts import DISPATCH_LAUNCHES, DecoderParts
from parallelize.tools.analysis.record.kernel_sets import kernel_set
from parallelize.tools.analysis.record.trace_data import Totals

DENSE = Decoder(layers=4, hidden=1024, ffn=3072, heads=8, kv_heads=4, vocab=8192)
MIXTURE = replace(DENSE, experts=16, chosen=2)
H100, A100 = load_machine("h100-sxm"), load_machine("a100")


def setting(mesh: str, **options) -> Setting:
    options = {"batch": 2, "sequence": 1024, "dtype": "bfloat16", "kernels": "fused", **options}
    return Setting(MeshSpec.parse(mesh), **options).complete()


def measured(of: Setting, decoder: Decoder = DENSE, machine=H100):
    steps, memories, time = measure(OutlinedSubject(decoder), of, machine, by_segment=False, walks=False)
    return steps[0], memories[0], time


@pytest.mark.parametrize(("system", "ranks"), [("megatron", 4), ("fsdp2", 4), ("deepspeed", 2), ("parallelize", 2)])
def test_which_ranks_zero_splits_over(system, ranks):
    """Some systems split optimizer states over the ranks of cp too."""
    whole, split = (measured(setting("dp=2,cp=2", system=system, zero=zero)) for zero in (0, 1))
    assert split[1].optimizer == pytest.approx(whole[1].optimizer / ranks, rel=0.01)
    gathers = [message for message, _ in split[0].messages if message.op == "all_gather" and message.phase == "step"]
    assert {message.ranks for message in gathers} == {ranks}


def test_the_code_of_this_package_does_not_split_over_cp_whatever_the_system():
    assert setting("dp=2,cp=2", system="megatron", zero=1, kernels="eager").shard_ranks == 2


def test_flash_attention_2_is_slow_where_it_has_no_kernels_of_its_own():
    totals = Totals(forward_flops=1e12, backward_flops=2e12)
    for machine, is_slow in ((H100, True), (A100, False)):
        older = machine.attention_s(totals, "bfloat16", kernel_set("compiled-flash-2"))
        rated = machine.attention_s(totals, "bfloat16", replace(kernel_set("compiled-flash-2"), flash_2=False))
        assert older == pytest.approx(rated / machine.flash_2)
        assert (older > 1.3 * rated) is is_slow


def test_every_second_matmul_again_computes_more_and_keeps_less():
    plain = setting("dp=1", system="fsdp2", recompute="selective", kernels="compiled-flash-2")
    steps, memories = zip(
        *((measured(replace(plain, matmuls_again=again))[:2]) for again in (False, True)), strict=True
    )
    more = steps[1].totals(0)[1].linear_flops - steps[0].totals(0)[1].linear_flops
    again = 512 + 1024 + 3072  # keys of 4 heads, the output of attention, the gate
    assert more == pytest.approx(4 * 2.0 * 2 * 1024 * 1024 * again)
    assert memories[1].activations < memories[0].activations


def test_fused_matmuls_add_gradients_themselves():
    each = [DecoderParts(DENSE, setting("dp=1", kernels=name)).layer_backward() for name in ("fused", "flash-2023")]
    added = [[kernel for kernel in work.kernels if not kernel.flops and kernel.is_matmul] for work in each]
    weights = sum(weight.numel for weight in DENSE.layer_weights())
    assert [sum(kernel.bytes for kernel in kernels) for kernels in added] == [weights * 4 * 2, 0]


def test_experts_that_are_launched_one_by_one_cost_the_host():
    def launches(kernels: str, ep: int) -> float:
        of = setting(f"dp={max(ep, 1)},tp=1", kernels=kernels, ep=ep)
        return DecoderParts(MIXTURE, of).layer_forward().launches

    by_one = 12 * 2 * kernel_set("fused").grouped
    assert launches("fused", 1) - launches("fused", 4) == pytest.approx(by_one - DISPATCH_LAUNCHES)
    assert launches("compiled", 1) == launches("compiled", 4) - DISPATCH_LAUNCHES


def test_rows_of_every_rank_of_an_expert_are_kept():
    """With etp each rank keeps the rows of all ranks that share its experts."""
    kept = [
        DecoderParts(MIXTURE, setting("dp=2,tp=4", ep=8 // etp, etp=etp, sequence_parallel=True)).layer_kept()
        for etp in (1, 4)
    ]
    rows = 2 * 1024 / 4 * 2  # of one rank of tp, for two experts each
    activations = rows * MIXTURE.ffn * kernel_set("fused").gated.kept  # as many: more rows, less width
    assert kept[1] - kept[0] == pytest.approx(rows * 2 * (4 - 1) * 1024 * 2)
    assert kept[0] > activations


@pytest.mark.parametrize("sequence", [1024, 65536])
def test_attention_hides_the_ring(sequence):
    """Of long sequences it takes longer than keys and values take to arrive; what is hidden still contends."""
    of = setting("dp=1,cp=4", batch=1, sequence=sequence, zero=0)
    step = measured(of)[0]
    time = stage_time(step, 0, H100)
    sent, count = step.messages_in(0, "forward")["send", "cp"]
    whole_s = H100.messages_s("send", H100.placement(of.mesh, "cp"), sent, count)
    share = H100.contention(Placement(4, 4))
    if sequence > 10_000:
        assert time.forward_ring_s == pytest.approx(whole_s * share)
    else:
        assert whole_s * share < time.forward_ring_s < whole_s


def test_gathered_keys_are_waited_for_and_cost_fewer_launches():
    ring, gathered = (setting("dp=1,cp=4", zero=0, gathers_keys=is_gathered) for is_gathered in (False, True))
    steps = [measured(of)[0] for of in (ring, gathered)]
    assert steps[1].totals(0)[0].launches < steps[0].totals(0)[0].launches
    assert ("all_gather", "cp") in steps[1].messages_in(0, "forward")
    assert not any("cp" in axis for _, axis in steps[1].messages_over_data[0])


def test_owners_broadcast_their_parameters():
    for ranks in (4, 64):
        step = measured(setting(f"dp={ranks}", system="internevo", zero=1))[0]
        count = sum(times for m, times in step.messages if m.op == "all_gather" and m.phase == "step")
        assert count == min(ranks, len(step.shards))


def test_fully_shard_copies_what_it_gathers():
    with_copies, without = (measured(setting("dp=8", system=system, zero=3))[2] for system in ("fsdp2", "fsdp1"))
    parameters = 2.0 * DENSE.parameters * (7 / 8)
    copied_s = H100.moved_s(2 * 2 * parameters + parameters * (1 + 2 / 4))
    assert with_copies.parts["gathers"] > without.parts["gathers"] + copied_s


def test_what_the_host_does_for_an_action_hides_behind_long_stages():
    def between(sequence: int) -> float:
        of = setting("pp=2,dp=1", system="megatron", batch=8, num_microbatches=8, sequence=sequence)
        times = [measured(replace(of, system=system))[2] for system in ("megatron", "parallelize")]
        return times[0].parts["compute"] - times[1].parts["compute"]

    assert between(65536) < 0.5 * between(256)


def test_a_link_between_nodes_contends_less():
    assert H100.contention(Placement(16, 8)) < H100.contention(Placement(8, 8))
