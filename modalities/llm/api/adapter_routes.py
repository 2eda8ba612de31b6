"""Loading and unloading adapters over HTTP, as vLLM and SGLang offer it, and their cards.

Owns the bodies and the answers. Callers may load and unload adapters as they may fetch and delete
models: a place is a path of this host.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse

from triptych.core.http.engine_models import check_may_store, lift_time_limit
from triptych.core.http.fields import Name, RefusedField, Refusing, Text
from triptych.core.http.models import ModelCard, ServedModels
from triptych.modalities.llm.api.adapters import AdapterNames
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.llm.api.service import LlmService


class LoadAdapterRequest(Refusing):
    """Body of `/v1/load_lora_adapter`."""

    refused = MappingProxyType(
        {
            "pinned": RefusedField("raise --max-num-loras, so that all adapters fit.", (False,)),
            "is_3d_lora_weight": RefusedField("adapters of experts are not offered.", (False,)),
        }
    )

    lora_name: Name = Field(description="The name that requests use as their model.")
    lora_path: Text = Field(
        min_length=1, description="A safetensors file, folder or hub id, for this host."
    )
    load_inplace: bool = Field(
        default=False, description="Take the place of an adapter with this name."
    )
    base_model_name: Name | None = Field(
        default=None, description="The model that it changes; the only text model, if absent."
    )


class UnloadAdapterRequest(Refusing):
    """Body of `/v1/unload_lora_adapter`."""

    refused = MappingProxyType({"lora_int_id": RefusedField("send lora_name.")})

    lora_name: Name


class AdapterCards:
    """Implements `core.http.models.MoreModels` for the adapters of a service."""

    def __init__(self, service: LlmService) -> None:
        self._service = service

    def cards(self) -> Sequence[ModelCard]:
        """The adapters that are offered now."""
        return [
            card_of(self._service.model(each.model)).model_copy(
                update={"id": each.name, "created": each.created, "parent": each.model}
            )
            for each in self._service.adapters or ()
        ]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._service.adapter(name) is not None


def add_adapters(router: APIRouter, adapters: AdapterNames) -> None:
    """Add the routes."""

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> str:
        """Load an adapter, which is a model of its own name from then on."""
        check_may_store(request)
        adapters.check_may_load(body.lora_path)
        lift_time_limit(request)
        served: ServedModels = request.app.state.served
        await adapters.load(
            body.lora_name,
            body.lora_path,
            base_model=body.base_model_name or "",
            replaces=body.load_inplace,
            taken=served.cards,
        )
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> str:
        """Withdraw an adapter; the answer comes when the requests that use it have ended."""
        check_may_store(request)
        lift_time_limit(request)
        await adapters.unload(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
