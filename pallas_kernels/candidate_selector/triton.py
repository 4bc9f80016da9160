"""Optional form through `jax-triton`: one kernel that gathers and walks, a program per row.

It does not depend on Pallas' Triton backend, which newer versions of JAX deprecate. Neither
`triton` nor `jax_triton` is imported before the first call.
"""

import inspect

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import compute_capability
from pallas_kernels.triton_call import padded_size

NUM_WARPS = 4


def sizes(scores, projected, predecessor) -> dict[str, int]:
    """Compile-time arguments of the kernel."""
    _, columns, ranks = scores.shape
    vocabulary, rank = predecessor.shape
    return dict(
        COLUMNS=columns,
        RANKS=ranks,
        RANK=projected.shape[2],
        VOCABULARY=vocabulary,
        PADDED_RANKS=padded_size(ranks),
        PADDED_RANK=padded_size(rank),
    )


def candidate_selector(
    scores, candidates, projected, predecessor, successor, anchor, temperature, uniforms
):
    """See `api.candidate_selector`.

    Raises:
      ImportError: `jax_triton` or `triton` is missing.
    """
    try:
        import jax_triton

        from pallas_kernels.candidate_selector.triton_kernel import candidate_walk
    except ImportError as error:
        raise ImportError(
            "candidate_selector: implementation 'triton' needs jax-triton: "
            "pip install 'dflash-jax[gpu]'"
        ) from error

    _repair(jax_triton.triton_lib)
    rows, columns, ranks = scores.shape
    outputs = (
        jax.ShapeDtypeStruct((rows, columns), jnp.int32),
        jax.ShapeDtypeStruct((rows, columns), jnp.int32),
        jax.ShapeDtypeStruct((rows, columns, ranks), jnp.float32),
    )
    # Renamed in jax-triton 0.4.
    parameters = inspect.signature(jax_triton.triton_call).parameters
    out = {"out_type" if "out_type" in parameters else "out_shape": outputs}
    if "backend_options" in parameters:
        # What CUDA 12.9 assembles; by default `triton` writes the version of its own assembler.
        out["backend_options"] = {"ptx_version": 88}
    # Of the device that is traced for, which need not be here: 9.0 is passed as 90.
    if (capability := compute_capability()) is not None:
        out["compute_capability"] = round(10 * capability)
    return jax_triton.triton_call(
        scores.astype(jnp.float32),
        candidates.astype(jnp.int32),
        projected,
        predecessor,
        successor,
        anchor.astype(jnp.int32),
        temperature,
        uniforms,
        kernel=candidate_walk,
        grid=(rows,),
        num_warps=NUM_WARPS,
        **out,
        **sizes(scores, projected, predecessor),
    )


def _repair(library) -> None:
    """Lets jax-triton 0.4.1 run under jit on JAX 0.12.

    There JAX calls a primitive's rule for dead code with (used outputs, live inputs, equation);
    that version's rule takes the first and the last, and raises TypeError. A no-op elsewhere.
    """
    rule = getattr(library, "_triton_kernel_call_dce_rule", None)
    if rule is None or list(inspect.signature(rule).parameters) != ["used_outs", "eqn"]:
        return
    library.pe.dce_rules[library.triton_kernel_call_p] = lambda used_outs, *rest: rule(
        used_outs, rest[-1]
    )
