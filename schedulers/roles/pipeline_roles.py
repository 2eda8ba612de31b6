"""Connects a loaded model to other engines by the role of its engine.

Owns the assembly of the parts of a page exchange. Knows neither sockets nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from triptych.core.errors import ConfigError
from triptych.core.kv.transfer.address import PageAddress, read_secret
from triptych.core.kv.transfer.client import PageClient
from triptych.core.kv.transfer.memory import PartMemories
from triptych.core.kv.transfer.messages import PageFormat
from triptych.core.kv.transfer.nixl_slots import check_nixl
from triptych.core.kv.transfer.server import PageServer
from triptych.core.options.pipeline import NIXL
from triptych.core.options.pipeline_plan import PeerEndpoint, PipelinePlan
from triptych.schedulers.roles.page_exchange import FetchedPages, SentPages

if TYPE_CHECKING:
    from triptych.schedulers.tokens.scheduler import TokenScheduler


def open_exchange(
    model: str,
    scheduler: TokenScheduler,
    memories: PartMemories,
    page_format: PageFormat,
    plan: PipelinePlan,
) -> Callable[[], None]:
    """Send or fetch a model's pages, by the plan; returns the function that ends the exchange.

    Raises `ConfigError`.
    """
    if not scheduler.tokens.pool.enable_prefix_caching:
        raise ConfigError(
            f"--pipeline-role {plan.role}: this model computes each prompt as a whole and shares no"
            " pages; omit the option."
        )
    if plan.sends_pages:
        server = open_server(plan.pages, page_format, memories)
        scheduler.exchange = SentPages(scheduler, server, model)
        return server.close
    client = open_client(plan.pages, page_format, memories)
    scheduler.exchange = FetchedPages(scheduler, client)
    return client.close


def open_server(
    endpoint: PeerEndpoint, page_format: PageFormat, memories: PartMemories
) -> PageServer:
    """Create the end that listens. Raises `ConfigError`."""
    (address,) = _addresses(endpoint)
    secret, met = read_secret(endpoint.key_file), _format(endpoint, page_format)
    return PageServer(address, secret, met, memories, timeout_s=endpoint.timeout_s)


def open_client(
    endpoint: PeerEndpoint, page_format: PageFormat, memories: PartMemories
) -> PageClient:
    """Create the end that connects. Raises `ConfigError`."""
    secret, met = read_secret(endpoint.key_file), _format(endpoint, page_format)
    return PageClient(_addresses(endpoint), secret, met, memories, timeout_s=endpoint.timeout_s)


def _format(endpoint: PeerEndpoint, page_format: PageFormat) -> PageFormat:
    if endpoint.transport == NIXL:
        check_nixl()
    return msgspec.structs.replace(page_format, transport=endpoint.transport)


def _addresses(endpoint: PeerEndpoint) -> list[PageAddress]:
    return [PageAddress.parse(address, endpoint.flag) for address in endpoint.addresses]
