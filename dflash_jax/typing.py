"""Dimension letters and array aliases, once for the whole project.

| letter | meaning                                   |
|--------|-------------------------------------------|
| B      | rows (independent requests)               |
| T      | new tokens of a row in this call          |
| W      | columns of a draft block (1 anchor + K masks) |
| S      | ring slots = sliding window               |
| H      | hidden width                              |
| N, K   | query heads, key/value heads              |
| D      | head dimension                            |
| V      | vocabulary rows                           |
| L      | layers                                    |
| G      | convolution groups                        |
| R      | selector rank                             |
| C      | channels of the GDN convolution           |
| Hk, Hv | GDN key heads, value heads                |
| Dk, Dv | their dimensions                          |

The specification calls the number of proposals ``K``; in code it is ``draft_tokens``.
"""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

Params = Any  # nested dict of arrays, as Linen makes it
DType = jax.typing.DTypeLike

__all__ = ["Array", "Bool", "DType", "Float", "Int", "Params", "UInt32"]
