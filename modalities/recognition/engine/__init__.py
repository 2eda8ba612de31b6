"""Recognition in the engine process: the model and its stages. The place of torch."""

from triptych.core.engine.lean_imports import import_transformers

import_transformers()  # before any module here imports it
