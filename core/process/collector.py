"""Python's cycle collector during a start.

Owns when it rests. Imports and loading make hundreds of thousands of objects that stay, and the
collector walks over them again and again: a quarter of the time that an engine's imports take.
"""

from __future__ import annotations

import gc


def rest_collector() -> None:
    """Collect nothing until `resume_collector`."""
    gc.disable()


def resume_collector() -> None:
    """Collect again, but never look at what is there now: what a start leaves behind stays."""
    gc.freeze()
    gc.enable()
