"""The memory plan: what `lamina plan` says of a model before anything is loaded. Needs a config.json, no GPU and no torch.

`report.make_plan` computes it, `source` finds the config and the weights, `table` prints it, `diff` compares two.
"""
