import socket

import pytest
from servers import serving
from small_world import stepprune
from tiny_qwen import tiny_qwen3

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.cli import serve
from stepprune_jax.user_input import UserError


@pytest.fixture
def prepared(llava_folder):
    def run(*arguments):
        how = ("--model", llava_folder, "--dtype", "float32", "--no_compile_cache")
        return serve.prepare([*map(str, (*how, *arguments))])

    return run


def test_the_flags_are_the_defaults_of_a_request(prepared, tmp_path):
    import httpx2

    save_policy(stepprune(), tmp_path / "policy")
    own = ("--policy", tmp_path / "policy", "--engine", "http://127.0.0.1:9", "--name", "tiny")
    own += ("--cors", "http://page", "*")
    app, host, port = prepared(*own, "--queue", 3, "--port", 8081, "--image_folder", tmp_path)
    assert (host, port) == ("127.0.0.1", 8081)
    with serving(app) as address:
        assert httpx2.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"
        found = httpx2.get(f"{address}/health", headers={"origin": "http://other"})
        assert found.status_code == 503 and found.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pruner", "fastv", "--budget", "3", "--engine", "http://x"), "inside the language"),
        (("--weights", "int8", "--engine", "http://x"), "--weights int8 .* expected no --engine"),
        (("--engine", "127.0.0.1:8000"), "expected http://HOST:PORT"),
        (("--engine", "http://localhost:65536"), "expected http://HOST:PORT"),
        (("--engine_timeout", "nan"), "--engine_timeout is nan"),
        (("--budget", "3", "--mean_budget", "3"), "expected one of them"),
        (("--image_folder", "/nowhere"), "is not a folder"),
        (("--cors", "*", "http://page:3000/"), "--cors is 'http://page:3000/', expected http://H"),
        (("--cors", "page"), "--cors is 'page', expected http://HOST:PORT without a path, or *"),
        (("--host", "host.invalid"), "--host host.invalid --port 8080: "),
    ],
    ids=str,
)
def test_a_bad_flag_is_one_line(prepared, arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        prepared(*arguments)
    assert isinstance(caught.value, UserError)


def test_int8_weights_are_loaded_as_such(prepared, monkeypatch, capsys):
    loaded = []
    load = lambda *given, **how: loaded.append(load_vlm(*given, **how)) or loaded[-1]  # noqa: E731
    monkeypatch.setattr(serve, "load_vlm", load)
    prepared("--weights", "int8", "--port", 8082)
    assert loaded[0].params["language"]["head"]["kernel"].value.dtype == "int8"
    with pytest.raises(SystemExit):
        prepared("--weights", "int4")
    assert "argument --weights: invalid choice: 'int4' (choose from" in capsys.readouterr().err


def test_an_engine_is_refused_for_a_model_with_deep_features(tmp_path):
    where = ("--model", str(tiny_qwen3(tmp_path)), "--engine", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="--engine: the qwen3_vl model adds deep features"):
        serve.prepare(where)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_found_before_the_model_is_loaded(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        where = ("--host", host, "--port", str(port), "--model", "/nowhere")
        with pytest.raises(ValueError, match=f"--port {port}: Address already in use") as caught:
            serve.prepare(where)
    assert isinstance(caught.value, UserError)
