"""StepPrune in the vision stage of sglang-jax: Qwen2.5-VL, images and videos.

Needs a clone of sglang-jax. The first part serves Qwen2.5-VL of any size: copy it, and call
`install` in the script that starts the server. The second part runs sglang-jax's own stages on a
CPU, with random weights of a small shape, from pixels to generated ids.
"""

import json
import os
import queue
import tempfile
import threading
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # sglang-jax reads the platform here

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from sgl_jax.srt.managers.communication import QueueBackend
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.multimodal.manager.mrope_utils import compute_mrope_positions
from sgl_jax.srt.multimodal.manager.schedule_batch import Req
from sgl_jax.srt.multimodal.model_executor.vit import vit_model_runner, vit_model_worker
from sgl_jax.srt.multimodal.models.qwen2_5VL import qwen2_5_vit
from sgl_jax.srt.multimodal.models.qwen2_5VL.qwen2_5_vl_generation import Qwen2_5_VL_Generation
from sgl_jax.srt.utils.mesh_utils import create_device_mesh

import stepprune_jax as sp

WORD_BUCKET = 64  # prompts are padded to multiples of it, so that few programs are compiled


@jax.jit(static_argnames="capacity")
def select(policy, tokens, words, is_word, capacity):
    """Returns indices [capacity] of the kept tokens of one image or video, padded with -1."""
    sizes = {"capacity": capacity, "max_steps": capacity}

    def choose(policy, tokens, words, is_word):
        return policy.select(tokens[None], words[None], text_mask=is_word[None], **sizes).index[0]

    # sglang-jax's mesh has explicit axes, which a policy refuses: it sees them as automatic.
    return jax.sharding.auto_axes(choose, out_sharding=P(None))(policy, tokens, words, is_word)


