"""What Triton compiles, watched. Compiled kernels lie in Triton's own cache on disk under a key of their source, their constants,
the GPU's compute capability and the versions of Triton and its assembler: nothing has to be made invalid here."""

from collections.abc import Iterator
from contextlib import contextmanager

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

#: kernel, seconds, whether the disk had it
Compilation = tuple[str, float, bool]


@contextmanager
def watch() -> Iterator[list[Compilation]]:
    """The list grows by whatever any thread compiles, or loads from the disk for the first time in this process."""
    seen: list[Compilation] = []
    before = triton.knobs.compilation.listener

    def listen(*, src, metadata, metadata_group, times, cache_hit):  # type: ignore[no-untyped-def]
        seen.append((str(metadata.get("name", src.name)), times.total / 1e6, bool(cache_hit)))
        if before is not None:
            before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)

    triton.knobs.compilation.listener = listen
    try:
        yield seen
    finally:
        triton.knobs.compilation.listener = before


def cache_directory() -> str:
    """Where compiled kernels are kept: TRITON_CACHE_DIR, by default .triton/cache in the home directory."""
    return str(triton.knobs.cache.dir)
