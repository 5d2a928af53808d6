"""What the file of a run says: one class a section. Each field's metadata is read by the loader and by the JSON schema.

Torch-free. `run_config_file.py` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from parallelize.base.errors import ParallelizeError
from parallelize.base.files.yaml_kinds import (
    FILLED_TEXT,
    FLAG,
    FREE,
    SEED_OR_TEXT,
    TEXT,
    TEXTS,
    Kind,
    choice,
    count,
    key,
    object_schema,
    or_null,
    real,
    schema_of,
    section,
)
from parallelize.base.files.yaml_nodes import Reader, is_nothing
from parallelize.base.mesh import SAMPLE_AXES, MeshSpec
from parallelize.plan.options import KINDS, NAMES, Options

SCHEMA_VERSION = 1
ON_ANOMALY = ("ignore", "warn", "stop", "skip", "rewind")


def _mesh(reader: Reader, node: yaml.Node, key: str) -> MeshSpec | None:
    """`dp=2,tp=4`, a mapping of axes, or `auto`: None."""
    try:
        if isinstance(node, yaml.MappingNode):
            axes = [(name, reader.number(value, name)) for name, _, value in reader.mapping(node, "mesh")]
            mesh = MeshSpec([(name, size) for name, size in axes if size is not None])
            names_none = not node.value
        else:
            text = reader.text(node, "mesh")
            if text in (None, "auto"):
                return None
            mesh = MeshSpec.parse(text or "")
            names_none = not mesh.axes
    except ParallelizeError as error:
        for problem in error.problems:
            reader.wrong(node, problem.slug, problem.what, problem.fix)
        return None
    if names_none:
        reader.wrong(node, "bad-mesh", "the mesh names no axis", "mesh: dp=1 for one process; or auto")
    return mesh


def _options(reader: Reader, node: yaml.Node, key: str) -> Options:
    values: dict[str, Any] = {}
    for name, value_node in reader.known(node, "options", set(NAMES)).items():
        reader.places[f"options.{name}"] = reader.where(value_node)
        given: dict[str, Any] = {} if is_nothing(value_node) else {name: KINDS[name].read(reader, value_node, name)}
        try:
            values |= Options(**given).explicit()
        except ParallelizeError as error:
            reader.wrong(value_node, error.problems[0].slug, error.problems[0].what, error.problems[0].fix)
    return Options(**values)


_AXES = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer", "minimum": 1}}
MESH = Kind(_mesh, {"anyOf": [{"type": "string"}, _AXES]})
OPTIONS = Kind(_options, object_schema({name: or_null(kind.schema) for name, kind in KINDS.items()}))


@dataclass(frozen=True)
class ModelSection:
    name: str = key(TEXT, "a config.json or its folder, a model type, a known size, or package.module:function", "")
    set: dict[str, Any] = key(FREE, "fields of the config, or keyword arguments of the function", {})
    initialize: int | str = key(SEED_OR_TEXT, "a seed, or a folder of weights", 0)
    quantize: str = key(
        TEXT,
        "linears and experts of the layers in 4 or 8 bits, which do not train: nf4, int8, or with another block "
        "nf4(block=32)",
        "",
    )
    lora: dict[str, Any] = key(
        FREE, "arguments of PEFT's LoraConfig: adapters that train beside the weights of a folder", {}
    )


@dataclass(frozen=True)
class DataSection:
    text: tuple[str, ...] = key(TEXTS, "text files, each of them one document", ())
    jsonl: tuple[str, ...] = key(TEXTS, "files of JSON lines, each line one document", ())
    field: str = key(FILLED_TEXT, "the key of a line's text", "text")
    function: str = key(
        TEXT, "module:function that returns texts, rows (a map-style data set), or an iterable of rows", ""
    )
    args: dict[str, Any] = key(FREE, "keyword arguments of the function", {})
    tokenizer: str = key(TEXT, "a folder that AutoTokenizer reads; without it, bytes are tokens", "")
    cache: str = key(TEXT, "the folder of tokenized files (default: beside the checkpoints)", "")
    sequence: int = key(count(), "tokens of a row", 128)
    global_batch: int = key(count(), "rows of a step, over all data ranks", 16)
    microbatch: int | None = key(count(), "rows that a rank computes at once (default: by num_microbatches)", None)
    balance: str = key(
        choice("off", "rows", "joined", "lockstep"),
        "rows: data ranks and microbatches get as many rows, which cost as much. joined: documents of any length are "
        "joined to one row for each microbatch. lockstep: so that each microbatch costs every rank as much",
        "off",
    )
    pair_cost: float = key(
        real(least=0), "what a squared token of a document costs, in tokens: explain prints it for lengths", 0.0
    )
    shuffle: bool = key(FLAG, "each epoch has another order", True)
    seed: int = key(count(least=0), "of the order", 0)
    workers: int = key(count(least=0), "processes that read rows", 0)


@dataclass(frozen=True)
class OptimizerSection:
    name: str = key(FILLED_TEXT, "a class of torch.optim, or module:Class", "AdamW")
    lr: float = key(real(least=0), "the learning rate after warmup", 3e-4)
    args: dict[str, Any] = key(FREE, "more keyword arguments of the class", {})
    clip: float | None = key(real(above=0), "gradients are clipped to this norm", None)


@dataclass(frozen=True)
class ScheduleSection:
    warmup_steps: int = key(count(least=0), "steps of linear warmup", 0)
    decay: str = key(choice("none", "linear", "cosine"), "after warmup", "none")
    final_fraction: float = key(real(least=0, most=1), "of the learning rate, at the last step", 0.1)


@dataclass(frozen=True)
class CheckpointSection:
    folder: str = key(TEXT, "where checkpoints are saved; a run that finds some there goes on from the newest", "")
    every: int = key(count(), "steps between saves", 100)
    keep_last: int | None = key(count(), "how many of the newest are kept (default: all)", None)
    keep_every: int | None = key(count(), "with keep_last: steps whose multiples are kept too", None)
    asynchronous: bool = key(FLAG, "files are written while training goes on", True)
    shared: bool = key(FLAG, "all nodes see the folder", True)
    may_differ: tuple[str, ...] = key(
        TEXTS, "keys of this file that may say something else than the checkpoint from which the run goes on", ()
    )


@dataclass(frozen=True)
class MetricsSection:
    every: int = key(count(), "steps between lines on the console", 1)
    jsonl: str = key(TEXT, "a file of JSON lines", "")
    tensorboard: str = key(TEXT, "a folder for TensorBoard", "")
    wandb: str = key(TEXT, "a project of Weights & Biases", "")
    html: str = key(TEXT, "a page with curves, memory and a timeline", "")
    profile_every: int = key(
        count(least=0), "steps between profiled ones, which give communication and imbalance; 0: none", 50
    )
    predict: bool = key(FLAG, "compute memory and operations of a step as `explain` does, for MFU and the page", True)


@dataclass(frozen=True)
class AnomalySection:
    nonfinite: str = key(choice(*ON_ANOMALY[2:]), "what follows a loss or gradient that is not finite", "stop")
    spike: str = key(choice(*ON_ANOMALY), "what follows a loss far above those before", "warn")
    spike_factor: float = key(real(above=0), "how many standard deviations above the mean of the window", 8.0)
    window: int = key(count(least=5), "steps of the window", 50)
    most: int = key(count(), "anomalies after which the run stops", 10)


@dataclass(frozen=True)
class WatchSection:
    timeout_s: int = key(
        count(least=0), "seconds in one collective after which the rank that is missing is named; 0: no watch", 300
    )
    folder: str = key(
        TEXT, "files of a run that was ended, for `parallelize diagnose` (default: beside the checkpoints)", ""
    )


@dataclass(frozen=True)
class RunConfig:
    """A run.

    Attributes:
        source: the file, for messages. text: its text with the overrides, of which ranks compare a hash.
        places: dotted key -> file, line and column of its value, or the argument that gave it; of those keys that are
            given.
    """

    schema_version: int = key(count(), "of this format", SCHEMA_VERSION)
    model: ModelSection = key(section(ModelSection, short="name"), "what is trained", ModelSection())
    data: DataSection = key(section(DataSection), "what it is trained on", DataSection())
    mesh: MeshSpec | None = key(MESH, "such as dp=2,tp=4; auto: what `fit` chooses for the ranks that there are", None)
    plan: str = key(TEXT, "a shipped plan's name, or a file (default: the model's)", "")
    options: Options = key(OPTIONS, "as parallelize_model takes them", Options())
    device: str = key(choice("cpu", "cuda"), "what ranks compute on (default: cuda if there is one)", "")
    optimizer: OptimizerSection = key(section(OptimizerSection), "the optimizer", OptimizerSection())
    schedule: ScheduleSection = key(section(ScheduleSection), "of the learning rate", ScheduleSection())
    steps: int = key(count(), "optimizer steps", 1000)
    seed: int = key(count(least=0), "of dropout", 0)
    checkpoints: CheckpointSection = key(section(CheckpointSection), "where and when", CheckpointSection())
    metrics: MetricsSection = key(section(MetricsSection), "what the run shows", MetricsSection())
    anomalies: AnomalySection = key(section(AnomalySection), "what happens at NaN and at spikes", AnomalySection())
    watch: WatchSection = key(section(WatchSection), "names ranks that hang, die or differ", WatchSection())
    hardware: str = key(TEXT, "a profile of `explain` and `fit` (default: that of the GPU, or cpu)", "")
    grace_s: int = key(count(), "seconds between a scheduler's signal and its kill", 30)
    timeout_s: int = key(count(), "how long ranks wait for each other in a collective", 600)
    source: str = "<run>"
    text: str = ""
    places: Mapping[str, str] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """Where the value of a dotted key is, such as `optimizer.lr`; where it is not given, that of its section, or
        the file."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, self.source)

    @property
    def watch_s(self) -> float:
        """Seconds that a rank may wait in one collective: fewer than those after which the collective itself fails."""
        return min(self.watch.timeout_s, 0.8 * self.timeout_s)

    @property
    def watch_folder(self) -> str:
        """Where the ranks of a run that was ended leave their files."""
        beside = f"{self.checkpoints.folder.rstrip('/')}-watch" if self.checkpoints.folder else "watch-reports"
        return self.watch.folder or beside

    def batch_of(self, mesh: MeshSpec) -> int:
        """Rows of a step of one data rank."""
        return self.data.global_batch // mesh.ranks(*SAMPLE_AXES)

    def options_on(self, mesh: MeshSpec) -> Options:
        """The options with the microbatches of this mesh: as many as keep `data.microbatch` rows in each."""
        if self.data.microbatch is None:
            return self.options
        count = max(1, self.batch_of(mesh) // self.data.microbatch)
        return Options(**{**self.options.explicit(), "num_microbatches": count})


# -- run schema ------------------------------------------------------------------------------------------------------
# The JSON schema of the file of a run, from the same metadata that the loader reads. Torch-free.


FILE = Path(__file__).parent / "run.schema.json"


def run_schema() -> dict[str, Any]:
    """The schema, as `run.schema.json` has it."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "a run of `parallelize run`"}
    return {**head, **schema_of(RunConfig)}


def schema_text() -> str:
    return json.dumps(run_schema(), indent=2) + "\n"
