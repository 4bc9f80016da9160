"""Checkpoints kept for later turns: on the device, in host memory, on disk, within budgets.

A request whose prompt begins with the tokens of a kept checkpoint starts from it. Identity is the
whole list of processed tokens; a hash only finds candidates. When a tier is over its budget the
least recently used checkpoint moves one down: device, host, disk, gone. Requests hold what they
run on themselves, so none of this touches one that is running.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import weakref
from collections.abc import Callable, Sequence

from absl import logging

from dflash_jax.io.store import StoreError
from dflash_jax.sessions.batch import Batch
from dflash_jax.sessions.checkpoint import Checkpoint, Record, RestoreError
from dflash_jax.sessions.image import expected_parts
from dflash_jax.sessions.pages import OutOfPagesError
from dflash_jax.sessions.request import Request

TIERS = ("device", "host", "disk")


@dataclasses.dataclass(frozen=True)
class ContextBudget:
    """How much the kept checkpoints may take.

    device_bytes: their pages and arrays; None is as much as requests leave free. Pages that
      several share count for each.
    host_bytes: their arrays in host memory.
    directory: where those go that the host has no room for; None drops them. Its checkpoints are
      found again by later engines of the same pair.
    disk_bytes: of the files there; None is no limit.
    """

    device_bytes: int | None = None
    host_bytes: int | None = 2**30
    directory: str | os.PathLike[str] | None = None
    disk_bytes: int | None = None

    def __post_init__(self):
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise ValueError(f"{name}: got {value!r}, expected bytes >= 0, or None")


@dataclasses.dataclass
class ContextStatistics:
    """Counts since the engine began, and what lies where now.

    lookups, hits: requests that looked for a prefix, and those that found one. tokens_saved:
    prompt tokens they did not process. demotions: moves one tier down. evictions: checkpoints
    dropped. entries, nbytes: by tier.
    """

    lookups: int = 0
    hits: int = 0
    tokens_saved: int = 0
    demotions: int = 0
    evictions: int = 0
    entries: dict[str, int] = dataclasses.field(default_factory=dict)
    nbytes: dict[str, int] = dataclasses.field(default_factory=dict)


class Contexts:
    """The checkpoints of an engine.

    Args:
      fingerprint: of the engine's pair; made when first needed.
      budget: of the kept ones; None keeps none.
      needed: tells which checkpoints waiting requests start from; those are not dropped.
    """

    def __init__(
        self,
        batch: Batch,
        fingerprint: Callable[[], dict[str, str]],
        budget: ContextBudget | None,
        needed: Callable[[], set[Checkpoint]],
    ):
        self._batch, self._fingerprint, self._needed = batch, fingerprint, needed
        self.budget = budget
        self._kept: dict[tuple[int, ...], Checkpoint] = {}  # by tokens, least recently used first
        self._lengths: dict[int, int] = {}  # how many kept ones have a frontier
        # Every checkpoint that may be on the device, kept or the user's own.
        self._known: weakref.WeakSet[Checkpoint] = weakref.WeakSet()
        self._clock = itertools.count()
        self._counts = ContextStatistics()
        if budget is not None and budget.directory is not None:
            self._find_saved(pathlib.Path(budget.directory))

    # --- making and using checkpoints ---

    def capture(self, row: int, frontier: int, request: Request) -> Checkpoint:
        """The sequence of a row now, on the device."""
        expected = expected_parts(self._batch, frontier)
        record = Record(
            frontier=frontier,
            prompt=tuple(request.prompt),
            tokens=tuple(request.tokens),
            rounds=tuple(request.rounds),
            fingerprint=self._fingerprint(),
            positions={name: part.positions for name, part in expected.items()},
            **{name: getattr(request, name) for name in COPIED},
        )
        checkpoint = Checkpoint(record, self._batch.capture(row, frontier))
        self._watch(checkpoint)
        return checkpoint

    def check(self, checkpoint: Checkpoint) -> None:
        """That it fits this engine; one on disk is read into host memory.

        Raises:
          RestoreError, StoreError: it does not, or it cannot be read; named part by part.
        """
        expected = expected_parts(self._batch, checkpoint.frontier)
        if checkpoint.tier == "disk":
            checkpoint.to_host()
        checkpoint.check(self._fingerprint(), expected)

    def promote(self, checkpoint: Checkpoint, make_room: Callable[[Checkpoint], bool]) -> None:
        """Moves a checkpoint to the device; see `Engine.promote`.

        Args:
          make_room: frees some pages, and is False where it cannot.
        """
        self.check(checkpoint)
        if checkpoint.tier == "device":
            return
        while True:
            try:
                checkpoint.to_image(self._batch.upload(checkpoint))
            except OutOfPagesError:
                if not make_room(checkpoint):
                    raise
            else:
                break
        self._watch(checkpoint)
        self.balance()

    def demote_one(self, but: Checkpoint | None = None) -> bool:
        """Moves the least recently used checkpoint of the device to the host.

        Args:
          but: this one only where there is no other.

        Returns:
          False where there is none, but for pinned ones.
        """
        there = [one for one in self._known if one.tier == "device" and not one.pinned]
        if not there:
            return False
        oldest = min(there, key=lambda one: (one is but, one.last_used))
        oldest.to_host()
        self._counts.demotions += 1
        self.balance()
        return True

    # --- kept ones ---

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint for prompts that begin with its tokens.

        Raises:
          ValueError: the engine has no budget for contexts.
          StoreError: it was on disk only, and has been dropped there.
        """
        if self.budget is None:
            raise ValueError("keep: the engine has no ContextBudget")
        if checkpoint.tier == "disk" and not checkpoint.path.exists():
            raise StoreError(f"{checkpoint.path}: the checkpoint's files are gone")
        older = self._kept.get(checkpoint.record.processed)
        if older is checkpoint:
            self.touch(checkpoint)
        else:
            self._drop(older)
            self._add(checkpoint)
        self.balance()

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forgets a kept checkpoint and its files; one that lies only there is lost."""
        self._drop(checkpoint)

    def longest_prefix(self, prompt: Sequence[int]) -> Checkpoint | None:
        """The kept checkpoint with the most tokens of those that the prompt begins with."""
        if self.budget is None:
            return None
        for length in sorted(self._lengths, reverse=True):
            found = self._kept.get(tuple(prompt[:length])) if length <= len(prompt) else None
            if found is None:
                continue
            try:
                self.check(found)
            except (StoreError, RestoreError) as error:
                logging.warning("a kept checkpoint is left out: %s", error)
                self._drop(found)
                continue
            self.touch(found)
            return found
        return None

    def count_lookup(self, found: Checkpoint | None) -> None:
        """Notes that a request started, and what `longest_prefix` found for it."""
        if self.budget is not None:
            self._counts.lookups += 1
        if found is not None:
            self._counts.hits += 1
            self._counts.tokens_saved += found.frontier

    def touch(self, checkpoint: Checkpoint) -> None:
        """It is the most recently used one from now on."""
        checkpoint.last_used = next(self._clock)
        if self._kept.get(checkpoint.record.processed) is checkpoint:
            self._kept[checkpoint.record.processed] = self._kept.pop(checkpoint.record.processed)
            if checkpoint.path is not None and checkpoint.path.exists():
                os.utime(checkpoint.path)

    @property
    def kept(self) -> list[Checkpoint]:
        """Least recently used first."""
        return list(self._kept.values())

    @property
    def statistics(self) -> ContextStatistics:
        return dataclasses.replace(
            self._counts,
            entries={tier: len(self._in(tier)) for tier in TIERS},
            nbytes={tier: self._bytes(tier) for tier in TIERS},
        )

    # --- tiers ---

    def _in(self, tier: str) -> list[Checkpoint]:
        return [one for one in self._kept.values() if one.tier == tier]

    def _bytes(self, tier: str) -> int:
        if tier == "disk":
            return sum(one.disk_bytes for one in self._kept.values())
        pages = sum(len(one.device_image.lease.pages) for one in self._in("device"))
        own = sum(one.nbytes for one in self._in(tier))
        return own + (pages * self._batch.page_bytes() if tier == "device" else 0)

    def balance(self) -> None:
        """Moves checkpoints down until every tier keeps its budget."""
        if self.budget is None:
            return
        self._shrink("device", self.budget.device_bytes, self._to_host)
        self._shrink("host", self.budget.host_bytes, self._to_disk)
        self._shrink("disk", self.budget.disk_bytes, self._evict)

    def _shrink(self, tier, budget, move: Callable[[Checkpoint], bool]) -> None:
        if budget is None:
            return
        members = self._kept.values() if tier == "disk" else self._in(tier)
        needed = self._needed()
        for one in list(members):
            if self._bytes(tier) <= budget:
                return
            if one.pinned or (one in needed and move != self._to_host):
                continue
            if tier == "disk" and not one.disk_bytes:
                continue
            if not move(one):
                return

    def _to_host(self, checkpoint: Checkpoint) -> bool:
        checkpoint.to_host()
        self._counts.demotions += 1
        return True

    def _to_disk(self, checkpoint: Checkpoint) -> bool:
        if self.budget.directory is None:
            return self._evict(checkpoint)
        try:
            checkpoint.to_disk(self._path_of(checkpoint))
        except OSError as error:
            logging.error("a checkpoint stays in memory: %s", error)
            return False
        self._counts.demotions += 1
        return True

    def _evict(self, checkpoint: Checkpoint) -> bool:
        self._drop(checkpoint)
        self._counts.evictions += 1
        return True

    def _path_of(self, checkpoint: Checkpoint) -> pathlib.Path:
        identity = json.dumps([checkpoint.record.fingerprint, checkpoint.record.processed])
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        return pathlib.Path(self.budget.directory).absolute() / name

    def _find_saved(self, directory: pathlib.Path) -> None:
        """Takes over what an earlier engine left in the directory."""
        folders = [path for path in directory.glob("*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime):
            try:
                found = Checkpoint.on_disk(folder)
            except (StoreError, RestoreError) as error:
                logging.warning("left out of the kept checkpoints: %s", error)
                continue
            if found.record.fingerprint != self._fingerprint():
                logging.info("%s: of another pair, left alone", folder)
                continue
            self._add(found)

    def _watch(self, checkpoint: Checkpoint) -> None:
        self._known.add(checkpoint)
        self.touch(checkpoint)

    def _add(self, checkpoint: Checkpoint) -> None:
        self._kept[checkpoint.record.processed] = checkpoint
        self._lengths[checkpoint.frontier] = self._lengths.get(checkpoint.frontier, 0) + 1
        self._watch(checkpoint)

    def _drop(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None or self._kept.get(checkpoint.record.processed) is not checkpoint:
            return
        del self._kept[checkpoint.record.processed]
        self._lengths[checkpoint.frontier] -= 1
        if not self._lengths[checkpoint.frontier]:
            del self._lengths[checkpoint.frontier]
        if checkpoint.path is not None and checkpoint.path == self._path_of(checkpoint):
            shutil.rmtree(checkpoint.path, ignore_errors=True)


# Fields of a request that a record has under the same name.
COPIED = (
    "seed",
    "sampling",
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "eos_ids",
    "ignore_eos",
    "draft_tokens",
)
