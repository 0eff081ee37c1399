"""The front before a stand-in for an engine: what is sent to it, and what may happen to it."""

import gzip
import io
import json
import threading

import httpx2
import numpy as np
import openai
import pytest
from servers import (
    PATIENCE,
    FakeEngine,
    ask,
    begin_chat,
    front_before,
    opened,
    serving,
    until,
    user,
)
from small_world import stepprune
from visual import noise

from stepprune_jax.inference import RunOptions, pipeline, programs, read_request
from stepprune_jax.registry import build_pruner
from stepprune_jax.serving.images import RequestLimits

COMPACT = RunOptions(positions="compact")
MOST = 6


@pytest.fixture(scope="module")
def fake():
    engine = FakeEngine()
    with serving(engine.app()) as engine.address:
        yield engine


def front(model, engine, **options):
    limits = RequestLimits(200_000)
    return front_before(engine, model, MOST, limits, batching=options, policy=stepprune())


@pytest.fixture(scope="module")
def address(llava_model, fake):
    with front(llava_model, fake.address) as address:
        yield address


@pytest.fixture
def client(address, fake):
    fake.mode = "well"
    fake.seen.clear()
    with opened(address) as client:
        yield client


def ask_one(client, **fields):
    return ask(client, "red dog?", [noise(1)], 4, **fields)


