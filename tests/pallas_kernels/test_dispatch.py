"""Which implementation a name, or no name, stands for on which device."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import dispatch
from pallas_kernels.triton_call import load, padded_size, store, triton_call, with_xla_gradient


def fake(*_, interpret=False):
    return interpret


TABLE = {"xla": lambda: None, "reference": lambda: None, "pallas": fake}
PLAIN = {name: TABLE[name] for name in ("xla", "reference")}


@dataclasses.dataclass(frozen=True)
class Gpu(AbstractDevice):
    compute_capability: str = "9.0"


def on_gpu(capability):
    device = Gpu("some GPU", None, "gpu", capability)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


class TestChoose:
    def test_no_name_takes_xla_here(self):
        assert dispatch.compute_capability() is None
        assert dispatch.choose("op", TABLE, None) is TABLE["xla"]

    @pytest.mark.parametrize("capability", ["8.0", "9.0", "12.0"])
    def test_no_name_takes_the_kernel_on_a_gpu_that_can(self, capability):
        with on_gpu(capability):
            assert dispatch.choose("op", TABLE, None) is fake
            assert dispatch.choose("op", TABLE, "pallas") is fake
            assert dispatch.choose("op", TABLE, "xla") is TABLE["xla"]
            assert dispatch.choose("op", PLAIN, None) is TABLE["xla"]

    def test_old_gpus_take_xla_and_say_so_once(self, caplog):
        dispatch._say_once.cache_clear()
        with on_gpu("7.5"), caplog.at_level(logging.WARNING, "pallas_kernels.dispatch"):
            for _ in range(3):
                assert dispatch.choose("op", TABLE, None) is TABLE["xla"]
            with pytest.raises(ValueError, match="pallas.*8.0 or more; found compute.*7.5"):
                dispatch.choose("op", TABLE, "pallas")
        (record,) = caplog.records
        assert "7.5" in record.getMessage()

    def test_amd_gpus_take_xla(self):
        with on_gpu("gfx942"):
            assert dispatch.choose("op", TABLE, None) is TABLE["xla"]

    def test_a_named_kernel_is_refused_without_a_gpu(self):
        with pytest.raises(ValueError, match="pallas.*for op.*no CUDA device"):
            dispatch.choose("op", TABLE, "pallas")

    @pytest.mark.parametrize("name", ["pallas", "pallas_interpret", "triton", "XLA"])
    def test_what_an_op_lacks_is_refused(self, name):
        with pytest.raises(ValueError, match=f"{name}.*op.*reference, xla"):
            dispatch.choose("op", PLAIN, name)

    def test_the_interpreter_runs_only_when_named(self):
        assert dispatch.choose("op", TABLE, "pallas_interpret")() is True

    def test_default_implementation_is_seen_through_jit(self):
        @jax.jit
        def run():
            return dispatch.choose("op", TABLE, None)() is True

        assert not run()
        with dispatch.default_implementation("pallas_interpret"):
            assert run()
            # A name goes before the default.
            assert dispatch.choose("op", TABLE, "xla") is TABLE["xla"]
        with dispatch.default_implementation("pallas"), pytest.raises(ValueError, match="device"):
            run()
        assert not run()


# --- what the kernels share ---


def test_padded_size():
    assert [padded_size(n) for n in (1, 2, 3, 96, 128)] == [1, 2, 4, 128, 128]
    assert padded_size(3, least=16) == 16


def _scaled_kernel(x_ref, old_ref, out_ref, *, scale):
    del old_ref  # shares its memory with out_ref
    column = jnp.arange(padded_size(x_ref.shape[0]))
    mask = column < x_ref.shape[0]
    # Where the mask is False the index strays on purpose.
    x = load(x_ref, (jnp.where(mask, column, 10_000),), mask, -7.0)
    x = jnp.where(mask, x, jnp.sum(x))  # the fill is what stands in a masked lane
    store(out_ref, (column,), x * scale, mask & (column != 1))


def _scaled(x, old, *, scale, interpret=False):
    return triton_call(
        functools.partial(_scaled_kernel, scale=scale),
        name="scaled",
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        operands=(x, old),
        num_warps=1,
        aliases={1: 0},
        interpret=interpret,
    )


def test_loads_and_stores_keep_to_their_mask():
    x, old = jnp.arange(1.0, 6.0), jnp.full(5, 9.0)
    got = jax.jit(functools.partial(_scaled, scale=2.0, interpret=True))(x, old)
    np.testing.assert_array_equal(got, [2.0, 9.0, 6.0, 8.0, 10.0])


def test_gradient_of_a_kernel_is_that_of_its_xla_form():
    def xla(x, old, *, scale):
        return jnp.where(jnp.arange(5) == 1, old, x * scale)

    op = with_xla_gradient(_scaled, xla)
    x, old = jnp.arange(1.0, 6.0), jnp.full(5, 9.0)

    def loss(function, x, old):
        return jnp.sum(jnp.sin(function(x, old, scale=2.0)))

    expected = jax.grad(functools.partial(loss, xla), (0, 1))(x, old)
    got = jax.grad(functools.partial(loss, functools.partial(op, interpret=True)), (0, 1))(x, old)
    # The cosines come from outputs that are equal to the bit.
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
