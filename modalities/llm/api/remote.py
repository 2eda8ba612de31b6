"""Chat models of a running server, as a pipeline of this process answers.

Owns the fields of a chat request for a conversation and its call options, and reading the reply.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triptych.core.client.choice import RemoteModel
from triptych.core.errors import UnknownModel
from triptych.core.process.cli_io import read_file

_ROUTE = "/v1/chat/completions"
_URLS = ("data:", "http://", "https://")


class RemoteChat(RemoteModel):
    """A chat model of a server, with images if it takes them."""

    def stream(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """Answer a conversation piece by piece; reasoning is left out."""
        fields = {**_of_route(options), "messages": _encoded(conversation), "stream": True}
        body = self.request(fields)
        for event in self.connection.events(_ROUTE, body):
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece

    def answer(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a row of `triptych generate`; the reply is that of the route."""
        model = row.get("model", self.name)
        if model != self.name:
            raise UnknownModel.among([self.name], str(model))
        fields = {name: value for name, value in row.items() if name != "prompt"}
        messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
        body = self.request({**_of_route(options), **_of_route(fields), "messages": messages})
        reply: dict[str, Any] = self.connection.post(_ROUTE, body)
        return reply


def _of_route(options: Mapping[str, Any]) -> dict[str, Any]:
    """Call options as the route names them."""
    return {"lora_path" if name == "adapter" else name: options[name] for name in options}


def _encoded(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of a conversation, with the images of this machine as data URLs."""
    return [
        {**message, "content": list(map(_part, message["content"]))}
        if isinstance(message["content"], list)
        else message
        for message in conversation
    ]


def _part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part.get("type") != "image":
        return part
    return {"type": "image_url", "image_url": {"url": _image_url(part["image"])}}


def _image_url(image: str | bytes) -> str:
    if isinstance(image, str) and image.lower().startswith(_URLS):
        return image
    data = image if isinstance(image, bytes) else read_file(image, "image")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
