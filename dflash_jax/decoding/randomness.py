"""Counter-keyed randomness: a draw is named by what it is for, never by when it happens.

| purpose  | position                   | used for                                             |
|----------|----------------------------|------------------------------------------------------|
| TARGET   | of the token drawn         | a target sample that no proposal preceded            |
| PROPOSAL | of the proposed token      | DFlash2's walk (one uniform per column)              |
| ACCEPT   | of the proposed token      | the acceptance test (one uniform per proposal)       |
| CORRECTION | of the token drawn       | residual sample after a rejection                    |
| BONUS    | of the token drawn         | target sample after every proposal was accepted      |

The key is (request seed, absolute position, purpose): neither the batch row nor the round enters,
so a request draws the same numbers alone, in any row, and after a restore.
"""

import enum

import jax
import jax.numpy as jnp

from dflash_jax.typing import Array, Float, Int, UInt32


class Purpose(enum.IntEnum):
    TARGET = 0
    PROPOSAL = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4


def key_for(
    seed: UInt32[Array, ""], position: Int[Array, ""], purpose: Int[Array, ""] | Purpose
) -> Array:
    """The typed key of one draw."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, position), purpose)


def uniforms(
    seed: UInt32[Array, "B"], start: Int[Array, "B"], columns: int, purpose: Purpose
) -> Float[Array, "B columns"]:
    """One uniform in [0, 1) for each of the positions `start[b] + i`."""

    def draw(seed, position):
        return jax.random.uniform(key_for(seed, position, purpose))

    # One flat axis: two nested ones take XLA twice as long to compile.
    positions = start[:, None] + jnp.arange(columns)
    flat = jax.vmap(draw)(jnp.repeat(seed, columns), positions.reshape(-1))
    return flat.reshape(positions.shape)


def draw_tokens(
    law: Float[Array, "B V"],
    seed: UInt32[Array, "B"],
    position: Int[Array, "B"],
    purpose: Int[Array, "B"],
) -> Int[Array, "B"]:
    """One token per row from an (unnormalised) law; tokens of zero mass are never drawn."""

    def draw(law, seed, position, purpose):
        return jax.random.categorical(key_for(seed, position, purpose), jnp.log(law))

    return jax.vmap(draw)(law, seed, position, purpose).astype(jnp.int32)
