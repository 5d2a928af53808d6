"""`parallelize checkpoint`: inspect, verify, reshape and convert checkpoints.

`inspect` and `verify` do not import torch; each command imports what it needs. `verify` exits with status 1 if it finds
damage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelize.base.errors import Problem, short_list
from parallelize.base.terminal.console import (
    FINE,
    PROBLEM_FOUND,
    Progress,
    add_json,
    add_quiet,
    as_data,
    print_json,
    report,
    show,
    shows_progress,
)

if TYPE_CHECKING:
    from parallelize.checkpoint.tools.file_check import CheckReport

_MAX_SHOWN = 50


def add_commands(verbs: Any) -> None:
    """Add `checkpoint` and its commands to a parser's subparsers."""
    parser = verbs.add_parser("checkpoint", help="inspect, verify, reshape or convert a checkpoint")
    inner = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = _command(inner, "inspect", _inspect, "show what a checkpoint contains and which run wrote it")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")

    _command(inner, "verify", _verify, "compare every tensor with its hashes and every file with the manifest")

    reshape = _command(
        inner, "reshape", _reshape, "rewrite a checkpoint as a run on another mesh would have saved it", "SRC"
    )
    reshape.add_argument("target", type=Path, metavar="DST", help="a run's folder: new, or without this step")
    reshape.add_argument("--mesh", required=True, help="such as pp=2,dp=4,tp=2")
    reshape.add_argument(
        "--zero", type=int, choices=range(4), help="ZeRO stage of the new checkpoint (default: that of the source)"
    )

    to_hf = _command(inner, "to-hf", _to_hf, "write a folder that from_pretrained of transformers can load", "SRC")
    to_hf.add_argument("target", type=Path, metavar="DST", help="a folder: new, or empty")
    to_hf.add_argument("--dtype", help="of weights: bfloat16, float16, float32 (default: the compute dtype)")
    to_hf.add_argument("--max-shard-size", default="5GB", help="of a file (default: 5GB)")
    to_hf.add_argument("--carry", type=Path, help="a folder whose tokenizer and other files are copied")

    from_hf = _command(inner, "from-hf", _from_hf, "write a checkpoint of the weights of a Hugging Face folder", "SRC")
    from_hf.add_argument("target", type=Path, metavar="DST", help="a run's folder: new, or without this step")
    from_hf.add_argument("--mesh", help="of the new checkpoint, such as pp=2,dp=4,tp=2 (default: one rank)")


def _command(inner: Any, name: str, run: Any, about: str, source: str = "DIR") -> argparse.ArgumentParser:
    parser = inner.add_parser(name, help=about, description=about)
    if name == "from-hf":
        parser.add_argument("source", type=Path, metavar=source, help="a Hugging Face folder")
    else:
        layouts = "the folder of a run, or of one step; or several, the folders of nodes that share none"
        layouts += "; or a Hugging Face folder" if name in ("inspect", "verify") else ""
        parser.add_argument("source", type=Path, metavar=source, nargs="+", help=layouts)
    step = "of the new checkpoint (default: 0)" if name == "from-hf" else "of training (default: the newest)"
    parser.add_argument("--step", type=int, default=0 if name == "from-hf" else None, help=step)
    add_json(parser)
    if name != "inspect":
        add_quiet(parser)
    parser.set_defaults(run=run)
    return parser


# -- inspect -----------------------------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.tools.contents import inspect_checkpoint

    info = inspect_checkpoint(options.source, options.step)
    if options.json:
        shown = info if options.tensors else {key: value for key, value in info.items() if key != "tensors"}
        print_json(shown)
        return FINE
    show("\n".join([*_summary(info), "", *_totals(info), "", *_table(("file", "bytes"), _files(info))]))
    if options.tensors:
        show(
            "\n".join(["", *_table(("tensor", "dtype", "shape", "more"), list(map(_tensor, info["tensors"].items())))])
        )
    return FINE


