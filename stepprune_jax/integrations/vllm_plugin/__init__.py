"""Prunes images and videos inside vLLM, as a plugin of the group `vllm.general_plugins`.

vLLM calls `register` in each of its processes. Without the environment variable `STEPPRUNE_VLLM`,
the function does nothing. With it, four of vLLM's model classes are replaced by subclasses:

* The processor (`processing`) puts K placeholders into the prompt for an image or a video of n
  tokens. K follows from n and the number of frames, so adaptive counts are not possible here.
* The model (`models`) runs vLLM's tower, selects K tokens with a pruner of this package
  (`selection`), and returns these tokens. On Qwen models, each token also carries its time, row and
  column, and `positions` turns them into the position ids of the unpruned prompt.

This module imports neither vLLM nor jax at its top, because vLLM imports it in any case.
"""

import os
import sys

# The vLLM whose internal interfaces the plugin was tested with: major and minor version.
SUPPORTED_VLLM = "0.32"
VARIABLE = "STEPPRUNE_VLLM"

# Architectures in a model's config.json, and the classes of `models` that replace vLLM's.
_CLASSES = {
    "Qwen2_5_VLForConditionalGeneration": "PrunedQwen2_5_VL",
    "Qwen3VLForConditionalGeneration": "PrunedQwen3VL",
    "LlavaForConditionalGeneration": "PrunedLlava",
    "LlavaNextForConditionalGeneration": "PrunedLlavaNext",
}


def register() -> None:
    """Registers the pruning models with vLLM if the environment variable asks for them.

    The variable is read here rather than from `--mm-processor-kwargs`, because vLLM chooses the
    model's class before it reads these arguments, and because a client may change them with each
    request. All processes of a server inherit the variable.

    Raises:
        SystemExit: the setting is invalid, or this vLLM has another version. The message has one
            line.
    """
    if not os.environ.get(VARIABLE):
        return
    import vllm  # pyright: ignore[reportMissingImports]

    version = vllm.__version__.partition("+")[0]
    if not version.startswith(f"{SUPPORTED_VLLM}."):
        sys.exit(
            f"error: {VARIABLE} is set, but the plugin works with vLLM {SUPPORTED_VLLM}, not "
            f"{version}: unset {VARIABLE}, or install vllm=={SUPPORTED_VLLM}.0"
        )
    # Otherwise jax would take most of a GPU's memory, which vLLM needs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    from stepprune_jax.integrations.vllm_plugin.settings import read_settings
    from stepprune_jax.user_input import UserError

    try:
        read_settings()
    except (UserError, OSError) as error:
        sys.exit(f"error: {VARIABLE}: {error}")
    for architecture, class_name in _CLASSES.items():
        # As text, so that vLLM imports the class only in processes that need it.
        ModelRegistry.register_model(architecture, f"{__name__}.models:{class_name}")
