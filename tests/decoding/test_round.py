"""The round as a transaction: what is committed equals plain decoding, and nothing else is.

Plain decoding here is the same functions with no proposals, one token a time; it is held in turn
against one forward over the whole text and, for the rings, against a float64 projection.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.acceptance import Proposal, point_mass
from dflash_jax.decoding.propose import make_lattice
from dflash_jax.draft import proposal_head
from dflash_jax.state.gdn import GDNRecords
from dflash_jax.training.target import hidden_states
from pallas_kernels import gated_delta_rule
from pallas_kernels.gated_delta_rule.transition import l2_normalise, read
from tests.decoding import tiny

K = 7
WIDTH = K + 1
ROWS = 8
STEPS = 190
# Two forms of one float32 computation over up to 190 steps, rotary angles up to 230 among them;
# values are near 1, and a wrong column is off by as much.
CLOSE = dict(rtol=1e-4, atol=1e-4)
DRAFTS = pytest.mark.parametrize("draft", [tiny.DFLASH, tiny.DFLASH2], ids=["dflash", "dflash2"])


# --- reading a state -------------------------------------------------------------------------


def in_order(pool, row, length):
    """Keys and values of positions [0, length) of a row: `[L, length, K, D]` each."""
    positions = np.arange(length)
    page = np.asarray(pool.block_table)[row, positions // pool.page_size]
    slot = positions % pool.page_size
    return np.asarray(pool.key)[:, page, slot], np.asarray(pool.value)[:, page, slot]


def window(ring, row, frontier):
    """Keys and values of the live interval of a ring, oldest first."""
    positions = np.arange(max(0, frontier - ring.slots), frontier)
    slot = positions % ring.slots
    return np.asarray(ring.key)[:, row, slot], np.asarray(ring.value)[:, row, slot]


def live_parts(state, row):
    """Everything of a row that may be read again, by kind of state."""
    frontier, reach = int(state.frontier[row]), int(state.context_frontier[row])
    parts = {
        "frontier": frontier,
        "context frontier": reach,
        "anchor": np.asarray(state.anchor)[row],
        "continuation hidden": np.asarray(state.hidden)[row],
        "GDN recurrent": np.asarray(state.target.gdn.recurrent)[:, row],
        "GDN convolution": np.asarray(state.target.gdn.conv)[:, row],
        "prompt tokens": np.asarray(state.counts.prompt)[row],
        "output counts": np.asarray(state.counts.output)[row],
        "pending features": np.asarray(state.pending)[row, : frontier - reach],
    }
    parts["target keys"], parts["target values"] = in_order(state.target.kv, row, frontier)
    if state.draft.ring is not None:
        parts["ring keys"], parts["ring values"] = window(state.draft.ring, row, reach)
    if state.draft.pages is not None:
        parts["draft keys"], parts["draft values"] = in_order(state.draft.pages, row, reach)
    return parts


def assert_same(actual, expected, rows=range(ROWS), **tolerance):
    """Live parts of two states, kind by kind; to the bit without a tolerance."""
    for row in rows:
        want = live_parts(expected, row)
        for kind, value in live_parts(actual, row).items():
            where = f"{kind} of row {row}"
            assert np.isfinite(np.asarray(value, np.float64)).all(), where
            if tolerance:
                np.testing.assert_allclose(value, want[kind], **tolerance, err_msg=where)
            else:
                np.testing.assert_array_equal(value, want[kind], err_msg=where)


# --- plain decoding, the truth ---------------------------------------------------------------


class Plain:
    """STEPS tokens of plain greedy decoding of ragged prompts, with the state after each."""

    def __init__(self, draft):
        self.phases = tiny.Phases(tiny.pair(draft), K)
        # Lengths 1 and 40 at the ends, and around the window of 8.
        lengths = [1, 40, 7, 8, 9, 11, 2, 23]
        rng = np.random.default_rng(3)
        self.prompts = [rng.integers(tiny.VOCAB, size=n).tolist() for n in lengths]
        self.lengths = np.array(lengths)
        self.initial = state = self.phases.start(self.prompts)
        self.steps, self.logits, text = [], [], []
        for _ in range(STEPS):
            state = self.phases.catch_up(state)
            self.steps.append(jax.device_get(self._small(state)))
            text.append(np.asarray(state.anchor))
            nothing = point_mass(jnp.zeros((ROWS, K), jnp.int32), jnp.zeros(ROWS, jnp.int32))
            state, verified, accepted = self.round(state, nothing)
            self.logits.append(np.asarray(verified.logits[:, 0]))
            assert np.all(np.asarray(accepted.accepted) == 0)
        self.text = np.stack(text, axis=1)
        self.final = self.phases.catch_up(state)

    @staticmethod
    def _small(state):
        """Pages only ever grow: those of the final state do for every step."""
        kv = state.target.kv._replace(key=None, value=None, block_table=None)
        draft = state.draft._replace(pages=None)
        return state._replace(target=state.target._replace(kv=kv), draft=draft)

    def at(self, frontier):
        """The state in which row b has processed `frontier[b]` tokens, caught up."""
        picked = [self.steps[step] for step in np.asarray(frontier) - self.lengths]

        def rows(read, axis=0):
            return np.stack(
                [np.take(read(state), row, axis) for row, state in enumerate(picked)], axis
            )

        ring = None
        if picked[0].draft.ring is not None:
            key = rows(lambda s: s.draft.ring.key, 1)
            ring = type(picked[0].draft.ring)(key, rows(lambda s: s.draft.ring.value, 1))
        gdn = type(picked[0].target.gdn)(
            rows(lambda s: s.target.gdn.recurrent, 1), rows(lambda s: s.target.gdn.conv, 1)
        )
        return self.final._replace(
            frontier=np.asarray(frontier),
            context_frontier=np.asarray(frontier),
            anchor=rows(lambda s: s.anchor),
            hidden=rows(lambda s: s.hidden),
            target=self.final.target._replace(gdn=gdn),
            draft=self.final.draft._replace(ring=ring),
            counts=type(picked[0].counts)(
                rows(lambda s: s.counts.prompt), rows(lambda s: s.counts.output)
            ),
        )

    def logits_at(self, frontier):
        steps = np.asarray(frontier) - self.lengths
        return np.stack([self.logits[step][row] for row, step in enumerate(steps)])

    def forced(self, state, accepted, count=None):
        """A proposal of which the target accepts exactly `accepted[b]` of `count[b]` (all K)."""
        count = np.full(ROWS, K) if count is None else np.asarray(count)
        start = np.asarray(state.frontier) - self.lengths + 1
        tokens = np.stack([self.text[row, at : at + K] for row, at in enumerate(start)])
        for row, right in enumerate(accepted):
            if right < count[row]:
                tokens[row, right] = (tokens[row, right] + 1) % tiny.VOCAB
        return point_mass(jnp.asarray(tokens), jnp.asarray(count))

    def round(self, state, proposal, limit=None):
        """Verify, accept and commit; `limit` is the front end's preview."""
        verified = self.phases.verify(state, proposal)
        accepted = self.phases.accept(state, verified, proposal, tiny.greedy(ROWS))
        count = accepted.licensed if limit is None else jnp.minimum(accepted.licensed, limit)
        return self.phases.commit(state, verified, accepted, count), verified, accepted