class PrunedVitModelRunner(vit_model_runner.VitModelRunner):
    """sglang-jax's vision stage, which sends on the kept tokens of each image and video.

    Kept tokens have their original three-axis positions, and generated words follow where they
    would without pruning. The policy reads all words of the prompt.

    Attributes:
        policy: the policy; its feature and text widths are the width of the language model.
        capacity: largest number of tokens that an image or a video keeps.
    """

    policy, capacity = None, None

    def forward(self, batch, mesh):
        """Encodes, prunes and merges one request, which is changed in place."""
        inputs = batch.omni_inputs
        if not isinstance(inputs, dict) or batch.pixel_values is None:
            return super().forward(batch, mesh)
        images, videos = batch.image_grid_thw or (), batch.video_grid_thw or ()
        grids = {"image_grid_thw": images, "video_grid_thw": videos}
        tokens = self.jitted_encode_vision(pixel_values=batch.pixel_values, **grids)
        ids = np.asarray(batch.input_ids or batch.origin_input_ids)
        is_visual = np.isin(ids, [inputs.get("im_token_id"), inputs.get("video_token_id")])
        merge = self.model.config.spatial_merge_size**2
        sizes = [int(np.prod(grid)) // merge for grid in (*images, *videos)]
        kept = self.select_tokens(tokens, sizes, ids[~is_visual])

        keep = ~is_visual
        keep[np.flatnonzero(is_visual)[kept]] = True
        batch.input_ids = ids[keep].tolist()
        inputs["mrope_positions"] = np.asarray(inputs["mrope_positions"])[:, keep]
        inputs["mrope_position_delta"] += len(ids) - len(batch.input_ids)
        inputs["multimodal_embedding"] = self._merge_multimodal_embeddings(
            jnp.asarray(batch.input_ids), tokens[kept], inputs
        )
        return batch

    def select_tokens(self, tokens, sizes, word_ids):
        """Returns ascending indices of the kept rows of `tokens`, numpy.

        Args:
            tokens: [n, e] tokens of all images, and then of all videos.
            sizes: token counts of each, with sum n.
            word_ids: ids of the prompt without placeholders.
        """
        padding = -len(word_ids) % WORD_BUCKET
        words = self.model.text_embed(jnp.asarray(np.pad(word_ids, (0, padding))))
        is_word = np.arange(len(words)) < len(word_ids)
        # The language model's stage reads the merged embeddings from numpy as well.
        tokens, words = np.asarray(tokens), np.asarray(words)
        kept, start = [], 0
        for size in sizes:
            visual, capacity = tokens[start : start + size], min(self.capacity, size)
            with jax.set_mesh(self.mesh):
                index = np.asarray(select(self.policy, visual, words, is_word, capacity))
            kept.append(start + np.sort(index[index >= 0]))
            start += size
        return np.concatenate(kept)


def install(policy, capacity):
    """Makes sglang-jax's vision stage prune, in this process.

    The server starts its stages in a spawned process, which imports the script that was started.
    So call this at the top level of that script, before sgl_jax.launch_server, and not below
    `if __name__ == "__main__"`.
    """
    PrunedVitModelRunner.policy, PrunedVitModelRunner.capacity = policy, capacity
    vit_model_worker.VitModelRunner = PrunedVitModelRunner


# --- A small Qwen2.5-VL that is drawn, and sglang-jax's two stages ---
WIDTH, LAYERS, V = 256, 2, 512
VISION_WIDTH, VISION_MLP, VISION_LAYERS, PATCH = 64, 96, 2, 3 * 2 * 14 * 14
VISION_START, VISION_END, IMAGE, VIDEO = 508, 509, 510, 511
NEW_WORDS, SHARE = 6, "1/4"  # SHARE: of the tokens of each image and video
config = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": V,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "eos_token_id": V - 5,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "torch_dtype": "float32",
    "vision_config": {
        "depth": VISION_LAYERS,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": VISION_MLP,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
}


def draw_weights(seed):
    """Returns the tensors of a checkpoint of `config`, by name, float32."""
    e, v, mlp, merged = WIDTH, VISION_WIDTH, 2 * WIDTH, 4 * VISION_WIDTH
    shapes = {
        "model.embed_tokens.weight": (V, e),
        "model.norm.weight": (e,),
        "lm_head.weight": (V, e),
        "visual.patch_embed.proj.weight": (v, 3, 2, 14, 14),
        "visual.merger.ln_q.weight": (v,),
        "visual.merger.mlp.0.weight": (merged, merged),
        "visual.merger.mlp.0.bias": (merged,),
        "visual.merger.mlp.2.weight": (e, merged),
        "visual.merger.mlp.2.bias": (e,),
    }
    for layer in range(LAYERS):
        name, kv = f"model.layers.{layer}.", e // 2
        shapes |= {name + f"{part}_layernorm.weight": (e,) for part in ("input", "post_attention")}
        for part, size in (("q", e), ("k", kv), ("v", kv)):
            shapes |= {name + f"self_attn.{part}_proj.weight": (size, e)}
            shapes |= {name + f"self_attn.{part}_proj.bias": (size,)}
        shapes |= {name + "self_attn.o_proj.weight": (e, e)}
        shapes |= {name + f"mlp.{part}_proj.weight": (mlp, e) for part in ("gate", "up")}
        shapes |= {name + "mlp.down_proj.weight": (e, mlp)}
    for layer in range(VISION_LAYERS):
        name = f"visual.blocks.{layer}."
        shapes |= {name + f"norm{part}.weight": (v,) for part in (1, 2)}
        linear = {"attn.qkv": (3 * v, v), "attn.proj": (v, v), "mlp.down_proj": (v, VISION_MLP)}
        linear |= {f"mlp.{part}_proj": (VISION_MLP, v) for part in ("gate", "up")}
        for part, shape in linear.items():
            shapes |= {name + part + ".weight": shape, name + part + ".bias": shape[:1]}
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        is_norm = "norm" in name or "ln_q" in name
        fan_in = np.prod(shape[1:]) if len(shape) > 1 and "embed_tokens" not in name else 1
        values = random.normal(size=shape) / np.sqrt(fan_in)
        weights[name] = np.float32(np.ones(shape) if is_norm else values)
    return weights


def write_checkpoint():
    """Writes the small model, and returns sglang-jax's arguments for it."""
    folder = Path(tempfile.mkdtemp()) / "Qwen2.5-VL-small"  # sglang-jax knows the family by name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return vit_model_runner.MultimodalServerArgs(
        str(folder),
        multimodal=True,
        skip_tokenizer_init=True,
        disable_precompile=True,
        disable_radix_cache=True,
        dtype="float32",
        device="cpu",
        log_level="error",
        chunked_prefill_size=-1,
        max_total_tokens=2048,
        max_running_requests=4,
        max_prefill_tokens=512,
    )


def start_vision_stage():
    """Returns sglang-jax's vision runner, which is the pruning one after `install`."""
    model_class = qwen2_5_vit.Qwen2_5_VL_VisionModel
    return vit_model_worker.VitModelWorker(args, mesh, model_class).model_runner


