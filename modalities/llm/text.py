"""Between text and token ids: one model's tokenizer, chat template and limits.

Owns everything about a model that the API process needs. Runs no model code: the tokenizer is
read from `tokenizer.json`, the template runs in jinja2's immutable sandbox. Text of a caller can
never become a special token, whatever it spells. Knows nothing of torch, transformers or HTTP.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Template
from tokenizers import AddedToken, Tokenizer

from triptych.core.byte_level import unspell
from triptych.core.config import ModelOptions
from triptych.core.context_length import context_length
from triptych.core.errors import ConfigError, InvalidRequest, WeightsError
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.continuation import cut, marked
from triptych.modalities.llm.detokenizer import Detokenizer
from triptych.modalities.llm.template import compile_template

# Characters of Unicode's private use area stand in for special tokens that a caller spelled out,
# and for the first of them where a caller wrote that.
_MARK = "\ue000"
_ESCAPE = _MARK + "{}\ue001"
_ESCAPED = re.compile(_ESCAPE.format(r"(\d+)"))
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """What the API process knows of one model."""

    name: str
    digest: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]
    template: Template | None
    template_tokens: Mapping[str, str]
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def open(
        cls,
        resolved: ResolvedModel,
        options: ModelOptions,
        *,
        text_config: Mapping[str, Any] = MappingProxyType({}),
        specials: Sequence[str] = (),
    ) -> TextModel:
        """Read tokenizer, template and limits from a resolved model's folder.

        `text_config` goes before `config.json` where a model is more than text; `specials` are
        tokens that its tokenizer may lack. Raises `WeightsError` when the folder lacks what chat
        needs, `ConfigError` for a bad `--chat-template`.
        """
        folder = Path(resolved.folder)
        config = {**read_json(folder / "config.json"), **text_config}
        tokenizer_config = _read_if_there(folder / "tokenizer_config.json")
        generation = _read_if_there(folder / "generation_config.json")
        tokens = _named_tokens(tokenizer_config)
        own_length = context_length(config.get)
        if options.max_length > own_length:
            raise ConfigError(
                f"--max-length {options.max_length} is over the {own_length} tokens that"
                f" {resolved.name} supports."
            )
        tokenizer = _load_tokenizer(folder, resolved.name)
        _ensure_special(tokenizer, specials)
        return cls(
            name=resolved.name,
            digest=resolved.digest,
            context_length=options.max_length or own_length,
            vocab_size=int(config["vocab_size"]),
            eos_token_ids=_eos_ids(tokenizer, tokens, (generation, config)),
            default_sampling={k: generation[k] for k in _SAMPLING_DEFAULTS if generation.get(k)},
            template=_load_template(folder, tokenizer_config, options),
            template_tokens=tokens,
            tokenizer=tokenizer,
        )

    @cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        """Reads special tokens as the characters they are spelled with."""
        literal = Tokenizer.from_str(self.tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal

    @cached_property
    def _specials(self) -> dict[str, int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _any_of(self._specials)

    @cached_property
    def _escapable(self) -> tuple[str, ...]:
        """What a caller's text may spell only by its stand-in."""
        return (*sorted(self._specials), _MARK)

    def encode_text(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Token ids of plain text, with the tokens the model wants at its beginning, if wanted.

        Special tokens spelled in `text` are read as plain characters unless `parse_special`.
        """
        tokenizer = self.tokenizer if parse_special else self._literal_tokenizer
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> tuple[int, ...]:
        """Token ids of a conversation through the chat template.

        Raises `InvalidRequest` when there is no template or it rejects the messages.
        """
        plain = [_plain(message) for message in messages]
        escaped = self.escape(plain)
        rendered = self.render(escaped, **template_kwargs)
        return self.encode_rendered(rendered, has_stand_ins=escaped != plain)

    def encode_rendered(self, rendered: str, *, has_stand_ins: bool) -> tuple[int, ...]:
        """Token ids of a rendered conversation, in which stand-ins are what callers wrote."""
        if has_stand_ins:
            return self._encode_runs(rendered)
        return tuple(self.tokenizer.encode(rendered, add_special_tokens=False).ids)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as one string, as the model was trained to read it.

        With `continue_final_message` it ends with the last message's words.
        """
        if continue_final_message:
            return cut(self.render(marked(messages), **template_kwargs))
        if self.template is None:
            raise InvalidRequest(
                f"{self.name} has no chat template: use /v1/completions, or start with"
                " --chat-template FILE.",
                param="messages",
            )
        try:
            return self.template.render(
                messages=messages,
                **{"add_generation_prompt": True, **template_kwargs},
                **self.template_tokens,
            )
        except Exception as error:  # a template is a foreign program: it may raise anything
            raise InvalidRequest(
                f"The chat template of {self.name} rejects these messages: {error}",
                param="messages",
            ) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Raises `InvalidRequest` for unknown ids."""
        if any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise InvalidRequest(
                f"Token ids lie between 0 and {self.vocab_size - 1}.", param="tokens"
            )
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a special one, which answers leave out."""
        return self.tokenizer.id_to_token(token_id) in self._specials

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (half a character is possible)."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._specials:
            return token.encode()
        if self._is_byte_level:
            return unspell(token)
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()

    def detokenizer(self, prompt_ids: Sequence[int], stops: Sequence[str]) -> Detokenizer:
        """An incremental decoder for one row that continues `prompt_ids`."""
        words = [token_id for token_id in prompt_ids if token_id < self.vocab_size]
        return Detokenizer(self.tokenizer, words, stops)

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self.tokenizer.to_str()).get("decoder") or {}
        return "ByteLevel" in json.dumps(decoder)

    def escape(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """`messages` with a stand-in for all that is escapable, however deep it is nested."""
        pattern = _any_of(self._escapable)
        stand_ins = {text: _ESCAPE.format(n) for n, text in enumerate(self._escapable)}

        def escape(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda match: stand_ins[match[0]], value)
            if isinstance(value, Mapping):
                return {escape(key): escape(inner) for key, inner in value.items()}
            return list(map(escape, value)) if isinstance(value, list | tuple) else value

        return [escape(message) for message in messages]

    def _encode_runs(self, rendered: str) -> tuple[int, ...]:
        """Encode text whose only special tokens are the template's own."""
        ids: list[int] = []
        position = 0

        def run(text: str) -> None:
            literal = _ESCAPED.sub(lambda match: self._escapable[int(match[1])], text)
            encoded = self._literal_tokenizer.encode(literal, add_special_tokens=False)
            ids.extend(encoded.ids)

        for match in self._special_pattern.finditer(rendered):
            run(rendered[position : match.start()])
            ids.append(self._specials[match[0]])
            position = match.end()
        run(rendered[position:])
        return tuple(ids)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _load_tokenizer(folder: Path, name: str) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(f"{name}: tokenizer.json is missing from the model's folder.")
    return Tokenizer.from_file(str(file))


def _ensure_special(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    known = {
        added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special
    }
    new = [AddedToken(token, special=True) for token in tokens if token not in known]
    tokenizer.add_special_tokens(new)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one string: templates of text models expect no parts."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content if content is not None else ""}


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on, which templates refer to by name."""
    named = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[key] = value
    return named


def _eos_ids(
    tokenizer: Tokenizer, tokens: Mapping[str, str], configs: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    if "eos_token" in tokens:
        token_id = tokenizer.token_to_id(tokens["eos_token"])
        found.update([token_id] if token_id is not None else [])
    return tuple(sorted(found))


def _load_template(
    folder: Path, tokenizer_config: Mapping[str, Any], options: ModelOptions
) -> Template | None:
    if options.chat_template:
        try:
            return compile_template(Path(options.chat_template).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"--chat-template: cannot read that file ({error.strerror})."
            ) from error
    file = folder / "chat_template.jinja"
    if file.is_file():
        return compile_template(file.read_text(encoding="utf-8"))
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several named templates: the plain one is called "default"
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return compile_template(source) if isinstance(source, str) else None
