"""Named arrays on disk, all or nothing: Orbax writes them, digests prove them.

A saved folder holds numbered versions. A new one is written beside the old one, under a name that
says that it is not finished, and takes its number when it is whole; only then the old one goes. So
whatever interrupts a save, the newest whole version stays what `load_parts` reads.
"""

import hashlib
import json
import os
import pathlib
import shutil
import warnings
from typing import Any

import numpy as np
from absl import logging

FORMAT = 1
_PARTIAL = ".partial-"

Parts = dict[str, np.ndarray]


class StoreError(ValueError):
    """A folder that cannot be read or may not be written to: names it, and the part."""


def save_parts(
    path: str | os.PathLike[str], parts: Parts, record: dict[str, Any], overwrite: bool = False
) -> None:
    """Writes arrays and a JSON record to the folder `path`, whose only writer this is.

    Args:
      parts: arrays by name. record: what JSON can hold.
      overwrite: replaces what the folder holds, which is lost only once the new one is whole.

    Raises:
      StoreError: the folder holds something else, or a checkpoint while `overwrite` is False.
      OSError: it could not be written; what was there before is still there.
    """
    path = pathlib.Path(path).absolute()
    if path.exists() and not (path.is_dir() and all(map(_ours, path.iterdir()))):
        raise StoreError(f"{path}: exists and is no checkpoint folder")
    old = _versions(path)
    if old and not overwrite:
        raise StoreError(f"{path}: holds a checkpoint already (overwrite=True replaces it)")
    description = {
        "format": FORMAT,
        "record": record,
        "parts": {name: _describe(array) for name, array in parts.items()},
    }
    description["digest"] = _digest_of(description)
    number = max(old, default=0) + 1
    partial = path / f"{_PARTIAL}{number:08d}-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write(partial, parts, description)
        os.replace(partial, path / f"{number:08d}")
    except Exception as error:
        _clear(path.glob(f"{partial.name}*"))  # Orbax appends to the name while it writes
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        raise OSError(f"{path}: could not be saved: {_brief(error)}") from error
    _clear(path / f"{version:08d}" for version in old)
    _clear(path.glob(f"{_PARTIAL}*"))  # what interrupted saves left: a folder has one writer


def load_parts(path: str | os.PathLike[str]) -> tuple[Parts, dict[str, Any]]:
    """Reads what `save_parts` wrote: arrays as they were, and the record.

    Raises:
      StoreError: nothing whole is there, or a part is damaged, missing or one too many.
    """
    folder, description = _newest(path)
    described = description["parts"]
    names = [name for name, about in described.items() if 0 not in about["shape"]]
    try:
        parts = _read(folder) if names else {}
    except Exception as error:  # Orbax and TensorStore have many kinds of their own
        raise StoreError(f"{folder}: arrays cannot be read: {_brief(error)}") from error
    for name in names:
        if name not in parts:
            raise StoreError(f"{folder}: part {name} is missing")
        if _describe(parts[name]) != described[name]:
            raise StoreError(f"{folder}: part {name} is damaged: its digest is another one")
    for name in parts:
        if name not in described:
            raise StoreError(f"{folder}: part {name} does not belong there")
    for name, about in described.items():
        if name not in parts:  # Orbax stores no array without elements
            parts[name] = np.zeros(about["shape"], about["dtype"])
    return parts, description["record"]


def load_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record alone; the arrays are not read."""
    return _newest(path)[1]["record"]


def _newest(path) -> tuple[pathlib.Path, dict[str, Any]]:
    """Folder and description of the newest version."""
    path = pathlib.Path(path).absolute()
    for entry in sorted(path.glob(f"{_PARTIAL}*")):
        logging.warning("%s: ignored, its save was not finished", entry)
    versions = _versions(path)
    if not versions:
        raise StoreError(f"{path}: expected a saved checkpoint, found none")
    folder = path / f"{versions[-1]:08d}"
    try:
        description = json.loads(json.dumps(_metadata(folder)))
        digest = description.pop("digest")
        sound = digest == _digest_of(description)
    except Exception as error:
        raise StoreError(f"{folder}: the record cannot be read: {_brief(error)}") from error
    if not sound:
        raise StoreError(f"{folder}: the record is damaged: its digest is another one")
    if description["format"] != FORMAT:
        raise StoreError(f"{folder}: format {description['format']}, expected {FORMAT}")
    return folder, description


def _clear(folders) -> None:
    for folder in list(folders):
        shutil.rmtree(folder, ignore_errors=True)


def _ours(entry: pathlib.Path) -> bool:
    return entry.is_dir() and (entry.name.isdigit() or entry.name.startswith(_PARTIAL))


def _versions(path: pathlib.Path) -> list[int]:
    found = path.iterdir() if path.is_dir() else ()
    return sorted(int(entry.name) for entry in found if entry.name.isdigit())


def _describe(array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    digest = hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest}


def _digest_of(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _brief(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else 'no message'}"


def _write(folder: pathlib.Path, parts: Parts, description: dict[str, Any]) -> None:
    from orbax.checkpoint import v1 as ocp

    parts = {name: array for name, array in parts.items() if array.size}
    with warnings.catch_warnings():
        # Newer versions rename the functions; the old names are those that all have.
        warnings.simplefilter("ignore", DeprecationWarning)
        ocp.save_pytree(folder, parts, custom_metadata=description)


def _read(folder: pathlib.Path) -> Parts:
    from orbax.checkpoint import v1 as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return ocp.load_pytree(folder)


def _metadata(folder: pathlib.Path) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return ocp.pytree_metadata(folder).custom_metadata
