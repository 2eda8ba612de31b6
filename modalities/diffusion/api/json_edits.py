"""Edits as JSON: images by data URL, or by a URL that the operator allows.

Owns the body, and how its images become the files of a form. The service decodes the files.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator
from starlette.requests import Request

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.body import check_not_compressed, parse_json, receive_body
from triptych.core.http.fields import NullIsAbsent
from triptych.core.http.models import with_model
from triptych.core.http.upload import Form, Upload, UploadShare
from triptych.core.http.validation import invalid_body
from triptych.core.media.fetch import MediaFetcher
from triptych.core.text.threads import on_text_thread
from triptych.modalities.diffusion.api.protocol import MAX_SOURCES, PromptFields, SourceFields

_JSON = "application/json"
_MAX_URL_CHARS = 36 * 2**20
"""The length of a data URL with the largest image allowed, in base64."""


class ImageReference(NullIsAbsent):
    """An image by its URL: `data:image/png;base64,...`."""

    image_url: Annotated[str, Field(min_length=1, max_length=_MAX_URL_CHARS)] | None = None
    file_id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.file_id is not None:
            raise UnsupportedOption(
                "file_id is not offered for images: send image_url, a data URL.", param="file_id"
            )
        if self.image_url is None:
            raise InvalidRequest("An image needs an image_url.", param="image_url")
        return self


class EditBody(SourceFields, PromptFields, NullIsAbsent):
    """Body of `/v1/images/edits` as JSON: the fields of the form, with images by URL."""

    images: Annotated[list[ImageReference], Field(min_length=1, max_length=MAX_SOURCES)]
    mask: ImageReference | None = None


def is_json(request: Request) -> bool:
    """Whether the request declares a JSON body."""
    kind: str = request.headers.get("content-type", "").partition(";")[0]
    return kind.strip().lower() == _JSON


async def read_json_edit(request: Request) -> tuple[EditBody, Form]:
    """Read the body, and its images as a form, which count as uploads as long as the form lives.

    Raises as `read_form` and `MediaFetcher.fetch` do, and FastAPI's `RequestValidationError`.
    """
    check_not_compressed(request)
    state, form, raw = request.app.state, Form(), bytearray()
    share = UploadShare(state.upload_budget, form)

    def take(piece: bytes) -> None:
        share.take(len(piece))
        raw.extend(piece)

    await receive_body(request, take, state.options.max_upload_bytes)
    body = await on_text_thread(len(raw), _validated, request, bytes(raw))
    fetcher = MediaFetcher.from_options(state.options)
    named = [("image", each) for each in body.images]
    for name, image in [*named, *([("mask", body.mask)] if body.mask else [])]:
        assert image.image_url is not None, "checked by the body"
        found = await fetcher.fetch(image.image_url, param=name)
        upload = Upload("", bytearray(found.data), found.media_type)
        form.files.setdefault(name, []).append(upload)
    return body, form


def json_schema() -> dict[str, Any]:
    """The body's schema, for the `openapi_extra` of its route."""
    schema = EditBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    image = ImageReference.model_json_schema()
    schema["properties"] |= {
        "images": {**schema["properties"]["images"], "items": image},
        "mask": image,
    }
    return schema


def _validated(request: Request, raw: bytes) -> EditBody:
    try:
        return EditBody.model_validate(with_model(request, EditBody, parse_json(raw)))
    except ValidationError as error:
        raise invalid_body(EditBody, error) from error
