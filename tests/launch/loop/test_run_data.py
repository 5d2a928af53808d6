"""Data of a run: bytes and tokens of files, JSON lines, functions; positions; what is not data is refused by file and
line."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from parallelize.base.errors import DataError, LaunchError
from parallelize.launch.config.run_config import DataSection, OptimizerSection, RunConfig, ScheduleSection
from parallelize.launch.loop import token_files
from parallelize.launch.loop.memory_report import object_of
from parallelize.launch.loop.run_data import RunData, argument_names, collate_or_error, data_of, known_values
from parallelize.launch.loop.run_optimizer import factor_of, optimizer_class


def files(tmp_path, *texts: str) -> list[str]:
    paths = []
    for number, text in enumerate(texts):
        paths.append(str(tmp_path / f"{number}.txt"))
        (tmp_path / f"{number}.txt").write_text(text)
    return paths


def test_bytes_of_files_are_documents(tmp_path):
    ids, starts = token_files.bytes_of_files(files(tmp_path, "abc", "", "defgh"))
    assert len(ids) == 8 and starts.tolist() == [0, 3]
    assert bytes(ids[1:6].tolist()) == b"bcdef" and bytes(ids[5:99].tolist()) == b"fgh"


def test_lines_are_tokenized_once_and_found_again(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("ab", "", "cde")) + "\n\n")
    config = RunConfig(data=DataSection(jsonl=(str(path),), cache=str(tmp_path / "cache"), sequence=2, global_batch=1))
    waits = []
    for _ in range(2):
        data = data_of(config, None, None, "cpu", waits.append)
        assert data.batches.num_samples == 2 and waits[-1] is None
    assert len(list((tmp_path / "cache").iterdir())) == 3  # ids, starts, sizes and hashes, of one reading
    batch = data.next()
    assert batch["input_ids"].shape == (1, 2) and {"targets", "position_ids"} <= batch.keys()


def raised_at_once(error):
    if error is not None:
        raise error


DAMAGES = {
    "none": lambda ids, starts: None,
    "truncated": lambda ids, starts: ids.write_bytes(ids.read_bytes()[:42]),
    "zeroed": lambda ids, starts: ids.write_bytes(bytes(ids.stat().st_size)),
    "empty": lambda ids, starts: ids.write_bytes(b""),
    "absent": lambda ids, starts: ids.unlink(),
    "ids beyond the vocabulary": lambda ids, starts: ids.write_bytes(b"\xff\xff\xff\x7f" * (ids.stat().st_size // 4)),
    "no starts": lambda ids, starts: starts.unlink(),
    "starts beyond the end": lambda ids, starts: starts.write_bytes((10**12).to_bytes(8, "little")),
    "of an earlier version": lambda ids, starts: ids.with_suffix(".json").unlink(),
    "no JSON": lambda ids, starts: ids.with_suffix(".json").write_text("[" * 9999),
    "no description": lambda ids, starts: ids.with_suffix(".json").write_text('{"files": [1]}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    """By the rank that writes. The sizes are compared on the others."""
    readings = []

    def documents():
        readings.append(1)
        return ["hello world " * 5, "again"]

    def read(writes=True):
        return token_files.cached_tokens(tmp_path, "x", documents, "", writes, raised_at_once)

    ids, starts = read()
    expected = ids.tolist(), starts.tolist()
    DAMAGES[damage](tmp_path / "tokens-x.bin", tmp_path / "tokens-x.starts")
    if damage not in ("none", "zeroed", "ids beyond the vocabulary", "starts beyond the end"):
        with pytest.raises(DataError, match="unreadable-data: the tokens have another size here"):
            read(writes=False)
    again = read()
    assert (again[0].tolist(), again[1].tolist()) == expected and expected[1] == [0, 60]
    assert len(readings) == (1 if damage == "none" else 2)
    assert len(list(tmp_path.iterdir())) == 3 and read(writes=False)[0].tolist() == expected[0]


def test_a_cache_is_of_the_files_of_its_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    before = token_files.digest_of_sources([], str(tmp_path), "text")
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    assert token_files.digest_of_sources([], str(tmp_path), "text") != before
    assert token_files.digest_of_sources([], "", "text") != token_files.digest_of_sources([], "", "body")


def test_what_cannot_be_tokenized_is_agreed_on(tmp_path):
    """The ranks that wait for the file get the error of the one that writes it."""

    def unreadable():
        yield (tmp_path / "latin.txt").read_text(encoding="utf-8")

    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    for documents, tokenizer, slug in (
        (unreadable, "", "unreadable-data"),
        (lambda: ["a"], str(tmp_path / "absent"), "no-tokenizer"),
        (lambda: token_files.documents_of_lines([str(tmp_path / "latin.txt")], "text"), "", "unreadable-data"),
    ):
        with pytest.raises(DataError, match=f"{slug}: "):
            token_files.cached_tokens(tmp_path / "cache", "x", documents, tokenizer, True, raised_at_once)


def test_no_code_of_a_tokenizer_runs(tmp_path, monkeypatch):
    """Nor is it asked for at the terminal of a rank."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}})
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["evil.Own", None]}})
    )
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').write('')\nclass Config: pass\nclass Own: pass"
    )
    with pytest.raises(DataError, match=r"needs code of its own .`auto_map`., which is not run") as refused:
        token_files.encoder_of(str(tmp_path))
    assert refused.value.slugs == ("no-tokenizer",) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("line", "what"), [("{", "no JSON"), ('{"body": 1}', "no text under 'text', but body"), ("3", "int")]
)
def test_a_line_that_is_no_document_is_named(tmp_path, line, what):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match="bad-line") as raised:
        list(token_files.documents_of_lines([str(path)], "text"))
    assert f"{path}:2" in str(raised.value) and what in str(raised.value)


