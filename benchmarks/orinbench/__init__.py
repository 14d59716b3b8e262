"""The benches of tinygrad-orin, and what makes their figures worth believing.

`measure` times models, kernels and machines, `serve` servers. `check` judges numbers, `judge`
samples and runs, and keeps a history. `show` draws tables and reports. Models are in `model`,
`shapes` and `synth`.
"""