@functools.cache
def plain_run(draft):
    return Plain(draft)


@pytest.fixture(params=[tiny.DFLASH, tiny.DFLASH2], ids=["dflash", "dflash2"])
def plain(request):
    return plain_run(request.param)


def forced_round(plain, state, accepted, count=None, **kwargs):
    """One round with forced counts, checked: the new state, caught up, is plain decoding's."""
    state, verified, result = plain.round(
        plain.phases.catch_up(state), plain.forced(state, accepted, count), **kwargs
    )
    np.testing.assert_array_equal(result.accepted, accepted)
    caught_up = plain.phases.catch_up(state)
    assert_same(caught_up, plain.at(state.frontier), **CLOSE)
    return caught_up


# --- the truth against independent computations ----------------------------------------------


def rms(x, gain, eps=1e-6):
    return np.asarray(gain, np.float64) * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def context_oracle(config, params, features):
    """Float64 keys and values `[L, T, K, D]` of a row's features at positions 0.. ."""
    common = rms(features @ np.float64(params["fc"]["weight"]).T, params["hidden_norm"]["weight"])
    dim, keys, values = config.head_dim, [], []
    angle = np.arange(len(features))[:, None] * config.rope_theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    for layer in range(config.num_hidden_layers):
        attention = params[f"layers_{layer}"]["self_attn"]
        key, value = (
            (common @ np.float64(attention[name]["weight"]).T).reshape(len(features), -1, dim)
            for name in ("k_proj", "v_proj")
        )
        first, second = np.split(rms(key, attention["k_norm"]["weight"]), 2, axis=-1)
        keys.append(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))
        values.append(value)
    return np.stack(keys), np.stack(values)


@functools.partial(jax.jit, static_argnums=0)
def one_forward(taps, params, tokens):
    return hidden_states(tiny.TARGET, params, tokens, taps)


