"""Parquet files and data sets of the datasets library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8core.data.order import EpochOrder
from fp8core.data.parquet import ParquetSource
from fp8core.data.records import Fields, RecordChecker
from fp8core.data.sources import open_source
from fp8core.errors import DataInvalid, SpecRefused

Spec = Callable[..., Any]
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def open_parquet(make_spec: Spec, path: Path, format: str = "text", **options: Any) -> Any:
    data = {"source": "parquet", "path": str(path), "format": format} | options
    task = "sequence_classification" if format == "labelled" else "causal_lm"
    return open_source(make_spec(data=data, task=task).data)


def test_rows_are_read_at_random_from_several_row_groups(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "a.parquet"
    rows = [f"text {index}" for index in range(1000)]
    pq.write_table(pa.table({"text": rows, "other": range(1000)}), path, row_group_size=64)
    source = open_parquet(make_spec, path).source
    assert len(source) == 1000
    assert len(source.groups.starts) == 16
    wanted = [999, 0, 64, 63, 500]
    assert [r.fields for r in source.records(wanted)] == [{"text": rows[i]} for i in wanted]
    assert source.where(500) == f"{path}, row 501"


@pytest.mark.parametrize(
    ("table", "format", "message"),
    [
        ({"text": [1, 2]}, "text", "column 'text' has the type int64, but this field is a string"),
        ({"text": [[b"a"]]}, "text", "column 'text' has the type list"),
        ({"body": ["a"]}, "text", "no column 'text' (columns: 'body')"),
        ({"text": ["a", None]}, "text", "a.parquet, row 2: 'text' is null"),
        ({"text": ["a"], "label": [0.5]}, "labelled", "labels are strings or whole numbers"),
        ({"text": ["a", "b"], "label": [1, None]}, "labelled", "row 2: 'label' is null"),
        ({"messages": ["a"]}, "chat", "messages are a list of {role: string, content: string}"),
        ({"messages": [[{"role": "user"}]]}, "chat", "messages are a list of"),
        ({"messages": [MESSAGES, MESSAGES[:1]]}, "chat", "row 2: 'messages' has no message of the"),
        (
            {"prompt": ["a", "a"], "completion": ["b", ""]},
            "prompt_completion",
            "row 2",
        ),
        ({"text": pa.array([], pa.string())}, "text", "the file has no rows"),
    ],
)
def test_bad_columns_and_rows_are_named(
    tmp_path: Path, make_spec: Spec, table: dict[str, Any], format: str, message: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), path)
    with pytest.raises(DataInvalid) as raised:
        open_parquet(make_spec, path, format)
    assert message in raised.value.message
    assert str(path) in raised.value.message


def test_row_numbers_go_on_over_row_groups(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [*["a"] * 9, None]})
    pq.write_table(table, path, row_group_size=4)
    with pytest.raises(DataInvalid, match="row 10: 'text' is null"):
        open_parquet(make_spec, path)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "a.parquet"
    column = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), path)
    with pytest.raises(DataInvalid, match=r"'text' is damaged: .*UTF8"):
        open_parquet(make_spec, path)


@pytest.mark.parametrize("data", [b"", b"PAR1 not really PAR1", b"text\n" * 100])
def test_files_that_are_no_parquet(tmp_path: Path, make_spec: Spec, data: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    with pytest.raises(DataInvalid, match=r"a\.parquet: (the file is|not a readable)"):
        open_parquet(make_spec, path)


def test_damaged_pages_are_noticed(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {i}" * 50 for i in range(1000)]}), path)
    data = bytearray(path.read_bytes())
    data[100:4000] = b"\x00" * 3900
    path.write_bytes(data)
    with pytest.raises(DataInvalid, match=r"a\.parquet"):
        open_parquet(make_spec, path)


@pytest.mark.parametrize(
    "changed",
    [{"text": ["other"] * 8}, {"text": list(range(9))}, {"x": ["a"] * 9}],
    ids=["fewer rows", "another type", "another column"],
)
def test_a_file_that_changes_under_training_is_noticed(
    tmp_path: Path, make_spec: Spec, changed: dict[str, Any]
) -> None:
    for name in "ab":
        pq.write_table(pa.table({"text": ["a"] * 9}), tmp_path / f"{name}.parquet")
    source = open_parquet(make_spec, tmp_path).source
    # The other file in use is what closes the first.
    source.records([17])
    pq.write_table(pa.table(changed), tmp_path / "a.parquet")
    with pytest.raises(DataInvalid, match=r"a\.parquet: the file changed since training began"):
        source.records([8])


def test_dictionary_columns_and_integer_labels(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "a.parquet"
    text = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"text": text, "label": pa.array([10, 9, 10], pa.int8())}), path)
    opened = open_parquet(make_spec, path, "labelled")
    assert opened.checker.integer_labels
    assert opened.checker.label_names == ["10", "9"]
    assert opened.source.records([1])[0].fields == {"text": "b", "label": 9}


def test_each_row_group_is_read_about_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    rows = [f"{index:06d}" * 20 for index in range(2000)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=50)
    checker = RecordChecker(Fields("text", {"text": "text"}))
    # A window of 5 of the 40 groups.
    source = ParquetSource([(path, "a")], checker, window_bytes=5 * 50 * 124)
    reads: list[int] = []
    plain = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, **options: Any) -> Any:
        reads.append(group)
        return plain(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    order = EpochOrder(np.arange(2000, dtype=np.uint32), seed=0, shuffle=True, groups=source.groups)
    found = [
        record.fields["text"]
        for position in range(0, 2000, 8)
        for record in source.records(order.slice(position, 8))
    ]
    assert sorted(found) == rows
    assert len(reads) == 40
    assert sum(table.nbytes for table in source._cache.values()) <= 2 * 5 * 50 * 124


def save_jsonl_set(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "test.jsonl").write_text('{"text": "three"}\n')


@pytest.fixture(autouse=True)
def _datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def open_hub(make_spec: Spec, base: Path, id: str, format: str = "text", **options: Any) -> Any:
    roots = options.pop("roots", ())
    data = {"source": "huggingface", "id": id, "format": format} | options
    task = "sequence_classification" if format == "labelled" else "causal_lm"
    return open_source(make_spec(data=data, task=task).data, roots=roots, base_folder=base)


def test_a_folder_of_data_files_is_a_data_set(tmp_path: Path, make_spec: Spec) -> None:
    save_jsonl_set(tmp_path / "owner" / "set")
    source = open_hub(make_spec, tmp_path, "owner/set").source
    assert [record.fields["text"] for record in source.records([1, 0])] == ["two", "one"]
    assert source.where(1) == "data set 'owner/set', split 'train', row 2"
    held = open_hub(make_spec, tmp_path, "owner/set", split="test").source
    assert [record.fields["text"] for record in held.records([0])] == ["three"]


def test_a_saved_data_set_with_named_classes(tmp_path: Path, make_spec: Spec) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "saved"))
    opened = open_hub(make_spec, tmp_path, "saved", "labelled")
    assert opened.source.records([0])[0].fields == {"text": "a", "label": "good"}
    assert opened.checker.label_names == ["good", "bad"]
    with pytest.raises(DataInvalid, match=r"no split 'test' \(splits: train\)"):
        open_hub(make_spec, tmp_path, "saved", "labelled", split="test")


def test_chats_of_a_data_set(tmp_path: Path, make_spec: Spec) -> None:
    data = datasets.Dataset.from_dict({"messages": [MESSAGES, MESSAGES]})
    data.save_to_disk(str(tmp_path / "saved"))
    source = open_hub(make_spec, tmp_path, "saved", "chat").source
    assert source.records([1])[0].fields == {"messages": MESSAGES}


def test_bad_rows_of_a_data_set_are_named(tmp_path: Path, make_spec: Spec) -> None:
    data = datasets.Dataset.from_dict({"text": ["a"] * 1500 + [None]})
    data.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataInvalid, match="row 1501: 'text' is null"):
        open_hub(make_spec, tmp_path, "saved")
    numbers = datasets.Dataset.from_dict({"text": [1, 2]})
    numbers.save_to_disk(str(tmp_path / "numbers"))
    with pytest.raises(DataInvalid, match="has the type int64"):
        open_hub(make_spec, tmp_path, "numbers")


def test_what_is_not_there_is_refused_offline(tmp_path: Path, make_spec: Spec) -> None:
    with pytest.raises(DataInvalid, match=r"'no/where'.* cannot be loaded") as raised:
        open_hub(make_spec, tmp_path, "no/where")
    assert raised.value.pointer == "/data/id"


def test_a_folder_of_the_working_directory_is_no_way_around_the_roots(
    tmp_path: Path, make_spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_jsonl_set(tmp_path / "outside" / "secret")
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path / "outside")
    with pytest.raises(SpecRefused, match="outside the roots"):
        open_hub(make_spec, tmp_path, "secret", roots=[tmp_path / "root"])
