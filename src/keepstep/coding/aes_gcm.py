"""AES-256-GCM (NIST SP 800-38D): what crosses between nodes, encrypted. As the `cryptography`
package has it from OpenSSL: 9 GiB/s on a core that has AES and carry-less multiplication, and
without the GIL where the bytes are many.

Whoever seals twice with one nonce under one key gives both away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import (
        AEADDecryptionContext,
        AEADEncryptionContext,
    )


class RunningSeal:
    """Of bytes that come piece by piece."""

    def __init__(self, context: AEADEncryptionContext) -> None:
        self._context = context

    def update(self, data: memoryview, into: memoryview) -> None:
        """`into`: as long as `data`, and not the same memory."""
        self._context.update_into(data, into)

    def tag(self) -> bytes:
        """16 bytes. Once, at the end."""
        self._context.finalize()
        return self._context.tag


class RunningUnseal:
    """The other way. What comes out is not to be believed before `proves`."""

    def __init__(self, context: AEADDecryptionContext) -> None:
        self._context = context

    def update(self, data: memoryview, into: memoryview) -> None:
        """`into`: as long as `data`, and not the same memory."""
        self._context.update_into(data, into)

    def proves(self, tag: bytes) -> bool:
        """Whether that is the tag of what came. Once, at the end."""
        from cryptography.exceptions import InvalidTag

        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


class AesGcm:
    """Under one key of 32 bytes; nonces have 12. `beside` is proven along."""

    def __init__(self, key: bytes) -> None:
        """Raises ImportError without `cryptography`."""
        from cryptography.hazmat.primitives.ciphers import algorithms
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._whole = AESGCM(key)
        self._key = algorithms.AES(key)

    def seal(self, nonce: bytes, data: bytes, beside: bytes) -> bytes:
        """Encrypted, with a tag of 16 bytes behind it."""
        return self._whole.encrypt(nonce, data, beside)

    def unseal(self, nonce: bytes, sealed: bytes, beside: bytes) -> bytes | None:
        """None: it is not what was sealed."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._whole.decrypt(nonce, sealed, beside)
        except InvalidTag:
            return None

    def begin_sealing(self, nonce: bytes, beside: bytes) -> RunningSeal:
        """Of bytes that come piece by piece."""
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        context = Cipher(self._key, modes.GCM(nonce)).encryptor()
        context.authenticate_additional_data(beside)
        return RunningSeal(context)

    def begin_unsealing(self, nonce: bytes, beside: bytes) -> RunningUnseal:
        """Of bytes that come piece by piece."""
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        context = Cipher(self._key, modes.GCM(nonce)).decryptor()
        context.authenticate_additional_data(beside)
        return RunningUnseal(context)
