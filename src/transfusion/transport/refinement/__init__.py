"""Refinement: gradient steps after the transport, with the fine-tune of A as the teacher and without data.

`inputs` makes the inputs, `answers` compares outputs with the teacher's and with B's, `training` takes the
steps, and `refine` builds the students and returns the refined output.
"""
