"""A damaged checkpoint is refused with the name of the damaged part; a hostile one is refused fast and runs no code.

After every refusal, the model is bit-equal to before.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from parallelize.base.errors import CheckpointError
from parallelize.base.files import digests
from parallelize.base.files.strict_json import read_json
from parallelize.checkpoint.format import reader, writer
from parallelize.checkpoint.format.header import read_header
from parallelize.checkpoint.format.manifest import read_manifest
from parallelize.checkpoint.format.writer import TensorToWrite
from parallelize.checkpoint.hub.pretrained import load_pretrained
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.checkpoint.run.run_contents import run_of
from parallelize.checkpoint.run.save import write_snapshot
from parallelize.checkpoint.run.snapshot import Snapshot, take
from tests.checkpoint.run.fault_jobs import Bench, Tiny, same_bits, state_of

SEED = 20
STEP = 5
BLOCK_BYTES = 128
SECONDS, MEGABYTES = 1.0, 100
Damage = tuple[str, str]
"""(file, tensor) that the error must name; "" for none. ("unread", ""): the damage must not matter, and loading
succeeds."""


# -- a checkpoint of three files ---------------------------------------------------------------------------------------


class ThreadSync:
    """`RankSync`, between threads."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier
        self.size, self.ranks, self.is_coordinator = len(slots), list(range(len(slots))), rank == 0

    def gather(self, value: Any) -> list[Any] | None:
        self.slots[self.rank] = value
        self.barrier.wait(20)
        values = list(self.slots) if self.is_coordinator else None
        self.barrier.wait(20)
        return values

    def broadcast(self, value: Any = None) -> Any:
        if self.is_coordinator:
            self.slots[0] = value
        self.barrier.wait(20)
        result = self.slots[0]
        self.barrier.wait(20)
        return result


