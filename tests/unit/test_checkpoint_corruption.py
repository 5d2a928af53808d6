"""A checkpoint that was damaged is refused by name, whatever was damaged; hostile ones are refused fast, and run no code.

The model is as it was after every refusal, bit for bit.
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

from parallelize.checkpoint import digests, reader, writer
from parallelize.checkpoint.checkpointer import Checkpointer, load_checkpoint, run_of
from parallelize.checkpoint.header import read_header
from parallelize.checkpoint.held import Place
from parallelize.checkpoint.manifest import read_manifest
from parallelize.checkpoint.pretrained import load_pretrained
from parallelize.checkpoint.save import write_snapshot
from parallelize.checkpoint.snapshot import Snapshot, take
from parallelize.checkpoint.strict_json import read_json
from parallelize.checkpoint.writer import Outgoing
from parallelize.errors import CheckpointError
from tests.dist.fault_jobs import Bench, Tiny, same_bits, state_of

SEED = 20
STEP = 5
BLOCK_BYTES = 128
SECONDS, MEGABYTES = 1.0, 100
Damage = tuple[str, str]
"""(file, tensor) that the error must name; "" for none. ("unread", ""): loading must give the right values."""


# -- a checkpoint of three files ------------------------------------------------------------------------------------------


class Together:
    """What `Meeting` does, between threads."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier
        self.size, self.ranks, self.leads = len(slots), list(range(len(slots))), rank == 0

    def gather(self, value: Any) -> list[Any] | None:
        self.slots[self.rank] = value
        self.barrier.wait(20)
        found = list(self.slots) if self.leads else None
        self.barrier.wait(20)
        return found

    def share(self, value: Any = None) -> Any:
        if self.leads:
            self.slots[0] = value
        self.barrier.wait(20)
        found = self.slots[0]
        self.barrier.wait(20)
        return found


