"""Checkpoints: whole, verified, counted, and safe on a full disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fp8core.errors import CheckpointCorrupt, StorageFull
from fp8core.training.checkpoint import CheckpointStore, SavedCheckpoint, verify
from fp8core.training.tensor_files import read_tensors, write_tensors


def store_in(folder: Path, keep_last: int = 3, keep_best: int = 1) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last=keep_last, keep_best=keep_best)


def save(store: CheckpointStore, step: int, metric: float | None = None) -> SavedCheckpoint:
    tensors = {
        "model": {"w": torch.full((4, 4), float(step)), "b": torch.arange(3)},
        "engine": {},
    }
    return store.save(step, tensors=tensors, state={"step": step}, metric=metric)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.load_newest() == (None, [])
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "config.json").write_text("{}")
    weight = torch.randn(5, 3).bfloat16()
    store.save(
        7,
        tensors={"model": {"w": weight}},
        state={"step": 7, "rng": [1, None, 0.5]},
        metric=1.5,
        extra=extra,
    )
    loaded, skipped = store.load_newest()
    assert skipped == []
    assert loaded is not None
    assert loaded.state == {"step": 7, "rng": [1, None, 0.5]}
    found = dict(loaded.tensors("model"))
    assert found["w"].dtype == torch.bfloat16
    assert torch.equal(found["w"], weight)
    manifest = verify(loaded.path, 7)
    assert {entry["path"] for entry in manifest["files"]} == {
        "config.json",
        "model.safetensors",
        "state.json",
    }
    assert names(store) == ["step-00000007"]


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    saved = save(store_in(tmp_path), 1)
    for path in saved.path.rglob("*"):
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            assert path.suffix == ".safetensors"
            with safe_open(path, framework="pt") as reader:
                assert reader.metadata() == {"format": "pt"}


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_last=2, keep_best=1)
    for step, metric in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5), (6, None)]:
        save(store, step, metric)
        store.prune()
    assert names(store) == ["step-00000002", "step-00000005", "step-00000006"]
    best = store.best()
    assert best is not None
    assert (best.step, best.metric) == (2, 1.0)
    assert store.among_best(0.9)
    assert not store.among_best(1.0)
    assert not store_in(tmp_path, keep_best=0).among_best(0.1)
    assert store_in(tmp_path, keep_best=3).among_best(9.0)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": lambda path: flip_a_byte(path / "model.safetensors"),
    "cut": lambda path: os.truncate(path / "model.safetensors", 20),
    "lost": lambda path: (path / "state.json").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "torn manifest": lambda path: os.truncate(path / "manifest.json", 30),
    "empty": lambda path: [shutil.rmtree(path), path.mkdir()],
    "incomplete": lambda path: (path / "manifest.json").write_text('{"complete": false}'),
    "manifest of another step": lambda path: shutil.copy(
        path.parent / "step-00000001" / "manifest.json", path / "manifest.json"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_skipped_for_the_one_before(tmp_path: Path, damage: str) -> None:
    store = store_in(tmp_path)
    save(store, 1)
    DAMAGES[damage](save(store, 2).path)
    loaded, skipped = store.load_newest()
    assert loaded is not None
    assert loaded.step == 1
    assert [item.step for item in skipped] == [2]
    assert skipped[0].reason


def test_when_none_verifies_it_fails_and_does_not_start_over(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for step in (1, 2):
        flip_a_byte(save(store, step).path / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match=r"step-00000002: model\.safetensors is damaged"):
        store.load_newest()


def test_a_damaged_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    flip_a_byte(save(store, 1).path / "model.safetensors")
    save(store, 1)
    loaded, skipped = store.load_newest()
    assert loaded is not None
    assert skipped == []
    assert names(store) == ["step-00000001"]


def test_a_damaged_one_takes_no_good_one_s_place(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_last=1)
    save(store, 1)
    flip_a_byte(save(store, 3, metric=0.1).path / "model.safetensors")
    again = store_in(tmp_path, keep_last=1)
    assert again.load_newest()[0] is not None
    assert again.best() is None
    save(again, 2, metric=0.5)
    again.prune()
    assert [item.step for item in again.saved()] == [2]
    loaded, skipped = store_in(tmp_path, keep_last=1).load_newest()
    assert loaded is not None
    assert (loaded.step, [item.step for item in skipped]) == (2, [3])
    save(again, 4)
    assert [item.step for item in again.prune()] == [3]
    assert names(again) == ["step-00000002", "step-00000004"]


def test_what_cannot_be_deleted_yet_ends_no_run_and_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path, keep_last=1)
    for step in (1, 2):
        save(store, step)

    def busy(path: object, **options: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        assert [item.step for item in store.prune()] == [1]
    assert [item.step for item in store.saved()] == [2]
    assert len(names(store)) == 2
    store.prune()
    assert names(store) == ["step-00000002"]


def test_one_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    save(store, 1)
    rename = Path.rename
    calls = []

    def second_fails(path: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", second_fails)
        with pytest.raises(OSError, match="Input/output"):
            save(store, 1)
    assert names(store) == ["step-00000001"]
    assert store.load_newest()[1] == []


def test_only_what_the_manifest_names_is_read(tmp_path: Path) -> None:
    saved = save(store_in(tmp_path), 1)
    shutil.copy(saved.path / "model.safetensors", saved.path / "optimizer.safetensors")
    with pytest.raises(ValueError, match=r"optimizer\.safetensors is not named by manifest\.json"):
        verify(saved.path, 1)
    (saved.path / "optimizer.safetensors").unlink()
    manifest = json.loads((saved.path / "manifest.json").read_text())
    manifest["files"][0]["path"] = "../../outside"
    (saved.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="does not list its files as it should"):
        verify(saved.path, 1)


def test_leftovers_of_a_crash_are_cleared_and_never_loaded(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, 1)
    left = store.folder / ".partial-0123"
    shutil.copytree(store.folder / "step-00000001", left)
    assert [item.step for item in store.saved()] == [1]
    assert names(store_in(tmp_path)) == ["step-00000001"]


def test_large_files_are_sharded_with_an_index(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(64, 64) for i in range(5)}
    write_tensors(tmp_path, "model", tensors, shard_bytes=2 * 64 * 64 * 4)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 64 * 64 * 4
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    found = dict(read_tensors(tmp_path, "model"))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        dict(read_tensors(tmp_path, "model"))
    with pytest.raises(ValueError, match="missing"):
        dict(read_tensors(tmp_path, "engine"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(
    small_disk: Path,
) -> None:
    store = store_in(small_disk)
    save(store, 1)
    for bytes_wanted in (2_000_000, 995_000):  # too large for a tensor file; then for the rest
        with pytest.raises(StorageFull, match="no room left"):
            store.save(
                2,
                tensors={
                    "model": {"w": torch.zeros(bytes_wanted, dtype=torch.uint8)},
                    "optimizer": {"m": torch.zeros(100_000, dtype=torch.uint8)},
                },
                state={"step": 2},
                metric=None,
            )
        assert names(store) == ["step-00000001"]
    loaded, skipped = store.load_newest()
    assert loaded is not None
    assert loaded.step == 1
    assert skipped == []
