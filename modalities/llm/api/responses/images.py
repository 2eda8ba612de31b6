"""The images of a request, and of what goes before it.

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


class HeldImages(dict[str, Fetched]):
    """Images by URL. They count as uploads of `budget` until this is closed."""

    def __init__(self, budget: UploadBudget) -> None:
        super().__init__()
        self._share = UploadShare(budget, self)

    @classmethod
    def of(cls, request: Request) -> HeldImages:
        """None as yet, of those that the server of `request` has room for."""
        return cls(request.app.state.upload_budget)

    def hold(self, url: str, image: Fetched) -> None:
        """Have one more. Raises `Overloaded` where uploads hold too much memory."""
        self._share.take(len(image.data))
        self[url] = image

    def close(self) -> None:
        """Release them."""
        self.clear()
        self._share.close()


def image_urls(items: Iterable[KeptItem]) -> Iterator[str]:
    """Where the images of messages and results are."""
    showing = (item for item in items if isinstance(item, MessageItem | FunctionOutputItem))
    images = (image for item in showing for image in item.images)
    return (image.image_url for image in images if image.image_url is not None)


def sent_images(urls: Iterable[str], request: Request) -> dict[str, Fetched]:
    """Of those images the ones that were in the body itself, by what stands for them there."""
    sent = data_urls(request)
    return {url: file for url in urls if (file := sent.find(url)) is not None}
