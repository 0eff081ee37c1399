"""Builds and serves the page with Gradio."""

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr  # pyright: ignore[reportMissingImports]
from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.demo.compare import BY_ITSELF, Choice, compare
from stepprune_jax.inference.generate import Answer
from stepprune_jax.inference.timing import Times
from stepprune_jax.user_input import UserError


def build(
    model: VLM,
    name: str,
    choices: Mapping[str, Choice],
    examples: Sequence[tuple[Image.Image, str]],
) -> gr.Blocks:
    """Builds the page for a model, with the first choice and the first example selected.

    Args:
        model: the model that answers.
        name: name of the model on the page.
        choices: pruning methods by their names on the page; at least one.
        examples: pairs of an image and a question; may be empty.

    Returns:
        The page, which `serve` serves.
    """
    max_tokens = model.config.max_image_tokens
    num_tokens = f"at most {max_tokens:,}" if model.config.sizes_vary else f"{max_tokens:,}"
    first_choice = next(iter(choices.values()))
    example_image, example_question = examples[0] if examples else (None, "")
    with gr.Blocks(title="StepPrune") as page:
        gr.Markdown(
            f"# StepPrune\n{name} answers from all visual tokens ({num_tokens}), and from the "
            "tokens that a method keeps."
        )
        with gr.Row():
            with gr.Column():
                image = gr.Image(
                    example_image, type="pil", image_mode=None, label="image", height=320
                )
                question = gr.Textbox(example_question, label="question")
                method = gr.Dropdown(list(choices), value=next(iter(choices)), label="method")
                mode = gr.Radio(
                    first_choice.modes, value=first_choice.modes[0], label="tokens to keep"
                )
                count_slider = gr.Slider(
                    1,
                    max_tokens,
                    value=max(1, max_tokens // 9),  # The paper's smallest budget: 64 of 576.
                    step=1,
                    label="how many",
                    visible=first_choice.modes[0] != BY_ITSELF,
                )
                ask_button = gr.Button("Ask", variant="primary")
            with gr.Column():
                full_answer = gr.Textbox(label="all tokens", elem_id="full")
                pruned_answer = gr.Textbox(label="kept tokens", elem_id="pruned")
                picture = gr.Image(label="kept tokens", format="png", elem_id="picture")
        if examples:
            gr.Examples([[*example] for example in examples], [image, question])
        inputs = [image, question, method, mode, count_slider]
        outputs = [full_answer, pruned_answer, picture]
        triggers = [ask_button.click, question.submit, count_slider.release]
        gr.on(triggers, lambda *values: _answer(model, choices, *values), inputs, outputs)
        method.change(lambda name: _update_controls(choices[name]), method, [mode, count_slider])
        mode.change(lambda mode: gr.update(visible=mode != BY_ITSELF), mode, count_slider)
    return page


def _update_controls(choice: Choice) -> tuple[Any, Any]:
    """Returns updates of the page's controls for a newly selected method.

    Args:
        choice: the method.

    Returns:
        The update of the radio buttons, which list the method's modes, and the update of the
        slider, which is hidden if the policy decides the number of tokens.
    """
    first_mode = choice.modes[0]
    mode_update = gr.update(choices=choice.modes, value=first_mode)
    return mode_update, gr.update(visible=first_mode != BY_ITSELF)


def _answer(
    model: VLM,
    choices: Mapping[str, Choice],
    image: Image.Image | None,
    question: str,
    method: str,
    mode: str,
    count: int,
) -> tuple[dict, dict, Image.Image]:
    """Answers a question from all tokens and from the kept tokens, for Gradio.

    Args:
        model: the model that answers.
        choices: pruning methods by their names on the page.
        image: the uploaded image, or None.
        question: text of the question.
        method: a key of `choices`.
        mode: how the number of kept tokens is decided; one of the method's modes.
        count: number of tokens to keep; the mode may ignore it.

    Returns:
        Updates of the text boxes with both answers, and the picture of the kept tokens.

    Raises:
        gr.Error: shows a user error on the page.
    """
    if image is None:
        raise gr.Error("no image is given: upload one", print_exception=False)
    try:
        pruner = choices[method].build(mode, count)
        comparison = compare(model, pruner, image, question)
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from error
    full = _update_answer("all", *comparison.full)
    return full, _update_answer("kept", *comparison.pruned), comparison.picture


def _update_answer(title: str, answer: Answer, times: Times) -> dict:
    """Returns the update of a text box: the answer, and a label with token counts and times."""
    label = f"{title} tokens: {answer.kept} of {answer.visual_tokens}"
    return gr.update(value=answer.text, label=label, info=str(times))


def serve(page: gr.Blocks, host: str, port: int) -> None:
    """Serves a page until the process is interrupted."""
    page.queue(default_concurrency_limit=1)  # The devices run one program at a time.
    page.launch(server_name=host, server_port=port, share=False)
