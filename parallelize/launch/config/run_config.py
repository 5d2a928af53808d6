"""What the file of a run says: one class a section. Each field's metadata is read by the loader and by the JSON schema.

Torch-free. `run_config_file.py` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from parallelize.base.mesh import SAMPLE_AXES, MeshSpec
from parallelize.plan.options import AUTO, AUTO_FLAGS, DTYPE_ALIASES, DTYPES, FLAGS, NAMES, NUMBERS, RECOMPUTE, Options
from parallelize.plan.styles.contract import OVERLAPS

SCHEMA_VERSION = 1
ON_ANOMALY = ("ignore", "warn", "stop", "skip", "rewind")


def key(kind: str, meaning: str, default: Any, **more: Any) -> Any:
    """A field of a section.

    Args:
        kind: how its value is read: text, texts, count, real, flag, choice, free, seed_or_text, mesh, options, or
            section.
        meaning: for the schema.
        default: where the file does not have it.
        more: `least`, `above` and `most` of numbers, `choices`, `of` (the class of a section). Text whose default is
            not empty may not be empty; a key whose default is nothing may be null.
    """
    filled, nothing = isinstance(default, str) and bool(default), default in (None, "", ())
    metadata = {"kind": kind, "meaning": meaning, "filled": filled, "nothing": nothing, **more}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSection:
    name: str = key("text", "a config.json or its folder, a model type, a known size, or package.module:function", "")
    set: dict[str, Any] = key("free", "fields of the config, or keyword arguments of the function", {})
    initialize: int | str = key("seed_or_text", "a seed, or a folder of weights", 0)
    quantize: str = key(
        "text",
        "linears and experts of the layers in 4 or 8 bits, which do not train: nf4, int8, or with another block "
        "nf4(block=32)",
        "",
    )
    lora: dict[str, Any] = key(
        "free", "arguments of PEFT's LoraConfig: adapters that train beside the weights of a folder", {}
    )


@dataclass(frozen=True)
class DataSection:
    text: tuple[str, ...] = key("texts", "text files, each of them one document", ())
    jsonl: tuple[str, ...] = key("texts", "files of JSON lines, each line one document", ())
    field: str = key("text", "the key of a line's text", "text")
    function: str = key(
        "text", "module:function that returns texts, rows (a map-style data set), or an iterable of rows", ""
    )
    args: dict[str, Any] = key("free", "keyword arguments of the function", {})
    tokenizer: str = key("text", "a folder that AutoTokenizer reads; without it, bytes are tokens", "")
    cache: str = key("text", "the folder of tokenized files (default: beside the checkpoints)", "")
    sequence: int = key("count", "tokens of a row", 128)
    global_batch: int = key("count", "rows of a step, over all data ranks", 16)
    microbatch: int | None = key("count", "rows that a rank computes at once (default: by num_microbatches)", None)
    shuffle: bool = key("flag", "each epoch has another order", True)
    seed: int = key("count", "of the order", 0, least=0)
    workers: int = key("count", "processes that read rows", 0, least=0)


@dataclass(frozen=True)
class OptimizerSection:
    name: str = key("text", "a class of torch.optim, or module:Class", "AdamW")
    lr: float = key("real", "the learning rate after warmup", 3e-4, least=0)
    args: dict[str, Any] = key("free", "more keyword arguments of the class", {})
    clip: float | None = key("real", "gradients are clipped to this norm", None, above=0)


@dataclass(frozen=True)
class ScheduleSection:
    warmup_steps: int = key("count", "steps of linear warmup", 0, least=0)
    decay: str = key("choice", "after warmup", "none", choices=("none", "linear", "cosine"))
    final_fraction: float = key("real", "of the learning rate, at the last step", 0.1, least=0, most=1)


@dataclass(frozen=True)
class CheckpointSection:
    folder: str = key("text", "where checkpoints are saved; a run that finds some there goes on from the newest", "")
    every: int = key("count", "steps between saves", 100)
    keep_last: int | None = key("count", "how many of the newest are kept (default: all)", None)
    keep_every: int | None = key("count", "with keep_last: steps whose multiples are kept too", None)
    asynchronous: bool = key("flag", "files are written while training goes on", True)
    shared: bool = key("flag", "all nodes see the folder", True)
    may_differ: tuple[str, ...] = key(
        "texts", "keys of this file that may say something else than the checkpoint from which the run goes on", ()
    )


@dataclass(frozen=True)
class MetricsSection:
    every: int = key("count", "steps between lines on the console", 1)
    jsonl: str = key("text", "a file of JSON lines", "")
    tensorboard: str = key("text", "a folder for TensorBoard", "")
    wandb: str = key("text", "a project of Weights & Biases", "")
    html: str = key("text", "a page with curves, memory and a timeline", "")
    profile_every: int = key(
        "count", "steps between profiled ones, which give communication and imbalance; 0: none", 50, least=0
    )
    predict: bool = key("flag", "compute memory and operations of a step as `explain` does, for MFU and the page", True)


@dataclass(frozen=True)
class AnomalySection:
    nonfinite: str = key("choice", "what follows a loss or gradient that is not finite", "stop", choices=ON_ANOMALY[2:])
    spike: str = key("choice", "what follows a loss far above those before", "warn", choices=ON_ANOMALY)
    spike_factor: float = key("real", "how many standard deviations above the mean of the window", 8.0, above=0)
    window: int = key("count", "steps of the window", 50, least=5)
    most: int = key("count", "anomalies after which the run stops", 10)


@dataclass(frozen=True)
class WatchSection:
    timeout_s: int = key(
        "count", "seconds in one collective after which the rank that is missing is named; 0: no watch", 300, least=0
    )
    folder: str = key(
        "text", "files of a run that was ended, for `parallelize diagnose` (default: beside the checkpoints)", ""
    )


@dataclass(frozen=True)
class RunConfig:
    """A run.

    Attributes:
        source: the file, for messages. text: its text with the overrides, of which ranks compare a hash.
        places: dotted key -> file, line and column of its value, or the argument that gave it; of those keys that are
            given.
    """

    schema_version: int = key("count", "of this format", SCHEMA_VERSION)
    model: ModelSection = key("section", "what is trained", ModelSection(), of=ModelSection)
    data: DataSection = key("section", "what it is trained on", DataSection(), of=DataSection)
    mesh: MeshSpec | None = key(
        "mesh", "such as dp=2,tp=4; auto: what `fit` chooses for the ranks that there are", None
    )
    plan: str = key("text", "a shipped plan's name, or a file (default: the model's)", "")
    options: Options = key("options", "as parallelize_model takes them", Options())
    device: str = key("choice", "what ranks compute on (default: cuda if there is one)", "", choices=("cpu", "cuda"))
    optimizer: OptimizerSection = key("section", "the optimizer", OptimizerSection(), of=OptimizerSection)
    schedule: ScheduleSection = key("section", "of the learning rate", ScheduleSection(), of=ScheduleSection)
    steps: int = key("count", "optimizer steps", 1000)
    seed: int = key("count", "of dropout", 0, least=0)
    checkpoints: CheckpointSection = key("section", "where and when", CheckpointSection(), of=CheckpointSection)
    metrics: MetricsSection = key("section", "what the run shows", MetricsSection(), of=MetricsSection)
    anomalies: AnomalySection = key("section", "what happens at NaN and at spikes", AnomalySection(), of=AnomalySection)
    watch: WatchSection = key("section", "names ranks that hang, die or differ", WatchSection(), of=WatchSection)
    hardware: str = key("text", "a profile of `explain` and `fit` (default: that of the GPU, or cpu)", "")
    grace_s: int = key("count", "seconds between a scheduler's signal and its kill", 30)
    timeout_s: int = key("count", "how long ranks wait for each other in a collective", 600)
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


MOST = 10**9 - 1  # `yaml_nodes.is_decimal` reads 9 digits
FILE = Path(__file__).parent / "run.schema.json"
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_KINDS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "texts": _TEXTS,
    "real": {"type": "number"},
    "flag": {"type": "boolean"},
    "free": {"type": "object"},
    "seed_or_text": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST}, {"type": "string"}]},
    "mesh": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer", "minimum": 1}},
        ]
    },
}


def run_schema() -> dict[str, Any]:
    """The schema, as `run.schema.json` has it."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "a run of `parallelize run`"}
    return {**head, **_object(RunConfig)}


