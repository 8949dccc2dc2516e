"""Predictions held against published measurements of real training runs: `python -m benchmarks.accuracy`.

`reader` turns a record into a Run, with what it leaves unsaid filled in from `published/assumptions.toml`; `score` predicts and
pairs figures; `statistics` summarises them; `text` and `plot` show them. No constant is fitted here: that is `benchmarks.profiles`, with `evidence`.
"""
