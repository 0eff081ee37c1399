"""The recorded version and fields of vLLM are those of the vLLM that runs."""

import httpx2
import pytest
from interfaces import read_record
from servers import PATIENCE

RECORD = read_record("vllm")


@pytest.mark.parametrize(
    ("message", "schema"),
    [
        ("completion_request", "CompletionRequest"),
        ("chat_request", "ChatCompletionRequest"),
        ("error", "ErrorResponse"),
        ("error_info", "ErrorInfo"),
    ],
)
def test_the_recorded_fields_are_those_of_the_server(wide_llava, start, message, schema):
    address = start(wide_llava).address
    version = httpx2.get(f"{address}/version", timeout=PATIENCE).json()["version"]
    assert version.partition("+")[0] == RECORD["version"]
    page = httpx2.get(f"{address}/openapi.json", timeout=PATIENCE).json()
    properties = page["components"]["schemas"][schema]["properties"]
    assert {*properties} == {*RECORD["fields"][message].split()}
