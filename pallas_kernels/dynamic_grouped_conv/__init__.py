from pallas_kernels.dynamic_grouped_conv.api import finish, prepare

__all__ = ["finish", "prepare"]
