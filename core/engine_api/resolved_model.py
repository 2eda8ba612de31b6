"""A model whose files are on this machine.

Owns this type, which the processes of a server send to each other. `core.weights.resolve` makes it.
"""

from __future__ import annotations

import msgspec


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with local files: its served name, and a folder with all its files.

    `folder` holds config.json, safetensors files, and tokenizer.json if the model reads text; or
    model_index.json and such a folder for each part. `digest` (SHA-256, hex) identifies their
    content. `bundle` is the folder of the bundle with the model's other artifacts, `draft` that of
    the model or head that drafts for it, with `draft_digest`; empty: none.
    """

    name: str
    reference: str
    folder: str
    digest: str
    bundle: str = ""
    draft: str = ""
    draft_digest: str = ""