def split_over_ranks(snapshot: Snapshot) -> list[Snapshot]:
    """Snapshots of three ranks: halves of matrices on 1 and 2, whose files have the same size; the rest on 0."""
    snapshots = [Snapshot(snapshot.step, [], {}, snapshot.state)]
    empty = {
        "optimizers": {
            name: {**state, "groups": [], "state": {}} for name, state in snapshot.state["optimizers"].items()
        }
    }
    snapshots += [Snapshot(snapshot.step, [], {}, {**empty, "streams": {}}) for _ in (1, 2)]
    values = {tensor.name: tensor.make() for tensor in snapshot.outgoing}
    for name, (dtype, shape, slices, about) in snapshot.table.items():
        halves = [0] if len(shape) != 2 or shape[0] < 2 else [1, 2]
        for index, rank in enumerate(halves):
            rows = (shape[0] * index // 2, shape[0] * (index + 1) // 2) if len(halves) == 2 else None
            value = values[name][slice(*rows)].clone() if rows else values.get(name)
            box = [list(rows), [0, shape[1]]] if rows else slices[0][1] if slices else None
            snapshots[rank].table[name] = [dtype, shape, [[name, box]] if box is not None else [], about]
            if value is not None:
                snapshots[rank].outgoing.append(
                    TensorToWrite(name, dtype, tuple(value.shape), lambda value=value: value)
                )
    return snapshots


@contextmanager
def small_blocks():
    """Tensors of a few hundred bytes have several blocks."""
    modules = (digests, reader, writer)
    before = [module.BLOCK_BYTES for module in modules]
    for module in modules:
        module.BLOCK_BYTES = BLOCK_BYTES
    yield
    for module, value in zip(modules, before, strict=True):
        module.BLOCK_BYTES = value


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The folder of a run with one checkpoint of three files."""
    root = tmp_path_factory.mktemp("corruption") / "run"
    root.mkdir()
    with small_blocks():
        bench = Bench()
        bench.set(STEP)
        run = run_of(bench.module, optimizer=bench.optimizer)
        values = {"losses": torch.arange(600, dtype=torch.float64)}
        snapshots = split_over_ranks(take(run, ModelOnMesh(bench.module), STEP, values))
        slots, barrier = [None] * 3, threading.Barrier(3)
        threads = [
            threading.Thread(target=write_snapshot, args=(root, snapshot, ThreadSync(rank, slots, barrier), {}))
            for rank, snapshot in enumerate(snapshots)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield root


@pytest.fixture(scope="module")
def bench():
    return Bench()


def folder_of(root: Path) -> Path:
    return root / f"step-{STEP:08d}"


def data_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length


def tensor_at(path: Path, byte: int) -> str:
    header, data = header_of(path)
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] <= byte - data < entry["data_offsets"][1]:
            return name
    return ""


def outcome(bench: Bench, folder: Path, damage: Damage) -> str:
    """Load a damaged checkpoint. Returns what is wrong with the result; empty if all is as expected."""
    file = damage[0]
    try:
        step = load_checkpoint(folder, bench.module, optimizer=bench.optimizer, check=True)
    except CheckpointError as error:
        message = str(error)
        if bench.differs(0):
            bench.set(0)
            return f"refused, and the model has changed: {message[:200]}"
        if file == "unread":
            return f"refused without a reason: {message[:300]}"
        missing = [word for word in damage if word and word not in message]
        return f"does not name {missing}: {message[:300]}" if missing else ""
    except BaseException as error:
        bench.set(0)
        return f"{type(error).__name__}: {str(error)[:300]}"
    different = bench.differs(STEP) or step != STEP
    bench.set(0)
    if different:
        return f"SILENT: loaded step {step} with wrong values: {different}"
    return "" if file == "unread" else "SILENT: damage was not seen"


# -- random damage -----------------------------------------------------------------------------------------------------


def flip(chance: random.Random, folder: Path) -> Damage:
    """Flip one bit of any file."""
    name = chance.choice([*data_files(folder), "manifest.json"])
    raw = bytearray((folder / name).read_bytes())
    at = chance.randrange(len(raw))
    tensor = tensor_at(folder / name, at) if name != "manifest.json" else ""
    raw[at] ^= 1 << chance.randrange(8)
    (folder / name).write_bytes(raw)
    return name, tensor


def flip_in_header(chance: random.Random, folder: Path) -> Damage:
    name = chance.choice(data_files(folder))
    raw = bytearray((folder / name).read_bytes())
    raw[chance.randrange(header_of(folder / name)[1])] ^= 1 << chance.randrange(8)
    (folder / name).write_bytes(raw)
    return name, ""


def zero(chance: random.Random, folder: Path) -> Damage:
    """Overwrite a sector with zeros."""
    name = chance.choice([*data_files(folder), "manifest.json"])
    raw = bytearray((folder / name).read_bytes())
    at = chance.randrange(0, len(raw), 512)
    before, raw[at : at + 512] = bytes(raw), bytes(len(raw[at : at + 512]))
    (folder / name).write_bytes(raw)
    return (name, "") if bytes(raw) != before else ("unread", "")


def garbage(chance: random.Random, folder: Path) -> Damage:
    """Overwrite up to 64 bytes with random ones."""
    name = chance.choice([*data_files(folder), "manifest.json"])
    raw = bytearray((folder / name).read_bytes())
    at, length = chance.randrange(len(raw)), chance.randint(1, 64)
    before, raw[at : at + length] = bytes(raw), chance.randbytes(len(raw[at : at + length]))
    (folder / name).write_bytes(raw)
    return (name, "") if bytes(raw) != before else ("unread", "")


def truncate(chance: random.Random, folder: Path) -> Damage:
    name = chance.choice([*data_files(folder), "manifest.json"])
    os.truncate(folder / name, chance.randrange((folder / name).stat().st_size))
    return name, ""


def append(chance: random.Random, folder: Path) -> Damage:
    name = chance.choice([*data_files(folder), "manifest.json"])
    tail = chance.choice((b"\0", b" ", b"\n", b"}", chance.randbytes(chance.randint(1, 600)), bytes(512)))
    with open(folder / name, "ab") as file:
        file.write(tail)
    return name, ""


def swap_files(chance: random.Random, folder: Path) -> Damage:
    """Exchange the names of two files; files 1 and 2 have the same size."""
    first, second = chance.sample(data_files(folder), 2)
    (folder / first).rename(folder / "x")
    (folder / second).rename(folder / first)
    (folder / "x").rename(folder / second)
    return "rank-", ""


def replace_file(chance: random.Random, folder: Path) -> Damage:
    """Replace a file by a copy of another."""
    first, second = chance.sample(data_files(folder), 2)
    shutil.copyfile(folder / first, folder / second)
    return second, ""


def swap_blocks(chance: random.Random, folder: Path) -> Damage:
    """Exchange two blocks of data of the same size, within a file or between two."""
    first_name, second_name = chance.choice(data_files(folder)), chance.choice(data_files(folder))
    first, second = bytearray((folder / first_name).read_bytes()), bytearray((folder / second_name).read_bytes())
    a, b = header_of(folder / first_name)[1], header_of(folder / second_name)[1]
    length = chance.choice((4, 16, BLOCK_BYTES))
    at, to = chance.randrange(a, len(first) - length), chance.randrange(b, len(second) - length)
    first_bytes, second_bytes = bytes(first[at : at + length]), bytes(second[to : to + length])
    first[at : at + length] = second_bytes
    changed = first_bytes != second_bytes
    if first_name != second_name:
        second[to : to + length] = first_bytes
        (folder / second_name).write_bytes(second)
    (folder / first_name).write_bytes(first)
    return ("rank-", "") if changed else ("unread", "")


def delete(chance: random.Random, folder: Path) -> Damage:
    name = chance.choice([*data_files(folder), "manifest.json"])
    (folder / name).unlink()
    return name if name != "manifest.json" else folder.name, ""


def rewrite_header(folder: Path, name: str, change: Callable[[dict[str, Any]], Any], keep_length: bool = False) -> None:
    """Replace the header by another valid one, and keep the data."""
    header, data = header_of(folder / name)
    tensors = (folder / name).read_bytes()[data:]
    changed = change(header)
    text = json.dumps(header if changed is None else changed, separators=(",", ":")).encode()
    if keep_length:
        text = text.ljust(data - 8)
    text += b" " * (-len(text) % 8)
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + tensors)


def edit_header(chance: random.Random, folder: Path) -> Damage:
    name = chance.choice(data_files(folder))

    def change(header: dict[str, Any]) -> None:
        names = [key for key in header if key != "__metadata__"]
        tensor, other = chance.choice(names), chance.choice(names)
        entry = header[tensor]
        what = chance.randrange(7)
        if what == 0:
            entry["shape"] = entry["shape"][::-1] + [1]
        elif what == 1:
            entry["dtype"] = {"F32": "I32", "BF16": "F16", "I64": "F64", "F64": "I64"}.get(entry["dtype"], "F32")
        elif what == 2:
            entry["data_offsets"] = [at + 4 for at in entry["data_offsets"]]
        elif what == 3:
            header[tensor + "x"] = header.pop(tensor)
        elif what == 4:
            header[tensor], header[other] = header[other], header[tensor]
            if tensor == other:
                del header[tensor]
        elif what == 5:
            del header[tensor]
        else:
            header["__metadata__"]["step"] = "6"

    rewrite_header(folder, name, change, keep_length=chance.random() < 0.5)
    return name, ""


def paths_of(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, item in inner for below in paths_of(item, (*path, key)))]


def set_at(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    container = value
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = new
    return value


def at_path(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def other_value(chance: random.Random, value: Any) -> Any:
    """Another value, of the same type or of another."""
    if chance.random() < 0.4:
        return chance.choice([None, True, -1, 1 << 70, 1.5, "", "x", [], {}, [[]], {"$": "tuple", "items": []}])
    if type(value) is int:
        return value + chance.choice((-1, 1, 7))
    if isinstance(value, str):
        return value[1:] + "0" if value and chance.random() < 0.5 else value + "x"
    if isinstance(value, list):
        return value[::-1] if len(value) > 1 and value != value[::-1] else [*value, 0]
    return 0


def edit_manifest(chance: random.Random, folder: Path) -> Damage:
    """Change any field, and keep the digest."""
    raw = (folder / "manifest.json").read_text()
    first_line, body = raw.split("\n", 1)
    document = json.loads(body.rstrip()[:-1])
    path = chance.choice(paths_of(document))
    document = set_at(document, path, other_value(chance, at_path(document, path)))
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    changed = f"{first_line}\n{text}}}\n"
    (folder / "manifest.json").write_text(changed)
    return ("manifest.json", "") if changed != raw else ("unread", "")


def duplicate_key(chance: random.Random, folder: Path) -> Damage:
    name = chance.choice([*data_files(folder), "manifest.json"])
    if name == "manifest.json":
        text = (folder / name).read_text()
        key = chance.choice(("format", "step", "files", "tensors", "state"))
        (folder / name).write_text(text.replace(f'"{key}":', f'"{key}":null,"{key}":', 1))
        return name, ""
    header, data = header_of(folder / name)
    tensor = chance.choice(list(header))
    text = json.dumps(header, separators=(",", ":"))
    text = text[:-1] + f",{json.dumps(tensor)}:{json.dumps(header[tensor])}}}"
    tensors = (folder / name).read_bytes()[data:]
    (folder / name).write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + tensors)
    return name, ""


def edit_digest(chance: random.Random, folder: Path) -> Damage:
    """Change one digit of a digest, in the header of a file or in the manifest."""
    name = chance.choice([*data_files(folder), "manifest.json"])
    text = (folder / name).read_bytes().decode("latin-1")
    positions = [match.start() for match in re.finditer(r"[0-9a-f]{32}", text)]
    at = chance.choice(positions) + chance.randrange(32)
    text = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    (folder / name).write_bytes(text.encode("latin-1"))
    return name, ""


def damage_latest(chance: random.Random, folder: Path) -> Damage:
    """`latest` is for people: loading does not depend on it."""
    path = folder.parent / "latest"
    choice = chance.randrange(4)
    if choice == 0:
        path.write_bytes(chance.randbytes(40))
    elif choice == 1:
        path.write_text(chance.choice(["step-00000009\n", "../../etc/passwd\n", "/\n", ""]))
    elif choice == 2:
        path.unlink()
    else:
        path.unlink()
        path.mkdir()
    return "unread", ""


def add_file(chance: random.Random, folder: Path) -> Damage:
    """Files that the manifest does not list are not read."""
    parent = chance.choice((folder, folder.parent))
    name = chance.choice(("notes.txt", "rank-00007.safetensors", "manifest.json.bak", "step-00000009", ".step-x"))
    (parent / name).write_bytes(chance.randbytes(100))
    return "unread", ""


KINDS: dict[Callable[[random.Random, Path], Damage], int] = {
    flip: 400,
    flip_in_header: 120,
    zero: 100,
    garbage: 100,
    truncate: 150,
    append: 100,
    swap_files: 20,
    replace_file: 20,
    swap_blocks: 80,
    delete: 16,
    edit_header: 120,
    edit_manifest: 150,
    duplicate_key: 40,
    edit_digest: 100,
    damage_latest: 30,
    add_file: 20,
}


@pytest.mark.sweep
def test_no_random_damage_goes_unseen(intact, bench, tmp_path):
    """Alternately by the folder of the run and of the step; each starts from an intact copy."""
    chance, counts, unread, failures = random.Random(SEED), Counter(), Counter(), []
    for kind, number in KINDS.items():
        for repeat in range(number):
            root = tmp_path / "run"
            shutil.copytree(intact, root)
            damage = kind(chance, folder_of(root))
            by_run = repeat % 2 and damage[0] != folder_of(root).name
            failure = outcome(bench, root if by_run else folder_of(root), damage)
            counts[kind.__name__] += 1
            unread[kind.__name__] += damage[0] == "unread"
            if failure:
                failures.append(f"{kind.__name__} {repeat} {damage}: {failure}")
            shutil.rmtree(root)
    total = sum(counts.values())
    text = (
        f"{total} corruptions, seed {SEED}, {len(failures)} not as expected, {sum(unread.values())} without effect on "
        f"the result; {dict(counts)}"
    )
    print(text)
    assert not failures, text + "\n" + "\n".join(failures[:20])
    assert total >= 1000
    assert sum(unread.values()) <= 80


def test_the_intact_checkpoint_loads(intact, bench):
    assert outcome(bench, intact, ("unread", "")) == ""
    sizes = [(folder_of(intact) / name).stat().st_size for name in data_files(folder_of(intact))]
    assert len(sizes) == 3
    assert sizes[1] == sizes[2]


def test_every_byte_of_every_file_is_checked(intact, bench, tmp_path):
    """Systematically: each 61st byte of all files."""
    root = tmp_path / "run"
    shutil.copytree(intact, root)
    folder, failures, count = folder_of(root), [], 0
    for name in [*data_files(folder), "manifest.json"]:
        raw = (folder / name).read_bytes()
        for at in range(0, len(raw), 61):
            tensor = tensor_at(folder / name, at) if name != "manifest.json" else ""
            (folder / name).write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
            if failure := outcome(bench, folder, (name, tensor)):
                failures.append(f"{name} byte {at}: {failure}")
            count += 1
            (folder / name).write_bytes(raw)
    print(f"{count} bytes flipped, {len(failures)} not as expected")
    assert not failures, failures[:10]


# -- damage with updated digests ---------------------------------------------------------------------------------------


def resign(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda document: None) -> None:
    """Change the manifest, and update its digest and those of the headers."""
    document = json.loads((folder / "manifest.json").read_text().split("\n", 1)[1].rstrip()[:-1])
    for name, info in document["files"].items():
        path = folder / name
        if path.is_file():
            header = path.read_bytes()[: header_of(path)[1]]
            info[:] = [path.stat().st_size, digests.digest_of(header)]
    changed = change(document)
    text = json.dumps(document if changed is None else changed, separators=(",", ":")).encode()
    sign(folder, text)


def sign(folder: Path, body: bytes) -> None:
    text = b'{"digest":"' + digests.digest_of(body).encode() + b'","manifest":\n' + body + b"}\n"
    (folder / "manifest.json").write_bytes(text)


def test_a_forged_manifest_never_breaks_the_loader(intact, bench, tmp_path):
    """Any changed field, with updated digests: refused with a CheckpointError, or loaded completely. (Someone who can
    update the digests can also write other values, which is not detected.)"""
    chance, root, counts, failures = random.Random(SEED), tmp_path / "run", Counter(), []
    shutil.copytree(intact, root)
    folder = folder_of(root)
    original = (folder / "manifest.json").read_bytes()
    document = json.loads(original.decode().split("\n", 1)[1].rstrip()[:-1])
    paths = [path for path in paths_of(document) if path[:1] != ("state",) or len(path) < 7]
    for path in chance.sample(paths, min(400, len(paths))):
        resign(folder, lambda document, path=path: set_at(document, path, other_value(chance, at_path(document, path))))
        try:
            load_checkpoint(folder, bench.module, optimizer=bench.optimizer)
            counts["loaded"] += 1
        except CheckpointError as error:
            counts[error.slugs[0]] += 1
            if bench.differs(0):
                failures.append(f"{path}: refused, and the model has changed: {error}")
        except Exception as error:
            failures.append(f"{path}: {type(error).__name__} {error}")
        bench = Bench()
        (folder / "manifest.json").write_bytes(original)
    print(f"{sum(counts.values()) + len(failures)} forged manifests, seed {SEED}: {dict(counts)}")
    assert not failures, failures[:20]


# -- hostile input -----------------------------------------------------------------------------------------------------


class TimeLimit(BaseException):
    pass


@contextmanager
def within_limits(name: str):
    """Raises AssertionError if the body takes more than a second of CPU time or a hundred megabytes."""

    def on_alarm(*_: Any) -> None:
        raise TimeLimit(name)

    before = signal.signal(signal.SIGPROF, on_alarm)
    signal.setitimer(signal.ITIMER_PROF, 3 * SECONDS)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        start, start_s = peak_bytes("VmRSS"), time.thread_time()
        yield
        elapsed_s, growth = time.thread_time() - start_s, peak_bytes("VmHWM") - start
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert elapsed_s < SECONDS, f"{name} took {elapsed_s:.2f} s"
    assert growth < MEGABYTES << 20, f"{name} took {growth >> 20} MB"


def peak_bytes(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def pack(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    shape, offsets = (list(value) if isinstance(value, tuple) else value for value in (shape, offsets))
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def sparse(path: Path, begin: bytes, size: int) -> None:
    path.write_bytes(begin)
    os.truncate(path, size)


DATA = bytes(8)
HEADERS: dict[str, bytes] = {
    "length 2**63": struct.pack("<Q", 1 << 63) + b"{}",
    "length 2**64-1": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "longer than the file": struct.pack("<Q", 100) + b"{}",
    "no bytes": b"",
    "seven bytes": b"\2\0\0\0\0\0\0",
    "deep lists": pack(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep objects": pack(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "not UTF-8": pack(b'{"\xff\xfe":' + json.dumps(entry()).encode() + b"}", DATA),
    "overlong UTF-8": pack(b'{"\xc0\xaf":' + json.dumps(entry()).encode() + b"}", DATA),
    "lone surrogate": pack(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", DATA),
    "overlap": pack({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": pack({"a": entry(), "b": entry()}, DATA),
    "hole": pack({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "hole at the begin": pack({"a": entry(offsets=(8, 16))}, bytes(16)),
    "negative size": pack({"a": entry(shape=(-1, -2))}, DATA),
    "huge size": pack({"a": entry(shape=(1 << 61,), offsets=(0, 1 << 63))}, DATA),
    "huge number of elements": pack({"a": entry(shape=(1 << 40, 1 << 40), offsets=(0, 1 << 82))}, DATA),
    "wraps to 8 bytes": pack({"a": entry(shape=((1 << 62) + 2, 1), offsets=(0, 8))}, DATA),
    "100 dims": pack({"a": entry(shape=(1,) * 99 + (2,))}, DATA),
    "unknown dtype": pack({"a": entry("F33")}, DATA),
    "dtype a list": pack({"a": entry(["F32"])}, DATA),
    "4-bit dtype": pack({"a": entry("F4")}, DATA),
    "name twice": pack(f'{{"a":{json.dumps(entry())},"a":{json.dumps(entry())}}}'.encode(), DATA),
    "field twice": pack(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', DATA),
    "bool as a size": pack({"a": entry(shape=(2, True))}, DATA),
    "bool as an offset": pack({"a": entry(offsets=(False, 8))}, DATA),
    "float as a size": pack({"a": entry(shape=(2.0,))}, DATA),
    "float as an offset": pack({"a": entry(offsets=(0, 8.0))}, DATA),
    "NaN": pack(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', DATA),
    "10,000 digits": pack(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}', DATA),
    "offsets backwards": pack({"a": entry(offsets=(8, 0))}, DATA),
    "three offsets": pack({"a": entry(offsets=(0, 8, 8))}, DATA),
    "shape an object": pack({"a": entry(shape={"0": 2})}, DATA),
    "one more field": pack({"a": {**entry(), "code": "x"}}, DATA),
    "a field less": pack({"a": {"dtype": "F32", "shape": [2]}}, DATA),
    "a list": pack([entry()], DATA),
    "text": pack(b'"a"'),
    "space before": pack(b" " + json.dumps({"a": entry()}).encode(), DATA),
    "metadata not text": pack({"__metadata__": {"a": 1}, "a": entry()}, DATA),
    "metadata a list": pack({"__metadata__": [], "a": entry()}, DATA),
    "digests of others": pack({"__metadata__": {digests.KEY: '{"block_bytes":128,"digests":{}}'}, "a": entry()}, DATA),
    "digests not JSON": pack({"__metadata__": {digests.KEY: "{"}, "a": entry()}, DATA),
    "digests deep": pack({"__metadata__": {digests.KEY: "[" * 100_000}, "a": entry()}, DATA),
    "a tail": pack({"a": entry()}, bytes(9)),
    "truncated": pack({"a": entry()}, bytes(7)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_refused(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[name])
    with within_limits(name), pytest.raises(CheckpointError) as caught:
        load_pretrained(torch.nn.Linear(2, 1), tmp_path)
    assert caught.value.slugs[0] != "failed", f"by an unexpected error: {caught.value}"
    assert str(path) in str(caught.value)


def test_very_long_headers_take_no_memory(tmp_path):
    """Sparse files: a hostile one is small on disk."""
    for length, begin in ((99_999_999, b"\0"), (99_999_999, b"{"), (100_000_001, b"{"), (1 << 40, b"{")):
        path = tmp_path / "model.safetensors"
        sparse(path, struct.pack("<Q", length) + begin, 200 << 20)
        with within_limits(f"{length}"), pytest.raises(CheckpointError):
            load_pretrained(torch.nn.Linear(2, 1), tmp_path)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in Hugging Face's layout: two files and an index."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    folder.mkdir()
    state = {name: value for name, value in state_of(STEP).items() if "/" not in name}
    names = list(state)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, names_in_file in files.items():
        save_file({name: state[name] for name in names_in_file}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, names_in_file in files.items() for name in names_in_file}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text("{}")
    return folder


FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


def indexed(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """A change of the weight_map."""

    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        changed = change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index if changed is None else changed))

    return apply


def pointing_to(name: Any) -> Callable[[Path], None]:
    return indexed(lambda weight_map: weight_map.update({"scale": name}))


def replacing_first(make: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        outside = folder.parent / "outside.safetensors"
        (folder / FIRST).rename(outside)
        make(folder / FIRST, outside)

    return apply


def with_file(name: str, content: bytes, size: int = 0) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(content)
        if size:
            os.truncate(folder / name, size)

    return apply


class Canary:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


def with_pickle(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A folder with only a pickle, which creates the file `canary` beside the folder if it runs."""

    def apply(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        content = make(folder.parent / "canary")
        if isinstance(content, bytes):
            (folder / "pytorch_model.bin").write_bytes(content)
        else:
            torch.save(content, folder / "pytorch_model.bin")

    return apply


FOLDERS: dict[str, Callable[[Path], None]] = {
    "to the folder above": pointing_to("../outside.safetensors"),
    "to a folder below": pointing_to("sub/outside.safetensors"),
    "absolute": pointing_to("/etc/passwd"),
    "of Windows": pointing_to("..\\outside.safetensors"),
    "with a drive": pointing_to("C:model.safetensors"),
    "with NUL": pointing_to("model\0.safetensors"),
    "with a new line": pointing_to("model\n.safetensors"),
    "lone surrogate": pointing_to("model\ud800"),
    "dot": pointing_to("."),
    "two dots": pointing_to(".."),
    "no name": pointing_to(""),
    "long name": pointing_to("m" * 300),
    "number": pointing_to(1),
    "list": pointing_to(["x"]),
    "null": pointing_to(None),
    "missing file": pointing_to("model-00003-of-00003.safetensors"),
    "the index itself": pointing_to(INDEX),
    "tensor in the other file": indexed(
        lambda weight_map: weight_map.update({"first.weight": SECOND if weight_map["first.weight"] == FIRST else FIRST})
    ),
    "tensor not listed": indexed(lambda weight_map: weight_map.pop("first.weight") and None),
    "tensor nowhere": indexed(lambda weight_map: weight_map.update({"more": FIRST})),
    "no weight_map": indexed(lambda weight_map: {"metadata": {}}),
    "empty weight_map": indexed(lambda weight_map: {"weight_map": {}}),
    "weight_map a list": indexed(lambda weight_map: {"weight_map": list(weight_map)}),
    "index a list": indexed(lambda weight_map: [weight_map]),
    "index deep": with_file(INDEX, b'{"weight_map":' + b"[" * 100_000),
    "index not UTF-8": with_file(INDEX, b'{"weight_map":{"\xff":"a"}}'),
    "index with a key twice": with_file(INDEX, b'{"weight_map":{"scale":"a","scale":"b"}}'),
    "index empty": with_file(INDEX, b""),
    "index without end": with_file(INDEX, b"{", 1 << 30),
    "config without end": with_file("config.json", b"{", 1 << 30),
    "config a list": with_file("config.json", b"[]"),
    "config with a key twice": with_file("config.json", b'{"a":1,"a":2}'),
    "quantized": with_file("config.json", b'{"quantization_config": {"bits": 4}}'),
    "link out": replacing_first(lambda path, outside: path.symlink_to(outside)),
    "link by a link": replacing_first(
        lambda path, outside: (path.with_name("x").symlink_to(outside), path.symlink_to("x"))
    ),
    "link to a device": replacing_first(lambda path, outside: path.symlink_to("/dev/zero")),
    "link to itself": replacing_first(lambda path, outside: path.symlink_to(path.name)),
    "link to nothing": replacing_first(lambda path, outside: path.symlink_to("nothing")),
    "FIFO": replacing_first(lambda path, outside: os.mkfifo(path)),
    "folder": replacing_first(lambda path, outside: path.mkdir()),
    "config a FIFO": lambda folder: (
        (folder / "config.json").unlink(),
        os.mkfifo(folder / "config.json"),
        (folder / FIRST).unlink(),
    ),
    "tensor twice": lambda folder: (
        (folder / INDEX).unlink(),
        shutil.copy(folder / FIRST, folder / "model-copy.safetensors"),
    ),
    "no folder": lambda folder: shutil.rmtree(folder),
    "nothing": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "pickle": with_pickle(lambda canary: {"first.weight": torch.zeros(12, 8)}),
    "pickle with a canary": with_pickle(lambda canary: pickle.dumps(Canary(canary))),
    "torch's pickle with a canary": with_pickle(lambda canary: {"first.weight": Canary(canary)}),
}
UNSAFE = (
    *(
        "to the folder above",
        "to a folder below",
        "absolute",
        "of Windows",
        "with a drive",
        "with NUL",
        "dot",
        "two dots",
    ),
    *(
        "no name",
        "long name",
        "number",
        "list",
        "null",
        "with a new line",
        "link out",
        "link by a link",
        "link to a device",
    ),
    *("FIFO", "folder", "file above", "file absolute", "file with NUL"),
)
"""Files that are refused for their name or kind, before they are opened."""
ALLOWED: dict[str, Callable[[Path], None]] = {
    "bare canary": with_pickle(lambda canary: pickle.dumps(Canary(canary))),
    "old canary": with_pickle(lambda canary: pickle.dumps(Canary(canary), protocol=0)),
    "canary as a value": with_pickle(lambda canary: {"first.weight": Canary(canary)}),
    "canary as a key": with_pickle(lambda canary: {Canary(canary): torch.zeros(2)}),
    "canary in a list": with_pickle(lambda canary: [torch.zeros(2), Canary(canary)]),
    "garbage": with_pickle(lambda canary: b"\x80\x02garbage"),
    "nothing": with_pickle(lambda canary: b""),
    "a list": with_pickle(lambda canary: [torch.zeros(2)]),
    "a tensor": with_pickle(lambda canary: torch.zeros(2)),
    "a FIFO": lambda folder: (with_pickle(lambda canary: b"")(folder), _as_fifo(folder / "pytorch_model.bin")),
    "a link out": lambda folder: (with_pickle(lambda canary: Tiny().state_dict())(folder), _as_link(folder)),
}


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_link(folder: Path) -> None:
    (folder / "pytorch_model.bin").rename(folder.parent / "outside.bin")
    (folder / "pytorch_model.bin").symlink_to(folder.parent / "outside.bin")


def refused(folder: Path, name: str, **more: Any) -> CheckpointError:
    """Load into a model. It must be refused within the limits, and the model must be unchanged."""
    bench = Bench()
    with within_limits(name), pytest.raises(CheckpointError) as caught:
        load_pretrained(bench.module, folder, **more)
    assert not bench.differs(0), "the model has changed"
    assert not (folder.parent / "canary").exists(), "code was run"
    assert caught.value.slugs[0] != "failed", f"by an unexpected error: {caught.value}"
    return caught.value


@pytest.mark.parametrize("name", FOLDERS)
def test_hostile_folders_are_refused(name, hub, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(hub, folder)
    FOLDERS[name](folder)
    error = refused(folder, name)
    assert name not in UNSAFE or error.slugs[0] == "unsafe-path", error


@pytest.mark.parametrize("name", ALLOWED)
def test_pickles_run_no_code_even_when_allowed(name, hub, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(hub, folder)
    ALLOWED[name](folder)
    refused(folder, name, allow_pickle=True)


def test_the_intact_folder_loads(hub):
    bench = Bench()
    load_pretrained(bench.module, hub)
    state = state_of(STEP)
    assert all(same_bits(value.detach(), state[name]) for name, value in bench.module.named_parameters())


def test_damage_to_the_structure_of_a_hub_folder_is_seen(hub, tmp_path):
    """Such a folder has no hashes: damage is detected by lengths, names, dtypes and shapes."""
    chance, failures, counts = random.Random(SEED), [], Counter()
    plain = {
        "truncate": truncate,
        "append": append,
        "delete": lambda chance, folder: ((folder / chance.choice([FIRST, SECOND])).unlink(), ("", ""))[1],
        "swap": swap_files,
        "replace a file": replace_file,
        "rename a tensor": lambda chance, folder: hub_edit(chance, folder, "name"),
        "reshape": lambda chance, folder: hub_edit(chance, folder, "shape"),
        "retype": lambda chance, folder: hub_edit(chance, folder, "dtype"),
        "shift": lambda chance, folder: hub_edit(chance, folder, "offsets"),
        "drop": lambda chance, folder: hub_edit(chance, folder, "drop"),
    }
    module = Tiny()
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for kind, damage in plain.items():
        for repeat in range(40):
            folder = tmp_path / "model"
            shutil.copytree(hub, folder)
            (folder / "config.json").rename(folder / "manifest.json")  # the functions damage a file of this name
            damage(chance, folder)
            harmless = (folder / "manifest.json").read_bytes() != b"{}"
            try:
                load_pretrained(module, folder)
                if not harmless:
                    failures.append(f"{kind} {repeat}: silent")
                module.load_state_dict(before)
            except CheckpointError as error:
                counts[f"{kind}: {error.slugs[0]}"] += 1
                if not all(same_bits(before[name], value) for name, value in module.state_dict().items()):
                    failures.append(f"{kind} {repeat}: refused, and the model has changed")
            except Exception as error:
                failures.append(f"{kind} {repeat}: {type(error).__name__} {error}")
            shutil.rmtree(folder)
    print(f"{sum(counts.values())} of 400 refused, seed {SEED}: {dict(counts)}")
    assert not failures, failures[:10]


def hub_edit(chance: random.Random, folder: Path, what: str) -> Damage:
    name = chance.choice([FIRST, SECOND])

    def change(header: dict[str, Any]) -> None:
        tensor = chance.choice([key for key in header if key != "__metadata__" and header[key]["shape"]])
        entry = header[tensor]
        if what == "name":
            header[tensor + "x"] = header.pop(tensor)
        elif what == "shape":
            entry["shape"] = (
                [*entry["shape"], 1] if chance.random() < 0.5 else [entry["shape"][0] + 1, *entry["shape"][1:]]
            )
        elif what == "dtype":
            entry["dtype"] = {"F32": "I32", "BF16": "I16"}[entry["dtype"]]
        elif what == "offsets":
            entry["data_offsets"] = [at + chance.choice((-4, 4)) for at in entry["data_offsets"]]
        else:
            del header[tensor]

    rewrite_header(folder, name, change)
    return name, ""


# -- hostile manifests, with updated digests ---------------------------------------------------------------------------

WEIGHT, LOSSES = "model/first.weight", "state/values.losses"


def tensor_of(change: Callable[[list[Any]], Any], name: str = WEIGHT) -> Callable[[Path], None]:
    """A change of a tensor of the manifest: [dtype, shape, slices, about]."""
    return manifest_of(lambda document: change(document["tensors"][name]) and None)


def manifest_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: resign(folder, change)


def put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def entry_of(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A change of an entry in the header of a file, with updated digests in the manifest."""

    def apply(folder: Path) -> None:
        file = next(path for path in data_files(folder) if name in header_of(folder / path)[0])
        rewrite_header(folder, file, lambda header: change(header[name]))
        resign(folder)

    return apply


def as_manifest(make: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        outside = folder.parent / "outside.json"
        (folder / "manifest.json").rename(outside)
        make(folder / "manifest.json", outside)

    return apply


def rename_file(name: str) -> Callable[[Path], None]:
    def change(document: dict[str, Any]) -> None:
        document["files"] = {name if old.endswith("1.safetensors") else old: i for old, i in document["files"].items()}

    return manifest_of(change)


MANIFESTS: dict[str, Callable[[Path], None]] = {
    "newer version": manifest_of(lambda d: put(d, "version", 3)),
    "version as text": manifest_of(lambda d: put(d, "version", "1")),
    "no version": manifest_of(lambda d: d.pop("version") and None),
    "other format": manifest_of(lambda d: put(d, "format", "x")),
    "a list": manifest_of(lambda d: [d]),
    "no tensors": manifest_of(lambda d: put(d, "tensors", {})),
    "no files": manifest_of(lambda d: put(d, "files", {})),
    "negative step": manifest_of(lambda d: put(d, "step", -1)),
    "step a bool": manifest_of(lambda d: put(d, "step", True)),
    "slices overlap": tensor_of(lambda row: put(row[2][1], 2, [5, 11])),
    "slice twice": tensor_of(lambda row: row[2].append(row[2][0])),
    "slice missing": tensor_of(lambda row: row[2].pop() and None),
    "slice too small": tensor_of(lambda row: put(row[2][1], 2, [6, 11])),
    "slice out of range": tensor_of(lambda row: put(row[2][1], 2, [7, 13])),
    "slice backwards": tensor_of(lambda row: put(row[2][1], 2, [12, 6])),
    "slice of other dims": tensor_of(lambda row: row[2][1].append([0, 1])),
    "negative slice": tensor_of(lambda row: put(row[2][0], 2, [-6, 6])),
    "slice a float": tensor_of(lambda row: put(row[2][0], 2, [0, 6.0])),
    "file number": tensor_of(lambda row: put(row[2][0], 0, 7)),
    "negative file number": tensor_of(lambda row: put(row[2][0], 0, -1)),
    "file number a bool": tensor_of(lambda row: put(row[2][0], 0, True)),
    "other file": tensor_of(lambda row: put(row[2][0], 0, 0)),
    "unknown key": tensor_of(lambda row: put(row[2][0], 1, "x")),
    "other key": tensor_of(lambda row: put(row[2][0], 1, "model/last.weight")),
    "other dtype": tensor_of(lambda row: put(row, 0, "I32")),
    "unknown dtype": tensor_of(lambda row: put(row, 0, "F33")),
    "huge shape": tensor_of(lambda row: put(row, 1, [1 << 61, 8])),
    "negative shape": tensor_of(lambda row: put(row, 1, [-12, -8])),
    "bool shape": tensor_of(lambda row: put(row, 1, [True, 8])),
    "huge, and covered": tensor_of(lambda row: (put(row, 1, [1 << 40]), put(row, 2, [[*row[2][0][:2], [0, 1 << 40]]]))),
    "huge value, and covered": tensor_of(
        lambda row: (put(row, 1, [1 << 40]), put(row, 2, [[*row[2][0][:2], [0, 1 << 40]]])), LOSSES
    ),
    "entry of another shape": entry_of(WEIGHT, lambda entry: put(entry, "shape", [8, 6])),
    "entry of another dtype": entry_of(WEIGHT, lambda entry: put(entry, "dtype", "I32")),
    "value of another shape": entry_of(LOSSES, lambda entry: put(entry, "shape", [60, 10])),
    "value of another dtype": entry_of(LOSSES, lambda entry: put(entry, "dtype", "I64")),
    "file above": rename_file("../rank-00001.safetensors"),
    "file absolute": rename_file("/etc/passwd"),
    "file with NUL": rename_file("rank\0"),
    "file missing": rename_file("rank-00009.safetensors"),
    "file is the manifest": rename_file("manifest.json"),
    "file of other size": manifest_of(lambda d: put(d["files"]["rank-00001.safetensors"], 0, 10)),
    "unknown tag": manifest_of(lambda d: put(d["state"], "values", {"$": "code", "value": "x"})),
    "deep values": lambda folder: sign(folder, json_with_values(folder, b"[" * 50_000 + b"]" * 50_000)),
    "values nested": lambda folder: sign(folder, json_with_values(folder, b"[" * 500 + b"]" * 500)),
    "not a number": lambda folder: sign(folder, json_with_values(folder, b"NaN")),
    "key twice": lambda folder: sign(folder, json_with_values(folder, b'{"a":1,"a":2}')),
    "state a list": manifest_of(lambda d: put(d, "state", [])),
    "optimizers a list": manifest_of(lambda d: put(d["state"], "optimizers", [])),
    "manifest a FIFO": as_manifest(lambda path, outside: os.mkfifo(path)),
    "manifest a folder": as_manifest(lambda path, outside: path.mkdir()),
    "manifest a link out": as_manifest(lambda path, outside: path.symlink_to(outside)),
    "manifest a device": as_manifest(lambda path, outside: path.symlink_to("/dev/zero")),
    "manifest a link to itself": as_manifest(lambda path, outside: path.symlink_to(path.name)),
    "manifest without end": as_manifest(lambda path, outside: sparse(path, b"{", 1 << 30)),
    "manifest empty": as_manifest(lambda path, outside: path.write_bytes(b"")),
}


def json_with_values(folder: Path, values: bytes) -> bytes:
    resign(folder, lambda document: put(document["state"], "values", "HERE"))
    return (folder / "manifest.json").read_bytes().split(b"\n", 1)[1].rstrip()[:-1].replace(b'"HERE"', values)


@pytest.mark.parametrize("name", MANIFESTS)
def test_hostile_manifests_are_refused(name, intact, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(intact, root)
    MANIFESTS[name](folder_of(root))
    bench = Bench()
    with within_limits(name), pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder_of(root), bench.module, optimizer=bench.optimizer)
    assert not bench.differs(0), "the model has changed"
    assert caught.value.slugs[0] != "failed", f"by an unexpected error: {caught.value}"
    assert name not in UNSAFE or caught.value.slugs[0] == "unsafe-path", caught.value


class Many(torch.nn.Module):
    def __init__(self, number: int, name: str):
        super().__init__()
        for index in range(number):
            self.register_parameter(f"{name}_{index}_projection", torch.nn.Parameter(torch.zeros(1)))


def test_a_checkpoint_of_another_model_is_refused_in_time(tmp_path):
    with Checkpointer(tmp_path, Many(250, "decoder_layer")) as checkpoints:
        checkpoints.save(1)
    model = Many(250, "transformer_block")
    with within_limits("250 other names"), pytest.raises(CheckpointError):
        load_checkpoint(tmp_path, model)


def test_there_are_forty_hostile_inputs():
    assert len(HEADERS) + len(FOLDERS) + len(ALLOWED) + len(MANIFESTS) >= 40
    print(f"{len(HEADERS)} headers, {len(FOLDERS)} folders, {len(ALLOWED)} pickles, {len(MANIFESTS)} manifests")


# -- any bytes ---------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "x"]) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | json_values,
    }
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3), st.binary(max_size=24))
def test_any_header_is_read_or_refused(header, data):
    check_header(pack(json.dumps(header).encode(), data))


@settings(max_examples=300)
@given(st.binary(max_size=64), st.integers(0, 80) | st.integers(0, (1 << 64) - 1))
def test_any_bytes_are_read_or_refused(data, length):
    check_header(struct.pack("<Q", length) + data)
    try:
        read_json(data, "here")
    except CheckpointError as error:
        assert error.slugs == ("bad-json",)


def check_header(raw: bytes) -> None:
    """A header that is accepted describes every byte of its file once."""
    descriptor = os.memfd_create("header")
    try:
        os.write(descriptor, raw)
        try:
            header = read_header(descriptor, len(raw), "here")
        except CheckpointError:
            return
        at = len(header.raw)
        for tensor in sorted(header.entries.values(), key=lambda tensor: (tensor.start, tensor.num_bytes)):
            assert tensor.start == at
            at += tensor.num_bytes
        assert at == len(raw)
    finally:
        os.close(descriptor)


@settings(max_examples=60)
@given(body=st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_manifest_is_read_or_refused(body, tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    sign(folder, body)
    with pytest.raises(CheckpointError):
        read_manifest(folder)


def test_intact_files_are_accepted(intact):
    """The control of the tests above: intact files."""
    manifest = read_manifest(folder_of(intact))
    for name, info in manifest.files.items():
        with reader.TensorFile(folder_of(intact), name, info) as file:
            assert file.has_digests
            file.check_all()
    assert replace(manifest).digest == manifest.digest
