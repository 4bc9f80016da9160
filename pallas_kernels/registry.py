"""Every op that has a kernel, with its cases at real shapes."""

from collections.abc import Callable, Iterable

from pallas_kernels.candidate_selector import cases as candidate_selector
from pallas_kernels.context_kv_materialize import cases as context_kv_materialize
from pallas_kernels.dynamic_grouped_conv import cases as dynamic_grouped_conv
from pallas_kernels.gated_delta_rule import cases as gated_delta_rule
from pallas_kernels.paged_attention import cases as paged_attention
from pallas_kernels.shapes import Case
from pallas_kernels.sliding_window_attention import cases as sliding_window_attention

# A new kernel is one entry here; reports, compile tests and benchmarks follow.
CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "sliding_window_attention": sliding_window_attention.cases,
    "paged_attention": paged_attention.cases,
    "dynamic_grouped_conv": dynamic_grouped_conv.cases,
    "context_kv_materialize": context_kv_materialize.cases,
    "candidate_selector": candidate_selector.cases,
    "gated_delta_rule": gated_delta_rule.cases,
}
