"""What `side_by_side.py` is made of: a coordinator, and a worker for each side.

`worker`, `ours` and `theirs` run in other processes and environments. `worker` imports torch and
transformers only, `theirs` kvpress and not kvcompress, `ours` the reverse.
"""
