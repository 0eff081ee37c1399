"""A world of short videos: colored shapes cross the picture, and questions ask about time.

`python -m experiments.moving_shapes --out data/moving_shapes` writes clips and questions.
`python -m experiments.moving_shapes.pretrain --workdir runs/moving_shapes_model` trains a small
Qwen3-VL on the world.
"""
