"""Named arrays on disk: as they were, or an error that names the part; never half of them."""

import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.io.store import StoreError, load_parts, load_record, save_parts

RECORD = {"text": "é€", "numbers": [1, 2, 2**40], "nested": {"a": None, "b": 0.1}}


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "kv.key": rng.normal(size=(2, 5, 1, 4)).astype(np.float32),
        "kv.value": rng.normal(size=(2, 5, 1, 4)).astype(ml_dtypes.bfloat16),
        "ring.value": rng.normal(size=(3, 8)).astype(np.float16),
        "big": np.asarray([16777217, -1], np.int32),  # not a float32
        "empty": np.zeros((0, 5, 2), np.float32),
        "nan": np.asarray([np.nan, -0.0, np.inf], np.float32),
    }


def assert_equal(parts, wanted) -> None:
    assert parts.keys() == wanted.keys()
    for name, array in wanted.items():
        assert parts[name].dtype == array.dtype and parts[name].shape == array.shape, name
        assert parts[name].tobytes() == array.tobytes(), name


def test_what_was_saved_is_what_is_loaded(tmp_path):
    save_parts(tmp_path / "a", arrays(), RECORD)
    parts, record = load_parts(tmp_path / "a")
    assert_equal(parts, arrays())
    assert record == RECORD == load_record(tmp_path / "a")


def test_nothing_is_overwritten_unasked(tmp_path):
    path = tmp_path / "a"
    save_parts(path, arrays(1), RECORD)
    with pytest.raises(StoreError, match="holds a checkpoint already"):
        save_parts(path, arrays(2), RECORD)
    assert_equal(load_parts(path)[0], arrays(1))
    save_parts(path, arrays(2), {"n": 2}, overwrite=True)
    assert_equal(load_parts(path)[0], arrays(2))
    assert len(list(path.iterdir())) == 1  # the old version is gone
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("...")
    with pytest.raises(StoreError, match="other: exists and is no checkpoint folder"):
        save_parts(tmp_path / "other", arrays(), RECORD, overwrite=True)
    assert (tmp_path / "other" / "thesis.tex").read_text() == "..."


def test_what_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(StoreError, match=f"{path}: expected a saved checkpoint, found none"):
            load_parts(path)


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_damage_anywhere_is_noticed(tmp_path):
    """Every file of a save: cut short, emptied, a bit changed at several places, removed."""
    path = tmp_path / "a"
    save_parts(path, arrays(), RECORD)
    noticed = 0
    for file in files_of(path):
        whole = file.read_bytes()
        places = sorted({0, len(whole) // 3, len(whole) // 2, max(0, len(whole) - 1)})
        flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in places if whole]
        for damaged in (whole[: len(whole) // 2], b"", None, *flipped):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            try:
                parts, record = load_parts(path)
            except StoreError as error:
                assert str(path) in str(error)
                noticed += 1
            else:  # a byte that nothing depends on
                assert_equal(parts, arrays())
                assert record == RECORD
            file.write_bytes(whole)
    assert noticed > 10
    assert_equal(load_parts(path)[0], arrays())


def test_a_damaged_part_is_named(tmp_path, monkeypatch):
    """Bytes that decompress to other numbers, or to a part too many or too few."""
    from dflash_jax.io import store

    path = tmp_path / "a"
    save_parts(path, arrays(), RECORD)
    whole = store._read(path / "00000001")
    changed = dict(whole) | {"big": whole["big"] + 1}
    fewer = {name: array for name, array in whole.items() if name != "kv.key"}
    for parts, message in (
        (changed, "part big is damaged"),
        (fewer, "part kv.key is missing"),
        (dict(whole) | {"more": whole["big"]}, "part more does not belong there"),
        (dict(whole) | {"nan": whole["nan"].astype(np.float64)}, "part nan is damaged"),
    ):
        monkeypatch.setattr(store, "_read", lambda folder, parts=parts: parts)
        with pytest.raises(StoreError, match=message):
            load_parts(path)


FULL = """
import resource, signal, sys
import numpy as np
from dflash_jax.io.store import load_parts, save_parts
parts = {"a": np.random.default_rng(0).random(2**18)}
save_parts(sys.argv[1], {"a": np.arange(5)}, {"n": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
try:
    save_parts(sys.argv[1], parts, {"n": 2}, overwrite=True)
except OSError as error:
    assert sys.argv[1] in str(error), error
    print("refused", load_parts(sys.argv[1])[1]["n"], parts["a"].size)
"""


def test_no_room_on_the_disk(tmp_path):
    """A limit on file sizes stands for a full disk: the error is said, nothing else is lost."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "a"], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["refused", "1", str(2**18)], done.stderr
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["00000001"]


def _save_for_ever(path, ready) -> None:
    """Child of the test below: versions 1, 2, 3, ... each a million numbers that say which."""
    number = 1
    while True:
        save_parts(path, {"a": np.full(2**18, number), "b": np.arange(9)}, {"n": number}, True)
        ready.set()
        number += 1


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save(tmp_path, caplog):
    """Fifty times, at moments drawn at random: a whole version is there, and half ones are told."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["orbax.checkpoint.v1", "dflash_jax.io.store", __name__])
    chance, unfinished = random.Random(0), 0
    path = tmp_path / "a"
    for _ in range(50):
        ready = context.Event()
        child = context.Process(target=_save_for_ever, args=(path, ready), daemon=True)
        child.start()
        assert ready.wait(120)
        time.sleep(chance.uniform(0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        partial = list(path.glob(".partial-*"))
        caplog.clear()
        parts, record = load_parts(path)
        assert record["n"] >= 1 and (parts["a"] == record["n"]).all()
        assert parts["b"].tolist() == list(range(9))
        unfinished += bool(partial)
        for entry in partial:
            assert f"{entry}: ignored, its save was not finished" in caplog.text
    assert unfinished > 5  # it was really killed in the middle
