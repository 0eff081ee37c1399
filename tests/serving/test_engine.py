"""The server with a fake engine: requests to the engine, and failures of engine and clients."""

import gzip
import io
import json
import re
import threading

import httpx2
import numpy as np
import openai
import pytest
from servers import (
    PATIENCE,
    FakeEngine,
    ask,
    openai_client,
    run_server,
    send_chat,
    serve_with_engine,
    user_message,
    wait_until,
)
from small_world import stepprune
from visual import noise

from stepprune_jax.inference import RunOptions, generate, pipeline, programs, read_request
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.registry import build_pruner
from stepprune_jax.serving.images import RequestLimits

COMPACT = RunOptions(positions="compact")
MAX_IN_FLIGHT = 6


@pytest.fixture(scope="module")
def fake():
    engine = FakeEngine()
    with run_server(engine.app()) as engine.address:
        yield engine


def start_server(model, engine, api_key=None, logs_requests=False, **options):
    limits = RequestLimits(200_000)
    return serve_with_engine(
        engine,
        model,
        max_in_flight=MAX_IN_FLIGHT,
        limits=limits,
        batching=options,
        app_options={"api_key": api_key, "logs_requests": logs_requests},
        policy=stepprune(),
    )


@pytest.fixture(scope="module")
def address(llava_model, fake):
    with start_server(llava_model, fake.address) as address:
        yield address


@pytest.fixture
def client(address, fake):
    fake.mode = "well"
    fake.requests.clear()
    with openai_client(address) as client:
        yield client


def ask_one(client, **fields):
    return ask(client, "red dog?", [noise(1)], 4, **fields)


def read_metrics(address):
    text = httpx2.get(f"{address}/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("stepprune_"): float(value) for name, value in lines}


def expected_row(model, pruner, turns, images):
    """Returns the row that enters the language model for one prompt, computed without a server."""
    request = read_request(model, [turns], [images])
    encoded = pipeline.encode(model, request.images, pruner.taps(model.config))
    batch = plan_batch(model, pruner, request.prompts(), encoded, COMPACT)
    inputs = pipeline.prepare_prefill(model, batch)
    hidden, length = pipeline.embed(model, inputs)
    assert length[0] == len(request.ids[0]) - len(images) + inputs.num_kept[0]
    return hidden[0, : length[0]]


def received_rows(fake):
    torch = pytest.importorskip("torch")
    files = [io.BytesIO(fields["prompt_embeds"]) for fields in fake.requests]
    return [torch.load(file, weights_only=True).numpy() for file in files]


def test_the_engine_receives_the_row_of_the_language_model(client, fake, llava_model):
    images = [noise(1), noise(2, (40, 20))]
    reply = ask(client, "red dog?", images, 3, seed=5, budget=3)
    (row,), (request,) = received_rows(fake), fake.requests
    pruner = build_pruner(None, 3, policy=stepprune())
    expected_embeddings = expected_row(llava_model, pruner, "red dog?", images)
    np.testing.assert_allclose(row, expected_embeddings, rtol=1e-5, atol=1e-6)
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(row), 3)
    assert (usage.visual_tokens, usage.visual_tokens_kept) == (18, 6)
    assert reply.choices[0].finish_reason == "length"
    del request["prompt_embeds"]
    assert request == {
        "model": "the engine's",
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "seed": 5,
        "stream": True,
        "return_token_ids": True,
    }


def test_rows_of_a_batch_do_not_depend_on_each_other(llava_model, fake):
    """A batch of requests with different counts and lengths has the rows of separate requests."""
    fake.requests.clear()
    server = start_server(llava_model, fake.address, batch_size=3, batch_seconds=PATIENCE)
    questions = {"red dog?": [noise(1)], "two": [noise(4)], "yes or no: is this a dog?": [noise(2)]}
    start_count = programs.num_compiled()
    with server as address, openai_client(address) as client:
        threads = [
            threading.Thread(target=ask, args=(client, question, images, 4))
            for question, images in questions.items()
        ]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        metrics = read_metrics(address)
    assert (metrics["batch_rows_sum"], metrics["batch_rows_count"]) == (3, 1)
    assert programs.num_compiled() - start_count <= 3  # Tower, selection and rows.
    pruner, rows = build_pruner(policy=stepprune()), received_rows(fake)
    assert len({len(row) for row in rows}) == 3
    for question, images in questions.items():
        embeddings = expected_row(llava_model, pruner, question, images)
        (row,) = (row for row in rows if row.shape == embeddings.shape)
        np.testing.assert_allclose(row, embeddings, rtol=1e-5, atol=1e-5)


