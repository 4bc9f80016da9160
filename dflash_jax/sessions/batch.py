"""The rows on the device: state, controls, compiled programs, and what crosses to the host."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.distribution import Sampling, make_controls
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.sessions.programs import Programs, Report, Speculated
from dflash_jax.sessions.request import Request
from dflash_jax.state.sequence import init_sequences


class Batch:
    """B rows that prefill one at a time and decode together.

    A round is `speculate`, whose result is the round's only egress, and `commit`. What goes the
    other way is N of each row, and P where it changed.

    Args:
      rows: B. capacity: tokens per row. chunk: tokens per prefill. stop_columns: stop ids per row.
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
            context_dtype=spec.context_dtype,
        )
        self.controls = make_controls([Sampling()] * rows, width=stop_columns)
        self._programs = Programs(spec, weights, self.state, self.controls, chunk, report)
        self._planned = np.full(rows, -1, np.int32)
        self._planned_on_device = jax.device_put(self._planned)
        self._scratch: Speculated | None = None

    def admit(self, row: int, request: Request) -> None:
        """Empties a row for a request: nothing of who was there before is left."""
        own = make_controls(
            [request.sampling],
            [request.stop_ids],
            [len(request.prompt) + request.min_new_tokens],
            width=self._stop_columns,
        )
        row, seed = jax.device_put((np.int32(row), np.uint32(request.seed)))
        self.state, self.controls = self._programs.admit(self.state, self.controls, row, seed, own)

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
