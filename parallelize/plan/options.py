"""The options of a run on a mesh: one class for training, explaining, fitting, verifying, and a plan's `defaults:`.

Torch-free. dtypes are names, so that a plan file can contain them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from parallelize.base.errors import ModelError, Problem, did_you_mean
from parallelize.base.files.yaml_kinds import FLAG, FLAG_OR_AUTO, MOST, TEXTS, WORD, Kind, choice, count
from parallelize.base.files.yaml_nodes import Reader
from parallelize.base.mesh import AXES, FOLDED_AXES, MeshSpec, axis_order, possible_expert_ranks
from parallelize.plan.expert_order import Orders, orders_of
from parallelize.plan.styles.contract import OVERLAPS

AnyOptions = TypeVar("AnyOptions", bound="Options")
DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
DTYPE_ALIASES |= {"fp64": "float64", "double": "float64"}
RECOMPUTE = ("off", "selective", "full")

_BY_PLAN: Any = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model runs on a mesh. None: what the plan's `defaults:` say, else the value in `STANDARD`.

    Attributes:
        schedule: of the pipeline: see `build_schedule`.
        num_microbatches: of a step. Default: twice the pp size; 1 without `pp`, where they run sequentially.
        stages_per_rank: pipeline stages of each pp rank. Default: as the schedule requires.
        zero: the ZeRO stage over dp, 0 to 3: see `shard_data`.
        defer: ZeRO 2 and 3 reduce gradients once a step instead of in each backward.
        sequence_parallel: norms and residuals are sequence shards over `tp`.
        loss_parallel: logits stay shards of the vocabulary over `tp`.
        fuse_loss: the head returns `DeferredLogits`, and the loss computes logits in chunks of tokens. Needs no `tp`.
        overlap: "auto", "off", "chunked" or "symm_mem": collectives overlap with matmuls. "auto" measures link and
            matmuls once, at the first forward, and overlaps where that is faster; see `overlap_report`.
        overlap_microbatches: the forward of a microbatch runs beside the backward of the one before it: where one waits
            for a message, the other computes. Not with pipeline stages, ZeRO 3 or recompute. "auto": where it can, and
            where it is faster, which the first steps measure.
        ulysses: ranks of `cp` that exchange heads, where the rest forms a ring: see `context_parallel`.
        ep: ranks over which whole experts of a mixture are divided, folded over dp x cp x tp: a divisor of their number
            that is a multiple or a divisor of tp. 1: each expert is split over `tp`.
        etp: ranks over which each of these experts is split. The experts are on ep x etp ranks, a multiple or a divisor
            of tp.
        expert_placement: which experts are on which rank of `ep`: a mapping from names of modules of experts (patterns)
            to their experts in the order of the ranks, or a JSON file with one. Default: in the model's order.
        recompute: "off", "selective" or "full": see `recompute`; so recompute_every and recompute_save.
        dtype: of compute, a name (also bf16, fp16, fp32) or a torch dtype; default: that of the weights. Where it is
            narrower than they are, the optimizer keeps float32 copies, and gradients are summed in float32.
        reduce_dtype: of the sums of gradients over data axes. Default: float32 where `dtype` is narrower, else the
            parameters' dtype.
        compare_every: parameters that ranks store alike are compared in the first call of a step (or evaluation, or
            forward), and in every N-th call after it; 0: never.

    Raises: ModelError `bad-option`, `bad-zero-stage`.
    """

    schedule: str = _BY_PLAN
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    zero: int = _BY_PLAN
    defer: bool = _BY_PLAN
    sequence_parallel: bool = _BY_PLAN
    loss_parallel: bool = _BY_PLAN
    fuse_loss: bool = _BY_PLAN
    overlap: str = _BY_PLAN
    overlap_microbatches: bool | str = _BY_PLAN
    ulysses: int = _BY_PLAN
    ep: int = _BY_PLAN
    etp: int = _BY_PLAN
    expert_placement: Orders | None = None
    recompute: str = _BY_PLAN
    recompute_every: int = _BY_PLAN
    recompute_save: tuple[str, ...] | None = None
    dtype: str | None = None
    reduce_dtype: str | None = None
    compare_every: int = _BY_PLAN

    def __post_init__(self) -> None:
        for name in _DTYPES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, dtype_name(getattr(self, name)))
        saved = self.recompute_save
        if saved is not None:
            object.__setattr__(self, "recompute_save", (saved,) if isinstance(saved, str) else tuple(saved))
        orders, problem = orders_of(self.expert_placement) if self.expert_placement is not None else (None, None)
        object.__setattr__(self, "expert_placement", orders)
        if problems := [*_wrong_values(self), *filter(None, [problem])]:
            raise ModelError(*problems)

    def over(self: AnyOptions, defaults: Options) -> AnyOptions:
        """These options; where one is None, that of `defaults`."""
        absent = {name: getattr(defaults, name) for name in NAMES if getattr(self, name) is None}
        return replace(self, **absent)

    def complete(self: AnyOptions, defaults: Options | None = None) -> AnyOptions:
        """These options over a plan's defaults over `STANDARD`: nothing is left to a later choice."""
        return (self if defaults is None else self.over(defaults)).over(STANDARD)

    def explicit(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}

    @property
    def low_precision(self) -> bool:
        """Whether compute is narrower than the values that the optimizer steps."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def expert_ranks(self) -> int:
        """The ranks that have one copy of all experts together. 1: experts are split over `tp`, as all else is."""
        return (self.ep or 1) * (self.etp or 1)

    def microbatches(self, mesh: MeshSpec) -> int:
        """Microbatches of a step on a mesh."""
        pp = mesh.ranks("pp")
        return self.num_microbatches or (2 * pp if pp > 1 else 1)

    def microbatch_overlap(self, mesh: MeshSpec) -> bool | str:
        """`overlap_microbatches` of these complete options on a mesh: False where it is "auto" and nothing can
        overlap."""
        impossible = self.overlap_microbatches == AUTO and any(_wrong_overlap_of_microbatches(self, mesh))
        return False if impossible else self.overlap_microbatches

    def check_on(self, mesh: MeshSpec) -> list[Problem]:
        """What is wrong with these complete options on a mesh, of what needs no model."""
        return list(_wrong_on_mesh(self, mesh))


NAMES = tuple(field.name for field in fields(Options))
_DTYPES = ("dtype", "reduce_dtype")
_COUNTS = ("num_microbatches", "stages_per_rank", "recompute_every", "ulysses", "ep", "etp")
ROW_OPTIONS = ("sequence_parallel", "loss_parallel", "fuse_loss", "ep", "etp", "expert_placement")
"""Options that decide contracts and layouts over `tp`."""
AUTO = "auto"


def _number(least: int = 1, most: int = MOST) -> Kind:
    """An integer, whose limits `Options` checks."""
    return Kind(Reader.number, count(least, most).schema)


def _words(*words: str) -> Kind:
    """A word, which `Options` checks."""
    return Kind(WORD.read, choice(*words).schema)


KINDS: dict[str, Kind] = {
    "schedule": WORD,
    "num_microbatches": _number(),
    "stages_per_rank": _number(),
    "zero": _number(0, 3),
    "defer": FLAG,
    "sequence_parallel": FLAG,
    "loss_parallel": FLAG,
    "fuse_loss": FLAG,
    "overlap": _words(*OVERLAPS),
    "overlap_microbatches": FLAG_OR_AUTO,
    "ulysses": _number(),
    "ep": _number(),
    "etp": _number(),
    "expert_placement": Kind(Reader.text, {"type": "string"}),
    "recompute": _words(*RECOMPUTE),
    "recompute_every": _number(),
    "recompute_save": Kind(Reader.texts, TEXTS.schema),
    "dtype": _words(*DTYPES, *DTYPE_ALIASES),
    "reduce_dtype": _words(*DTYPES, *DTYPE_ALIASES),
    "compare_every": _number(0),
}
"""How each option is written in the file of a run, and under a plan's `defaults:`."""