def test_files_without_tokens_are_refused(tmp_path):
    for read in (
        lambda: token_files.bytes_of_files(files(tmp_path, "")),
        lambda: token_files.tokenized([""], token_files.encoder_of("")),
        lambda: token_files.cached_tokens(tmp_path, "x", lambda: [""], "", True, raised_at_once),
    ):
        with pytest.raises(DataError, match="empty-data"):
            read()


def rows(count=6):
    return [
        {"input_ids": torch.tensor([n, n]), "targets": torch.tensor([n, n]), "other": torch.tensor([0, 0])}
        for n in range(count)
    ]


def test_batches_go_on_over_epochs_and_from_a_saved_position():
    section = DataSection(global_batch=2, seed=1)
    data = RunData(rows(), section, None, "cpu", {"input_ids": "input_ids", "targets": "targets"})
    seen = [data.next()["input_ids"][:, 0].tolist() for _ in range(5)]
    assert sorted(number for batch in seen[:3] for number in batch) == list(range(6)) and "other" not in data.next()
    again = RunData(rows(), section, None, "cpu", None)
    for _ in range(2):
        again.next()
    state = again.batches.state_dict()
    resumed = RunData(rows(), section, None, "cpu", None)
    resumed.batches.load_state_dict(state)
    resumed.restart()
    assert [resumed.next()["input_ids"][:, 0].tolist() for _ in range(3)] == seen[2:]


def test_functions_give_texts_rows_or_a_stream():
    section = DataSection(function=f"{__name__}:rows", args={"count": 4}, global_batch=2)
    assert len(data_of(RunConfig(data=section), None, None, "cpu", raised_at_once).next()["input_ids"]) == 2
    iterated = RunData([lambda epoch: rows(4)], DataSection(global_batch=2), None, "cpu", None)
    assert iterated.next()["input_ids"].shape == (2, 2)
    empty = RunData(lambda epoch: [], DataSection(global_batch=2), None, "cpu", None)
    with pytest.raises(DataError, match="no-samples"):
        empty.next()


def nothing():
    return None


def test_functions_that_give_no_data_are_refused():
    config = RunConfig(data=DataSection(function=f"{__name__}:nothing", global_batch=2))
    with pytest.raises(DataError, match=r"no-data: .*:nothing returns a NoneType"):
        data_of(config, None, None, "cpu", raised_at_once)


def test_names_that_are_not_there_are_refused():
    assert object_of("AdamW", "torch.optim") is torch.optim.AdamW
    for text in ("no_such_module:name", f"{__name__}:absent"):
        with pytest.raises(LaunchError, match="no-such-object"):
            object_of(text)
    with pytest.raises(LaunchError, match="bad-optimizer"):
        optimizer_class(OptimizerSection(name="torch:nn"))


def test_models_get_the_arguments_that_they_name():
    class One(torch.nn.Module):
        def forward(self, input_ids): ...

    class Any(torch.nn.Module):
        def forward(self, input_ids, position_ids=None, **kwargs): ...

    class Own(torch.nn.Module):
        def forward(self, idx, mask=None): ...

    of_step = {"targets", "labels", "row_lengths"}
    assert {*argument_names(One())} == {"input_ids", *of_step} and argument_names(Any()) is None
    row = {"input_ids": IDS, "targets": IDS + 1, "position_ids": IDS}
    assert known_values(row, argument_names(One())).keys() == {"input_ids", "targets"}
    known = known_values(row, argument_names(Own()))
    assert known.keys() == {"idx", "targets"} and known["idx"] is IDS
    known = known_values({**row, "idx": IDS + 2}, argument_names(Own()))
    assert known.keys() == {"idx", "targets"} and torch.equal(known["idx"], IDS + 2)


