"""What is wrong with a run, of that which its file and the files that it names say. Nothing is built, and nothing of
theirs runs.

A check reads some keys, and is left out where one of them could not be read: its mistake is reported already.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from parallelize.base.errors import ModelError, ParallelizeError, Problem, did_you_mean
from parallelize.base.mesh import SAMPLE_AXES
from parallelize.launch.config.named_functions import wrong_function
from parallelize.launch.config.resumed_keys import REFUSED, SECTIONS
from parallelize.launch.config.run_config import SCHEMA_VERSION, RunConfig
from parallelize.plan.block_formats import block_format
from parallelize.plan.plan_file import load_plan
from parallelize.plan.stage_ranks import microbatches_problem, schedule_name, stages_problem
from parallelize.tools.analysis.cost.machine import load_machine


@dataclass(frozen=True)
class Mistake:
    """A value that is wrong. key: dotted. slug, what, fix, rows: as of a `Problem`. where: of a mistake in a file that
    the key names."""

    key: str
    slug: str
    what: str
    fix: str = ""
    rows: tuple[tuple[str, str], ...] = ()
    where: str = ""

    def problem(self, config: RunConfig) -> Problem:
        place = config.place(self.key)
        rows = (*self.rows, ("named by", f"{place}: {self.key}")) if self.where else self.rows
        return Problem(self.slug, self.what, self.where or place, rows, self.fix)


Check = tuple[tuple[str, ...], Callable[[RunConfig], Iterator[Mistake]]]
"""(dotted keys that are read, config -> mistakes)."""


def problems_of(config: RunConfig, unread: Collection[str], checks: Iterable[Check]) -> list[Problem]:
    """The problems that checks find. unread: dotted keys, or whole sections, whose values are wrong."""
    problems = []
    for keys, check in checks:
        if not any(_is_part(key, wrong) or _is_part(wrong, key) for key in keys for wrong in unread):
            problems += [mistake.problem(config) for mistake in check(config)]
    return problems


def _is_part(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def mistakes_of(key: str, error: ParallelizeError) -> Iterator[Mistake]:
    """The mistakes of an error that a value has caused."""
    for problem in error.problems:
        yield Mistake(key, problem.slug, problem.what, problem.fix, problem.rows, problem.where)


def _version(config: RunConfig) -> Iterator[Mistake]:
    if config.schema_version != SCHEMA_VERSION:
        what = f"version {config.schema_version}; this release reads {SCHEMA_VERSION}"
        yield Mistake("schema_version", "unknown-version", what, f"schema_version: {SCHEMA_VERSION}")


# -- the model and its plan ---------------------------------------------------------------------------------------


def _model(config: RunConfig) -> Iterator[Mistake]:
    name = config.model.name
    if not name:
        yield Mistake("model.name", "missing-key", "the run has no model", "model: llama, or {name: ..., set: {...}}")
    elif ":" in name and not Path(name).exists() and (wrong := wrong_function(name, config.model.set)):
        of_arguments = wrong.argument is not None
        key = f"model.set.{wrong.argument}".rstrip(".") if of_arguments else "model.name"
        yield Mistake(key, "bad-value" if of_arguments else "no-such-factory", wrong.what, wrong.fix)


def _weights(config: RunConfig) -> Iterator[Mistake]:
    model, fix = config.model, "model: {initialize: path/to/weights, ...}, a folder of Hugging Face's layout"
    of_folder = [key for key in ("quantize", "lora") if getattr(model, key)]
    if of_folder and not isinstance(model.initialize, str):
        what = f"{' and '.join(of_folder)} of a model whose weights are drawn"
        yield Mistake(f"model.{of_folder[0]}", "missing-key", what, fix)
    if isinstance(model.initialize, str) and not Path(model.initialize).exists():
        what = f"there is no folder {model.initialize!r}"
        yield Mistake("model.initialize", "no-such-file", what, f"a seed, or {fix}; {_relative()}")


def _quantize(config: RunConfig) -> Iterator[Mistake]:
    if config.model.quantize:
        try:
            block_format(config.model.quantize)
        except ModelError as error:
            yield from mistakes_of("model.quantize", error)


def _plan(config: RunConfig) -> Iterator[Mistake]:
    if config.plan and config.plan != "auto":
        try:
            load_plan(config.plan)
        except ParallelizeError as error:
            yield from mistakes_of("plan", error)


def _hardware(config: RunConfig) -> Iterator[Mistake]:
    if config.hardware:
        try:
            load_machine(config.hardware)
        except ParallelizeError as error:
            yield from mistakes_of("hardware", error)


# -- data and files -----------------------------------------------------------------------------------------------


def _relative() -> str:
    return f"paths are relative to {Path.cwd()}"


def _sources(config: RunConfig) -> Iterator[Mistake]:
    data = config.data
    names = ("text", "jsonl", "function")
    sources = [name for name in names if getattr(data, name)]
    keys_in_file = [f"data.{name}" for name in names if f"data.{name}" in config.places]
    if len(sources) != 1:
        what = f"data has {' and '.join(sources) or 'no source'}"
        slug = "bad-value" if sources else "missing-key"
        yield Mistake([*keys_in_file, "data"][0], slug, what, "one of text, jsonl and function")
    if data.balance != "off" and sources != ["function"]:
        what = "rows of text files have one length, and cost the same"
        yield Mistake("data.balance", "bad-value", what, "data.function, which returns documents of their own lengths")
    if data.args and not data.function:
        yield Mistake("data.args", "missing-key", "arguments without a function are not read", "add data.function")


def _data_files(config: RunConfig) -> Iterator[Mistake]:
    for key in ("text", "jsonl"):
        paths = [Path(path) for path in getattr(config.data, key)]
        for path in paths:
            if not path.is_file():
                yield Mistake(f"data.{key}", "no-such-file", f"there is no file {path}", _relative())
        if paths and all(path.is_file() and path.stat().st_size == 0 for path in paths):
            yield Mistake(
                f"data.{key}", "empty-data", f"{', '.join(map(str, paths))[:200]}: no text", "name files with text"
            )


def _data_function(config: RunConfig) -> Iterator[Mistake]:
    if config.data.function and (wrong := wrong_function(config.data.function, config.data.args)):
        if wrong.argument is not None:
            yield Mistake(f"data.args.{wrong.argument}".rstrip("."), "bad-value", wrong.what, wrong.fix)
        else:
            yield Mistake("data.function", "no-such-object", wrong.what, wrong.fix)


def _optimizer_class(config: RunConfig) -> Iterator[Mistake]:
    if ":" in config.optimizer.name and (wrong := wrong_function(config.optimizer.name, None)):
        yield Mistake("optimizer.name", "no-such-object", wrong.what, wrong.fix)
    if "lr" in config.optimizer.args:
        yield Mistake("optimizer.args.lr", "bad-value", "the learning rate is no argument of its own", "optimizer.lr")


def _checkpoints(config: RunConfig) -> Iterator[Mistake]:
    section = config.checkpoints
    if section.keep_every and not section.keep_last:
        what = "keep_every without keep_last removes nothing"
        yield Mistake("checkpoints.keep_every", "bad-value", what, "add keep_last")
    known = (*SECTIONS, *REFUSED)
    for name in section.may_differ:
        if name not in known and not any(name.startswith(f"{key}.") for key in REFUSED):
            what = f"{name} is no key whose change is refused"
            yield Mistake("checkpoints.may_differ", "bad-value", what, did_you_mean(name, known))
    is_given = any(key.startswith("checkpoints.") for key in config.places)
    if is_given and "checkpoints.folder" not in config.places:
        fix = "checkpoints: {folder: ...}; an empty folder says that nothing is to be saved"
        yield Mistake("checkpoints", "missing-key", "checkpoints have no folder, so that nothing would be saved", fix)


def _rewind(config: RunConfig) -> Iterator[Mistake]:
    for key in ("nonfinite", "spike"):
        if getattr(config.anomalies, key) == "rewind" and not config.checkpoints.folder:
            fix = "add checkpoints: {folder: ...}"
            yield Mistake(f"anomalies.{key}", "missing-key", "rewind needs a checkpoint to go back to", fix)


_FOLDERS = ("checkpoints.folder", "data.cache", "metrics.tensorboard", "watch.folder")
_FILES = ("metrics.jsonl", "metrics.html")


def _outputs(config: RunConfig) -> Iterator[Mistake]:
    """What is to be written where something else is."""
    for key in (*_FOLDERS, *_FILES):
        section, _, name = key.partition(".")
        text = getattr(getattr(config, section), name)
        if not text:
            continue
        path = Path(text)
        if key in _FILES and path.is_dir():
            yield Mistake(key, "not-a-file", f"{text} is a folder", "name a file in it")
        for part in (path, *path.parents) if key in _FOLDERS else path.parents:
            if part.exists() and not part.is_dir():
                yield Mistake(key, "not-a-folder", f"{part} is a file, and no folder", "another path")
                break


# -- the mesh -----------------------------------------------------------------------------------------------------


def _options_on_mesh(config: RunConfig) -> Iterator[Mistake]:
    if config.mesh is not None:
        for problem in config.options.complete().check_on(config.mesh):
            yield Mistake("mesh", problem.slug, problem.what, problem.fix, problem.rows)


def _schedule(config: RunConfig) -> Iterator[Mistake]:
    options = config.options
    if options.schedule is None:
        return
    try:
        name = schedule_name(options.schedule)
    except ParallelizeError as error:
        yield from mistakes_of("options.schedule", error)
        return
    if options.stages_per_rank is not None and (problem := stages_problem(name, options.stages_per_rank)):
        yield Mistake("options.stages_per_rank", problem.slug, problem.what, problem.fix)
    pp = config.mesh.ranks("pp") if config.mesh is not None else 1
    count = options.num_microbatches  # without it, the plan may have a number
    if pp > 1 and count is not None and (problem := microbatches_problem(name, pp, count)):
        yield Mistake("options.num_microbatches", problem.slug, problem.what, problem.fix)


def _batch(config: RunConfig) -> Iterator[Mistake]:
    microbatch, mesh = config.data.microbatch, config.mesh
    if microbatch is not None and config.options.num_microbatches is not None:
        what = "data.microbatch and options.num_microbatches say the same"
        yield Mistake("data.microbatch", "bad-value", what, "give one of them")
        return
    if config.data.balance in ("joined", "lockstep"):  # the batch of a rank is a row for each microbatch
        if microbatch is not None:
            what = "joined documents are one row for each microbatch, of any number of documents"
            yield Mistake("data.microbatch", "bad-value", what, "options.num_microbatches")
        return
    if mesh is None:
        return
    data_ranks, batch = mesh.ranks(*SAMPLE_AXES), config.batch_of(mesh)
    if config.data.global_batch % data_ranks:
        what = f"global_batch {config.data.global_batch} does not divide over {data_ranks} data ranks"
        yield Mistake("data.global_batch", "indivisible-batch", what, f"a multiple of {data_ranks}")
    elif microbatch is not None and batch % microbatch:
        what = f"{batch} rows of a data rank are no multiple of {microbatch} rows of a microbatch"
        divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
        yield Mistake("data.microbatch", "indivisible-batch", what, f"a divisor: {divisors}")
    elif (count := config.options.num_microbatches) is not None and batch % count:
        what = f"{batch} rows of a data rank do not divide into {count} microbatches"
        yield Mistake("options.num_microbatches", "indivisible-batch", what, "a divisor of the rows")


CHECKS: tuple[Check, ...] = (
    (("schema_version",), _version),
    (("model.name", "model.set"), _model),
    (("model.initialize", "model.quantize", "model.lora"), _weights),
    (("model.quantize",), _quantize),
    (("plan",), _plan),
    (("hardware",), _hardware),
    (("data.text", "data.jsonl", "data.function", "data.args"), _sources),
    (("data.text", "data.jsonl"), _data_files),
    (("data.function", "data.args"), _data_function),
    (("optimizer.name", "optimizer.args"), _optimizer_class),
    (("checkpoints",), _checkpoints),
    (("anomalies", "checkpoints"), _rewind),
    (("checkpoints", "data", "metrics", "watch", *_FOLDERS, *_FILES), _outputs),
    (("options", "mesh"), _options_on_mesh),
    (("options", "mesh"), _schedule),
    (("data.global_batch", "data.microbatch", "options", "mesh"), _batch),
)
