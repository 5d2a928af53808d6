"""What a disk may contain after a power loss: every prefix of the operations on a folder, without what was not flushed.

The content of a file is safe up to its last fsync, and the entries of a folder up to the folder's last fsync. Later
changes may be there, or not, or in part. Does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = dict[str, bytes | None]
"""Path below the root -> content of a file; None for a folder."""


@dataclass
class Step:
    """One recorded operation. kind: data, sync, entries, sync-folder, folder, file.

    Attributes:
        node: file or folder. at, data: of a write. entries: [(folder, name, node or None)] that change together.
    """

    kind: str
    node: int
    at: int = 0
    data: bytes = b""
    entries: list[tuple[int, str, int | None]] = field(default_factory=list)

    @property
    def names_latest(self) -> bool:
        return any(name == "latest" for _, name, _ in self.entries)


class Recorder:
    """Records the calls of `os` below a root. Nodes are numbered; the root is 0."""

    def __init__(self, root: Path):
        self.root, self.log = os.path.realpath(root), list[Step]()
        self.names: dict[str, int] = {self.root: 0}
        self.opened: dict[int, int] = {}
        self.next = 1
        for folder, inner, files in os.walk(self.root):
            for name in (*inner, *files):
                self.names[os.path.join(folder, name)] = self.next
                self.next += 1

    def node(self, path: Any) -> int | None:
        return self.names.get(os.path.realpath(path))

    def _new(self, path: str, kind: str) -> None:
        self.names[path] = self.next
        self.log.append(Step(kind, self.next))
        parent = self.names[os.path.dirname(path)]
        self.log.append(Step("entries", self.next, entries=[(parent, os.path.basename(path), self.next)]))
        self.next += 1

    def open(self, real: Any, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        descriptor = real(path, flags, *rest, **more)
        full = os.path.realpath(path) if not isinstance(path, int) and "dir_fd" not in more else ""
        if full.startswith(self.root):
            if full not in self.names and flags & os.O_CREAT:
                self._new(full, "file")
            self.opened[descriptor] = self.names[full]
        return descriptor

    def close(self, real: Any, descriptor: int) -> None:
        self.opened.pop(descriptor, None)
        real(descriptor)

    def write(self, real: Any, descriptor: int, data: Any) -> int:
        at = os.lseek(descriptor, 0, os.SEEK_CUR) if descriptor in self.opened else 0
        done = real(descriptor, data)
        if descriptor in self.opened:
            self.log.append(Step("data", self.opened[descriptor], at, bytes(memoryview(data).cast("B")[:done])))
        return done

    def pwrite(self, real: Any, descriptor: int, data: Any, at: int) -> int:
        done = real(descriptor, data, at)
        if descriptor in self.opened:
            self.log.append(Step("data", self.opened[descriptor], at, bytes(memoryview(data).cast("B")[:done])))
        return done

    def fsync(self, real: Any, descriptor: int) -> None:
        real(descriptor)
        if descriptor in self.opened:
            is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
            self.log.append(Step("sync-folder" if is_folder else "sync", self.opened[descriptor]))

    def mkdir(self, real: Any, path: Any, *rest: Any, **more: Any) -> None:
        real(path, *rest, **more)
        if os.path.realpath(path).startswith(self.root):
            self._new(os.path.realpath(path), "folder")

    def rename(self, real: Any, source: Any, target: Any) -> None:
        source, target = os.path.realpath(source), os.path.realpath(target)
        real(source, target)
        node = self.names[source]
        below = {path: n for path, n in self.names.items() if path == source or path.startswith(source + os.sep)}
        for path, n in below.items():
            del self.names[path]
            self.names[target + path[len(source) :]] = n
        parents = [(self.names[os.path.dirname(p)], os.path.basename(p)) for p in (source, target)]
        self.log.append(Step("entries", node, entries=[(*parents[0], None), (*parents[1], node)]))

    def _gone(self, path: str) -> None:
        node = self.names.pop(path, None)
        if node is not None:
            parent = self.names[os.path.dirname(path)]
            self.log.append(Step("entries", node, entries=[(parent, os.path.basename(path), None)]))

    def unlink(self, real: Any, path: Any, *rest: Any, dir_fd: int | None = None) -> None:
        folder = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
        full = os.path.join(os.path.realpath(folder or os.path.dirname(path)), os.path.basename(path))
        if dir_fd is None:
            real(path, *rest)
        else:
            real(path, *rest, dir_fd=dir_fd)
        self._gone(full)

    rmdir = unlink


@contextmanager
def recorded(root: Path) -> Iterator[list[Step]]:
    """The operations below a folder, in order; those of threads in the order in which they were carried out."""
    recorder, real, lock = Recorder(root), {}, threading.Lock()

    def call(method: Any, function: Any, *args: Any, **more: Any) -> Any:
        with lock:
            return method(function, *args, **more)

    names = ("open", "close", "write", "pwrite", "fsync", "mkdir", "rename", "unlink", "rmdir")
    for name in (*names, "replace"):
        real[name] = getattr(os, name)
        method = getattr(recorder, "rename" if name == "replace" else name)
        setattr(os, name, functools.partial(call, method, real[name]))
    try:
        yield recorder.log
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class Disk:
    """A folder as a prefix of the operations leaves it."""

    def __init__(self, before: Tree, root: Path | None = None):
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.numbers = {"": 0}

    def copy_of(self, before: Tree, order: list[str]) -> None:
        for number, path in enumerate(order, start=1):
            self.numbers[path] = number
            content = before[path]
            if content is None:
                self.folders[number] = {}
            else:
                self.files[number] = content
        for path in order:
            parent, _, name = path.rpartition("/")
            self.folders[self.numbers[parent]][name] = self.numbers[path]

    def tree(self) -> Tree:
        tree: Tree = {}

        def walk(node: int, path: str) -> None:
            for name, inner in self.folders[node].items():
                full = f"{path}/{name}" if path else name
                if inner in self.folders:
                    tree[full] = None
                    walk(inner, full)
                else:
                    tree[full] = self.files[inner]

        walk(0, "")
        return tree


def after(before: Tree, steps: list[Step], keeps: Any) -> Tree:
    """The folder after these steps. `keeps(number, step)`: 0 for lost, 1 for kept, between for a part of the data."""
    disk = Disk(before)
    disk.copy_of(before, list(before))
    synced = {
        number: any(
            (step.kind == "data" and late.kind == "sync" and late.node == step.node)
            or (step.kind == "entries" and late.kind == "sync-folder" and late.node == step.entries[-1][0])
            for late in steps[number + 1 :]
        )
        for number, step in enumerate(steps)
        if step.kind in ("data", "entries")
    }
    for number, step in enumerate(steps):
        if step.kind == "folder":
            disk.folders[step.node] = {}
        elif step.kind == "file":
            disk.files[step.node] = b""
        elif step.kind == "data":
            fraction = 1.0 if synced[number] else keeps(number, step)
            data = step.data[: int(len(step.data) * fraction)]
            if fraction < 0:  # the length is there, the data are not
                data = bytes(len(step.data))
            content = disk.files[step.node]
            if data:
                content = content.ljust(step.at, b"\0")
                disk.files[step.node] = content[: step.at] + data + content[step.at + len(data) :]
        elif step.kind == "entries" and (synced[number] or keeps(number, step) >= 0.5):
            for folder, name, node in step.entries:
                if node is None:
                    disk.folders[folder].pop(name, None)
                else:
                    disk.folders[folder][name] = node
    return disk.tree()


def outcomes(before: Tree, log: list[Step], seed: int, tries: int) -> Iterator[tuple[int, str, Tree]]:
    """(number of operations, what is kept of the unflushed ones, the folder) for every prefix."""
    chance = random.Random(seed)
    for prefix in range(len(log) + 1):
        steps = log[:prefix]
        yield prefix, "nothing", after(before, steps, lambda n, s: 0.0)
        yield prefix, "all", after(before, steps, lambda n, s: 1.0)
        yield prefix, "names", after(before, steps, lambda n, s: 1.0 if s.kind == "entries" else 0.0)
        yield prefix, "data", after(before, steps, lambda n, s: 0.0 if s.kind == "entries" else 1.0)
        yield prefix, "lengths", after(before, steps, lambda n, s: 1.0 if s.kind == "entries" else -1.0)
        for number in range(tries - 5):
            drawn = {n: chance.choice((0.0, 1.0, chance.random(), -1.0)) for n in range(prefix)}
            yield prefix, f"random {number}", after(before, steps, lambda n, s, drawn=drawn: drawn[n])


def read_tree(root: Path) -> Tree:
    """In the order in which a `Recorder` numbers what is there."""
    tree: Tree = {}
    for folder, inner, files in os.walk(root):
        for name in (*inner, *files):
            path = Path(folder, name)
            tree[str(path.relative_to(root))] = path.read_bytes() if path.is_file() else None
    return tree


def write_tree(root: Path, tree: Tree) -> None:
    root.mkdir()
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def key_of(tree: Tree) -> str:
    """The same for the same folders."""
    parts = sorted((path, None if data is None else hashlib.sha256(data).hexdigest()) for path, data in tree.items())
    return repr(parts)
