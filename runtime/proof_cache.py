"""Proofs of MoE blocks in the cache folder, one small file each."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile

from moe_compiler.errors import CacheError
from moe_compiler.runtime.build import cache_root

MAX_BYTES = 64 << 10


class ProofFiles:
    """A `ProofStore` in `<cache>/proofs`; a file that cannot be read or written counts as missing.

    Args:
        salt: versions that a proof depends on; part of every file name.
    """

    def __init__(self, salt: str) -> None:
        self._salt = salt

    def _path(self, key: str) -> str:
        digest = hashlib.sha256(f"{self._salt} {key}".encode()).hexdigest()
        return os.path.join(cache_root(), "proofs", f"{digest}.json")

    def load(self, key: str) -> str | None:
        """The text saved under this key, or None."""
        try:
            with open(self._path(key), encoding="utf-8") as file:
                return file.read(MAX_BYTES)
        except (OSError, UnicodeDecodeError, CacheError):
            return None

    def save(self, key: str, text: str) -> None:
        """Save a text under this key; readers see all of it or nothing."""
        with contextlib.suppress(OSError, CacheError):
            path = self._path(key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
