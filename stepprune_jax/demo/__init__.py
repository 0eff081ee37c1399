"""A browser page that answers questions about an image from all tokens and from kept ones.

`compare` answers, `panel` draws, `app` is the page around them; only the last one needs Gradio.
"""
