"""Settings of a pretraining run of a few steps on images of a few patches."""

SIZES = {"width": 16, "mlp": 16, "heads": 2, "layers": 1}
FIELDS = {f"model.{part}_{n}": size for part in ("vision", "text") for n, size in SIZES.items()}
FIELDS |= {f"{stage}.batch_size": 4 for stage in ("tower", "language", "noise")}
FIELDS |= {"tower.steps": 3, "language.steps": 4, "noise.steps": 2, "language.whole_steps": 1}
FIELDS |= {"language.kept": (4,), "language.thinned_share": 0.6, "noise.thinned_share": 0.6}
FIELDS |= {"log_every": 1, "checkpoint_every": 2, "micro_batch": 2, "dtype": "float32"}
FIELDS |= {"model.image_size": 24, "seed": 1}
