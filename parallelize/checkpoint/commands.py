"""`parallelize checkpoint`: look at checkpoints, check them, cut them anew, and turn them into other layouts.

`inspect` and `verify` do not import torch; what is imported is imported by the command that needs it. `verify` ends with
status 1 where it finds damage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelize.console import FINE, FOUND, add_json, add_quiet, as_data, print_json, report, shows_progress
from parallelize.errors import Problem
from parallelize.progress_line import Progress

if TYPE_CHECKING:
    from parallelize.checkpoint.offline import Checked

_MOST_SHOWN = 50


def add_commands(verbs: Any) -> None:
    """Add `checkpoint` and its commands to a parser's subparsers."""
    parser = verbs.add_parser("checkpoint", help="look at a checkpoint, check it, reshape it, convert it")
    inner = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = _command(inner, "inspect", _inspect, "what a checkpoint holds, and which run wrote it")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")

    _command(inner, "verify", _verify, "compare every byte with its hash, every file with the manifest")

    reshape = _command(inner, "reshape", _reshape, "write a checkpoint as a run on another mesh would have", "SRC")
    reshape.add_argument("target", type=Path, metavar="DST", help="a run's folder: new, or without this step")
    reshape.add_argument("--mesh", required=True, help="such as pp=2,dp=4,tp=2")
    reshape.add_argument(
        "--zero", type=int, choices=range(4), help="ZeRO stage to cut for (default: the one that saved)"
    )

    to_hf = _command(inner, "to-hf", _to_hf, "write a folder that from_pretrained of transformers loads", "SRC")
    to_hf.add_argument("target", type=Path, metavar="DST", help="a folder: new, or empty")
    to_hf.add_argument("--dtype", help="of weights: bfloat16, float16, float32 (default: that of compute)")
    to_hf.add_argument("--max-shard-size", default="5GB", help="of a file (default: 5GB)")
    to_hf.add_argument("--carry", type=Path, help="a folder whose tokenizer and other files go along")

    from_hf = _command(inner, "from-hf", _from_hf, "write a checkpoint of weights out of a Hugging Face folder", "SRC")
    from_hf.add_argument("target", type=Path, metavar="DST", help="a run's folder: new, or without this step")
    from_hf.add_argument("--mesh", help="to cut for, such as pp=2,dp=4,tp=2 (default: one rank)")


def _command(inner: Any, name: str, run: Any, about: str, source: str = "DIR") -> argparse.ArgumentParser:
    parser = inner.add_parser(name, help=about, description=about)
    layouts = "a Hugging Face folder" if name == "from-hf" else "the folder of a run, or of one step"
    layouts += "; or a Hugging Face folder" if name in ("inspect", "verify") else ""
    parser.add_argument("source", type=Path, metavar=source, help=layouts)
    step = "of the new checkpoint (default: 0)" if name == "from-hf" else "of training (default: the newest)"
    parser.add_argument("--step", type=int, default=0 if name == "from-hf" else None, help=step)
    add_json(parser)
    if name != "inspect":
        add_quiet(parser)
    parser.set_defaults(run=run)
    return parser


# -- inspect --------------------------------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.offline import inspect_checkpoint

    found = inspect_checkpoint(options.source, options.step)
    if options.json:
        shown = found if options.tensors else {key: value for key, value in found.items() if key != "tensors"}
        print_json(shown)
        return FINE
    print("\n".join([*_head(found), "", *_amounts(found), "", *_table(("file", "bytes"), _files(found))]))
    if options.tensors:
        print(
            "\n".join(["", *_table(("tensor", "dtype", "shape", "more"), list(map(_tensor, found["tensors"].items())))])
        )
    return FINE


def _head(found: dict[str, Any]) -> list[str]:
    """Everything but numbers: label, text."""
    weights = found["holds"]["weights"]
    kind = f"{found['model']['class'] or 'a model of no known class'}, {weights['elements']:,} elements"
    rows = [("model", f"{kind} in {_count(weights['tensors'], 'tensor')}")]
    rows += _training(found) if "step" in found else [("hashes", "yes" if found["hashes"] else "none")]
    if found.get("transformers"):
        rows.append(("versions", f"transformers {found['transformers']}"))
    title = f"{found['folder']}: {found['kind']}"
    if "step" in found:
        others = [str(step) for step in found["steps"] if step != found["step"]]
        title += f" of step {found['step']}, saved at {found['saved_at']}"
        rows += [("other steps", ", ".join(others))] if others else []
    return [title, "", *(f"{label:<12} {text}" for label, text in rows)]


