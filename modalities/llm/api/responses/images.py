"""The images of a request and of its history.

Owns their memory, which counts as uploads until the images are encoded or stored. Knows neither
their place in the store nor their content.
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
        """An empty set of images under the upload budget of the request's server."""
        return cls(request.app.state.upload_budget)

    def hold(self, url: str, image: Fetched) -> None:
        """Add an image. Raises `Overloaded` if uploads use too much memory."""
        self._share.take(len(image.data))
        self[url] = image

    def close(self) -> None:
        """Release the images."""
        self.clear()
        self._share.close()


def image_urls(items: Iterable[KeptItem]) -> Iterator[str]:
    """The URLs of the images in messages and results."""
    showing = (item for item in items if isinstance(item, MessageItem | FunctionOutputItem))
    images = (image for item in showing for image in item.images)
    return (image.image_url for image in images if image.image_url is not None)


def sent_images(urls: Iterable[str], request: Request) -> dict[str, Fetched]:
    """The images that were in the body itself, by the stand-ins of their data URLs."""
    sent = data_urls(request)
    return {url: file for url in urls if (file := sent.find(url)) is not None}
