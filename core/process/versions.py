"""Versions of installed packages, read from their metadata without importing them."""

from __future__ import annotations

import platform
from importlib import metadata

_LIBRARIES = (
    "triptych",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "fastapi",
    "uvicorn",
)


def versions() -> dict[str, str]:
    """Versions of Python, Triptych and the libraries that determine its behaviour."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
