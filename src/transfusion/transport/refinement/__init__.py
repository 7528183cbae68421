"""Refinement: gradient steps after the transport, with the fine-tune of A as the teacher and without data.

`refinement_inputs` makes the inputs, `output_targets` compares outputs with the teacher's, `kept_features`
compares them with B's, `refinement_steps` takes the steps, and `refined_output` writes the result.
"""
