"""Text files as one sequence of tokens: bytes are mapped as they are; what needs a tokenizer is tokenized once, into a
file.

The file is named by a hash of its sources, so that ranks and later runs find it, and checked by size and hash when they
do.
"""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from parallelize.base.agreement import text_digest
from parallelize.base.errors import DataError, ParallelizeError, Problem
from parallelize.base.files.paths import read_small
from parallelize.base.files.strict_json import read_json, write_json
from parallelize.checkpoint.format import disk

_CHUNK_TOKENS = 2**20
Tokens = tuple[Any, torch.Tensor]
"""(ids [total], the position of each document's first token)."""
Agree = Callable[[ParallelizeError | None], None]
"""Called on every rank with its error; it raises the first one on all of them."""


class JoinedTokens:
    """Several tensors of ids as one sequence, of which slices are read. The tensors may be mapped files."""

    def __init__(self, parts: Sequence[torch.Tensor]):
        self.parts = list(parts)
        self.starts = [0, *itertools.accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, interval: slice) -> torch.Tensor:
        first, last, _ = interval.indices(len(self))
        chunks = [
            part[max(first - start, 0) : max(last - start, 0)]
            for part, start in zip(self.parts, self.starts[:-1], strict=True)
            if start < last and start + len(part) > first
        ]
        return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)


def bytes_of_files(paths: Sequence[str]) -> Tokens:
    """The bytes of files, each of them one document. Raises: DataError `empty-data`; OSError."""
    sizes = [os.path.getsize(path) for path in paths]
    parts = [
        torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
        for path, size in zip(paths, sizes, strict=True)
        if size
    ]
    joined = JoinedTokens(parts)
    if not parts:
        raise DataError(Problem("empty-data", f"{', '.join(paths)[:200]}: no text", fix="name files with text"))
    return joined, torch.tensor(joined.starts[:-1])


def documents_of_lines(paths: Sequence[str], key: str) -> Iterator[str]:
    """The texts of files of JSON lines. Raises: DataError `bad-line` with file and line."""
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of_line(line, key, f"{path}:{number}")


