"""Writes what the tests of the benchmarks read: answer files and other JSON lines."""

import json

from stepprune_jax.data.json_files import write_json_lines


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(path, rows)
    return path


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def answer(question_id, text, prompt="Is it there?"):
    """One line of an answer file, with the fields and their order as LLaVA writes them."""
    return {
        "question_id": question_id,
        "prompt": prompt,
        "text": text,
        "answer_id": f"a{question_id}",
        "model_id": "tiny",
        "metadata": {},
    }
