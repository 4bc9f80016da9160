"""The masked-block draft: DFlash, and DFlash2 with its dynamic convolutions.

Where the context lives is not known here: the caller passes `attend`, which closes over rings
and pages when decoding and over packed anchors when training. So both run the same modules.
"""

import flax.linen as nn
import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.draft.attention import Attend, DraftAttention
from dflash_jax.draft.dynamic_conv import DynamicConv
from dflash_jax.layers import Linear, RMSNorm, SwiGLU
from dflash_jax.typing import Array, DType, Float, Int
from pallas_kernels.elementary import rotary_tables


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU; DFlash2 wraps each branch in a dynamic convolution."""

    config: DraftConfig
    layer: int
    dtype: DType = jnp.float32

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=self.dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=self.dtype)
        self.self_attn = DraftAttention(c, self.layer, self.dtype)
        self.mlp = SwiGLU(c.intermediate_size, self.dtype)
        if c.dflash2:
            self.attention_conv = DynamicConv(c, self.dtype)
            self.mlp_conv = DynamicConv(c, self.dtype)

    def __call__(self, x, rotary, attend):
        def attention(prepared):
            return self.self_attn(prepared, rotary, attend)

        if not self.config.dflash2:
            x = x + attention(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        prepared, finish_delta = self.attention_conv.prepare(self.input_layernorm(x))
        x = self.attention_conv.finish(attention(prepared), x, finish_delta)
        prepared, finish_delta = self.mlp_conv.prepare(self.post_attention_layernorm(x))
        return self.mlp_conv.finish(self.mlp(prepared), x, finish_delta)


class CandidateSelector(nn.Module):
    """Weights of the conditional walk: two codebooks `[V, R]` and a hidden projection.

    The successor codebook starts at zero, so that an untrained selector changes nothing.
    """

    config: DraftConfig
    dtype: DType = jnp.float32

    def setup(self):
        c = self.config
        shape = (c.vocab_size, c.selector_rank)
        init = nn.initializers.normal(c.selector_rank**-0.5)
        self.hidden_projection = Linear(c.selector_rank, self.dtype)
        self.predecessor_codebook = self.param("predecessor_codebook", init, shape, self.dtype)
        self.successor_codebook = self.param(
            "successor_codebook", nn.initializers.zeros, shape, self.dtype
        )

    def __call__(self, hidden: Float[Array, "B K H"]):
        """`(g [B, K, R], predecessor codebook, successor codebook)`, the inputs of the walk."""
        return (
            self.hidden_projection(hidden),
            self.predecessor_codebook,
            self.successor_codebook,
        )


class DraftModel(nn.Module):
    """`DFlashDraftModel` or `DFlash2DraftModel`; embedding and head are the target's."""

    config: DraftConfig
    dtype: DType = jnp.float32

    def setup(self):
        c = self.config
        self.fc = Linear(c.hidden_size, self.dtype)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=self.dtype)
        self.layers = [DraftLayer(c, i, self.dtype) for i in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=self.dtype)
        if c.dflash2:
            self.candidate_selector = CandidateSelector(c, self.dtype)

    def context(
        self, features: Float[Array, "B T F"]
    ) -> tuple[Float[Array, "L B T K D"], Float[Array, "L B T K D"], Float[Array, "L D"]]:
        """Raw context keys and values of every layer, and the gains of their key norms.

        Args:
          features: concatenated residual taps of the target.
        """
        common = self.hidden_norm(self.fc(features))
        # A context key is not rounded between its projection and its norm.
        pairs = [layer.self_attn.project(common, jnp.float32) for layer in self.layers]
        gains = jnp.stack([layer.self_attn.k_norm.weight for layer in self.layers])
        return jnp.stack([k for k, _ in pairs]), jnp.stack([v for _, v in pairs]), gains

    def __call__(
        self, embeddings: Float[Array, "B W H"], positions: Int[Array, "B W"], attend: Attend
    ) -> Float[Array, "B W H"]:
        """Hidden columns after the final norm; column i predicts its own position."""
        c = self.config
        x = embeddings * c.input_embedding_scale
        rotary = rotary_tables(positions, c.rope_theta, c.rotary_dim)
        for layer in self.layers:
            x = layer(x, rotary, attend)
        return self.norm(x)

    def select(self, hidden: Float[Array, "B K H"]):
        """See `CandidateSelector`."""
        return self.candidate_selector(hidden)
