"""Parquet files and data sets of the datasets library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8core.data.arrow_tables import checksum
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


def test_names_that_are_not_utf8_are_damage(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "others": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"others", b"\xffthers"))
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


def naming(pattern: str) -> Callable[[Path], object]:
    split = f"- split: train\n    path: {pattern}"
    head = f"---\nconfigs:\n- config_name: default\n  data_files:\n  {split}\n---\n"
    return lambda folder: (folder / "README.md").write_text(head)


def _saved_naming_another(folder: Path) -> None:
    datasets.Dataset.from_dict({"text": ["own"]}).save_to_disk(str(folder))
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": "../../outside/saved/data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    "make",
    [
        naming("{outside}/secret.jsonl"),
        naming("../../outside/secret.jsonl"),
        naming("file://{outside}/secret.jsonl"),
        lambda folder: (folder / "a.jsonl").symlink_to("../../outside/secret.jsonl"),
        _saved_naming_another,
    ],
)
def test_a_data_set_below_the_root_names_no_file_elsewhere(
    tmp_path: Path, make_spec: Spec, make: Callable[[Path], object]
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "root/set"
    folder.mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.jsonl").write_text('{"text": "secret"}\n')
    datasets.Dataset.from_dict({"text": ["secret"]}).save_to_disk(str(outside / "saved"))
    make(folder)
    readme = folder / "README.md"
    if readme.exists():
        readme.write_text(readme.read_text().replace("{outside}", str(outside)))
    with pytest.raises(SpecRefused, match="outside the allowed roots"):
        open_hub(make_spec, tmp_path, "set", roots=[tmp_path / "root"])


def test_a_name_of_the_library_s_own_readers_opens_no_file_of_the_working_directory(
    tmp_path: Path, make_spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_jsonl_set(tmp_path / "work")
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(SpecRefused, match="not on the hub"):
        open_hub(make_spec, tmp_path, "json", roots=[tmp_path / "root"])


@pytest.mark.parametrize("kind", ["saved", "folder", "parquet"])
def test_the_fingerprint_follows_the_content(tmp_path: Path, make_spec: Spec, kind: str) -> None:
    found = []
    # Of equal length and between the smallest and the largest, which a Parquet file's end tells.
    for number, middle in enumerate(("mm", "nn", "mm")):
        table, folder = {"text": ["aa", middle, "zz"]}, tmp_path / f"{number}"
        folder.mkdir()
        if kind == "saved":
            datasets.Dataset.from_dict(table).save_to_disk(str(folder / "set"))
            source = open_hub(make_spec, folder, "set").source
        elif kind == "folder":
            lines = "".join(json.dumps({"text": text}) + "\n" for text in table["text"])
            (folder / "set").mkdir()
            (folder / "set/train.jsonl").write_text(lines)
            source = open_hub(make_spec, folder, "set").source
        else:
            pq.write_table(pa.table(table), folder / "a.parquet", compression="NONE")
            source = open_parquet(make_spec, folder / "a.parquet").source
        found.append(source.fingerprint)
    assert found[0] == found[2]
    assert found[0] != found[1]


def test_the_checksum_is_that_of_the_rows_however_they_are_cut() -> None:
    rows = [f"row {number}" for number in range(2500)]
    whole = pa.table(
        {
            "text": rows,
            "messages": [[{"role": "user", "content": row}] * (len(row) % 3) for row in rows],
            "label": pa.array(rows).dictionary_encode(),
        }
    )
    cut = pa.concat_tables([whole.slice(0, 7), whole.slice(7, 1800), whole.slice(1807)])
    again = pa.table(
        [pa.array(column.to_pylist(), column.type) for column in cut.columns], whole.schema
    )
    assert checksum(cut) == checksum(whole) == checksum(again)
    assert checksum(whole.slice(1)) != checksum(whole.slice(0, 2499)) != checksum(whole)


@pytest.mark.parametrize("source", ["parquet", "hub"])
def test_one_column_may_serve_two_fields(tmp_path: Path, make_spec: Spec, source: str) -> None:
    columns = {"prompt": "text", "completion": "text"}
    options: dict[str, Any] = {"format": "prompt_completion", "columns": columns}
    if source == "parquet":
        pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
        opened = open_parquet(make_spec, tmp_path / "a.parquet", **options)
    else:
        save_jsonl_set(tmp_path / "set")
        opened = open_hub(make_spec, tmp_path, "set", **options)
    fields = opened.source.records([0])[0].fields
    assert fields["prompt"] == fields["completion"] != ""


def test_two_columns_of_one_name_are_refused(tmp_path: Path, make_spec: Spec) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataInvalid, match="there are 2 columns 'text'"):
        open_parquet(make_spec, tmp_path / "a.parquet")
