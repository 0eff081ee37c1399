"""A browser page that answers questions about an image from all tokens and from kept ones.

`compare` answers and draws, `app` is the page around it; only the latter needs Gradio.
"""
