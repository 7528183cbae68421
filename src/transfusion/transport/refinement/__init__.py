"""Refinement: gradient steps after the transport, with the fine-tune of A as the teacher and without data.

Three ways share the steps of `descent`: `teaching` asks the fine-tune at every step; of language models
(`language`: `asking`, `asked`, `learning`) and of adapters for denoisers (`denoising`, `denoised`), the
fine-tune is asked before.

`inputs` makes the inputs, `answers` compares outputs with the teacher's and with B's, `teaching` holds both
together. `training` chooses a start, fits its `head` and takes the steps of `descent`. `refine` builds the
students and returns the refined output.
"""
