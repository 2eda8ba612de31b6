"""One custom voice, and its file format.

Owns the format: a magic word, a version, two SHA-256, a description in msgpack, and little-endian
float32 samples. User input (name, transcript, consent) is data inside; the file's own name and
place never depend on it. Knows nothing of keys, quotas or HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import struct
import time
import unicodedata
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec

from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.process.typed import decode_msgpack
from triptych.modalities.tts.wire import VoiceClip

MAX_TRANSCRIPT_CHARS: Final = 4096
_MAGIC: Final = b"TRIPVOX\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct(">8sII32s")
"""Magic, version, length of the description, SHA-256 of the description."""
_MAX_DESCRIPTION_BYTES: Final = 128 * 1024
_ID: Final = re.compile(r"voice_[0-9a-f]{32}")
_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
_JOINER: Final = "\u200d"  # joins the parts of an emoji


class DamagedVoice(TriptychError):
    """A voice's file is corrupt."""


class VoiceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's description of a voice: its name, the words spoken, and the speaker's consent.

    `model` is the served name of the model that it was made for.
    """

    name: str
    model: str
    transcript: str = ""
    consent: str = ""
    language: str = ""


class VoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a voice: `num_samples` at `sample_rate` (Hz), and its description."""

    id: str
    created_s: int
    sample_rate: int
    num_samples: int
    pcm_sha256: bytes
    about: VoiceDescription

    @property
    def duration_s(self) -> float:
        """Seconds of the recording."""
        return self.num_samples / self.sample_rate

    @classmethod
    def new(cls, about: VoiceDescription, pcm: bytes, sample_rate: int) -> Self:
        """A record of `pcm` under a new id, created now."""
        return cls(
            id=f"voice_{secrets.token_hex(16)}",
            created_s=int(time.time()),
            sample_rate=sample_rate,
            num_samples=len(pcm) // 4,
            pcm_sha256=hashlib.sha256(pcm).digest(),
            about=about,
        )


class VoiceFile(msgspec.Struct, frozen=True):
    """A voice's record and samples."""

    record: VoiceRecord
    pcm: bytes

    def clip(self, prompt_ids: tuple[int, ...] = ()) -> VoiceClip:
        """The clip for the engine; `prompt_ids` encode the transcript for its model."""
        rate = self.record.sample_rate
        rest = struct.pack(f"<I{len(prompt_ids)}q", rate, *prompt_ids)
        digest = hashlib.sha256(self.record.pcm_sha256 + rest).hexdigest()
        return VoiceClip(digest=digest, pcm=self.pcm, sample_rate=rate, prompt_ids=prompt_ids)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the whole file. Raises `DamagedVoice`, and OSError where it cannot be read."""
        with path.open("rb") as file:
            record = _read_record(file, path.stem)
            pcm = file.read()
        if not hmac.compare_digest(hashlib.sha256(pcm).digest(), record.pcm_sha256):
            raise DamagedVoice("The checksum of the sound does not match.")
        return cls(record, pcm)

    def write(self, path: Path) -> None:
        """Write a new file that only its owner can read, and flush it to the disk."""
        packed = msgspec.msgpack.encode(self.record)
        head = _HEAD.pack(_MAGIC, _VERSION, len(packed), hashlib.sha256(packed).digest())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.writelines((head, packed, self.pcm))
            file.flush()
            os.fsync(file.fileno())


def read_record(path: Path) -> VoiceRecord:
    """Read the record without the sound. Raises the errors of `VoiceFile.read`."""
    with path.open("rb") as file:
        record = _read_record(file, path.stem)
        start = file.tell()
        num_bytes = file.seek(0, os.SEEK_END) - start
    if num_bytes != 4 * record.num_samples:
        raise DamagedVoice("The file has the wrong length.")
    return record


def is_voice_id(text: str) -> bool:
    """Whether `text` has the form of a generated id, and so is safe as a file name."""
    return _ID.fullmatch(text) is not None


def _read_record(file: BinaryIO, voice_id: str) -> VoiceRecord:
    try:
        magic, version, num_bytes, sha256 = _HEAD.unpack(file.read(_HEAD.size))
    except struct.error as error:
        raise DamagedVoice("The file is truncated.") from error
    if magic != _MAGIC or version != _VERSION or num_bytes > _MAX_DESCRIPTION_BYTES:
        raise DamagedVoice("The file has another format or version.")
    packed = file.read(num_bytes)
    if not hmac.compare_digest(hashlib.sha256(packed).digest(), sha256):
        raise DamagedVoice("The checksum of the description does not match.")
    try:
        record = decode_msgpack(packed, VoiceRecord)
    except msgspec.MsgspecError as error:
        raise DamagedVoice("The description has another format.") from error
    if record.id != voice_id:
        raise DamagedVoice("The file belongs to another voice.")
    return record


def check_name(name: str) -> str:
    """Normalize `name` for display. Raises `InvalidRequest` for a misleading or overlong name."""
    name = unicodedata.normalize("NFC", name).strip()
    if not 0 < len(name) <= MAX_NAME_CHARS:
        msg = f"The voice's name must have 1 to {MAX_NAME_CHARS} characters."
        raise InvalidRequest(msg, param="name")
    if any(unicodedata.category(char) in _UNPRINTABLE and char != _JOINER for char in name):
        msg = "The voice's name must not contain control or direction characters."
        raise InvalidRequest(msg, param="name")
    return name
