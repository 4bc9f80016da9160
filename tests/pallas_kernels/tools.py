"""What tests of the kernels share: the mark for compilers that may be missing, gradients."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import cuda_compile, cuda_topology

_MISSING = cuda_compile.missing_tools()
needs_triton = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
_MISSING = cuda_topology.missing_plugin()
needs_plugin = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))


def attention_gradients(function, tensors, rest, layer):
    """Gradients of the summed sines of an attention op's output, by its first five arguments."""

    def loss(function, tensors):
        return jnp.sum(jnp.sin(function(*tensors, *rest, layer=layer)))

    return jax.jit(jax.grad(functools.partial(loss, function)))(tuple(tensors))
