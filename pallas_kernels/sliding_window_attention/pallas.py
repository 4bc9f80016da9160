"""GPU kernel: streams the ring positions that a block sees, see `streamed_attention`."""

from pallas_kernels.sliding_window_attention import xla
from pallas_kernels.streamed_attention import streamed_attention
from pallas_kernels.triton_call import with_xla_gradient


def _kernel(
    q, block_key, block_value, ring_key, ring_value, frontier, live,
    *, layer, causal, scale, interpret=False,
):  # fmt: skip
    return streamed_attention(
        q,
        block_key,
        block_value,
        ring_key,
        ring_value,
        frontier,
        live,
        window=ring_key.shape[2],
        layer=layer,
        causal=causal,
        scale=scale,
        name="sliding_window_attention",
        interpret=interpret,
    )


sliding_window_attention = with_xla_gradient(_kernel, xla.sliding_window_attention)
"""See `api.sliding_window_attention`."""
