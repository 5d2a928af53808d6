"""What each key of a run's file does to a run that goes on from a checkpoint. docs/run.md shows this table.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelize.plan.options import NAMES

EFFECT, COMPARED, POSITION = "takes effect", "compared", "takes effect where the position fits"


@dataclass(frozen=True)
class ResumedKeys:
    """Keys of one section that a resumed run treats alike.

    Attributes:
        section: "" for those at the top.
        how: `EFFECT`: the file's value is used. `COMPARED`: another value than the saved run's is refused. `POSITION`:
            the file's value is used if the saved position in the data means the same batches with it, and refused
            otherwise.
        note: from when on, and what a value does that `checkpoints.may_differ` lets pass.
    """

    section: str
    names: tuple[str, ...]
    how: str
    note: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Dotted."""
        return tuple(f"{self.section}.{name}".lstrip(".") for name in self.names)


def _keys(section: str, names: str, how: str, note: str) -> ResumedKeys:
    return ResumedKeys(section, tuple(names.split()), how, note)


RESUMED: tuple[ResumedKeys, ...] = (
    _keys(
        "model",
        "name set",
        COMPARED,
        "class and config, at any path; of a function, its name and arguments. Dropout, coefficients of losses and "
        "implementations take effect. If accepted: the file's model gets the saved weights",
    ),
    _keys(
        "model",
        "initialize",
        COMPARED,
        "a seed, or names and sizes of the weight files, at any path. If accepted: the weights are the saved ones",
    ),
    _keys(
        "model", "quantize lora", COMPARED, "If accepted: the file's model gets the saved tensors, of the same shapes"
    ),
    _keys(
        "data",
        "text jsonl field function args tokenizer sequence",
        POSITION,
        "the number of rows, or of sources, is the same. If accepted: the file's data start from the beginning",
    ),
    _keys(
        "data", "seed shuffle", POSITION, "the order is the same. If accepted: the file's data start from the beginning"
    ),
    _keys(
        "data",
        "global_batch",
        POSITION,
        "the rows taken so far are a multiple of it; the position stays at that row. If accepted: the file's data "
        "start from the beginning",
    ),
    _keys("data", "cache microbatch workers balance pair_cost", EFFECT, "from the next step on"),
    _keys("", "mesh plan device", EFFECT, "a checkpoint loads on any"),
    ResumedKeys("options", NAMES, EFFECT, "a checkpoint loads under any"),
    _keys("optimizer", "name", COMPARED, "If accepted: its state starts from zero"),
    _keys(
        "optimizer",
        "lr args",
        EFFECT,
        "from the next step on; arguments that need state which was not saved, such as `amsgrad`, are refused",
    ),
    _keys("optimizer", "clip", EFFECT, "from the next step on"),
    _keys(
        "schedule",
        "warmup_steps decay final_fraction",
        EFFECT,
        "from the step that was reached, as if the run had always had it",
    ),
    _keys("", "steps", EFFECT, "at once: the last step, also of the schedule"),
    _keys("", "seed", EFFECT, "from the next step on, for dropout; adapters are the saved ones"),
    _keys("checkpoints", "folder every keep_last keep_every asynchronous shared may_differ", EFFECT, "at once"),
    _keys("metrics", "every jsonl tensorboard wandb html profile_every predict", EFFECT, "at once"),
    _keys(
        "anomalies",
        "nonfinite spike spike_factor window most",
        EFFECT,
        "at once; the earlier losses and the count are kept",
    ),
    _keys("watch", "timeout_s folder", EFFECT, "at once"),
    _keys("", "schema_version hardware grace_s timeout_s", EFFECT, "at once"),
)

REFUSED: dict[str, ResumedKeys] = {key: row for row in RESUMED if row.how != EFFECT for key in row.keys}
"""Dotted key -> its row, of the keys whose change may be refused."""
SECTIONS = tuple(dict.fromkeys(key.partition(".")[0] for key in REFUSED))


def may_differ(accepted: tuple[str, ...], key: str) -> bool:
    """Whether `checkpoints.may_differ` names a key, its section, or a part of it (`model.set.rms_norm_eps`)."""
    return any(f"{key}.".startswith(f"{name}.") for name in accepted)


def document_rows() -> Iterator[str]:
    """The rows of the table in docs/run.md."""
    for row in RESUMED:
        names = ", ".join(f"`{name}`" for name in row.names)
        yield f"| {f'`{row.section}`: ' if row.section else ''}{names} | {row.how} | {row.note} |"
