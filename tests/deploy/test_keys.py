"""Keys and certificates: valid, private from the first moment, never overwritten."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="keys need the extra 'flower'")

from cryptography import x509

from coterie._core.errors import SettingError
from coterie.deploy import keys
from coterie.deploy.flower_node import Link, Refused


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.fixture
def authority(tmp_path):
    keys.make_authority(tmp_path / "ca", "test")
    return tmp_path / "ca"


def test_the_authority_signs_the_server_for_its_hosts(authority, tmp_path):
    keys.make_server_certificate(authority, tmp_path / "server", ["example.org", "127.0.0.1"])
    ca, server = certificate(authority / "ca.crt"), certificate(tmp_path / "server" / "server.crt")
    server.verify_directly_issued_by(ca)
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["example.org"]
    assert str(hosts.get_values_for_type(x509.IPAddress)[0]) == "127.0.0.1"
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_certificate_may_be_made_to_have_expired(authority, tmp_path):
    keys.make_server_certificate(authority, tmp_path / "old", ["localhost"], days=-1)
    assert certificate(tmp_path / "old" / "server.crt").not_valid_after_utc < datetime.datetime.now(
        datetime.UTC
    )


@pytest.mark.skipif(sys.platform == "win32", reason="access lists take the place of modes")
def test_secrets_are_for_their_owner_only(authority, tmp_path):
    keys.make_node_key(tmp_path / "a" / "b", "north")
    assert (tmp_path / "a" / "b" / "node.key").stat().st_mode & 0o777 == 0o600
    assert (authority / "ca.key").stat().st_mode & 0o777 == 0o600
    for folder in (authority, tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "a" / "b" / "node.key").chmod(0o640)
    with pytest.raises(SettingError, match="chmod 600"):
        keys.load_node_key(tmp_path / "a" / "b" / "node.key")


def test_a_key_is_never_overwritten(tmp_path):
    keys.make_node_key(tmp_path, "north")
    before = (tmp_path / "node.key").read_bytes()
    with pytest.raises(SettingError, match="never overwritten"):
        keys.make_node_key(tmp_path, "north")
    assert (tmp_path / "node.key").read_bytes() == before


def test_the_two_halves_belong_together(tmp_path):
    from cryptography.hazmat.primitives import serialization

    keys.make_node_key(tmp_path, "north")
    _, public = keys.load_node_key(tmp_path / "node.key")
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    assert public.public_bytes(*form) == keys.public_bytes(tmp_path / "node.pub")


@pytest.mark.parametrize("content", [b"", b"ssh-rsa nothing", b"-----BEGIN OPENSSH PRIVATE KEY-----\nx\n"])
def test_what_is_no_key_is_said_to_be_none(tmp_path, content):
    keys.write_private(tmp_path / "node.key", content)
    with pytest.raises(SettingError, match=r"node\.key is not a private key"):
        keys.load_node_key(tmp_path / "node.key")
    (tmp_path / "node.pub").write_bytes(content)
    with pytest.raises(SettingError, match=r"node\.pub is not a public key"):
        keys.public_bytes(tmp_path / "node.pub")


@pytest.mark.parametrize(
    ("authority", "days", "says"),
    [("ca", -1.0, "has expired"), ("other", 10.0, "was not issued by the authority")],
)
def test_a_node_with_an_expired_or_foreign_certificate_says_so_and_ends(
    tmp_path: Path, authority: str, days: float, says: str
) -> None:
    """It does not wait for a server, which would close the connection without a word."""
    pytest.importorskip("flwr", reason="a node needs the extra 'flower'")
    for name in ("ca", "other"):
        keys.make_authority(tmp_path / name, name)
    keys.make_node_key(tmp_path / "n0", "n0")
    public = keys.load_node_key(tmp_path / "n0" / "node.key")[1]
    keys.certify(tmp_path / authority, public, "n0", tmp_path / "n0", days=days)
    link = Link("127.0.0.1:9", tmp_path / "n0" / "node.key", tmp_path / "ca" / "ca.crt", pytest.fail)
    with pytest.raises(SettingError, match=rf"node\.crt {says}.*join .*--renew"):
        link.serve(lambda message: message)


def test_a_node_that_a_server_refuses_says_so_and_ends(tmp_path: Path) -> None:
    """With TLS 1.3 the server's refusal comes after the handshake, as an error in reading."""
    pytest.importorskip("flwr", reason="a node needs the extra 'flower'")
    for name in ("ca", "other"):
        keys.make_authority(tmp_path / name, name)
    keys.make_server_certificate(tmp_path / "ca", tmp_path / "server", ["127.0.0.1"])
    keys.make_node_key(tmp_path / "n0", "n0")
    public = keys.load_node_key(tmp_path / "n0" / "node.key")[1]
    keys.certify(tmp_path / "ca", public, "n0", tmp_path / "n0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server" / "server.crt", tmp_path / "server" / "server.key")
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(tmp_path / "other" / "ca.crt")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    with connection, contextlib.suppress(ssl.SSLError):
                        context.wrap_socket(connection, server_side=True)

        threading.Thread(target=listen, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        link = Link(address, tmp_path / "n0" / "node.key", tmp_path / "ca" / "ca.crt", lambda text: None)
        with pytest.raises(
            Refused, match=r"refused this node's certificate, which has expired.*join .*--renew"
        ):
            link.serve(lambda message: message)
        listener.shutdown(socket.SHUT_RDWR)
