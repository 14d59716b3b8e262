"""The benches of tinygrad-orin, and what makes their figures worth believing.

`benchmark` runs lanes and cases in rounds and is llama-bench; `suite`, `compare` and `serve_bench`
measure by it or beside it. `check` judges numbers, `samples` figures, `board` the machine.
`export` has the records and their forms, `history` keeps them, `report` draws them. `profiling`,
`sass` and `device_check` look closer. Models are in `model`, `shapes` and `synth`.
"""