def dtype_name(value: object) -> str:
    """The name of a dtype as torch has it, from that, a torch dtype, or a short name such as bf16."""
    name = str(value).removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def options_of(options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """Options from an object and from keywords, which win. Raises: ModelError `unknown-option`, and as `Options`."""
    if options is not None and not isinstance(options, Options):
        what = f"options are a {type(options).__name__}"
        raise ModelError(Problem("bad-option", what, fix="parallelize.Options(zero=2, ...), or keywords"))
    refuse_unknown(keywords, NAMES)
    return Options(**keywords) if options is None else Options(**keywords).over(options)


def refuse_unknown(keywords: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises: ModelError `unknown-option` for a keyword that is not one of the known names."""
    problems = [
        Problem("unknown-option", f"there is no option {name!r}", fix=did_you_mean(name, known))
        for name in keywords
        if name not in known
    ]
    if problems:
        raise ModelError(*problems)


# -- checks -------------------------------------------------------------------------------------------------------


def _wrong_values(options: Options) -> Iterator[Problem]:
    """Values that no mesh and no model makes right."""
    if options.zero is not None and (isinstance(options.zero, bool) or options.zero not in (0, 1, 2, 3)):
        yield Problem("bad-zero-stage", f"there is no ZeRO stage {options.zero!r}", fix="0, 1, 2 or 3")
    yield from wrong_choices(options, {"overlap": OVERLAPS, "recompute": RECOMPUTE, **dict.fromkeys(_DTYPES, DTYPES)})
    if options.schedule is not None and not isinstance(options.schedule, str):
        yield Problem("bad-option", f"schedule is {options.schedule!r}", fix="the name of a schedule, such as 1f1b")
    for name, kind in KINDS.items():
        if kind not in (FLAG, FLAG_OR_AUTO):
            continue
        automatic = (AUTO,) if kind is FLAG_OR_AUTO else ()
        if getattr(options, name) not in (None, False, True, *automatic):
            choices = ", ".join(("True", "False", *map(repr, automatic)))
            what = f"{name} is {getattr(options, name)!r}"
            yield Problem("bad-option", what, fix=f"{choices}, or None for the plan's")
    yield from wrong_counts(options, _COUNTS)
    yield from wrong_counts(options, ("compare_every",), least=0)


def wrong_choices(options: object, choices: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Problems of fields that are neither None nor one of their choices."""
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            yield Problem("bad-option", f"{name} is {value!r}", fix="one of: " + ", ".join(allowed))


def wrong_counts(options: object, names: tuple[str, ...], least: int = 1) -> Iterator[Problem]:
    """Problems of counts that are neither None nor integers of `least` or more."""
    for name in names:
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            yield Problem("bad-option", f"{name} is {value!r}", fix=f"an integer, {least} or more")


def _wrong_on_mesh(options: Options, mesh: MeshSpec) -> Iterator[Problem]:
    for axis in mesh.names:
        if axis == "ep":
            what = "experts fold over the ranks of dp, cp and tp, and have no axis of their own in a mesh"
            yield Problem("unknown-axis", what, fix=f"leave it out, and give the option ep={mesh.size(axis)}")
        elif axis not in AXES:
            fix = "name axes pp, dp_replicate, dp (or dp_shard), cp and tp"
            yield Problem("unknown-axis", f"axis {axis!r} is unknown", fix=fix)
    yield from axis_order(mesh, options.zero)
    if {"dp", "dp_shard"} <= set(mesh.names):
        yield Problem("unknown-axis", "dp and dp_shard are two names of one axis", fix="use one of them")
    if options.zero > 0 and not {"dp", "dp_shard"} & set(mesh.names):
        what = f"ZeRO {options.zero} divides state over dp, and the mesh {mesh} has no such axis"
        yield Problem(
            "no-data-axis", what, fix=f"add an axis: dp=2,{','.join(f'{a}={n}' for a, n in mesh.axes)}; or zero=0"
        )
    if mesh.ranks("cp") % options.ulysses and mesh.ranks("cp") > 1:
        yield wrong_ulysses(options.ulysses, mesh.ranks("cp"))
    yield from wrong_folding(options, mesh)
    yield from _wrong_placement(options)
    if options.overlap_microbatches is True:
        yield from _wrong_overlap_of_microbatches(options, mesh)


def _wrong_overlap_of_microbatches(options: Options, mesh: MeshSpec) -> Iterator[Problem]:
    """Where no forward can run beside the backward of another microbatch."""
    pp, count, off = mesh.ranks("pp"), options.microbatches(mesh), "overlap_microbatches=False"
    cases = (
        (pp > 1, f"pp is {pp}, and a stage runs its microbatches in the order of its schedule", off),
        (options.zero == 3, "ZeRO 3 stores the weights of a layer either for a forward or for a backward", off),
        (options.recompute != "off", "recompute runs in a backward the layers in which a forward is", off),
        (count < 2, f"a step has {count} microbatch", "num_microbatches=2, or more"),
    )
    for holds, reason, fix in cases:
        if holds:
            yield Problem("no-overlap", f"overlap_microbatches is asked for, and {reason}", fix=fix)


def wrong_ulysses(ulysses: int, cp: int) -> Problem:
    divisors = ", ".join(str(n) for n in range(1, cp + 1) if cp % n == 0)
    return Problem(
        "bad-ulysses", f"ulysses is {ulysses}, which does not divide cp (size {cp})", fix=f"one of: {divisors}"
    )


def _wrong_placement(options: Options) -> Iterator[Problem]:
    """Orders of experts where no rank has whole ones."""
    if options.expert_placement and (options.ep == 1 or options.etp > 1):
        what = f"expert_placement says which whole experts a rank has, and ep is {options.ep}, etp {options.etp}"
        yield Problem("bad-placement", what, fix="ep=2 or more, and etp=1; or leave it out")


def wrong_folding(options: Options, mesh: MeshSpec) -> Iterator[Problem]:
    """The problem of an ep and etp that do not fold over a mesh."""
    ep, etp, possible = options.ep, options.etp, possible_expert_ranks(mesh)
    if options.expert_ranks in possible:
        return
    axes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in FOLDED_AXES if axis in mesh.names) or "one rank"
    sizes = f"ep is {ep}" if etp == 1 else f"ep is {ep}, etp {etp}"
    fix = "ep=" + ", ".join(map(str, possible))
    if etp > 1:
        fix = f"ep x etp = {', '.join(map(str, possible))}"
        if with_etp := [n // etp for n in possible if n % etp == 0]:
            fix += f": with etp={etp}, ep={', '.join(map(str, with_etp))}"
    yield Problem("bad-ep", f"{sizes}, and experts cannot be divided so over {axes}", fix=fix)


STANDARD = Options(
    schedule="1f1b",
    zero=0,
    defer=False,
    sequence_parallel=False,
    loss_parallel=False,
    fuse_loss=False,
    overlap="off",
    overlap_microbatches=False,
    ulysses=1,
    ep=1,
    etp=1,
    recompute="off",
    recompute_every=1,
    compare_every=100,
)
"""What holds where neither the caller nor the plan says anything."""


# -- option arguments ------------------------------------------------------------------------------------------------
# The options of a run as arguments of the command line: the same flags for every command. Torch-free.


_CHOSEN_BY_PLAN = " (default: the plan's, else {})"


def _flag_or_auto(text: str) -> bool | str:
    """Raises: ArgumentTypeError."""
    values: dict[str, bool | str] = {"on": True, "true": True, "off": False, "false": False, AUTO: AUTO}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is none of on, off and auto")
    return values[text]


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "schedule": {"help": "of the pipeline" + _CHOSEN_BY_PLAN.format("1f1b")},
    "num_microbatches": {"help": "microbatches of a step (default: twice pp)"},
    "stages_per_rank": {"help": "pipeline stages of each rank (default: by the schedule)"},
    "zero": {"metavar": None, "choices": range(4), "help": "ZeRO stage over dp" + _CHOSEN_BY_PLAN.format(0)},
    "defer": {"help": "ZeRO 2 and 3 reduce gradients once a step"},
    "sequence_parallel": {"help": "norms and residuals are sequence shards over tp"},
    "loss_parallel": {"help": "logits stay shards of the vocabulary over tp"},
    "fuse_loss": {"help": "compute head and loss together, one chunk of tokens at a time"},
    "overlap": {"choices": OVERLAPS, "help": "collectives overlapped with matmuls" + _CHOSEN_BY_PLAN.format("off")},
    "overlap_microbatches": {
        "nargs": "?",
        "const": True,
        "type": _flag_or_auto,
        "metavar": "on|off|auto",
        "help": (
            "a forward runs beside the backward of the microbatch before it; auto: where the first steps are faster so"
        ),
    },
    "ulysses": {"help": "ranks of cp that exchange heads; the rest forms a ring"},
    "ep": {"help": "ranks over which whole experts are divided, folded over dp x cp x tp"},
    "etp": {
        "help": "ranks over which each expert is split; experts are on ep x etp ranks",
    },
    "expert_placement": {"metavar": "FILE", "help": "JSON: which experts are on which rank of ep"},
    "recompute": {
        "choices": RECOMPUTE,
        "help": "activations computed again in backward" + _CHOSEN_BY_PLAN.format("off"),
    },
    "recompute_every": {"help": "of the units, only every N-th"},
    "recompute_save": {"nargs": "+", "metavar": "KIND", "help": "what selective recompute saves"},
    "dtype": {"choices": DTYPES, "type": dtype_name, "help": "of compute"},
    "reduce_dtype": {"choices": DTYPES, "type": dtype_name, "help": "of sums of gradients over data ranks"},
    "compare_every": {
        "help": "in the first step, and every N-th after it, compare parameters that ranks store alike; 0: never"
        + _CHOSEN_BY_PLAN.format(100),
    },
}
_BY_KIND: dict[Any, dict[str, Any]] = {
    Reader.number: {"type": int, "metavar": "N"},
    FLAG.read: {"action": argparse.BooleanOptionalAction},
}
_SHORT = {"num_microbatches": ("--microbatches",)}


def add_options(
    parser: argparse.ArgumentParser, choices: Mapping[str, Sequence[str]] | None = None, **help_texts: str
) -> None:
    """Add a flag for each option. Without it the option is None: the plan's default.

    choices: by option, where a command takes fewer values than the others.
    help_texts: by option, where a command says more than the others.
    """
    for name in NAMES:
        arguments = {**_BY_KIND.get(KINDS[name].read, {}), **_ARGUMENTS[name]}
        if choices and name in choices:
            arguments["choices"] = choices[name]
        arguments["help"] = help_texts.get(name, arguments["help"])
        parser.add_argument(f"--{name.replace('_', '-')}", *_SHORT.get(name, ()), default=None, **arguments)


def options_given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_options` that the command line gives, by name."""
    return {name: value for name in NAMES if (value := getattr(options, name, None)) is not None}
