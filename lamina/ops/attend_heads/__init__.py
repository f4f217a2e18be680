"""Attention of H query heads over K key/value heads (H a multiple of K), or over latents that all heads share.

attend_heads(q, own, past, case, sequences, selected)   [T, H, Dv] fp32: one softmax over what each query sees, and a sink.
              Where `case.top_k` is given, a query that sees more rows of a log reads the `selected` ones alone.
HeadsCase     what is the same for all queries of a layer.
Past          where the layer's rows lie: a log, a ring, or the pages of a large window.
store_rows(own, past, sequences)  keeps the step's rows (`keep_rows`: in any store).   `attend_heads` reads a log's rows from
              the log, so they are stored before; a ring's and a large window's from `own`, so they are stored after.
"""

from lamina.ops.attend_heads.ref import HeadsCase, Past, attend_heads, keep_rows, softcapped, store_rows

__all__ = ["HeadsCase", "Past", "attend_heads", "keep_rows", "softcapped", "store_rows"]
