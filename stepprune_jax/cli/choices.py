"""Values that flags offer, for parsers that import neither jax nor a model.

The library defines the same values in modules that import jax. Tests check that both agree.
"""

# `registry.PRUNERS`.
PRUNERS = (
    "all",
    "blind",
    "random",
    "grid",
    "downsample",
    "cls",
    "fastv",
    "clse",
    "sparsevlm",
    "sparsevlm_v2",
    "pyramiddrop",
    "dart",
    "topv",
    "visionzip",
    "prumerge",
    "prumerge_plus",
    "holov",
    "hiprune",
    "divprune",
    "cdpruner",
    "mmtok",
    "frames",
    "evs",
    "vidcom2",
    "vcast",
    "autoselect",
    "visionselector",
    "glimpseprune",
    "stepprune",
)
# `pruning.POSITIONS`.
POSITIONS = ("original", "compact", "own")
# `models.stack.ATTENTIONS`. The first is the default of `Execution`.
ATTENTIONS = ("matmul", "xla", "cudnn")
# `models.int8.WEIGHTS`.
WEIGHTS = ("full", "int8")
# `parallel.sharding.PRESETS`.
MESHES = ("single", "data", "fsdp", "tensor", "data_tensor", "fsdp_tensor", "data_fsdp")
# `checkpoints.model_settings.DTYPES`.
DTYPES = ("float32", "bfloat16")
# `efficiency.model_shapes.KNOWN`.
MODEL_SHAPES = (
    "llava-7b",
    "llava-13b",
    "mid",
    "qwen-mid",
    "qwen2.5-vl-7b",
    "qwen2.5-vl-3b",
    "qwen3-vl-8b",
    "qwen3-vl-4b",
    "qwen3-vl-2b",
    "llava-next-7b",
)
# Number of layers of a policy's decoder by `PolicyConfig`.
DECODER_LAYERS = 1
# Stages of an evaluation, which `cli.evaluate` reads from here.
STAGES = ("generate", "convert", "score")
