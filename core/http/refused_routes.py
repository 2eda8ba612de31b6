"""Routes of other servers that are refused by name.

Owns their error response. Each API has its own table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NoReturn

from fastapi import APIRouter

from triptych.core.errors import UnsupportedOption

RefusedRoutes = Mapping[str, tuple[str, str]]
"""The method and the alternative, by path."""


def add_refused_routes(router: APIRouter, routes: RefusedRoutes) -> None:
    """Answer `routes` with an error that names the alternative; they are not in the document."""
    for path, (method, instead) in routes.items():
        refuse = partial(_refuse, f"{path} is not offered: {instead}")
        router.add_api_route(
            path, refuse, methods=[method], response_model=None, include_in_schema=False
        )


async def _refuse(message: str) -> NoReturn:
    raise UnsupportedOption(message)
