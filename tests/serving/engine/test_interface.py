"""The recorded version and fields of vLLM are those of the vLLM that runs."""

import httpx2
import jax.numpy as jnp
import pytest
from interfaces import read_record
from servers import PATIENCE, ask, openai_client, serve_with_engine
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm

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


def test_vllm_gives_several_answers_and_log_probabilities(wide_llava, start):
    model = load_vlm(wide_llava, dtype=jnp.float32, use="embeddings", progress=False)
    fields = {"n": 2, "temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2}
    server = serve_with_engine(start(wide_llava).address, model)
    with server as address, openai_client(address) as client:
        reply = ask(client, "red dog?", [noise(1)], 6, **fields)
        chunks = [*ask(client, "red dog?", [noise(1)], 6, stream=True, **fields)]
    assert [choice.index for choice in reply.choices] == [0, 1]
    num_tokens = [len(choice.token_ids) for choice in reply.choices]
    assert reply.usage.completion_tokens == sum(num_tokens) and min(num_tokens) > 0
    for choice in reply.choices:
        positions = choice.logprobs.content
        assert len(positions) == len(choice.token_ids)
        for position in positions:
            first, second = [top.logprob for top in position.top_logprobs]
            assert position.logprob <= first + 1e-6 and second <= first <= 0
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        streamed_ids = [token_id for choice in choices for token_id in choice.token_ids]
        streamed = [position.logprob for choice in choices for position in choice.logprobs.content]
        assert streamed_ids == choice.token_ids
        assert streamed == pytest.approx([position.logprob for position in positions], abs=1e-5)
