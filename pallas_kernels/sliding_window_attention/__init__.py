from pallas_kernels.sliding_window_attention.api import sliding_window_attention

__all__ = ["sliding_window_attention"]
