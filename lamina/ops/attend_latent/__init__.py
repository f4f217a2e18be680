"""Attention of many heads over latents that they share, in absorbed form: what the CPU does as `attend_heads`, for a GPU.

attend_latent(q, q_turned, past, case, sequences)   [T, H * rank] fp32.
"""

from lamina.ops.attend_latent.ref import attend_latent

__all__ = ["attend_latent"]
