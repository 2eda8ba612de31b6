"""Fields and options of Ollama's API that are not offered.

Owns their names, the neutral values (which are accepted) and the alternatives; and the ignored
fields, each with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.http.fields import RefusedField, RefusedValue
from triptych.core.http.refused_routes import RefusedRoutes

_SAMPLER = "use top_p, top_k or min_p."
_ONE_USE = "leave it out; each model has one task."

OPTIONS: Mapping[str, RefusedField] = MappingProxyType(
    {
        "embedding_only": RefusedField(_ONE_USE, (False,)),
        "logits_all": RefusedField("use logprobs.", (False,)),
        "logit_bias": RefusedField("send it to /v1/chat/completions."),
        "mirostat": RefusedField(_SAMPLER, (0,)),
        "penalize_newline": RefusedField("penalties apply to every token.", (True,)),
        "reasoning_effort": RefusedField("send think."),
        "tfs_z": RefusedField(_SAMPLER, (1.0,)),
        "typical_p": RefusedField(_SAMPLER, (1.0,)),
        "vocab_only": RefusedField(_ONE_USE, (False,)),
    }
)

IGNORED_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "draft_num_predict": "drafts of tokens leave an answer as it is",
        "repeat_last_n": "penalties apply to the whole text",
    }
)
REFUSED_VALUES: Mapping[str, RefusedValue] = MappingProxyType(
    {"repeat_last_n": RefusedValue(0, "send repeat_penalty 1 and no other penalty.")}
)
"""Values of ignored options that would change an answer."""

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "shift": "an answer ends at the end of the context",
        "truncate": "a prompt that is too long is refused, not cut",
    }
)

_IMAGE = "images are generated at /v1/images/generations."
GENERATE: Mapping[str, RefusedField] = MappingProxyType(
    {
        "height": RefusedField(_IMAGE, (0,)),
        "steps": RefusedField(_IMAGE, (0,)),
        "template": RefusedField("the operator sets it with --chat-template.", ("",)),
        "width": RefusedField(_IMAGE, (0,)),
    }
)

SHOW: Mapping[str, RefusedField] = MappingProxyType(
    {
        "system": RefusedField("send it with each request.", ("",)),
        "template": RefusedField("the operator sets it with --chat-template.", ("",)),
        "verbose": RefusedField("a vocabulary is not listed: use /tokenize.", (False,)),
    }
)

ROUTES: RefusedRoutes = MappingProxyType(
    {
        "/api/copy": ("POST", "POST /v1/engine/pull takes another name for a model."),
        "/api/create": ("POST", "/api/pull takes models as they are, without a Modelfile."),
        "/api/push": ("POST", "nothing is published from here."),
        "/api/blobs/{digest}": ("POST", "/api/pull takes folders below --pull-folder."),
    }
)
"""Routes that make models or publish them."""
