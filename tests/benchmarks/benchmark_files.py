"""Writes what the tests of the benchmarks read: answer files and other JSON lines."""

import json


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