def test_plain_decoding_equals_one_forward_over_the_whole_text(plain):
    """Pages, hidden, logits and the draft's context of every position, rings at every frontier."""
    config = plain.phases.spec.draft
    texts = [[*p, *t] for p, t in zip(plain.prompts, plain.text.tolist(), strict=True)]
    longest = max(map(len, texts))
    tokens = jnp.asarray([text + [0] * (longest - len(text)) for text in texts])
    taps = config.target_layer_ids
    block = one_forward(taps, plain.phases.weights.target, tokens)
    for row, length in enumerate(plain.lengths):
        end = length + STEPS
        key, value = in_order(plain.final.target.kv, row, end)
        np.testing.assert_allclose(key, block.key[:, row, :end], **CLOSE)
        np.testing.assert_allclose(value, block.value[:, row, :end], **CLOSE)
        hidden = np.stack([step.hidden[row] for step in plain.steps])
        np.testing.assert_allclose(hidden, block.hidden[row, length - 1 : end - 1], **CLOSE)

        features = np.float64(block.taps[row, :end])
        keys, values = context_oracle(config, plain.phases.weights.draft, features)
        local, full = list(config.local_layers), list(config.full_layers)
        for step in plain.steps[:: 1 if row < 2 else 7]:
            frontier = int(step.frontier[row])
            live = slice(max(0, frontier - tiny.WINDOW), frontier)
            key, value = window(step.draft.ring, row, frontier)
            np.testing.assert_allclose(key, keys[local, live], **CLOSE)
            np.testing.assert_allclose(value, values[local, live], **CLOSE)
        if full:
            key, value = in_order(plain.final.draft.pages, row, end)
            np.testing.assert_allclose(key, keys[full, :end], **CLOSE)
            np.testing.assert_allclose(value, values[full, :end], **CLOSE)
    assert len(np.unique(plain.text)) > 30  # the text is no loop of a few tokens


# --- commit ----------------------------------------------------------------------------------


def test_every_accept_count_leaves_the_state_of_plain_decoding(plain):
    """Each row passes through each of 0..K accepted; the logits that follow agree as well."""
    state = plain.initial
    for shift in range(WIDTH):
        accepted = (np.arange(ROWS) + shift) % WIDTH
        state = forced_round(plain, state, accepted)
        np.testing.assert_array_equal(state.frontier, state.context_frontier)
        following, verified, _ = plain.round(state, plain.forced(state, np.zeros(ROWS, int)))
        np.testing.assert_allclose(
            verified.logits[:, 0], plain.logits_at(state.frontier), rtol=1e-4, atol=1e-4
        )
    np.testing.assert_array_equal(state.frontier, plain.lengths + sum(range(WIDTH + 1)))


