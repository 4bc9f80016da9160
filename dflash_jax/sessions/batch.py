"""The rows on the device: state, controls, pages, programs, and what crosses to the host."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.distribution import Sampling, make_controls
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.sessions import rows
from dflash_jax.sessions.checkpoint import Checkpoint
from dflash_jax.sessions.image import STORES, DeviceImage, dense_from
from dflash_jax.sessions.pages import Lease, PageAllocator
from dflash_jax.sessions.programs import Programs, Report, Speculated
from dflash_jax.sessions.request import Request
from dflash_jax.state.counts import TokenCounts
from dflash_jax.state.paged import PagedKV, Pages
from dflash_jax.state.sequence import init_sequences


class Batch:
    """B rows that prefill one at a time and decode together.

    A round is `speculate`, whose result is the round's only egress, and `commit`. What goes the
    other way is N of each row, and P where it changed.

    Args:
      rows: B. capacity: tokens per row. chunk: tokens per prefill. stop_columns: stop ids per row.
      page_size: positions of a page. pages: of every paged store, for rows and checkpoints.
      report: told about each compilation.
    """

    def __init__(
        self,
        spec: Spec,
        weights: Weights,
        rows: int,
        capacity: int,
        chunk: int,
        stop_columns: int,
        page_size: int,
        pages: int,
        report: Report,
    ):
        self.spec, self.rows, self.chunk = spec, rows, chunk
        self._stop_columns = stop_columns
        self.state = init_sequences(
            spec.target,
            spec.draft,
            jnp.zeros(rows, jnp.uint32),
            capacity,
            spec.width,
            spec.dtype,
            page_size,
            pages,
            context_dtype=spec.context_dtype,
        )
        self.controls = make_controls([Sampling()] * rows, width=stop_columns)
        self.allocator = PageAllocator(pages, page_size)
        self._leases: list[Lease | None] = [None] * rows
        self._programs = Programs(spec, weights, self.state, self.controls, chunk, report)
        # What a row holds before any token.
        self.blank = jax.tree.map(jnp.zeros_like, self._programs.dense_of(self.state, np.int32(0)))
        self._table_size = self.state.target.kv.block_table.shape[1]
        self._planned = np.full(rows, -1, np.int32)
        self._planned_on_device = jax.device_put(self._planned)
        self._scratch: Speculated | None = None

    @property
    def pools(self) -> tuple[PagedKV, ...]:
        """The paged stores, the target's first."""
        return rows.pools(self.state)

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory of the largest program."""
        return self._programs.workspace

    def page_bytes(self) -> int:
        """Bytes of one page in all paged stores together."""
        pools = self.pools
        return sum((pool.key.nbytes + pool.value.nbytes) // pool.key.shape[1] for pool in pools)

    def admit(self, row: int, request: Request, origin: Checkpoint | None = None) -> None:
        """Gives a row to a request, with pages for its whole growth.

        Args:
          origin: where it starts from, a checkpoint that fits; None is an empty sequence.

        Raises:
          OutOfPagesError: too few are free; then nothing has changed.
        """
        frontier = 0 if origin is None else origin.frontier
        image = None if origin is None else origin.device_image
        allocator, size = self.allocator, self.allocator.page_size
        growth = allocator.pages_for(len(request.prompt) + request.max_new_tokens)
        copied = (allocator.total, allocator.total)
        if image is not None and image.of(self):
            shared = image.lease.pages[: frontier // size]
            lease = allocator.lease(growth - len(shared), shared)
            if frontier % size:  # the last page is not full: another may be writing to it
                copied = (image.lease.pages[len(shared)], lease.pages[len(shared)])
            dense = image.dense
        else:
            lease = allocator.lease(growth)  # before anything is copied or read from disk
            dense = self.blank
            if origin is not None:
                parts = origin.parts()
                dense = dense_from(parts)
                self._write_pages(lease.pages[: allocator.pages_for(frontier)], parts)
        self.release(row)
        self._leases[row] = lease
        anchor = request.tokens[-1] if request.tokens else 0
        numbers = rows.Numbers(np.int32(frontier), np.int32(anchor), np.uint32(request.seed))
        own = make_controls(
            [request.sampling],
            [request.stop_ids],
            [len(request.prompt) + request.min_new_tokens],
            width=self._stop_columns,
        )
        arguments = jax.device_put(
            (
                np.int32(row),
                self._padded(lease.pages, -1),
                np.asarray(copied, np.int32),
                dense,
                numbers,
                self._counts(request, frontier),
            )
        )
        self.state, self.controls = self._programs.install(
            self.state, self.controls, *arguments, own
        )

    def release(self, row: int) -> None:
        """Gives the pages of a row back; its state is lost."""
        lease, self._leases[row] = self._leases[row], None
        if lease is not None:
            lease.release()

    def capture(self, row: int, frontier: int) -> DeviceImage:
        """The sequence of a row at its frontier, its pages shared and the rest copied."""
        active = np.arange(self.rows) == row
        self.state = self._programs.catch_up(self.state, jax.device_put(active))
        dense = self._programs.dense_of(self.state, jax.device_put(np.int32(row)))
        pages = self._leases[row].pages[: self.allocator.pages_for(frontier)]
        return DeviceImage(self, self.allocator.lease(0, pages), dense)

    def upload(self, checkpoint: Checkpoint) -> DeviceImage:
        """A copy of a checkpoint on the device.

        Raises:
          OutOfPagesError: too few pages are free.
        """
        lease = self.allocator.lease(self.allocator.pages_for(checkpoint.frontier))
        parts = checkpoint.parts()
        self._write_pages(lease.pages, parts)
        return DeviceImage(self, lease, jax.device_put(dense_from(parts)))

    def read_pages(self, pages: tuple[int, ...]) -> list[Pages]:
        """Contents of pages in every paged store, on the host."""
        index = jax.device_put(self._padded(pages, 0))
        read = jax.device_get(self._programs.read_pages(self.state, index))
        return [Pages(*(array[:, : len(pages)] for array in store)) for store in read]

    def prefill(self, row: int, part: list[int]) -> None:
        """Processes the next tokens of a row's prompt, at most `chunk`."""
        tokens = np.zeros((1, self.chunk), np.int32)
        tokens[0, : len(part)] = part
        count = np.asarray([len(part)], np.int32)
        self.state = self._programs.prefill(
            self.state, *jax.device_put((np.int32(row), tokens, count))
        )

    def choose_anchor(self, row: int) -> int:
        """The first token of a row whose prompt is processed."""
        row = jax.device_put(np.int32(row))
        self.state, anchor = self._programs.choose_anchor(self.state, self.controls, row)
        return int(jax.device_get(anchor)[0])

    def speculate(self, planned: np.ndarray) -> np.ndarray:
        """A round up to the decision what to commit.

        Args:
          planned: P of each row, -1 for those that sit out.

        Returns:
          int32 `[B, W + 1]`: licensed tokens, then the accepted count.
        """
        if not np.array_equal(planned, self._planned):  # mostly as in the round before
            self._planned, self._planned_on_device = planned, jax.device_put(planned)
        self.state, self._scratch = self._programs.speculate(
            self.state, self.controls, self._planned_on_device
        )
        return jax.device_get(self._scratch.egress)

    def commit(self, counts: np.ndarray) -> None:
        """Commits N of each row of the last `speculate`."""
        scratch, self._scratch = self._scratch, None
        if counts.any():
            self.state = self._programs.commit(
                self.state, scratch.verified, scratch.accepted, jax.device_put(counts)
            )

    def _write_pages(self, pages: tuple[int, ...], parts) -> None:
        """Fills pages with the positions `[0, F)` of the paged parts of a checkpoint."""
        size, contents = self.allocator.page_size, []
        for store in STORES[: len(self.pools)]:
            padded = []
            for name in ("key", "value"):
                array = parts[f"{store}.{name}"]
                layers, frontier, *rest = array.shape
                whole = np.zeros((layers, self._table_size * size, *rest), array.dtype)
                whole[:, :frontier] = array
                padded.append(whole.reshape(layers, self._table_size, size, *rest))
            contents.append(Pages(*padded))
        index = self._padded(pages, self.allocator.total)
        self.state = self._programs.write_pages(
            self.state, *jax.device_put((index, tuple(contents)))
        )

    def _padded(self, pages: tuple[int, ...], filler: int) -> np.ndarray:
        table = np.full(self._table_size, filler, np.int32)
        table[: len(pages)] = pages
        return table

    def _counts(self, request: Request, frontier: int) -> TokenCounts:
        """Tokens that the state has seen and published; the prompt's rest comes with its chunks."""
        size = self.spec.target.vocab_size
        prompt = np.zeros((1, size), bool)
        prompt[0, request.prompt[:frontier]] = True
        output = np.bincount(np.asarray(request.tokens, np.int64), minlength=size)
        return TokenCounts(prompt, output[None].astype(np.int32))
