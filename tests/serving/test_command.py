"""Flags of `stepprune-serve`."""

import socket

import pytest
from servers import run_server
from small_world import stepprune
from tiny_qwen import tiny_qwen3

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.cli import serve
from stepprune_jax.cli.flags.serve import parse
from stepprune_jax.user_input import UserError


@pytest.fixture
def prepare(llava_folder):
    def run(*arguments):
        model_flags = ("--model", llava_folder, "--dtype", "float32", "--no_compile_cache")
        return serve.prepare([*map(str, (*model_flags, *arguments))])

    return run


def test_the_flags_configure_the_server(prepare, tmp_path):
    import httpx2

    save_policy(stepprune(), tmp_path / "policy")
    flags = ("--policy", tmp_path / "policy", "--engine", "http://127.0.0.1:9", "--name", "tiny")
    flags += ("--cors", "http://page", "*")
    app, host, port = prepare(*flags, "--queue", 3, "--port", 8081, "--image_folder", tmp_path)
    assert (host, port) == ("127.0.0.1", 8081)
    with run_server(app) as address:
        assert httpx2.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"
        response = httpx2.get(f"{address}/health", headers={"origin": "http://other"})
        assert response.status_code == 503
        assert response.headers["access-control-allow-origin"] == "*"


def test_the_key_comes_from_the_flag_or_from_the_environment(monkeypatch):
    monkeypatch.setenv("STEPPRUNE_API_KEY", "of the environment")
    arguments = ["--model", "x", "--port", "8084"]
    assert parse(arguments).api_key == "of the environment"
    assert parse([*arguments, "--api_key", "of the flag"]).api_key == "of the flag"
    for text in ("", " "):
        monkeypatch.setenv("STEPPRUNE_API_KEY", text)
        with pytest.raises(UserError, match=r"STEPPRUNE_API_KEY is '.*', expected a key"):
            parse(arguments)
        assert parse([*arguments, "--api_key", "of the flag"]).api_key == "of the flag"
    monkeypatch.delenv("STEPPRUNE_API_KEY")
    assert parse(arguments).api_key is None


def test_the_help_text_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "port to listen on (default: 8080)" in text
    assert "length limit of answers (default: 128)" in text
    assert "None)" not in text and "False)" not in text and "[])" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pruner", "fastv", "--budget", "3", "--engine", "http://x"), "inside the language"),
        (("--pruner", "evs", "--budget", "3"), "evs prunes videos only, and the model reads ima"),
        (("--weights", "int8", "--engine", "http://x"), "--weights int8 .* expected no --engine"),
        (("--engine", "127.0.0.1:8000"), "expected http://HOST:PORT"),
        (("--engine", "http://localhost:65536"), "expected http://HOST:PORT"),
        (("--engine_timeout", "nan"), "--engine_timeout is nan"),
        (("--budget", "3", "--mean_budget", "3"), "expected only one of them"),
        (("--image_folder", "/nowhere"), "is not a folder"),
        (("--cors", "*", "http://page:3000/"), "--cors is 'http://page:3000/', expected http://H"),
        (("--cors", "page"), "--cors is 'page', expected http://HOST:PORT without a path, or *"),
        (("--host", "host.invalid"), "--host host.invalid --port 8080: "),
    ],
    ids=str,
)
def test_an_invalid_flag_is_a_user_error(prepare, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        prepare(*arguments)
    assert isinstance(caught.value, UserError)


def test_weights_may_be_loaded_as_int8(prepare, monkeypatch, capsys):
    models = []

    def record_model(*positional, **options):
        models.append(load_vlm(*positional, **options))
        return models[-1]

    monkeypatch.setattr(serve, "load_vlm", record_model)
    prepare("--weights", "int8", "--port", 8082)
    assert models[0].params["language"]["head"]["kernel"].value.dtype == "int8"
    with pytest.raises(SystemExit):
        prepare("--weights", "int4")
    assert "argument --weights: invalid choice: 'int4' (choose from" in capsys.readouterr().err


def test_an_engine_cannot_serve_a_model_with_deep_features(tmp_path):
    flags = ("--model", str(tiny_qwen3(tmp_path)), "--engine", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="--engine: the qwen3_vl model adds deep features"):
        serve.prepare(flags)


def test_a_port_of_ipv6_in_use_is_found_before_the_model_is_loaded():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        flags = ("--host", "::1", "--port", str(port), "--model", "/nowhere")
        with pytest.raises(ValueError, match=f"--port {port}: Address already in use") as caught:
            serve.prepare(flags)
    assert isinstance(caught.value, UserError)
