"""Writes JSON files and answer files for tests of benchmarks."""

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
    """Returns a line of an answer file with LLaVA's fields in LLaVA's order."""
    return {
        "question_id": question_id,
        "prompt": prompt,
        "text": text,
        "answer_id": f"a{question_id}",
        "model_id": "tiny",
        "metadata": {},
    }
