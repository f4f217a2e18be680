"""Attention of many heads over latents that they share, in absorbed form: what the CPU does as `attend_heads`, for a GPU.

attend_latent(q, q_turned, past, case, sequences, selected)   [T, H * rank] fp32; over all rows, or those that an index selects.
"""

from lamina.ops.attend_latent.ref import attend_latent

__all__ = ["attend_latent"]
