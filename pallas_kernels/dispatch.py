"""Choice of an op's implementation by name, and what the device at hand can run."""

import functools
import logging
from collections.abc import Callable, Mapping

import jax

# Backends that run on a GPU only. An op need not have them; asking for one that it lacks is an
# error of its own.
KERNEL_BACKENDS = ("pallas", "triton")
# The Pallas kernel as an ordinary XLA program, for tests on a CPU: slow, and only when named.
INTERPRETED = "pallas_interpret"
# bfloat16 products and asynchronous copies begin with Ampere.
LEAST_CAPABILITY = 8.0

# What `implementation=None` means inside a `with default_implementation("..."):` block, for
# callers above the ops that pass no name. JAX makes it part of the key of every jit cache.
default_implementation = jax.make_user_context(None)

_log = logging.getLogger(__name__)


def choose(op: str, table: Mapping[str, Callable], implementation: str | None) -> Callable:
    """Looks an implementation up; a named one is returned or refused, never replaced.

    The choice is made while tracing, for the device that `compute_capability` describes.

    Args:
      op: name of the op, for messages.
      table: name -> function. The function of "pallas" takes `interpret: bool = False`.
      implementation: a name of `table`; "pallas_interpret" for the interpreted "pallas"; or None
        for what `default_implementation` says. If that is None too, it is "pallas" if the op has
        such a kernel and the GPU can run it, else "xla".

    Returns:
      The function.

    Raises:
      ValueError: the name is unknown, this op has no kernel for that backend, or the device
        cannot run it.
    """
    name = default_implementation.value if implementation is None else implementation
    if name is None:
        name = "pallas" if "pallas" in table and _takes_kernels() else "xla"
    if name == INTERPRETED and "pallas" in table:
        return functools.partial(table["pallas"], interpret=True)
    if name in table:
        if name in KERNEL_BACKENDS:
            _check_device(op, name)
        return table[name]
    known = ", ".join(sorted(table))
    if name in (*KERNEL_BACKENDS, INTERPRETED):
        raise ValueError(
            f"implementation: got {name!r}, but {op} has no {name} kernel for the "
            f"{jax.default_backend()} backend; expected one of {known}"
        )
    raise ValueError(f"implementation: got {name!r} for {op}, expected one of {known}")


def compute_capability() -> float | None:
    """CUDA compute capability of the device that is traced for, e.g. 9.0; None if it has none.

    That device is the abstract one of `jax.sharding.use_abstract_mesh` if it has a field
    `compute_capability` (compiling for a GPU that is not here), else `jax.default_device`, else
    the first device of the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if not hasattr(device, "compute_capability"):
        device = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # not a GPU; or an AMD one, such as "gfx942"
        return None


def _takes_kernels() -> bool:
    capability = compute_capability()
    if capability is None:
        return False
    if capability < LEAST_CAPABILITY:
        _say_once(capability)
        return False
    return True


@functools.cache
def _say_once(capability: float) -> None:
    _log.warning(
        "GPU of compute capability %s: the Pallas kernels need %s, every op runs as XLA",
        capability,
        LEAST_CAPABILITY,
    )


def _check_device(op: str, name: str) -> None:
    capability = compute_capability()
    if capability is None or capability < LEAST_CAPABILITY:
        found = "no CUDA device" if capability is None else f"compute capability {capability}"
        raise ValueError(
            f"implementation: got {name!r} for {op}, which needs a GPU of compute capability "
            f"{LEAST_CAPABILITY} or more; found {found}. {INTERPRETED!r} runs the Pallas kernel "
            "as an XLA program anywhere"
        )


def check_shape(name: str, array, expected: tuple[int | None, ...]) -> tuple[int, ...]:
    """Returns `array.shape`; raises ValueError unless it is `expected` (None: any size)."""
    shape = tuple(array.shape)
    matches = len(shape) == len(expected) and all(
        want is None or got == want for got, want in zip(shape, expected, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name}: got shape {shape}, expected ({wanted})")
    return shape


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless every key head serves the same number of query heads."""
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q: got {heads} heads, expected a multiple of {kv_heads} key heads")
