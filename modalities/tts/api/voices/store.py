"""The store of custom voices: a folder on disk, without an index that could disagree with it.

Owns places, quotas and access. Each owner has a folder of generated names. A file appears complete,
by one rename; a damaged one is renamed. Several processes may use one store. Knows nothing of HTTP,
models or how sound is decoded.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

import numpy as np
from filelock import FileLock

from triptych.core.errors import InvalidRequest, Unavailable
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import Config
from triptych.core.process.logs import fields
from triptych.core.weights.cache import default_cache_dir
from triptych.core.weights.manifest import flush
from triptych.modalities.tts.api.voices.record import (
    DamagedVoice,
    VoiceDescription,
    VoiceFile,
    VoiceRecord,
    is_voice_id,
    read_record,
)

_WHOLE, _PARTIAL, _DAMAGED = ".voice", ".partial", ".damaged"
_LOCK_TIMEOUT_S: Final = 30.0
_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", VoiceRecord, VoiceFile)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceQuota:
    """Maximum number of voices per owner, and in total."""

    per_owner: int = 32
    in_total: int = 1024


class VoiceStore:
    """Custom voices under `root`. Every call reads or writes the disk: keep it off event loops.

    All methods raise `Unavailable` where the disk fails.
    """

    def __init__(self, root: Path, quota: VoiceQuota = VoiceQuota()) -> None:
        self._root = root
        self._quota = quota

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The store in the cache folder that `config` points to."""
        cache_dir = config.models.cache_dir
        parent = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        server = config.server
        quota = VoiceQuota(per_owner=server.max_voices_per_key, in_total=server.max_voices)
        return cls(parent / "voices", quota)

    def add(self, owner: str, about: VoiceDescription, pcm_S: Pcm, sample_rate: int) -> VoiceRecord:
        """Keep a voice of `owner`: samples [S] at `sample_rate` (Hz).

        Raises `InvalidRequest` over the owner's quota, `Unavailable` over the total quota.
        """
        pcm = np.ascontiguousarray(pcm_S, "<f4").tobytes()
        record = VoiceRecord.new(about, pcm, sample_rate)
        try:
            self._keep(self._folder(owner), VoiceFile(record, pcm))
        except OSError as error:
            raise _disk_failure(error) from error
        return record

    def voices_of(self, owner: str) -> list[VoiceRecord]:
        """The voices of `owner`, oldest first."""
        paths = self._folder(owner).glob(f"*{_WHOLE}")
        records = [
            record for path in paths if (record := _read_intact(read_record, path)) is not None
        ]
        return sorted(records, key=lambda record: (record.created_s, record.id))

    def record(self, voice_id: str, owner: str) -> VoiceRecord | None:
        """The record of a voice; None where `owner` has no such voice."""
        path = self._path(voice_id, owner)
        return None if path is None else _read_intact(read_record, path)

    def read(self, voice_id: str, owner: str) -> VoiceFile | None:
        """The voice with its sound; None where `owner` has no such voice."""
        path = self._path(voice_id, owner)
        return None if path is None else _read_intact(VoiceFile.read, path)

    def delete(self, voice_id: str, owner: str) -> bool:
        """Delete a voice. Returns whether `owner` had it."""
        path = self._path(voice_id, owner)
        if path is None:
            return False
        try:
            path.unlink()
            flush(path.parent)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _disk_failure(error) from error
        return True

    def _folder(self, owner: str) -> Path:
        return self._root / hashlib.sha256(owner.encode()).hexdigest()[:32]

    def _path(self, voice_id: str, owner: str) -> Path | None:
        return self._folder(owner) / (voice_id + _WHOLE) if is_voice_id(voice_id) else None

    def _keep(self, folder: Path, voice: VoiceFile) -> None:
        """Write the voice into `folder` atomically and durably."""
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        with FileLock(self._root / ".lock", timeout=_LOCK_TIMEOUT_S):
            self._check_quota(folder)
            folder.mkdir(0o700, exist_ok=True)
            for abandoned in folder.glob(f"*{_PARTIAL}"):  # no other process writes under the lock
                abandoned.unlink()
            partial = folder / (voice.record.id + _PARTIAL)
            voice.write(partial)
            partial.rename(partial.with_suffix(_WHOLE))
            flush(folder)
            flush(self._root)

    def _check_quota(self, folder: Path) -> None:
        if len(list(folder.glob(f"*{_WHOLE}"))) >= self._quota.per_owner:
            most = self._quota.per_owner
            raise InvalidRequest(f"You have {most} voices, the maximum; delete one first.")
        if len(list(self._root.glob(f"*/*{_WHOLE}"))) >= self._quota.in_total:
            raise Unavailable("The server's limit on voices is reached.", retry_after_s=3600)


def _read_intact(read: Callable[[Path], _Found], path: Path) -> _Found | None:
    """Read a voice's file; None where there is none. Renames a damaged file."""
    try:
        try:
            return read(path)
        except DamagedVoice as error:
            extra = fields(voice=path.stem, reason=error.message)
            _log.warning("a damaged voice file was renamed", extra=extra)
            path.replace(path.with_suffix(_DAMAGED))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _disk_failure(error) from error
    return None


def _disk_failure(error: OSError) -> Unavailable:
    _log.error("reading or writing voices failed", extra=fields(reason=error.strerror))
    return Unavailable("Voices cannot be read or stored right now; see the server's log.")
