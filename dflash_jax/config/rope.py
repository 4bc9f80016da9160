"""The rotary fields that target and draft share: where they stand, and which place wins."""

import dataclasses
from collections.abc import Mapping

from absl import logging

from dflash_jax.config import reading
from dflash_jax.config.reading import ConfigError, Section


@dataclasses.dataclass(frozen=True)
class Rope:
    """Base, rotated fraction of the head dimension, and the section with the other fields."""

    theta: float
    partial_rotary_factor: float
    parameters: Section


def parse_rope(section: Section, head_dim: int, default_factor: float) -> Rope:
    """Reads the rotary fields; `rope_parameters` > legacy `rope_scaling` > flat fields.

    A stale flat theta loses to a nested one, with a logged line: configs that were
    converted to the nested form often keep the old class default beside it.

    Raises:
      ConfigError: no theta anywhere, a scaled rope type, one rope per layer type, or a
        factor that rotates no dimension, an odd number of them or more than the head has.
    """
    nested = section.section("rope_parameters")
    legacy = section.section("rope_scaling")
    for rope in (nested, legacy):
        for key in ("rope_type", "type"):
            reading.require(key, "default", rope, "scaled rotary embeddings are not supported")
        for key, value in rope.values.items():
            if isinstance(value, Mapping):
                raise ConfigError(
                    f"{rope.place(key)}: rotary parameters per layer type are not supported"
                )
    places = (nested, legacy, section)
    theta = reading.read(reading.POSITIVE, "rope_theta", *places, first_wins=True)
    for place in places:
        if place.has("rope_theta") and place.values["rope_theta"] != theta:
            logging.info(
                "%s = %r is ignored: rope_theta is %g by a place that takes precedence",
                place.place("rope_theta"), place.values["rope_theta"], theta,
            )  # fmt: skip
    factor = reading.read(
        reading.POSITIVE, "partial_rotary_factor", *places, default=default_factor, first_wins=True
    )
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{section.source}: partial_rotary_factor {factor:g} of head_dim {head_dim} rotates "
            f"{rotary_dim} dimensions, expected an even number in 2..{head_dim}"
        )
    return Rope(theta, factor, nested)
