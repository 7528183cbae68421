"""Refinement: gradient steps after the transport, with the fine-tune of A as the teacher and without data.

`inputs` makes the inputs, `answers` compares outputs with the teacher's and with B's, `teaching` holds both
together. `training` chooses a start, fits its `head` and takes the steps of `descent`. `refine` builds the
students and returns the refined output.
"""
