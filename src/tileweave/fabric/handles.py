"""Passing file descriptors between the processes of a group, over private Unix sockets.

A memory handle is a file descriptor, which only a Unix socket can carry to another process. The sockets live in the
abstract namespace: they need no directory that all containers share, and vanish with their process. Whoever runs on
the machine can see and reach them, so each connection is checked twice: the peer's user must be ours (SO_PEERCRED), and
it must know a secret that went through the process group.
"""

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

Gather = Callable[[Any], list[Any]]  # `Fabric.gather_values`


def exchange_descriptors(
    fd: int, rank: int, world: int, gather: Gather, timeout: float, givers: Sequence[int] | None = None
) -> dict[int, int]:
    """Give `fd` to every other rank and return theirs, {rank: descriptor}; the caller closes them.

    `givers`: the ranks that have one to give, the same on all ranks; None: all.

    Collective. RuntimeError on every rank if it fails on one, for instance when a peer does not come in `timeout`
    seconds; no descriptor is left open then.
    """
    name, words = gather([f"tileweave-{secrets.token_hex(16)}", secrets.token_hex(16)])[0]
    secret = bytes.fromhex(words)
    sources = set(range(world) if givers is None else givers)
    received: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(timeout)
        error = None
        try:
            server.bind(_address(name, rank))
            server.listen(world)
        except OSError as failure:
            error = f"rank {rank} cannot listen on a Unix socket: {failure}"
        agree(gather(error))
        peers: list[socket.socket] = []
        try:
            for peer in range(world):
                if peer != rank and rank in sources:
                    peers.append(_send(name, secret, rank, peer, fd, timeout))
            while len(received) < len(sources - {rank}):
                peer, theirs = _receive(server, secret, world, timeout)
                if peer in received or peer not in sources - {rank}:
                    os.close(theirs)
                    raise RuntimeError(f"rank {peer} came uninvited")
                received[peer] = theirs
        except (OSError, RuntimeError) as failure:
            error = f"rank {rank} could not exchange memory handles: {failure}"
        try:
            agree(gather(error))
        except BaseException:
            for theirs in received.values():
                os.close(theirs)
            raise
        finally:
            for connection in peers:  # open until all have read what was sent
                connection.close()
    return received


def agree(errors: list[str | None]) -> None:
    """Raise on every rank what went wrong on some."""
    found = [error for error in errors if error]
    if found:
        raise RuntimeError("; ".join(found))


def _address(name: str, rank: int) -> str:
    return f"\0{name}-{rank}"


def _send(name: str, secret: bytes, rank: int, peer: int, fd: int, timeout: float) -> socket.socket:
    """Connect to a peer and send it the descriptor. The connection stays open until the peer must have read it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(_address(name, peer))
        _check_user(connection)
        socket.send_fds(connection, [secret + struct.pack("<I", rank)], [fd])
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(server: socket.socket, secret: bytes, world: int, timeout: float) -> tuple[int, int]:
    """Accept one peer: its rank and its descriptor. Strangers are turned away."""
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(timeout)
            try:
                _check_user(connection)
            except RuntimeError:
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, len(secret) + 4, 4)
            peer = struct.unpack("<I", message[-4:])[0] if len(message) == len(secret) + 4 else world
            if len(descriptors) == 1 and peer < world and secrets.compare_digest(message[:-4], secret):
                return peer, descriptors[0]
            for stray in descriptors:
                os.close(stray)


def _check_user(connection: socket.socket) -> None:
    """Raise RuntimeError if the process at the other end belongs to another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    if user != os.geteuid():
        raise RuntimeError(f"the socket's other end belongs to user {user}, not to {os.geteuid()}")
