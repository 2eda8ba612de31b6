"""Images in the engine process: loading, denoising, decoding. The place of torch."""

from triptych.core.engine.lean_imports import import_transformers, lean_imports

import_transformers()  # before any module here imports it
with lean_imports():
    import diffusers as diffusers
