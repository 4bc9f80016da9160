"""The batch engine: requests join and leave between rounds, text streams out.

One step is at most one chunk of one prompt and one round of all decoding rows, so a long prompt
delays the others by a chunk at a time. A round leaves the device once: licensed tokens and
accepted counts go to the host, whose front ends choose N of each row; N goes back, all rows commit
together, and only then is anything published.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from absl import logging
from jax.experimental.compilation_cache import compilation_cache as xla_cache

from dflash_jax.decoding.distribution import Sampling
from dflash_jax.decoding.generate import MAX_ROWS, plan, prompt_tokens
from dflash_jax.decoding.loop import PREFILL_CHUNK
from dflash_jax.decoding.result import Round
from dflash_jax.io.pair import Pair
from dflash_jax.sessions.batch import Batch
from dflash_jax.sessions.frontend import Preview
from dflash_jax.sessions.programs import Report
from dflash_jax.sessions.request import Request
from dflash_jax.sessions.seat import Seat


class Engine:
    """Serves requests in up to `max_rows` rows of one batch.

    A request gives the same tokens alone and beside any others. Not for several threads at once.

    Args:
      pair: from `load_pair`.
      max_rows: B, 1..8: requests that run at the same time; others wait in order of submission.
      draft_tokens: K, 0..15; 0 is plain decoding. None is the trained block less its anchor.
      max_context: tokens of prompt and output that a row holds.
      prefill_chunk: prompt tokens per step.
      max_stop_ids: EOS ids that a request may have.
      compilation_cache: directory of JAX's persistent compilation cache, which is a setting of
        the whole process; later engines of the same shapes then start in a moment.
      report: `report(program, seconds, done, total)` after each compilation; the log by default.

    Raises:
      ValueError: an argument out of range; the message names it.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_rows: int = 1,
        draft_tokens: int | None = None,
        max_context: int = 4096,
        prefill_chunk: int = PREFILL_CHUNK,
        max_stop_ids: int = 8,
        compilation_cache: str | os.PathLike[str] | None = None,
        report: Report | None = None,
    ):
        for name, value, low, high in (
            ("max_rows", max_rows, 1, MAX_ROWS),
            ("max_context", max_context, 2, pair.target.max_position_embeddings),
            ("prefill_chunk", prefill_chunk, 1, max_context),
            ("max_stop_ids", max_stop_ids, len(pair.eos_token_ids), pair.target.vocab_size),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name}: got {value}, expected {low}..{high}")
        if compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", os.fspath(compilation_cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            xla_cache.reset_cache()  # JAX stays with the first directory it has used
        self.pair = pair
        self.spec, self.weights = plan(pair, draft_tokens)
        self.max_rows, self.max_context = max_rows, max_context
        self._stop_columns = max_stop_ids
        logging.info("engine: %s", self.describe())
        self.batch = Batch(
            self.spec,
            self.weights,
            max_rows,
            max_context,
            prefill_chunk,
            max_stop_ids,
            report or _log,
        )
        self._queue: deque[Request] = deque()
        self._seats: list[Seat | None] = [None] * max_rows
        self._prompts: deque[Seat] = deque()
        # By row: who ended by its budget and has left its state there, until another moves in.
        self._resting: list[Seat | None] = [None] * max_rows
        self._ended: list[Request] = []
        self._stepping = False
        self._in_round = False

    def describe(self) -> str:
        """One line: what drafts, effective widths, which causality rule."""
        return (
            f"{self.pair.describe()}; {self.max_rows} rows of {self.max_context} tokens, "
            f"{self.spec.draft_tokens} draft tokens"
        )

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not self._queue and not any(self._seats)

    @property
    def waiting(self) -> int:
        """Requests without a row, or whose prompt is not processed yet."""
        return len(self._queue) + len(self._prompts)

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_new_tokens: int = 128,
        min_new_tokens: int = 0,
        stop: str | Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> Request:
        """Queues a request; it starts when a row is free. Nothing is computed here.

        Args:
          prompt: text or token ids.
          eos_ids: None is the pair's own stop ids.
          others: see `Request`.

        Raises:
          ValueError: an argument out of range, or a prompt and budget that no row can hold.
        """
        request = Request(
            prompt=prompt_tokens(self.pair, prompt),
            sampling=Sampling() if sampling is None else sampling,
            seed=seed,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            stop=stop,
            eos_ids=self.pair.eos_token_ids if eos_ids is None else eos_ids,
            ignore_eos=ignore_eos,
            on_text=on_text,
        )
        self._check_growth(request.prompt, max_new_tokens)
        if len(request.eos_ids) > self._stop_columns:
            raise ValueError(
                f"eos_ids: got {len(request.eos_ids)}, but max_stop_ids is {self._stop_columns}"
            )
        if request.stop and self.pair.tokenizer is None:
            raise ValueError(f"stop: got {request.stop!r}, but the target has no tokenizer.json")
        for token in request.eos_ids:
            if token >= self.pair.target.vocab_size:
                raise ValueError(
                    f"eos_ids: got {token}, expected 0..{self.pair.target.vocab_size - 1}"
                )
        request.draft_tokens = self.spec.draft_tokens
        if self.spec.draft is not None:
            request.block_attention = self.spec.draft.causality.value
        request.text = None if self.pair.tokenizer is None else ""
        self._queue.append(request)
        return request

    def step(self) -> list[Request]:
        """One chunk of a prompt and one round, as far as there are any.

        Returns:
          The requests that ended since the previous step returned, in order.
        """
        if self._stepping:
            raise RuntimeError("step: called from inside a step, for example by an on_text")
        self._stepping = True
        try:
            self._admit()
            self._prefill()
            self._decode()
            # A row that was not in the round and was cancelled during it.
            for seat in self._seats:
                if seat is not None and seat.front.cancelled:
                    self._cancel_now(seat)
        finally:
            self._stepping = self._in_round = False
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> list[Request]:
        """Steps until nothing is left; returns the requests that ended, in order."""
        ended = []
        while not self.idle:
            ended += self.step()
        return ended

    def stream(self, request: Request) -> Iterator[str]:
        """Yields a request's text from its beginning, stepping the engine while there is none.

        Other requests go on as well; several streams may be read in turn.

        Raises:
          ValueError: without a tokenizer there is no text.
          Exception: what ended the request, where its reason is "error".
        """
        if request.text is None:
            raise ValueError("stream: the target has no tokenizer.json, so there is no text")
        shown = 0
        while True:
            if len(request.text) > shown:
                piece = request.text[shown:]
                shown += len(piece)
                yield piece
            elif request.finished:
                break
            else:
                self._check_ours(request)
                self.step()
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request) -> None:
        """Ends a request with what it has published; one that has ended stays as it is.

        Possible at any moment, from a callback inside a step too: a round that is under way
        commits nothing of that row.
        """
        if request.finished:
            return
        self._check_ours(request)
        seat = self._seat_of(request)
        if seat is None:
            self._queue.remove(request)
            self._end(request, "cancelled")
            return
        seat.front.cancel()
        if not self._in_round:
            self._cancel_now(seat)

    def extend(self, request: Request, more: int) -> None:
        """Lets a request that its budget ended go on for up to `more` tokens.

        It goes on from its state, which waits in its row until another request moves in. Greedy
        text is that of one larger budget from the start; so is sampled text in plain decoding.
        Text that came out only because there was to be no more (half a character, the beginning
        of a stop string) is taken back, and comes again whole.

        Raises:
          ValueError: the request did not end by its budget, or its row was given away, or cannot
            hold so many tokens.
        """
        if not isinstance(more, int) or more < 1:
            raise ValueError(f"more: got {more!r}, expected a whole number >= 1")
        seat = next((s for s in self._resting if s is not None and s.request is request), None)
        if seat is None:
            raise ValueError(
                f"extend: {request!r}, expected one that ended by its budget and whose row no "
                "other request has taken"
            )
        self._check_growth(request.prompt, request.max_new_tokens + more)
        self._resting[seat.row], self._seats[seat.row] = None, seat
        seat.extend(more)

    # --- a step ---

    def _admit(self) -> None:
        # A row whose last request may yet be extended is the last to be given away.
        for row in sorted(range(self.max_rows), key=lambda row: self._resting[row] is not None):
            if self._seats[row] is None and self._queue:
                self._move_in(row, self._queue.popleft())

    def _move_in(self, row: int, request: Request) -> None:
        self.batch.admit(row, request)
        seat = Seat(row, request, self.pair.tokenizer)
        self._seats[row], self._resting[row] = seat, None
        self._prompts.append(seat)

    def _prefill(self) -> None:
        """One chunk of the oldest prompt; after its last one, the request's first token."""
        if not self._prompts:
            return
        seat = self._prompts[0]
        self.batch.prefill(seat.row, seat.next_chunk(self.batch.chunk))
        if seat.prefilled < len(seat.request.prompt):
            return
        self._prompts.popleft()
        self._in_round = True
        licensed = [self.batch.choose_anchor(seat.row)]
        seat.anchored = True
        preview = seat.preview(licensed)
        self._in_round = False
        self._publish(seat, licensed, preview)
        self._tell(seat)

    def _decode(self) -> None:
        """One round of every row that has its first token."""
        seats = [seat for seat in self._seats if seat is not None and seat.anchored]
        if not seats:
            return
        planned = np.full(self.max_rows, -1, np.int32)
        for seat in seats:
            planned[seat.row] = seat.live_width(self.spec.draft_tokens, self.max_context)
        self._in_round = True
        egress = self.batch.speculate(planned)
        accepted = egress[:, -1].tolist()
        licensed = {seat: egress[seat.row, : accepted[seat.row] + 1].tolist() for seat in seats}
        previews = {seat: seat.preview(licensed[seat]) for seat in seats}
        # Detokenising one row may have cancelled another that was previewed before it.
        previews = {
            seat: seat.preview(()) if seat.front.cancelled else preview
            for seat, preview in previews.items()
        }
        committed = np.zeros(self.max_rows, np.int32)
        for seat, preview in previews.items():
            committed[seat.row] = preview.count
        self.batch.commit(committed)
        self._in_round = False
        for seat, preview in previews.items():
            verified = int(planned[seat.row])
            proposed = self.spec.proposed(verified)
            counts = Round(proposed, verified, accepted[seat.row], preview.count)
            self._publish(seat, licensed[seat], preview, counts)
        # Callbacks last: whatever they do, every row of the round is published.
        for seat in seats:
            self._tell(seat)

    # --- publication ---

    def _publish(self, seat: Seat, licensed, preview: Preview, counts: Round | None = None) -> None:
        seat.publish(licensed, preview, counts)
        if preview.reason is not None:
            self._end(seat.request, preview.reason)
            if preview.reason == "length":
                self._resting[seat.row] = seat

    def _tell(self, seat: Seat) -> None:
        if not seat.tell():
            if not seat.request.finished:
                self._end(seat.request, "error")
            seat.request.finish_reason = "error"
            if self._resting[seat.row] is seat:
                self._resting[seat.row] = None

    def _cancel_now(self, seat: Seat) -> None:
        self._publish(seat, (), seat.preview(()))
        self._tell(seat)

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._ended.append(request)
        seat = self._seat_of(request)
        if seat is not None:
            self._seats[seat.row] = None
            if seat in self._prompts:
                self._prompts.remove(seat)

    def _seat_of(self, request: Request) -> Seat | None:
        return next((s for s in self._seats if s is not None and s.request is request), None)

    def _check_growth(self, prompt: list[int], max_new_tokens: int) -> None:
        growth = len(prompt) + max_new_tokens
        if growth > self.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} need {growth} "
                f"positions, but max_context is {self.max_context}"
            )

    def _check_ours(self, request: Request) -> None:
        if self._seat_of(request) is None and request not in self._queue:
            raise ValueError(f"{request!r} was not submitted to this engine")


def _log(program: str, seconds: float, done: int, total: int) -> None:
    logging.info("compiled %s in %.1f s (%d of %d)", program, seconds, done, total)
