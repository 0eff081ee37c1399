"""A server with OpenAI's chat interface that prunes visual tokens.

`fields` checks the fields of a request, `images` and `videos` read its images and videos, and
`messages` parses all of them into a `ChatRequest`. `batching` runs requests together in one thread.
`local` answers with the model of this process, and `engine` sends rows of embeddings to a server
such as vLLM, in the file format that `tensors` writes. `app` serves HTTP, and `warm_up` compiles
programs before the first request.
"""
