"""Whose request it is comes from the certificate a caller showed, and travels to the head."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from edgeshard_coordinator.control.inference_service import client_of

from edgeshard.domain.generation import Generation
from edgeshard.domain.head import StartRequest
from edgeshard.domain.ids import RequestId
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.head import head_command_from_wire, head_command_to_wire

METHOD = "/tests.Identity/Name"


class Identity(grpc.GenericRpcHandler):
    """Answers with what it takes the caller for."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        async def name(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return client_of(context).encode()

        return grpc.unary_unary_rpc_method_handler(name) if details.method == METHOD else None


def certified(directory: Path, name: str) -> TlsFiles:
    """A certificate of 127.0.0.1 that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    files = TlsFiles(directory / "cert.pem", directory / "cert.pem", directory / "key.pem")
    files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


@pytest.mark.parametrize("name", ["tenant-a", ""])
async def test_a_caller_is_who_its_certificate_says(tmp_path: Path, name: str) -> None:
    tls = certified(tmp_path, name) if name else None
    server = Server("127.0.0.1:0", tls)
    server.grpc.add_generic_rpc_handlers((Identity(),))
    address = await server.start()
    try:
        async with open_channel(address, tls) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
            assert (await call(b"", timeout=20)).decode() == name
    finally:
        await server.stop(0)


def test_the_head_hears_whose_request_it_is() -> None:
    start = StartRequest(RequestId("r"), Generation((1,)), client="tenant-a")
    assert head_command_from_wire(head_command_to_wire(start)) == start