def test_forty_rounds_with_wrapping_rings(plain):
    """Accepted counts cycle through 0..K, rows out of step; rings of 8 wrap many times.

    The lengths pass the window at every offset (prompts of 1 to 40 tokens), and after each round
    every part of the state is compared.
    """
    state = plain.initial
    schedule = [3, 0, 7, 1, 5, 2, 6, 4]
    for index in range(40):
        state = forced_round(plain, state, [schedule[(index + row) % 8] for row in range(ROWS)])
    np.testing.assert_array_equal(state.frontier, plain.lengths + 40 * (sum(schedule) + 8) // 8)


def test_plain_rounds_between_speculative_ones(plain):
    """Also side by side in one batch: some rows draft while others take a plain step."""
    state = plain.initial
    # (P, A) of a row, one round after the other.
    schedule = [(7, 2), (0, 0), (7, 0), (0, 0), (0, 0), (7, 7), (0, 0), (3, 3), (4, 1), (0, 0)]
    for index in range(2 * len(schedule)):
        turn = [schedule[(index + 3 * row) % len(schedule)] for row in range(ROWS)]
        count, accepted = zip(*turn, strict=True)
        state = forced_round(plain, state, accepted, count)


def test_width_comes_from_what_was_verified(plain):
    """K = 7 right proposals, of which only P = 0..7 are verified; the rest is NaN.

    All P accepted commits P + 1 columns and not one more.
    """
    state = plain.phases.catch_up(plain.initial)
    count = np.arange(ROWS)
    proposal = plain.forced(state, np.full(ROWS, K), np.full(ROWS, K))
    proposal = proposal._replace(count=jnp.asarray(count))
    verified = poison_columns(plain.phases.verify(state, proposal), count + 1)
    accepted = plain.phases.accept(state, verified, proposal, tiny.greedy(ROWS))
    np.testing.assert_array_equal(accepted.accepted, count)
    state = plain.phases.commit(state, verified, accepted, accepted.licensed)
    np.testing.assert_array_equal(state.frontier, plain.lengths + count + 1)
    assert_same(plain.phases.catch_up(state), plain.at(state.frontier), **CLOSE)


def test_a_shorter_prefix_than_licensed(plain):
    """The preview keeps N of L = 8 tokens; y_N is the anchor."""
    state = plain.phases.catch_up(plain.initial)
    keep = np.arange(1, ROWS + 1)
    state, _, _ = plain.round(state, plain.forced(state, np.full(ROWS, K)), limit=keep)
    np.testing.assert_array_equal(state.frontier, plain.lengths + keep)
    np.testing.assert_array_equal(state.anchor, plain.text[np.arange(ROWS), keep])
    assert_same(plain.phases.catch_up(state), plain.at(state.frontier), **CLOSE)


def test_committing_nothing_leaves_a_row_byte_for_byte(plain):
    """Whatever the round computed for it, NaN included; its neighbours go on."""
    state = plain.phases.catch_up(forced_round(plain, plain.initial, [2] * ROWS))
    proposal = plain.forced(state, [4] * ROWS)
    verified = plain.phases.verify(state, proposal)
    accepted = plain.phases.accept(state, verified, proposal, tiny.greedy(ROWS))
    count = np.array([5, 0, 0, 5, 0, 5, 5, 0])
    verified = poison_columns(verified, count)
    after = plain.phases.commit(state, verified, accepted, jnp.asarray(count))
    for row in np.flatnonzero(count == 0):
        for path, (old, new) in row_leaves(state, after, row):
            assert old.tobytes() == new.tobytes(), (row, path)
    moved = np.flatnonzero(count)
    assert_same(plain.phases.catch_up(after), plain.at(after.frontier), rows=moved, **CLOSE)


def row_leaves(before, after, row):
    """Every leaf of a state cut down to one row; of a pool, the pages that the row owns."""

    def cut(path, leaf):
        name = jax.tree_util.keystr(path)
        leaf = np.asarray(leaf)
        if ".kv." in name or ".pages." in name:
            pool = before.target.kv if ".kv." in name else before.draft.pages
            return (
                leaf[row] if "block_table" in name else leaf[:, np.asarray(pool.block_table)[row]]
            )
        stacked = ".gdn." in name or ".ring." in name
        return leaf[:, row] if stacked else leaf[row]

    old, new = (jax.tree_util.tree_leaves_with_path(tree) for tree in (before, after))
    return [
        (jax.tree_util.keystr(path), (cut(path, a), cut(path, b)))
        for (path, a), (_, b) in zip(old, new, strict=True)
    ]


# --- dead memory -----------------------------------------------------------------------------


def nan_where(dead, x):
    return jnp.where(dead, jnp.asarray(jnp.nan, x.dtype), x)


def poison_columns(verified, kept):
    """NaN in the columns of every row from `kept[b]` on."""
    dead = jnp.arange(WIDTH) >= jnp.asarray(kept)[:, None]

    def rows_first(x):
        return nan_where(dead.reshape(*dead.shape, *(1,) * (x.ndim - 2)), x)

    def layers_first(x):
        return nan_where(dead.reshape(1, *dead.shape, *(1,) * (x.ndim - 3)), x)

    return verified._replace(
        logits=rows_first(verified.logits),
        hidden=rows_first(verified.hidden),
        taps=rows_first(verified.taps),
        key=layers_first(verified.key),
        value=layers_first(verified.value),
        records=GDNRecords(*map(layers_first, verified.records)),
    )


def poison_pool(pool, reach):
    """NaN in every slot of a pool that no row has filled."""
    live = np.zeros(pool.key.shape[1:3], bool)
    for row, length in enumerate(np.asarray(reach)):
        positions = np.arange(length)
        page = np.asarray(pool.block_table)[row, positions // pool.page_size]
        live[page, positions % pool.page_size] = True
    dead = ~live[None, :, :, None, None]
    return pool._replace(key=nan_where(dead, pool.key), value=nan_where(dead, pool.value))


def poison_state(state):
    """NaN in dead ring slots, unreached pages, and pending columns beyond F - F_ctx."""
    frontier, reach = np.asarray(state.frontier), np.asarray(state.context_frontier)
    ring, pages = state.draft
    slots = np.arange(ring.slots)
    dead = (slots >= reach[:, None])[None, :, :, None, None]  # before the first wrap
    ring = ring._replace(key=nan_where(dead, ring.key), value=nan_where(dead, ring.value))
    if pages is not None:
        pages = poison_pool(pages, reach)
    pending = np.arange(WIDTH) >= (frontier - reach)[:, None]
    return state._replace(
        target=state.target._replace(kv=poison_pool(state.target.kv, frontier)),
        draft=state.draft._replace(ring=ring, pages=pages),
        pending=nan_where(pending[..., None], state.pending),
    )


def live_of(x, count):
    """Columns below the count of each row, one after the other."""
    return np.concatenate([np.asarray(x)[row, :n].ravel() for row, n in enumerate(count)])


def test_nan_in_dead_memory_changes_nothing(plain):
    """Before every phase, in all that the phase may not read; to the bit."""
    phases = plain.phases
    # Short prompts: rings with dead slots for a while.
    clean = phases.start(tiny.prompts(ROWS, shortest=1, longest=6))
    dirty = poison_state(clean)
    rng = np.random.default_rng(4)
    for index in range(5):
        clean, dirty = phases.catch_up(clean), poison_state(phases.catch_up(dirty))
        assert_same(dirty, clean)
        count = (np.arange(ROWS) + 3 * index) % WIDTH
        args = (tiny.greedy(ROWS), jnp.asarray(count))
        proposal, other = phases.propose(clean, *args), phases.propose(dirty, *args)
        np.testing.assert_array_equal(live_of(other.tokens, count), live_of(proposal.tokens, count))
        np.testing.assert_array_equal(live_of(other.q, count), live_of(proposal.q, count))

        # Go on with proposals of which some are right; dead ones differ, and have no law.
        reference = phases.verify(clean, proposal)
        right = np.asarray(reference.logits.argmax(-1))[:, :1]
        tokens = jnp.asarray(np.concatenate([right, np.asarray(proposal.tokens)[:, 1:]], axis=1))
        live = jnp.arange(K) < count[:, None]
        junk = jnp.asarray(rng.integers(tiny.VOCAB, size=(ROWS, K)), jnp.int32)
        proposal = proposal._replace(
            tokens=tokens, candidates=tokens[..., None], q=jnp.ones((ROWS, K, 1))
        )
        other = Proposal(
            jnp.where(live, tokens, junk),
            jnp.where(live, tokens, junk)[..., None],
            nan_where(~live[..., None], jnp.ones((ROWS, K, 1))),
            proposal.count,
        )
        verified = phases.verify(clean, proposal)
        dirty_verified = phases.verify(dirty, other)
        for name in ("logits", "hidden", "taps"):
            np.testing.assert_array_equal(
                live_of(getattr(dirty_verified, name), count + 1),
                live_of(getattr(verified, name), count + 1),
                err_msg=name,
            )
        dirty_verified = poison_columns(dirty_verified, count + 1)
        accepted = phases.accept(clean, verified, proposal, tiny.greedy(ROWS))
        other_accepted = phases.accept(dirty, dirty_verified, other, tiny.greedy(ROWS))
        np.testing.assert_array_equal(other_accepted.tokens, accepted.tokens)
        dirty_verified = poison_columns(dirty_verified, accepted.licensed)
        clean = phases.commit(clean, verified, accepted, accepted.licensed)
        dirty = poison_state(
            phases.commit(dirty, dirty_verified, other_accepted, accepted.licensed)
        )
        assert_same(dirty, clean)
    assert set(np.asarray(accepted.accepted).tolist()) != {0}


# --- Fold ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def compiled_round(phases_functions, state, proposal, controls, count):
    """Verify, accept and commit as one program, as the decode loop has them."""
    verify, accept, commit = phases_functions
    verified = verify(state, proposal)
    accepted = accept(state, verified, proposal, controls)
    return commit(state, verified, accepted, count), verified.records


@jax.jit
def trajectory(records, recurrent):
    """States after each recorded column, as `verify` goes through them: `[L, W, B, Hv, Dk, Dv]`.

    A query along axis d reads row d of the state times a constant; each row runs once per axis.
    """
    _, rows, width, heads, dim = records.key.shape
    query = jnp.repeat(jnp.eye(dim), rows, axis=0)  # [Dk * B, Dk]
    query = jnp.broadcast_to(query[:, None, None], (dim * rows, width, heads, dim))
    live = jnp.full(dim * rows, width)

    def layer(recurrent, *columns):
        repeated = (jnp.tile(x, (dim, *(1,) * (x.ndim - 1))) for x in (*columns, recurrent))
        outputs = gated_delta_rule.verify(query, *repeated, live)
        outputs = outputs.reshape(dim, rows, *outputs.shape[1:])
        return jnp.moveaxis(outputs, (2, 0), (0, 3))

    layers = [layer(*part) for part in zip(recurrent, *records[:4], strict=True)]
    return jnp.stack(layers)


@jax.jit
def readings(recurrent):
    """A state, read as `trajectory` reads it."""
    axes = l2_normalise(jnp.eye(recurrent.shape[-2]))
    return jnp.stack(
        [read(recurrent, jnp.broadcast_to(axis, recurrent.shape[:-1])) for axis in axes], axis=-2
    )


def test_fold_is_the_verify_trajectory_to_the_bit():
    """Folded inside the program of a whole round, against verify run on the same records."""
    plain = plain_run(tiny.DFLASH)
    state = plain.phases.catch_up(forced_round(plain, plain.initial, [1, 5, 0, 3, 2, 6, 4, 7]))
    proposal = plain.forced(state, [K] * ROWS)
    functions = (plain.phases.verify, plain.phases.accept, plain.phases.commit)
    for shift in (0, 5):
        count = (np.arange(ROWS) + shift) % WIDTH + 1
        after, records = compiled_round(
            functions, state, proposal, tiny.greedy(ROWS), jnp.asarray(count)
        )
        states = np.asarray(trajectory(records, state.target.gdn.recurrent))
        folded = np.asarray(readings(after.target.gdn.recurrent))
        for row, n in enumerate(count):
            np.testing.assert_array_equal(
                folded[:, row], states[:, n - 1, row], err_msg=f"fold of {n}"
            )
            assert np.any(states[:, n - 1, row] != states[:, n - 2, row])


# --- rows ------------------------------------------------------------------------------------


def take_rows(state, order):
    """The rows of a state in another order, pools untouched."""
    order = np.asarray(order)

    def pool(pages):
        return pages and pages._replace(block_table=pages.block_table[order])

    ring = state.draft.ring
    gdn = state.target.gdn
    return state._replace(
        frontier=state.frontier[order],
        context_frontier=state.context_frontier[order],
        anchor=state.anchor[order],
        hidden=state.hidden[order],
        seed=state.seed[order],
        pending=state.pending[order],
        counts=jax.tree.map(lambda leaf: leaf[order], state.counts),
        target=state.target._replace(
            kv=pool(state.target.kv),
            gdn=gdn._replace(recurrent=gdn.recurrent[:, order], conv=gdn.conv[:, order]),
        ),
        draft=state.draft._replace(
            ring=ring._replace(key=ring.key[:, order], value=ring.value[:, order]),
            pages=pool(state.draft.pages),
        ),
    )


def two_rounds(phases, state, controls, plans):
    """Two whole rounds with the draft's own proposals; what each published."""
    published = []
    for count in plans:
        state = phases.catch_up(state)
        proposal = phases.propose(state, controls, jnp.asarray(count))
        verified = phases.verify(state, proposal)
        accepted = phases.accept(state, verified, proposal, controls)
        state = phases.commit(state, verified, accepted, accepted.licensed)
        published.append((np.asarray(proposal.tokens), np.asarray(accepted.tokens)))
    return phases.catch_up(state), published


def test_rows_in_another_order_give_the_same_rows(plain):
    """Temperatures, seeds, counts and lengths all differ by row, and all move along."""
    phases, rng = plain.phases, np.random.default_rng(9)
    temperature = jnp.array([0.0, 0.8, 1.2, 0.0, 0.5, 0.0, 2.0, 1.0])
    controls = tiny.greedy(ROWS)._replace(temperature=temperature)
    plans = np.array([[7, 0, 3, 7, 5, 1, 7, 2], [0, 7, 7, 2, 1, 7, 6, 7]])
    seeds = rng.integers(2**32, size=ROWS, dtype=np.uint32)
    state = phases.start(plain.prompts, controls, seeds)
    after, published = two_rounds(phases, state, controls, plans)
    for _ in range(2):
        order = rng.permutation(ROWS)
        moved, others = two_rounds(
            phases,
            take_rows(state, order),
            controls._replace(temperature=temperature[order]),
            plans[:, order],
        )
        assert_same(moved, take_rows(after, order))
        for (tokens, licensed), (other_tokens, other_licensed) in zip(
            published, others, strict=True
        ):
            np.testing.assert_array_equal(other_tokens, tokens[order])
            np.testing.assert_array_equal(other_licensed, licensed[order])


def test_a_row_is_untouched_by_what_the_others_hold(plain):
    """Other prompts, NaN states and inactive rows beside it: the same bits."""
    phases, controls = plain.phases, tiny.greedy(ROWS)
    plans = np.full((2, ROWS), K)
    kept = [1, 4]
    expected, published = two_rounds(phases, plain.initial, controls, plans)
    strangers = tiny.prompts(ROWS, seed=77, longest=30)
    mixed = [plain.prompts[row] if row in kept else strangers[row] for row in range(ROWS)]
    after, others = two_rounds(phases, phases.start(mixed), controls, plans)
    assert_same(after, expected, rows=kept)
    for (tokens, licensed), (other_tokens, other_licensed) in zip(published, others, strict=True):
        np.testing.assert_array_equal(other_tokens[kept], tokens[kept])
        np.testing.assert_array_equal(other_licensed[kept], licensed[kept])
    # A ruined neighbour.
    ruined = jnp.asarray([row not in kept for row in range(ROWS)])
    gdn = plain.initial.target.gdn
    gdn = gdn._replace(
        recurrent=nan_where(ruined[None, :, None, None, None], gdn.recurrent),
        conv=nan_where(ruined[None, :, None, None], gdn.conv),
    )
    broken = plain.initial._replace(target=plain.initial.target._replace(gdn=gdn))
    after, _ = two_rounds(phases, broken, controls, plans)
    assert_same(after, expected, rows=kept)


def test_an_inactive_row_is_not_run(plain):
    """No live column: commit of zero keeps it, and the active rows do not notice."""
    phases = plain.phases
    state = phases.catch_up(plain.initial)
    proposal = plain.forced(state, [3] * ROWS)
    active = jnp.asarray(np.arange(ROWS) % 2 == 0)
    both, some = phases.verify(state, proposal), phases.verify(state, proposal, active)
    for name in ("logits", "hidden", "taps"):
        np.testing.assert_array_equal(getattr(some, name)[active], getattr(both, name)[active])


# --- proposals -------------------------------------------------------------------------------


def test_dflash_drafts_only_its_live_columns():
    """P < K gives the proposals of a block that is P + 1 wide, not the first P of a wider one."""
    plain = plain_run(tiny.DFLASH)
    state = plain.phases.catch_up(plain.initial)
    controls, narrow = tiny.greedy(ROWS), 3
    full = plain.phases.propose(state, controls, jnp.full(ROWS, K)).tokens
    short = plain.phases.propose(state, controls, jnp.full(ROWS, narrow)).tokens
    spec = dataclasses.replace(plain.phases.spec, draft_tokens=narrow)
    own = tiny.COMPILED["propose"](
        spec, plain.phases.weights, state, controls, jnp.full(ROWS, narrow)
    ).tokens
    np.testing.assert_array_equal(short[:, :narrow], own)
    assert np.any(np.asarray(full[:, :narrow]) != np.asarray(own))
    # Each row by its own count.
    count = np.where(np.arange(ROWS) % 2, narrow, K)
    mixed = np.asarray(plain.phases.propose(state, controls, jnp.asarray(count)).tokens)
    for row, width in enumerate(count):
        expected = full if width == K else short
        np.testing.assert_array_equal(mixed[row, :width], expected[row, :width])


def test_dflash2_always_drafts_the_whole_block():
    plain = plain_run(tiny.DFLASH2)
    state = plain.phases.catch_up(plain.initial)
    controls = tiny.greedy(ROWS)._replace(temperature=jnp.full(ROWS, 0.8))
    full = plain.phases.propose(state, controls, jnp.full(ROWS, K))
    for count in (np.zeros(ROWS, int), np.arange(ROWS)):
        some = plain.phases.propose(state, controls, jnp.asarray(count))
        for name in ("tokens", "candidates", "q"):
            np.testing.assert_array_equal(getattr(some, name), getattr(full, name))
        np.testing.assert_array_equal(some.count, count)


def test_proposals_depend_on_the_anchor(plain):
    """Column 0 carries the committed token, not the mask."""
    state = plain.phases.catch_up(plain.initial)
    args = (tiny.greedy(ROWS), jnp.full(ROWS, K))
    tokens = np.asarray(plain.phases.propose(state, *args).tokens)
    other = state._replace(anchor=(state.anchor + 17) % tiny.VOCAB)
    changed = np.asarray(plain.phases.propose(other, *args).tokens)
    assert np.all(np.any(tokens != changed, axis=1))


# --- prefill ---------------------------------------------------------------------------------


@DRAFTS
def test_prompt_chunks_of_any_size_give_the_same_state_and_proposals(draft):
    """100 tokens at once, by 32, by 7 and one by one."""
    phases = tiny.Phases(tiny.pair(draft, target=tiny.SMALL), K)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(tiny.VOCAB, size=n).tolist() for n in (100, 99)]
    controls, count = tiny.greedy(2), jnp.full(2, K)
    whole = phases.catch_up(phases.start(prompts, columns=100))
    expected = phases.propose(whole, controls, count)
    for size, columns in ((32, 100), (7, 8), (1, 8)):
        state = phases.catch_up(phases.start(prompts, chunk=size, columns=columns))
        assert_same(state, whole, rows=range(2), **CLOSE)
        proposal = phases.propose(state, controls, count)
        np.testing.assert_array_equal(proposal.tokens, expected.tokens, err_msg=f"chunks of {size}")


# --- bfloat16 --------------------------------------------------------------------------------


@DRAFTS
def test_bfloat16(draft):
    """Each role has its dtype, and a forced round leaves what plain steps leave."""
    phases = tiny.Phases(tiny.pair(draft, "bfloat16", tiny.SMALL), 3)
    rows = 4
    state = phases.start(tiny.prompts(rows, shortest=3, longest=20))
    # A compiled loop carries the state: a dtype that a phase changed would not fit.
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(phases.init(range(rows)))]
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
    assert state.draft.ring.key.dtype == jnp.bfloat16
    assert state.draft.ring.value.dtype == jnp.float16
    assert state.target.gdn.recurrent.dtype == jnp.float32
    assert state.target.gdn.conv.dtype == jnp.bfloat16
    assert state.target.kv.key.dtype == state.target.kv.value.dtype == jnp.bfloat16
    if state.draft.pages is not None:
        assert state.draft.pages.key.dtype == state.draft.pages.value.dtype == jnp.bfloat16
    controls, nothing = tiny.greedy(rows), jnp.zeros(rows, jnp.int32)
    steps, text = state, []
    for _ in range(3):
        steps = phases.catch_up(steps)
        proposal = point_mass(jnp.zeros((rows, 3), jnp.int32), nothing)
        verified = phases.verify(steps, proposal)
        accepted = phases.accept(steps, verified, proposal, controls)
        steps = phases.commit(steps, verified, accepted, accepted.licensed)
        text.append(steps.anchor)
    steps = phases.catch_up(steps)

    proposal = point_mass(jnp.stack(text, axis=1), jnp.full(rows, 2))
    verified = phases.verify(phases.catch_up(state), proposal)
    accepted = phases.accept(state, verified, proposal, controls)
    np.testing.assert_array_equal(accepted.accepted, 2)
    after = phases.catch_up(phases.commit(state, verified, accepted, accepted.licensed))
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == dtypes
    # bfloat16 has 8 bits; a few of them accumulate.
    assert_same(after, steps, rows=range(rows), rtol=0.05, atol=0.05)
    following = phases.propose(after, controls, jnp.full(rows, 3))
    assert np.all((np.asarray(following.tokens) >= 0) & (np.asarray(following.tokens) < tiny.VOCAB))
    assert np.isfinite(np.asarray(following.q)).all()


