"""Messages survive the wire; anything else is dropped."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.model_changes import (
    AddModel,
    KeepModel,
    LoadModel,
    RemoveModel,
    Sleep,
    UnloadModel,
    Wake,
)
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob, TokenRequest
from triptych.core.errors import ErrorInfo
from triptych.core.transport import messages
from triptych.core.transport.messages import (
    Cancel,
    Change,
    Changed,
    EngineGone,
    Goodbye,
    Hello,
    MessageCodec,
    Outputs,
    SetPaused,
)

CODEC = MessageCodec(request=TokenRequest, payload=TokenDelta)

ids = st.integers(0, 2**31 - 1)
names = st.text(max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
deltas = st.builds(
    TokenDelta,
    token_ids=st.lists(ids, max_size=5).map(tuple),
    logprobs=st.lists(st.builds(TokenLogprob, token_id=ids, logprob=finite), max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length", "cancelled"]),
)
outputs = st.builds(
    Output,
    job_id=names,
    payload=st.none() | deltas,
    is_final=st.booleans(),
    error=st.none() | st.builds(ErrorInfo, code=names, message=names),
)
requests = st.builds(
    TokenRequest,
    prompt_ids=st.lists(ids, max_size=50).map(tuple),
    sampling=st.builds(SamplingParams, temperature=finite, seed=ids),
)
job_ids = st.lists(names, max_size=3).map(tuple)
models = st.builds(ResolvedModel, name=names, reference=names, folder=names, digest=names)
changes = st.one_of(
    st.builds(AddModel, models),
    st.builds(KeepModel, names, finite | st.just(math.inf)),
    st.builds(Sleep, st.booleans()),
    *(st.builds(kind, names) for kind in (LoadModel, UnloadModel, RemoveModel)),
    st.just(Wake()),
)
to_engine = st.one_of(
    st.builds(Job, job_id=names, model=names, request=requests),
    st.builds(Cancel, job_ids),
    st.builds(SetPaused, job_ids, st.booleans()),
    st.builds(Change, changes, ids),
    st.just(Hello()),
)
beats = st.builds(
    Heartbeat,
    turn=ids,
    phase=names,
    stall_budget_s=finite,
    num_jobs=ids,
    models=st.lists(
        st.builds(ModelStatus, model=names, state=st.sampled_from(["loading", "ready"])), max_size=2
    ).map(tuple),
    gauges=st.dictionaries(names, finite, max_size=2),
    counters=st.dictionaries(names, finite, max_size=2),
    histograms=st.dictionaries(names, st.lists(finite, max_size=2), max_size=2),
)
from_engine = st.one_of(
    st.builds(Outputs, st.lists(outputs, max_size=3).map(tuple)),
    beats,
    st.just(Goodbye()),
    st.builds(Changed, call=ids, error=st.none() | st.builds(ErrorInfo, code=names, message=names)),
    st.builds(EngineGone, reason=names, at_ns=ids, restart_in_s=st.none() | finite),
)


@given(to_engine)
def test_messages_to_the_engine_come_back_equal(message):
    assert CODEC.to_engine(CODEC.encode(message)) == message


@given(from_engine)
def test_messages_from_the_engine_come_back_equal(message):
    assert CODEC.from_engine(CODEC.encode(message)) == message


def test_outputs_too_large_for_one_message_are_divided(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 400)
    turn = tuple(
        Output(job_id=f"job-{n}", payload=TokenDelta(token_ids=tuple(range(n)))) for n in range(30)
    )
    parts = CODEC.encode_parts(Outputs(turn))
    assert len(parts) > 1
    assert max(map(len, parts)) <= 400
    found = [CODEC.from_engine(part) for part in parts]
    assert tuple(output for part in found for output in part.outputs) == turn


def test_an_output_too_large_for_a_message_harms_no_other_one(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 200)
    small, large = Output(job_id="a"), Output(job_id="b" * 300)
    found = map(CODEC.from_engine, CODEC.encode_parts(Outputs((small, large, small))))
    kept = [output for part in found if part is not None for output in part.outputs]
    assert kept == [small, small]


@given(st.binary(max_size=200))
def test_random_bytes_are_dropped(data):
    assert CODEC.to_engine(data) is None
    assert CODEC.from_engine(data) is None


@given(from_engine, st.data())
def test_a_damaged_message_is_dropped_or_still_typed(message, data):
    encoded = bytearray(CODEC.encode(message))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] = data.draw(st.integers(0, 255))
    decoded = CODEC.from_engine(bytes(encoded[: data.draw(st.integers(at, len(encoded)))]))
    assert decoded is None or isinstance(
        decoded, Outputs | Heartbeat | Changed | Goodbye | EngineGone
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa4type\xa7Outputs",
        msgspec.msgpack.encode(
            {"type": "Outputs", "outputs": [{"job_id": "a", "payload": {"type": "x"}}]}
        ),
        msgspec.msgpack.encode({"type": "Outputs", "outputs": [{"job_id": b"\xff"}]}),
        b"\x82\xa4type\xa7Outputs\xa7outputs\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa1\xff",
    ],
)
def test_hostile_bytes_are_dropped_with_a_line_in_the_log(data, caplog):
    assert CODEC.from_engine(data) is None
    assert "malformed" in caplog.text


def test_the_log_line_holds_no_content(caplog):
    data = msgspec.msgpack.encode({"type": "Job", "job_id": "a", "model": 7, "request": "secret"})
    assert CODEC.to_engine(data) is None
    assert "secret" not in caplog.text


def test_payloads_of_another_modality_are_dropped():
    class Strange(msgspec.Struct, tag="strange"):
        x: int = 1

    data = CODEC.encode(Job(job_id="a", model="m", request=Strange()))
    assert CODEC.to_engine(data) is None


def test_oversized_messages_are_not_decoded(monkeypatch, caplog):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 10)
    assert CODEC.to_engine(CODEC.encode(Cancel(("a" * 20,)))) is None
    assert "bytes" in caplog.text
