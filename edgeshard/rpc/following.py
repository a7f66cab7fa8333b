"""TLS of the standard library for listeners that do not speak gRPC."""

from __future__ import annotations

import ssl
from contextlib import suppress

from edgeshard.domain.errors import EdgeShardError
from edgeshard.rpc.tls import TlsFiles


class FollowingContext:
    """A server's side of TLS, in `context`, that uses renewed files at the next handshake.

    By default every caller must show a certificate of the same authority. With `ssl.CERT_OPTIONAL`
    in `verify` a caller may show none. Raises as `TlsFiles.check`.
    """

    def __init__(self, files: TlsFiles, *, verify: ssl.VerifyMode = ssl.CERT_REQUIRED) -> None:
        files.check()
        self._files = files
        self._verify = verify
        self._version = files.version()
        self.context = self._newest = self._made()
        self.context.sni_callback = self._on_handshake

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE+AESGCM")
        context.verify_mode = self._verify
        context.load_verify_locations(self._files.ca)
        context.load_cert_chain(self._files.cert, self._files.key)
        return context

    def _on_handshake(
        self, stream: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        # they are being written: the next handshake sees them whole
        with suppress(OSError, EdgeShardError):
            version = self._files.version()
            if version != self._version:
                self._newest, self._version = self._made(), version
        stream.context = self._newest
