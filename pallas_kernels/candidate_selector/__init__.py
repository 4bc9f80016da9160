from pallas_kernels.candidate_selector.api import candidate_selector

__all__ = ["candidate_selector"]