def test_the_learning_rate_warms_up_and_decays():
    cosine = factor_of(ScheduleSection(warmup_steps=2, decay="cosine", final_fraction=0.1), 12)
    assert [round(cosine(step), 3) for step in (0, 1, 2, 11, 50)] == [0.5, 1.0, 1.0, 0.1, 0.1]
    assert factor_of(ScheduleSection(decay="linear", final_fraction=0.0), 11)(5) == 0.5
    assert factor_of(ScheduleSection(), 10)(9) == 1.0


IDS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("values", "slug", "text"),
    [
        ([1, 2], "bad-row", "row 0 of a batch is a int, and no mapping"),
        ([IDS, IDS], "bad-row", "row 0 of a batch is a Tensor"),
        ([{}, {}], "bad-row", "row 0 of a batch is a dict"),
        ([{"input_ids": IDS}, {"input_ids": IDS, "more": IDS}], "unequal-rows", "more"),
        ([{"input_ids": object()}] * 2, "bad-row", "TypeError"),
        ([{"input_ids": "text"}] * 2, "bad-row", "input_ids of a row is no tensor"),
        ([{"input_ids": ["a", "b"]}] * 2, "bad-row", "rows make no batch"),
        ([{"input_ids": IDS.float()}] * 2, "bad-row", "torch.float32"),
        ([{"ids": IDS}] * 2, "bad-row", "rows have ids, and the model takes input_ids"),
    ],
)
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_rows_that_make_no_batch_are_named(values, slug, text, kind):
    section = DataSection(global_batch=2, shuffle=False)
    data = RunData(values if kind == "map" else iter_of(values), section, None, "cpu", {"input_ids": "input_ids"})
    with pytest.raises(DataError, match=slug) as raised:
        data.next()
    assert text in str(raised.value)


def iter_of(values):
    return lambda epoch: iter(values)


def test_what_is_wrong_with_rows_comes_whole_from_a_worker():
    wrong = pickle.loads(pickle.dumps(collate_or_error([1, 2])))
    assert isinstance(wrong, DataError) and wrong.slugs == ("bad-row",)


def test_what_a_function_returns_is_checked():
    for name, slug in (("numbers_after_text", "bad-row"), ("mapping", "no-data")):
        config = RunConfig(data=DataSection(function=f"{__name__}:{name}"))
        with pytest.raises(DataError, match=slug):
            data_of(config, None, None, "cpu", raised_at_once)


def numbers_after_text():
    return ["a", 1]


def mapping():
    return {"a": 1}


# -- balance -----------------------------------------------------------------------------------------------------------


def uneven_documents(count: int = 24):
    return [{"input_ids": list(range(3, 3 + length))} for length in [40, *range(2, 1 + count)]]


@pytest.mark.parametrize(("balance", "joined"), [("rows", False), ("joined", True), ("lockstep", True)])
def test_documents_are_dealt_by_what_they_cost(balance, joined):
    section = DataSection(global_batch=24, shuffle=False, balance=balance, pair_cost=0.1)
    data = RunData(uneven_documents(), section, None, "cpu", None, num_microbatches=4)
    batch = data.next()
    assert batch["input_ids"].shape[0] == (4 if joined else 24)
    assert int(batch["row_lengths"].sum()) == sum(len(d["input_ids"]) for d in uneven_documents())
    assert data.tokens_per_step == int(batch["row_lengths"].sum())
    assert (data.batches.joined, data.batches.lockstep) == (joined, balance == "lockstep")
    assert data.batches.costs[0] == 40 + 0.1 * 1600


def test_what_a_model_takes_has_the_lengths_of_rows():
    class Model(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    section = DataSection(global_batch=24, balance="joined")
    data = RunData(uneven_documents(), section, None, "cpu", argument_names(Model()), num_microbatches=2)
    assert set(data.next()) == {"input_ids", "targets", "row_lengths"}


def test_iterated_data_cannot_be_dealt():
    with pytest.raises(DataError) as caught:
        RunData(lambda epoch: uneven_documents(), DataSection(balance="joined"), None, "cpu", None)
    assert caught.value.slugs == ("bad-costs",)