def _summary(info: dict[str, Any]) -> list[str]:
    """The lines before the tables: a title, and lines of a label and a text."""
    weights = info["holds"]["weights"]
    kind = f"{info['model']['class'] or 'a model of an unknown class'}, {weights['elements']:,} elements"
    rows = [("model", f"{kind} in {_count(weights['tensors'], 'tensor')}")]
    rows += _training(info) if "step" in info else [("hashes", "yes" if info["hashes"] else "none")]
    if info.get("transformers"):
        rows.append(("versions", f"transformers {info['transformers']}"))
    title = f"{info['folder']}: {info['kind']}"
    if "step" in info:
        others = [str(step) for step in info["steps"] if step != info["step"]]
        title += f" of step {info['step']}, saved at {info['saved_at']}"
        rows += [("other steps", ", ".join(others))] if others else []
    return [title, "", *(f"{label:<12} {text}" for label, text in rows)]


def _training(info: dict[str, Any]) -> list[tuple[str, str]]:
    plan, state = info["plan"], info["state"]
    absent = short_list(info.get("absent_files", []), 6)
    zero = f", ZeRO {info['zero']}" if info["zero"] is not None else ""
    rows = [("mesh", f"{_mesh(info['mesh'])}{zero}")]
    for number, node in enumerate(info.get("nodes", ())):
        rows.append((f"node {number}", f"host {node['host']}, {_count(len(node['ranks']), 'rank')}"))
    rows += [("absent", f"{absent}: in none of the folders")] if absent else []
    if info.get("reshaped_from") is not None:
        rows.append(("before", f"{_mesh(info['reshaped_from'])}, reshaped since"))
    if info.get("converted_from"):
        rows.append(("from", str(info["converted_from"])))
    rows.append(("plan", f"{plan['name']} ({plan['digest'][:12]})" if plan else "none"))
    for name, optimizer in info["optimizers"].items():
        state_of = _count(optimizer["parameters"], "parameter")
        rows.append((name, f"{_short(optimizer['class'])}, state of {state_of}"))
        rows += [(f"  group {number}", _group(group)) for number, group in enumerate(optimizer["groups"])]
    rows += [(name, _short(scheduler)) for name, scheduler in info["schedulers"].items()]
    others = [key for key in ("streams", "data", "values") if state[key]]
    others += [f"user ({', '.join(state['user'])})"] if state["user"] else []
    others += [f"generators of {_count(state['generators'], 'rank')}"] if state["generators"] else []
    rows.append(("also", ", ".join(others) or "nothing"))
    rows.append(("versions", ", ".join(f"{name} {number}" for name, number in (info["versions"] or {}).items())))
    return rows


def _mesh(axes: list[list[Any]] | None) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in axes or ())
    ranks = 1
    for _, size in axes or ():
        ranks *= size
    return f"{sizes or 'none'} ({_count(ranks, 'rank')})"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _group(group: dict[str, Any]) -> str:
    """The options of a group, without switches, which --json shows."""
    plain = {key: value for key, value in group["options"].items() if value is not None and type(value) is not bool}
    return f"{_count(group['parameters'], 'parameter')}, " + ", ".join(f"{key} {value}" for key, value in plain.items())


def _short(name: str | None) -> str:
    return str(name).rpartition(".")[2]


def _totals(info: dict[str, Any]) -> list[str]:
    rows = [
        (kind, str(sums["tensors"]), f"{sums['elements']:,}", f"{sums['bytes']:,}", ", ".join(sums["dtypes"]))
        for kind, sums in info["holds"].items()
        if sums["tensors"]
    ]
    return _table(("holds", "tensors", "elements", "bytes", "dtypes"), rows)


def _files(info: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(name, f"{size:,}") for name, size in info["files"].items()]


