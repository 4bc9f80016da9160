"""Every op that has a kernel, with its cases at real shapes."""

from collections.abc import Callable, Iterable

from pallas_kernels.paged_attention import cases as paged_attention
from pallas_kernels.shapes import Case
from pallas_kernels.sliding_window_attention import cases as sliding_window_attention

# A new kernel is one entry here; reports, compile tests and benchmarks follow.
CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "sliding_window_attention": sliding_window_attention.cases,
    "paged_attention": paged_attention.cases,
}
