"""A page in the browser: a question about an image, answered from all tokens and from those kept.

`compare` answers, `panel` draws, `app` is the page around them; only the last one needs Gradio.
"""
