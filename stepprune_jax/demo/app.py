"""The page, built with Gradio."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr
from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.demo.compare import BY_ITSELF, Choice, compare
from stepprune_jax.demo.examples import Example
from stepprune_jax.demo.panel import CSS, draw_answers, draw_kept


def build(
    model: VLM, name: str, choices: Mapping[str, Choice], examples: Sequence[Example]
) -> gr.Blocks:
    """Builds the page for a model by its name; the first choice is preselected."""
    most = model.config.max_image_tokens
    tokens = f"at most {most:,}" if model.config.sizes_vary else f"{most:,}"
    first = next(iter(choices.values()))
    with gr.Blocks(title="StepPrune") as page:
        gr.Markdown(
            f"# StepPrune\n{name} answers from all visual tokens ({tokens}), and from those that "
            "are kept. Hover over a kept patch to see at which step it was selected."
        )
        with gr.Row():
            with gr.Column():
                image = gr.Image(
                    type="pil",
                    label="image",
                    height=320,
                    value=examples[0].image if examples else None,
                )
                question = gr.Textbox(
                    label="question", value=examples[0].question if examples else ""
                )
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
                answers, kept = gr.HTML(), gr.HTML()
        if examples:
            gr.Examples([[e.image, e.question] for e in examples], [image, question])
        inputs, outputs = [image, question, method, mode, count], [answers, kept]
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
) -> Callable[[Image.Image | None, str, str, str, int], tuple[str, str]]:
    """Returns the button's callback, which shows user errors on the page."""

    def answer(
        image: Image.Image | None, question: str, method: str, mode: str, count: int
    ) -> tuple[str, str]:
        if image is None:
            raise gr.Error("give an image", print_exception=False)
        try:
            chosen = choices[method].method(mode, count)
            shown = compare(model, chosen, image, question)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from error
        return draw_answers(shown), draw_kept(model, shown)

    return answer


def serve(page: gr.Blocks, host: str, port: int) -> None:
    """Serves a page until it is interrupted."""
    page.queue(default_concurrency_limit=1)  # one program at a time on the devices
    page.launch(server_name=host, server_port=port, css=CSS, share=False)
