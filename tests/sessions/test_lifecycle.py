"""Whatever order things come in: no page lost or owned twice, and every request says what it says
alone."""

import gc
import tempfile

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dflash_jax import Checkpoint, ContextBudget, Sampling
from dflash_jax.sessions.pages import OutOfPagesError
from tests.decoding import tiny
from tests.sessions import small
from tests.sessions.small import finish

KIND = "dflash"
_memory: dict = {}


def engines():
    """The engine under test, whose pool is small, and one in which requests are alone."""
    if not _memory:
        budget = ContextBudget(host_bytes=2**16, directory=tempfile.mkdtemp())
        options = dict(pool_tokens=2 * small.CONTEXT, checkpoint_turns=True, contexts=budget)
        _memory["busy"] = small.new_engine(KIND, **options)
        _memory["alone"] = small.shared(KIND)
        _memory["said"] = {}
    return _memory["busy"], _memory["alone"], _memory["said"]


def alone(**wanted) -> list[int]:
    """Tokens of a request whose row has no neighbours and no past."""
    _, engine, known = engines()
    key = repr(sorted(wanted.items()))
    if key not in known:
        known[key] = finish(engine, engine.submit(**wanted)).tokens
    return known[key]


class Lifecycle(RuleBasedStateMachine):
    """Requests and checkpoints of an engine, each with what an undisturbed run would give."""

    @initialize()
    def start(self):
        self.engine, _, _ = engines()
        self.requests, self.checkpoints = [], []  # with what was wanted

    def pick(self, items, which):
        return items[which % len(items)]

    @rule(
        base=st.integers(0, 3),
        length=st.integers(1, 40),
        budget=st.integers(1, 24),
        seed=st.integers(0, 3),
        hot=st.booleans(),
    )
    def submit(self, base, length, budget, seed, hot):
        prompt = np.random.default_rng(base).integers(tiny.VOCAB, size=length).tolist()
        wanted = dict(
            prompt=prompt,
            max_new_tokens=budget,
            seed=seed,
            sampling=small.HOT if hot else Sampling(),
            ignore_eos=True,
        )
        self.requests.append((self.engine.submit(**wanted), wanted))

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        self.engine.cancel(self.pick(self.requests, which)[0])

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def checkpoint(self, which):
        request, wanted = self.pick(self.requests, which)
        try:
            taken = self.engine.checkpoint(request)
        except ValueError as error:
            assert "has no state" in str(error)
        else:
            self.checkpoints.append((taken, wanted))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99), more=st.integers(1, 9))
    def fork(self, which, more):
        request, wanted = self.pick(self.requests, which)
        # Another budget has other live widths near its end, and so other draws.
        same = wanted["sampling"].temperature or request.finished
        budget = wanted["max_new_tokens"] + (0 if same else more)
        wanted = wanted | dict(max_new_tokens=budget)
        try:
            self.requests.append((self.engine.fork(request, max_new_tokens=budget), wanted))
        except ValueError as error:
            assert "has no state" in str(error) or "has published" in str(error)

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 99))
    def restore(self, which):
        checkpoint, wanted = self.pick_living(which)
        if checkpoint is None:
            return
        if len(checkpoint.record.tokens) < wanted["max_new_tokens"]:
            self.requests.append((self.engine.restore(checkpoint), wanted))

    def pick_living(self, which):
        """A checkpoint whose only copy was not evicted from the disk."""
        self.checkpoints = [
            (one, wanted)
            for one, wanted in self.checkpoints
            if one.tier != "disk" or one.path.exists()
        ]
        return self.pick(self.checkpoints, which) if self.checkpoints else (None, None)

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 99))
    def demote(self, which):
        checkpoint, _ = self.pick_living(which)
        if checkpoint is not None:
            checkpoint.to_host()

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 99))
    def promote(self, which):
        checkpoint, _ = self.pick_living(which)
        if checkpoint is None:
            return
        try:
            self.engine.promote(checkpoint)
        except OutOfPagesError:
            assert any(self.engine.schedule._seats)

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 99))
    def keep(self, which):
        checkpoint, _ = self.pick_living(which)
        if checkpoint is not None:
            self.engine.contexts.keep(checkpoint)

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 99))
    def drop(self, which):
        self.engine.contexts.drop(self.checkpoints.pop(which % len(self.checkpoints))[0])

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 99))
    def save_and_load(self, which):
        checkpoint, wanted = self.pick_living(which)
        if checkpoint is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(f"{folder}/saved")
            self.checkpoints.append((Checkpoint.load(f"{folder}/saved"), wanted))

    @rule()
    def evict_everything(self):
        contexts, budget = self.engine.contexts, self.engine.contexts.budget
        contexts.budget = ContextBudget(0, 0, budget.directory, 0)
        contexts.balance()
        contexts.budget = budget
        needed = self.engine.schedule.origins()
        assert all(one in needed or one.pinned for one in contexts.kept)

    @invariant()
    def pages_have_their_owners(self):
        engine = self.engine
        allocator = engine.batch.allocator
        held = [0] * allocator.total
        leases = [lease for lease in engine.batch._leases if lease is not None]
        images = {one.device_image for one in engine.contexts._known} - {None}
        writable: set[int] = set()
        for lease in (*leases, *(image.lease for image in images)):
            for page in lease.pages:
                held[page] += 1
        assert held == [allocator.references(page) for page in range(allocator.total)]
        assert allocator.free == held.count(0)
        frontiers = np.asarray(engine.batch.state.frontier)
        contexts = np.asarray(engine.batch.state.context_frontier)
        for seat in engine.schedule._seats:
            if seat is None:
                continue
            request, lease = seat.request, engine.batch._leases[seat.row]
            reserved = len(lease.pages) * allocator.page_size
            assert contexts[seat.row] <= frontiers[seat.row] == seat.frontier
            assert len(request.prompt) + request.max_new_tokens <= reserved
            # The pages that a row will write to are its own.
            own = set(lease.pages[seat.frontier // allocator.page_size :])
            assert not own & writable
            writable |= own

    @invariant()
    def what_is_said_is_what_would_be_said_alone(self):
        for request, wanted in self.requests:
            expected = alone(**wanted)
            assert request.tokens == expected[: len(request.tokens)]
            if request.finish_reason == "length":
                assert request.tokens == expected
            assert request.finish_reason in (None, "length", "cancelled"), request.error

    def teardown(self):
        for request, _ in self.requests:
            self.engine.cancel(request)
        self.engine.run()
        self.requests, self.checkpoints = [], []
        self.evict_everything()
        gc.collect()


Lifecycle.TestCase.settings = hypothesis.settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestLifecycle = Lifecycle.TestCase
