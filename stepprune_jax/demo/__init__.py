"""A browser page that answers questions about an image from all tokens and from kept tokens.

`compare` answers and draws without Gradio, and `app` builds the page with Gradio.
"""
