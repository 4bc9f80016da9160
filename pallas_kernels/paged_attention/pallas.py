"""GPU kernel: streams the pages of a row, see `streamed_attention`."""

from pallas_kernels.paged_attention import xla
from pallas_kernels.streamed_attention import streamed_attention
from pallas_kernels.triton_call import with_xla_gradient


def _kernel(
    q, block_key, block_value, key_pages, value_pages, block_table, lengths, live, ancestors,
    *, layer, causal, scale, interpret=False,
):  # fmt: skip
    return streamed_attention(
        q,
        block_key,
        block_value,
        key_pages,
        value_pages,
        lengths,
        live,
        table=block_table,
        ancestors=ancestors,
        layer=layer,
        causal=causal,
        scale=scale,
        name="paged_attention",
        interpret=interpret,
    )


paged_attention = with_xla_gradient(_kernel, xla.paged_attention)
"""See `api.paged_attention`."""
