"""A server with OpenAI's interface that prunes visual tokens, in front of an engine or by itself.

`messages` reads a request, `batching` runs requests together in one thread, `engine` sends the rows
that enter the language model to a server such as vLLM, `local` answers without one, and `app` is
the interface around them. `tensors` and `metrics` write two formats.
"""
