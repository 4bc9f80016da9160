"""A checkpoint: one sequence at a frontier, whole, immutable, and to be continued at any time."""

import dataclasses
import os
import pathlib
from typing import Any

from dflash_jax.decoding.distribution import Sampling
from dflash_jax.decoding.result import Round
from dflash_jax.io.store import Parts, load_parts, load_record, save_parts
from dflash_jax.sessions.image import DeviceImage, PartSpec


class RestoreError(ValueError):
    """A checkpoint that does not belong to this engine, or is not whole: names the part."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint knows besides its arrays; plain values, as they stand in its file.

    frontier: F; positions `[0, F)` are processed and their features in the draft context.
    prompt: token ids of the prompt, all of them, processed or not.
    tokens: published token ids. The last one is the anchor x_F; there is none before the prompt's
      end.
    rounds: counts of each round so far.
    fingerprint: names of target, draft and dtype.
    positions: first and last + 1 of the positions that each part covers.
    others: the request's own, see `Request`.

    Text positions are the places in `prompt + tokens`; there is no other kind yet.
    """

    frontier: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    fingerprint: dict[str, str]
    positions: dict[str, tuple[int, int]]
    seed: int
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int
    stop: tuple[str, ...]
    eos_ids: tuple[int, ...]
    ignore_eos: bool
    draft_tokens: int

    def __post_init__(self):
        known = len(self.prompt) + len(self.tokens)
        low, high = (known - 1, known - 1) if self.tokens else (1, len(self.prompt))
        if not low <= self.frontier <= high:
            raise RestoreError(
                f"frontier: got {self.frontier}, but {len(self.prompt)} prompt tokens and "
                f"{len(self.tokens)} published ones need {low}..{high}"
            )

    @property
    def processed(self) -> tuple[int, ...]:
        """Tokens at positions `[0, F)`: with the fingerprint the identity of the state."""
        return (self.prompt + self.tokens)[: self.frontier]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Record":
        """The reverse of `to_json`.

        Raises:
          RestoreError: a field is missing or unknown.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        for name in sorted(names ^ values.keys()):
            raise RestoreError(
                f"record: field {name} is {'missing' if name in names else 'unknown'}"
            )
        values = values | {
            "sampling": Sampling(**values["sampling"]),
            "rounds": tuple(Round(**one) for one in values["rounds"]),
            "positions": {name: tuple(ends) for name, ends in values["positions"].items()},
        }
        for name in ("prompt", "tokens", "stop", "eos_ids"):
            values[name] = tuple(values[name])
        return cls(**values)


class Checkpoint:
    """Made by `Engine.checkpoint`; `Engine.restore` continues it, any number of times.

    Where it lies (`tier`) changes nothing about what it is: "device", "host" or "disk". One on
    the device goes to the host when its pages are needed for requests, unless it is `pinned`.
    """

    def __init__(
        self,
        record: Record,
        image: DeviceImage | Parts | None,
        path: str | os.PathLike[str] | None = None,
    ):
        self.record = record
        self.pinned = False
        self.last_used = 0
        self._image = image
        self._lies_at(path)

    @property
    def tier(self) -> str:
        if isinstance(self._image, DeviceImage):
            return "device"
        return "disk" if self._image is None else "host"

    @property
    def frontier(self) -> int:
        return self.record.frontier

    @property
    def device_image(self) -> DeviceImage | None:
        """Its pages and arrays, while it is on the device."""
        return self._image if self.tier == "device" else None

    def parts(self) -> Parts:
        """Its arrays by name, on the host; it stays where it is.

        Raises:
          StoreError: it lies on disk and cannot be read.
        """
        if self.tier == "device":
            return self._image.parts(self.frontier)
        if self.tier == "host":
            return self._image
        return load_parts(self.path)[0]

    @property
    def nbytes(self) -> int:
        """Bytes where it lies; on the device without its pages, which others may share."""
        if self.tier == "device":
            return self._image.nbytes
        return sum(array.nbytes for array in self._image.values()) if self.tier == "host" else 0

    def to_host(self) -> "Checkpoint":
        """Moves it to host memory, which frees its pages; returns itself."""
        self._image = self.parts()
        return self

    def to_image(self, image: DeviceImage) -> None:
        """Moves it to the device, where `image` is its copy."""
        self._image = image

    def to_disk(self, path: str | os.PathLike[str]) -> None:
        """Moves it to the folder `path`; without writing where it lies there already."""
        if self.path != pathlib.Path(path).absolute():
            self.save(path, overwrite=True)
            self._lies_at(path)
        self._image = None

    def _lies_at(self, path: str | os.PathLike[str] | None) -> None:
        """Notes its folder, None for none, and the bytes there, which never change."""
        self.path = None if path is None else pathlib.Path(path).absolute()
        files = () if self.path is None else self.path.rglob("*")
        self.disk_bytes = sum(file.stat().st_size for file in files if file.is_file())

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Writes it to the folder `path`, all or nothing; it stays where it is as well.

        Raises:
          StoreError: the folder holds something, and `overwrite` is False.
          OSError: it could not be written; nothing that was there or in memory is lost.
        """
        save_parts(path, self.parts(), self.record.to_json(), overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Reads a saved checkpoint into host memory.

        Raises:
          StoreError, RestoreError: ValueErrors that name the folder and the part.
        """
        parts, record = load_parts(path)
        return cls(_named(path, record), parts)

    @classmethod
    def on_disk(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """A saved checkpoint whose arrays stay on disk until they are needed."""
        return cls(_named(path, load_record(path)), None, path)

    def check(self, fingerprint: dict[str, str], expected: dict[str, PartSpec]) -> None:
        """That it fits an engine in every part.

        Raises:
          RestoreError: names the first part that does not.
        """
        for name, ours in fingerprint.items():
            if (theirs := self.record.fingerprint.get(name)) != ours:
                raise RestoreError(f"{name}: the checkpoint is of {theirs}, the engine has {ours}")
        for name in sorted(expected.keys() | self.record.positions.keys()):
            if name not in expected:
                raise RestoreError(f"{name}: part of the checkpoint, but the engine has none")
            covered, needed = self.record.positions.get(name), expected[name].positions
            if covered != needed:
                raise RestoreError(f"{name}: covers positions {covered}, expected {needed}")
        if self.tier == "device":
            return
        parts = self.parts()
        for name in sorted(expected.keys() | parts.keys()):
            if name not in parts or name not in expected:
                raise RestoreError(f"{name}: {'missing' if name in expected else 'unexpected'}")
            got = (parts[name].shape, parts[name].dtype.name)
            if got != (wanted := (expected[name].shape, expected[name].dtype)):
                raise RestoreError(
                    f"{name}: is {got[1]} {got[0]}, expected {wanted[1]} {wanted[0]}"
                )

    def __repr__(self):
        return f"Checkpoint({self.frontier} positions, on {self.tier})"


def _named(path, record) -> Record:
    try:
        return Record.from_json(record)
    except RestoreError as error:
        raise RestoreError(f"{os.fspath(path)}: {error}") from None