def schema_text() -> str:
    return json.dumps(run_schema(), indent=2) + "\n"


def _object(cls: Any) -> dict[str, Any]:
    properties = {field.name: _property(field.metadata) for field in fields(cls) if field.metadata}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(metadata: Any) -> dict[str, Any]:
    described = _value(metadata)
    return _or_null(described) if metadata["nothing"] else described


def _or_null(described: dict[str, Any]) -> dict[str, Any]:
    """A property whose value may also be null."""
    if "anyOf" in described:
        return {**described, "anyOf": [*described["anyOf"], {"type": "null"}]}
    if "enum" in described:
        return {**described, "enum": [*described["enum"], None]}
    return {**described, "type": [described["type"], "null"]}


def _value(metadata: Any) -> dict[str, Any]:
    kind, about = metadata["kind"], {"description": metadata["meaning"]}
    if kind == "section":
        inner = _object(metadata["of"])
        named = metadata["of"].__name__ == "ModelSection"
        return {**about, "anyOf": [{"type": "string"}, inner]} if named else {**about, **inner}
    if kind == "count":
        return {**about, "type": "integer", "minimum": metadata.get("least", 1), "maximum": MOST}
    if kind == "choice":
        return {**about, "enum": list(metadata["choices"])}
    if kind == "options":
        return {**about, **_options()}
    bounds = {"least": "minimum", "above": "exclusiveMinimum", "most": "maximum"}
    limits = {bounds[name]: metadata[name] for name in bounds if name in metadata}
    if kind == "text" and metadata["filled"]:
        limits["minLength"] = 1
    return {**about, **_KINDS[kind], **limits}


def _options() -> dict[str, Any]:
    dtypes = (*DTYPES, *DTYPE_ALIASES)
    choices = {"overlap": OVERLAPS, "recompute": RECOMPUTE, "dtype": dtypes, "reduce_dtype": dtypes}
    properties: dict[str, Any] = {}
    for name in NAMES:
        if name in AUTO_FLAGS:
            properties[name] = {"enum": [True, False, AUTO]}
        elif name in FLAGS:
            properties[name] = {"type": "boolean"}
        elif name in NUMBERS:
            least, most = {"zero": (0, 3), "compare_every": (0, MOST)}.get(name, (1, MOST))
            properties[name] = {"type": "integer", "minimum": least, "maximum": most}
        elif name == "recompute_save":
            properties[name] = _TEXTS
        else:
            properties[name] = {"enum": list(choices[name])} if name in choices else {"type": "string"}
    properties = {name: _or_null(described) for name, described in properties.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}
