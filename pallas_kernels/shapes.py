"""Shapes of real models, named once for tests, compile checks and benchmarks.

The numbers are those of the checkpoints' `config.json`; a test compares them with the copies
kept beside the tests where there is one (not for the 4B pair).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft model.

    Attributes:
      hidden: width of the residual stream.
      heads: query heads.
      kv_heads: key and value heads.
      head_dim: of queries, keys and values.
      local_layers: layers with a ring.
      full_layers: layers with pages.
      window: slots of a ring (0 without local layers).
      columns: of a block, the anchor included.
      conv_group: channels that share a coefficient of the dynamic convolution; 0 for DFlash.
      selector_rank: of the candidate selector's codebooks; 0 for DFlash.
      selector_top_k: candidates per mask column; 0 for DFlash.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    local_layers: int
    full_layers: int
    window: int
    columns: int
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0


@dataclasses.dataclass(frozen=True)
class Target:
    """A target model: full attention every fourth layer, Gated DeltaNet in the others.

    Attributes:
      hidden: width of the residual stream.
      heads: query heads of full attention.
      kv_heads: key and value heads of full attention.
      head_dim: of full attention.
      full_layers: layers with full attention.
      gdn_layers: Gated DeltaNet layers.
      gdn_key_heads: key heads of those.
      gdn_value_heads: value heads of those.
      gdn_head_dim: of both.
      vocabulary: rows of the embedding.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    full_layers: int
    gdn_layers: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A pair, and what it is measured with.

    Attributes:
      name: as in reports.
      draft: the draft.
      target: the target.
      dtype: of activations and weights.
      context: committed positions per row in reports and benchmarks.
      page: positions per page there.
      rows: batch sizes there.
    """

    name: str
    draft: Draft
    target: Target
    dtype: str = "bfloat16"
    context: int = 32768
    page: int = 64
    rows: tuple[int, ...] = (1, 8)


GEOMETRIES = (
    Geometry(
        "27b-dflash2",  # Qwen3.8-27B-DFlash2 on a target of Qwen3.5-27B's shape
        Draft(
            hidden=5120, heads=32, kv_heads=8, head_dim=128, local_layers=5, full_layers=0,
            window=2048, columns=8, conv_group=16, selector_rank=256, selector_top_k=16,
        ),
        Target(
            hidden=5120, heads=24, kv_heads=4, head_dim=256, full_layers=16, gdn_layers=48,
            gdn_key_heads=16, gdn_value_heads=48, gdn_head_dim=128, vocabulary=248320,
        ),
    ),
    Geometry(
        "35b-a3b-dflash",  # Qwen3.6-35B-A3B-DFlash on a target of Qwen3.5-35B-A3B's shape
        Draft(
            hidden=2048, heads=32, kv_heads=8, head_dim=128, local_layers=5, full_layers=1,
            window=4096, columns=16,
        ),
        Target(
            hidden=2048, heads=16, kv_heads=2, head_dim=256, full_layers=10, gdn_layers=30,
            gdn_key_heads=16, gdn_value_heads=32, gdn_head_dim=128, vocabulary=248320,
        ),
    ),
    Geometry(
        # Qwen3.5-4B-DFlash as first released, all layers full, on a target of Qwen3.5-4B's shape.
        # No copy of the two configs is at hand: the target's heads are those that model cards of
        # its derivatives state, the draft's those of SpecForge's `qwen3.5-4b-dflash.json`. A later
        # release of the draft is said to have five sliding layers of 4,096 slots before one full
        # layer; its attention then has the shapes of the 35B draft above.
        "4b-dflash",
        Draft(
            hidden=2560, heads=32, kv_heads=8, head_dim=128, local_layers=0, full_layers=5,
            window=0, columns=16,
        ),
        Target(
            hidden=2560, heads=16, kv_heads=4, head_dim=256, full_layers=8, gdn_layers=24,
            gdn_key_heads=16, gdn_value_heads=32, gdn_head_dim=128, vocabulary=248320,
        ),
    ),
    Geometry(
        "embedded-dflash2",
        Draft(
            hidden=192, heads=6, kv_heads=2, head_dim=32, local_layers=3, full_layers=0,
            window=256, columns=8, conv_group=16, selector_rank=64, selector_top_k=16,
        ),
        Target(
            hidden=192, heads=4, kv_heads=2, head_dim=32, full_layers=2, gdn_layers=6,
            gdn_key_heads=2, gdn_value_heads=4, gdn_head_dim=32, vocabulary=1024,
        ),
        dtype="float32",
        context=2048,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """An op at a real shape, for the compile report and for benchmarks.

    Attributes:
      op: its name, `op.part` where it has several entries.
      shape: name of geometry and batch, such as "27b-dflash2 B=8".
      run: `run(*operands)`, which also takes `implementation=`.
      operands: `operands(key)` makes random ones; `jax.eval_shape` of it gives their shapes
        without any memory.
      minimum_bytes: every input that the result depends on read once, every output written once.
      moved_bytes: what the kernel's programs load and store, re-reads and partial sums included.
      flops: multiplications and additions of the algorithm, without padding.
      in_place: operands that the first outputs replace, in their memory where they are donated.
    """

    op: str
    shape: str
    run: Callable[..., Any]
    operands: Callable[[jax.Array], tuple]
    minimum_bytes: int
    moved_bytes: int
    flops: int
    in_place: tuple[int, ...] = ()

    def abstract_operands(self) -> tuple:
        """Shapes and dtypes of the operands."""
        return jax.eval_shape(self.operands, jax.random.key(0))