# --- an indexed proposal head ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_an_indexed_head_proposes_its_tokens_and_no_others(name):
    """All rows in order change nothing; of some rows the best are what the whole head ranks so."""
    draft = {"dflash": tiny.DFLASH, "dflash2": tiny.DFLASH2}[name]
    phases = tiny.Phases(tiny.pair(draft), K)
    state = phases.start(tiny.prompts(ROWS))
    controls, count = tiny.greedy(ROWS), jnp.full(ROWS, K)
    whole = phases.propose(state, controls, count)
    head = phases.weights.target["lm_head"]["weight"]

    def propose(ids):
        weights = phases.weights._replace(
            proposal_head=proposal_head.take_rows(head, jnp.asarray(ids))
        )
        return tiny.COMPILED["propose"](phases.spec, weights, state, controls, count)

    for got, want in zip(propose(np.arange(tiny.VOCAB)), whole, strict=True):
        np.testing.assert_array_equal(got, want)
    # Without the tokens the whole head proposed: others, and all of them out of the subset.
    ids = np.setdiff1d(np.arange(tiny.VOCAB), np.unique(whole.tokens))
    subset = propose(ids)
    assert np.isin(subset.tokens, ids).all() and np.isin(subset.candidates, ids).all()
    # The shortlist of the first column does not depend on choices: the whole head's order.
    if draft.dflash2:
        wide = phases.weights._replace(proposal_head=None)
        config = dataclasses.replace(phases.spec.draft, selector_top_k=tiny.VOCAB)
        spec = dataclasses.replace(phases.spec, draft=config)
        ranked = np.asarray(make_lattice(spec, wide, state).candidates)
        for row, column in np.ndindex(ROWS, K):
            kept = ranked[row, column][np.isin(ranked[row, column], ids)]
            np.testing.assert_array_equal(
                subset.candidates[row, column], kept[: draft.selector_top_k]
            )