def _tensor(item: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    name, tensor = item
    more = [f"{tensor['pieces']} slices"] if tensor.get("pieces", 1) != 1 else []
    more += [f"also {', '.join(tensor['names'][1:])}"] if len(tensor.get("names", ())) > 1 else []
    more += [f"computes in {tensor['compute']}"] if "compute" in tensor else []
    return name, tensor["dtype"], str(tensor["shape"]), ", ".join(more)


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table as lines. Columns of numbers are right-aligned."""
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(text.replace(",", "").isdigit() for text in column[1:]) for column in columns]
    return [
        "  ".join(
            f"{text:>{w}}" if r else f"{text:<{w}}" for text, w, r in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (titles, *rows)
    ]


# -- verify ------------------------------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.tools.file_check import check_folder

    with _progress("checking", options) as progress:
        result = check_folder(options.source, options.step, progress)
    if options.json:
        print_json(_report_as_dict(result))
    elif result.problems:
        more = len(result.problems) - _MAX_SHOWN
        rest = [Problem("more-problems", f"and {more} more", str(result.folder))] if more > 0 else []
        report([*result.problems[:_MAX_SHOWN], *rest], as_json=False)
    else:
        _print_checked(result)
    return PROBLEM_FOUND if result.problems else FINE


def _report_as_dict(result: CheckReport) -> dict[str, Any]:
    return {
        "folder": str(result.folder),
        "files": result.files,
        "tensors": result.tensors,
        "hashed_bytes": result.hashed,
        "unhashed": result.unhashed,
        "problems": [as_data(problem) for problem in result.problems],
    }


def _print_checked(result: CheckReport) -> None:
    what = f"{_count(result.files, 'file')}, {_count(result.tensors, 'tensor')} or parts of them"
    if result.hashed or not result.unhashed:
        show(f"{result.folder}: {what}, {result.hashed:,} bytes match their hashes")
    if result.unhashed:
        few = f"{len(result.unhashed)} of {_count(result.files, 'file')} without hashes"
        show(f"{result.folder}: {what}; {few}: the structure is valid, but changed bytes cannot be detected")


def _progress(what: str, options: argparse.Namespace) -> Progress:
    """A progress line. The size of the folder is computed even if nothing is shown, so that errors do not depend on
    it."""
    from parallelize.checkpoint.tools.contents import total_bytes

    return Progress(what, shows_progress(options), total_bytes(options.source, options.step))


# -- commands that write -----------------------------------------------------------------------------------------------


def _reshape(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.tools.reshape import reshape_checkpoint

    with _progress("writing", options) as progress:
        folder = reshape_checkpoint(
            options.source, options.target, options.mesh, zero=options.zero, step=options.step, progress=progress
        )
    return _print_written(folder, options)


def _to_hf(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.tools.to_hub import to_hub

    with Progress("writing", shows_progress(options)) as progress:
        folder = to_hub(
            options.source,
            options.target,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            carry=options.carry,
            step=options.step,
            progress=progress,
        )
    return _print_written(folder, options)


def _from_hf(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.tools.contents import total_bytes
    from parallelize.checkpoint.tools.from_hub import from_hub

    with Progress("writing", shows_progress(options), total_bytes(options.source)) as progress:
        folder = from_hub(options.source, options.target, mesh=options.mesh, step=options.step, progress=progress)
    return _print_written(folder, options)


def _print_written(folder: Path, options: argparse.Namespace) -> int:
    from parallelize.checkpoint.tools.contents import inspect_checkpoint

    info = inspect_checkpoint(folder)
    if options.json:
        tensors, mesh = len(info["tensors"]), info.get("mesh")
        print_json({"folder": str(folder), "tensors": tensors, "files": info["files"], "mesh": mesh})
        return FINE
    sizes = list(info["files"].values())
    for_mesh = f" for the mesh {_mesh(info['mesh'])}" if "mesh" in info else ""
    spread = f", of {min(sizes):,} to {max(sizes):,} bytes" if len(sizes) > 1 else ""
    show(f"{folder}: {_count(len(info['tensors']), 'tensor')} in {_count(len(sizes), 'file')}{spread}{for_mesh}")
    return FINE
