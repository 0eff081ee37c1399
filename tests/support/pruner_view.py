"""What a pruner is shown of a batch."""

import jax

from stepprune_jax.inference import decoding, pipeline, programs
from stepprune_jax.inference.decoding import RunOptions
from stepprune_jax.inference.programs import Features, Pixels


def view_of(model, method, prompts, images):
    """The `View` of a batch, by the arguments of the program that chooses."""
    ready = pipeline.prepare(
        model, method, prompts, images, decoding.greedy(()), RunOptions(max_tokens=1)
    )
    params, config, _, source, pairs = (ready.choice or ready.run).args[:5]
    if isinstance(source, Pixels):
        taps = method.pruner.taps(config)
        vision = pipeline.encode(model, images._replace(pixels=source.values), taps)
        source = Features(vision.features, tuple(vision.taps[tap] for tap in taps))
    return jax.jit(programs.see, static_argnums=(1, 4))(params, config, source, pairs, None)