def draw_request(name, seed, question_seed=0, image_grids=((1, 16, 12),), video_grids=()):
    """Draws a request as sglang-jax's tokenizer sends it to the vision stage.

    Args:
        name: id of the request.
        seed: seed of pixels and of the words ahead of them.
        question_seed: seed of the eight words after them.
        image_grids: (frames, rows, columns) in patches of each image.
        video_grids: (frames, rows, columns) in patches of each video.
    """
    random = np.random.default_rng(seed)
    ids = random.integers(0, V - 8, 5).tolist()
    for placeholder, grids in ((IMAGE, image_grids), (VIDEO, video_grids)):
        for grid in grids:
            ids += [VISION_START, *[placeholder] * (int(np.prod(grid)) // 4), VISION_END]
    ids += np.random.default_rng(question_seed).integers(0, V - 8, 8).tolist()
    num_patches = sum(int(np.prod(grid)) for grid in (*image_grids, *video_grids))
    positions, delta = compute_mrope_positions(
        input_ids=ids,
        image_grid_thw=image_grids,
        video_grid_thw=video_grids,
        second_per_grid_ts=[1.0] * len(video_grids),
        vision_start_token_id=VISION_START,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        spatial_merge_size=2,
        tokens_per_second=2,
    )
    inputs = {"im_token_id": IMAGE, "video_token_id": VIDEO, "mm_items": []}
    inputs |= {"mrope_positions": positions, "mrope_position_delta": delta}
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_WORDS, "ignore_eos": True}
    return Req(
        rid=name,
        input_ids=ids,
        origin_input_ids=ids,
        omni_inputs=inputs,
        pixel_values=np.float32(random.normal(size=(num_patches, PATCH))),
        image_grid_thw=image_grids or None,
        video_grid_thw=video_grids or None,
        extra={"sampling_params": sampling},
    )


def answer(runner, batch):
    """Returns the generated ids of each request, after a vision stage and in one batch."""
    for request in batch:
        runner.forward(request, None)
        for stage_request in request.to_stage_reqs("auto_regressive"):
            requests.put(stage_request)
    words, unfinished = {request.rid: [] for request in batch}, len(batch)
    while unfinished:
        reply = replies.get(timeout=600)
        for name, ids, reason in zip(
            reply.rids, reply.output_ids, reply.finished_reasons, strict=True
        ):
            words[name] += ids
            unfinished -= reason is not None
    return list(words.values())


# --- What holds ---
qwen2_5_vit.is_tpu_runtime = lambda: True  # else its tower calls a kernel for NVIDIA GPUs
weights = draw_weights(0)
args, mesh = write_checkpoint(), create_device_mesh([-1, 1], [1, 1], devices=jax.devices()[:1])
requests, replies = queue.Queue(), queue.Queue()
backend = QueueBackend(requests, replies)
scheduler = Scheduler(
    args, communication_backend=backend, mesh=mesh, model_class=Qwen2_5_VL_Generation
)
threading.Thread(target=scheduler.event_loop_normal, daemon=True).start()

plain = start_vision_stage()
image = draw_request("image", 0)
tokens = plain.jitted_encode_vision(image.pixel_values, image.image_grid_thw, None)
shape = sp.PolicyConfig(WIDTH, WIDTH, width=64, num_heads=4, max_steps=48)
stats = sp.update_stats(sp.FeatureStats.start(WIDTH), jnp.float32(tokens[None]))
policy = sp.StepPrune.init(jax.random.key(0), shape, stats)

mixed = {"image_grids": ((1, 16, 12), (1, 8, 8)), "video_grids": ((3, 8, 12),)}
install(policy.with_budget("1/1"), 10_000)
pruning, answers = start_vision_stage(), []
for runner in (plain, pruning):
    answers.append(answer(runner, [draw_request("0", 1), draw_request("1", 2, **mixed)]))
print(f"all tokens: ids as sglang-jax's {answers[0] == answers[1]}")

install(policy.with_budget(SHARE), 64)
batch = [draw_request("0", 1), draw_request("1", 2, **mixed)]
lengths = [len(request.input_ids) for request in batch]
words = answer(pruning, batch)
for request, length, generated in zip(batch, lengths, words, strict=True):
    print(f"{length} ids of a prompt become {len(request.input_ids)}, generated {generated}")