def figures(address):
    text = httpx2.get(f"{address}/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("stepprune_"): float(value) for name, value in lines}


def expected_row(model, method, turns, images):
    """The row that enters the language model for one prompt alone, by the model's own prefill."""
    request = read_request(model, [turns], [images])
    encoded = pipeline.encode(model, request.images, method.taps(model.config))
    batch = pipeline.prepare(model, method, request.prompts(), encoded, COMPACT)
    hidden, length = pipeline.embed(model, batch)
    assert length[0] == len(request.ids[0]) - len(images) + batch.kept[0]
    return hidden[0, : length[0]]


def sent_rows(fake):
    torch = pytest.importorskip("torch")
    files = [io.BytesIO(fields["prompt_embeds"]) for fields in fake.seen]
    return [torch.load(file, weights_only=True).numpy() for file in files]


def test_the_engine_gets_the_row_that_would_enter_the_language_model(client, fake, llava_model):
    images = [noise(1), noise(2, (40, 20))]
    found = ask(client, "red dog?", images, 3, seed=5, budget=3)
    (row,), (sent,) = sent_rows(fake), fake.seen
    method = build_pruner(None, 3, policy=stepprune())
    expected = expected_row(llava_model, method, "red dog?", images)
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(row), 3)
    assert (usage.visual_tokens, usage.visual_tokens_kept) == (18, 6)
    assert found.choices[0].finish_reason == "length"
    del sent["prompt_embeds"]
    assert sent == {
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
    """Requests with several counts and lengths in one batch, as each alone."""
    fake.seen.clear()
    served = front(llava_model, fake.address, batch_size=3, batch_seconds=PATIENCE)
    asked = {"red dog?": [noise(1)], "two": [noise(4)], "yes or no: is this a dog?": [noise(2)]}
    before = programs.num_compiled()
    with served as address, opened(address) as client:
        threads = [
            threading.Thread(target=ask, args=(client, question, images, 4))
            for question, images in asked.items()
        ]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        found = figures(address)
    assert (found["batch_rows_sum"], found["batch_rows_count"]) == (3, 1)
    assert programs.num_compiled() - before <= 3  # tower, choice, rows
    method, rows = build_pruner(policy=stepprune()), sent_rows(fake)
    assert len({len(row) for row in rows}) == 3
    for question, images in asked.items():
        expected = expected_row(llava_model, method, question, images)
        (row,) = (row for row in rows if row.shape == expected.shape)
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


def test_a_stream_has_the_same_answer_and_its_usage(client):
    whole = ask_one(client)
    chunks = [*ask_one(client, stream=True, stream_options={"include_usage": True})]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(x.delta.content for x in choices) == whole.choices[0].message.content
    ids = [token for choice in choices for token in choice.token_ids]
    assert ids == whole.choices[0].token_ids == [10, 11, 12, 13]
    assert [choice.finish_reason for choice in choices] == [None] * 3 + ["length"]
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_ends_the_answer_and_is_passed_on(client, fake, stream):
    whole = ask_one(client).choices[0].message.content
    stop = whole[1]
    found = ask_one(client, stop=[stop], stream=stream, presence_penalty=0.5, user="Ada")
    if stream:
        choices = [chunk.choices[0] for chunk in found]
        said, last = "".join(x.delta.content for x in choices), choices[-1]
        assert len(choices) < 4 and not [x for x in choices[:-1] if x.finish_reason]
    else:
        (last,) = found.choices
        said = last.message.content
        assert found.usage.completion_tokens == len(last.token_ids) < 4
    assert said == whole[0] and last.finish_reason == "stop"
    sent = fake.seen[-1]
    assert (sent["stop"], sent["presence_penalty"]) == ([stop], 0.5) and "user" not in sent
    until(lambda: fake.running == 0)


def test_the_model_is_listed_and_found_by_its_name(address, client):
    (listed,) = client.models.list().data
    assert client.models.retrieve("tiny") == listed
    with pytest.raises(openai.NotFoundError, match="model is 'a/b', expected 'tiny'"):
        client.models.retrieve("a/b")


def test_pages_of_a_given_origin_alone_may_ask(llava_model, address):
    page, other = {"origin": "http://page:3000"}, {"origin": "http://other"}
    before = {"access-control-request-method": "POST"}
    before["access-control-request-headers"] = "authorization,content-type"
    chats, allowed = "/v1/chat/completions", "access-control-allow-origin"
    assert allowed not in httpx2.get(f"{address}/v1/models", headers=page).headers
    with front_before("http://x", llava_model, origins=["http://page:3000"]) as asked:
        assert httpx2.options(asked + chats, headers=page | before).status_code == 200
        assert httpx2.options(asked + chats, headers=other | before).status_code == 400
        refused = httpx2.post(asked + chats, headers=page, content=b"{}")
        assert refused.status_code == 400 and refused.headers[allowed] == page["origin"]


@pytest.mark.parametrize(
    ("mode", "status", "words"),
    [
        ("refuses", 400, "the engine answers 400: the prompt is too long"),
        ("fails", 503, "the engine answers 500: EngineCore died"),
        ("breaks", 503, "the engine failed: EngineCore died"),
        ("ends", 503, "ended its answer early"),
    ],
)
def test_what_goes_wrong_with_the_engine_is_told(client, fake, address, mode, status, words):
    fake.mode, before = mode, figures(address).get(f'requests_total{{status="{status}"}}', 0)
    with pytest.raises(openai.APIStatusError) as caught:
        ask_one(client)
    assert caught.value.status_code == status and words in str(caught.value)
    late = mode in ("breaks", "ends")  # the first token is there by then
    with pytest.raises(openai.APIError if late else openai.APIStatusError, match=words):
        list(ask_one(client, stream=True))
    assert figures(address)[f'requests_total{{status="{status}"}}'] == before + 2
    until(lambda: figures(address)["in_flight"] == 0)
    fake.mode = "well"
    assert ask_one(client).usage.completion_tokens == 4


def test_an_engine_that_is_too_slow_is_told(llava_model, fake):
    fake.mode = "slow"
    with front(llava_model, fake.address, seconds=0.05) as address, opened(address) as client:
        for stream in (True, False):
            with pytest.raises(openai.InternalServerError, match="too slow") as caught:
                ask_one(client, stream=stream)
            assert caught.value.status_code == 503


def test_an_engine_that_is_killed_and_started_again(llava_model):
    fake = FakeEngine()
    with serving(fake.app()) as place:
        port = int(place.rpartition(":")[2])
    with front(llava_model, place) as address, opened(address) as client:
        for _ in range(2):
            with pytest.raises(openai.APIStatusError, match="is not there") as caught:
                ask_one(client)
            assert caught.value.status_code == 503
            assert httpx2.get(f"{address}/health").status_code == 503
            with serving(fake.app(), port):
                assert ask_one(client).usage.completion_tokens == 4
                assert httpx2.get(f"{address}/health").status_code == 200


def test_an_engine_that_serves_another_model_now(client, fake):
    for name in ("another", fake.name):
        fake.name = name
        with pytest.raises(openai.InternalServerError, match="the engine answers 404: no such"):
            ask_one(client)
        assert ask_one(client).usage.completion_tokens == 4


def test_requests_share_a_connection_to_the_engine(client, fake):
    fake.clients.clear()
    for _ in range(3):
        ask_one(client)
        list(ask_one(client, stream=True))
    assert len(fake.clients) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_the_work_for_a_client_that_went_away_is_dropped(address, fake, client, stream):
    fake.mode, before = "endless", fake.dropped
    body = {"model": "tiny", "messages": [user("two", noise(1))], "max_tokens": 200}
    body["stream"] = stream
    connection = begin_chat(address, body)
    until(lambda: fake.running == 1)
    if stream:
        assert connection.getresponse().readline().startswith(b"data: {")
    connection.close()
    until(lambda: fake.dropped == before + 1 and fake.running == 0)
    until(lambda: figures(address)["in_flight"] == 0)
    assert figures(address)['requests_total{status="499"}'] >= 1


def test_more_requests_than_the_queue_holds_are_refused_at_once(address, fake, client):
    fake.mode, fake.held = "holds", True
    body = {"model": "tiny", "messages": [user("two", noise(1))], "max_tokens": 2}
    accepted = [begin_chat(address, body) for _ in range(MOST)]
    until(lambda: figures(address)["in_flight"] == MOST)
    for _ in range(3):
        refused = httpx2.post(f"{address}/v1/chat/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    fake.held = False
    for connection in accepted:
        assert connection.getresponse().status == 200
        connection.close()
    until(lambda: figures(address)["in_flight"] == 0)
    assert figures(address)["in_flight"] == figures(address)["queue"] == 0


def test_a_large_body_is_refused_before_it_is_read(address):
    large = {"model": "tiny", "messages": [user("a" * 300_000)]}
    assert httpx2.post(f"{address}/v1/chat/completions", json=large).status_code == 413

    def unknown_length():
        for _ in range(40):
            yield b" " * 10_000

    answer = httpx2.post(f"{address}/v1/chat/completions", content=unknown_length())
    assert answer.status_code == 413 and "200000 bytes" in answer.json()["error"]["message"]
    assert httpx2.get(f"{address}/v1/chat/completions").status_code == 405
    for body in (b"{", b'{"\\ud800": 1}'):
        bad = httpx2.post(f"{address}/v1/chat/completions", content=body)
        assert bad.status_code == 400
        assert bad.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br", "deflate, gzip"])
def test_a_compressed_body_is_refused_in_a_line(address, coding):
    body = gzip.compress(json.dumps({"model": "tiny", "messages": [user("two")]}).encode())
    headers = {"content-encoding": coding}
    answer = httpx2.post(f"{address}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
    error = answer.json()["error"]
    assert error["message"] == f"the body is sent as {coding!r}, expected no compression"
    assert error["type"] == "invalid_request_error"


def test_a_body_may_say_that_it_is_not_compressed(address, fake, client):
    body = {"model": "tiny", "messages": [user("two")], "max_tokens": 4}
    headers = {"content-encoding": "Identity"}
    answer = httpx2.post(f"{address}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
