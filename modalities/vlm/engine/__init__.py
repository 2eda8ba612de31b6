"""Vision in the engine process: encoders, their cache, the head. The place of torch."""

from triptych.core.engine.lean_imports import import_transformers

import_transformers()  # before any module here imports it