def test_a_stream_has_the_same_answer_and_usage(client):
    reply = ask_one(client)
    chunks = [*ask_one(client, stream=True, stream_options={"include_usage": True})]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(x.delta.content for x in choices) == reply.choices[0].message.content
    ids = [token for choice in choices for token in choice.token_ids]
    assert ids == reply.choices[0].token_ids == [10, 11, 12, 13]
    assert [choice.finish_reason for choice in choices] == [None] * 3 + ["length"]
    assert chunks[-1].usage == reply.usage and not chunks[-1].choices


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_text_ends_the_answer_and_reaches_the_engine(client, fake, stream):
    full_text = ask_one(client).choices[0].message.content
    stop = full_text[1]
    reply = ask_one(client, stop=[stop], stream=stream, presence_penalty=0.5, user="Ada")
    if stream:
        choices = [chunk.choices[0] for chunk in reply]
        text, last_choice = "".join(x.delta.content for x in choices), choices[-1]
        assert len(choices) < 4 and not [x for x in choices[:-1] if x.finish_reason]
    else:
        (last_choice,) = reply.choices
        text = last_choice.message.content
        assert reply.usage.completion_tokens == len(last_choice.token_ids) < 4
    assert text == full_text[0] and last_choice.finish_reason == "stop"
    request = fake.requests[-1]
    assert (request["stop"], request["presence_penalty"]) == ([stop], 0.5) and "user" not in request
    wait_until(lambda: fake.num_running == 0)


def test_the_model_is_listed_and_retrieved_by_name(address, client):
    (model,) = client.models.list().data
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="model is 'a/b', expected 'tiny'"):
        client.models.retrieve("a/b")


