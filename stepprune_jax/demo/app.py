"""The page, built with Gradio."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr
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
    """Builds the page for a model by its name; the first choice and example are preselected."""
    most = model.config.max_image_tokens
    tokens = f"at most {most:,}" if model.config.sizes_vary else f"{most:,}"
    first = next(iter(choices.values()))
    shown, asked = examples[0] if examples else (None, "")
    with gr.Blocks(title="StepPrune") as page:
        gr.Markdown(
            f"# StepPrune\n{name} answers from all visual tokens ({tokens}), and from those that "
            "are kept."
        )
        with gr.Row():
            with gr.Column():
                image = gr.Image(shown, type="pil", image_mode=None, label="image", height=320)
                question = gr.Textbox(asked, label="question")
                method = gr.Dropdown(list(choices), value=next(iter(choices)), label="method")
                mode = gr.Radio(first.modes, value=first.modes[0], label="tokens to keep")
                count = gr.Slider(
                    1,
                    most,
                    value=max(1, most // 9),
                    step=1,
                    label="how many",
                    visible=first.modes[0] != BY_ITSELF,
                )
                ask = gr.Button("Ask", variant="primary")
            with gr.Column():
                full = gr.Textbox(label="all tokens", elem_id="full")
                pruned = gr.Textbox(label="kept tokens", elem_id="pruned")
                picture = gr.Image(label="kept tokens", format="png", elem_id="picture")
        if examples:
            gr.Examples([[*example] for example in examples], [image, question])
        inputs, outputs = [image, question, method, mode, count], [full, pruned, picture]
        answer = _handler(model, choices)
        gr.on([ask.click, question.submit, count.release], answer, inputs, outputs)
        method.change(lambda name: _modes(choices[name]), method, [mode, count])
        mode.change(lambda mode: gr.update(visible=mode != BY_ITSELF), mode, count)
    return page


def _modes(choice: Choice) -> tuple[Any, Any]:
    """Updates the controls for a method: the modes, and whether a number is needed."""
    first = choice.modes[0]
    return gr.update(choices=choice.modes, value=first), gr.update(visible=first != BY_ITSELF)


def _handler(
    model: VLM, choices: Mapping[str, Choice]
) -> Callable[[Image.Image | None, str, str, str, int], tuple[dict, dict, Image.Image]]:
    """Returns the button's callback, which shows user errors on the page."""

    def answer(
        image: Image.Image | None, question: str, method: str, mode: str, count: int
    ) -> tuple[dict, dict, Image.Image]:
        if image is None:
            raise gr.Error("give an image", print_exception=False)
        try:
            chosen = choices[method].build(mode, count)
            shown = compare(model, chosen, image, question)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from error
        return _update("all", *shown.full), _update("kept", *shown.pruned), shown.picture

    return answer


def _update(which: str, answer: Answer, times: Times) -> dict:
    """Updates the text of an answer, its number of tokens, and its times."""
    label = f"{which} tokens: {answer.kept} of {answer.visual_tokens}"
    return gr.update(value=answer.text, label=label, info=str(times))


def serve(page: gr.Blocks, host: str, port: int) -> None:
    """Serves a page until it is interrupted."""
    page.queue(default_concurrency_limit=1)  # one program at a time on the devices
    page.launch(server_name=host, server_port=port, share=False)
