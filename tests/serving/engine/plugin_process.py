"""Answers prompts with vLLM and the plugin; a program that runs in vLLM's environment.

    python plugin_process.py TASK.json ANSWERS.json

The task has the fields `engine` (arguments of `vllm.LLM`) and `runs`. A run has a `setting` of the
plugin (null for no plugin), `max_tokens`, and `prompts` with ids, image paths, and videos: a .npy
file of frames and their rate. The answers are, for each run, the ids of each prompt's answer, and
its numbers of prompt tokens and of tokens from the prefix cache.
"""

import gc
import json
import os
import sys
from pathlib import Path

# All engines run in this process, one after another: a process of an engine takes long to start.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def answer(llm, run):
    """Returns the answers to the prompts of a run, which vLLM gets at once."""
    from PIL import Image
    from vllm import SamplingParams

    prompts = [
        {
            "prompt_token_ids": prompt["ids"],
            "multi_modal_data": {
                "image": [Image.open(path) for path in prompt["images"]],
                "video": [read_video(**video) for video in prompt.get("videos", [])],
            },
        }
        for prompt in run["prompts"]
    ]
    sampling = SamplingParams(temperature=0, max_tokens=run["max_tokens"])
    results = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "token_ids": [[*result.outputs[0].token_ids] for result in results],
        "num_prompt_tokens": [len(result.prompt_token_ids) for result in results],
        "num_cached_tokens": [result.num_cached_tokens for result in results],
    }


def read_video(path, fps):
    """Returns the frames and the description that vLLM's own reader of video files would return."""
    import numpy as np

    frames = np.load(path)
    return frames, {
        "fps": fps,
        "duration": len(frames) / fps,
        "total_num_frames": len(frames),
        "frames_indices": list(range(len(frames))),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def main():
    """Runs the task. All runs have a setting, or none: vLLM remembers the class of a model."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from stepprune_jax.integrations import vllm_plugin

    task_file, answers_file = map(Path, sys.argv[1:])
    task = json.loads(task_file.read_text())
    engine = task["engine"] | {"distributed_executor_backend": "uni"}
    answers, llm, last_setting = [], None, ""
    for run in task["runs"]:
        if run["setting"] != last_setting:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
                del llm
                gc.collect()
                cleanup_dist_env_and_memory()
            last_setting = run["setting"]
            os.environ.pop(vllm_plugin.VARIABLE, None)
            if last_setting is not None:
                from stepprune_jax.integrations.vllm_plugin.settings import read_settings

                os.environ[vllm_plugin.VARIABLE] = json.dumps(last_setting)
                read_settings.cache_clear()
            vllm_plugin.register()
            llm = LLM(**engine)
        answers.append(answer(llm, run))
        answers_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
