"""The salt of tenants' names, kept next to their pages on disk.

Owns the file. Pages are found again only under the names that their tenants had. The salt is
random, so the names in keys and logs reveal nothing about API keys.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from triptych.core.errors import ConfigError
from triptych.core.options.tier_plan import TierPlan
from triptych.core.process.atomic_files import write_whole

_SALT_BYTES = 32
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600


def kept_salt(plan: TierPlan | None) -> bytes:
    """The salt of the plan's folder, made on first use; empty without a folder.

    Raises `ConfigError` if the folder cannot be used.
    """
    if plan is None or not plan.folder:
        return b""
    file = Path(plan.folder).expanduser() / "salt"
    try:
        with suppress(FileNotFoundError):
            if len(salt := file.read_bytes()) == _SALT_BYTES:
                return salt
        file.parent.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        salt = secrets.token_bytes(_SALT_BYTES)
        write_whole(file, (salt,), mode=_PRIVATE_FILE)
    except OSError as error:
        raise ConfigError(
            f"disk_offload_dir {plan.folder}: {error.strerror or error}; name a folder that this"
            " user may write to."
        ) from error
    return salt
