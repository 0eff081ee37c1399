"""A command that waits for the compiler says so once, with the reason."""

import threading

import jax
import pytest

from stepprune_jax.cli import compile_notice
from stepprune_jax.cli.compile_notice import CompileNotice, announcing_compiles

LOWERED, COMPILED = compile_notice._LOWERED, compile_notice._COMPILED


@pytest.fixture
def lines(monkeypatch):
    """Lines of the log. `has_line` is set at each line."""
    lines, lines_changed = [], threading.Event()

    def record(text, *values):
        lines.append(text % values)
        lines_changed.set()

    monkeypatch.setattr(compile_notice._LOG, "info", record)
    monkeypatch.setattr(compile_notice, "has_line", lines_changed, raising=False)
    return lines


def test_a_long_compilation_is_announced_before_it_ends(lines, monkeypatch):
    monkeypatch.setattr(compile_notice, "_PATIENCE", 0.01)
    notice = CompileNotice(had_programs=False)
    notice.record_duration(LOWERED, 0.0)
    assert compile_notice.has_line.wait(600)
    notice.record_duration(COMPILED, 60.0)
    notice.record_duration(LOWERED, 0.0)
    notice.record_duration(COMPILED, 60.0)
    assert len(lines) == 1 and lines[0].startswith("compiling programs, which may take a minute: ")


def test_many_short_compilations_are_announced_together(lines):
    notice = CompileNotice(had_programs=False)
    for count, expected in ((1, 0), (1, 0), (1, 1), (1, 1)):
        for _ in range(count):
            notice.record_duration(LOWERED, 0.0)
            notice.record_duration(COMPILED, 0.9)
        assert len(lines) == expected


def test_programs_from_the_cache_are_not_announced(lines):
    notice = CompileNotice(had_programs=True)
    notice.record_duration(LOWERED, 0.0)
    notice.record_event("/jax/compilation_cache/cache_hits")
    notice.record_duration(COMPILED, 60.0)
    assert lines == []


@pytest.mark.parametrize(
    ("folder", "had_programs", "reason"),
    [
        (None, True, "compiled programs are not kept, so every run compiles them"),
        ("/cache", True, "/cache has no programs of these shapes yet"),
        ("/cache", False, "no earlier run has stored any in /cache"),
    ],
)
def test_the_line_has_the_reason(lines, folder, had_programs, reason):
    old_values = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        CompileNotice(had_programs).record_duration(COMPILED, 60.0)
    finally:
        jax.config.update("jax_compilation_cache_dir", old_values[0])
        jax.config.update("jax_enable_compilation_cache", old_values[1])
    assert len(lines) == 1 and reason in lines[0]


def test_the_events_of_jax_are_recognised(lines, monkeypatch):
    monkeypatch.setattr(compile_notice, "_PATIENCE", 0.0)
    with announcing_compiles():
        jax.jit(lambda x: x * 3 + 1)(1.0)
        assert compile_notice.has_line.wait(600)
    lines.clear()
    jax.jit(lambda x: x * 3 + 2)(1.0)
    assert lines == []
