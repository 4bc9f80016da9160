"""The Qwen3.5 dense text stack with residual taps.

One forward serves training, chunked prefill and verify. Nothing persistent is written here:
the block's keys and values and the new GDN state (or its records) are results, and the caller
commits as much of them as it wants.
"""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax.config import TargetConfig
from dflash_jax.config.target import FULL
from dflash_jax.layers import Embedding, Linear, RMSNorm, SwiGLU
from dflash_jax.state.gdn import GDNRecords, GDNState
from dflash_jax.state.sequence import TargetCache
from dflash_jax.target.attention import GatedAttention
from dflash_jax.target.gated_delta_net import GatedDeltaNet
from dflash_jax.target.positions import mrope_tables
from dflash_jax.typing import Array, DType, Float, Int
from pallas_kernels.paged_attention import paged_attention


class TargetBlock(NamedTuple):
    """What a forward over T columns yields.

    hidden: `[B, T, H]` after the final norm.
    taps: `[B, T, taps * H]`, residual outputs of the tapped blocks, in recorded order.
    key, value: `[L_full, B, T, K, D]`, not yet in any page.
    gdn: records of the block (verify) or the state after it (prefill).
    """

    hidden: Float[Array, "B T H"]
    taps: Float[Array, "B T F"]
    key: Float[Array, "L B T K D"]
    value: Float[Array, "L B T K D"]
    gdn: GDNState | GDNRecords


class DecoderLayer(nn.Module):
    """Pre-norm block; the mixer is chosen by `layer_types`."""

    config: TargetConfig
    layer: int
    dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x, mix):
        """`mix(mixer, normed)` calls the mixer with its part of the cache -> (out, results)."""
        c = self.config

        def norm(name):
            return RMSNorm(
                c.hidden_size, c.rms_norm_eps, zero_centred=True, dtype=self.dtype, name=name
            )

        if c.layer_types[self.layer] == FULL:
            mixer = GatedAttention(c, self.dtype, name="self_attn")
        else:
            mixer = GatedDeltaNet(c, self.dtype, name="linear_attn")
        mixed, results = mix(mixer, norm("input_layernorm")(x))
        x = x + mixed
        mlp = SwiGLU(c.intermediate_size, self.dtype, name="mlp")
        return x + mlp(norm("post_attention_layernorm")(x)), results


class TextStack(nn.Module):
    """Embedding, decoder layers, final norm (`model.*` in the checkpoint)."""

    config: TargetConfig
    dtype: DType = jnp.float32

    def setup(self):
        c = self.config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, self.dtype)
        self.layers = [DecoderLayer(c, i, self.dtype) for i in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, True, self.dtype)

    def __call__(self, x, positions, lengths, live, cache, tap_ids, record):
        c = self.config
        rotary = mrope_tables(c, positions)
        keys, values, gdn, taps = [], [], [], {}
        for index, layer in enumerate(self.layers):
            if c.layer_types[index] == FULL:
                attend = partial(
                    _attend_paged, kv=cache.kv, layer=len(keys), lengths=lengths, live=live
                )
                x, (key, value) = layer(x, partial(_mix_attention, rotary, attend))
                keys.append(key)
                values.append(value)
            else:
                at = len(gdn)
                before = (cache.gdn.recurrent, cache.gdn.conv[at])
                x, after = layer(x, partial(_mix_gdn, *before, live, record, at))
                gdn.append(after)
            if index in tap_ids:
                taps[index] = x
        # Recorded order may repeat nothing but need not be sorted.
        tapped = [taps[index] for index in tap_ids] or [x[..., :0]]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gdn)
        return TargetBlock(
            hidden=self.norm(x),
            taps=jnp.concatenate(tapped, axis=-1),
            key=jnp.stack(keys),
            value=jnp.stack(values),
            gdn=stacked if record else GDNState(*stacked),
        )


def _attend_paged(query, key, value, *, kv, layer, lengths, live):
    return paged_attention(
        query, key, value, kv.key, kv.value, kv.block_table, lengths, live, layer=layer
    )


def _mix_attention(rotary, attend, mixer, x):
    out, key, value = mixer(x, rotary, attend)
    return out, (key, value)


def _mix_gdn(recurrent, conv, live, record, layer, mixer, x):
    return mixer(x, recurrent, conv, live, record=record, layer=layer)


class TargetModel(nn.Module):
    """`Qwen3_5ForCausalLM`: the text stack and its head."""

    config: TargetConfig
    dtype: DType = jnp.float32

    def setup(self):
        self.model = TextStack(self.config, self.dtype)
        if not self.config.tie_word_embeddings:
            self.lm_head = Linear(self.config.vocab_size, self.dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        live: Int[Array, "B"],
        cache: TargetCache,
        *,
        tap_ids: tuple[int, ...] = (),
        record: bool = False,
    ) -> TargetBlock:
        """Runs T columns at positions `lengths[b] + i`, of which the first `live[b]` count.

        Args:
          tokens: ids; those of dead columns may be any valid id.
          lengths: committed tokens of each row (F).
          live: live columns of each row, 0..T.
          cache: committed state; read only.
          tap_ids: zero-based block ids whose residual outputs are returned.
          record: False runs the chunked GDN rule and returns the new state; True runs the
            recurrence and returns records (verify).
        """
        positions = lengths[:, None] + jnp.arange(tokens.shape[1])
        x = self.model.embed_tokens(tokens)
        return self.model(x, positions, lengths, live, cache, tap_ids, record)

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... H"]:
        return self.model.embed_tokens(tokens)

    def logits(self, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """Float32 scores over every head row: never rounded to the activations' dtype."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.attend(hidden, jnp.float32)
        return self.lm_head(hidden, jnp.float32)
