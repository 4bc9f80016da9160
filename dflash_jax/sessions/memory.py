"""How much memory an engine takes, from configuration and start-up widths alone."""

import dataclasses

import jax
import jax.numpy as jnp

from dflash_jax.decoding import round as phases
from dflash_jax.decoding.distribution import Sampling, make_controls
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.sessions import rows as row_tools
from dflash_jax.state.sequence import init_sequences


class OutOfMemoryError(MemoryError):
    """An engine that does not fit; the message has the plan."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device.

    weights: target, draft and indexed proposal head. target_kv, draft_kv: pages of the
    full-attention layers. gdn: states and convolution histories. rings: of the local draft layers.
    pending: captured features. tokens: counts of tokens, block tables, hidden columns, counters.
    round: what a round holds between verify and commit, GDN records the largest of it.
    workspace: an estimate of the scratch memory of the largest program; compilers decide it.
    """

    weights: int
    target_kv: int
    draft_kv: int
    gdn: int
    rings: int
    pending: int
    tokens: int
    round: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def check(self, limit: int | None) -> None:
        """Refuses a plan over `limit` bytes; None knows no limit.

        Raises:
          OutOfMemoryError: with what takes how much.
        """
        if limit is not None and self.total > limit:
            parts = ", ".join(
                f"{name} {size / 2**20:,.1f}" for name, size in dataclasses.asdict(self).items()
            )
            raise OutOfMemoryError(
                f"the engine needs {self.total / 2**20:,.1f} MiB, the device has "
                f"{limit / 2**20:,.1f} ({parts})"
            )


def memory_plan(
    spec: Spec,
    weights: Weights,
    *,
    rows: int,
    max_context: int,
    prefill_chunk: int,
    page_size: int,
    pages: int,
) -> MemoryPlan:
    """The plan of an engine; nothing is computed, and `weights` may be shapes only."""

    def sequences():
        seeds = jnp.zeros(rows, jnp.uint32)
        return init_sequences(
            spec.target,
            spec.draft,
            seeds,
            max_context,
            spec.width,
            spec.dtype,
            page_size,
            pages,
            spec.context_dtype,
        )

    state = jax.eval_shape(sequences)
    pools = [pool._replace(block_table=None) for pool in row_tools.pools(state)]
    kv = [_bytes(pool) for pool in pools] + [0]
    rings = 0 if state.draft is None else _bytes(state.draft.ring)
    gdn, pending = _bytes(state.target.gdn), _bytes(state.pending)
    verified, logits = _round(spec, weights, state)
    return MemoryPlan(
        weights=_bytes(weights),
        target_kv=kv[0],
        draft_kv=kv[1],
        gdn=gdn,
        rings=rings,
        pending=pending,
        tokens=_bytes(state) - sum(kv) - rings - gdn - pending,
        round=verified,
        workspace=_workspace(spec, rows * spec.width, prefill_chunk, logits),
    )


def device_limit() -> int | None:
    """Bytes that the first device has for arrays; None where it does not say."""
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _round(spec: Spec, weights: Weights, state) -> tuple[int, int]:
    """Bytes of what verify leaves for commit, and of its logits."""

    def verify(weights, state):
        controls = make_controls([Sampling()] * state.frontier.shape[0], width=1)
        proposed = jnp.zeros_like(state.frontier) + spec.draft_tokens
        proposal = phases.propose(spec, weights, state, controls, proposed)
        return phases.verify(spec, weights, state, proposal)

    verified = jax.eval_shape(verify, weights, state)
    return _bytes(verified._replace(logits=None)), _bytes(verified.logits)


def _workspace(spec: Spec, columns: int, chunk: int, logits: int) -> int:
    """Estimated from the widest layer: six of its activations in float32, three of the logits.

    Six and three are what the embedded pair's programs take on a CPU, within a factor of two.
    """
    config = spec.target
    widest = max(
        2 * config.intermediate_size,
        config.conv_channels,
        2 * config.num_attention_heads * config.head_dim,
        len(spec.taps) * config.hidden_size,
    )
    return 6 * widest * max(columns, chunk) * 4 + 3 * logits