def _training(found: dict[str, Any]) -> list[tuple[str, str]]:
    plan, state = found["plan"], found["state"]
    zero = f", ZeRO {found['zero']}" if found["zero"] is not None else ""
    rows = [("mesh", f"{_mesh(found['mesh'])}{zero}")]
    if found.get("reshaped_from") is not None:
        rows.append(("before", f"{_mesh(found['reshaped_from'])}, reshaped since"))
    if found.get("converted_from"):
        rows.append(("from", str(found["converted_from"])))
    rows.append(("plan", f"{plan['name']} ({plan['digest'][:12]})" if plan else "none"))
    for name, one in found["optimizers"].items():
        rows.append((name, f"{_short(one['class'])}, state of {_count(one['parameters'], 'parameter')}"))
        rows += [(f"  group {number}", _group(group)) for number, group in enumerate(one["groups"])]
    rows += [(name, _short(one)) for name, one in found["schedulers"].items()]
    kept = [key for key in ("streams", "data", "values") if state[key]]
    kept += [f"user ({', '.join(state['user'])})"] if state["user"] else []
    kept += [f"generators of {_count(state['generators'], 'rank')}"] if state["generators"] else []
    rows.append(("also", ", ".join(kept) or "nothing"))
    rows.append(("versions", ", ".join(f"{name} {number}" for name, number in (found["versions"] or {}).items())))
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
    """Options that are numbers; switches are for --json."""
    plain = {key: value for key, value in group["options"].items() if value is not None and type(value) is not bool}
    return f"{_count(group['parameters'], 'parameter')}, " + ", ".join(f"{key} {value}" for key, value in plain.items())


def _short(name: str | None) -> str:
    return str(name).rpartition(".")[2]


def _amounts(found: dict[str, Any]) -> list[str]:
    rows = [
        (kind, str(one["tensors"]), f"{one['elements']:,}", f"{one['bytes']:,}", ", ".join(one["dtypes"]))
        for kind, one in found["holds"].items()
        if one["tensors"]
    ]
    return _table(("holds", "tensors", "elements", "bytes", "dtypes"), rows)


def _files(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(name, f"{size:,}") for name, size in found["files"].items()]


def _tensor(item: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    name, one = item
    more = [f"{one['pieces']} pieces"] if one.get("pieces", 1) != 1 else []
    more += [f"also {', '.join(one['names'][1:])}"] if len(one.get("names", ())) > 1 else []
    more += [f"computes in {one['compute']}"] if "compute" in one else []
    return name, one["dtype"], str(one["shape"]), ", ".join(more)


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need to be; numbers stand to the right."""
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(text.replace(",", "").isdigit() for text in column[1:]) for column in columns]
    return [
        "  ".join(
            f"{text:>{w}}" if r else f"{text:<{w}}" for text, w, r in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (titles, *rows)
    ]


# -- verify ---------------------------------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.offline import check_folder

    with _progress("checking", options) as progress:
        found = check_folder(options.source, options.step, progress)
    if options.json:
        print_json(_checked(found))
    elif found.problems:
        more = len(found.problems) - _MOST_SHOWN
        rest = [Problem("more-problems", f"and {more} more", str(found.folder))] if more > 0 else []
        report([*found.problems[:_MOST_SHOWN], *rest], as_json=False)
    else:
        _say_checked(found)
    return FOUND if found.problems else FINE


def _checked(found: Checked) -> dict[str, Any]:
    return {
        "folder": str(found.folder),
        "files": found.files,
        "tensors": found.tensors,
        "hashed_bytes": found.hashed,
        "unhashed": found.unhashed,
        "problems": [as_data(problem) for problem in found.problems],
    }


def _say_checked(found: Checked) -> None:
    what = f"{_count(found.files, 'file')}, {_count(found.tensors, 'tensor')} or parts of them"
    if found.hashed or not found.unhashed:
        print(f"{found.folder}: {what}, {found.hashed:,} bytes are what was written")
    if found.unhashed:
        few = f"{len(found.unhashed)} of {_count(found.files, 'file')} without hashes"
        print(f"{found.folder}: {what}; {few}: the structure is right, but whether a bit has changed cannot be told")


def _progress(what: str, options: argparse.Namespace) -> Progress:
    """A line on the terminal; the folder's size is asked even where nothing is shown, which finds a wrong one first."""
    from parallelize.checkpoint.offline import total_bytes

    return Progress(what, shows_progress(options), total_bytes(options.source, options.step))


# -- commands that write --------------------------------------------------------------------------------------------------


def _reshape(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.reshape import reshape_checkpoint

    with _progress("writing", options) as progress:
        folder = reshape_checkpoint(
            options.source, options.target, options.mesh, zero=options.zero, step=options.step, progress=progress
        )
    return _say_written(folder, options)


def _to_hf(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.convert import to_hub

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
    return _say_written(folder, options)


def _from_hf(options: argparse.Namespace) -> int:
    from parallelize.checkpoint.convert import from_hub
    from parallelize.checkpoint.offline import total_bytes

    with Progress("writing", shows_progress(options), total_bytes(options.source)) as progress:
        folder = from_hub(options.source, options.target, mesh=options.mesh, step=options.step, progress=progress)
    return _say_written(folder, options)


def _say_written(folder: Path, options: argparse.Namespace) -> int:
    from parallelize.checkpoint.offline import inspect_checkpoint

    found = inspect_checkpoint(folder)
    if options.json:
        tensors, mesh = len(found["tensors"]), found.get("mesh")
        print_json({"folder": str(folder), "tensors": tensors, "files": found["files"], "mesh": mesh})
        return FINE
    sizes = list(found["files"].values())
    for_mesh = f" for the mesh {_mesh(found['mesh'])}" if "mesh" in found else ""
    spread = f", of {min(sizes):,} to {max(sizes):,} bytes" if len(sizes) > 1 else ""
    print(f"{folder}: {_count(len(found['tensors']), 'tensor')} in {_count(len(sizes), 'file')}{spread}{for_mesh}")
    return FINE