def shared_out(whole: Snapshot) -> list[Snapshot]:
    """A snapshot as three ranks would have it: halves of matrices on 1 and 2, whose files have one size; the rest on 0."""
    shares = [Snapshot(whole.step, [], {}, whole.state)]
    empty = {
        "optimizers": {name: {**one, "groups": [], "state": {}} for name, one in whole.state["optimizers"].items()}
    }
    shares += [Snapshot(whole.step, [], {}, {**empty, "streams": {}}) for _ in (1, 2)]
    made = {one.name: one.make() for one in whole.outgoing}
    for name, (dtype, shape, pieces, about) in whole.table.items():
        halves = [0] if len(shape) != 2 or shape[0] < 2 else [1, 2]
        for place, rank in enumerate(halves):
            rows = (shape[0] * place // 2, shape[0] * (place + 1) // 2) if len(halves) == 2 else None
            value = made[name][slice(*rows)].clone() if rows else made.get(name)
            box = [list(rows), [0, shape[1]]] if rows else pieces[0][1] if pieces else None
            shares[rank].table[name] = [dtype, shape, [[name, box]] if box is not None else [], about]
            if value is not None:
                shares[rank].outgoing.append(Outgoing(name, dtype, tuple(value.shape), lambda value=value: value))
    return shares


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
def good(tmp_path_factory):
    """A run's folder with one checkpoint of three files."""
    root = tmp_path_factory.mktemp("corruption") / "run"
    root.mkdir()
    with small_blocks():
        bench = Bench()
        bench.set(STEP)
        run = run_of(bench.module, bench.optimizer, None, None, None, None, False)
        values = {"losses": torch.arange(600, dtype=torch.float64)}
        shares = shared_out(take(run, Place(bench.module), STEP, values))
        slots, barrier = [None] * 3, threading.Barrier(3)
        threads = [
            threading.Thread(target=write_snapshot, args=(root, share, Together(rank, slots, barrier), {}))
            for rank, share in enumerate(shares)
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
    """What was not as promised; nothing where all was."""
    file = damage[0]
    try:
        step = load_checkpoint(folder, bench.module, optimizer=bench.optimizer, check=True)
    except CheckpointError as error:
        said = str(error)
        if bench.differs(0):
            bench.set(0)
            return f"refused, and the model has changed: {said[:200]}"
        if file == "unread":
            return f"refused without a cause: {said[:300]}"
        missing = [word for word in damage if word and word not in said]
        return f"does not name {missing}: {said[:300]}" if missing else ""
    except BaseException as error:
        bench.set(0)
        return f"{type(error).__name__}: {str(error)[:300]}"
    wrong = bench.differs(STEP) or step != STEP
    bench.set(0)
    if wrong:
        return f"SILENT: loaded step {step} with wrong values: {wrong}"
    return "" if file == "unread" else "SILENT: damage was not seen"


# -- random damage --------------------------------------------------------------------------------------------------------


def flip(chance: random.Random, folder: Path) -> Damage:
    """One bit of any file."""
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
    """A sector of zeros."""
    name = chance.choice([*data_files(folder), "manifest.json"])
    raw = bytearray((folder / name).read_bytes())
    at = chance.randrange(0, len(raw), 512)
    kept, raw[at : at + 512] = bytes(raw), bytes(len(raw[at : at + 512]))
    (folder / name).write_bytes(raw)
    return (name, "") if bytes(raw) != kept else ("unread", "")


def garbage(chance: random.Random, folder: Path) -> Damage:
    """Random bytes somewhere."""
    name = chance.choice([*data_files(folder), "manifest.json"])
    raw = bytearray((folder / name).read_bytes())
    at, length = chance.randrange(len(raw)), chance.randint(1, 64)
    kept, raw[at : at + length] = bytes(raw), chance.randbytes(len(raw[at : at + length]))
    (folder / name).write_bytes(raw)
    return (name, "") if bytes(raw) != kept else ("unread", "")


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
    """Two files change names; 1 and 2 have the same size."""
    first, second = chance.sample(data_files(folder), 2)
    (folder / first).rename(folder / "x")
    (folder / second).rename(folder / first)
    (folder / "x").rename(folder / second)
    return "rank-", ""


def one_for_another(chance: random.Random, folder: Path) -> Damage:
    """A copy of one file in the place of another."""
    first, second = chance.sample(data_files(folder), 2)
    shutil.copyfile(folder / first, folder / second)
    return second, ""


def swap_blocks(chance: random.Random, folder: Path) -> Damage:
    """Two blocks of data of one size change places, within a file or between two."""
    ours, theirs = chance.choice(data_files(folder)), chance.choice(data_files(folder))
    first, second = bytearray((folder / ours).read_bytes()), bytearray((folder / theirs).read_bytes())
    a, b = header_of(folder / ours)[1], header_of(folder / theirs)[1]
    length = chance.choice((4, 16, BLOCK_BYTES))
    at, to = chance.randrange(a, len(first) - length), chance.randrange(b, len(second) - length)
    one, other = bytes(first[at : at + length]), bytes(second[to : to + length])
    first[at : at + length] = other
    changed = one != other
    if ours != theirs:
        second[to : to + length] = one
        (folder / theirs).write_bytes(second)
    (folder / ours).write_bytes(first)
    return ("rank-", "") if changed else ("unread", "")


def delete(chance: random.Random, folder: Path) -> Damage:
    name = chance.choice([*data_files(folder), "manifest.json"])
    (folder / name).unlink()
    return name if name != "manifest.json" else folder.name, ""


def rewrite_header(folder: Path, name: str, change: Callable[[dict[str, Any]], Any], keep_length: bool = False) -> None:
    """Another header, valid JSON, with the same data behind it."""
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


def nodes_of(value: Any, path: tuple = ()) -> list[tuple]:
    """The places of all values of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in nodes_of(one, (*path, key)))]


def set_at(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    held = value
    for key in path[:-1]:
        held = held[key]
    held[path[-1]] = new
    return value


def at_path(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def other_value(chance: random.Random, value: Any) -> Any:
    """Something else of the kind, or of another."""
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
    """Any field, without the digest."""
    raw = (folder / "manifest.json").read_text()
    said, body = raw.split("\n", 1)
    document = json.loads(body.rstrip()[:-1])
    path = chance.choice(nodes_of(document))
    document = set_at(document, path, other_value(chance, at_path(document, path)))
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    changed = f"{said}\n{text}}}\n"
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
    """One digit of one digest, in a file's header or in the manifest."""
    name = chance.choice([*data_files(folder), "manifest.json"])
    text = (folder / name).read_bytes().decode("latin-1")
    places = [match.start() for match in re.finditer(r"[0-9a-f]{32}", text)]
    at = chance.choice(places) + chance.randrange(32)
    text = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    (folder / name).write_bytes(text.encode("latin-1"))
    return name, ""


def spoil_latest(chance: random.Random, folder: Path) -> Damage:
    """`latest` is for people: what is loaded does not depend on it."""
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
    """What the manifest does not name is not read."""
    where = chance.choice((folder, folder.parent))
    name = chance.choice(("notes.txt", "rank-00007.safetensors", "manifest.json.bak", "step-00000009", ".step-x"))
    (where / name).write_bytes(chance.randbytes(100))
    return "unread", ""


KINDS: dict[Callable[[random.Random, Path], Damage], int] = {
    flip: 400,
    flip_in_header: 120,
    zero: 100,
    garbage: 100,
    truncate: 150,
    append: 100,
    swap_files: 20,
    one_for_another: 20,
    swap_blocks: 80,
    delete: 16,
    edit_header: 120,
    edit_manifest: 150,
    duplicate_key: 40,
    edit_digest: 100,
    spoil_latest: 30,
    add_file: 20,
}


def test_no_random_damage_goes_unseen(good, bench, tmp_path):
    """From the run's folder as from the step's; each starts from a good copy."""
    chance, counts, unread, wrong = random.Random(SEED), Counter(), Counter(), []
    for kind, number in KINDS.items():
        for turn in range(number):
            root = tmp_path / "run"
            shutil.copytree(good, root)
            damage = kind(chance, folder_of(root))
            whole = turn % 2 and damage[0] != folder_of(root).name
            found = outcome(bench, root if whole else folder_of(root), damage)
            counts[kind.__name__] += 1
            unread[kind.__name__] += damage[0] == "unread"
            if found:
                wrong.append(f"{kind.__name__} {turn} {damage}: {found}")
            shutil.rmtree(root)
    total = sum(counts.values())
    text = f"{total} corruptions, seed {SEED}, {len(wrong)} not as promised, {sum(unread.values())} that change nothing read; {dict(counts)}"
    print(text)
    assert not wrong, text + "\n" + "\n".join(wrong[:20])
    assert total >= 1000
    assert sum(unread.values()) <= 80


def test_the_good_one_loads(good, bench):
    assert outcome(bench, good, ("unread", "")) == ""
    sizes = [(folder_of(good) / name).stat().st_size for name in data_files(folder_of(good))]
    assert len(sizes) == 3
    assert sizes[1] == sizes[2]


def test_every_byte_of_every_file_is_checked(good, bench, tmp_path):
    """Not by chance: each seventh byte of all files, one after another."""
    root = tmp_path / "run"
    shutil.copytree(good, root)
    folder, wrong, tried = folder_of(root), [], 0
    for name in [*data_files(folder), "manifest.json"]:
        raw = (folder / name).read_bytes()
        for at in range(0, len(raw), 61):
            tensor = tensor_at(folder / name, at) if name != "manifest.json" else ""
            (folder / name).write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
            if found := outcome(bench, folder, (name, tensor)):
                wrong.append(f"{name} byte {at}: {found}")
            tried += 1
            (folder / name).write_bytes(raw)
    print(f"{tried} bytes flipped, {len(wrong)} not as promised")
    assert not wrong, wrong[:10]


# -- damage whose digests were made anew ------------------------------------------------------------------------------------


def resign(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda document: None) -> None:
    """A manifest with a change, and digests that fit it and the files' headers as they are now."""
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


def test_a_forged_manifest_never_breaks_the_loader(good, bench, tmp_path):
    """Any field of any kind, with digests that fit: refused as a CheckpointError, or loaded; never half of it. Tensors that
    were not named otherwise are right. (Who can write the digests can write other numbers too: that is not found.)"""
    chance, root, counts, wrong = random.Random(SEED), tmp_path / "run", Counter(), []
    shutil.copytree(good, root)
    folder = folder_of(root)
    kept = (folder / "manifest.json").read_bytes()
    document = json.loads(kept.decode().split("\n", 1)[1].rstrip()[:-1])
    paths = [path for path in nodes_of(document) if path[:1] != ("state",) or len(path) < 7]
    for path in chance.sample(paths, min(400, len(paths))):
        resign(folder, lambda document, path=path: set_at(document, path, other_value(chance, at_path(document, path))))
        try:
            load_checkpoint(folder, bench.module, optimizer=bench.optimizer)
            counts["loaded"] += 1
        except CheckpointError as error:
            counts[error.slugs[0]] += 1
            if bench.differs(0):
                wrong.append(f"{path}: refused, and changed: {error}")
        except Exception as error:
            wrong.append(f"{path}: {type(error).__name__} {error}")
        bench = Bench()
        (folder / "manifest.json").write_bytes(kept)
    print(f"{sum(counts.values()) + len(wrong)} forged manifests, seed {SEED}: {dict(counts)}")
    assert not wrong, wrong[:20]


# -- hostile input ----------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    pass


@contextmanager
def watched(name: str):
    """Refused within a second and a hundred megabytes; or an AssertionError."""

    def rings(*_: Any) -> None:
        raise Hang(name)

    before = signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, 3 * SECONDS)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        start, began = peak_bytes("VmRSS"), time.monotonic()
        yield
        spent, grown = time.monotonic() - began, peak_bytes("VmHWM") - start
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert spent < SECONDS, f"{name} took {spent:.2f} s"
    assert grown < MEGABYTES << 20, f"{name} took {grown >> 20} MB"


def peak_bytes(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def pack(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    shape, offsets = (list(one) if isinstance(one, tuple) else one for one in (shape, offsets))
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
    "half a character": pack(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", DATA),
    "overlap": pack({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": pack({"a": entry(), "b": entry()}, DATA),
    "hole": pack({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "hole at the begin": pack({"a": entry(offsets=(8, 16))}, bytes(16)),
    "negative size": pack({"a": entry(shape=(-1, -2))}, DATA),
    "huge size": pack({"a": entry(shape=(1 << 61,), offsets=(0, 1 << 63))}, DATA),
    "huge product": pack({"a": entry(shape=(1 << 40, 1 << 40), offsets=(0, 1 << 82))}, DATA),
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
    "cut off": pack({"a": entry()}, bytes(7)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_refused(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[name])
    with watched(name), pytest.raises(CheckpointError) as caught:
        load_pretrained(torch.nn.Linear(2, 1), tmp_path)
    assert caught.value.slugs[0] != "failed", f"by accident: {caught.value}"
    assert str(path) in str(caught.value)


def test_headers_without_end_take_no_memory(tmp_path):
    """Sparse files: a hostile one is small on the disk that it comes from."""
    for length, begin in ((99_999_999, b"\0"), (99_999_999, b"{"), (100_000_001, b"{"), (1 << 40, b"{")):
        path = tmp_path / "model.safetensors"
        sparse(path, struct.pack("<Q", length) + begin, 200 << 20)
        with watched(f"{length}"), pytest.raises(CheckpointError):
            load_pretrained(torch.nn.Linear(2, 1), tmp_path)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in Hugging Face's layout: two files and an index."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    folder.mkdir()
    state = {name: value for name, value in state_of(STEP).items() if "/" not in name}
    names = list(state)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: state[name] for name in held}, folder / file, {"format": "pt"})
    where = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
    )
    (folder / "config.json").write_text("{}")
    return folder


ONE, TWO, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def indexed(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """A change of the weight_map."""

    def do(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        changed = change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index if changed is None else changed))

    return do


def pointing_to(name: Any) -> Callable[[Path], None]:
    return indexed(lambda where: where.update({"scale": name}))


def in_place_of_one(make: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        outside = folder.parent / "outside.safetensors"
        (folder / ONE).rename(outside)
        make(folder / ONE, outside)

    return do


def written(name: str, content: bytes, size: int = 0) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / name).write_bytes(content)
        if size:
            os.truncate(folder / name, size)

    return do


class Canary:
    """A pickle that leaves a file where it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


def pickled(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A folder with nothing but a pickle. The canary would be a file beside the folder."""

    def do(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        held = make(folder.parent / "canary")
        if isinstance(held, bytes):
            (folder / "pytorch_model.bin").write_bytes(held)
        else:
            torch.save(held, folder / "pytorch_model.bin")

    return do


FOLDERS: dict[str, Callable[[Path], None]] = {
    "to the folder above": pointing_to("../outside.safetensors"),
    "to a folder below": pointing_to("sub/outside.safetensors"),
    "absolute": pointing_to("/etc/passwd"),
    "of Windows": pointing_to("..\\outside.safetensors"),
    "with a drive": pointing_to("C:model.safetensors"),
    "with NUL": pointing_to("model\0.safetensors"),
    "with a new line": pointing_to("model\n.safetensors"),
    "half a character": pointing_to("model\ud800"),
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
        lambda where: where.update({"first.weight": TWO if where["first.weight"] == ONE else ONE})
    ),
    "tensor not listed": indexed(lambda where: where.pop("first.weight") and None),
    "tensor nowhere": indexed(lambda where: where.update({"more": ONE})),
    "no weight_map": indexed(lambda where: {"metadata": {}}),
    "empty weight_map": indexed(lambda where: {"weight_map": {}}),
    "weight_map a list": indexed(lambda where: {"weight_map": list(where)}),
    "index a list": indexed(lambda where: [where]),
    "index deep": written(INDEX, b'{"weight_map":' + b"[" * 100_000),
    "index not UTF-8": written(INDEX, b'{"weight_map":{"\xff":"a"}}'),
    "index with a key twice": written(INDEX, b'{"weight_map":{"scale":"a","scale":"b"}}'),
    "index empty": written(INDEX, b""),
    "index without end": written(INDEX, b"{", 1 << 30),
    "config without end": written("config.json", b"{", 1 << 30),
    "config a list": written("config.json", b"[]"),
    "config with a key twice": written("config.json", b'{"a":1,"a":2}'),
    "quantized": written("config.json", b'{"quantization_config": {"bits": 4}}'),
    "link out": in_place_of_one(lambda path, outside: path.symlink_to(outside)),
    "link by a link": in_place_of_one(
        lambda path, outside: (path.with_name("x").symlink_to(outside), path.symlink_to("x"))
    ),
    "link to a device": in_place_of_one(lambda path, outside: path.symlink_to("/dev/zero")),
    "link to itself": in_place_of_one(lambda path, outside: path.symlink_to(path.name)),
    "link to nothing": in_place_of_one(lambda path, outside: path.symlink_to("nothing")),
    "FIFO": in_place_of_one(lambda path, outside: os.mkfifo(path)),
    "folder": in_place_of_one(lambda path, outside: path.mkdir()),
    "config a FIFO": lambda folder: (
        (folder / "config.json").unlink(),
        os.mkfifo(folder / "config.json"),
        (folder / ONE).unlink(),
    ),
    "tensor twice": lambda folder: (
        (folder / INDEX).unlink(),
        shutil.copy(folder / ONE, folder / "model-copy.safetensors"),
    ),
    "no folder": lambda folder: shutil.rmtree(folder),
    "nothing": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "pickle": pickled(lambda canary: {"first.weight": torch.zeros(12, 8)}),
    "pickle with a canary": pickled(lambda canary: pickle.dumps(Canary(canary))),
    "torch's pickle with a canary": pickled(lambda canary: {"first.weight": Canary(canary)}),
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
"""What is refused for its name or kind, before it is opened."""
ALLOWED: dict[str, Callable[[Path], None]] = {
    "bare canary": pickled(lambda canary: pickle.dumps(Canary(canary))),
    "old canary": pickled(lambda canary: pickle.dumps(Canary(canary), protocol=0)),
    "canary as a value": pickled(lambda canary: {"first.weight": Canary(canary)}),
    "canary as a key": pickled(lambda canary: {Canary(canary): torch.zeros(2)}),
    "canary in a list": pickled(lambda canary: [torch.zeros(2), Canary(canary)]),
    "garbage": pickled(lambda canary: b"\x80\x02garbage"),
    "nothing": pickled(lambda canary: b""),
    "a list": pickled(lambda canary: [torch.zeros(2)]),
    "a tensor": pickled(lambda canary: torch.zeros(2)),
    "a FIFO": lambda folder: (pickled(lambda canary: b"")(folder), _as_fifo(folder / "pytorch_model.bin")),
    "a link out": lambda folder: (pickled(lambda canary: Tiny().state_dict())(folder), _as_link(folder)),
}


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_link(folder: Path) -> None:
    (folder / "pytorch_model.bin").rename(folder.parent / "outside.bin")
    (folder / "pytorch_model.bin").symlink_to(folder.parent / "outside.bin")


def refused(folder: Path, name: str, **more: Any) -> CheckpointError:
    """Load into a model; it must be refused in time, and the model must be as it was."""
    bench = Bench()
    with watched(name), pytest.raises(CheckpointError) as caught:
        load_pretrained(bench.module, folder, **more)
    assert not bench.differs(0), "the model has changed"
    assert not (folder.parent / "canary").exists(), "code was run"
    assert caught.value.slugs[0] != "failed", f"by accident: {caught.value}"
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


def test_the_good_folder_loads(hub):
    bench = Bench()
    load_pretrained(bench.module, hub)
    state = state_of(STEP)
    assert all(same_bits(value.detach(), state[name]) for name, value in bench.module.named_parameters())


def test_damage_to_the_structure_of_a_hub_folder_is_seen(hub, tmp_path):
    """There are no hashes in it: what the lengths, names and shapes tell."""
    chance, wrong, counts = random.Random(SEED), [], Counter()
    plain = {
        "truncate": truncate,
        "append": append,
        "delete": lambda chance, folder: ((folder / chance.choice([ONE, TWO])).unlink(), ("", ""))[1],
        "swap": swap_files,
        "one for another": one_for_another,
        "rename a tensor": lambda chance, folder: hub_edit(chance, folder, "name"),
        "reshape": lambda chance, folder: hub_edit(chance, folder, "shape"),
        "retype": lambda chance, folder: hub_edit(chance, folder, "dtype"),
        "shift": lambda chance, folder: hub_edit(chance, folder, "offsets"),
        "drop": lambda chance, folder: hub_edit(chance, folder, "drop"),
    }
    module = Tiny()
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for kind, damage in plain.items():
        for turn in range(40):
            folder = tmp_path / "model"
            shutil.copytree(hub, folder)
            (folder / "config.json").rename(folder / "manifest.json")  # the name that the kinds of damage know
            damage(chance, folder)
            harmless = (folder / "manifest.json").read_bytes() != b"{}"
            try:
                load_pretrained(module, folder)
                if not harmless:
                    wrong.append(f"{kind} {turn}: silent")
                module.load_state_dict(before)
            except CheckpointError as error:
                counts[f"{kind}: {error.slugs[0]}"] += 1
                if not all(same_bits(before[name], value) for name, value in module.state_dict().items()):
                    wrong.append(f"{kind} {turn}: refused, and changed")
            except Exception as error:
                wrong.append(f"{kind} {turn}: {type(error).__name__} {error}")
            shutil.rmtree(folder)
    print(f"{sum(counts.values())} of 400 refused, seed {SEED}: {dict(counts)}")
    assert not wrong, wrong[:10]


def hub_edit(chance: random.Random, folder: Path, what: str) -> Damage:
    name = chance.choice([ONE, TWO])

    def change(header: dict[str, Any]) -> None:
        tensor = chance.choice([key for key in header if key != "__metadata__" and header[key]["shape"]])
        one = header[tensor]
        if what == "name":
            header[tensor + "x"] = header.pop(tensor)
        elif what == "shape":
            one["shape"] = [*one["shape"], 1] if chance.random() < 0.5 else [one["shape"][0] + 1, *one["shape"][1:]]
        elif what == "dtype":
            one["dtype"] = {"F32": "I32", "BF16": "I16"}[one["dtype"]]
        elif what == "offsets":
            one["data_offsets"] = [at + chance.choice((-4, 4)) for at in one["data_offsets"]]
        else:
            del header[tensor]

    rewrite_header(folder, name, change)
    return name, ""


# -- hostile manifests, with digests that fit -------------------------------------------------------------------------------

WEIGHT, LOSSES = "model/first.weight", "state/values.losses"


def tensor_of(change: Callable[[list[Any]], Any], name: str = WEIGHT) -> Callable[[Path], None]:
    """A change of a row of the manifest's tensors: [dtype, shape, pieces, about]."""
    return manifest_of(lambda document: change(document["tensors"][name]) and None)


def manifest_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: resign(folder, change)


def put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def entry_of(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A change of an entry of a file's header, with digests made anew in the manifest."""

    def do(folder: Path) -> None:
        file = next(one for one in data_files(folder) if name in header_of(folder / one)[0])
        rewrite_header(folder, file, lambda header: change(header[name]))
        resign(folder)

    return do


def as_manifest(make: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        outside = folder.parent / "outside.json"
        (folder / "manifest.json").rename(outside)
        make(folder / "manifest.json", outside)

    return do


def rename_file(name: str) -> Callable[[Path], None]:
    def change(document: dict[str, Any]) -> None:
        document["files"] = {name if old.endswith("1.safetensors") else old: i for old, i in document["files"].items()}

    return manifest_of(change)


MANIFESTS: dict[str, Callable[[Path], None]] = {
    "newer version": manifest_of(lambda d: put(d, "version", 2)),
    "version as text": manifest_of(lambda d: put(d, "version", "1")),
    "no version": manifest_of(lambda d: d.pop("version") and None),
    "other format": manifest_of(lambda d: put(d, "format", "x")),
    "a list": manifest_of(lambda d: [d]),
    "no tensors": manifest_of(lambda d: put(d, "tensors", {})),
    "no files": manifest_of(lambda d: put(d, "files", {})),
    "negative step": manifest_of(lambda d: put(d, "step", -1)),
    "step a bool": manifest_of(lambda d: put(d, "step", True)),
    "pieces overlap": tensor_of(lambda row: put(row[2][1], 2, [5, 11])),
    "piece twice": tensor_of(lambda row: row[2].append(row[2][0])),
    "piece missing": tensor_of(lambda row: row[2].pop() and None),
    "piece too small": tensor_of(lambda row: put(row[2][1], 2, [6, 11])),
    "piece out of range": tensor_of(lambda row: put(row[2][1], 2, [7, 13])),
    "piece backwards": tensor_of(lambda row: put(row[2][1], 2, [12, 6])),
    "piece of other dims": tensor_of(lambda row: row[2][1].append([0, 1])),
    "negative piece": tensor_of(lambda row: put(row[2][0], 2, [-6, 6])),
    "piece a float": tensor_of(lambda row: put(row[2][0], 2, [0, 6.0])),
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
    "entry of another shape": entry_of(WEIGHT, lambda one: put(one, "shape", [8, 6])),
    "entry of another dtype": entry_of(WEIGHT, lambda one: put(one, "dtype", "I32")),
    "value of another shape": entry_of(LOSSES, lambda one: put(one, "shape", [60, 10])),
    "value of another dtype": entry_of(LOSSES, lambda one: put(one, "dtype", "I64")),
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
def test_hostile_manifests_are_refused(name, good, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(good, root)
    MANIFESTS[name](folder_of(root))
    bench = Bench()
    with watched(name), pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder_of(root), bench.module, optimizer=bench.optimizer)
    assert not bench.differs(0), "the model has changed"
    assert caught.value.slugs[0] != "failed", f"by accident: {caught.value}"
    assert name not in UNSAFE or caught.value.slugs[0] == "unsafe-path", caught.value


class Many(torch.nn.Module):
    def __init__(self, number: int, name: str):
        super().__init__()
        for place in range(number):
            self.register_parameter(f"{name}_{place}_projection", torch.nn.Parameter(torch.zeros(1)))


def test_a_checkpoint_of_another_model_is_refused_in_time(tmp_path):
    with Checkpointer(tmp_path, Many(250, "decoder_layer")) as checkpoints:
        checkpoints.save(1)
    model = Many(250, "transformer_block")
    with watched("250 other names"), pytest.raises(CheckpointError):
        load_checkpoint(tmp_path, model)


def test_there_are_forty_hostile_inputs():
    assert len(HEADERS) + len(FOLDERS) + len(ALLOWED) + len(MANIFESTS) >= 40
    print(f"{len(HEADERS)} headers, {len(FOLDERS)} folders, {len(ALLOWED)} pickles, {len(MANIFESTS)} manifests")


# -- whatever bytes ---------------------------------------------------------------------------------------------------------

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
            found = read_header(descriptor, len(raw), "here")
        except CheckpointError:
            return
        at = len(found.raw)
        for one in sorted(found.entries.values(), key=lambda one: (one.start, one.num_bytes)):
            assert one.start == at
            at += one.num_bytes
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


def test_a_digest_that_is_right_is_not_refused(good):
    """The control of all above: the files as they are."""
    manifest = read_manifest(folder_of(good))
    for name, info in manifest.files.items():
        with reader.TensorFile(folder_of(good), name, info) as file:
            assert file.has_digests
            file.check_all()
    assert replace(manifest).digest == manifest.digest