def test_only_web_pages_of_allowed_origins_may_send_requests(llava_model, address):
    page_headers, other_headers = {"origin": "http://page:3000"}, {"origin": "http://other"}
    preflight = {"access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "authorization,content-type"
    chat_path, allow_header = "/v1/chat/completions", "access-control-allow-origin"
    assert allow_header not in httpx2.get(f"{address}/v1/models", headers=page_headers).headers
    with serve_with_engine("http://x", llava_model, origins=["http://page:3000"]) as server:
        for headers, status in ((page_headers, 200), (other_headers, 400)):
            response = httpx2.options(server + chat_path, headers=headers | preflight)
            assert response.status_code == status
        response = httpx2.post(server + chat_path, headers=page_headers, content=b"{}")
        assert response.status_code == 400
        assert response.headers[allow_header] == page_headers["origin"]


@pytest.mark.parametrize(
    ("mode", "status", "message"),
    [
        ("refuses", 400, "the engine answers 400: the prompt is too long"),
        ("fails", 503, "the engine answers 500: EngineCore died"),
        ("breaks", 503, "the engine failed: EngineCore died"),
        ("ends", 503, "ended its answer early"),
    ],
)
def test_clients_receive_errors_of_the_engine(client, fake, address, mode, status, message):
    fake.mode, metric = mode, f'requests_total{{status="{status}"}}'
    start_count = read_metrics(address).get(metric, 0)
    with pytest.raises(openai.APIStatusError) as caught:
        ask_one(client)
    assert caught.value.status_code == status and message in str(caught.value)
    is_late = mode in ("breaks", "ends")  # The first token has arrived before the error.
    with pytest.raises(openai.APIError if is_late else openai.APIStatusError, match=message):
        list(ask_one(client, stream=True))
    assert read_metrics(address)[metric] == start_count + 2
    wait_until(lambda: read_metrics(address)["in_flight"] == 0)
    fake.mode = "well"
    assert ask_one(client).usage.completion_tokens == 4


def test_a_slow_engine_is_an_error(llava_model, fake):
    fake.mode = "slow"
    with (
        start_server(llava_model, fake.address, seconds=0.05) as address,
        openai_client(address) as client,
    ):
        for stream in (True, False):
            with pytest.raises(openai.InternalServerError, match="too slow") as caught:
                ask_one(client, stream=stream)
            assert caught.value.status_code == 503


def test_an_engine_may_be_restarted(llava_model):
    fake = FakeEngine()
    with run_server(fake.app()) as engine_address:
        port = int(engine_address.rpartition(":")[2])
    with start_server(llava_model, engine_address) as address, openai_client(address) as client:
        for _ in range(2):
            with pytest.raises(openai.APIStatusError, match="is not reachable") as caught:
                ask_one(client)
            assert caught.value.status_code == 503
            assert httpx2.get(f"{address}/health").status_code == 503
            with run_server(fake.app(), port):
                assert ask_one(client).usage.completion_tokens == 4
                assert httpx2.get(f"{address}/health").status_code == 200


def test_an_engine_may_change_its_model(client, fake):
    for name in ("another", fake.name):
        fake.name = name
        with pytest.raises(openai.InternalServerError, match="the engine answers 404: no such"):
            ask_one(client)
        assert ask_one(client).usage.completion_tokens == 4


def test_requests_reuse_one_connection_to_the_engine(client, fake):
    fake.clients.clear()
    for _ in range(3):
        ask_one(client)
        list(ask_one(client, stream=True))
    assert len(fake.clients) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_work_of_the_engine(address, fake, client, stream):
    fake.mode, start_count = "endless", fake.num_cancelled
    body = {"model": "tiny", "messages": [user_message("two", noise(1))], "max_tokens": 200}
    body["stream"] = stream
    connection = send_chat(address, body)
    wait_until(lambda: fake.num_running == 1)
    if stream:
        assert connection.getresponse().readline().startswith(b"data: {")
    connection.close()
    wait_until(lambda: fake.num_cancelled == start_count + 1 and fake.num_running == 0)
    wait_until(lambda: read_metrics(address)["in_flight"] == 0)
    assert read_metrics(address)['requests_total{status="499"}'] >= 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_the_server_does_not_wait_for_gets_an_error(
    llava_model, fake, stream, capfd
):
    fake.mode = "endless"
    body = {"model": "tiny", "stream": stream, "max_tokens": 200, "messages": [user_message("two")]}
    with start_server(llava_model, fake.address) as address:
        connection = send_chat(address, body)
        wait_until(lambda: fake.num_running == 1)
    fake.mode = "well"
    response = connection.getresponse()
    assert response.status == (200 if stream else 503)
    last_event = response.read().decode().strip().rpartition("data: ")[2]
    connection.close()
    error = json.loads(last_event)["error"]
    assert (error["code"], error["message"]) == (503, "the server is stopping")
    assert "Traceback" not in capfd.readouterr().err


def test_requests_above_the_limit_are_refused_at_once(address, fake, client):
    fake.mode, fake.is_holding = "holds", True
    body = {"model": "tiny", "messages": [user_message("two", noise(1))], "max_tokens": 2}
    connections = [send_chat(address, body) for _ in range(MAX_IN_FLIGHT)]
    wait_until(lambda: read_metrics(address)["in_flight"] == MAX_IN_FLIGHT)
    for _ in range(3):
        response = httpx2.post(f"{address}/v1/chat/completions", json=body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    fake.is_holding = False
    for connection in connections:
        assert connection.getresponse().status == 200
        connection.close()
    wait_until(lambda: read_metrics(address)["in_flight"] == 0)
    assert read_metrics(address)["in_flight"] == read_metrics(address)["queue"] == 0


def test_a_large_body_is_refused_before_it_is_read(address):
    large_body = {"model": "tiny", "messages": [user_message("a" * 300_000)]}
    assert httpx2.post(f"{address}/v1/chat/completions", json=large_body).status_code == 413

    def chunks():
        for _ in range(40):
            yield b" " * 10_000

    response = httpx2.post(f"{address}/v1/chat/completions", content=chunks())
    assert response.status_code == 413 and "200000 bytes" in response.json()["error"]["message"]
    assert httpx2.get(f"{address}/v1/chat/completions").status_code == 405
    for body in (b"{", b'{"\\ud800": 1}'):
        response = httpx2.post(f"{address}/v1/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "deflate, gzip"])
def test_a_compressed_body_is_refused(address, encoding):
    body = gzip.compress(json.dumps({"model": "tiny", "messages": [user_message("two")]}).encode())
    headers = {"content-encoding": encoding}
    response = httpx2.post(f"{address}/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 415 and response.headers["accept-encoding"] == "identity"
    error = response.json()["error"]
    assert error["message"] == f"content-encoding is {encoding!r}, expected an uncompressed body"
    assert error["type"] == "invalid_request_error"


def test_a_body_may_declare_the_identity_encoding(address, fake, client):
    body = {"model": "tiny", "messages": [user_message("two")], "max_tokens": 4}
    headers = {"content-encoding": "Identity"}
    response = httpx2.post(f"{address}/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200


def test_several_answers_and_log_probabilities_come_from_the_engine(client, fake):
    fields = {"n": 2, "logprobs": True, "top_logprobs": 1, "temperature": 1.0}
    reply = ask_one(client, **fields)
    (request,) = fake.requests
    assert (request["n"], request["logprobs"]) == (2, 1) and "top_logprobs" not in request
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.completion_tokens == 8
    for number, choice in enumerate(reply.choices):
        assert choice.finish_reason == "length"
        assert choice.token_ids == [10 + 100 * number + step for step in range(4)]
        position = choice.logprobs.content[0]
        assert (position.token, position.bytes, position.logprob) == ("a", [97], -2.0)
        assert [(top.token, top.logprob) for top in position.top_logprobs] == [("b", -0.5)]
    streamed = {0: [], 1: []}
    for chunk in ask_one(client, stream=True, **fields):
        (choice,) = chunk.choices
        assert (choice.delta.role == "assistant") == (not streamed[choice.index])
        streamed[choice.index].append((choice.token_ids, choice.logprobs.content[0].token))
    assert streamed[1] == [([110 + step], "a") for step in range(4)]
    assert streamed[0] == [([10 + step], "a") for step in range(4)]


def test_a_reply_has_the_kept_tokens_of_each_image_on_request(client, llava_model):
    images = [noise(1), noise(2, (40, 20))]
    pruner = build_pruner(None, 3, policy=stepprune())
    (answer,) = generate(llava_model, ["red dog?"], [images], pruner, options=COMPACT)
    expected = [
        {"grid": list(grid), "cells": list(indices)}
        for grid, indices in zip(answer.grids, answer.kept_indices, strict=True)
    ]
    body = {"model": "tiny", "messages": [user_message("red dog?", *images)], "max_tokens": 2}
    body |= {"budget": 3, "return_kept_tokens": True}
    url = f"{client.base_url}chat/completions"
    reply = httpx2.post(url, json=body, timeout=PATIENCE).json()
    assert reply["kept_tokens"] == expected and len(expected[0]["cells"]) == 3
    text = httpx2.post(url, json=body | {"stream": True}, timeout=PATIENCE).text
    first_chunk, *chunks = [
        json.loads(line.removeprefix("data: "))
        for line in text.splitlines()
        if line.startswith("data: {")
    ]
    assert first_chunk["kept_tokens"] == expected
    assert not any("kept_tokens" in chunk for chunk in chunks)
    body["return_kept_tokens"] = False
    assert "kept_tokens" not in httpx2.post(url, json=body, timeout=PATIENCE).json()


def test_requests_below_v1_need_the_key_of_the_server(llava_model, fake):
    fake.mode = "well"
    server = start_server(llava_model, fake.address, api_key="sesame")
    with server as address:
        assert httpx2.get(f"{address}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer sesam"}, {"authorization": "Basic sesame"}):
            response = httpx2.get(f"{address}/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        valid_headers = {"authorization": "Bearer sesame"}
        assert httpx2.get(f"{address}/v1/models", headers=valid_headers).status_code == 200
        unknown_path = httpx2.get(f"{address}/v1/responses", headers=valid_headers)
        assert unknown_path.status_code == 404
        assert "the server has /v1/chat/completions" in unknown_path.json()["error"]["message"]
        wrong_method = httpx2.get(f"{address}/v1/chat/completions", headers=valid_headers)
        assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
        assert "is GET, expected POST" in wrong_method.json()["error"]["message"]
        refused = httpx2.post(f"{address}/v1/chat/completions", content=b"x")
        assert "expected Authorization: Bearer KEY" in refused.json()["error"]["message"]
        assert read_metrics(address)['requests_total{status="401"}'] == 4


def test_a_log_line_of_each_request_has_times_and_counts(llava_model, fake, caplog):
    caplog.set_level("INFO", "stepprune_jax.serving.app")
    fake.mode = "well"
    server = start_server(llava_model, fake.address, logs_requests=True)
    with server as address, openai_client(address) as client:
        usage = ask_one(client, budget=3).usage
        with pytest.raises(openai.BadRequestError):
            ask_one(client, budget=400)
        metrics = read_metrics(address)
    lines = [record.getMessage() for record in caplog.records if "chat" in record.getMessage()]
    seconds = r"\d+\.\d{3} s"
    counts = f"kept 3 of 9 visual tokens, {usage.prompt_tokens} prompt tokens, 4 answer tokens"
    assert re.fullmatch(f"chat 200 in {seconds}, first token after {seconds}, {counts}", lines[0])
    assert re.fullmatch(f"chat 400 in {seconds}: .*budget is 400, .*", lines[1]) and len(lines) == 2
    assert metrics['kept_tokens_bucket{le="2.0"}'] == 0
    assert metrics['kept_tokens_bucket{le="4.0"}'] == 1
    assert metrics['first_token_seconds_bucket{le="+Inf"}'] == 1
    assert metrics['request_seconds_bucket{le="+Inf"}'] == 2
