"""The pictures of a request, and of what goes before it.

Owns what they hold of memory: they count as uploads until the model has seen them, or the store
has them. Knows neither where they lie nor what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import Request

from triptych.core.http.data_urls import data_urls
from triptych.core.http.upload import UploadBudget, UploadShare
from triptych.core.media.fetch import Fetched
from triptych.modalities.llm.api.responses.items import FunctionOutputItem, KeptItem, MessageItem


class HeldPictures(dict[str, Fetched]):
    """Pictures by URL. They count as uploads of `budget` until this is closed."""

    def __init__(self, budget: UploadBudget) -> None:
        super().__init__()
        self._share = UploadShare(budget, self)

    @classmethod
    def of(cls, request: Request) -> HeldPictures:
        """None as yet, of those that the server of `request` has room for."""
        return cls(request.app.state.upload_budget)

    def hold(self, url: str, picture: Fetched) -> None:
        """Have one more. Raises `Overloaded` where uploads hold too much memory."""
        self._share.take(len(picture.data))
        self[url] = picture

    def close(self) -> None:
        """Release them."""
        self.clear()
        self._share.close()


def picture_urls(items: Iterable[KeptItem]) -> Iterator[str]:
    """Where the pictures of messages and results are."""
    showing = (item for item in items if isinstance(item, MessageItem | FunctionOutputItem))
    pictures = (picture for item in showing for picture in item.pictures)
    return (picture.image_url for picture in pictures if picture.image_url is not None)


def sent_pictures(urls: Iterable[str], request: Request) -> dict[str, Fetched]:
    """Of those pictures the ones that were in the body itself, by what stands for them there."""
    sent = data_urls(request)
    return {url: file for url in urls if (file := sent.find(url)) is not None}
