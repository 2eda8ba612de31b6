"""Routes of other servers that are not offered here, and say so.

Owns how they answer. Each API has the table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NoReturn

from fastapi import APIRouter

from triptych.core.errors import UnsupportedOption

RefusedRoutes = Mapping[str, tuple[str, str]]
"""By path: the method, and what to do instead."""


def add_refused_routes(router: APIRouter, routes: RefusedRoutes) -> None:
    """Answer `routes` with an error that says what to do. They are no part of the document."""
    for path, (method, instead) in routes.items():
        refuse = partial(_refuse, f"{path} is not offered: {instead}")
        router.add_api_route(
            path, refuse, methods=[method], response_model=None, include_in_schema=False
        )


async def _refuse(message: str) -> NoReturn:
    raise UnsupportedOption(message)
