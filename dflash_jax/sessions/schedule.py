"""Which request runs in which row, and when: the steps of the engine.

One step is at most one chunk of one prompt and one round of all decoding rows, so a long prompt
delays the others by a chunk at a time. A round leaves the device once: licensed tokens and
accepted counts go to the host, whose front ends choose N of each row; N goes back, all rows commit
together, and only then is anything published.
"""

import weakref
from collections import deque

import numpy as np
from absl import logging

from dflash_jax.decoding.result import Round
from dflash_jax.io.tokenizer import Tokenizer
from dflash_jax.sessions.batch import Batch
from dflash_jax.sessions.checkpoint import Checkpoint
from dflash_jax.sessions.contexts import Contexts
from dflash_jax.sessions.frontend import Preview
from dflash_jax.sessions.pages import OutOfPagesError
from dflash_jax.sessions.request import Request
from dflash_jax.sessions.seat import Seat


class Schedule:
    """Requests in a queue, in rows, and at rest after their budget ended them.

    Args:
      max_context: positions of a row.
      turns: keeps turn checkpoints.
    """

    def __init__(
        self,
        batch: Batch,
        contexts: Contexts,
        tokenizer: Tokenizer | None,
        max_context: int,
        turns: bool,
    ):
        self.batch, self.contexts, self.tokenizer = batch, contexts, tokenizer
        self._max_context, self._turns = max_context, turns
        self._queue: deque[Request] = deque()
        self._seats: list[Seat | None] = [None] * batch.rows
        self._prompts: deque[Seat] = deque()
        # By row: who ended by its budget and has left its state there, until another moves in.
        self._resting: list[Seat | None] = [None] * batch.rows
        self._ended: list[Request] = []
        self.stepping = False
        self._in_round = False

    @property
    def idle(self) -> bool:
        return not self._queue and not any(self._seats)

    @property
    def waiting(self) -> int:
        """Requests without a row, or whose prompt is not processed yet."""
        return len(self._queue) + len(self._prompts)

    def enqueue(self, request: Request) -> None:
        self._queue.append(request)

    def origins(self) -> set[Checkpoint]:
        """Checkpoints that waiting requests start from."""
        return {request.origin for request in self._queue if request.origin is not None}

    def has(self, request: Request) -> bool:
        """Whether it waits or runs here."""
        return self.seat_of(request) is not None or request in self._queue

    def seat_of(self, request: Request) -> Seat | None:
        return next((s for s in self._seats if s is not None and s.request is request), None)

    def resting_seat(self, request: Request) -> Seat | None:
        return next((s for s in self._resting if s is not None and s.request is request), None)

    def step(self) -> list[Request]:
        """See `Engine.step`."""
        if self.stepping:
            raise RuntimeError("step: called from inside a step, for example by an on_text")
        self.stepping = True
        try:
            self._admit()
            self._prefill()
            self._decode()
            # A row that was not in the round and was cancelled during it.
            for seat in self._seats:
                if seat is not None and seat.front.cancelled:
                    self._cancel_now(seat)
        finally:
            self.stepping = self._in_round = False
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, request: Request) -> None:
        """See `Engine.cancel`; the request waits or runs here."""
        seat = self.seat_of(request)
        if seat is None:
            self._queue.remove(request)
            self._end(request, "cancelled")
            return
        seat.front.cancel()
        if not self._in_round:
            self._cancel_now(seat)

    def extend(self, seat: Seat, more: int, here: Checkpoint) -> None:
        """Lets a request at rest go on in its row, which gets the pages for it.

        Args:
          here: a checkpoint of its present state.
        """
        seat.extend(more)
        self._resting[seat.row], self._seats[seat.row] = None, seat
        try:
            self._give_row(seat.row, seat.request, here)
        except OutOfPagesError as error:
            seat.request.error = error
            self._end(seat.request, "error")
            self.batch.release(seat.row)

    # --- a step ---

    def _admit(self) -> None:
        # A row whose last request may yet be extended is the last to be given away.
        for row in sorted(range(self.batch.rows), key=lambda row: self._resting[row] is not None):
            if self._seats[row] is None and self._queue and not self._move_in(row, self._queue[0]):
                break

    def _move_in(self, row: int, request: Request) -> bool:
        """Gives a row to the first in the queue; False where it must wait for pages."""
        own = request.origin
        origin = request.origin = own or self.contexts.longest_prefix(request.prompt)
        frontier = 0 if origin is None else origin.frontier
        try:
            seat = Seat(row, request, self.tokenizer, frontier, self._turns)
            self._give_row(row, request, origin)
        except Exception as error:  # a tokenizer or a file may raise anything; the others go on
            if isinstance(error, OutOfPagesError) and any(self._seats):
                request.origin = own
                return False
            self._queue.popleft()
            logging.warning("%r ended by %r", request, error)
            request.error = error
            self._end(request, "error")
            return True
        self._queue.popleft()
        request.origin, request.restored = None, frontier
        if own is None:
            self.contexts.count_lookup(origin)
        self._seats[row], self._resting[row] = seat, None
        if self._turns and seat.at_turn:
            request.turn = weakref.ref(origin)
        self.contexts.balance()
        if not seat.anchored:
            self._prompts.append(seat)
        return True

    def _give_row(self, row: int, request: Request, origin: Checkpoint | None) -> None:
        """Gives a row to a request; whatever no running request holds makes room for it."""
        while True:
            try:
                return self.batch.admit(row, request, origin)
            except OutOfPagesError:
                if not self.make_room(origin):
                    raise

    def make_room(self, origin: Checkpoint | None) -> bool:
        """Frees some pages that no running request holds; False where there are none."""
        for row, seat in enumerate(self._resting):
            if seat is not None:
                self._resting[row] = None
                self.batch.release(row)
                return True
        return self.contexts.demote_one(but=origin)

    def _prefill(self) -> None:
        """One chunk of the oldest prompt; after its last one, the request's first token."""
        if not self._prompts:
            return
        seat = self._prompts[0]
        if part := seat.next_chunk(self.batch.chunk):
            self.batch.prefill(seat.row, part)
            if seat.at_turn:
                self._keep_turn(seat)
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
        planned = np.full(self.batch.rows, -1, np.int32)
        for seat in seats:
            planned[seat.row] = seat.live_width(self._max_context)
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
        committed = np.zeros(self.batch.rows, np.int32)
        for seat, preview in previews.items():
            committed[seat.row] = preview.count
        self.batch.commit(committed)
        self._in_round = False
        for seat, preview in previews.items():
            verified = int(planned[seat.row])
            proposed = self.batch.spec.proposed(verified)
            counts = Round(proposed, verified, accepted[seat.row], preview.count)
            self._publish(seat, licensed[seat], preview, counts)
        # Callbacks last: whatever they do, every row of the round is published.
        for seat in seats:
            self._tell(seat)

    # --- publication ---

    def _publish(self, seat: Seat, licensed, preview: Preview, counts: Round | None = None) -> None:
        seat.publish(licensed, preview, counts)
        if preview.reason is not None:
            if preview.reason in ("stop", "length") and self._turns:
                self._keep_turn(seat)
            self._end(seat.request, preview.reason)
            if preview.reason == "length":
                self._resting[seat.row] = seat
            else:
                self.batch.release(seat.row)

    def _keep_turn(self, seat: Seat) -> None:
        turn = self.contexts.capture(seat.row, seat.frontier, seat.request)
        seat.request.turn = weakref.ref(turn)
        self.contexts.keep(turn)

    def _tell(self, seat: Seat) -> None:
        if not seat.tell():
            if not seat.request.finished:
                self._end(seat.request, "error")
            seat.request.finish_reason = "error"
            if self._resting[seat.row] is seat:
                self._resting[seat.row] = None
            self.batch.release(seat.row)

    def _cancel_now(self, seat: Seat) -> None:
        self._publish(seat, (), seat.preview(()))
        self._tell(seat)

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason, request.origin = reason, None
        self._ended.append(request)
        seat = self.seat_of(request)
        if seat is not None:
            self._seats[seat.row] = None
            if seat in self._prompts:
                self._prompts.remove(seat)
