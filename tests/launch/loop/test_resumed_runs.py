"""A run that goes on reads its file: every key takes effect, or is compared with the checkpoint and refused with both
values."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist

from parallelize import build_mesh, parallelize_model
from parallelize.base.errors import LaunchError, ParallelizeError
from parallelize.checkpoint.format.manifest import NAME, read_manifest
from parallelize.checkpoint.run.metadata import model_metadata
from parallelize.launch.config.resumed_keys import COMPARED, EFFECT, POSITION, RESUMED
from parallelize.launch.config.run_config import OPTIONS, RunConfig
from parallelize.launch.config.run_config_file import parse_run_config
from parallelize.launch.loop.build_run import RunEnvironment, build_run
from parallelize.launch.loop.resumed_run import RECORD, _changes_of_model, differences_of
from parallelize.launch.loop.run_optimizer import FileOptions, build_schedule_of
from parallelize.launch.preflight.mesh_choice import ChosenMesh
from parallelize.plan.options import NAMES
from parallelize.state.randomness.dropout.install import dropout_clock
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

FILE = """\
model: {{name: llama, set: {{vocab_size: 256, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 1, attention_dropout: 0.1}}, initialize: 0}}
data: {{text: [{folder}/text.txt], sequence: 8, global_batch: 4}}
mesh: dp=1
device: cpu
optimizer: {{lr: 0.01}}
schedule: {{warmup_steps: 1, decay: cosine}}
steps: 4
checkpoints: {{folder: {folder}/saved, every: 2, asynchronous: false}}
metrics: {{profile_every: 0, predict: false}}
watch: {{timeout_s: 0}}
"""  # noqa: E501

CHANGED = {
    "data.cache": "elsewhere",
    "data.microbatch": 2,
    "data.workers": 1,
    "mesh": "tp=1",
    "plan": "llama",
    "optimizer.lr": 0.5,
    "optimizer.args": "{weight_decay: 0.25, betas: [0.5, 0.75], eps: 1e-3}",
    "optimizer.clip": 0.125,
    "schedule.warmup_steps": 4,
    "schedule.decay": "linear",
    "schedule.final_fraction": 0.5,
    "steps": 12,
    "seed": 7,
    "checkpoints.every": 3,
    "checkpoints.keep_last": 2,
    "checkpoints.keep_every": 5,
    "checkpoints.asynchronous": "true",
    "checkpoints.shared": "false",
    "checkpoints.may_differ": "[model]",
    "metrics.every": 2,
    "metrics.jsonl": "elsewhere.jsonl",
    "metrics.html": "elsewhere.html",
    "metrics.profile_every": 3,
    "anomalies.nonfinite": "skip",
    "anomalies.spike": "skip",
    "anomalies.spike_factor": 3.0,
    "anomalies.window": 5,
    "anomalies.most": 2,
    "watch.timeout_s": 100,
    "watch.folder": "elsewhere",
    "hardware": "cpu",
    "grace_s": 77,
    "timeout_s": 177,
}
"""Other values of keys that take effect. Those below are not of a run of one rank without a GPU."""
ONLY_ELSEWHERE = {
    "device": "cuda needs a GPU",
    "data.balance": "needs the documents of a function: test_run_data.py",
    "data.pair_cost": "the same",
    "schema_version": "there is one",
    "checkpoints.folder": "another folder is another run",
    "metrics.tensorboard": "needs TensorBoard",
    "metrics.wandb": "needs Weights & Biases",
    "metrics.predict": "before the model is built",
}
REFUSED = {
    "model.set": ("gelu", "model.set.hidden_act"),
    "model.name": ("mistral", "model.name"),
    "model.initialize": (1, "model.initialize"),
    "model.quantize": ("nf4(block=8)", "model.quantize"),
    "model.lora": ("{r: 2}", "model.lora"),
    "data.text": ("[{folder}/other.txt]", "data"),
    "data.sequence": (16, "data"),
    "data.seed": (3, "data.seed"),
    "data.shuffle": ("false", "data.shuffle"),
    "data.global_batch": (3, "data.global_batch"),
    "optimizer.name": ("SGD", "optimizer.name"),
}


def leaves(cls=RunConfig, path=""):
    """Every dotted key of the file."""
    for field in (field for field in fields(cls) if field.metadata):
        if section := field.metadata["kind"].of:
            yield from leaves(section, f"{path}{field.name}.")
        elif field.metadata["kind"] is OPTIONS:
            yield from (f"options.{name}" for name in NAMES)
        else:
            yield f"{path}{field.name}"


def config_of(folder, **values):
    overrides = [f"{key}={value}" for key, value in values.items()]
    return parse_run_config(
        FILE.format(folder=folder), "run.yaml", [text.replace("{folder}", str(folder)) for text in overrides]
    )


@contextmanager
def built(config):
    """A loop of one rank, and the lines that it tells."""
    spec, lines = config.mesh, []
    with ExitStack() as stack:
        mesh = build_mesh("cpu", **dict(spec.axes))
        chosen = ChosenMesh(spec, config.options_on(spec))
        yield build_run(config, RunEnvironment(chosen, mesh, "cpu", None, lines.append), stack), lines


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run that has ended after four steps."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(" ".join(str(number * number) for number in range(200)))
    (folder / "other.txt").write_text("another text of another length " * 9)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with built(config_of(folder)) as (loop, _):
            assert loop.run() == 0
        yield folder
    finally:
        dist.destroy_process_group()


def observed(loop):
    """What a loop does, of the keys whose objects a checkpoint restores; and the file that it reads."""
    config, batches = loop.config, loop.data.batches
    rates = [loop.schedule.base_lrs[0] * loop.schedule.lr_lambdas[0](step) for step in range(14)]
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "lr")}
        for group in loop.optimizer.param_groups
    ]
    return {
        "optimizer.lr": loop.schedule.base_lrs,
        "optimizer.args": groups,
        **{f"schedule.{name}": rates for name in ("warmup_steps", "decay", "final_fraction")},
        "steps": (rates, config.steps),
        "seed": dropout_clock(loop.parallel.module).seed,
        "data": (batches.seed, batches.shuffle, batches.global_batch_size, batches.num_samples),
        **{
            f"anomalies.{field.name}": getattr(loop.anomalies.section, field.name) for field in fields(config.anomalies)
        },
        "checkpoints.keep_last": loop.checkpoints.keep_last,
        "checkpoints.keep_every": loop.checkpoints.keep_every,
    } | {
        key: value_of(config, key)
        for key in CHANGED
        if key.partition(".")[0] in ("data", "metrics", "watch", "mesh", "plan")
    }


def value_of(config, key):
    section, _, name = key.partition(".")
    value = getattr(config, section)
    return getattr(value, name) if name else value


def test_every_key_says_what_it_does_to_a_run_that_goes_on():
    entries = [key for row in RESUMED for key in row.keys]
    assert sorted(entries) == sorted(leaves()) and len(set(entries)) == len(entries)
    takes_effect = {key for row in RESUMED if row.how == EFFECT for key in row.keys}
    of_options = {f"options.{name}" for name in NAMES}
    assert takes_effect == {*CHANGED, *ONLY_ELSEWHERE, *of_options}
    same_check = {
        "data.jsonl",
        "data.field",
        "data.function",
        "data.args",
        "data.tokenizer",
    }  # as data.text: the number of rows
    assert {key for row in RESUMED if row.how != EFFECT for key in row.keys} == {*REFUSED, *same_check}
    assert {row.how for row in RESUMED} == {EFFECT, COMPARED, POSITION}


def test_what_takes_effect_is_as_in_a_run_that_begins(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = config_of(saved, **CHANGED)
    fresh = replace(config, checkpoints=replace(config.checkpoints, folder=str(tmp_path / "fresh")))
    with built(fresh) as (loop, _):
        begun = observed(loop)
    with built(config_of(saved)) as (loop, _):
        assert loop._resume() == 4
        before = observed(loop)
    with built(config) as (loop, _):
        assert loop._resume() == 4
        assert observed(loop) == begun
        assert loop.optimizer.param_groups[0]["lr"] == begun["schedule.decay"][4] == loop.schedule.get_last_lr()[0]
        assert len(loop.optimizer.state) > 0
    same = {key for key in begun if begun[key] == before[key]}
    assert same == {"data"}, "each key of CHANGED has another value in another file"


def test_the_options_of_a_run_are_those_of_its_file(saved):
    options = {
        "options.zero": 1,
        "options.recompute": "full",
        "options.num_microbatches": 2,
        "options.dtype": "bfloat16",
    }
    with built(config_of(saved, **options)) as (loop, _):
        assert loop._resume() == 4
        assert loop.parallel.step(**loop.data.next()) > 0
        assert any(p.dtype == torch.bfloat16 for p in loop.parallel.module.parameters())


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("key", REFUSED)
def test_what_is_compared_is_refused_with_both_values_and_the_key_that_chooses(saved, key):
    """Or accepted by `may_differ`, where it can be."""
    value, named = REFUSED[key]
    values = {named if key == "model.set" else key: value}
    if key in ("model.quantize", "model.lora"):
        of_record(saved, key, named)
        return
    with built(config_of(saved, **values)) as (loop, _):
        before = [p.detach().clone() for p in loop.parallel.module.parameters()]
        with pytest.raises(ParallelizeError) as refused:
            loop._resume()
        problem = refused.value.problems[0]
        assert named in problem.what or "multiple of 3" in problem.what
        assert f"may_differ: [{named}]" in problem.fix
        assert problem.slug == ("data-position" if key == "data.global_batch" else "changed-key")
        assert problem.where.startswith("run.yaml:3" if named == "data" else f"argument {key}")
        assert all(map(torch.equal, before, loop.parallel.module.parameters()))
    if key != "model.name":
        values["checkpoints.may_differ"] = f"[{named}]"
        with built(config_of(saved, **values)) as (loop, lines):
            assert loop._resume() == 4 and any("accepted by checkpoints.may_differ" in line for line in lines)
            assert any("data begin anew" in line for line in lines) == key.startswith("data")
            assert loop.data.batches.batches_done == (0 if key.startswith("data") else 4)
            loop._step(4)


def of_record(saved, key, named):
    """Of keys whose libraries or folders a run of one small file has not."""
    config = config_of(saved)
    with built(config) as (loop, _):
        manifest = loop.checkpoints.newest()
        other = {**manifest.about[RECORD], key.partition(".")[2]: "int8" if key == "model.quantize" else {"r": 2}}
        changed = replace(manifest, about={**manifest.about, RECORD: other})
        assert [each.key for each in differences_of(config, changed, loop.parallel, loop.optimizer)] == [named]
        assert not differences_of(config, manifest, loop.parallel, loop.optimizer)


def test_checkpoints_without_the_record_load(saved):
    """Of earlier versions, which saved the shape of the schedule too."""
    with built(config_of(saved)) as (loop, _):
        manifest = loop.checkpoints.newest()
        about = {key: value for key, value in manifest.about.items() if key not in (RECORD, "model")}
        older = replace(manifest, about=about)
        assert not differences_of(loop.config, older, loop.parallel, loop.optimizer)
        state = loop.schedule.state_dict()
        state["lr_lambdas"] = [{"warmup": 9, "decay": "none", "final": 0.0, "steps": 1}]
        loop.schedule.load_state_dict(state)
        fresh = build_schedule_of(loop.config, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01))
        assert [loop.schedule.lr_lambdas[0](step) for step in range(5)] == [fresh.lr_lambdas[0](s) for s in range(5)]


def test_weights_are_known_wherever_their_folder_is(saved, tmp_path):
    """And a config that says the same under another path or form is the same model."""
    config = config_of(saved)
    with built(config) as (loop, _):
        manifest = loop.checkpoints.newest()
        loop.parallel.module.config.save_pretrained(tmp_path)
        moved = replace(config, model=replace(config.model, name=str(tmp_path), set={}))
        assert not differences_of(moved, manifest, loop.parallel, loop.optimizer)
        record = {**manifest.about[RECORD], "initialize": "/gone/weights", "weights": [["model.safetensors", 12]]}
        manifest = replace(manifest, about={**manifest.about, RECORD: record})
        for name, differs in (("model.safetensors", []), ("other.safetensors", ["model.initialize"])):
            folder = tmp_path / name.partition(".")[0]
            folder.mkdir()
            (folder / name).write_bytes(bytes(12))
            here = replace(config, model=replace(config.model, initialize=str(folder)))
            differences = differences_of(here, manifest, loop.parallel, loop.optimizer)
            assert [each.key for each in differences] == differs


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_a_model_is_the_same_on_every_mesh(axes):
    """Ranks have configs of their shards, and none of them differs from that of another mesh."""
    base = tiny_model("llama")
    saved, copies = model_metadata(base), [copy.deepcopy(base) for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(copies[rank], build_mesh("cpu", **axes))
        return list(_changes_of_model(RunConfig().model, saved, model_metadata(parallel.module)))

    assert run_ranks(2, body) == [[], []]
    changed = {**saved, "config": saved["config"].replace('"hidden_act": "silu"', '"hidden_act": "gelu"')}
    assert [each.key for each in _changes_of_model(RunConfig().model, changed, saved)] == ["model.set.hidden_act"]


def test_arguments_that_need_state_which_was_not_saved_are_refused(saved):
    with built(config_of(saved, **{"optimizer.args": "{amsgrad: true}"})) as (loop, _):
        with pytest.raises(
            LaunchError, match="AdamW needs max_exp_avg_sq, which the checkpoint does not have"
        ) as refused:
            loop._resume()
        assert refused.value.slugs == ("bad-optimizer",)


def test_arguments_whose_state_begins_by_itself_take_effect():
    section = replace(RunConfig().optimizer, name="SGD", args={"momentum": 0.9})
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    options = FileOptions.of(section, optimizer)
    schedule = build_schedule_of(RunConfig(), optimizer)
    optimizer.state[parameter] = {"other": 1}
    optimizer.param_groups[0] |= {"momentum": 0.0, "k": 3}
    options.restore(optimizer, schedule)
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["k"] == 3


def test_the_manifest_has_the_record(saved):
    manifest = read_manifest(next((saved / "saved").glob(f"*4/{NAME}")).parent)
    assert manifest.about[RECORD] == {"initialize": 0, "weights": None, "quantize": "", "lora": None}
    assert json.loads(manifest.about["model"]["config"])["hidden_size"] == 16


@pytest.mark.torch_free
def test_keys_that_may_differ_are_those_that_are_compared():
    with pytest.raises(LaunchError, match=r"optimizer\.lr is no key whose change is refused"):
        parse_run_config(
            "model: llama\ndata: {function: 'tests.launch.some_rows:rows'}\ncheckpoints: {folder: a, may_differ: "
            "optimizer.lr}"
        )
    config = parse_run_config(
        "model: llama\ndata: {function: 'tests.launch.some_rows:rows'}\ncheckpoints: {folder: a, may_differ: "
        "[model.lora.r, data]}"
    )
    assert config.checkpoints.may_differ == ("model.lora.r", "data")
