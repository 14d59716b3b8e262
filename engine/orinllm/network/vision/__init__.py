"""Pictures: how each family prepares them, what its encoder computes, and their rows in a prompt.

A picture is so many rows of a prompt, each as wide as a token's embedding. Among a prompt's tokens
a row has a number below 0 (pictures.py), so that pages, queues and caches know nothing of pictures.
"""
