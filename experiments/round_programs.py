"""A round as three programs with abstract weights, and what a compiler says of them.

    draft   catch_up and propose     verify   the target over the block     commit   pages and Fold

The weights and the state exist as shapes only, so that any geometry fits on any machine.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.decoding import round as phases
from dflash_jax.decoding.distribution import Controls, Sampling, make_controls
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.io.names import tensor_table
from dflash_jax.precision import compute_dtype
from dflash_jax.state.sequence import SequenceState, init_sequences
from dflash_jax.typing import Params
from pallas_kernels.cuda_topology import Program

NAMES = ("draft", "verify", "commit")

# XLA merges products of one input where one of them is small, and for that concatenates their
# weights in every call. Of JAX 0.10.2, on Gated DeltaNet's four projections: 169 MB written and
# read again per layer at 27B. JAX 0.12 leaves those alone by itself.
XLA_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}


def make_spec(target: TargetConfig, draft: DraftConfig, dtype: str) -> Spec:
    """The round of a pair at its trained block width."""
    return Spec(target, draft, draft.block_size - 1, target.vocab_size, dtype)


def abstract_params(config: TargetConfig | DraftConfig, dtype: str) -> Params:
    """The params tree that loading a checkpoint of this geometry would give, as shapes."""
    params: dict[str, Any] = {}
    for tensor in tensor_table(config):
        *folders, name = tensor.path
        place = params
        for folder in folders:
            place = place.setdefault(folder, {})
        kept = jnp.float32 if tensor.keep_float32 else compute_dtype(dtype)
        place[name] = jax.ShapeDtypeStruct(tensor.shape, kept)
    return params


def abstract_weights(spec: Spec) -> Weights:
    """Weights of both models as shapes."""
    return Weights(
        abstract_params(spec.target, spec.dtype), abstract_params(spec.draft, spec.dtype)
    )


def abstract_state(spec: Spec, rows: int, capacity: int) -> SequenceState:
    """State of `rows` sequences of up to `capacity` tokens as shapes."""
    make = partial(
        init_sequences,
        spec.target,
        spec.draft,
        capacity=capacity,
        block_width=spec.width,
        dtype=compute_dtype(spec.dtype),
    )
    return jax.eval_shape(make, jax.ShapeDtypeStruct((rows,), jnp.uint32))


def greedy_controls(rows: int) -> Controls:
    """Controls of rows that all decode greedily."""
    return make_controls([Sampling()] * rows)


def draft(spec: Spec, weights: Weights, state: SequenceState, controls: Controls):
    """Pending features into the rings, then one block of proposals: `(state, proposal)`."""
    state = phases.catch_up(spec, weights, state)
    count = jnp.full_like(state.frontier, spec.draft_tokens)
    return state, phases.propose(spec, weights, state, controls, count)


@dataclasses.dataclass(frozen=True)
class Part:
    """One program of a round.

    Attributes:
      name: "draft", "verify" or "commit".
      function: of the operands.
      operands: as shapes.
      donate: operand whose memory the new state takes, as `jax.jit` has it.
      kept: name -> large state arrays; the program may neither copy them nor, where the state is
        not donated, make them at all.
    """

    name: str
    function: Callable
    operands: tuple
    donate: tuple[int, ...]
    kept: dict[str, jax.ShapeDtypeStruct]

    def failures(self, program: Program) -> list[str]:
        """What is wrong with the compiled program, in words; see `kept`."""
        found = []
        for name, array in self.kept.items():
            makers = program.makers(array)
            copies = {made for made in makers if made.startswith("copy") or not self.donate}
            found += [
                f"{self.name}: {makers[made]} x {made} of the {name}" for made in sorted(copies)
            ]
        size = sum(map(_bytes, self.kept.values())) if self.donate else 0
        if program.alias_bytes < size:
            found.append(
                f"{self.name}: {program.alias_bytes} bytes are updated in place, expected at "
                f"least the {size} of {', '.join(self.kept)}"
            )
        return found


def _bytes(array) -> int:
    return array.size * array.dtype.itemsize


def parts(spec: Spec, rows: int, capacity: int) -> list[Part]:
    """The three programs at a batch size and a capacity in tokens per row."""
    weights, state = abstract_weights(spec), abstract_state(spec, rows, capacity)
    controls = jax.eval_shape(lambda: greedy_controls(rows))
    _, proposal = jax.eval_shape(partial(draft, spec), weights, state, controls)
    verified = jax.eval_shape(partial(phases.verify, spec), weights, state, proposal)
    accepted = jax.eval_shape(
        partial(phases.accept, spec), state, verified, proposal, controls
    )
    count = jax.ShapeDtypeStruct((rows,), jnp.int32)
    kept = {
        "target's key pages": state.target.kv.key,
        "target's value pages": state.target.kv.value,
        "recurrent state": state.target.gdn.recurrent,
    }
    if state.draft.ring is not None:
        kept |= {"key ring": state.draft.ring.key, "value ring": state.draft.ring.value}
    if state.draft.pages is not None:
        kept |= {
            "draft's key pages": state.draft.pages.key,
            "draft's value pages": state.draft.pages.value,
        }
    # The logits, by far the largest array of a round, end with `accept`.
    verified_kept = verified._replace(logits=None)
    return [
        Part("draft", partial(draft, spec), (weights, state, controls), (1,), kept),
        Part("verify", partial(phases.verify, spec), (weights, state, proposal), (), kept),
        Part("commit", phases.commit, (state, verified_kept, accepted, count), (0,), kept),
    ]
