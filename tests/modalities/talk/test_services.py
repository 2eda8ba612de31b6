"""The services of a spoken conversation are those that the modalities answer with."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

from support.http import FakeEngine
from triptych.core.options.config import Config, ScheduleOptions
from triptych.core.process.lazy import load
from triptych.modalities.modality import ApiSetup
from triptych.modalities.registry import MODALITIES
from triptych.modalities.talk.services import TalkServices
from triptych.schedulers.admission import Admission


async def test_they_are_found_without_any_model() -> None:
    admission = Admission(options=ScheduleOptions(), num_keys=1)
    async with AsyncExitStack() as stack:
        setup = ApiSetup(
            config=Config(),
            models=dict.fromkeys(("chat", "vision", "embedding", "speech", "asr", "image"), ()),
            client=FakeEngine(),
            pool=cast("Any", SimpleNamespace()),
            admission=admission,
            exit_stack=stack,
        )
        parts = [load(modality.api)(setup) for modality in MODALITIES]
        services = TalkServices.of(parts)
        assert setup.encode_chat == services.chat.encode_chat
        assert not services.recognition.models
        assert not services.speech.models
