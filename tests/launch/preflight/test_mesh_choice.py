"""Another number of ranks: the mesh that fits, with the same global batch; and what placement and memory are
predicted."""

from __future__ import annotations

import pytest

from parallelize.base.errors import LaunchError
from parallelize.base.mesh import SAMPLE_AXES, MeshSpec
from parallelize.launch.config.run_config_file import parse_run_config
from parallelize.launch.environment.launcher import Launcher
from parallelize.launch.local_ranks import count_ranks, fewer_ranks
from parallelize.launch.preflight.mesh_choice import ChosenMesh, choose_mesh
from parallelize.launch.preflight.prediction import Summary, machine_of, placement_warnings, predict, subject_of
from parallelize.plan.options import Options

RUN = """\
model: {name: llama, set: {vocab_size: 256, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 32}}
data: {function: "tests.launch.some_rows:rows", sequence: 32, global_batch: 16}
device: cpu
mesh: dp=2,tp=2
options: {zero: 1, num_microbatches: 2}
"""


def chosen(ranks, text=RUN, other=True):
    config = parse_run_config(text)
    return config, choose_mesh(config, ranks, subject_of(config), machine_of(config, "cpu"), other=other)


def test_the_files_own_mesh_is_kept_where_ranks_are_as_many():
    config, choice = chosen(4, other=False)
    assert choice == ChosenMesh(MeshSpec(dp=2, tp=2), config.options)
    assert ChosenMesh.from_data(choice.as_data()) == choice


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fewer_ranks_keep_the_global_batch_and_the_size_of_microbatches(ranks):
    if ranks == 3:
        with pytest.raises(LaunchError, match="no-mesh-fits"):
            chosen(ranks)
        return
    _, choice = chosen(ranks)
    data_ranks = choice.mesh.ranks(*SAMPLE_AXES)
    assert choice.mesh.world_size == ranks and choice.options.zero == 1
    assert 16 // data_ranks // choice.options.num_microbatches == 4  # as in the file: 8 rows of a data rank in 2
    assert "by `fit`" in choice.why


def test_other_numbers_are_refused_unless_asked_for():
    with pytest.raises(LaunchError, match="wrong-world-size"):
        chosen(2, other=False)


def test_the_next_smaller_number_of_ranks_that_fits():
    config = parse_run_config(RUN)
    assert fewer_ranks(config, 4) == 2 and fewer_ranks(config, 1) is None  # 3 do not divide 16 rows
    assert count_ranks(config, Launcher("alone", ""), None) == 4
    assert count_ranks(config, Launcher("kubernetes", "", nodes=2), None) == 2
    for requested, nodes, slug in ((None, 3, "uneven-nodes"), (9, 1, "no-gpu")):
        text = RUN.replace("device: cpu", "device: cuda") if slug == "no-gpu" else RUN
        with pytest.raises(LaunchError, match=slug):
            count_ranks(parse_run_config(text), Launcher("kubernetes", "", nodes=nodes), requested)


def test_a_group_of_tp_across_nodes_is_warned_of_with_its_cost():
    config, choice = chosen(4, other=False)
    machine = machine_of(config, "cpu")
    predicted = predict(config, choice, subject_of(config), machine, "cpu")
    (line,) = placement_warnings(predicted, machine, {0: "a", 1: "b", 2: "a", 3: "b"})
    assert "2 groups of tp cross nodes, such as ranks [0, 1]; a step takes about" in line
    assert not placement_warnings(predicted, machine, {0: "a", 1: "a", 2: "b", 3: "b"})
    summary = predicted.summary()
    assert summary == Summary.from_json(summary.as_json()) and summary.flops_per_step > 0
    assert summary.memory_of(0)["peak"] == predicted.explanation.peak_bytes and "tp" in summary.message_s


def test_a_model_that_cannot_be_recorded_has_no_prediction():
    config = parse_run_config(RUN.replace("num_attention_heads: 4", "num_attention_heads: 4"))
    broken = ChosenMesh(MeshSpec(dp=2, tp=3), Options())
    predicted = predict(config, broken, subject_of(config), machine_of(config, "cpu"), "cpu")
    assert predicted.explanation is None and predicted.why_not and predicted.summary().memory_of(0) == {}
