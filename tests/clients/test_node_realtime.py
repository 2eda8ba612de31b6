"""OpenAI's package for JavaScript holds a spoken conversation, over HTTPS and without it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import trustme

from support.http import FakeEngine, live
from support.talk import talk_app

NODE = Path(__file__).parents[2] / "samples" / "clients" / "node"


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules" / "ws").exists(),
    reason="needs node, and `npm install` in samples/clients/node",
)
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_question_is_answered_in_speech(tmp_path: Path, is_encrypted: bool) -> None:
    options = {}
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    if is_encrypted:
        own = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
        own.write_to_path(tmp_path / "server.pem")
        options["ssl_certfile"] = str(tmp_path / "server.pem")
    talk = talk_app(tmp_path, FakeEngine(answer="It is Paris."), **options)
    with live(talk.app) as server:
        command = ["node", NODE / "with_openai.mjs", "--url", server.url, "--model", "tiny"]
        done = subprocess.run(
            [*command, "--only", "realtime"],
            env=os.environ | {"NODE_EXTRA_CA_CERTS": str(tmp_path / "ca.pem")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "works realtime" in done.stdout, done.stdout + done.stderr
