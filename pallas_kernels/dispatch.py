"""Choice of an op's implementation by name."""

from collections.abc import Callable, Mapping

import jax

# Names an op may get later; asking for one that an op does not have is an error of its own.
KERNEL_BACKENDS = ("pallas", "triton")


def choose(
    op: str, table: Mapping[str, Callable], implementation: str | None, default: str = "xla"
) -> Callable:
    """Looks an implementation up; a named one is returned or refused, never replaced.

    Args:
      op: name of the op, for messages.
      table: name -> function.
      implementation: a name of `table`, or None for `default`.
      default: what None means.

    Returns:
      The function.

    Raises:
      ValueError: the name is unknown, or this op has no kernel for that backend.
    """
    name = default if implementation is None else implementation
    if name in table:
        return table[name]
    known = ", ".join(sorted(table))
    if name in KERNEL_BACKENDS:
        raise ValueError(
            f"implementation: got {name!r}, but {op} has no {name} kernel for the "
            f"{jax.default_backend()} backend; expected one of {known}"
        )
    raise ValueError(f"implementation: got {name!r} for {op}, expected one of {known}")


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