def _text_of_line(line: str, key: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(Problem("bad-line", f"no JSON: {error}", where, fix="one JSON object a line")) from None
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise DataError(
            Problem("bad-line", f"no text under {key!r}, but {keys[:100]}", where, fix="data.field names the key")
        )
    return text


def texts_of_files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        yield Path(path).read_text(encoding="utf-8")


def encoder_of(tokenizer: str) -> Callable[[str], list[int]]:
    """Text to ids: those of a tokenizer's folder, or, without one, the bytes. Nothing is downloaded, and no code of the
    folder runs.

    Raises: DataError `no-tokenizer`.
    """
    if not tokenizer:
        return lambda text: list(text.encode())
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind, by the files that the folder has
        what = f"{tokenizer} has none: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        fix = "data.tokenizer: a folder of save_pretrained; without it, bytes are tokens"
        if "trust_remote_code" in str(error):
            what = f"{tokenizer} needs code of its own (`auto_map`), which is not run"
            fix = "data.function: a function of yours that builds the tokenizer, and returns rows"
        raise DataError(Problem("no-tokenizer", what, fix=fix)) from error
    return lambda text: loaded(text)["input_ids"]


def tokenized(documents: Iterable[str], encode: Callable[[str], list[int]]) -> Tokens:
    """Documents as ids in memory; empty ones are left out. Raises: DataError `empty-data`, `bad-row` for one that is no
    text."""
    parts, starts, total = [], [], 0
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            what = f"document {number} is a {type(document).__name__}, and the first is text"
            raise DataError(Problem("bad-row", what, fix="return texts, or rows"))
        ids = torch.tensor(encode(document), dtype=torch.int32)
        if len(ids):
            starts.append(total)
            parts.append(ids)
            total += len(ids)
    if not parts:
        raise DataError(Problem("empty-data", "the documents have no tokens", fix="name data with text"))
    return torch.cat(parts), torch.tensor(starts)


def digest_of_sources(paths: Sequence[str], tokenizer: str, key: str) -> str:
    """A short hash of files, by path, size and time of change, and of how they are read: by which tokenizer's files,
    and which key."""
    folder = Path(tokenizer)
    parts = sorted(str(part) for part in folder.iterdir() if part.is_file()) if tokenizer and folder.is_dir() else []
    stats = [(os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in [*paths, *parts]]
    return text_digest(repr((stats, tokenizer, key))).hex()


# -- the cache ----------------------------------------------------------------------------------------------------


def cached_tokens(
    folder: Path,
    digest: str,
    documents: Callable[[], Iterable[str]],
    tokenizer: str,
    writes: bool,
    agree: Agree,
) -> Tokens:
    """Tokens from a file, which the ranks with `writes` make where it is missing or damaged. All ranks call it.

    agree: called on every rank when the file is there, or with the error for which it is not.

    Raises: DataError `unreadable-data`, or what `documents` raises, as `agree` does on every rank.
    """
    cache = TokenCache(folder, digest)
    failed: ParallelizeError | None = None
    try:
        if writes and not cache.is_complete(hashes=True):
            cache.write(documents, tokenizer)
    except ParallelizeError as error:
        failed = error
    except Exception as error:  # of a file, a disk, a tokenizer: the other ranks wait for this one
        what = f"{type(error).__name__}: {str(error)[:300]}"
        failed = DataError(Problem("unreadable-data", what, fix="data: text files, or JSON lines, in UTF-8"))
        failed.__cause__ = error
    agree(failed)
    return cache.mapped()


class TokenCache:
    """Ids and the starts of documents in two files, and a third one with their sizes and hashes, which is published
    last.

    What a power cut or an interrupted copy leaves does not match it, and is made again.
    """

    def __init__(self, folder: Path, digest: str):
        self.folder, self.record = folder, f"tokens-{digest}.json"
        self.ids, self.starts = folder / f"tokens-{digest}.bin", folder / f"tokens-{digest}.starts"

    def is_complete(self, hashes: bool) -> bool:
        """Whether the files are those that were written, by size and, where asked for, by hash."""
        try:
            described = read_json(read_small(self.folder, self.record, 1 << 16), self.record)
            files = described["files"]
            return all(files[path.suffix] == _description(path, hashes, files[path.suffix]) for path in self._files)
        except (OSError, ParallelizeError, KeyError, TypeError):
            return False

    @property
    def _files(self) -> tuple[Path, Path]:
        return self.ids, self.starts

    def write(self, documents: Callable[[], Iterable[str]], tokenizer: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        encode = encoder_of(tokenizer)
        starts: list[int] = []
        _publish(self.ids, lambda file: starts.extend(_write_ids(file, (encode(text) for text in documents()))))
        _publish(self.starts, lambda file: file.write(bytes(torch.tensor(starts).view(torch.uint8).tolist())))
        described = {"files": {path.suffix: _description(path, True) for path in self._files}}
        _publish(self.folder / self.record, lambda file: file.write(write_json(described)))
        disk.flush_folder(self.folder)

    def mapped(self) -> Tokens:
        """Raises: DataError `unreadable-data` where this rank sees other files than the rank that has checked them."""
        if not self.is_complete(hashes=False):
            fix = "data.cache: a folder that the ranks of a node share, and that nothing else writes to"
            raise DataError(Problem("unreadable-data", "the tokens have another size here", str(self.ids), fix=fix))
        ids, starts = (os.path.getsize(path) for path in self._files)
        return (
            torch.from_file(str(self.ids), shared=False, size=ids // 4, dtype=torch.int32),
            torch.from_file(str(self.starts), shared=False, size=starts // 8, dtype=torch.int64),
        )


def _description(path: Path, hashes: bool, known: Any = None) -> dict[str, Any]:
    """Size and hash of a file; without `hashes`, or where the size differs, the hash that is known."""
    size = path.stat().st_size
    if known is not None and (not hashes or known["bytes"] != size):
        return {"bytes": size, "blake3": known["blake3"]}
    return {"bytes": size, "blake3": blake3().update_mmap(path).hexdigest()}


def _write_ids(file: Any, documents: Iterable[list[int]]) -> list[int]:
    """Write ids; the starts of documents. Raises: DataError `empty-data`."""
    starts, total = [], 0
    for ids in documents:
        if ids:
            starts.append(total)
            total += len(ids)
            for first in range(0, len(ids), _CHUNK_TOKENS):
                file.write(_as_bytes(ids[first : first + _CHUNK_TOKENS]))
    if not starts:
        raise DataError(Problem("empty-data", "the documents have no tokens", fix="name data with text"))
    return starts


def _as_bytes(ids: list[int]) -> bytes:
    return bytes(torch.tensor(ids, dtype=torch.int32).view(torch.uint8).tolist())


def _publish(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file beside `path`, to the disk, and rename it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            disk.flush(file.fileno())
        disk.replace(temporary, path)
    finally:
        disk.remove_file(temporary)
