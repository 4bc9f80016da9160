"""Gated delta rule: chunked prefill, verify with records, Fold over records."""

from pallas_kernels.gated_delta_rule.api import fold, prefill, verify

__all__ = ["fold", "prefill", "verify"]
