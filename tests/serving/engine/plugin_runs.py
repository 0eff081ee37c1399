"""Runs of vLLM with the plugin in a process, and the answers of `generate` to compare with."""

import json
import os
import subprocess
from typing import Any

from servers import PATIENCE
from tiny_qwen import qwen_tokenizer, tiny_qwen3, tiny_qwen3_config

from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.registry import build_pruner
from tools.bench import vllm_server

PROGRAM = os.path.join(os.path.dirname(__file__), "plugin_process.py")
MAX_TOKENS = 12
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "block_size": 32,
}
# Flags of a server with the part of Qwen's chat template that a single question needs.
QWEN_CHAT = (
    "--chat-template",
    "<|im_start|>user\n{% for part in messages[0]['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>"
    "{% endif %}{% endfor %}<|im_end|>\n<|im_start|>assistant\n",
    "--chat-template-content-format",
    "openai",
)


def ask_vllm(tmp_path, folder, runs, **engine):
    """Answers the prompts of several runs in a process of vLLM."""
    task_file, answers_file = tmp_path / "task.json", tmp_path / "answers.json"
    task = {"engine": ENGINE | {"model": str(folder)} | engine, "runs": runs}
    task_file.write_text(json.dumps(task))
    command = [vllm_server.PYTHON, "-W", "ignore", PROGRAM, task_file, answers_file]
    log = tmp_path / "log"
    with log.open("wb") as file:
        subprocess.run(
            [*map(str, command)],
            env=os.environ | vllm_server.SETTINGS,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=4 * PATIENCE,
        )
    answers = json.loads(answers_file.read_text()) if answers_file.is_file() else []
    assert len(answers) == len(runs), log.read_text()[-4000:]
    return answers


def expected_answers(model, setting, texts, images, positions):
    """Returns the answers of `generate` with the plugin's setting."""
    policy = load_policy(setting["policy"]) if "policy" in setting else None
    pruner = build_pruner(setting.get("pruner"), setting["budget"], policy=policy)
    options = RunOptions(MAX_TOKENS, positions)
    return generate(model, texts, images, pruner, options=options)


def wide_qwen3(folder):
    """Writes a tiny Qwen3-VL that vLLM takes."""
    raw: Any = tiny_qwen3_config(qwen_tokenizer())
    text = raw["text_config"] | {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    text["rope_scaling"] = text["rope_scaling"] | {"mrope_section": [6, 5, 5]}
    vision = raw["vision_config"] | {"out_hidden_size": 64}
    return tiny_qwen3(folder, text_config=text, vision_config=vision)
