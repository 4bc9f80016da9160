from pallas_kernels.context_kv_materialize.api import context_kv_materialize

__all__ = ["context_kv_materialize"]
