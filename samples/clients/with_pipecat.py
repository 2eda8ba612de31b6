# /// script
# dependencies = ["pipecat-ai[openai]==1.14.0"]
# ///
"""Pipecat with its service for OpenAI's Realtime API: a spoken answer in a pipeline."""

from __future__ import annotations

import asyncio

from checks import Server, run_checks, said
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from tasks import QUESTION


class Recorder(FrameProcessor):
    """The answer's words and sound, and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.num_bytes = "", 0
        self.errors: list[str] = []
        self.ended = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Note a frame, and pass it on."""
        await super().process_frame(frame, direction)
        match frame:
            case TTSAudioRawFrame():
                self.num_bytes += len(frame.audio)
            case TTSTextFrame():
                self.text += frame.text
            case ErrorFrame():
                self.errors.append(frame.error)
            case LLMFullResponseEndFrame():
                self.ended.set()
        await self.push_frame(frame, direction)


async def realtime(server: Server) -> str:
    """Ask for one spoken answer."""
    service = OpenAIRealtimeLLMService(
        api_key=server.key,
        model=server.model,
        base_url=f"{server.v1.replace('http', 'ws', 1)}/realtime",
        session_properties=SessionProperties(
            instructions="Answer in one short sentence.", max_output_tokens=60
        ),
    )
    pair = LLMContextAggregatorPair(LLMContext([{"role": "user", "content": QUESTION}]))
    recorder = Recorder()
    task = PipelineTask(Pipeline([pair.user(), service, recorder, pair.assistant()]))
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    await asyncio.sleep(2)  # until the session is configured
    await task.queue_frames([LLMRunFrame()])
    try:
        await asyncio.wait_for(recorder.ended.wait(), 60)
    finally:
        await task.cancel()
        await running
    assert not recorder.errors, recorder.errors
    assert recorder.num_bytes, "there is no sound"
    return said(recorder.text, "Paris")


def main() -> None:
    """Run the checks."""
    run_checks("pipecat-ai", realtime)


if __name__ == "__main__":
    main()
