"""A minimal chat server around OpenVINO GenAI's continuous batching, which has none.

    python samples/benchmarks/openvino_server.py MODEL.gguf --port 8000

Runs in an environment with `openvino-genai`, `fastapi` and `uvicorn`; `chat_peers.py` starts it.
Owns only the protocol that the benchmark needs: streamed greedy chat completions that ignore the
end of text. One thread steps the pipeline; the event loop sends the results of each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

import openvino_genai
import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, StreamingResponse


class Batcher:
    """A pipeline, and the thread that steps it while there are requests."""

    def __init__(self, path: str, *, cache_gb: int, max_num_seqs: int) -> None:
        options = openvino_genai.SchedulerConfig()
        options.cache_size = cache_gb
        options.max_num_seqs = max_num_seqs
        options.enable_prefix_caching = True
        options.dynamic_split_fuse = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, options, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        num_words = len(self.tokenizer.get_vocab())
        # Decoding a token at a time would cost more than the step that made it.
        self.words = self.tokenizer.decode([[token_id] for token_id in range(num_words)])
        self._waiting: queue.SimpleQueue[tuple[Any, int, Any]] = queue.SimpleQueue()
        self._num_seen = 0
        threading.Thread(target=self._run, daemon=True).start()

    def encode(self, messages: list[dict[str, str]]) -> Any:
        """The prompt's token ids, as a tensor."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False).input_ids

    def submit(self, input_ids: Any, num_tokens: int) -> asyncio.Queue[list[int]]:
        """A queue of the new tokens of each step."""
        tokens: asyncio.Queue[list[int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def give(token_ids: list[int]) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token_ids)

        self._waiting.put((input_ids, num_tokens, give))
        return tokens

    def _run(self) -> None:
        running: list[tuple[Any, Any]] = []
        while True:
            while not running or not self._waiting.empty():
                running.append(self._add(*self._waiting.get()))
            self.pipeline.step()
            for handle, give in running:
                if handle.can_read():
                    (output,) = handle.read().values()
                    give(output.generated_ids)
            alive = openvino_genai.GenerationStatus.RUNNING
            running = [(handle, give) for handle, give in running if handle.get_status() == alive]

    def _add(self, input_ids: Any, num_tokens: int, give: Any) -> tuple[Any, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._num_seen += 1
        return self.pipeline.add_request(self._num_seen, input_ids, config), give


def build(batcher: Batcher) -> FastAPI:
    """Build the application's routes."""
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: dict[str, Any]) -> StreamingResponse | JSONResponse:
        input_ids = batcher.encode(body["messages"])
        tokens = batcher.submit(input_ids, body["max_tokens"])
        events = _events(batcher, tokens, input_ids.shape[1], body["max_tokens"])
        if body.get("stream"):
            return StreamingResponse(map_lines(events), media_type="text/event-stream")
        text = "".join([_text(event) async for event in events])
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": text}}]})

    return app


async def _events(
    batcher: Batcher, tokens: asyncio.Queue[list[int]], num_prompt: int, num_tokens: int
) -> AsyncIterator[dict[str, Any]]:
    num_given = 0
    while num_given < num_tokens:
        token_ids = await tokens.get()
        num_given += len(token_ids)
        text = "".join(batcher.words[token_id] for token_id in token_ids)
        yield {"choices": [{"index": 0, "delta": {"content": text}}]}
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_given}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": usage}


def _text(event: dict[str, Any]) -> str:
    return str(event["choices"][0]["delta"].get("content", ""))


async def map_lines(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Lines as server-sent events."""
    async for event in events:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    """Load the model and serve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    args = parser.parse_args()
    batcher = Batcher(args.model, cache_gb=args.cache_gb, max_num_seqs=args.max_num_seqs)
    uvicorn.run(build(batcher), host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
