"""An image model's parts from files, whoever's layout they are in."""

from triptych.modalities.diffusion.engine.loading.components import (
    Components,
    DtypeOf,
    component_bytes,
    open_components,
)

__all__ = ["Components", "DtypeOf", "component_bytes", "open_components"]
